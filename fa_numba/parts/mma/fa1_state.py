"""The state that FlashAttention-1 passes through global memory on tensor cores: O, l and m of a row
tile.

A pass is one step of the outer loop over column tiles. Two arrays in global memory store O. Between
the passes, O is in the float32 array ``A`` of the workspace. The last pass of a row tile rounds O
to 16 bits and writes it to the output ``O``. Kernels that work with planes have a float32 output.
They do not use ``A``, and store O in the output between the passes, too.
"""

from fa_numba.device import uint32
from fa_numba.parts.fa1_state import make_write_logsumexp as make_write_logsumexp
from fa_numba.parts.fragments.rows import make_read_fragments, make_write_fragments, make_write_rows
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Tile
from fa_numba.parts.softmax import make_start, make_take_sinks
from fa_numba.parts.values import make_read, make_read_maxima, make_write
from fa_numba.parts.visits import make_is_unseen, make_row_sees_more, make_row_starts


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

    O = 0 is written to the output ``state.O``. Without a block mask, it is also written to
    ``state.A``, the float32 array that stores O between the passes. Kernels that work with planes
    do not use ``state.A``. ``rO``, ``rl`` and ``rm`` are registers that the function may overwrite.
    """
    Br, start, initialises = spec.Br, make_start(spec), spec.features.initialises
    is_unseen = make_is_unseen(spec)
    reads_a = spec.planes == 1 and not spec.features.sparse
    write_rows, write_fragments = make_write_rows(spec), make_write_fragments(spec)
    write_values = make_write(spec)

    def initialise(rO, rl, rm, state, row0, rows_end, head, thread):
        if initialises:
            i0 = row0
            while i0 < rows_end:
                if is_unseen(i0, head):
                    start(rO, rl, rm, Tile(i0, uint32(0), head, thread), uint32(0))
                    write_rows(rO, state.O, i0, rows_end, thread)
                    if reads_a:
                        write_fragments(rO, state.A, i0, rows_end, thread)
                    write_values(rl, state.l, i0, rows_end, thread)
                    write_values(rm, state.m, i0, rows_end, thread)
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
    row_starts, read_fragments = make_row_starts(spec), make_read_fragments(spec)
    in_place = spec.planes > 1
    read_values, read_maxima = make_read(spec), make_read_maxima(spec)
    take_sinks = make_take_sinks(spec)

    def read_state(rO, rl, rm, state, visit, tile, rows_end):
        seen = rows_end  # rows whose O, l and m some pass has written
        if row_starts(visit, tile.j0):
            seen = uint32(0)
        read_fragments(rO, state.O if in_place else state.A, tile.i0, seen, tile.thread)
        read_values(rl, state.l, tile.i0, seen, tile.thread)
        read_maxima(rm, state.m, tile.i0, seen, tile.thread)
        if row_starts(visit, tile.j0):
            take_sinks(rl, rm, tile, uint32(0))

    return read_state


@part
def make_write_state(spec):
    """Make ``write_state(rO, rl, rm, state, visit, tile, rows_end)``, which writes O, l and m of a
    row tile to global memory.

    If a later pass visits the row tile again, O goes to the float32 array ``state.A``. In the last
    pass, O is rounded to the dtype of the output ``state.O`` and goes to this array. Kernels that
    work with planes write O to ``state.O`` in every pass. ``visit`` is the integer that
    ``visits.row_ahead`` has returned for this row tile. It is used only with a block mask.
    """
    sees_more = make_row_sees_more(spec)
    write_rows, write_fragments = make_write_rows(spec), make_write_fragments(spec)
    write_values, in_place = make_write(spec), spec.planes > 1

    def write_state(rO, rl, rm, state, visit, tile, rows_end):
        i0, thread = tile.i0, tile.thread
        more = sees_more(visit, i0, tile.j0, tile.head)
        if more and not in_place:
            write_fragments(rO, state.A, i0, rows_end, thread)
        else:
            write_rows(rO, state.O, i0, rows_end, thread)
        write_values(rl, state.l, i0, rows_end, thread)
        write_values(rm, state.m, i0, rows_end, thread)

    return write_state
