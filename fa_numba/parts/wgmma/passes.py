"""What FlashAttention-1's backward kernel on Hopper's tensor cores does otherwise: O comes with the
row tiles, D is made in every pass, and dQ passes through global memory in every pass.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, anew
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, fence_mbarrier_init, init_mbarrier
from fa_numba.intrinsics.shared import load8
from fa_numba.parts.mma.pairs import (
    make_add_two,
    make_read_floats,
    make_write_floats,
    make_write_two,
)
from fa_numba.parts.wgmma import backward, stores, tile_load, told
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL
from fa_numba.tiling.wgmma_backward import STAGES

WARP = 32
DOT_THREADS = 64  # that make D
CHUNK = 8  # 16-bit elements in 16 bytes


# --- row tiles -------------------------------------------------------------------------------


@cache
def make_begin_barriers(spec):
    """``begin_barriers(bars)``: a place of Q is full when its L is there too, which a warp brings;
    one of D when two warps have made it of dO and O. Every consumer warp empties one of Q, dO and
    O, every consumer that of K and V.
    """
    (full_kv, full_q, full_do, empty), consumers = spec.barrier_places, spec.consumers
    full_o, full_d, empty_kv = spec.barrier_places_with_o

    @device_function
    def begin_barriers(bars):
        if cuda.threadIdx.x == 0:
            init_mbarrier(bars, full_kv, 1)
            init_mbarrier(bars, empty_kv, consumers)
            for s in range(STAGES):
                init_mbarrier(bars, full_q + s, 1 + WARP)
                init_mbarrier(bars, full_do + s, 1)
                init_mbarrier(bars, full_o + s, 1)
                init_mbarrier(bars, full_d + s, DOT_THREADS)
                init_mbarrier(bars, empty + s, 4 * consumers)
            fence_mbarrier_init()

    return begin_barriers


@cache
def make_own_rows(spec):
    """``own_rows(split_rows, rows)``: this block's first row of Q, and one past its last."""
    splits = spec.splits_queries

    @device_function
    def own_rows(split_rows, rows):
        first, end = uint32(0), rows
        if splits:
            first = uint32(cuda.blockIdx.x * split_rows)
            end = uint32(min(rows, uint32(first + split_rows)))
        return first, end

    return own_rows


@cache
def make_next_visit(spec):
    """``next_visit(h, i0, i_first, i_end)``: as in FA-2; of a single query head h and i_first are
    not asked for, and take no registers.
    """
    Br, grouped, of_group = spec.Br, spec.grouped, backward.make_next_visit(spec)

    @device_function
    def next_visit(h, i0, i_first, i_end):
        if grouped:
            return of_group(h, i0, i_first, i_end)
        return h, uint32(i0 + Br)

    return next_visit


@cache
def make_row_tiles(spec):
    """``row_tiles(i_first, i_end)``: how many there are from the first row of one on."""
    Br = spec.Br

    @device_function
    def row_tiles(i_first, i_end):
        count = uint32(0)
        if i_first < i_end:
            count = uint32((i_end - i_first + (Br - 1)) // Br)
        return count

    return row_tiles


@cache
def make_visits(spec):
    """``visits(h, h_end, i0, i_end)``: whether there is a row tile at i0 of head h."""
    grouped = spec.grouped

    @device_function
    def visits(h, h_end, i0, i_end):
        return i0 < i_end and (not grouped or h < h_end)

    return visits


@cache
def make_load_column_tiles(spec):
    """``load_column_tiles(sK, sV, K, V, b, h, col0, bars, barrier)``: FA-2's, of whole arrays."""
    load = told.make_load_column_tiles(spec)

    @device_function
    def load_column_tiles(sK, sV, K, V, b, h, col0, bars, barrier):
        load(sK, sV, K, V, b, h, col0, uint32(0), bars, bars, barrier)

    return load_column_tiles


@cache
def make_load_rows(spec):
    """``load_rows(sT, at, T, b, h, row0, bars, barrier)``: Qi, dOi or Oi."""
    return tile_load.load_of(spec.Br, spec.Br, spec.panels)


@cache
def make_load_values(spec):
    """``load_values(sL, at, L, row0, rows_end, bars, barrier)``: FA-2's, of L alone, by a warp."""
    Br, place_of = spec.Br, backward.value_place

    @device_function
    def load_values(sL, at, L, row0, rows_end, bars, barrier):
        r = uint32(uint32(cuda.threadIdx.x) % WARP)
        place = uint32(at + place_of(r))
        for n in range(Br // WARP):
            row = uint32(row0 + r + WARP * n)
            shift = float32(0.0)
            if row < rows_end:
                shift = LOG2E * L[row]
            if shift == NEG_INF:
                shift = float32(0.0)
            sL[uint32(place + WARP * n)] = shift
        arrive_mbarrier(bars, barrier)

    return load_values


@cache
def make_row_dots(spec):
    """``row_dots(sD, at, sdO, sO, at_rows, columns, bars, barrier)``: D = rowsum(dO o O), by two
    warps; a thread takes a row, in chunks of 16 bytes. They have few registers: that the ends are
    no constants leaves the loops loops.
    """
    Br, place_of = spec.Br, backward.value_place
    _, unpack = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def row_dots(sD, at, sdO, sO, at_rows, columns, bars, barrier):
        r, rows = uint32(uint32(cuda.threadIdx.x) - WARP), anew(uint32(Br))
        while r < rows:
            dot, col = float32(0.0), uint32(0)
            while col < columns:
                chunk = uint32(uint32(col % PANEL) ^ uint32(CHUNK * (r % 8)))
                place = uint32(at_rows + PANEL * (r + Br * (col // PANEL)) + chunk)
                os, gs = load8(sO, place), load8(sdO, place)
                for e in range(4):
                    o, g = unpack(os[e]), unpack(gs[e])
                    dot += o[0] * g[0] + o[1] * g[1]
                col = uint32(col + CHUNK)
            sD[uint32(at + place_of(r))] = dot
            r = uint32(r + DOT_THREADS)
        arrive_mbarrier(bars, barrier)

    return row_dots


# --- dQ --------------------------------------------------------------------------------------

# A part of dQ is always the same thread's: it reads what it has written itself in the pass before,
# which needs no fence and no barrier.


@cache
def make_query_place(spec):
    """``query_place(row0, rows_end, w, tx, ty)``: row and column of this thread's first element of
    dQ, and the rows from there to the end. Its pair e stands PAIRS[e] rows and columns further.
    """
    by_rows = spec.Br > GROUP_ROWS

    @device_function
    def query_place(row0, rows_end, w, tx, ty):
        row, col = uint32(row0 + tx), uint32(2 * ty)
        if by_rows:
            row = uint32(row + GROUP_ROWS * w)
        else:
            col = uint32(col + PANEL * w)
        return int64(row), int64(col), int32(int32(rows_end) - int32(row))

    return query_place


PAIRS = tuple((8 * i, 8 * n) for i in range(2) for n in range(PANEL // 8))


@cache
def make_read_dq(spec):
    """``read_dq(rdQ, A, b, h, j0, row0, rows_end, w, tx, ty)``: this thread's part of dQ so far,
    zeros past the end.

    The pass over column 0 knows that it is 0, and reads nothing, unless the kernel has written
    that.
    """
    initialises, pairs = spec.features.initialises, PAIRS
    place, read_floats = make_query_place(spec), make_read_floats(spec)

    @device_function
    def read_dq(rdQ, A, b, h, j0, row0, rows_end, w, tx, ty):
        seen = uint32(0)
        if initialises or j0 > uint32(0):
            seen = rows_end
        Ah = A[b, h]
        row, col, left = place(row0, seen, w, tx, ty)
        for e in range(len(pairs)):
            down, along = pairs[e]
            pair = read_floats(Ah, row + down, col + along, left > down)
            rdQ[2 * e] = pair[0]
            rdQ[2 * e + 1] = pair[1]

    return read_dq


@cache
def make_write_dq(spec):
    """``write_dq(rdQ, A, dQ, b, h, scale, more, row0, rows_end, w, tx, ty)``: this thread's part
    of dQ: to A, if there is more to come, else scale times it to dQ, rounded.
    """
    write_sums, write_rounded = _make_write_sums(spec), _make_write_rounded(spec)

    @device_function
    def write_dq(rdQ, A, dQ, b, h, scale, more, row0, rows_end, w, tx, ty):
        if more:
            write_sums(rdQ, A[b, h], row0, rows_end, w, tx, ty)
        else:
            write_rounded(rdQ, dQ[b, h], scale, row0, rows_end, w, tx, ty)

    return write_dq


@cache
def make_initialise_dq(spec):
    """``initialise_dq(rdQ, A, dQ, scale, b, h, h_end, row0, rows_end, w, tx, ty)``: dQ = 0 of these
    heads and rows, unless the first pass does it, which then takes all rows.
    """
    Br, RQ, initialises = spec.Br, spec.query_registers, spec.features.initialises
    write_sums, write_rounded = _make_write_sums(spec), _make_write_rounded(spec)

    @device_function
    def initialise_dq(rdQ, A, dQ, scale, b, h, h_end, row0, rows_end, w, tx, ty):
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            while h < h_end:
                i0 = row0
                while i0 < rows_end:
                    write_sums(rdQ, A[b, h], i0, rows_end, w, tx, ty)
                    write_rounded(rdQ, dQ[b, h], scale, i0, rows_end, w, tx, ty)
                    i0 = uint32(i0 + Br)
                h = uint32(h + 1)

    return initialise_dq


@cache
def _make_write_sums(spec):
    """``write_sums(rdQ, A, row0, rows_end, w, tx, ty)``: this thread's part of dQ to memory, in
    float32.
    """
    pairs, place, write_floats = PAIRS, make_query_place(spec), make_write_floats(spec)

    @device_function
    def write_sums(rdQ, A, row0, rows_end, w, tx, ty):
        row, col, left = place(row0, rows_end, w, tx, ty)
        for e in range(len(pairs)):
            down, along = pairs[e]
            write_floats(A, row + down, col + along, left > down, rdQ[2 * e], rdQ[2 * e + 1])

    return write_sums


@cache
def _make_write_rounded(spec):
    """``write_rounded(rdQ, dQ, factor, row0, rows_end, w, tx, ty)``: factor times the same,
    rounded.
    """
    pairs, place, write_two = PAIRS, make_query_place(spec), make_write_two(spec)

    @device_function
    def write_rounded(rdQ, dQ, factor, row0, rows_end, w, tx, ty):
        row, col, left = place(row0, rows_end, w, tx, ty)
        for e in range(len(pairs)):
            down, along = pairs[e]
            if left > down:
                low, high = factor * rdQ[2 * e], factor * rdQ[2 * e + 1]
                write_two(dQ, row + down, uint32(col + along), low, high)

    return write_rounded


# --- dK and dV -------------------------------------------------------------------------------


@cache
def make_write_tile(spec):
    """``write_tile(rdK, sK, at, dK, w, row0, b, h, tx, ty)``: this consumer's rows of dK or dV; or,
    where blocks share them, added to their float32 sum atomically.
    """
    if spec.splits_queries:
        return _make_add_tile(spec)
    return stores.make_write_tile(spec.transposed)


def _make_add_tile(spec):
    """``add_tile(rdK, sK, at, A, w, row0, b, h, tx, ty)``: A += this thread's part of dK."""
    TM, DN4, STEP_, add_two = spec.TN, 4 * spec.DN, spec.column_step, make_add_two(spec)

    @device_function
    def add_tile(rdK, sK, at, A, w, row0, b, h, tx, ty):
        Ah = A[b, h]
        for i in range(TM):
            row = uint32(row0 + tx + STEP_ * i)
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                inside = row < uint32(Ah.shape[0])
                add_two(Ah, row, uint32(8 * n + 2 * ty), inside, rdK[e], rdK[e + 1])

    return add_tile
