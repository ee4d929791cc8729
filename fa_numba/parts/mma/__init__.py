"""The parts of the kernels on tensor cores, and all of them by name: ``parts(spec)``."""

from functools import cache

from fa_numba.parts import dropout, gradients, heads, layout, rows, softmax, visits
from fa_numba.parts.mma import (
    backward,
    combine,
    dq,
    fragments,
    pairs,
    products,
    state,
    stores,
    tile_load,
)
from fa_numba.parts.namespace import Parts
from fa_numba.tiling import MmaBackwardSpec

_MODULES = (
    *(layout, heads, visits, tile_load, fragments, products, softmax, dropout),
    *(rows, stores, pairs, combine, state, dq, gradients),
)


@cache
def parts(spec):
    """The device functions of a kernel for ``spec``: ``p.NAME`` is ``make_NAME(spec)``, in a
    backward kernel that of ``backward.py`` where there is one.
    """
    return Parts(spec, (backward, *_MODULES) if isinstance(spec, MmaBackwardSpec) else _MODULES)
