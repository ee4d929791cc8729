"""The state that FlashAttention-1 passes through global memory on CUDA cores: O, l and m of a row
tile.
"""

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
    """Make ``initialise(rO, rl, rm, state, row0, rows_end, head, thread)``, which writes the first
    values of O, l and m to global memory, before the loops of the kernel begin.

    Normally the function does nothing, because the first pass over K/V writes O, l and m of all row
    tiles. With a window, ``q_lens`` or a block mask, the first pass can skip row tiles. The
    function then writes O = 0, l = 0 and m = -inf. With a sink s, it writes O = 0, l = 1 and m = s.

    - Without a block mask, the function writes these values for all row tiles of the head between
      row ``row0`` and row ``rows_end``.
    - With a block mask, it writes them only for two kinds of row tiles: those that visit no column
      tile, and those with rows past ``q_lens``.

    ``rO``, ``rl`` and ``rm`` are registers that the function may overwrite.
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
    """Make ``read_state(rO, rl, rm, state, visit, tile, rows_end)``, which reads O, l and m of a
    row tile from global memory into registers.

    If O, l and m of the row tile have not been written yet, the function reads nothing. It then
    sets O = 0, l = 0 and m = -inf. With a sink s, it sets O = 0, l = 1 and m = s.
    ``visits.row_starts`` recognises this case. With a block mask, it needs ``visit`` for this, the
    integer that ``visits.row_ahead`` has returned.
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
    """Make ``write_state(rO, rl, rm, state, row0, rows_end, thread)``, which writes O, l and m of a
    row tile from registers to global memory.

    The tile begins at row ``row0``. Rows at or past ``rows_end`` are not written.
    """
    write_rows, write_values = make_write_rows(spec), make_write(spec)

    def write_state(rO, rl, rm, state, row0, rows_end, thread):
        write_rows(rO, state.O, row0, rows_end, thread)
        write_values(rl, state.l, row0, rows_end, thread)
        write_values(rm, state.m, row0, rows_end, thread)

    return write_state
