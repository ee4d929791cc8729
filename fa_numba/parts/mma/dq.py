"""dQ of a row tile, whose fragments the warps share: in registers and in memory."""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.parts.heads import make_query_rows
from fa_numba.parts.mma.pairs import (
    make_add_two,
    make_read_floats,
    make_write_floats,
    make_write_two,
)


@cache
def make_query_place(spec):
    """``place(row0, rows_end)``: row and column of this thread's first element of dQ, in the whole
    matrix, and the rows from there to the end.

    Its pair e, of registers 2 e and 2 e + 1, stands PAIRS[e] rows and columns further.
    """
    R, ALONG = spec.query_fragments, spec.chunk_warps

    @device_function
    def place(row0, rows_end):
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(row0 + warp // uint32(ALONG) * (16 * R) + lane // uint32(4))
        col = uint32(warp % uint32(ALONG) * 16 + lane % uint32(4) * 2)
        return int64(row), int64(col), int32(int32(rows_end) - int32(row))

    return place


def _query_pairs(spec):
    R, C, ALONG = spec.query_fragments, spec.query_chunks, spec.chunk_warps
    return tuple(
        (16 * r + 8 * half, 16 * c * ALONG + 8 * n)
        for r in range(R)
        for c in range(C)
        for n in range(2)
        for half in range(2)
    )


@cache
def make_start_dq(spec):
    """``start_dq(rdQ)``: dQ = 0."""
    RQ = 8 * spec.query_fragments * spec.query_chunks

    @device_function
    def start_dq(rdQ):
        for e in range(RQ):
            rdQ[e] = float32(0.0)

    return start_dq


@cache
def make_add_dq(spec):
    """``add_dq(rdQ, A, row0, rows_end)``: A += this warp's part of dQ, by atomic adds."""
    pairs, place = _query_pairs(spec), make_query_place(spec)
    add_two = make_add_two(spec)

    @device_function
    def add_dq(rdQ, A, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            add_two(A, row + down, col + along, left > down, rdQ[2 * e], rdQ[2 * e + 1])

    return add_dq


@cache
def make_read_dq(spec):
    """``read_dq(rdQ, A, j0, row0, rows_end)``: this warp's part of dQ so far, zeros past the end.

    The pass over column 0 knows that it is 0, and reads nothing, unless the kernel has written
    that.
    """
    initialises = spec.features.initialises
    pairs, place = _query_pairs(spec), make_query_place(spec)
    read_floats = make_read_floats(spec)

    @device_function
    def read_dq(rdQ, A, j0, row0, rows_end):
        seen = uint32(0)
        if initialises or j0 > uint32(0):
            seen = rows_end
        row, col, left = place(row0, seen)
        for e in range(len(pairs)):
            down, along = pairs[e]
            pair = read_floats(A, row + down, col + along, left > down)
            rdQ[2 * e] = pair[0]
            rdQ[2 * e + 1] = pair[1]

    return read_dq


@cache
def make_write_dq(spec):
    """``write_dq(rdQ, A, dQ, scale, more, row0, rows_end)``: this warp's part of dQ: to A, if there
    is more to come, else scale times it to dQ, rounded.
    """
    write_sums, write_rounded = _make_write_sums(spec), _make_write_rounded(spec)

    @device_function
    def write_dq(rdQ, A, dQ, scale, more, row0, rows_end):
        if more:
            write_sums(rdQ, A, row0, rows_end)
        else:
            write_rounded(rdQ, dQ, scale, row0, rows_end)

    return write_dq


@cache
def make_initialise_dq(spec):
    """``initialise_dq(rdQ, A, dQ, scale, b, h_first, heads, row0, rows_end, options)``: dQ = 0 of
    these heads and rows, unless the first pass does it, which then takes all rows.
    """
    Br, initialises, start_dq = spec.Br, spec.features.initialises, make_start_dq(spec)
    query_rows = make_query_rows(spec)
    write_sums, write_rounded = _make_write_sums(spec), _make_write_rounded(spec)

    @device_function
    def initialise_dq(rdQ, A, dQ, scale, b, h_first, heads, row0, rows_end, options):
        if initialises:
            start_dq(rdQ)
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                Ah, dQh = query_rows(A, b, h, options), query_rows(dQ, b, h, options)
                i0 = row0
                while i0 < rows_end:
                    write_sums(rdQ, Ah, i0, rows_end)
                    write_rounded(rdQ, dQh, scale, i0, rows_end)
                    i0 = uint32(i0 + Br)
                g = uint32(g + 1)

    return initialise_dq


def _make_write_sums(spec):
    """``write_sums(rdQ, A, row0, rows_end)``: this warp's part of dQ to memory, in float32."""
    pairs, place = _query_pairs(spec), make_query_place(spec)
    write_floats = make_write_floats(spec)

    @device_function
    def write_sums(rdQ, A, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            write_floats(A, row + down, col + along, left > down, rdQ[2 * e], rdQ[2 * e + 1])

    return write_sums


def _make_write_rounded(spec):
    """``write_rounded(rdQ, dQ, factor, row0, rows_end)``: factor times the same, rounded."""
    pairs, place, write_two = _query_pairs(spec), make_query_place(spec), make_write_two(spec)

    @device_function
    def write_rounded(rdQ, dQ, factor, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            if left > down:
                low, high = factor * rdQ[2 * e], factor * rdQ[2 * e + 1]
                write_two(dQ, row + down, uint32(col + along), low, high)

    return write_rounded
