"""Places in a tile whose rows are swizzled (``tiling.mma_rows``), from row to row and chunk to
chunk.

The place of row r and column c is r pitch + c, with some bits of c flipped by the row. A thread
reads matrices in rows that differ by multiples of 8, which are flipped alike, so that its other
places are the first one with constant bits flipped, and a constant further.
"""

from fa_numba.device import cuda, int64, uint32
from fa_numba.parts.namespace import part
from fa_numba.tiling.mma_rows import CHUNK


@part
def make_exchange(rows):
    """``exchange(row)``: the bits of a row's columns that are flipped."""
    TURN, group = rows.turn_rows, rows.group

    def exchange(row):
        return uint32(uint32(row) // uint32(TURN) % uint32(group) * uint32(CHUNK))

    return exchange


@part
def make_further(rows, carries=False):
    """``further(place, down, right)``: the place ``down`` rows and ``right`` elements further, both
    constants and multiples of 8, as an index whose constant part is the instruction's offset.

    ``right`` has no bit of those within a group that the column of ``place`` has too; if it
    ``carries``, having some, ``place`` is as without a swizzle, and of this lane's row.
    """
    pitch, bits, exchange = rows.pitch, rows.exchanged, make_exchange(rows)

    def further(place, down, right):
        within = right & bits
        if carries:
            place = uint32(uint32(place + within) ^ exchange(cuda.threadIdx.x % 8))
        else:
            place = uint32(place ^ uint32(within))
        return int64(place) + (down * pitch + right - within)

    return further


@part
def make_first_place(rows, chunks):
    """``first_place(thread, r, c)``: where a thread of the map ``chunks`` finds its first chunk, in
    row r. Threads take places in order: the chunk that lies there begins at c ^ exchange(r), in
    other turns as many elements further, of that turn's row.
    """
    pitch, whole = rows.pitch, rows.pitch == chunks.right == CHUNK * rows.group
    assert chunks.width % rows.group == 0, "what is exchanged is of one turn"

    def first_place(thread, r, c):
        if whole:  # a turn's rows, of a group each, are threads in a row: saves a register
            return uint32(uint32(thread) * uint32(CHUNK))
        return uint32(r * pitch + c)

    return first_place
