"""What a block leaves of its share of a row tile's columns (Flash-Decoding): O unnormalised, l, m.

Blocks that share a row tile cannot share its softmax. m is a score, so e^(m_split - m) is exact
where it matters, near 1: a logsumexp in its place would be rounded, which shows where scores are
large.
"""

from fa_numba.device import uint32
from fa_numba.parts.grid import make_rows_of_split
from fa_numba.parts.namespace import part
from fa_numba.parts.values import make_write


@part
def writes_split(spec, write_rows):
    """``write_split(rO, rl, rm, split, i0, rows, head, thread)``: O, l and m of the rows from i0 on
    of ``rows`` and of a split's columns, O by ``write_rows``.
    """
    heads, write_values = spec.tile_heads, make_write(spec)
    rows_of_split = make_rows_of_split(spec)

    def write_split(rO, rl, rm, split, i0, rows, head, thread):
        first, end = uint32(i0 * heads), uint32(rows * heads)
        write_rows(rO, rows_of_split(head.options.A, split, head), first, end, thread)
        write_values(rl, rows_of_split(head.options.l, split, head), first, end, thread)
        write_values(rm, rows_of_split(head.options.m, split, head), first, end, thread)

    return write_split
