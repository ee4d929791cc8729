"""Loads of the next tile, started while the current tile is computed.

In FA-1 the next tile is the next row tile of a pass. In FA-2 it is the next column tile of a block.
"""

from fa_numba.device import uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.visits import make_next_column, make_row_after


@part
def next_row_tile(spec, load_q):
    """Make ``load_next_q(sQ, Q, visit, i0, i_end, rows_end)``, which starts to load the row tile
    that comes after row tile i0.

    ``visit`` is the result of ``visits.row_ahead`` for row tile i0. ``load_q`` is the device
    function that copies a row tile to sQ. ``rows_end`` is one past the last valid row. The result
    is the first row of the next row tile. If there is no next row tile, nothing is loaded, and the
    result is at or past ``i_end``.
    """
    row_after = make_row_after(spec)

    def load_next_q(sQ, Q, visit, i0, i_end, rows_end):
        i_next = row_after(visit, i0)
        if i_next < i_end:
            load_q(sQ, Q, i_next, rows_end)
        return i_next

    return load_next_q


@part
def next_column_tile(spec, load_k):
    """Make ``load_next_k(sK, K, j0, j_end, rows_end, i0, head)``, which starts to load the column
    tile that row tile i0 visits after column tile j0.

    ``load_k`` is the device function that copies a column tile to sK. ``rows_end`` is one past the
    last valid row of K. The result is the first column of the next column tile. If there is no next
    column tile, nothing is loaded, and the result is at or past ``j_end``.
    """
    Bc, next_column = spec.Bc, make_next_column(spec)

    def load_next_k(sK, K, j0, j_end, rows_end, i0, head):
        j_next = next_column(uint32(j0 + Bc), j_end, i0, head)
        if j_next < j_end:
            load_k(sK, K, j_next, rows_end)
        return j_next

    return load_next_k
