"""Kernels that split float32 matrices into planes, for products on tensor cores.

A plane is one of several 16-bit matrices whose sum approximates a float32 matrix
(``parts.fragments.planes``). A row of X becomes a row that contains all planes one after the other.
In this row, each plane has ``columns`` elements. Elements past the head dimension are 0.

float16 has a smaller range than float32. For planes in float16, X is therefore multiplied by a
power of two first, one for each head. The largest element is then from 2^13 to 2^14. Elements down
to 2^-16 of the largest element keep 22 bits. The error of smaller elements is at most 2^-38 of the
largest element. Elements that are inf or NaN are ignored when the largest element is determined.

A warp splits several rows. If planes are scaled, WARPS_OF_HEAD warps first search each head for its
largest element. Each warp stores the largest element that it has found in the array ``M``.

Accesses, elements per head:  loads N d, twice if the planes are scaled; stores N p c, for p planes
with c columns each.
"""

from functools import cache
from typing import NamedTuple

from fa_numba.device import cuda, float32, int64, uint32
from fa_numba.device.signature import array_type, half_type
from fa_numba.dtypes import PRECISIONS
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.arithmetic import inverse_power, maximum
from fa_numba.intrinsics.global_memory import write2
from fa_numba.options import Features
from fa_numba.parts import bind
from fa_numba.parts import gradients as gradient_parts
from fa_numba.parts import grid as grid_parts
from fa_numba.parts.fragments.pairs import make_read_floats
from fa_numba.parts.fragments.planes import FINITE, make_split, power_of_two
from fa_numba.parts.lanes import max_of_lanes, sum_of_lanes
from fa_numba.parts.namespace import part

WARPS, ROWS = 8, 4  # warps of a block, and rows that a warp loads at the same time
WARPS_OF_HEAD = 128


class PlaneFacts(NamedTuple):
    """The properties of an array for which the kernels of this module are compiled.

    ``features`` contain the options about lengths of sequences. ``head_dim`` is the head dimension
    of the float32 array, and ``columns`` is the number of columns of a plane. ``precision`` names
    the planes, such as "fp16x3". ``aligned`` says whether all rows start at 16-byte addresses.
    ``keys`` says whether the number of valid rows is a length of K and V, instead of a length of Q.
    """

    features: Features
    head_dim: int
    columns: int
    precision: str
    aligned: bool
    keys: bool


@part
def _make_rows_end(facts):
    """Make ``rows_end(head)``, which returns the number of valid rows of a head.

    The number is Nk for the arrays K and V, otherwise Nq.
    """
    keys = facts.keys

    def rows_end(head):
        return head.Nk if keys else head.Nq

    return rows_end


@part
def _make_read_rows(facts):
    """Make ``read_rows(rX, X, row0, rows_end)``, which reads a lane's elements of several rows of
    X.

    The rows are ROWS rows from row ``row0`` on. ``rX: (ROWS, ceil(d / 64), 2)`` are registers. Lane
    l reads pairs of neighbouring elements: pair c consists of the columns 2 l + 64 c and 2 l + 64 c
    + 1. Rows at or past ``rows_end`` become 0.
    """
    d, PAIRS, aligned = facts.head_dim, ceil_div(facts.head_dim, 64), facts.aligned
    read_floats = make_read_floats(facts)

    def read_rows(rX, X, row0, rows_end):
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        for r in range(ROWS):
            row = uint32(row0 + r)
            for c in range(PAIRS):
                col, e = uint32(2 * lane + 64 * c), 2 * (r * PAIRS + c)
                if aligned:
                    inside = row < rows_end and col < uint32(d)
                    pair = read_floats(X, int64(row), int64(col), inside)
                    rX[e] = pair[0]
                    rX[e + 1] = pair[1]
                else:
                    for n in range(2):
                        rX[e + n] = float32(0.0)
                        if row < rows_end and uint32(col + n) < uint32(d):
                            rX[e + n] = X[row, uint32(col + n)]

    return read_rows


@cache
def make_largest(facts):
    """Return the kernel that searches each head for its largest finite |x|.

    WARPS_OF_HEAD warps search a head. Each warp stores the largest |x| that it has found in the
    array M: (B, H, WARPS_OF_HEAD). The grid is (WARPS_OF_HEAD / WARPS, H, B).
    """
    (grid,) = bind(facts, grid_parts)
    RX, STEP = ROWS * 2 * ceil_div(facts.head_dim, 64), ROWS * WARPS_OF_HEAD
    read_rows, rows_end = _make_read_rows(facts), _make_rows_end(facts)
    arguments = (array_type(4), array_type(3), facts.features.argument_type)

    @cuda.jit(arguments, 32 * WARPS, 0)
    def largest(X, M, options):
        rX = cuda.local.array(RX, float32)
        head = grid.query_head(X.shape[2], X.shape[2], options)
        Xh, end = X[head.b, head.h], rows_end(head)
        warp = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        found = float32(0.0)
        row = uint32(ROWS * warp)
        while row < end:
            read_rows(rX, Xh, row, end)
            for e in range(RX):
                size = maximum(rX[e], -rX[e])
                if size <= FINITE:
                    found = maximum(found, size)
            row = uint32(row + STEP)
        found = max_of_lanes(found, 32, 1)
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            M[head.b, head.h, warp] = found

    return largest


@cache
def make_split_rows(facts):
    """Return the kernel that splits X into ``planes``. The grid is (N / (ROWS WARPS), H, B).

    If planes are scaled, the kernel multiplies X by a power of two first. It then also stores the
    inverse of this power in ``power``, one number for each head.
    """
    (grid,) = bind(facts, grid_parts)
    precision = PRECISIONS[facts.precision]
    PAIRS, PLANES, scaled = ceil_div(facts.head_dim, 64), precision.planes, precision.scaled
    RX, SEEN, COLUMNS = ROWS * 2 * PAIRS, WARPS_OF_HEAD // 32, facts.columns
    read_rows, rows_end = _make_read_rows(facts), _make_rows_end(facts)
    split = make_split(precision.dtype, PLANES)
    arrays = (array_type(4), array_type(3), half_type(4), array_type(2))

    @cuda.jit((*arrays, facts.features.argument_type), 32 * WARPS, 0)
    def split_rows(X, M, planes, power, options):
        rX, words = cuda.local.array(RX, float32), cuda.local.array(PLANES, uint32)
        head = grid.query_head(X.shape[2], X.shape[2], options)
        Xh, end, planes_h = X[head.b, head.h], rows_end(head), planes[head.b, head.h]
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        row0 = uint32(ROWS * (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32))
        read_rows(rX, Xh, row0, end)
        if scaled:
            size = float32(0.0)
            for n in range(SEEN):
                size = maximum(size, M[head.b, head.h, uint32(lane + 32 * n)])
            size = max_of_lanes(size, 32, 1)
            factor = power_of_two(size)
            for e in range(RX):
                rX[e] *= factor
            if row0 == uint32(0) and lane == uint32(0):
                power[head.b, head.h] = inverse_power(factor)
        for r in range(ROWS):
            row = uint32(row0 + r)
            for c in range(PAIRS):
                col, e = uint32(2 * lane + 64 * c), 2 * (r * PAIRS + c)
                split(words, 0, 1, rX[e], rX[e + 1])
                if row < end and col < uint32(COLUMNS):
                    for p in range(PLANES):
                        write2(planes_h, row, uint32(col + p * COLUMNS), words[p])

    return split_rows


@cache
def make_row_sums(facts, d_v):
    """Return the kernel that computes D = rowsum(dO o O) - dL, and sets the sum A of dQ to 0.

    The grid is (N / 4, H, B), and a warp computes one row. The argument X is dO in float32. It is
    not called ``dO``, because ``dO`` is the name of the planes of dO. These are lines 3 and 4 of
    FlashAttention-2's Algorithm 2. If the loss has no gradient of L, dL is 0.
    """
    grid, gradients = bind(facts, grid_parts, gradient_parts)
    d, most = facts.head_dim, max(facts.head_dim, d_v)
    ALL_O, ALL_A = d_v == most, d == most
    arrays = (array_type(4), array_type(4), array_type(3), array_type(4))

    @cuda.jit((*arrays, facts.features.argument_type), 128, 0)
    def row_sums_of_floats(X, O, D, A, options):
        head = grid.query_head(O.shape[2], 0, options)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * 4 + cuda.threadIdx.x // 32)
        Xh, Oh = grid.query_rows(X, head), grid.query_rows(O, head)
        Dh, Ah = grid.query_rows(D, head), grid.query_rows(A, head)
        dot, col = float32(0.0), lane
        while col < uint32(most):
            if row < head.Nq and (ALL_O or col < uint32(d_v)):
                dot += Xh[row, col] * Oh[row, col]
            if row < uint32(Oh.shape[0]) and (ALL_A or col < uint32(d)):
                Ah[row, col] = float32(0.0)
            col = uint32(col + 32)
        dot = sum_of_lanes(dot, 32, 1)
        if lane == uint32(0) and row < head.Nq:
            Dh[row] = gradients.row_less_dlse(dot, head, row)

    return row_sums_of_floats
