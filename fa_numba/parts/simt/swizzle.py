"""Where a column of a row lies in a tile of shared memory: ``tiling.simt.SharedRows``."""

from fa_numba.device import int64, uint32
from fa_numba.parts.namespace import part


@part
def flip_of(rows):
    """``flip(r)``: what the columns of row r, in bytes, are exclusive-ored with; int64."""
    BYTES, STEP, WAYS = 4 * rows.unit, rows.step, rows.ways

    def flip(r):
        if WAYS == 1:
            return int64(0)
        return int64(uint32(uint32(r) // uint32(STEP) % uint32(WAYS) * uint32(BYTES)))

    return flip
