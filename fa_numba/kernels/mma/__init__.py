"""The kernels on tensor cores (``mma.sync``), one algorithm per module."""

from fa_numba.kernels.mma import (
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    rows,
    standard,
    standard_backward,
    standard_e4m3,
)

__all__ = [
    "fa1_backward",
    "fa1_forward",
    "fa2_backward",
    "fa2_forward",
    "rows",
    "standard",
    "standard_backward",
    "standard_e4m3",
]
