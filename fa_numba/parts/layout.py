"""The columns of a tile of S that a thread owns; its rows are ty + i ``spec.row_step``."""

from functools import cache

from fa_numba.device import device_function, uint32


@cache
def make_column(spec):
    """``column(tx, j)``: the place in a tile of S of a thread's column j."""
    TX, W = spec.tx_count, spec.column_width

    @device_function
    def column(tx, j):
        return uint32(tx * W + j // W * (W * TX) + j % W)

    return column
