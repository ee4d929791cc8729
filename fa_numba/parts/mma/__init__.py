"""The parts of the kernels on tensor cores, and all of them by name: ``parts(spec)``."""

from functools import cache
from types import ModuleType

from fa_numba.parts import bias, dropout, gradients, heads, layout, rows, softmax, splits, visits
from fa_numba.parts.mma import (
    backward,
    combine,
    dq,
    fragments,
    heads_in_tiles,
    pairs,
    products,
    state,
    stores,
    tile_load,
)
from fa_numba.parts.namespace import Parts
from fa_numba.tiling import MmaBackwardSpec

_MODULES = (
    *(layout, heads, visits, tile_load, fragments, products, softmax, bias, dropout),
    *(rows, splits, stores, pairs, combine, state, dq, gradients),
)


@cache
def parts(spec):
    """The device functions of a kernel for ``spec``: ``p.NAME`` is ``make_NAME(spec)``, in a
    backward kernel that of ``backward.py`` where there is one, where heads share a tile that of
    ``heads_in_tiles.py``.
    """
    own: tuple[ModuleType, ...] = (backward,) if isinstance(spec, MmaBackwardSpec) else ()
    if getattr(spec, "tile_heads", 1) > 1:
        own = (heads_in_tiles,)
    return Parts(spec, (*own, *_MODULES))
