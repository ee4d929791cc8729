"""The parts of the kernels on CUDA cores, and all of them by name: ``parts(spec)``."""

from functools import cache

from fa_numba.parts import bias, dropout, gradients, heads, rows, softmax, splits, visits
from fa_numba.parts.namespace import Parts
from fa_numba.parts.simt import products, state, stores, threads, tile_load

_MODULES = (
    *(threads, heads, visits, tile_load, products, softmax, bias, dropout),
    *(rows, splits, stores, state, gradients),
)


@cache
def parts(spec):
    """The device functions of a kernel for ``spec``: ``p.NAME`` is ``make_NAME(spec)``."""
    return Parts(spec, _MODULES)
