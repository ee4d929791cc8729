"""The parts of the kernels on CUDA cores, one topic per module."""

from fa_numba.parts import scores, softmax, values, visits
from fa_numba.parts.simt import epilogue, fa1_state, gradients, grid, load, products

__all__ = [
    "epilogue",
    "fa1_state",
    "gradients",
    "grid",
    "load",
    "products",
    "scores",
    "softmax",
    "values",
    "visits",
]
