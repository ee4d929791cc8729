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
from fa_numba.intrinsics.shared import half_tile
from fa_numba.parts.layout import make_row
from fa_numba.parts.mma.chunks import ChunkMap, make_first_chunk, make_turn
from fa_numba.parts.mma.swizzle import make_exchange, make_first_place
from fa_numba.parts.pages import make_page_of, turns_in_a_page
from fa_numba.parts.prefetch import next_column_tile, next_row_tile
from fa_numba.parts.visits import make_next_column
from fa_numba.tiling.mma_rows import CHUNK


def _make_load_halves(rows, spec, page_size=0):
    """``load_halves(sT, T, row0, rows_end)`` starts copying a tile of the head's T to sT.

    Rows at or past ``rows_end``, and columns past the head dimension, become 0 and are not read.
    Unaligned rows are copied one element after the other, there at the next barrier. With pages T
    is what ``heads.key_rows`` gives of them.
    """
    load = make_load_half_tile(rows, spec.rows, spec.threads, spec.aligned, page_size)
    prefetches, d = spec.prefetches, spec.head_dim

    @device_function
    def load_halves(sT, T, row0, rows_end):
        load(sT, 0, T, row0, rows_end, 0, d)
        if not prefetches:
            commit_async()
            wait_async()

    return load_halves


@cache
def make_load_rows(spec):
    """``load_rows(sT, T, row0, rows_end)``: a row tile of Q, dO or O."""
    return _make_load_halves(spec.Br, spec)


@cache
def make_load_columns(spec):
    """``load_columns(sT, T, row0, rows_end)``: a column tile of K or V."""
    return _make_load_halves(spec.Bc, spec, spec.features.page_size)


# By the names that they have on CUDA cores, where the tiles differ.
make_load_q, make_load_k, make_load_v = make_load_rows, make_load_columns, make_load_columns


@cache
def make_column_tiles(spec):
    """``column_tiles(stage)``: sK and sV of a stage, behind sQ."""
    NQ, NK, NV = spec.tile_halves
    AT_K, AT_V = NQ, NQ + spec.stages * NK

    @device_function
    def column_tiles(stage):
        sK = half_tile(uint32(AT_K + stage * NK), NK)
        return sK, half_tile(uint32(AT_V + stage * NV), NV)

    return column_tiles


@cache
def make_load_first_columns(spec):
    """``load_first_columns(K, V, j0, j_end, rows_end)``: the first K tile and, with two stages, the
    first V tile, if there is one.
    """
    column_tiles, load_k, load_v = make_column_tiles(spec), make_load_k(spec), make_load_v(spec)
    both = spec.stages == 2

    @device_function
    def load_first_columns(K, V, j0, j_end, rows_end):
        sK, sV = column_tiles(uint32(0))
        if j0 < j_end:
            load_k(sK, K, j0, rows_end)
            if both:
                load_v(sV, V, j0, rows_end)

    return load_first_columns


@cache
def make_load_columns_early(spec):
    """``load_columns_early(stage, K, V, j0, j_end, rows_end, i0, b, h, options)``: what is on its
    way while column tile j0 is multiplied with Q.

    With one stage that is its V. With two it is K and V of the next tile, to the other stage. Gives
    sK and sV of the tile at j0, the stage of the next one and, with two stages, where that starts.
    """
    column_tiles, load_k, load_v = make_column_tiles(spec), make_load_k(spec), make_load_v(spec)
    Bc, next_column, both = spec.Bc, make_next_column(spec), spec.stages == 2

    @device_function
    def load_columns_early(stage, K, V, j0, j_end, rows_end, i0, b, h, options):
        sK, sV = column_tiles(stage)
        j_next = j0
        if both:
            j_next = next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
            stage = uint32(stage ^ uint32(1))
            if j_next < j_end:
                sK_next, sV_next = column_tiles(stage)
                load_k(sK_next, K, j_next, rows_end)
                load_v(sV_next, V, j_next, rows_end)
        else:
            load_v(sV, V, j0, rows_end)
        return sK, sV, stage, j_next

    return load_columns_early


@cache
def make_load_next_q(spec):
    """``load_next_q``: see ``prefetch.next_row_tile``."""
    return next_row_tile(spec, make_load_q(spec))


@cache
def make_load_next_k(spec):
    """``load_next_k``: see ``prefetch.next_column_tile``."""
    return next_column_tile(spec, make_load_k(spec))


@cache
def make_load_half_tile(count, rows, threads, aligned, page_size=0, heads=1):
    """``load_half_tile(sT, place, T, row0, rows_end, col0, cols_end)``: the same from column
    ``col0`` on, ``count`` of the tile ``rows``, to a tile that starts at element ``place`` of sT.
    With ``heads`` T is (rows, heads, columns), and its rows count those of all heads.
    """
    chunks = ChunkMap(count, rows.columns // CHUNK, threads)
    copies, whole = chunks.turns, chunks.whole
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange = make_exchange(rows)
    if page_size:
        return _make_load_paged_tile(count, rows, threads, aligned, page_size)
    copy, element = _accesses(heads)

    @device_function
    def load_half_tile(sT, place, T, row0, rows_end, col0, cols_end):
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

    return load_half_tile


@cache
def _make_load_paged_tile(count, rows, threads, aligned, page_size):
    """The same of pages: T is all of them, the head, and the sequence's row of the block table."""
    chunks = ChunkMap(count, rows.columns // CHUNK, threads)
    copies, whole = chunks.turns, chunks.whole
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange, page_of = make_exchange(rows), make_page_of(page_size)
    # A warp has the chunks of 16 rows or less, of one page: its first lane reads for all.
    shared = turns_in_a_page(page_size, count, threads, chunks.width) * chunks.along

    @device_function
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
def make_load_p(spec):
    """``load_p(sP, place, P, row0, rows_end, col0, cols_end)``: ``spec.step`` columns of a row tile
    of P, of standard attention.
    """
    return make_load_half_tile(spec.Br, spec.rows_p, spec.threads, True)


@cache
def make_load_p_transposed(spec):
    """The same of ``spec.step`` rows, where the rows of ``spec`` are columns of P."""
    return make_load_half_tile(spec.step, spec.rows_t, spec.threads, True)


@cache
def make_load_step(spec):
    """``load_step(sT, place, T, row0, rows_end)``: ``spec.step`` rows of V, K, dO or Q."""
    load = make_load_half_tile(spec.step, spec.rows, spec.threads, spec.aligned)
    d = spec.head_dim

    @device_function
    def load_step(sT, place, T, row0, rows_end):
        load(sT, place, T, row0, rows_end, 0, d)

    return load_step


@cache
def make_load_values(spec):
    """``load_values(sT, T, row0, rows_end)`` starts copying one float a row; 0 past the end."""
    Br, threads = spec.Br, spec.threads

    @device_function
    def load_values(sT, T, row0, rows_end):
        for first in range(0, Br, threads):
            n = uint32(cuda.threadIdx.x + first)
            row = uint32(row0 + n)
            if n < uint32(Br):
                copy_value_async(sT, n, T, row, int32(row < uint32(rows_end)))

    return load_values


@cache
def make_take_values(spec):
    """``take_values(rv, sT, ty)``: of these floats the ones of a thread's rows."""
    TM, row_of = spec.TM, make_row(spec)

    @device_function
    def take_values(rv, sT, ty):
        for i in range(TM):
            rv[i] = sT[row_of(ty, i)]

    return take_values
