"""One float32 value per row (m, l, L or D), moved between registers and global memory."""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.layout import make_owns
from fa_numba.parts.namespace import part


@cache
def make_read(spec):
    """Make ``read(rv, V, row0, rows_end, thread)``, which reads one value for each row of S that
    the thread holds.

    ``rv: (TM,)`` are registers. ``V`` is an array of one head with one value per row. The tile
    begins at row ``row0``. One lane reads the value of a row, and passes it to the other lanes that
    hold the row. The result is 0 for rows at or past ``rows_end``, and for rows that another warp
    owns.
    """
    return _make_read(spec, float32(0.0))


@cache
def make_read_maxima(spec):
    """Make ``read_maxima(rm, m, row0, rows_end, thread)``, which reads the maximum m of each row of
    S that the thread holds.

    ``make_read`` explains the arguments. Rows that are not read get -inf instead of 0.
    """
    return _make_read(spec, NEG_INF)


@part
def _make_read(spec, unread):
    """Make ``read_values(rv, V, row0, rows_end, thread)``, which ``make_read`` describes.

    Rows that are not read get the value ``unread``.
    """
    TM, TY, owns, STEP = spec.TM, spec.row_step, make_owns(spec), spec.lane_step

    def read_values(rv, V, row0, rows_end, thread):
        first = uint32(uint32(cuda.threadIdx.x) % uint32(32) - thread.tx * STEP)
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            value = unread
            if thread.tx == uint32(0) and row < rows_end and owns(i):
                value = V[row]
            rv[i] = cuda.shfl_sync(FULL_WARP, value, first)

    return read_values


@part
def make_write(spec):
    """Make ``write(rv, V, row0, rows_end, thread)``, which writes one value for each row of S that
    the thread holds.

    ``rv: (TM,)`` are registers. The tile begins at row ``row0``. Several lanes hold a row, and one
    of these lanes writes the row's value to ``V[row]``. Rows at or past ``rows_end`` are not
    written.
    """
    TM, TY, owns = spec.TM, spec.row_step, make_owns(spec)

    def write(rv, V, row0, rows_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            if thread.tx == uint32(0) and row < rows_end and owns(i):
                V[row] = rv[i]

    return write
