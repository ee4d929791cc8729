"""Which elements of a tile of S a thread holds, and in which registers.

A tile of S has Br rows and Bc columns. Thread (ty, tx) holds TM rows and TN columns of the tile.
Element (i, j) of a thread is the element in the thread's row number i and column number j.

- The row of element (i, j) in the tile is ``row(ty, i)``. The column is ``column(tx, j)``.
- The register of element (i, j) is number i EI + j EJ, with ``EI, EJ = spec.element_steps``.

If the warps of a thread block split the keys, each warp computes all rows of S for a part of the
columns. The part begins at column ``warp_column()``, and ``column`` counts from there.
"""

from functools import cache

from fa_numba.device import cuda, uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Tile


@cache
def make_row(spec):
    """Make ``row(ty, i)``, which converts row number i of a thread to a row of a tile of S.

    The result is from 0 to Br - 1. If several query heads share the tile (``spec.tile_heads``), the
    tile contains one row of each head in turn. The result is then the row within the head.
    """
    return _make_place(spec.row_width, spec.row_step, spec.tile_heads)


@cache
def make_column(spec):
    """Make ``column(tx, j)``, which converts column number j of a thread to a column of a tile of
    S.
    """
    return _make_place(spec.column_width, spec.column_step)


@part
def make_head_of_row(spec):
    """Make ``head_of_row(head, ty, i)``, which returns the query head of row number i of a thread.

    Normally the result is ``head.h``. If several query heads share a tile (``spec.tile_heads``),
    ``head.h`` is the number of a group of heads, and the tile contains one row of each head in
    turn. The result is then the head to which the row belongs.
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
    """Make ``place(thread, n)``, which converts row number n of a thread to a row of a tile, or
    column number n to a column.

    ``thread`` is ty for rows and tx for columns. A thread holds runs of ``width`` neighbouring rows
    (or columns). The first run begins at ``thread * width``. Each further run begins ``step`` rows
    after the run before. If ``heads`` query heads share the tile, the tile contains one row of each
    head in turn, and the result is the row within the head.
    """

    def place(thread, n):
        if heads > 1:
            return uint32(uint32(thread * width + n // width * step + n % width) // uint32(heads))
        return uint32(thread * width + n // width * step + n % width)

    return place


@part
def make_warp_column(spec):
    """Make ``warp_column()``, which returns the first column of a tile of S that this warp
    computes.

    It is 0 if every warp computes all columns.
    """
    step = spec.warp_columns

    def warp_column():
        if step == 0:
            return uint32(0)
        return uint32(uint32(cuda.threadIdx.x) // uint32(32) * step)

    return warp_column


@part
def make_warp_tile(spec):
    """Make ``warp_tile(tile)``, which returns the ``Tile`` record of the part that this warp
    computes.

    It is ``tile``, moved to the first column that this warp computes (``make_warp_column``).
    """
    warp_column = make_warp_column(spec)

    def warp_tile(tile):
        return Tile(tile.i0, uint32(tile.j0 + warp_column()), tile.head, tile.thread)

    return warp_tile


@part
def make_owns(spec):
    """Make ``owns(i)``, which says whether this warp reads and writes O, l and m of its row number
    i.

    Normally every warp owns its rows. If the warps split the keys, all warps compute the same rows,
    and row i belongs to warp i modulo the number of warps.
    """
    shared, warps = spec.warp_columns > 0, spec.threads // 32

    def owns(i):
        return not shared or uint32(cuda.threadIdx.x) // uint32(32) == uint32(i % warps)

    return owns
