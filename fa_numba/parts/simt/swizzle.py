"""The swizzle of tiles in shared memory on CUDA cores, as ``tiling.simt.SharedRows`` defines it."""

from fa_numba.device import int64, uint32
from fa_numba.parts.namespace import part


@part
def flip_of(rows):
    """Make ``flip(r)``, which returns the number for the exclusive or with the columns of row r.

    The columns and the number are in bytes. The number is an int64.
    """
    BYTES, STEP, WAYS = 4 * rows.unit, rows.step, rows.ways

    def flip(r):
        if WAYS == 1:
            return int64(0)
        return int64(uint32(uint32(r) // uint32(STEP) % uint32(WAYS) * uint32(BYTES)))

    return flip
