"""What a backward kernel on tensor cores does otherwise: S and dP stand transposed in registers,
row tiles are loaded to two stages in turn, and a warp has its own columns of dK and dV.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.intrinsics.shared import half_tile, load2, shared_tile
from fa_numba.parts.mma import fragments, products
from fa_numba.parts.mma.chunks import conversions
from fa_numba.parts.mma.pairs import make_add_two
from fa_numba.parts.mma.stores import write_halves
from fa_numba.parts.mma.tile_load import make_load_rows, make_load_values
from fa_numba.parts.softmax import FULL_WARP
from fa_numba.parts.visits import make_next_row


@cache
def make_scores(spec):
    """``scores(rS, rK, sK, sQ, col0, row0)``: ST = K QT, or dPT = V dOT."""
    return products.make_scores(spec.scores)


@cache
def make_load_fragments(spec):
    """``load_fragments(rK, sK, col0)``: K's or V's fragments, where they stay in registers."""
    return fragments.make_load_fragments(spec.scores)


# --- row tiles -------------------------------------------------------------------------------


def places(spec):
    """Where the row tiles begin in shared memory, in 16-bit elements, and their L, in floats."""
    NQ, NK, NS = spec.tile_halves
    at_q = 2 * NK + spec.row_warps * NS
    return at_q, (at_q + 2 * spec.row_tiles * NQ) // 2


@cache
def make_row_tile(spec):
    """``row_tile(stage)``: (sQ, sdO, sL, sD) of a stage."""
    (AT_Q, AT_L), NQ, Br = places(spec), spec.tile_halves[0], spec.Br

    @device_function
    def row_tile(stage):
        at, at_L = uint32(AT_Q + stage * (2 * NQ)), uint32(AT_L + stage * (2 * Br))
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NQ)
        return sQ, sdO, shared_tile(at_L, Br), shared_tile(uint32(at_L + Br), Br)

    return row_tile


@cache
def make_load_row_tile(spec):
    """``load_row_tile(stage, Q, dO, L, D, row0, rows_end)`` starts copying them to a stage."""
    row_tile, load_rows, load_values = (
        make_row_tile(spec),
        make_load_rows(spec),
        make_load_values(spec),
    )

    @device_function
    def load_row_tile(stage, Q, dO, L, D, row0, rows_end):
        sQ, sdO, sL, sD = row_tile(stage)
        load_rows(sQ, Q, row0, rows_end)
        load_rows(sdO, dO, row0, rows_end)
        load_values(sL, L, row0, rows_end)
        load_values(sD, D, row0, rows_end)

    return load_row_tile


@cache
def make_load_next_rows(spec):
    """``load_next_rows(stage, Q, dO, L, D, i0, i_end, rows_end, j0, b, h, options)``: the row tile
    that comes after the one at i0; gives where it starts, at or past i_end if there is none.
    """
    Br, load_row_tile, next_row = spec.Br, make_load_row_tile(spec), make_next_row(spec)

    @device_function
    def load_next_rows(stage, Q, dO, L, D, i0, i_end, rows_end, j0, b, h, options):
        i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
        if i_next < i_end:
            load_row_tile(stage, Q, dO, L, D, i_next, rows_end)
        return i_next

    return load_next_rows


@cache
def make_row_tile_with_o(spec):
    """``row_tile_with_o(stage)``: (sQ, sdO, sO, sL) of a stage, for FA-1, which makes D anew."""
    (AT_Q, AT_L), NQ, Br = places(spec), spec.tile_halves[0], spec.Br

    @device_function
    def row_tile_with_o(stage):
        at, at_L = uint32(AT_Q + stage * (3 * NQ)), uint32(AT_L + stage * Br)
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NQ)
        return sQ, sdO, half_tile(uint32(at + 2 * NQ), NQ), shared_tile(at_L, Br)

    return row_tile_with_o


@cache
def make_load_row_tile_with_o(spec):
    """``load_row_tile_with_o(stage, Q, dO, O, L, row0, rows_end)``: the same with O."""
    row_tile, load_rows = make_row_tile_with_o(spec), make_load_rows(spec)
    load_values = make_load_values(spec)

    @device_function
    def load_row_tile_with_o(stage, Q, dO, O, L, row0, rows_end):
        sQ, sdO, sO, sL = row_tile(stage)
        load_rows(sQ, Q, row0, rows_end)
        load_rows(sdO, dO, row0, rows_end)
        load_rows(sO, O, row0, rows_end)
        load_values(sL, L, row0, rows_end)

    return load_row_tile_with_o


@cache
def make_load_next_with_o(spec):
    """``load_next_with_o(stage, Q, dO, O, L, i0, i_end, rows_end, j0, b, h, options)``: the same as
    ``load_next_rows``.
    """
    Br, load_row_tile, next_row = spec.Br, make_load_row_tile_with_o(spec), make_next_row(spec)

    @device_function
    def load_next_with_o(stage, Q, dO, O, L, i0, i_end, rows_end, j0, b, h, options):
        i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
        if i_next < i_end:
            load_row_tile(stage, Q, dO, O, L, i_next, rows_end)
        return i_next

    return load_next_with_o


@cache
def make_row_dots(spec):
    """``row_dots(sD, sdO, sO)``: D = rowsum(dO o O), there at the next barrier; a warp a row.

    The columns of a row may stand in any order, which is one for both.
    """
    Br, pitch, columns, warps = spec.Br, spec.rows.pitch, spec.columns, spec.warps
    _, unpack = conversions(spec.dtype)

    @device_function
    def row_dots(sD, sdO, sO):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.threadIdx.x) // uint32(32)
        while row < uint32(Br):
            dot = float32(0.0)
            for first in range(0, columns, 64):
                col = uint32(first + 2 * lane)
                if col < uint32(columns):
                    at = uint32(row * pitch + col)
                    o, g = unpack(load2(sO, at)), unpack(load2(sdO, at))
                    dot += o[0] * g[0] + o[1] * g[1]
            step = 16
            while step > 0:
                dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)
                step //= 2
            if lane == uint32(0):
                sD[row] = dot
            row = uint32(row + warps)

    return row_dots


# --- dK and dV -------------------------------------------------------------------------------


@cache
def make_write_columns(spec):
    """``write_columns(rT, T, row0, rows_end, tx, t)``: this thread's dK or dV to memory, rounded;
    or, where blocks share it, added to its float32 sum atomically.
    """
    if spec.splits_queries:
        return _make_add_columns(spec)
    return write_halves(spec.gradients, spec.head_dim)


def _make_add_columns(spec):
    """``add_columns(rdK, A, row0, rows_end, ty, tx)``: A += this warp's part of dK."""
    TM, DN4, STEP = spec.TN, 4 * spec.gradients.DN, spec.row_step
    add_two = make_add_two(spec)

    @device_function
    def add_columns(rdK, A, row0, rows_end, ty, tx):
        first = uint32(row0 + ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, inside = int64(first) + i * STEP, left > i * STEP
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                add_two(A, row, int64(2 * tx) + 8 * n, inside, rdK[e], rdK[e + 1])

    return add_columns
