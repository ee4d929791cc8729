"""What FlashAttention-1 passes through global memory: O, l and m of a row tile."""

from fa_numba.device import uint32
from fa_numba.parts.fa1_state import make_write_logsumexp as make_write_logsumexp
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Tile
from fa_numba.parts.simt.epilogue import make_read_rows, make_write_rows
from fa_numba.parts.softmax import make_start
from fa_numba.parts.values import make_read, make_write
from fa_numba.parts.visits import make_is_unseen, make_row_starts


@part
def make_initialise(spec):
    """``initialise(rO, rl, rm, state, row0, rows_end, head, thread)``: O = 0, l = 0, m = -inf of
    these rows, as far as no visit starts them.
    """
    Br, start, write_state = spec.Br, make_start(spec), make_write_state(spec)
    initialises, is_unseen = spec.features.initialises, make_is_unseen(spec)

    def initialise(rO, rl, rm, state, row0, rows_end, head, thread):
        if initialises:
            i0 = row0
            while i0 < rows_end:
                if is_unseen(i0, head):
                    start(rO, rl, rm, Tile(i0, uint32(0), head, thread), uint32(0))
                    write_state(rO, rl, rm, state, i0, rows_end, thread)
                i0 = uint32(i0 + Br)

    return initialise


@part
def make_read_state(spec):
    """``read_state(rO, rl, rm, state, visit, tile, rows_end)``: O, l and m of a row tile; of a
    visit that starts them nothing is read.
    """
    row_starts, start = make_row_starts(spec), make_start(spec)
    read_rows, read_values = make_read_rows(spec), make_read(spec)

    def read_state(rO, rl, rm, state, visit, tile, rows_end):
        if not row_starts(visit, tile.j0):
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
