"""The kernels on CUDA cores, one algorithm per module."""

from fa_numba.kernels.simt import (
    append,
    fa1_backward,
    fa1_forward,
    fa2_backward,
    fa2_forward,
    rows,
    softmax,
    standard,
    standard_backward,
)

__all__ = [
    "append",
    "fa1_backward",
    "fa1_forward",
    "fa2_backward",
    "fa2_forward",
    "rows",
    "softmax",
    "standard",
    "standard_backward",
]
