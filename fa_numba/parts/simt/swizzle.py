"""The swizzle of tiles in shared memory on CUDA cores, as ``tiling.simt.SharedRows`` defines it."""

from fa_numba.device import int64, uint32
from fa_numba.parts.namespace import part


@part
def flip_of(rows):
    """Make ``flip(r)``, which returns the swizzle of row r: an int64.

    The exclusive or of this number and a column, both in bytes, gives the position of the column in
    the row.
    """
    BYTES, STEP, WAYS = 4 * rows.unit, rows.step, rows.ways

    def flip(r):
        if WAYS == 1:
            return int64(0)
        return int64(uint32(uint32(r) // uint32(STEP) % uint32(WAYS) * uint32(BYTES)))

    return flip
