"""Asynchronous copies of tiles from global to shared memory, on CUDA cores.

A load is complete after ``commit_async``, ``wait_async`` and ``syncthreads``, which the kernel
calls. An argument ``places`` is a ``tiling.simt.SharedRows``: the layout of a tile in shared
memory. It says where a row begins, and how its columns are swizzled.
"""

from functools import cache

from fa_numba.device import cuda, int32, uint32
from fa_numba.integers import power_of_two
from fa_numba.intrinsics.async_copy import copy1_async, copy4_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.namespace import part
from fa_numba.parts.pages import common_rows, make_page_of, turns_in_a_page
from fa_numba.parts.prefetch import next_column_tile, next_row_tile
from fa_numba.parts.simt.swizzle import flip_of


@part
def make_tile(rows, columns, places, threads, aligned):
    """Make ``tile(sT, T, row0, rows_end, col0, cols_end)``, which starts to copy a tile of T to sT.

    The tile has ``rows`` x ``columns`` elements and begins at (row0, col0) of T. Elements at or
    past ``rows_end`` or ``cols_end`` become 0 and are not read. ``aligned`` says that the rows of T
    start at 16-byte addresses: each copy then moves 16 bytes instead of 4. ``threads`` threads
    share the copies.
    """
    width = 4 if aligned else 1
    chunks = columns // width
    copies = rows * chunks
    per_thread = -(-copies // threads)
    even = copies % threads == 0
    apart = threads // chunks
    if even and threads == apart * chunks and apart == power_of_two(apart):
        return _make_tile_by_columns(per_thread, apart, chunks, places, width)
    copy_async = copy4_async if aligned else copy1_async
    pitch, flip = places.pitch, flip_of(places)

    def tile(sT, T, row0, rows_end, col0, cols_end):
        for n in range(per_thread):
            copy = uint32(cuda.threadIdx.x + n * threads)
            r = uint32(copy // uint32(chunks))
            c = uint32(uint32(copy % uint32(chunks)) * width)
            row = uint32(row0 + r)
            col = uint32(col0 + c)
            if even or copy < uint32(copies):
                count = int32(0)
                if row < uint32(rows_end) and col < uint32(cols_end):
                    count = int32(min(int32(width), int32(cols_end - col)))
                copy_async(sT, uint32(r * pitch + (c ^ flip(r) // 4)), T, row, col, count)

    return tile


@part
def _make_tile_by_columns(per_thread, apart, chunks, places, width):
    """Make the function that ``make_tile`` describes, for the case that all copies of a thread are
    in the same columns of the tile.

    A thread makes ``per_thread`` copies, one below the other, ``apart`` rows from each other. It
    computes the address of its first copy. The addresses of the further copies are computed from
    this address with constants. A copy moves ``width`` floats, and a row of the tile takes
    ``chunks`` copies.
    """
    copy_async = copy4_async if width == 4 else copy1_async
    pitch, flip = places.pitch, flip_of(places)

    def tile_by_columns(sT, T, row0, rows_end, col0, cols_end):
        thread = uint32(cuda.threadIdx.x)
        r = uint32(thread // uint32(chunks))
        c = uint32(uint32(thread % uint32(chunks)) * width)
        first, flipped = uint32(r * pitch), uint32(c ^ flip(r) // 4)
        row, col = uint32(row0 + r), uint32(col0 + c)
        there = int32(0)
        if col < uint32(cols_end):
            there = int32(min(int32(width), int32(cols_end - col)))
        for n in range(per_thread):
            # r is below apart, a power of two: the flip of the sum is the xor of both flips.
            at = uint32(first + n * apart * pitch + (flipped ^ flip(n * apart) // 4))
            count = there if uint32(row + n * apart) < uint32(rows_end) else int32(0)
            copy_async(sT, at, T, uint32(row + n * apart), col, count)

    return tile_by_columns


@part
def make_shared_memory(spec):
    """Make ``shared_memory()``, which returns the tiles sQ, sK, sV and sP in shared memory.

    The shapes are ``sQ: (Br, d)``, ``sK: (Bc, d)``, ``sV: (Bc, d_v)`` and ``sP: (Br, Bc)``.
    """
    NQ, NK, NV, NP = spec.tile_floats
    AT_K, AT_V, AT_P = NQ, NQ + NK, NQ + NK + NV

    def shared_memory():
        sQ = shared_tile(0, NQ)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NV)
        sP = shared_tile(AT_P, NP)
        return sQ, sK, sV, sP

    return shared_memory


@part
def make_dq_shared_memory(spec):
    """Make ``dq_shared_memory()``, which returns the tiles sQ, sdO, sK, sV and sdS in shared
    memory.

    The shapes are ``sQ: (Br, d)``, ``sdO: (Br, d_v)``, ``sK: (Bc, d)``, ``sV: (Bc, d_v)`` and
    ``sdS: (Br, Bc)``. The kernel that computes only dQ uses it.
    """
    (NQ, NK, NP), (NO, NV, _) = spec.tile_floats, spec.of_values.tile_floats
    AT_DO, AT_K, AT_V, AT_DS = NQ, NQ + NO, NQ + NO + NK, NQ + NO + NK + NV

    def dq_shared_memory():
        sQ = shared_tile(0, NQ)
        sdO = shared_tile(AT_DO, NO)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NV)
        return sQ, sdO, sK, sV, shared_tile(AT_DS, NP)

    return dq_shared_memory


@part
def make_backward_shared_memory(spec):
    """Make ``backward_shared_memory()``, which returns the tiles sQ, sdO, sK, sV, sP and sdS in
    shared memory.

    The shapes are ``sQ: (Br, d)``, ``sdO: (Br, d_v)``, ``sK: (Bc, d)``, ``sV: (Bc, d_v)``,
    ``sP: (Br, Bc)`` and ``sdS: (Br, Bc)``.
    """
    (NQ, NK, NP), (NO, NV, _) = spec.tile_floats, spec.of_values.tile_floats
    AT_DO, AT_K, AT_V = NQ, NQ + NO, NQ + NO + NK
    AT_P, AT_DS = AT_V + NV, AT_V + NV + NP

    def backward_shared_memory():
        sQ = shared_tile(0, NQ)
        sdO = shared_tile(AT_DO, NO)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NV)
        sP = shared_tile(AT_P, NP)
        sdS = shared_tile(AT_DS, NP)
        return sQ, sdO, sK, sV, sP, sdS

    return backward_shared_memory


@cache
def make_q(spec):
    """Make ``q(sQ, Q, row0, rows_end)``, which starts to copy a row tile of one head's Q to sQ."""
    return _make_load_whole(spec, spec.Br, spec.d4, spec.rows_q, spec.head_dim)


@cache
def make_k(spec):
    """Make ``k(sK, K, row0, rows_end)``, which starts to copy a column tile of one head's K to
    sK.
    """
    return _make_load_keys(spec, spec.d4, spec.rows_k, spec.head_dim)


@cache
def make_v(spec):
    """Make ``v(sV, V, row0, rows_end)``, which starts to copy a column tile of one head's V to sV.

    The columns past V's head dimension, up to ``spec.columns``, become 0.
    """
    return _make_load_keys(spec, spec.columns, spec.rows_v, spec.d_v)


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


@cache
def make_rows(spec):
    """Make ``rows(sT, T, row0, rows_end)``, which starts to copy a row tile of Q in the backward
    pass.
    """
    return _make_load_whole(spec, spec.Br, spec.columns, spec.rows_q, spec.head_dim)


@cache
def make_columns(spec):
    """Make ``columns(sT, T, row0, rows_end)``, which starts to copy a column tile of K in the
    backward pass.
    """
    return _make_load_whole(spec, spec.Bc, spec.columns, spec.rows_k, spec.head_dim)


@cache
def make_value_rows(spec):
    """Make ``value_rows(sT, T, row0, rows_end)``, which starts to copy a row tile of dO in the
    backward pass.
    """
    return make_rows(spec.of_values)


@cache
def make_value_columns(spec):
    """Make ``value_columns(sT, T, row0, rows_end)``, which starts to copy a column tile of V in the
    backward pass.
    """
    return make_columns(spec.of_values)


@cache
def make_p(spec):
    """Make ``p(sP, P, row0, rows_end, col0, cols_end)``, which starts to copy a tile of P to sP.

    ``make_tile`` explains the arguments. Standard attention uses it.
    """
    return make_tile(spec.Br, spec.Bc, spec.rows_p, spec.threads, spec.aligned)


@part
def make_paged_tile(rows, columns, places, threads, aligned, page_size):
    """Make the function that ``make_tile`` describes, for K or V in pages.

    In this function, the argument ``T`` is the tuple that ``grid.key_rows`` returns for pages. Each
    page has ``page_size`` rows. ``make_tile`` explains the other arguments of this factory.
    """
    width = 4 if aligned else 1
    chunks = columns // width
    copies = rows * chunks
    per_thread = -(-copies // threads)
    copy_async = copy4_async if aligned else copy1_async
    pitch, flip = places.pitch, flip_of(places)
    page_of, common = make_page_of(page_size), common_rows(page_size, rows)
    shared = turns_in_a_page(page_size, rows, threads, chunks)

    def paged_tile(sT, T, row0, rows_end, col0, cols_end):
        pages, h, table = T
        page = uint32(0)
        for n in range(per_thread):
            copy = uint32(cuda.threadIdx.x + n * threads)
            r = uint32(copy // uint32(chunks))
            c = uint32(uint32(copy % uint32(chunks)) * width)
            row = uint32(row0 + r)
            col = uint32(col0 + c)
            there = row < uint32(rows_end) and copy < uint32(copies)
            if n % shared == 0:
                # The lane with the warp's first chunk in this page looks it up for the others.
                begin = int32(uint32(r // uint32(common)) * uint32(common * chunks))
                first = max(int32(0), int32(begin - int32(uint32(copy // uint32(32)) * 32)))
                page = page_of(table, row, there, first)
            if copy < uint32(copies):
                count = int32(0)
                if there and col < uint32(cols_end):
                    count = int32(min(int32(width), int32(cols_end - col)))
                at = uint32(r * pitch + (c ^ flip(r) // 4))
                copy_async(sT, at, pages[page, h], uint32(row % uint32(page_size)), col, count)

    return paged_tile


@part
def _make_load_keys(spec, columns, places, d):
    """Make ``load_whole(sT, T, row0, rows_end)``, which starts to copy a column tile of K or V,
    with or without pages.

    ``d`` is the number of columns of T. ``columns`` is the number of columns of the tile in shared
    memory.
    """
    page_size = spec.features.page_size
    if not page_size:
        return _make_load_whole(spec, spec.Bc, columns, places, d)
    how = (spec.threads, spec.aligned, page_size)
    load_tile = make_paged_tile(spec.Bc, columns, places, *how)

    def load_whole(sT, T, row0, rows_end):
        load_tile(sT, T, row0, rows_end, 0, d)

    return load_whole


@part
def _make_load_whole(spec, rows, columns, places, d):
    """Make ``load_whole(sT, T, row0, rows_end)``, which starts to copy ``rows`` complete rows of T.

    ``d`` is the number of columns of T. The tile in shared memory has ``columns`` columns.
    """
    load_tile = make_tile(rows, columns, places, spec.threads, spec.aligned)

    def load_whole(sT, T, row0, rows_end):
        load_tile(sT, T, row0, rows_end, 0, d)

    return load_whole
