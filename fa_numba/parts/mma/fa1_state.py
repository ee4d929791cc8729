"""The state that FlashAttention-1 passes through global memory on tensor cores: O, l and m of a row
tile.

Between the passes, O is stored in float32 in the array ``A``. The last pass of a row tile rounds O
to 16 bits and writes it to the array ``O``. If the kernel works with planes, the output is float32.
Then O is stored in the array ``O`` between the passes, too.
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

    The values are O = 0, l = 0 and m = -inf. With a sink s, they are O = 0, l = 1 and m = s.
    Normally the function does nothing, because the first pass over K/V initialises O, l and m. With
    a window, ``q_lens`` or a block mask, the first pass can skip row tiles, and the function
    writes:

    | case | row tiles | arrays of O |
    |---|---|---|
    | no block mask | all | ``O``, and without planes also ``A`` |
    | block mask | those that visit no column tile, or have rows past ``q_lens`` | ``O`` |

    The row tiles are those from row ``row0`` to row ``rows_end`` - 1 of the head. ``rO``, ``rl``
    and ``rm`` are registers that the function may overwrite.
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

    If global memory contains no state of the row tile yet, the function reads nothing. It then sets
    O = 0, l = 0 and m = -inf. With a sink s, it sets O = 0, l = 1 and m = s.
    ``visits.make_row_starts`` finds this case from ``visit``, a 32-bit integer about the visit
    (``visits.make_row_ahead``).
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

    If the row tile visits a later column tile, O goes to the array ``A`` in float32. Otherwise O is
    rounded to the dtype of the array ``O`` and goes to this array. If the kernel works with planes,
    O always goes to the array ``O``. ``visit`` is a 32-bit integer about the visit
    (``visits.make_row_ahead``).
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
