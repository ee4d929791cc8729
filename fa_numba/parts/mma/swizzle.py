"""Indices in a tile of shared memory whose rows are swizzled (``tiling.mma_rows``).

Without the swizzle, the element in row r and column c has the index r pitch + c, where ``pitch`` is
the length of a row. The swizzle flips some bits of c. The row decides which bits.

A thread reads rows whose distance is a multiple of 8, and in these rows the swizzle flips the same
bits. The thread therefore computes the index of its first element once. Every further index follows
by flipping constant bits and adding a constant.
"""

from fa_numba.device import cuda, int64, uint32
from fa_numba.parts.namespace import part
from fa_numba.tiling.mma_rows import CHUNK


@part
def make_exchange(rows):
    """Make ``exchange(row)``, which returns the bits of the column that the swizzle flips in this
    row, as a mask.
    """
    TURN, group = rows.turn_rows, rows.group

    def exchange(row):
        return uint32(uint32(row) // uint32(TURN) % uint32(group) * uint32(CHUNK))

    return exchange


@part
def make_further(rows, carries=False):
    """Make ``further(place, down, right)``, which returns the index in shared memory of the element
    that is ``down`` rows below and ``right`` columns to the right of a first element.

    The result includes the swizzle. ``down`` and ``right`` are compile-time constants and multiples
    of 8. A constant part of the result becomes the offset in the load instruction. ``place`` is the
    index of the first element:

    - If ``carries`` is false, ``place`` includes the swizzle. The bits of ``right`` that the
      swizzle can change are flipped in ``place`` instead of added. The first element's column must
      therefore be 0 in these bits.
    - If ``carries`` is true, ``place`` does not include the swizzle (``make_place`` with
      ``carries``). The function adds ``right`` before it applies the swizzle. The column of the
      first element may then have any bits.
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
    """Make ``first_place(thread, r, c)``, which returns the index in shared memory at which a
    thread stores its first chunk.

    ``chunks`` is the ``ChunkMap`` of the copy. It assigns the chunk at row r and column c to the
    thread. The function returns the index r pitch + c, which does not depend on the swizzle. The
    swizzle is applied to the source instead: the thread copies the chunk at column c ^ exchange(r)
    of row r, because this chunk belongs at the returned index. For the thread's further chunks, the
    index is larger by a constant.
    """
    pitch, whole = rows.pitch, rows.pitch == chunks.right == CHUNK * rows.group
    assert chunks.width % rows.group == 0, "what is exchanged is of one turn"

    def first_place(thread, r, c):
        if whole:  # consecutive threads, so that no register is needed for r
            return uint32(uint32(thread) * uint32(CHUNK))
        return uint32(r * pitch + c)

    return first_place
