"""Which rows and columns of a tile of S a thread owns, and in which register each element is.

Element (i, j) of thread (ty, tx) stands in row ``row(ty, i)`` and column ``column(tx, j)`` of the
tile, and in register i EI + j EJ with EI, EJ = ``spec.element_steps``.
"""

from functools import cache

from fa_numba.device import device_function, uint32


@cache
def make_row(spec):
    """``row(ty, i)``: the place in a tile of S of a thread's row i."""
    return _make_place(spec.row_width, spec.row_step)


@cache
def make_column(spec):
    """``column(tx, j)``: the place in a tile of S of a thread's column j."""
    return _make_place(spec.column_width, spec.column_step)


@cache
def _make_place(width, step):
    """``width`` neighbours each, ``step`` from the first of them to the next."""

    @device_function
    def place(thread, n):
        return uint32(thread * width + n // width * step + n % width)

    return place
