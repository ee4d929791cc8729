"""Parts of the backward pass on tensor cores: dQ, dK and dV in registers and global memory.

Registers hold the transposed S and dP. Each warp computes its own rows of dK and dV. If two warps
compute the same rows, each of the two computes half of the columns. All warps together compute the
row tile of dQ.

A large dQ does not fit into the registers. It is computed in two turns, one after the other
(``spec.query_turns`` is 2). An argument ``turn`` is the number of the turn, 0 or 1.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.intrinsics.shared import load2
from fa_numba.parts.fragments.pairs import (
    conversions,
    make_add_two,
    make_read_floats,
    write_pairs_of,
    write_rounded_of,
)
from fa_numba.parts.fragments.rows import write_halves
from fa_numba.parts.gradients import make_less_dlse
from fa_numba.parts.gradients import make_of_scores as make_of_scores
from fa_numba.parts.gradients import make_row_less_dlse as make_row_less_dlse
from fa_numba.parts.gradients import make_scale_columns as make_scale_columns
from fa_numba.parts.gradients import make_start_columns as make_start_columns
from fa_numba.parts.grid import head_after, make_query_rows
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.mma.products import make_dq
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Thread, Warp
from fa_numba.parts.visits import make_is_unseen, make_row_sees_more, make_row_starts


@part
def make_query_place(spec):
    """Make ``query_place(row0, rows_end, turn)``, which returns the position in the array dQ at
    which this thread's part begins.

    The row tile begins at row ``row0``. The result is the row and the column of the thread's first
    element, and the number of rows from this row to ``rows_end``. ``_query_pairs`` gives the
    positions of the other elements relative to the first. ``turn`` is 0 or 1, the number of the
    turn (``spec.query_turns``).
    """
    R, ALONG = spec.query_fragments, spec.chunk_warps

    def query_place(row0, rows_end, turn):
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(row0 + warp // uint32(ALONG) * (16 * R) + lane // uint32(4))
        col = uint32((warp % uint32(ALONG) + turn * ALONG) * 16 + lane % uint32(4) * 2)
        return int64(row), int64(col), int32(int32(rows_end) - int32(row))

    return query_place


def _query_pairs(spec):
    """Return the position of each of a thread's pairs of elements of dQ, relative to the thread's
    first element.

    A position is (rows, columns). Pair number e consists of the registers 2 e and 2 e + 1, which
    hold two neighbouring elements of a row.
    """
    R, C, STEP = spec.query_fragments, spec.query_chunks, spec.chunk_step
    return tuple(
        (16 * r + 8 * half, 16 * c * STEP + 8 * n)
        for r in range(R)
        for c in range(C)
        for n in range(2)
        for half in range(2)
    )


@part
def make_start_dq(spec):
    """Make ``start_dq(rdQ)``, which sets dQ = 0 in registers."""
    RQ = 8 * spec.query_fragments * spec.query_chunks

    def start_dq(rdQ):
        for e in range(RQ):
            rdQ[e] = float32(0.0)

    return start_dq


@part
def make_add_dq(spec):
    """Make ``add_dq(rdQ, sdS, sK, A, row0, rows_end)``, which adds this warp's part of dQ to the
    array A atomically.

    A is the float32 sum of dQ in global memory. The row tile begins at row ``row0`` of A. A large
    dQ is computed in two turns. rdQ then contains the result of the first turn. The function adds
    it to A, computes the result of the second turn from dS in sdS and K in sK, and adds that result
    too.
    """
    pairs, place = _query_pairs(spec), make_query_place(spec)
    add_two, start_dq, dq = make_add_two(spec), make_start_dq(spec), make_dq(spec)
    twice = spec.query_turns > 1

    def add_turn(rdQ, A, row0, rows_end, turn):
        row, col, left = place(row0, rows_end, turn)
        for e in range(len(pairs)):
            down, along = pairs[e]
            add_two(A, row + down, col + along, left > down, rdQ[2 * e], rdQ[2 * e + 1])

    add_turn = device_function(add_turn)

    def add_dq(rdQ, sdS, sK, A, row0, rows_end):
        add_turn(rdQ, A, row0, rows_end, 0)
        if twice:
            start_dq(rdQ)
            dq(rdQ, sdS, sK, 1)
            add_turn(rdQ, A, row0, rows_end, 1)

    return add_dq


@part
def make_read_dq(spec):
    """Make ``read_dq(rdQ, A, visit, tile, rows_end, turn)``, which reads this warp's part of dQ
    from A, the float32 array that stores dQ between the passes of FA-1.

    Rows at or past ``rows_end`` become 0. If this row tile of A has not been written yet, the
    function reads nothing, and sets rdQ to 0. ``visits.row_starts`` recognises this case. With a
    block mask, it needs ``visit`` for this, the integer that ``visits.row_ahead`` has returned.
    ``query_place`` explains ``turn``.
    """
    row_starts = make_row_starts(spec)
    pairs, place = _query_pairs(spec), make_query_place(spec)
    read_floats = make_read_floats(spec)

    def read_dq(rdQ, A, visit, tile, rows_end, turn):
        seen = uint32(0)
        if not row_starts(visit, tile.j0):
            seen = rows_end
        row, col, left = place(tile.i0, seen, turn)
        for e in range(len(pairs)):
            down, along = pairs[e]
            pair = read_floats(A, row + down, col + along, left > down)
            rdQ[2 * e] = pair[0]
            rdQ[2 * e + 1] = pair[1]

    return read_dq


@part
def make_write_dq(spec):
    """Make ``write_dq(rdQ, operands, results, scale, visit, tile, rows_end)``, which writes this
    warp's part of dQ to global memory in FA-1.

    rdQ contains the sum over this visit and all visits before: the caller has read the earlier sum
    from memory. ``results`` is a pair of arrays: A, which stores dQ between the passes in float32,
    and the output dQ. If a later pass visits the row tile again, the sum replaces the values in A.
    In the last pass, the sum is multiplied by ``scale``, rounded, and written to the output.
    ``visit`` is the integer that
    ``visits.row_ahead`` has returned for this row tile. It is used only with a block mask.

    A large dQ is computed in two turns. rdQ then contains the result of the first turn. The
    function writes it, computes the result of the second turn, and writes that result too.
    ``operands`` is the pair (sdS, sK) of tiles in shared memory, from which the second turn is
    computed.
    """
    write_sums, write_rounded = _make_write_sums(spec), _make_write_rounded(spec)
    read_dq, dq, twice = make_read_dq(spec), make_dq(spec), spec.query_turns > 1
    sees_more = make_row_sees_more(spec)

    def write_turn(rdQ, results, scale, more, row0, rows_end, turn):
        if more:
            write_sums(rdQ, results[0], row0, rows_end, turn)
        else:
            write_rounded(rdQ, results[1], scale, row0, rows_end, turn)

    write_turn = device_function(write_turn)

    def write_dq(rdQ, operands, results, scale, visit, tile, rows_end):
        more = sees_more(visit, tile.i0, tile.j0, tile.head)
        write_turn(rdQ, results, scale, more, tile.i0, rows_end, 0)
        if twice:
            read_dq(rdQ, results[0], visit, tile, rows_end, 1)
            dq(rdQ, operands[0], operands[1], 1)
            write_turn(rdQ, results, scale, more, tile.i0, rows_end, 1)

    return write_dq


@part
def make_initialise_dq(spec):
    """Make ``initialise_dq(rdQ, A, dQ, scale, first, heads, row0, rows_end)``, which writes dQ = 0
    for some row tiles in FA-1, before the loops of the kernel begin.

    Normally the function does nothing, because the first pass over K/V writes dQ of all row tiles.
    With a window, ``q_lens`` or a block mask, the first pass can skip row tiles. The function then
    writes zeros.

    - Without a block mask, it writes zeros for all row tiles of the block's query heads between row
      ``row0`` and row ``rows_end``.
    - With a block mask, it writes zeros only for two kinds of row tiles: those that visit no column
      tile, and those with rows past ``q_lens``.

    The zeros are written to the output dQ. Without a block mask, they are also written to A, the
    float32 array that stores dQ between the passes. ``first`` is the ``Head`` of the block's first
    query head, and ``heads`` is the number of its query heads. ``rdQ`` are registers that the
    function may overwrite.
    """
    is_unseen, sparse = make_is_unseen(spec), spec.features.sparse
    Br, initialises, start_dq = spec.Br, spec.features.initialises, make_start_dq(spec)
    TWICE, query_rows = spec.query_turns > 1, make_query_rows(spec)
    write_sums, write_rounded = _make_write_sums(spec), _make_write_rounded(spec)

    def initialise_dq(rdQ, A, dQ, scale, first, heads, row0, rows_end):
        if initialises:
            start_dq(rdQ)
            g = uint32(0)
            while g < heads:
                head = head_after(first, g)
                Ah, dQh = query_rows(A, head), query_rows(dQ, head)
                i0 = row0
                while i0 < rows_end:
                    if is_unseen(i0, head):
                        if not sparse:  # otherwise the first visit does not read A
                            write_sums(rdQ, Ah, i0, rows_end, 0)
                        write_rounded(rdQ, dQh, scale, i0, rows_end, 0)
                        if TWICE:
                            if not sparse:
                                write_sums(rdQ, Ah, i0, rows_end, 1)
                            write_rounded(rdQ, dQh, scale, i0, rows_end, 1)
                    i0 = uint32(i0 + Br)
                g = uint32(g + 1)

    return initialise_dq


@cache
def _make_write_sums(spec):
    """Make ``write_sums(rdQ, A, row0, rows_end, turn)``, which writes a warp's part of dQ to A, the
    float32 array that stores dQ between the passes of FA-1.

    The row tile begins at row ``row0``. ``query_place`` explains ``turn``.
    """
    return write_pairs_of(spec, _query_pairs(spec), make_query_place(spec))


@cache
def _make_write_rounded(spec):
    """Make ``write_rounded(rdQ, dQ, factor, row0, rows_end, turn)``, which multiplies a warp's part
    of dQ by ``factor``, rounds it to the dtype of dQ, and writes it to the array dQ.

    The row tile begins at row ``row0``. ``query_place`` explains ``turn``.
    """
    return write_rounded_of(spec, _query_pairs(spec), make_query_place(spec))


@part
def make_warp_and_thread(spec):
    """Make ``warp_and_thread()``, which returns the ``Warp`` and the ``Thread`` of this thread.

    The ``Thread`` says which elements of the transposed S the thread holds.
    """
    U, ROWS, COLUMNS, WIDTH = spec.warp_parts

    def warp_and_thread():
        warp, lane = uint32(cuda.threadIdx.x) // uint32(32), uint32(cuda.threadIdx.x) % uint32(32)
        warp_row = uint32(warp % uint32(U) * ROWS)
        warp_column = uint32(warp // uint32(U) * COLUMNS)
        chunk = uint32(warp % uint32(U) * WIDTH)
        ty = uint32(warp_row // uint32(2) + lane % uint32(4))
        tx = uint32(warp_column + lane // uint32(4))
        return Warp(warp_row, warp_column, chunk), Thread(ty, tx)

    return warp_and_thread


@device_function
def column_thread(warp, thread):
    """Return the ``Thread`` record for dK and dV: it says which of their elements a thread holds.

    ``warp`` and ``thread`` are the results of ``warp_and_thread``. A row of dK and dV is a column
    of S. Therefore ``thread.tx`` decides the rows of dK and dV that the thread holds.
    """
    lane = uint32(cuda.threadIdx.x) % uint32(32)
    return Thread(thread.tx, uint32(warp.chunk // uint32(2) + lane % uint32(4)))


@cache
def make_row_dots(spec):
    """Make ``row_dots(sD, sL, sdO, sO, tile)``, which stores D = rowsum(dO o O) of a row tile in
    shared memory sD.

    The sum is over V's head dimension. ``_make_row_dots`` explains the arguments.
    """
    return _make_row_dots(spec.of_values)


@part
def _make_row_dots(spec):
    """Make ``row_dots(sD, sL, sdO, sO, tile)``, which stores D = rowsum(dO o O) of a row tile in
    shared memory sD.

    The arguments sdO, sO and sL are dO, O and L of the row tile in shared memory. If the call has a
    gradient dL of the logsumexp, D - dL is stored instead. A warp computes one row at a time. Other
    warps can read sD after the next barrier.

    The swizzle permutes the columns of sdO and sO in the same way. The sum over columns is
    therefore correct without undoing the swizzle.
    """
    Br, pitch, columns, warps = spec.Br, spec.rows.pitch, spec.columns, spec.warps
    _, unpack = conversions(spec.dtype)
    dlse, less_dlse = spec.features.dlse, make_less_dlse(spec)

    def row_dots(sD, sL, sdO, sO, tile):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.threadIdx.x) // uint32(32)
        while row < uint32(Br):
            dot = float32(0.0)
            for first in range(0, columns, 64):
                col = uint32(first + 2 * lane)
                if col < uint32(columns):
                    at = uint32(row * pitch + col)
                    o, g = unpack(load2(sO, at)), unpack(load2(sdO, at))
                    dot += o[0] * g[0] + o[1] * g[1]
            dot = sum_of_lanes(dot, 32, 1)
            if dlse and lane == uint32(0) and uint32(tile.i0 + row) < tile.head.Nq:
                dot = less_dlse(dot, sL[row], tile.head, uint32(tile.i0 + row))
            if lane == uint32(0):
                sD[row] = dot
            row = uint32(row + warps)

    return row_dots


@cache
def make_write_columns(spec):
    """Make ``write_columns(rT, T, row0, rows_end, thread)``, which writes a thread's part of dK or
    dV to the array T.

    The column tile begins at row ``row0`` of T. Normally the part is rounded to the dtype of T. If
    ``spec.splits_queries`` is true, several blocks compute parts of the same dK and dV. T is then
    the float32 sum of these parts, and the thread adds its part atomically.
    """
    if spec.splits_queries:
        return _make_add_columns(spec)
    return write_halves(spec.gradients, spec.head_dim)


@part
def make_write_dv(spec):
    """Make ``write_dv(rdV, dV, row0, rows_end, thread)``, which writes a thread's part of dV to
    global memory.

    ``make_write_columns`` explains the arguments. ``thread`` says which elements of dK the thread
    holds. If V has another head dimension than Q, the function computes from ``thread`` which
    elements of dV the thread holds.
    """
    write_columns = make_write_columns(spec.of_values)
    if not spec.head_dim_v:
        return write_columns
    HALF, HALF_V = spec.warp_parts[-1] // 2, spec.of_values.warp_parts[-1] // 2

    def write_dv(rdV, dV, row0, rows_end, thread):
        tx = uint32(thread.tx // uint32(HALF) * HALF_V + thread.tx % uint32(HALF))
        write_columns(rdV, dV, row0, rows_end, Thread(thread.ty, tx))

    return write_dv


@part
def _make_add_columns(spec):
    """Make ``add_columns(rdK, A, row0, rows_end, thread)``, which adds a thread's part of dK to A,
    the float32 sum of dK in global memory, atomically.
    """
    TM, DN4, STEP = spec.TN, 4 * spec.gradients.DN, spec.row_step
    add_two = make_add_two(spec)

    def add_columns(rdK, A, row0, rows_end, thread):
        first = uint32(row0 + thread.ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, inside = int64(first) + i * STEP, left > i * STEP
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                add_two(A, row, int64(2 * thread.tx) + 8 * n, inside, rdK[e], rdK[e + 1])

    return add_columns
