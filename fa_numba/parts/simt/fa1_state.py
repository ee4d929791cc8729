"""What FlashAttention-1 passes through global memory: O, l and m of a row tile."""

from fa_numba.device import uint32
from fa_numba.parts.fa1_state import *  # noqa: F403
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Tile
from fa_numba.parts.simt.epilogue import make_read_rows, make_write_rows
from fa_numba.parts.softmax import make_start
from fa_numba.parts.values import make_read, make_write


@part
def make_initialise(spec):
    """``initialise(rO, rl, rm, state, row0, rows_end, head, thread)``: O = 0, l = 0, m = -inf of
    these rows, unless the first pass does it, which then takes all of them.
    """
    Br, start, write_state = spec.Br, make_start(spec), make_write_state(spec)
    initialises = spec.features.initialises

    def initialise(rO, rl, rm, state, row0, rows_end, head, thread):
        if initialises:
            i0 = row0
            while i0 < rows_end:
                start(rO, rl, rm, Tile(i0, uint32(0), head, thread), uint32(0))
                write_state(rO, rl, rm, state, i0, rows_end, thread)
                i0 = uint32(i0 + Br)

    return initialise


@part
def make_read_state(spec):
    """``read_state(rO, rl, rm, state, tile, rows_end)``: O, l and m of a row tile.

    The pass over column 0 knows them, and reads nothing, unless the kernel has initialised them.
    """
    initialises, start = spec.features.initialises, make_start(spec)
    read_rows, read_values = make_read_rows(spec), make_read(spec)

    def read_state(rO, rl, rm, state, tile, rows_end):
        if initialises or tile.j0 > uint32(0):
            read_rows(rO, state.O, tile.i0, rows_end, tile.thread)
            read_values(rl, state.l, tile.i0, rows_end, tile.thread)
            read_values(rm, state.m, tile.i0, rows_end, tile.thread)
        else:
            start(rO, rl, rm, tile, uint32(0))

    return read_state


@part
def make_write_state(spec):
    """``write_state(rO, rl, rm, state, row0, rows_end, thread)``: O, l and m to memory."""
    write_rows, write_values = make_write_rows(spec), make_write(spec)

    def write_state(rO, rl, rm, state, row0, rows_end, thread):
        write_rows(rO, state.O, row0, rows_end, thread)
        write_values(rl, state.l, row0, rows_end, thread)
        write_values(rm, state.m, row0, rows_end, thread)

    return write_state
