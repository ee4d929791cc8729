"""A thread's part of O and S on tensor cores, moved between registers and memory."""

from dataclasses import replace
from functools import cache

from fa_numba.device import cuda, device_function, int32, int64, uint32
from fa_numba.intrinsics.global_memory import write8
from fa_numba.intrinsics.shared import load8, store2
from fa_numba.parts.fragments.pairs import conversions, make_write_two
from fa_numba.parts.fragments.rows import make_write_fragments
from fa_numba.parts.fragments.rows import make_write_rows as make_write_rows
from fa_numba.parts.layout import make_column
from fa_numba.parts.mma.chunks import ChunkMap, make_first_chunk, make_turn
from fa_numba.parts.mma.swizzle import make_exchange, make_first_place, make_further
from fa_numba.parts.mods import make_times_slope
from fa_numba.parts.namespace import part
from fa_numba.parts.split_epilogue import writes_split
from fa_numba.parts.values import make_write
from fa_numba.tiling.mma_rows import CHUNK


@part
def make_write_tile(spec):
    """Make ``write_tile(rO, sO, O, warp_row, row0, rows_end, thread)``, which rounds a warp's rows
    of O and writes them to global memory.

    The tile begins at row ``row0`` of O. The warp's rows begin at row ``warp_row`` of the tile.
    With ``spec.stores_wide``, the rows go through the warp's rows of shared memory sO, so that each
    store to global memory moves 16 bytes. No other warp may use these rows of sO.
    """
    if spec.tile_heads > 1:
        return _write_tile_of_heads(spec)
    d, wide = spec.d_v, spec.stores_wide
    store_rows = _make_store_rows(spec.TM, spec.output_rows, spec.row_step, spec.dtype)
    write_whole = _make_write_whole(8 * spec.TM, spec.output_rows, False)
    write_rows = make_write_rows(spec)

    def write_tile(rO, sO, O, warp_row, row0, rows_end, thread):
        if wide:
            cuda.syncwarp()  # all lanes have read these rows
            store_rows(sO, rO, thread)
            cuda.syncwarp()  # this warp's rows are there
            write_whole(sO, O, warp_row, row0, rows_end, uint32(0), uint32(d))
        else:
            write_rows(rO, O, row0, rows_end, thread)

    return write_tile


@part
def _write_tile_of_heads(spec):
    """Make the function ``write_tile(rO, sO, O, warp_row, i0, rows_end, thread)`` that
    ``make_write_tile`` describes, for tiles that several heads share.

    ``O: (rows, heads, d)`` contains the rows of all query heads that share the tile. ``i0`` is the
    first row of the tile in each head. ``sO`` and ``warp_row`` are not used.
    """
    TM, DN4, STEP, heads = spec.TM, 4 * spec.DN, spec.row_step, spec.tile_heads
    write_two = make_write_two(spec)

    def write_tile(rO, sO, O, warp_row, i0, rows_end, thread):
        for i in range(TM):
            place = uint32(thread.ty + i * STEP)
            row = uint32(i0 + place // uint32(heads))
            if row < rows_end:
                Oi, head = O[row], uint32(place % uint32(heads))
                for n in range(DN4 // 2):
                    e = i * DN4 + 2 * n
                    write_two(Oi, head, uint32(8 * n + 2 * thread.tx), rO[e], rO[e + 1])

    return write_tile


@part
def make_write_values(spec):
    """Make ``write_values(rv, V, i0, rows_end, thread)``, which writes one value for each row of S
    that the thread holds.

    ``rv: (TM,)`` are registers. Several lanes share a row, and one of these lanes writes the row's
    value. ``V: (rows,)`` is an array of one head, or ``V: (rows, heads)`` if several heads share
    the tile.
    """
    return make_write(spec) if spec.tile_heads == 1 else _write_values_of_heads(spec)


@part
def _write_values_of_heads(spec):
    """Make the function ``write_values(rv, V, i0, rows_end, thread)`` that ``make_write_values``
    describes, for tiles that several heads share.
    """
    TM, STEP, heads = spec.TM, spec.row_step, spec.tile_heads

    def write_values(rv, V, i0, rows_end, thread):
        for i in range(TM):
            place = uint32(thread.ty + i * STEP)
            row = uint32(i0 + place // uint32(heads))
            if thread.tx == uint32(0) and row < rows_end:
                V[row, uint32(place % uint32(heads))] = rv[i]

    return write_values


@cache
def make_write_as(spec, dtype):
    """Make ``write_as(rO, O, row0, rows_end, thread)``, which writes a thread's part of a tile of O
    in ``dtype``: float32, or a 16-bit dtype to which O is rounded.

    ``fragments.rows.make_write_rows`` explains the arguments.
    """
    if dtype == "float32":
        return make_write_fragments(spec)
    return make_write_rows(replace(spec, dtype=dtype))


@part
def _make_store_rows(TM, rows, STEP, dtype):
    """Make ``store_rows(sT, rT, thread)``, which rounds a thread's part of a tile to 16 bits and
    stores it in shared memory sT.

    ``rows`` is the layout of the tile in shared memory (``tiling.mma_rows.TileRows``). A thread has
    TM rows that are STEP rows apart.
    """
    pack, _ = conversions(dtype)
    columns, pitch = rows.columns, rows.pitch
    exchange, further = make_exchange(rows), make_further(rows)

    def store_rows(sT, rT, thread):
        first = uint32(uint32(thread.ty * pitch + 2 * thread.tx) ^ exchange(thread.ty % 8))
        for i in range(TM):
            for n in range(columns // 8):
                e = i * (columns // 4) + 2 * n
                store2(sT, further(first, i * STEP, 8 * n), pack(rT[e], rT[e + 1]))

    return store_rows


@part
def _make_write_whole(count, rows, uneven):
    """Make ``write_whole(sT, T, warp_row, row0, rows_end, col0, cols_end)``, which copies a warp's
    rows of a tile from shared memory to global memory.

    The warp has ``count`` rows, from row ``warp_row`` of the tile sT on. The tile goes to (row0,
    col0) of T. ``rows`` is the layout of the tile in shared memory. Neighbouring lanes write
    neighbouring 16 bytes, and the rows of T must start at 16-byte addresses. ``uneven`` must be
    true if ``cols_end`` can be a number that is not a multiple of 8.
    """
    chunks = ChunkMap(count, rows.columns // CHUNK, 32)
    assert chunks.whole, "the next warp's rows begin where these end"
    copies, RW = chunks.turns, 4 * chunks.turns
    first_chunk, turn = make_first_chunk(chunks), make_turn(chunks)
    first_place, pitch = make_first_place(rows, chunks), rows.pitch
    exchange = make_exchange(rows)

    @device_function
    def lane():
        return uint32(cuda.laneid)

    def write_whole(sT, T, warp_row, row0, rows_end, col0, cols_end):
        rW = cuda.local.array(RW, uint32)
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(lane())
            at = int64(uint32(warp_row * pitch + first_place(lane(), r, c)))
            w = load8(sT, at + (down * pitch + right))
            for e in range(4):
                rW[4 * n + e] = w[e]
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(lane())
            first = uint32(row0 + warp_row + r)
            left = int32(int32(rows_end) - int32(first))
            c = uint32(c ^ exchange(r + down))  # the chunk that is stored at this index
            row, col = int64(first) + down, uint32(col0 + c + right)
            mine = left > int32(down)
            full = mine and uint32(col + 7) < cols_end
            e = 4 * n
            write8(T, row, col, rW[e], rW[e + 1], rW[e + 2], rW[e + 3], full)
            if uneven and mine and not full:
                for e in range(7):
                    if uint32(col + e) < cols_end:
                        T[row, uint32(col + e)] = rW[4 * n + e // 2] >> uint32(16 * (e % 2))

    return write_whole


@cache
def make_store_scores(spec):
    """Make ``store_scores(sS, rS, thread)``, which rounds a thread's part of S to 16 bits and
    stores it in shared memory ``sS: (Br, Bc)``.
    """
    return _make_store_rows(spec.TM, spec.rows_s, spec.row_step, spec.dtype)


@part
def make_times_scores(spec):
    """Make ``times_scores(rS, S, row0, rows_end, col0, cols_end, thread)``, which multiplies
    derivatives in the registers rS by the elements of a tile of dS.

    Despite its name, the array S in global memory contains dS when the function is called. The tile
    begins at (row0, col0) of S. Registers of elements at or past ``rows_end`` or ``cols_end`` are
    not changed.
    """
    TM, TN, STEP = spec.TM, spec.TN, spec.row_step
    _, unpack = conversions(spec.dtype)
    column, times_slope = make_column(spec), make_times_slope(spec.features)

    def times_scores(rS, S, row0, rows_end, col0, cols_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * STEP)
            for j in range(TN):
                col = uint32(col0 + column(thread.tx, j))
                if row < rows_end and col < cols_end:
                    s = unpack(uint32(S[row, col]))[0]
                    rS[i * TN + j] = times_slope(s, rS[i * TN + j])

    return times_scores


@cache
def make_write_scores(spec):
    """Make ``write_scores(sS, S, warp_row, row0, rows_end, col0, cols_end)``, which copies a warp's
    rows of S from shared memory sS to global memory.

    ``store_scores`` has stored these rows in sS. ``_make_write_whole`` explains the arguments.
    """
    return _make_write_whole(8 * spec.TM, spec.rows_s, True)


@cache
def make_write_split(spec):
    """Make ``write_split``, which writes O, l and m of a key split to global memory.

    ``split_epilogue.writes_split`` explains the arguments.
    """
    return writes_split(spec, make_write_fragments(spec))
