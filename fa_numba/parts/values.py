"""One value a row (m, l, L or D) between registers and global memory."""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.layout import make_owns
from fa_numba.parts.namespace import part


@cache
def make_read(spec):
    """``read(rv, V, row0, rows_end, thread)``: one value a row, read by one lane of each.

    Rows at or past ``rows_end`` and another warp's get 0.
    """
    return _make_read(spec, float32(0.0))


@cache
def make_read_maxima(spec):
    """``read_maxima(rm, m, row0, rows_end, thread)``: ``read`` of m: other rows get -inf."""
    return _make_read(spec, NEG_INF)


@part
def _make_read(spec, unread):
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
    """``write(rv, V, row0, rows_end, thread)``: one value a row, written by one lane."""
    TM, TY, owns = spec.TM, spec.row_step, make_owns(spec)

    def write(rv, V, row0, rows_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            if thread.tx == uint32(0) and row < rows_end and owns(i):
                V[row] = rv[i]

    return write
