"""Rows of 16-bit arrays, a warp a row: D = rowsum(dO o O); and float32 sums, rounded.

Sums in fragments lie as the accumulators of ``wgmma`` do: of 16 rows and 8 columns one behind the
other what a warp's lanes have, four each: two columns of row g = lane // 4, and of row g + 8. So a
warp adds its part of 512 bytes at once. A is of (batch, heads, groups of 16 rows, 16 d) then.
"""

from dataclasses import replace
from functools import cache

from numba import types

from fa_numba.device import cuda, device_function, float32, int64, uint32
from fa_numba.device.signature import array_type, half_type, result_type
from fa_numba.intrinsics.global_memory import read4, read_pair, write4, write_pair
from fa_numba.options import PLAIN
from fa_numba.parts import bind, mma
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import RowFacts
from fa_numba.tiling.spec import FRAGMENT, FRAGMENT_ROWS

WARPS = 4


@cache
def make_clear_fragments(head_dim):
    """``clear_fragments(Ah, row, rows, lane)``: a row's share of A = 0: of 16 rows neighbours, of
    fewer that are left what is this row's.
    """

    @device_function
    def clear_fragments(Ah, row, rows, lane):
        group, r, zero = uint32(row // FRAGMENT_ROWS), uint32(row % FRAGMENT_ROWS), float32(0.0)
        if uint32(FRAGMENT_ROWS * group + FRAGMENT_ROWS) <= rows:
            if uint32(4 * lane) < uint32(head_dim):
                write4(Ah, group, uint32(r * head_dim + 4 * lane), zero, zero, zero, zero)
        elif uint32(2 * lane) < uint32(head_dim):
            place = uint32(lane // 4 * FRAGMENT + r % 8 * 16 + lane % 4 * 4 + r // 8 * 2)
            write_pair(Ah, int64(group), int64(place), zero, zero, True)

    return clear_fragments


@cache
def make_row_sums(head_dim, d_v, dtype, aligned, clear, features, fragments=False):
    """Alg. 2 line 4: D = rowsum(dO o O), less dL; line 3 if ``clear``: A = 0, which may lie in
    ``fragments``. Over (Nq / 4, Hq, B) blocks; a warp takes a row.
    """
    facts = RowFacts(features, d_v, dtype, aligned)
    grid, pairs, gradients = bind(facts, mma.grid, mma.pairs, mma.gradients)
    clear_fragments = make_clear_fragments(head_dim)

    halves = half_type(4)
    arguments = (halves, halves, array_type(3), array_type(4), features.argument_type)

    @cuda.jit(arguments, 32 * WARPS, 0)
    def row_sums(O, dO, D, A, options):
        head = grid.query_head(O.shape[2], 0, options)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Oh, dOh = grid.query_rows(O, head), grid.query_rows(dO, head)
        Dh, Ah = grid.query_rows(D, head), grid.query_rows(A, head)
        rows = uint32(Oh.shape[0])
        dot = float32(0.0)
        col = uint32(2 * lane)
        if row < head.Nq:
            while col < uint32(d_v):
                o, g = pairs.read_two(Oh, row, col), pairs.read_two(dOh, row, col)
                dot += o[0] * g[0] + o[1] * g[1]
                col = uint32(col + 64)
        if fragments and row < rows:
            clear_fragments(Ah, row, rows, lane)
        elif clear and row < rows:
            col = lane
            while col < uint32(head_dim):
                Ah[row, col] = float32(0.0)
                col = uint32(col + 32)
        dot = sum_of_lanes(dot, 32, 1)
        if lane == uint32(0) and row < head.Nq:
            Dh[row] = gradients.row_less_dlse(dot, head, row)

    return row_sums


@cache
def make_round_rows(head_dim, dtype, aligned, splits=1, precision=""):
    """dQ = scale A in 16 bits, or dK, or dV; in float32 with a ``precision``. Over (N / 4, H, B)
    blocks; a warp takes a row.

    A may be in so many ``splits``, neighbours along the axis of heads, which are added up in their
    order.
    """
    facts = RowFacts(replace(PLAIN, precision=precision), head_dim, dtype, aligned)
    (pairs,) = bind(facts, mma.pairs)

    arrays = (array_type(4), result_type(facts.features.planes, 4))
    arguments = (*arrays, types.float32, PLAIN.argument_type)

    @cuda.jit(arguments, 32 * WARPS, 0)
    def round_rows(A, dQ, scale, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Ah, dQh = A[b, uint32(h * splits)], dQ[b, h]
        col = uint32(2 * (uint32(cuda.threadIdx.x) % uint32(32)))
        if row < uint32(Ah.shape[0]):
            while col < uint32(head_dim):
                low, high = Ah[row, col], float32(0.0)
                if uint32(col + 1) < uint32(head_dim):
                    high = Ah[row, uint32(col + 1)]
                if splits > 1:
                    for n in range(1, splits):
                        part = A[b, uint32(h * splits + n)]
                        more = pairs.read_floats(part, row, col, col < uint32(head_dim))
                        low, high = low + more[0], high + more[1]
                pairs.write_two(dQh, row, col, scale * low, scale * high)
                col = uint32(col + 64)

    return round_rows


@cache
def make_round_fragments(head_dim, dtype, aligned):
    """dQ = scale A in 16 bits, of an A in fragments. Over (N / 16, H, B) blocks."""
    (pairs,) = bind(RowFacts(PLAIN, head_dim, dtype, aligned), mma.pairs)
    arrays = array_type(4), result_type(1, 4)

    @cuda.jit((*arrays, types.float32, PLAIN.argument_type), 32 * WARPS, 0)
    def round_fragments(A, dQ, scale, options):
        b, h, group = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        Ah, dQh = A[b, h], dQ[b, h]
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        rows, row = uint32(dQh.shape[0]), uint32(FRAGMENT_ROWS * group + lane // 4)
        n = uint32(uint32(cuda.threadIdx.x) // uint32(32))
        while n < uint32(head_dim // 8):
            place, col = uint32(FRAGMENT * n + 4 * lane), uint32(8 * n + 2 * (lane % 4))
            if uint32(row + 8) < rows:
                x = read4(Ah, group, place)
                pairs.write_two(dQh, row, col, scale * x[0], scale * x[1])
                pairs.write_two(dQh, uint32(row + 8), col, scale * x[2], scale * x[3])
            elif row < rows:
                y = read_pair(Ah, int64(group), int64(place), True)
                pairs.write_two(dQh, row, col, scale * y[0], scale * y[1])
            n = uint32(n + WARPS)

    return round_fragments
