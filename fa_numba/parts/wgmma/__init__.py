"""The parts of the kernels on Hopper's tensor cores, and all of them by name: ``parts(spec)``."""

from functools import cache
from types import ModuleType

from fa_numba.parts import bias, gradients, heads, layout, rows, softmax, splits, visits
from fa_numba.parts.namespace import Parts
from fa_numba.parts.wgmma import (
    backward,
    passes,
    products,
    schedule,
    stages,
    state,
    stores,
    sweep,
    tile_load,
    told,
    turns,
    wide,
)
from fa_numba.tiling import WgmmaBackwardSpec, WgmmaFa1Spec, WgmmaSweepSpec

_MODULES = (
    *(products, schedule, stages, stores, tile_load, turns),
    *(layout, heads, visits, softmax, bias, rows, splits, gradients),
)


@cache
def parts(spec):
    """The device functions of a kernel for ``spec``: ``p.NAME`` is ``make_NAME(spec)``, in a
    backward kernel that of ``backward.py`` where there is one, before it in FlashAttention-1's that
    of ``passes.py``, in FlashAttention-2's that of ``told.py``, and beyond d = 128 that of
    ``wide.py``; forward that of ``state.py``; in a second sweep that of ``sweep.py``.
    """
    own: tuple[ModuleType, ...] = ()
    if isinstance(spec, WgmmaBackwardSpec):
        before = (passes,) if spec.row_tiles == 3 else (wide, told) if spec.wide else (told,)
        own = (*before, backward)
    elif isinstance(spec, WgmmaSweepSpec):
        own = (sweep,)
    elif isinstance(spec, WgmmaFa1Spec):
        own = (state,)
    return Parts(spec, (*own, *_MODULES))
