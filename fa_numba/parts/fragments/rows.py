"""A thread's part of a tile of O, dQ, dK or dV in the registers of a tensor core's result: between
registers and global memory.
"""

from functools import cache

from fa_numba.device import int32, int64, uint32
from fa_numba.parts.fragments.pairs import make_read_sums, make_write_floats, make_write_two
from fa_numba.parts.layout import make_owns
from fa_numba.parts.namespace import part


@cache
def make_write_rows(spec):
    """``write_rows(rO, O, row0, rows_end, thread)``: this thread's part of an O tile, rounded."""
    return write_halves(spec)


@part
def write_halves(spec, cols_end=None):
    """``write_rows(rO, O, row0, rows_end, thread)``: a thread's part of a tile, rounded.

    ``cols_end`` is the length of O's rows, where that is not the head dimension of ``spec``.
    """
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    write_two, owns = make_write_two(spec, cols_end), make_owns(spec)

    def write_rows(rO, O, row0, rows_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * STEP)
            if row < rows_end and owns(i):
                for n in range(DN4 // 2):
                    e = i * DN4 + 2 * n
                    write_two(O, row, uint32(8 * n + 2 * thread.tx), rO[e], rO[e + 1])

    return write_rows


@part
def make_read_fragments(spec):
    """``read_fragments(rO, A, row0, rows_end, thread)``: its part of a float32 tile, or zeros.

    Zeros too in another warp's rows.
    """
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    owns, read_floats = make_owns(spec), make_read_sums(spec)

    def read_fragments(rO, A, row0, rows_end, thread):
        first = uint32(row0 + thread.ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, mine = int64(first) + i * STEP, left > i * STEP and owns(i)
            for n in range(0, DN4, 2):
                e = i * DN4 + n
                pair = read_floats(A, row, int64(2 * thread.tx) + 4 * n, mine)
                rO[e] = pair[0]
                rO[e + 1] = pair[1]

    return read_fragments


@part
def make_write_fragments(spec):
    """``write_fragments(rO, A, row0, rows_end, thread)``: its part of a float32 tile to memory."""
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    owns, write_floats = make_owns(spec), make_write_floats(spec)

    def write_fragments(rO, A, row0, rows_end, thread):
        first = uint32(row0 + thread.ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, mine = int64(first) + i * STEP, left > i * STEP and owns(i)
            for n in range(0, DN4, 2):
                e = i * DN4 + n
                write_floats(A, row, int64(2 * thread.tx) + 4 * n, mine, rO[e], rO[e + 1])

    return write_fragments
