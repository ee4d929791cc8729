"""Tiles of 16-bit elements, and one float a row, from global to shared memory, asynchronously."""

from functools import cache

from fa_numba.device import cuda, device_function, int32, int64, uint32
from fa_numba.intrinsics.async_copy import (
    commit_async,
    copy8_async,
    copy8_of_head_async,
    copy_value_async,
    wait_async,
)
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.mma.chunks import ChunkMap, make_first_chunk, make_turn
from fa_numba.parts.mma.swizzle import make_exchange, make_first_place
from fa_numba.parts.namespace import part
from fa_numba.parts.pages import make_page_of, turns_in_a_page
from fa_numba.parts.prefetch import next_column_tile, next_row_tile
from fa_numba.parts.visits import make_next_column
from fa_numba.tiling.mma_rows import CHUNK


@part
def _make_load_halves(rows, spec, page_size=0, of_v=False):
    """``load_halves(sT, T, row0, rows_end)`` starts copying a tile of the head's T to sT.

    Rows at or past ``rows_end``, and columns past the head dimension, become 0 and are not read.
    Unaligned rows are copied one element after the other, there at the next barrier. With pages T
    is what ``heads.key_rows`` gives of them.
    """
    places, d = (spec.value_rows, spec.row_halves_v) if of_v else (spec.rows, spec.row_halves)
    load = make_half_tile(rows, places, spec.threads, spec.loads_aligned, page_size)
    prefetches = spec.prefetches

    def load_halves(sT, T, row0, rows_end):
        load(sT, 0, T, row0, rows_end, 0, d)
        if not prefetches:
            commit_async()
            wait_async()

    return load_halves


@cache
def make_rows(spec):
    """``rows(sT, T, row0, rows_end)``: a row tile of Q, dO or O."""
    return _make_load_halves(spec.Br, spec)


@cache
def make_columns(spec):
    """``columns(sT, T, row0, rows_end)``: a column tile of K or V."""
    return _make_load_halves(spec.Bc, spec, spec.features.page_size)


@cache
def make_value_rows(spec):
    """``value_rows(sT, T, row0, rows_end)``: in dQ's own kernel, of dO."""
    return make_rows(spec.of_values)


@cache
def make_value_columns(spec):
    """``value_columns(sT, T, row0, rows_end)``: in the backward pass, of V."""
    return make_columns(spec.of_values)


# As on CUDA cores.
make_k = make_columns


@cache
def make_v(spec):
    """``v(sV, V, row0, rows_end)``: of V, whose head dimension may be its own."""
    return _make_load_halves(spec.Bc, spec, spec.features.page_size, of_v=bool(spec.head_dim_v))


@part
def make_q(spec):
    """``q(sQ, Q, i0, rows_end)``: a row tile of Q; where query heads of a K/V head share it, of a
    (rows, heads, d) Q, row r of head n at n + r heads.
    """
    return make_rows(spec) if spec.tile_heads == 1 else _q_of_heads(spec)


@part
def _q_of_heads(spec):
    """``q(sQ, Q, i0, rows_end)`` of a (rows, heads, d) Q: from row i0 of each head on."""
    heads, prefetches, d = spec.tile_heads, spec.prefetches, spec.row_halves
    load = make_half_tile(spec.Br, spec.rows, spec.threads, spec.loads_aligned, heads=heads)

    def q(sQ, Q, i0, rows_end):
        load(sQ, 0, Q, uint32(i0 * heads), uint32(rows_end * heads), 0, d)
        if not prefetches:
            commit_async()
            wait_async()

    return q


@part
def make_shared_memory(spec):
    """``shared_memory()``: where Qi, Kj and Vj lie in shared memory, and, behind them, what warps
    that split the keys exchange.
    """
    (NQ, NK, NV), NO = spec.tile_halves, spec.exchange_floats
    AT_K, AT_V, AT_O = NQ, NQ + NK, (NQ + NK + NV) // 2

    def shared_memory():
        sQ = half_tile(0, NQ)
        sK = half_tile(AT_K, NK)
        sV = half_tile(AT_V, NV)
        return sQ, sK, sV, shared_tile(AT_O, NO)

    return shared_memory


@part
def make_dq_shared_memory(spec):
    """``dq_shared_memory()``: where Qi, dOi, Kj and Vj lie, where dQ is made alone."""
    (NQ, NK, _), (NO, NV, _) = spec.tile_halves, spec.of_values.tile_halves
    AT_DO, AT_K, AT_V = NQ, NQ + NO, NQ + NO + NK

    def dq_shared_memory():
        sQ = half_tile(0, NQ)
        sdO = half_tile(AT_DO, NO)
        sK = half_tile(AT_K, NK)
        return sQ, sdO, sK, half_tile(AT_V, NV)

    return dq_shared_memory


@part
def make_column_tiles(spec):
    """``column_tiles(stage)``: sK and sV of a stage, behind sQ."""
    NQ, NK, NV = spec.tile_halves
    AT_K, AT_V = NQ, NQ + spec.stages * NK

    def column_tiles(stage):
        sK = half_tile(uint32(AT_K + stage * NK), NK)
        return sK, half_tile(uint32(AT_V + stage * NV), NV)

    return column_tiles


@part
def make_first_columns(spec):
    """``first_columns(K, V, j0, j_end, rows_end)``: the first K tile and, with two stages, the
    first V tile, if there is one.
    """
    column_tiles, load_k, load_v = make_column_tiles(spec), make_k(spec), make_v(spec)
    both = spec.stages == 2

    def first_columns(K, V, j0, j_end, rows_end):
        sK, sV = column_tiles(uint32(0))
        if j0 < j_end:
            load_k(sK, K, j0, rows_end)
            if both:
                load_v(sV, V, j0, rows_end)

    return first_columns


@part
def make_columns_early(spec):
    """``columns_early(stage, K, V, j0, j_end, rows_end, i0, head)``: what is on its way while
    column tile j0 is multiplied with Q.

    With one stage that is its V. With two it is K and V of the next tile, to the other stage. Gives
    sK and sV of the tile at j0, the stage of the next one and, with two stages, where that starts.
    """
    column_tiles, load_k, load_v = make_column_tiles(spec), make_k(spec), make_v(spec)
    Bc, next_column, both = spec.Bc, make_next_column(spec), spec.stages == 2

    def columns_early(stage, K, V, j0, j_end, rows_end, i0, head):
        sK, sV = column_tiles(stage)
        j_next = j0
        if both:
            j_next = next_column(uint32(j0 + Bc), j_end, i0, head)
            stage = uint32(stage ^ uint32(1))
            if j_next < j_end:
                sK_next, sV_next = column_tiles(stage)
                load_k(sK_next, K, j_next, rows_end)
                load_v(sV_next, V, j_next, rows_end)
        else:
            load_v(sV, V, j0, rows_end)
        return sK, sV, stage, j_next

    return columns_early


@cache
def make_next_q(spec):
    """``next_q``: see ``prefetch.next_row_tile``."""
    return next_row_tile(spec, make_q(spec))


@cache
def make_next_k(spec):
    """``next_k``: see ``prefetch.next_column_tile``."""
    return next_column_tile(spec, make_k(spec))


@part
def make_half_tile(count, rows, threads, aligned, page_size=0, heads=1):
    """``half_tile(sT, place, T, row0, rows_end, col0, cols_end)``: ``count`` rows of T from
    (row0, col0), zeros past the ends, to a tile as ``rows`` from element ``place`` of sT on. With
    ``heads`` T is (rows, heads, columns), and its rows count those of all heads.
    """
    chunks = ChunkMap(count, rows.columns // CHUNK, threads)
    copies, whole = chunks.turns, chunks.whole
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange = make_exchange(rows)
    if page_size:
        return _make_load_paged_tile(count, rows, threads, aligned, page_size)
    copy, element = _accesses(heads)

    def half_tile(sT, place, T, row0, rows_end, col0, cols_end):
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(cuda.threadIdx.x)
            at = uint32(place + first_place(cuda.threadIdx.x, r, c) + down * pitch + right)
            c = uint32(c ^ exchange(r + down))  # the chunk that lies there
            row = uint32(row0 + r)
            left = int32(int32(rows_end) - int32(row))
            row, col = int64(row) + down, uint32(col0 + c + right)
            if whole or r < uint32(count - down):
                length = int32(0)
                if left > int32(down) and col < uint32(cols_end):
                    length = int32(min(int32(8), int32(cols_end - col)))
                if aligned:
                    copy(sT, at, T, row, col, length)
                else:
                    for e in range(8):
                        half = uint32(0)
                        if e < length:
                            half = uint32(element(T, row, uint32(col + e)))
                        sT[uint32(at + e)] = half

    return half_tile


@part
def _make_load_paged_tile(count, rows, threads, aligned, page_size):
    """``half_tile`` of pages: T is all of them, the head, and the sequence's block table row."""
    chunks = ChunkMap(count, rows.columns // CHUNK, threads)
    copies, whole = chunks.turns, chunks.whole
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange, page_of = make_exchange(rows), make_page_of(page_size)
    # A warp has the chunks of 16 rows or less, of one page: its first lane reads for all.
    shared = turns_in_a_page(page_size, count, threads, chunks.width) * chunks.along

    def load_paged_tile(sT, place, T, row0, rows_end, col0, cols_end):
        pages, h, table = T
        page = row_of_page = uint32(0)
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(cuda.threadIdx.x)
            at = uint32(place + first_place(cuda.threadIdx.x, r, c) + down * pitch + right)
            c = uint32(c ^ exchange(r + down))  # the chunk that lies there
            row, col = uint32(row0 + r + down), uint32(col0 + c + right)
            there = row < uint32(rows_end) and (whole or r < uint32(count - down))
            if n % shared == 0:
                page = page_of(table, row, there, 0)
                row_of_page = uint32(row % uint32(page_size))
            further = down - turn(n - n % shared)[0]
            if whole or r < uint32(count - down):
                length = int32(0)
                if there and col < uint32(cols_end):
                    length = int32(min(int32(8), int32(cols_end - col)))
                if aligned:
                    source = int64(row_of_page) + further
                    copy8_async(sT, at, pages[page, h], source, col, length)
                else:
                    for e in range(8):
                        half = uint32(0)
                        if e < length:
                            half = uint32(
                                pages[page, h, uint32(row_of_page + further), uint32(col + e)]
                            )
                        sT[uint32(at + e)] = half

    return load_paged_tile


def _accesses(heads):
    """``copy(sT, at, T, row, col, length)`` of 16 bytes, and ``element(T, row, col)``; with
    ``heads`` of a (rows, heads, columns) T, whose rows count those of all heads.
    """

    @device_function
    def element(T, row, col):
        return T[row, col]

    @device_function
    def copy_of_head(sT, at, T, row, col, length):
        own, head = uint32(row) // uint32(heads), uint32(row) % uint32(heads)
        copy8_of_head_async(sT, at, T, own, head, col, length)

    @device_function
    def element_of_head(T, row, col):
        return T[uint32(row) // uint32(heads), uint32(row) % uint32(heads), col]

    return (copy8_async, element) if heads == 1 else (copy_of_head, element_of_head)


@cache
def make_p(spec):
    """``p(sP, place, P, row0, rows_end, col0, cols_end)``: ``spec.step`` columns of a row tile of
    P, of standard attention.
    """
    return make_half_tile(spec.Br, spec.rows_p, spec.threads, True)


@cache
def make_p_transposed(spec):
    """``p`` of ``spec.step`` rows of P, where the rows of ``spec`` are columns of P."""
    return make_half_tile(spec.step, spec.rows_t, spec.threads, True)


@part
def make_step(spec):
    """``step(sT, place, T, row0, rows_end)``: ``spec.step`` rows of V, K, dO or Q."""
    load = make_half_tile(spec.step, spec.value_rows, spec.threads, spec.aligned)
    d = spec.d_v

    def step(sT, place, T, row0, rows_end):
        load(sT, place, T, row0, rows_end, 0, d)

    return step


@part
def make_values(spec):
    """``values(sT, T, row0, rows_end)`` starts copying one float a row; 0 past the end."""
    Br, threads = spec.Br, spec.threads

    def values(sT, T, row0, rows_end):
        for first in range(0, Br, threads):
            n = uint32(cuda.threadIdx.x + first)
            row = uint32(row0 + n)
            if n < uint32(Br):
                copy_value_async(sT, n, T, row, int32(row < uint32(rows_end)))

    return values
