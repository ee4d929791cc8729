"""The epilogue of a key split (Flash-Decoding): each block writes its unnormalised O, its l and its
m.

Thread blocks that share a row tile have no common softmax until their results are merged. They
store m rather than a logsumexp. m is a score, so that e^(m_split - m) is exact near 1, where it
matters. A logsumexp would be rounded, which gives visible errors if scores are large.
"""

from fa_numba.device import uint32
from fa_numba.parts.grid import make_rows_of_split
from fa_numba.parts.namespace import part
from fa_numba.parts.values import make_write


@part
def writes_split(spec, write_rows):
    """Make ``write_split(rO, rl, rm, split, i0, rows, head, thread)``, which writes O, l and m of a
    split.

    ``i0`` is the first row of the tile, and ``rows`` is the number of rows of a sequence.
    ``write_rows`` is the part that writes O. The results go to the arrays A, l and m of
    ``head.options``, at the index ``split``. ``merge_splits`` combines them later.
    """
    heads, write_values = spec.tile_heads, make_write(spec)
    rows_of_split = make_rows_of_split(spec)

    def write_split(rO, rl, rm, split, i0, rows, head, thread):
        first, end = uint32(i0 * heads), uint32(rows * heads)
        write_rows(rO, rows_of_split(head.options.A, split, head), first, end, thread)
        write_values(rl, rows_of_split(head.options.l, split, head), first, end, thread)
        write_values(rm, rows_of_split(head.options.m, split, head), first, end, thread)

    return write_split
