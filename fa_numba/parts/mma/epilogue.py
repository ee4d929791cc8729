"""A thread's part of O and S on tensor cores, moved between registers and memory."""

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
    """Make ``write_tile(rO, sO, O, warp_row, row0, rows_end, thread)``, which writes a warp's rows
    of O, rounded.

    The tile begins at row ``row0``, and the warp's rows at row ``warp_row`` of the tile. If
    possible (``spec.stores_wide``), the rows go through the warp's rows of shared memory sO, so
    that each store to global memory moves 16 bytes. No other warp may use these rows.
    """
    if spec.tile_heads > 1:
        return _write_tile_of_heads(spec)
    d, wide = spec.d_v, spec.stores_wide
    store_rows = _make_store_rows(spec.TM, spec.value_rows, spec.row_step, spec.dtype)
    write_whole = _make_write_whole(8 * spec.TM, spec.value_rows, False)
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
    """Make ``write_tile(rO, sO, O, warp_row, i0, rows_end, thread)`` for tiles that several heads
    share.

    ``O: (rows, heads, d)`` contains the rows of all query heads that share the tile, and i0 is the
    first row of each head. ``sO`` and ``warp_row`` are not used.
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
    """Make ``write_values(rv, V, i0, rows_end, thread)``, which writes one value for each of a
    thread's rows.

    ``rv: (TM,)`` are registers. One of the lanes that share a row writes the value. If several
    heads share the tile, ``V: (rows, heads)``, otherwise ``V: (rows,)``.
    """
    return make_write(spec) if spec.tile_heads == 1 else _write_values_of_heads(spec)


@part
def _write_values_of_heads(spec):
    """Make ``write_values(rv, V, i0, rows_end, thread)`` for tiles that several heads share."""
    TM, STEP, heads = spec.TM, spec.row_step, spec.tile_heads

    def write_values(rv, V, i0, rows_end, thread):
        for i in range(TM):
            place = uint32(thread.ty + i * STEP)
            row = uint32(i0 + place // uint32(heads))
            if thread.tx == uint32(0) and row < rows_end:
                V[row, uint32(place % uint32(heads))] = rv[i]

    return write_values


@part
def _make_store_rows(TM, rows, STEP, dtype):
    """Make ``store_rows(sT, rT, thread)``, which stores a thread's part of a tile, rounded, in
    shared memory.

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
    """Make ``write_whole(sT, T, warp_row, row0, rows_end, col0, cols_end)``, which writes a warp's
    rows of a tile.

    The warp's ``count`` rows begin at row ``warp_row`` of the tile sT in shared memory. The tile
    goes to (row0, col0) of T. Neighbouring lanes write neighbouring 16 bytes, and the rows of T
    must start at 16-byte addresses. ``uneven`` says that ``cols_end`` need not be a multiple of 8.
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
    """Make ``store_scores(sS, rS, thread)``, which stores a thread's part of S, rounded, in shared
    memory ``sS: (Br, Bc)``.
    """
    return _make_store_rows(spec.TM, spec.rows_s, spec.row_step, spec.dtype)


@part
def make_times_scores(spec):
    """Make ``times_scores(rS, S, row0, rows_end, col0, cols_end, thread)``, which multiplies rS by
    a tile of S.

    rS holds derivatives of the scores. The tile of the array S in global memory holds dS, and
    begins at (row0, col0) of S. Elements at or past ``rows_end`` or ``cols_end`` are not changed.
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
    """Make ``write_scores(sS, S, warp_row, row0, rows_end, col0, cols_end)``, which writes a warp's
    rows of S.

    The rows come from shared memory sS, where ``store_scores`` has stored them. The arguments are
    those of ``_make_write_whole``.
    """
    return _make_write_whole(8 * spec.TM, spec.rows_s, True)


@cache
def make_write_split(spec):
    """Make ``write_split``, which writes O, l and m of a key split.

    ``split_epilogue.writes_split`` explains the arguments.
    """
    return writes_split(spec, make_write_fragments(spec))
