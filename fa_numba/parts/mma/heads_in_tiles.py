"""Query heads of a K/V head side by side in the rows of a tile, on tensor cores.

Q, O and L come as (batch, groups, rows, heads, ...), ``spec.tile_heads`` heads a group, so that
a block's Q is (rows, heads, d): row r of the tile is row r // heads of head r % heads.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts.mma.pairs import make_write_two
from fa_numba.parts.mma.tile_load import make_load_half_tile


@cache
def make_heads(spec):
    """``heads(group)``: batch entry, group of query heads and K/V head of a block."""
    heads_of_tile, grouped = spec.tile_heads, spec.grouped

    @device_function
    def heads(group):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        hk = uint32(uint32(h * heads_of_tile) // uint32(group)) if grouped else h
        return b, h, hk

    return heads


@cache
def make_load_q(spec):
    """``load_q(sQ, Q, i0, rows_end)`` starts copying a tile from row ``i0`` of each head on."""
    heads, prefetches, d = spec.tile_heads, spec.prefetches, spec.head_dim
    load = make_load_half_tile(spec.Br, spec.rows, spec.threads, spec.aligned, heads=heads)

    @device_function
    def load_q(sQ, Q, i0, rows_end):
        load(sQ, 0, Q, uint32(i0 * heads), uint32(rows_end * heads), 0, d)
        if not prefetches:
            commit_async()
            wait_async()

    return load_q


@cache
def make_write_tile(spec):
    """``write_tile(rO, sO, O, warp_row, i0, rows_end, ty, tx)``: this thread's part of O."""
    TM, DN4, STEP, heads = spec.TM, 4 * spec.DN, spec.row_step, spec.tile_heads
    write_two = make_write_two(spec)

    @device_function
    def write_tile(rO, sO, O, warp_row, i0, rows_end, ty, tx):
        for i in range(TM):
            place = uint32(ty + i * STEP)
            row = uint32(i0 + place // uint32(heads))
            if row < rows_end:
                Oi, head = O[row], uint32(place % uint32(heads))
                for n in range(DN4 // 2):
                    e = i * DN4 + 2 * n
                    write_two(Oi, head, uint32(8 * n + 2 * tx), rO[e], rO[e + 1])

    return write_tile


@cache
def make_write_values(spec):
    """``write_values(rv, V, i0, rows_end, ty, tx)``: one value a row, written by one lane."""
    TM, STEP, heads = spec.TM, spec.row_step, spec.tile_heads

    @device_function
    def write_values(rv, V, i0, rows_end, ty, tx):
        for i in range(TM):
            place = uint32(ty + i * STEP)
            row = uint32(i0 + place // uint32(heads))
            if tx == uint32(0) and row < rows_end:
                V[row, uint32(place % uint32(heads))] = rv[i]

    return write_values
