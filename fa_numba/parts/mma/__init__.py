"""The parts of the kernels on tensor cores (``mma.sync``), one topic per module."""

from fa_numba.parts import scores, values, visits
from fa_numba.parts.fragments import pairs
from fa_numba.parts.mma import (
    epilogue,
    fa1_state,
    gradients,
    grid,
    load,
    products,
    row_tiles,
    softmax,
)

__all__ = [
    "epilogue",
    "fa1_state",
    "gradients",
    "grid",
    "load",
    "pairs",
    "products",
    "row_tiles",
    "scores",
    "softmax",
    "values",
    "visits",
]
