"""Scales of blocks of rows of V in e4m3.

A product P V adds numbers of all rows of V. Kernels therefore keep O in units of a scale: O in the
registers, times ``unit``, is the sum so far. The unit of a product is the scale of the block of V
to which the tile belongs. All columns of a tile are in one block.

If V has no scales of blocks, these functions do nothing, and ``unit`` is 1.
"""

from fa_numba.device import float32, uint32
from fa_numba.dtypes import SCALED_ROWS
from fa_numba.intrinsics.arithmetic import ONE
from fa_numba.parts.namespace import part


@part
def make_value_unit(spec):
    """Make ``value_unit(tile)``, which returns the unit of the product P V of a tile."""
    blocks, ROWS = spec.features.value_block_scales, SCALED_ROWS

    def value_unit(tile):
        unit = ONE
        if blocks:
            head = tile.head
            unit = head.options.v_scale[head.b, head.hk, uint32(tile.j0 // uint32(ROWS))]
        return unit

    return value_unit


@part
def make_next_unit(spec):
    """Make ``next_unit(unit, tile)``, which returns the unit of the product P V of a tile, and the
    factor by which O in units of ``unit`` must be multiplied before this product is added.
    """
    blocks, value_unit = spec.features.value_block_scales, make_value_unit(spec)

    def next_unit(unit, tile):
        own, ratio = ONE, ONE
        if blocks:
            own = value_unit(tile)
            ratio = float32(unit / own)
        return own, ratio

    return next_unit


@part
def make_enter_unit(spec):
    """Make ``enter_unit(rf, unit)``, which divides the factors of the rows of O in rf by ``unit``.

    FA-1 multiplies O by these factors when it reads O from global memory.
    """
    TM, blocks = spec.TM, spec.features.value_block_scales

    def enter_unit(rf, unit):
        if blocks:
            inverse = float32(ONE / unit)
            for i in range(TM):
                rf[i] *= inverse

    return enter_unit


@part
def make_leave_unit(spec):
    """Make ``leave_unit(rO, unit)``, which multiplies O in the registers rO by ``unit``."""
    RO, blocks = spec.TM * spec.DN * 4, spec.features.value_block_scales

    def leave_unit(rO, unit):
        if blocks:
            for e in range(RO):
                rO[e] *= unit

    return leave_unit
