"""Makes the import of numba-cuda 0.30 possible with NumPy 2.5.

numba-cuda reads the name ``np.row_stack`` when it is imported. NumPy 2.5 has removed this name. The
import of this module therefore defines the name, imports numba-cuda, and removes the name again.
"""

import numpy as np


def _row_stack(arrays):
    """Return the rows stacked, as ``np.row_stack`` did. No kernel calls this function."""
    return np.vstack(arrays)


if "row_stack" not in vars(np):
    vars(np)["row_stack"] = _row_stack
    try:
        import numba.cuda.np.arrayobj  # noqa: F401
    finally:
        del vars(np)["row_stack"]
