"""Asynchronous copies of 16-bit tiles, and of one float per row, from global to shared memory.

A load is complete after ``commit_async``, ``wait_async`` and ``syncthreads``, which the kernel
calls.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.intrinsics.arithmetic import as_word
from fa_numba.intrinsics.async_copy import (
    commit_async,
    copy8_async,
    copy8_of_head_async,
    copy_value_async,
    wait_async,
)
from fa_numba.intrinsics.shared import half_tile, shared_tile, store2
from fa_numba.parts.mma.chunks import ChunkMap, make_first_chunk, make_turn
from fa_numba.parts.mma.e4m3 import make_widened_tile
from fa_numba.parts.mma.swizzle import make_exchange, make_first_place
from fa_numba.parts.namespace import part
from fa_numba.parts.pages import make_page_of, turns_in_a_page
from fa_numba.parts.prefetch import next_column_tile, next_row_tile
from fa_numba.parts.visits import make_next_column
from fa_numba.tiling.mma_rows import CHUNK


@part
def _make_load_halves(rows, spec, page_size=0, of_v=False):
    """Make ``load_halves(sT, T, row0, rows_end)``, which starts to copy a tile of one head's T to
    sT.

    The tile has ``rows`` rows from ``row0`` on. Rows at or past ``rows_end``, and columns past the
    head dimension, become 0 and are not read. ``of_v`` says that the tile has V's head dimension.
    A ``page_size`` above 0 says that the tile is a tile of K or V.

    - If rows of T are unaligned, they are copied element by element, without asynchronous copies.
    - If T is stored in pages of ``page_size`` rows, T is the tuple that ``grid.key_rows`` returns.
      A ``page_size`` of 0 means that T has no pages.
    - If ``ablate`` switches off prefetching, the function waits until its copies are complete.
    """
    if spec.features.scales:
        return _make_load_widened(rows, spec)
    places, d = (spec.value_rows, spec.row_halves_v) if of_v else (spec.rows, spec.row_halves)
    scaled = page_size > 0 and spec.features.page_scales
    if scaled:
        places = spec.value_rows if of_v else spec.key_rows
        d //= 2
    load = make_half_tile(rows, places, spec.threads, spec.loads_aligned, page_size, scaled=scaled)
    prefetches = spec.prefetches

    def load_halves(sT, T, row0, rows_end):
        load(sT, 0, T, row0, rows_end, 0, d)
        if not prefetches:
            commit_async()
            wait_async()

    return load_halves


@part
def _make_load_widened(rows, spec):
    """Make ``load_halves(sT, T, row0, rows_end)``, which loads a tile of T in e4m3 to sT, and
    converts it to float16. ``_make_load_halves`` explains the arguments.
    """
    load, d = make_widened_tile(rows, spec.rows, spec.threads), spec.head_dim

    def load_halves(sT, T, row0, rows_end):
        load(sT, 0, T, row0, rows_end, 0, d)

    return load_halves


@cache
def make_rows(spec):
    """Make ``rows(sT, T, row0, rows_end)``, which starts to copy a row tile of Q, dO or O from T to
    sT.

    ``_make_load_halves`` explains the arguments.
    """
    return _make_load_halves(spec.Br, spec)


@cache
def make_columns(spec):
    """Make ``columns(sT, T, row0, rows_end)``, which starts to copy a column tile of K or V from T
    to sT.

    ``_make_load_halves`` explains the arguments.
    """
    return _make_load_halves(spec.Bc, spec, spec.features.page_size)


@cache
def make_value_rows(spec):
    """Make ``value_rows(sT, T, row0, rows_end)``, which starts to copy a row tile of dO from T to
    sT, in the kernel that computes only dQ.

    ``_make_load_halves`` explains the arguments.
    """
    return make_rows(spec.of_values)


@cache
def make_value_columns(spec):
    """Make ``value_columns(sT, T, row0, rows_end)``, which starts to copy a column tile of V from T
    to sT, in the backward pass.

    ``_make_load_halves`` explains the arguments.
    """
    return make_columns(spec.of_values)


# The name that kernels on CUDA cores use too.
make_k = make_columns


@cache
def make_v(spec):
    """Make ``v(sV, V, row0, rows_end)``, which starts to copy a column tile of V to sV.

    V can have its own head dimension. ``_make_load_halves`` explains the arguments.
    """
    own_rows = bool(spec.head_dim_v) or spec.features.page_scales
    return _make_load_halves(spec.Bc, spec, spec.features.page_size, of_v=own_rows)


@part
def make_q(spec):
    """Make ``q(sQ, Q, i0, rows_end)``, which starts to copy a row tile of Q to sQ.

    The tile begins at row i0. If several query heads share the tile, ``Q: (rows, heads, d)``. The
    tile then contains one row of each head in turn.
    """
    return make_rows(spec) if spec.tile_heads == 1 else _q_of_heads(spec)


@part
def _q_of_heads(spec):
    """Make the function ``q(sQ, Q, i0, rows_end)`` that ``make_q`` describes, for a row tile that
    several heads share.

    The array is ``Q: (rows, heads, d)``. The tile begins at row i0 of each head.
    """
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
    """Make ``shared_memory()``, which returns sQ, sK and sV in shared memory, and a fourth array of
    floats.

    The shapes are ``sQ: (Br, d)``, ``sK: (Bc, d)`` and ``sV: (Bc, d_v)``. Warps that split the keys
    exchange O, l and m in the fourth array, which has ``spec.exchange_floats`` elements.
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
    """Make ``dq_shared_memory()``, which returns sQ, sdO, sK and sV in shared memory.

    The shapes are ``sQ: (Br, d)``, ``sdO: (Br, d_v)``, ``sK: (Bc, d)`` and ``sV: (Bc, d_v)``. The
    kernel that computes only dQ uses it.
    """
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
    """Make ``column_tiles(stage)``, which returns ``sK: (Bc, d)`` and ``sV: (Bc, d_v)`` of a
    stage.
    """
    NQ, NK, NV = spec.tile_halves
    AT_K, AT_V = NQ, NQ + spec.stages * NK

    def column_tiles(stage):
        sK = half_tile(uint32(AT_K + stage * NK), NK)
        return sK, half_tile(uint32(AT_V + stage * NV), NV)

    return column_tiles


@part
def make_first_columns(spec):
    """Make ``first_columns(K, V, j0, j_end, rows_end)``, which starts to load the first column tile
    of a block.

    The column tile begins at row j0 of K and V. With one stage, the function loads only K. With two
    stages, it loads K and V. If j0 is at or past ``j_end``, there is no column tile, and nothing is
    loaded.
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
    """Make ``columns_early(stage, K, V, j0, j_end, rows_end, i0, head)``, which starts the loads
    that run while S of the column tile at j0 is computed.

    | stages | what is loaded |
    |---:|---|
    | 1 | V of the column tile at j0 |
    | 2 | K and V of the next column tile, into the other stage |

    The function returns four values: sK and sV of the column tile at j0, the stage of the next
    column tile, and the first column of the next column tile. With one stage, the last value is j0.
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
    """Make ``next_q``, which starts to load the next row tile. ``prefetch.next_row_tile`` explains
    the arguments.
    """
    return next_row_tile(spec, make_q(spec))


@cache
def make_next_k(spec):
    """Make ``next_k``, which starts to load the next column tile. ``prefetch.next_column_tile``
    explains the arguments.
    """
    return next_column_tile(spec, make_k(spec))


@part
def make_half_tile(count, rows, threads, aligned, page_size=0, heads=1, scaled=False):
    """Make ``half_tile(sT, place, T, row0, rows_end, col0, cols_end)``, which starts to copy a tile
    of T to sT.

    The tile has ``count`` rows and begins at (row0, col0) of T. In shared memory it begins at
    element ``place`` of sT and has the layout ``rows``. Elements at or past ``rows_end`` or
    ``cols_end`` become 0 and are not read. ``threads`` threads share the copies.

    - If ``aligned`` is true, the rows of T start at 16-byte addresses. Otherwise elements are
      copied one by one, without asynchronous copies.
    - If ``page_size`` is above 0, T is stored in pages of ``page_size`` rows.
    - If ``heads`` is above 1, several heads share the tile, and ``T: (rows, heads, columns)``. The
      tile contains one row of each head in turn. ``row0`` and ``rows_end`` count these rows: row r
      of head number n is row r ``heads`` + n.
    - If ``scaled`` is true, the pages are e4m3. The scale of each 16 rows is stored after the tile,
      as a float32 in two elements. It is 0 if these rows are at or past ``rows_end``.
    """
    chunks = ChunkMap(count, rows.columns // CHUNK, threads)
    copies, whole = chunks.turns, chunks.whole
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange = make_exchange(rows)
    if page_size:
        return _make_load_paged_tile(count, rows, threads, aligned, page_size, scaled)
    copy, element = _accesses(heads)

    def half_tile(sT, place, T, row0, rows_end, col0, cols_end):
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(cuda.threadIdx.x)
            at = uint32(place + first_place(cuda.threadIdx.x, r, c) + down * pitch + right)
            c = uint32(c ^ exchange(r + down))  # the chunk that is stored at this index
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
def _make_load_paged_tile(count, rows, threads, aligned, page_size, scaled):
    """Make the function that ``make_half_tile`` describes, for K or V in pages.

    In this function, the argument T is a tuple: the array of all pages, the number of the K/V head,
    and the row of the block table for the sequence. If ``scaled`` is true, the scales of the pages
    are a fourth element. ``make_half_tile`` explains the arguments of this factory.
    """
    chunks = ChunkMap(count, rows.columns // CHUNK, threads)
    copies, whole = chunks.turns, chunks.whole
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange, page_of = make_exchange(rows), make_page_of(page_size)
    # The rows of a warp in a turn, 16 at most, are in one page: lane 0 looks it up for all.
    shared = turns_in_a_page(page_size, count, threads, chunks.width) * chunks.along
    SCALES, COPIES = count * pitch, copies

    def load_paged_tile(sT, place, T, row0, rows_end, col0, cols_end):
        pages, h, table = T[0], T[1], T[2]
        if scaled:
            scales = cuda.local.array(COPIES, uint32)
        page = row_of_page = uint32(0)
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(cuda.threadIdx.x)
            at = uint32(place + first_place(cuda.threadIdx.x, r, c) + down * pitch + right)
            c = uint32(c ^ exchange(r + down))  # the chunk that is stored at this index
            row, col = uint32(row0 + r + down), uint32(col0 + c + right)
            there = row < uint32(rows_end) and (whole or r < uint32(count - down))
            if n % shared == 0:
                page = page_of(table, row, there, 0)
                row_of_page = uint32(row % uint32(page_size))
            if scaled:
                scales[n] = as_word(float32(0.0))
                if there and right == 0:
                    scales[n] = as_word(T[3][page])
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
        if scaled:
            for n in range(copies):
                down, right = turn(n)
                r, c = first_chunk(cuda.threadIdx.x)
                first = c == uint32(0) and right == 0 and uint32(r + down) % uint32(16) == uint32(0)
                if first and (whole or r < uint32(count - down)):
                    at = uint32(place + SCALES + 2 * (uint32(r + down) // uint32(16)))
                    store2(sT, at, scales[n])

    return load_paged_tile


def _accesses(heads):
    """Return two device functions that read T: ``copy`` for 16 bytes and ``element`` for one
    element.

    ``copy(sT, at, T, row, col, length)`` starts an asynchronous copy of ``length`` elements to
    index ``at`` of sT. If ``heads`` is above 1, ``T: (rows, heads, columns)``, and ``row`` counts
    the rows of all heads in turn: row r of head number n is row r ``heads`` + n.
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
    """Make ``p(sP, place, P, row0, rows_end, col0, cols_end)``, which starts to copy ``spec.step``
    columns of a row tile of P to sP.

    ``make_half_tile`` explains the arguments. Standard attention uses the function.
    """
    if spec.features.scales:
        return make_widened_tile(spec.Br, spec.rows_p, spec.threads)
    return make_half_tile(spec.Br, spec.rows_p, spec.threads, True)


@cache
def make_p_transposed(spec):
    """Make ``p_transposed(sP, place, P, row0, rows_end, col0, cols_end)``, which starts to copy
    ``spec.step`` rows and ``spec.Br`` columns of P to sP.

    Standard attention uses the function for PT dO and dST Q. ``spec`` describes a tile of the
    transposed P, so that ``spec.Br`` counts columns of P. ``make_half_tile`` explains the
    arguments.
    """
    return make_half_tile(spec.step, spec.rows_t, spec.threads, True)


@part
def make_step(spec):
    """Make ``step(sT, place, T, row0, rows_end)``, which starts to copy ``spec.step`` rows of V, K,
    dO or Q to sT.

    The rows begin at row ``row0`` of T. In shared memory they begin at element ``place`` of sT.
    Standard attention uses the function.
    """
    load = make_half_tile(spec.step, spec.value_rows, spec.threads, spec.aligned)
    if spec.features.scales:
        load = make_widened_tile(spec.step, spec.value_rows, spec.threads)
    d = spec.d_v

    def step(sT, place, T, row0, rows_end):
        load(sT, place, T, row0, rows_end, 0, d)

    return step


@part
def make_values(spec):
    """Make ``values(sT, T, row0, rows_end)``, which starts to copy one float for each row of a row
    tile from T to sT.

    T is L or D of one head. ``sT: (Br,)`` gets 0 for rows at or past ``rows_end``.
    """
    Br, threads = spec.Br, spec.threads

    def values(sT, T, row0, rows_end):
        for first in range(0, Br, threads):
            n = uint32(cuda.threadIdx.x + first)
            row = uint32(row0 + n)
            if n < uint32(Br):
                copy_value_async(sT, n, T, row, int32(row < uint32(rows_end)))

    return values
