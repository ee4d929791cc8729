"""Parts of the backward pass on CUDA cores: D of a row tile, and dQ in registers and global
memory.
"""

from functools import cache

from fa_numba.device import cuda, float32, int64, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import load4_at_byte
from fa_numba.parts.gradients import make_of_scores as make_of_scores
from fa_numba.parts.gradients import make_row_less_dlse as make_row_less_dlse
from fa_numba.parts.gradients import make_scale_columns as make_scale_columns
from fa_numba.parts.gradients import make_start_columns as make_start_columns
from fa_numba.parts.grid import head_after, make_query_rows
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Thread
from fa_numba.parts.simt.epilogue import make_read_rows, make_write_rows
from fa_numba.parts.simt.swizzle import flip_of
from fa_numba.parts.values import make_read
from fa_numba.parts.visits import make_is_unseen, make_row_starts


@part
def make_initialise_dq(spec):
    """Make ``initialise_dq(rdQ, dQ, first, heads, row0, rows_end, thread)``, which writes dQ = 0
    for some row tiles, before the loops of the kernel begin.

    Normally the function does nothing, because the first pass over K/V writes dQ of all row tiles.
    With a window, ``q_lens`` or a block mask, the first pass can skip row tiles. The function then
    writes zeros.

    - Without a block mask, it writes zeros for all row tiles of the block's query heads between row
      ``row0`` and row ``rows_end``.
    - With a block mask, it writes zeros only for two kinds of row tiles: those that visit no column
      tile, and those with rows past ``q_lens``.

    ``first`` is the ``Head`` of the block's first query head, and ``heads`` is the number of its
    query heads. ``rdQ`` are registers that the function may overwrite.
    """
    Br, RQ, initialises = spec.Br, spec.TM * spec.DN * 4, spec.features.initialises
    is_unseen = make_is_unseen(spec)
    query_rows, write_rows = make_query_rows(spec), make_write_rows(spec)

    def initialise_dq(rdQ, dQ, first, heads, row0, rows_end, thread):
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            g = uint32(0)
            while g < heads:
                head = head_after(first, g)
                dQh = query_rows(dQ, head)
                i0 = row0
                while i0 < rows_end:
                    if is_unseen(i0, head):
                        write_rows(rdQ, dQh, i0, rows_end, thread)
                    i0 = uint32(i0 + Br)
                g = uint32(g + 1)

    return initialise_dq


@part
def make_add_rows(spec):
    """Make ``add_rows(rT, T, factor, row0, rows_end, thread)``, which adds ``factor`` times rT to T
    atomically.

    rT holds a thread's part of a row tile that begins at row ``row0`` of T.
    """
    TM, DN, TX, TY, d = spec.TM, spec.DN, spec.tx_count, spec.ty_count, spec.head_dim

    def add_rows(rT, T, factor, row0, rows_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            for c in range(DN):
                for n in range(4):
                    col = uint32(4 * (thread.tx + c * TX) + n)
                    if row < rows_end and col < uint32(d):
                        add_global(T, row, col, factor * rT[4 * (i * DN + c) + n])

    return add_rows


@part
def make_update_rows(spec):
    """Make ``update_rows(rT, T, factor, visit, tile, rows_end)``, which adds ``factor`` times rT to
    a thread's part of a row tile of T in global memory, without atomic adds.

    Only this thread may access these elements of T. If the row tile of T has not been written yet,
    the function stores ``factor`` times rT without reading T. ``visits.row_starts`` recognises this
    case. With a block mask, it needs ``visit`` for this, the integer that ``visits.row_ahead`` has
    returned.
    """
    RT, row_starts = spec.TM * 4 * spec.DN, make_row_starts(spec)
    read_rows = make_read_rows(spec)
    write_rows = make_write_rows(spec)

    def update_rows(rT, T, factor, visit, tile, rows_end):
        old = cuda.local.array(RT, float32)
        read_end = uint32(0)
        if not row_starts(visit, tile.j0):
            read_end = rows_end
        read_rows(old, T, tile.i0, read_end, tile.thread)
        for e in range(RT):
            rT[e] = factor * rT[e] + old[e]
        write_rows(rT, T, tile.i0, rows_end, tile.thread)

    return update_rows


@cache
def make_row_dots(spec):
    """Make ``row_dots(rD, rL, sdO, O, tile)``, which computes D = rowsum(dO o O) of a thread's rows
    in the registers rD.

    ``sdO`` is the tile of dO in shared memory, and O is read from global memory. ``rD`` and ``rL``
    have one register per row: D and the logsumexp L. If the call has a gradient dL of the
    logsumexp, rD gets D - dL instead.
    """
    return _make_row_dots(spec.of_values)


@part
def _make_row_dots(spec):
    """Make ``row_dots(rD, rL, sdO, O, tile)``, which computes D = rowsum(dO o O) of a thread's
    rows.

    ``make_row_dots`` explains the arguments. The head dimension of ``spec`` is that of V.
    """
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    STEP = spec.lane_step
    TURN = (4 - spec.rows_q.pitch // 4) % 8 if STEP == 2 and TX >= 8 else 0
    row_bytes, flip = 4 * spec.rows_q.pitch, flip_of(spec.rows_q)
    RO = TM * DN * 4
    read_rows, subtract_dlse = make_read_rows(spec), _make_subtract_dlse(spec)

    def row_dots(rD, rL, sdO, O, tile):
        thread = tile.thread
        # The lanes of the next row begin half a line further, in other banks.
        tx = uint32(thread.tx + thread.ty % uint32(2) * uint32(TURN)) % uint32(TX)
        thread = Thread(thread.ty, tx)
        rO = cuda.local.array(RO, float32)
        read_rows(rO, O, tile.i0, tile.head.Nq, thread)
        at = int64(uint32(thread.ty * row_bytes)) + (
            int64(uint32(16 * thread.tx)) ^ flip(thread.ty)
        )
        for i in range(TM):
            dot = float32(0.0)
            for c in range(DN):
                g = load4_at_byte(sdO, at + i * TY * row_bytes + 16 * c * TX)
                e = 4 * (i * DN + c)
                dot += g[0] * rO[e] + g[1] * rO[e + 1] + g[2] * rO[e + 2] + g[3] * rO[e + 3]
            dot = sum_of_lanes(dot, TX, STEP)
            rD[i] = dot
        subtract_dlse(rD, rL, tile)

    return row_dots


@part
def _make_subtract_dlse(spec):
    """Make ``subtract_dlse(rD, rL, tile)``, which subtracts the gradient dL of the logsumexp from
    D.

    Rows with L = -inf are not changed. Without a gradient of L it does nothing.
    """
    TM, dlse = spec.TM, spec.features.dlse
    query_rows, read = make_query_rows(spec), make_read(spec)

    def subtract_dlse(rD, rL, tile):
        if dlse:
            rdL = cuda.local.array(TM, float32)
            read(
                rdL, query_rows(tile.head.options.dL, tile.head), tile.i0, tile.head.Nq, tile.thread
            )
            for i in range(TM):
                if rL[i] != NEG_INF:
                    rD[i] -= rdL[i]

    return subtract_dlse
