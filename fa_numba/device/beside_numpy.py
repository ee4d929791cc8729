"""numba-cuda 0.30 beside NumPy 2.5: its import names ``np.row_stack``, which is gone there."""

import numpy as np


def _row_stack(arrays):
    """What NumPy had under this name; no kernel calls it."""
    return np.vstack(arrays)


if "row_stack" not in vars(np):
    vars(np)["row_stack"] = _row_stack
    try:
        import numba.cuda.np.arrayobj  # noqa: F401
    finally:
        del vars(np)["row_stack"]
