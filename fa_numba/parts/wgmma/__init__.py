"""The parts of the kernels on Hopper's tensor cores, and all of them by name: ``parts(spec)``."""

from functools import cache

from fa_numba.parts import heads, layout, rows, softmax, visits
from fa_numba.parts.namespace import Parts
from fa_numba.parts.wgmma import products, schedule, stages, stores, tile_load, turns

_MODULES = (
    *(products, schedule, stages, stores, tile_load, turns),
    *(layout, heads, visits, softmax, rows),
)


@cache
def parts(spec):
    """The device functions of a kernel for ``spec``: ``p.NAME`` is ``make_NAME(spec)``."""
    return Parts(spec, _MODULES)
