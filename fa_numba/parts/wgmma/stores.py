"""O from registers to global memory, by way of the place where Q was."""

from functools import cache

from fa_numba.device import device_function, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.bulk_copy import (
    commit_boxes,
    fence_async_proxy,
    store_box,
    store_box_5d,
    wait_boxes_read,
)
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.shared import store2
from fa_numba.parts.heads import make_query_end, make_query_rows
from fa_numba.parts.mma.stores import make_write_fragments
from fa_numba.parts.rows import make_write_values
from fa_numba.parts.splits import writes_split
from fa_numba.parts.wgmma.tile_load import make_place_of
from fa_numba.parts.wgmma.turns import make_meet
from fa_numba.tiling.wgmma import PANEL


@cache
def make_write_tile(spec):
    """``write_tile(rO, sQ, at, O, w, row0, b, h, ty, tx)``: a warpgroup's rows of O, rounded, by
    way of its own rows of sQ. Its first thread waits until they have been read.
    """
    Br, panels, round_rows = spec.Br, spec.panels, _make_round_rows(spec)

    @device_function
    def write_tile(rO, sQ, at, O, w, row0, b, h, ty, tx):
        own = round_rows(rO, sQ, at, w, ty, tx)
        if ty == uint32(0) and tx == uint32(0):
            for n in range(panels):
                store_box(O, b, h, row0, PANEL * n, sQ, uint32(own + PANEL * Br * n))
            commit_boxes()
            wait_boxes_read()

    return write_tile


@cache
def make_write_queries(spec):
    """``write_queries(rO, sQ, at, O, w, row0, Nq, b, h, options, ty, tx)``: the same of a sequence
    of Nq rows, nothing beyond them. Where heads share a tile h counts groups of them.
    """
    return write_to_end(spec, spec.features.packed, make_query_end(spec), spec.tile_heads > 1)


def write_to_end(spec, ends, sequence_end, members=False):
    """``write(rO, sQ, at, O, w, row0, N, b, h, options, ty, tx)``: ``write_tile`` of a sequence of
    N rows; if ``ends`` nothing beyond them, with ``members`` of several heads.
    """
    if not ends and not members:
        write_tile = make_write_tile(spec)

        @device_function
        def write_all(rO, sQ, at, O, w, row0, N, b, h, options, ty, tx):
            write_tile(rO, sQ, at, O, w, row0, b, h, ty, tx)

        return write_all
    Br, panels, round_rows = spec.Br, spec.panels, _make_round_rows(spec)
    place_of = make_place_of(ends, sequence_end)

    @device_function
    def write(rO, sQ, at, O, w, row0, N, b, h, options, ty, tx):
        own = round_rows(rO, sQ, at, w, ty, tx)
        if ty == uint32(0) and tx == uint32(0):
            outer, which, row = place_of(O, b, h, row0, N, options)
            for n in range(panels):
                place = uint32(own + PANEL * Br * n)
                if members:
                    store_box_5d(O, outer, which, row, 0, PANEL * n, sQ, place)
                else:
                    store_box(O, outer, which, row, PANEL * n, sQ, place)
            commit_boxes()
            wait_boxes_read()

    return write


def _make_round_rows(spec):
    """``round_rows(rO, sQ, at, w, ty, tx)``: a warpgroup's rows of O in 16 bits, in its own rows of
    sQ, whose place it gives; there for the copy engine.
    """
    TM, DN4, Br, STEP = spec.TM, 4 * spec.DN, spec.Br, spec.row_step
    meet, ROWS = make_meet(spec), spec.consumer_rows
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def round_rows(rO, sQ, at, w, ty, tx):
        own = uint32(at + PANEL * ROWS * w)
        exchange = uint32(8 * (ty % 8))  # the copy engine's swizzle
        for i in range(TM):
            row = uint32(own + PANEL * (ty + STEP * i) + 2 * tx)
            for n in range(DN4 // 2):
                chunk = uint32(uint32(8 * (n % 8)) ^ exchange)
                place = uint32(row + chunk + PANEL * Br * (n // 8))
                store2(sQ, place, pack(rO[i * DN4 + 2 * n], rO[i * DN4 + 2 * n + 1]))
        fence_async_proxy()
        meet(w)
        return own

    return round_rows


@cache
def make_write_split(spec):
    """``write_split``: see ``splits.writes_split``; the rows are of one warpgroup."""
    return writes_split(spec, make_write_fragments(spec))


@cache
def make_rows_of(spec):
    """``rows_of(shape, Nq)``: the rows that a sequence has in the arrays of queries."""
    packed = spec.features.packed

    @device_function
    def rows_of(shape, Nq):
        if packed:
            return Nq
        return uint32(shape[2])

    return rows_of


@cache
def make_write_logsumexps(spec):
    """``write_logsumexps(rl, L, b, h, row0, rows, Nq, options, ty, tx)``: one value a row of L,
    whose sequences have ``rows`` rows, padding among them, or if packed Nq.
    """
    TM, STEP, heads = spec.TM, spec.row_step, spec.tile_heads
    packed = spec.features.packed
    write_values, query_rows = make_write_values(spec), make_query_rows(spec)

    @device_function
    def write_logsumexps(rl, L, b, h, row0, rows, Nq, options, ty, tx):
        rows_end = uint32(rows)
        if packed:
            rows_end = Nq
        if heads == 1:
            write_values(rl, query_rows(L, b, h, options), row0, rows_end, ty, tx)
        else:
            for i in range(TM):
                place = uint32(ty + STEP * i)
                row = uint32(row0 + place // uint32(heads))
                if tx == uint32(0) and row < rows_end:
                    head = uint32(uint32(h * heads) + place % uint32(heads))
                    query_rows(L, b, head, options)[row] = rl[i]

    return write_logsumexps
