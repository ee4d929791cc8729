"""Indices in a tile of shared memory whose rows are swizzled (``tiling.mma_rows``).

Row r and column c have the index r pitch + c, in which the row decides that some bits of c are
flipped. A thread reads rows whose distance is a multiple of 8. These rows have equal flipped bits.
Each further index of a thread is therefore its first index with constant bits flipped, plus a
constant.
"""

from fa_numba.device import cuda, int64, uint32
from fa_numba.parts.namespace import part
from fa_numba.tiling.mma_rows import CHUNK


@part
def make_exchange(rows):
    """Make ``exchange(row)``, which returns a mask: the bits of the column that are flipped in this
    row.
    """
    TURN, group = rows.turn_rows, rows.group

    def exchange(row):
        return uint32(uint32(row) // uint32(TURN) % uint32(group) * uint32(CHUNK))

    return exchange


@part
def make_further(rows, carries=False):
    """Make ``further(place, down, right)``, which returns the index ``down`` rows and ``right``
    elements after ``place``.

    ``down`` and ``right`` are compile-time constants and multiples of 8. A constant part of the
    result becomes the offset in the load instruction.

    Normally, the bits of ``right`` that the swizzle can flip must be 0 in the column of ``place``.
    If ``carries``, this is not required. ``place`` is then an index without the swizzle, of the row
    at which this lane points.
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
    """Make ``first_place(thread, r, c)``, which returns the index in shared memory of a thread's
    first chunk.

    ``chunks`` is the ``ChunkMap``, and (r, c) is the thread's first chunk in it. The thread copies
    the chunk that the swizzle stores at this index, which is the one at column c ^ exchange(r) of
    row r. In other turns, the index is larger by a constant, and the swizzle is that of the turn's
    row.
    """
    pitch, whole = rows.pitch, rows.pitch == chunks.right == CHUNK * rows.group
    assert chunks.width % rows.group == 0, "what is exchanged is of one turn"

    def first_place(thread, r, c):
        if whole:  # consecutive threads, so that no register is needed for r
            return uint32(uint32(thread) * uint32(CHUNK))
        return uint32(r * pitch + c)

    return first_place
