"""O from registers to global memory, by way of the place where Q was."""

from functools import cache

from fa_numba.device import device_function, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.bulk_copy import (
    commit_boxes,
    fence_async_proxy,
    store_box,
    wait_boxes_read,
)
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.shared import store2
from fa_numba.parts.wgmma.turns import make_meet
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL


@cache
def make_write_tile(spec):
    """``write_tile(rO, sQ, at, O, w, row0, b, h, ty, tx)``: a warpgroup's rows of O, rounded, by
    way of its own rows of sQ. Its first thread waits until they have been read.
    """
    TM, DN4, Br, panels, STEP = spec.TM, 4 * spec.DN, spec.Br, spec.panels, spec.row_step
    meet = make_meet(spec)
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def write_tile(rO, sQ, at, O, w, row0, b, h, ty, tx):
        own = uint32(at + PANEL * GROUP_ROWS * w)
        exchange = uint32(8 * (ty % 8))  # the copy engine's swizzle
        for i in range(TM):
            row = uint32(own + PANEL * (ty + STEP * i) + 2 * tx)
            for n in range(DN4 // 2):
                chunk = uint32(uint32(8 * (n % 8)) ^ exchange)
                place = uint32(row + chunk + PANEL * Br * (n // 8))
                store2(sQ, place, pack(rO[i * DN4 + 2 * n], rO[i * DN4 + 2 * n + 1]))
        fence_async_proxy()
        meet(w)
        if ty == uint32(0) and tx == uint32(0):
            for n in range(panels):
                store_box(O, b, h, row0, PANEL * n, sQ, uint32(own + PANEL * Br * n))
            commit_boxes()
            wait_boxes_read()

    return write_tile
