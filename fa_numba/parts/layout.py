"""What a thread owns: columns of a tile of S, and rows ty + i ``spec.row_step``.

Where the warps of a block split the keys, each has all rows of S for its own columns.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32


@cache
def make_column(spec):
    """``column(tx, j)``: the place of a thread's column j in its warp's part of a tile of S."""
    TX, W = spec.tx_count, spec.column_width

    @device_function
    def column(tx, j):
        return uint32(tx * W + j // W * (W * TX) + j % W)

    return column


@cache
def make_warp_column(spec):
    """``warp_column()``: the first of this warp's columns of a tile of S; 0 where it has all."""
    step = spec.warp_columns

    @device_function
    def warp_column():
        if step == 0:
            return uint32(0)
        return uint32(uint32(cuda.threadIdx.x) // uint32(32) * step)

    return warp_column


@cache
def make_owns(spec):
    """``owns(i)``: whether this warp is the one to read and write O, l and m of its rows i."""
    shared, warps = spec.warp_columns > 0, spec.threads // 32

    @device_function
    def owns(i):
        return not shared or uint32(cuda.threadIdx.x) // uint32(32) == uint32(i % warps)

    return owns
