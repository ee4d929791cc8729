"""The kernel that computes D = rowsum(dO o O) of float32 arrays."""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.parts import bind, simt
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import RowFacts

WARPS = 4


@cache
def make_row_sums(head_dim, d_v, clear, features):
    """Return the kernel that computes D = rowsum(dO o O) - dL (line 4 of Algorithm 2).

    The grid is (Nq / 4, query heads, B), and a warp computes one row. If the loss has no gradient
    of L, dL is 0. If ``clear`` is true, the kernel also sets dQ = 0 (line 3).
    """
    grid, gradients = bind(RowFacts(features), simt.grid, simt.gradients)

    arrays = (array_type(4), array_type(4), array_type(3), array_type(4))
    arguments = (*arrays, features.argument_type)

    @cuda.jit(arguments, 32 * WARPS, 0)
    def row_sums(O, dO, D, dQ, options):
        head = grid.query_head(O.shape[2], 0, options)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Oh, dOh = grid.query_rows(O, head), grid.query_rows(dO, head)
        Dh, dQh = grid.query_rows(D, head), grid.query_rows(dQ, head)
        rows = uint32(Oh.shape[0])
        dot = float32(0.0)
        col = lane
        if row < head.Nq:
            Oi, dOi = Oh[row], dOh[row]
            while col < uint32(d_v):
                dot += Oi[col] * dOi[col]
                col = uint32(col + 32)
        if clear and row < rows:
            col = lane
            while col < uint32(head_dim):
                dQh[row, col] = float32(0.0)
                col = uint32(col + 32)
        dot = sum_of_lanes(dot, 32, 1)
        if lane == uint32(0) and row < head.Nq:
            Dh[row] = gradients.row_less_dlse(dot, head, row)

    return row_sums
