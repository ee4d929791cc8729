"""Kernels for rows of 16-bit arrays: D = rowsum(dO o O), and the rounding of float32 sums.

The float32 sum A of dQ can be stored in fragments, in the order in which the registers of ``wgmma``
hold a result. A fragment has 16 rows and 8 columns, which are 512 contiguous bytes. Lane l holds
four elements of a fragment: two columns of row g = l // 4, and the same columns of row g + 8. The
array A then has the shape (batch, heads, groups of 16 rows, 16 d).
"""

from dataclasses import replace
from functools import cache

from numba import types

from fa_numba.device import cuda, float32, int64, uint32
from fa_numba.device.signature import array_type, half_type, result_type
from fa_numba.intrinsics.global_memory import (
    read4,
    read8,
    read_pair,
    write4,
    write8,
    write_pair,
)
from fa_numba.options import PLAIN
from fa_numba.parts import bind, mma
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import RowFacts
from fa_numba.tiling.spec import FRAGMENT, FRAGMENT_ROWS

WARPS = 4
THREADS = 32 * WARPS


@cache
def make_row_sums(head_dim, d_v, dtype, aligned, clear, features):
    """Return the kernel that computes D = rowsum(dO o O) - dL (line 4 of Algorithm 2).

    The grid is (Nq / 4, query heads, B), and a warp computes one row. If the loss has no gradient
    of L, dL is 0. If ``clear`` is true, the kernel also sets the float32 sum of dQ to 0: A = 0
    (line 3).
    """
    facts = RowFacts(features, d_v, dtype, aligned)
    grid, pairs, gradients = bind(facts, mma.grid, mma.pairs, mma.gradients)

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
        if clear and row < rows:
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
    """Return the kernel that rounds a float32 sum A: dQ = scale A. The grid is (N / 4, H, B).

    The result is dQ, dK or dV. It is in 16 bits, or in float32 if ``precision`` names a precision
    with planes. A warp computes one row. If ``splits`` is above 1, A contains this number of parts
    of each sum, as neighbouring heads. The kernel first adds the parts, in the order of their
    numbers.
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


def rows_of_sums(head_dim):
    """Return how many lanes share a row, and how many rows a thread block computes.

    Both numbers are for the kernel of ``make_group_row_sums``. A lane reads 8 elements of a row of
    O and of dO. The number of rows is a multiple of 16, the rows of a fragment.
    """
    lanes = 1
    while 8 * lanes < head_dim:
        lanes *= 2
    return lanes, max(FRAGMENT_ROWS, THREADS // lanes)


@cache
def make_group_row_sums(head_dim, dtype, features):
    """Return the kernel that computes D = rowsum(dO o O) - dL, and sets the float32 sum A of dQ to
    0.

    A is stored in fragments, as this module describes. These are lines 3 and 4 of Algorithm 2. The
    grid is (Nq / n, query heads, B) for n rows per thread block (``rows_of_sums``). If the loss has
    no gradient of L, dL is 0. Each thread reads O and dO, and writes A, in pieces of 16 bytes.
    """
    (grid, gradients) = bind(RowFacts(features, head_dim, dtype, True), mma.grid, mma.gradients)
    _, unpack = conversions(dtype)
    LANES, ROWS = rows_of_sums(head_dim)
    AT_ONCE = THREADS // LANES
    PASSES, VECTORS, PIECES = ROWS // AT_ONCE, ROWS * head_dim // 4, 4 * head_dim
    WORDS = 4 * PASSES

    halves = half_type(4)
    arguments = (halves, halves, array_type(3), array_type(4), features.argument_type)

    @cuda.jit(arguments, THREADS, 0)
    def row_sums_of_groups(O, dO, D, A, options):
        rO = cuda.local.array(WORDS, uint32)
        rdO = cuda.local.array(WORDS, uint32)
        head = grid.query_head(O.shape[2], 0, options)
        thread, row0 = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x * ROWS)
        Oh, dOh = grid.query_rows(O, head), grid.query_rows(dO, head)
        Dh, Ah = grid.query_rows(D, head), grid.query_rows(A, head)
        rows, zero = uint32(Oh.shape[0]), float32(0.0)
        first, col = uint32(row0 + thread // LANES), uint32(8 * (thread % LANES))
        for n in range(PASSES):
            row = uint32(first + AT_ONCE * n)
            for e in range(4 * n, 4 * n + 4):
                rO[e], rdO[e] = uint32(0), uint32(0)
            if row < head.Nq and col < uint32(head_dim):
                rO[4 * n], rO[4 * n + 1], rO[4 * n + 2], rO[4 * n + 3] = read8(Oh, row, col)
                words = read8(dOh, row, col)
                rdO[4 * n], rdO[4 * n + 1], rdO[4 * n + 2], rdO[4 * n + 3] = words
        vector = thread
        while vector < uint32(VECTORS):
            group = uint32(row0 // FRAGMENT_ROWS + vector // PIECES)
            piece = uint32(vector % PIECES)
            row = uint32(FRAGMENT_ROWS * group + piece % 32 // 4)
            if uint32(row + 8) < rows:
                write4(Ah, group, uint32(4 * piece), zero, zero, zero, zero)
            elif row < rows:
                write_pair(Ah, int64(group), int64(4 * piece), zero, zero, True)
            vector = uint32(vector + THREADS)
        for n in range(PASSES):
            dot = float32(0.0)
            for e in range(4 * n, 4 * n + 4):
                o0, o1 = unpack(rO[e])
                g0, g1 = unpack(rdO[e])
                dot += o0 * g0 + o1 * g1
            dot = sum_of_lanes(dot, LANES, 1)
            row = uint32(first + AT_ONCE * n)
            if col == uint32(0) and row < head.Nq:
                Dh[row] = gradients.row_less_dlse(dot, head, row)

    return row_sums_of_groups


def groups_of_rounding(head_dim):
    """Return the number of groups of 16 rows that a block of ``make_round_fragments`` rounds."""
    return max(1, THREADS // head_dim)


@cache
def make_round_fragments(head_dim, dtype):
    """Return the kernel that rounds the float32 sum A of dQ to 16 bits: dQ = scale A.

    A is stored in fragments, as this module describes. The grid is (groups of 16 rows /
    ``groups_of_rounding``, H, B). A thread rounds 8 columns of two rows, which are 8 rows apart. In
    A, these elements are 64 neighbouring bytes. The thread writes 16 bytes at a time.
    """
    pack, _ = conversions(dtype)
    arrays = array_type(4), result_type(1, 4)
    TILES, GROUPS = head_dim // 8, groups_of_rounding(head_dim)

    @cuda.jit((*arrays, types.float32, PLAIN.argument_type), THREADS, 0)
    def round_fragments(A, dQ, scale, options):
        rTop, rBelow = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        b, h, thread = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y), uint32(cuda.threadIdx.x)
        Ah, dQh = A[b, h], dQ[b, h]
        rows, tile = uint32(dQh.shape[0]), uint32(thread % TILES)
        line = uint32(thread // TILES)  # the row among the first 8 rows of a group
        group, line = uint32(cuda.blockIdx.x * GROUPS + line // 8), uint32(line % 8)
        row, col = uint32(FRAGMENT_ROWS * group + line), uint32(8 * tile)
        place = uint32(FRAGMENT * tile + 16 * line)
        inside = thread < uint32(8 * TILES * GROUPS)
        if inside and uint32(row + 8) < rows:
            for n in range(4):
                x = read4(Ah, group, uint32(place + 4 * n))
                rTop[n] = pack(scale * x[0], scale * x[1])
                rBelow[n] = pack(scale * x[2], scale * x[3])
            write8(dQh, row, col, rTop[0], rTop[1], rTop[2], rTop[3], True)
            below = uint32(row + 8)
            write8(dQh, below, col, rBelow[0], rBelow[1], rBelow[2], rBelow[3], True)
        elif inside and row < rows:
            for n in range(4):
                y = read_pair(Ah, int64(group), int64(place + 4 * n), True)
                rTop[n] = pack(scale * y[0], scale * y[1])
            write8(dQh, row, col, rTop[0], rTop[1], rTop[2], rTop[3], True)

    return round_fragments
