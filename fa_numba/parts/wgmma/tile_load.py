"""Tiles from global to shared memory: a box for each 64 columns, zeros beyond the array."""

from functools import cache

from fa_numba.device import device_function, uint32
from fa_numba.intrinsics.bulk_copy import load_box
from fa_numba.intrinsics.mbarrier import expect_bytes
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL


@cache
def make_load_q(spec):
    """``load_q(sQ, at, Q, b, h, row0, bars, barrier)``: Qi, by boxes of a warpgroup's rows."""
    return load_of(spec.Br, GROUP_ROWS, spec.panels)


@cache
def make_load_columns(spec):
    """``load_columns(sT, at, T, b, h, row0, bars, barrier)``: Kj or Vj."""
    return load_of(spec.Bc, spec.Bc, spec.panels)


@cache
def load_of(rows, box, panels):
    """The load of a tile with these ``rows``, by boxes of ``box`` rows."""
    size = 2 * PANEL * panels * rows

    @device_function
    def load(sT, at, T, b, h, row0, bars, barrier):
        expect_bytes(bars, barrier, size)
        for n in range(panels):
            for r in range(rows // box):
                place = uint32(at + PANEL * (n * rows + r * box))
                load_box(sT, place, T, b, h, uint32(row0 + r * box), PANEL * n, bars, barrier)

    return load
