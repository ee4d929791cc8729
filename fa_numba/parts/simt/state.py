"""What FlashAttention-1 passes through global memory: O, l and m of a row tile, and dQ."""

from functools import cache

from fa_numba.device import device_function, float32, uint32
from fa_numba.parts.heads import make_query_rows
from fa_numba.parts.rows import make_read_values, make_start, make_write_values
from fa_numba.parts.simt.stores import make_read_rows, make_write_rows


@cache
def make_initialise(spec):
    """``initialise(rO, rl, rm, O, l, m, row0, rows_end, ty, tx)``: O = 0, l = 0, m = -inf of these
    rows, unless the first pass does it, which then takes all of them.
    """
    Br, start, write_state = spec.Br, make_start(spec), make_write_state(spec)
    initialises = spec.features.initialises

    @device_function
    def initialise(rO, rl, rm, O, l, m, row0, rows_end, ty, tx):
        if initialises:
            i0 = row0
            while i0 < rows_end:
                start(rO, rl, rm)
                write_state(rO, rl, rm, O, l, m, i0, rows_end, ty, tx)
                i0 = uint32(i0 + Br)

    return initialise


@cache
def make_read_state(spec):
    """``read_state(rO, rl, rm, O, l, m, j0, row0, rows_end, ty, tx)``: O, l and m of a row tile.

    The pass over column 0 knows them, and reads nothing, unless the kernel has initialised them.
    """
    initialises, start = spec.features.initialises, make_start(spec)
    read_rows, read_values = make_read_rows(spec), make_read_values(spec)

    @device_function
    def read_state(rO, rl, rm, O, l, m, j0, row0, rows_end, ty, tx):
        if initialises or j0 > uint32(0):
            read_rows(rO, O, row0, rows_end, ty, tx)
            read_values(rl, l, row0, rows_end, ty, tx)
            read_values(rm, m, row0, rows_end, ty, tx)
        else:
            start(rO, rl, rm)

    return read_state


@cache
def make_write_state(spec):
    """``write_state(rO, rl, rm, O, l, m, row0, rows_end, ty, tx)``: the same to memory."""
    write_rows, write_values = make_write_rows(spec), make_write_values(spec)

    @device_function
    def write_state(rO, rl, rm, O, l, m, row0, rows_end, ty, tx):
        write_rows(rO, O, row0, rows_end, ty, tx)
        write_values(rl, l, row0, rows_end, ty, tx)
        write_values(rm, m, row0, rows_end, ty, tx)

    return write_state


@cache
def make_initialise_dq(spec):
    """``initialise_dq(rdQ, dQ, b, h_first, heads, row0, rows_end, options, ty, tx)``: dQ = 0 of
    these heads and rows, unless the first pass does it, which then takes all rows.
    """
    Br, RQ, initialises = spec.Br, spec.TM * spec.DN * 4, spec.features.initialises
    query_rows, write_rows = make_query_rows(spec), make_write_rows(spec)

    @device_function
    def initialise_dq(rdQ, dQ, b, h_first, heads, row0, rows_end, options, ty, tx):
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                dQh = query_rows(dQ, b, h, options)
                i0 = row0
                while i0 < rows_end:
                    write_rows(rdQ, dQh, i0, rows_end, ty, tx)
                    i0 = uint32(i0 + Br)
                g = uint32(g + 1)

    return initialise_dq
