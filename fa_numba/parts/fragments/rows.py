"""A thread's part of a tile of O, dQ, dK or dV, moved between tensor-core registers and global
memory.

The registers have the layout of a tensor core's result.
"""

from functools import cache

from fa_numba.device import int32, int64, uint32
from fa_numba.parts.fragments.pairs import make_read_sums, make_write_floats, make_write_two
from fa_numba.parts.layout import make_owns
from fa_numba.parts.namespace import part


@cache
def make_write_rows(spec):
    """Make ``write_rows(rO, O, row0, rows_end, thread)``, which rounds a thread's part of a tile of
    O and writes it to global memory.

    The tile begins at row ``row0`` of O. Rows at or past ``rows_end`` are not written.
    """
    return write_halves(spec)


@part
def write_halves(spec, cols_end=None):
    """Make ``write_rows(rO, O, row0, rows_end, thread)``, which rounds a thread's part of a tile
    and writes it to global memory.

    ``make_write_rows`` explains the arguments. Columns at or past ``cols_end`` are not written.
    None means the number of columns of attention's output.
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
    """Make ``read_fragments(rO, A, row0, rows_end, thread)``, which reads a thread's part of a tile
    from the float32 array A.

    The registers have the shape ``rO: (TM, 4 DN)``. The tile begins at row ``row0`` of A. Rows at
    or past ``rows_end`` become 0. If the warps split the keys, rows that another warp owns become
    0, too.
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
    """Make ``write_fragments(rO, A, row0, rows_end, thread)``, which writes a thread's part of a
    tile to the float32 array A.

    The registers have the shape ``rO: (TM, 4 DN)``. The tile begins at row ``row0`` of A. Rows at
    or past ``rows_end`` are not written. If the warps split the keys, rows that another warp owns
    are not written either.
    """
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
