"""The tile after this one, on its way while this one is computed with: the next row tile of one of
FA-1's passes, the next column tile of an FA-2 block.
"""

from fa_numba.device import uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.visits import make_next_column, make_row_after


@part
def next_row_tile(spec, load_q):
    """``load_next_q(sQ, Q, visit, i0, i_end, rows_end)``: the row tile that comes after the one at
    i0, by ``load_q``; gives where it starts, at or past i_end if there is none.
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
    """``load_next_k(sK, K, j0, j_end, rows_end, i0, head)``: along the columns."""
    Bc, next_column = spec.Bc, make_next_column(spec)

    def load_next_k(sK, K, j0, j_end, rows_end, i0, head):
        j_next = next_column(uint32(j0 + Bc), j_end, i0, head)
        if j_next < j_end:
            load_k(sK, K, j_next, rows_end)
        return j_next

    return load_next_k
