"""What FlashAttention-1 passes through global memory: O, l and m of a row tile.

O is in float32 there (``A``), until a row tile's last pass rounds it to O.
"""

from functools import cache

from fa_numba.device import device_function, uint32
from fa_numba.parts.mma.stores import make_read_fragments, make_write_fragments, make_write_rows
from fa_numba.parts.rows import (
    make_read_maxima,
    make_read_values,
    make_start,
    make_write_values,
)


@cache
def make_initialise(spec):
    """``initialise(rO, rl, rm, O, A, l, m, row0, rows_end, ty, tx)``: O = 0, l = 0, m = -inf of
    these rows, unless the first pass does it, which then takes all of them.
    """
    Br, start, initialises = spec.Br, make_start(spec), spec.features.initialises
    write_rows, write_fragments = make_write_rows(spec), make_write_fragments(spec)
    write_values = make_write_values(spec)

    @device_function
    def initialise(rO, rl, rm, O, A, l, m, row0, rows_end, ty, tx):
        if initialises:
            i0 = row0
            while i0 < rows_end:
                start(rO, rl, rm)
                write_rows(rO, O, i0, rows_end, ty, tx)
                write_fragments(rO, A, i0, rows_end, ty, tx)
                write_values(rl, l, i0, rows_end, ty, tx)
                write_values(rm, m, i0, rows_end, ty, tx)
                i0 = uint32(i0 + Br)

    return initialise


@cache
def make_read_state(spec):
    """``read_state(rO, rl, rm, A, l, m, j0, row0, rows_end, ty, tx)``: O, l and m of a row tile.

    The pass over column 0 knows them, and reads nothing, unless the kernel has initialised them.
    """
    initialises, read_fragments = spec.features.initialises, make_read_fragments(spec)
    read_values, read_maxima = make_read_values(spec), make_read_maxima(spec)

    @device_function
    def read_state(rO, rl, rm, A, l, m, j0, row0, rows_end, ty, tx):
        seen = rows_end  # rows whose O, l and m some pass has written
        if not initialises and j0 == uint32(0):
            seen = uint32(0)
        read_fragments(rO, A, row0, seen, ty, tx)
        read_values(rl, l, row0, seen, ty, tx)
        read_maxima(rm, m, row0, seen, ty, tx)

    return read_state


@cache
def make_write_state(spec):
    """``write_state(rO, rl, rm, O, A, l, m, more, row0, rows_end, ty, tx)``: the same to memory, O
    to A if there is ``more`` to come.
    """
    write_rows, write_fragments = make_write_rows(spec), make_write_fragments(spec)
    write_values = make_write_values(spec)

    @device_function
    def write_state(rO, rl, rm, O, A, l, m, more, row0, rows_end, ty, tx):
        if more:
            write_fragments(rO, A, row0, rows_end, ty, tx)
        else:
            write_rows(rO, O, row0, rows_end, ty, tx)
        write_values(rl, l, row0, rows_end, ty, tx)
        write_values(rm, m, row0, rows_end, ty, tx)

    return write_state
