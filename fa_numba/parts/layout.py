"""Which rows and columns of a tile of S a thread owns, and in which register each element is.

Element (i, j) of thread (ty, tx) stands in row ``row(ty, i)`` and column ``column(tx, j)`` of the
tile, and in register i EI + j EJ with EI, EJ = ``spec.element_steps``. Where the warps of a block
split the keys, each has all rows of S for the columns from ``warp_column()`` on, and ``column``
counts from there.
"""

from functools import cache

from fa_numba.device import cuda, uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Tile


@cache
def make_row(spec):
    """``row(ty, i)``: the place in a tile of S of a thread's row i; where heads share the tile, the
    row of its head.
    """
    return _make_place(spec.row_width, spec.row_step, spec.tile_heads)


@cache
def make_column(spec):
    """``column(tx, j)``: the place in a tile of S of a thread's column j."""
    return _make_place(spec.column_width, spec.column_step)


@part
def make_head_of_row(spec):
    """``head_of_row(head, ty, i)``: the query head of a thread's row i, which others may share the
    tile with.
    """
    width, step, heads = spec.row_width, spec.row_step, spec.tile_heads

    def head_of_row(head, ty, i):
        if heads > 1:
            place = uint32(ty * width + i // width * step + i % width)
            return uint32(head.h * heads + place % uint32(heads))
        return head.h

    return head_of_row


@part
def _make_place(width, step, heads=1):
    """``width`` neighbours each, ``step`` from the first of them to the next; as rows of one of
    ``heads``.
    """

    def place(thread, n):
        if heads > 1:
            return uint32(uint32(thread * width + n // width * step + n % width) // uint32(heads))
        return uint32(thread * width + n // width * step + n % width)

    return place


@part
def make_warp_column(spec):
    """``warp_column()``: the first of this warp's columns of a tile of S; 0 where it has all."""
    step = spec.warp_columns

    def warp_column():
        if step == 0:
            return uint32(0)
        return uint32(uint32(cuda.threadIdx.x) // uint32(32) * step)

    return warp_column


@part
def make_warp_tile(spec):
    """``warp_tile(tile)``: this warp's columns of a tile."""
    warp_column = make_warp_column(spec)

    def warp_tile(tile):
        return Tile(tile.i0, uint32(tile.j0 + warp_column()), tile.head, tile.thread)

    return warp_tile


@part
def make_owns(spec):
    """``owns(i)``: whether this warp is the one to read and write O, l and m of its rows i."""
    shared, warps = spec.warp_columns > 0, spec.threads // 32

    def owns(i):
        return not shared or uint32(cuda.threadIdx.x) // uint32(32) == uint32(i % warps)

    return owns
