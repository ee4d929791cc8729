"""A thread's part of O, dQ, dK and dV on CUDA cores, moved between registers and global memory.

The position of a thread is (ty, tx):

- Row tiles (O, dQ): the thread holds the rows ty + i TY. In each row, it holds the columns 4 (tx +
  c TX) to 4 (tx + c TX) + 3. Column n of group c in row number i is in register 4 (i DN + c) + n.
- Column tiles (dK, dV): the thread holds the rows 4 (ty + g TY) to 4 (ty + g TY) + 3. These rows
  are neighbouring columns of P, so that one 16-byte load reads them from shared memory.
"""

from functools import cache

from fa_numba.device import float32, uint32
from fa_numba.intrinsics.global_memory import read4, write4
from fa_numba.intrinsics.reduction import add_global
from fa_numba.parts.namespace import part
from fa_numba.parts.split_epilogue import writes_split


@part
def make_read_rows(spec):
    """Make ``read_rows(rO, O, row0, rows_end, thread)``, which reads a thread's part of a tile of
    O.

    The tile begins at row ``row0``. Rows at or past ``rows_end``, and columns past the end of a
    row, become 0.
    """
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    d, aligned = spec.d_v, spec.aligned

    def read_rows(rO, O, row0, rows_end, thread):
        for e in range(TM * DN * 4):
            rO[e] = float32(0.0)
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            for c in range(DN):
                col = uint32(4 * (thread.tx + c * TX))
                e = 4 * (i * DN + c)
                if aligned:
                    if row < rows_end and col < uint32(d):
                        o = read4(O, row, col)
                        rO[e] = o[0]
                        rO[e + 1] = o[1]
                        rO[e + 2] = o[2]
                        rO[e + 3] = o[3]
                else:
                    for n in range(4):
                        if row < rows_end and uint32(col + n) < uint32(d):
                            rO[e + n] = O[row, uint32(col + n)]

    return read_rows


@part
def _make_write_four(spec):
    """Make ``write_four(rT, e, T, row, col, rows_end)``, which writes the registers e to e + 3 to
    the columns col to col + 3 of a row of T.

    Nothing is written if the row is at or past ``rows_end``. Nothing is written past the end of the
    row.
    """
    d, aligned = spec.d_v, spec.aligned

    def write_four(rT, e, T, row, col, rows_end):
        if aligned:
            if row < rows_end and col < uint32(d):
                write4(T, row, col, rT[e], rT[e + 1], rT[e + 2], rT[e + 3])
        else:
            for n in range(4):
                if row < rows_end and uint32(col + n) < uint32(d):
                    T[row, uint32(col + n)] = rT[e + n]

    return write_four


@part
def make_write_rows(spec):
    """Make ``write_rows(rO, O, row0, rows_end, thread)``, which writes a thread's part of a tile of
    O.

    The tile begins at row ``row0``. Rows at or past ``rows_end`` are not written.
    """
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    write_four = _make_write_four(spec)

    def write_rows(rO, O, row0, rows_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            for c in range(DN):
                col = uint32(4 * (thread.tx + c * TX))
                e = 4 * (i * DN + c)
                write_four(rO, e, O, row, col, rows_end)

    return write_rows


@cache
def make_write_split(spec):
    """Make ``write_split``, which writes O, l and m of a key split to global memory.

    ``split_epilogue.writes_split`` explains the arguments.
    """
    return writes_split(spec, make_write_rows(spec))


@part
def make_write_two(spec):
    """Make ``write_two(T, row, col, low, high)``, which writes ``low`` and ``high`` to the columns
    col and col + 1 of a row.

    Elements past the end of the row are not written.
    """
    d = spec.d_v

    def write_two(T, row, col, low, high):
        if col < uint32(d):
            T[row, col] = low
        if uint32(col + 1) < uint32(d):
            T[row, uint32(col + 1)] = high

    return write_two


@part
def make_write_columns(spec):
    """Make ``write_columns(rT, T, row0, rows_end, thread)``, which writes a thread's part of dK or
    dV to the array T.

    The column tile begins at row ``row0`` of T. If ``spec.splits_queries`` is true, several blocks
    compute parts of the same dK and dV. The thread then adds its part to T atomically.
    """
    if spec.splits_queries:
        return _make_add_columns(spec)
    CM, DN, TX, TY = spec.CM, spec.DN, spec.tx_count, spec.ty_count
    write_four = _make_write_four(spec)

    def write_columns(rT, T, row0, rows_end, thread):
        for r in range(CM):
            row = uint32(row0 + 4 * (thread.ty + (r // 4) * TY) + r % 4)
            for c in range(DN):
                col = uint32(4 * (thread.tx + c * TX))
                e = 4 * (r * DN + c)
                write_four(rT, e, T, row, col, rows_end)

    return write_columns


@cache
def make_write_dv(spec):
    """Make ``write_dv(rdV, dV, row0, rows_end, thread)``, which writes a thread's part of dV.

    ``make_write_columns`` explains the arguments. The number of columns is V's head dimension.
    """
    return make_write_columns(spec.of_values)


@part
def _make_add_columns(spec):
    """Make ``add_columns(rT, T, row0, rows_end, thread)``, which adds a thread's part of dK or dV
    to T atomically.
    """
    CM, DN, TX, TY, d = spec.CM, spec.DN, spec.tx_count, spec.ty_count, spec.d_v

    def add_columns(rT, T, row0, rows_end, thread):
        for r in range(CM):
            row = uint32(row0 + 4 * (thread.ty + (r // 4) * TY) + r % 4)
            for c in range(DN):
                for n in range(4):
                    col = uint32(4 * (thread.tx + c * TX) + n)
                    if row < rows_end and col < uint32(d):
                        add_global(T, row, col, rT[4 * (r * DN + c) + n])

    return add_columns
