"""The epilogue of a key split (Flash-Decoding): each block writes its unnormalised O, its l and its
m.

Several thread blocks share a row tile, and each block computes a softmax over its own columns. A
later kernel merges the results of the blocks. Let m_block be the maximum m of a row in one block,
and m the largest m_block of the row. The merge multiplies the O and l of each block by e^(m_block -
m) and adds the products.

A block could also store a logsumexp instead of l and m. The weights of the merge would then be less
accurate: a logsumexp is rounded, and for large scores its rounding error is visible in the result.
m_block is a score and needs no rounding.
"""

from fa_numba.device import uint32
from fa_numba.parts.grid import make_rows_of_split
from fa_numba.parts.namespace import part
from fa_numba.parts.values import make_write


@part
def writes_split(spec, write_rows):
    """Make ``write_split(rO, rl, rm, split, i0, rows, head, thread)``, which writes O, l and m of
    key split number ``split`` to the workspace.

    ``i0`` is the first row of the tile, and ``rows`` is the number of rows of the sequence.
    ``write_rows`` is the device function that writes O. O goes to the array ``head.options.A``, l
    to ``head.options.l``, and m to ``head.options.m``. The kernel of ``merge_splits`` combines the
    results of all splits later.
    """
    heads, write_values = spec.tile_heads, make_write(spec)
    rows_of_split = make_rows_of_split(spec)

    def write_split(rO, rl, rm, split, i0, rows, head, thread):
        first, end = uint32(i0 * heads), uint32(rows * heads)
        write_rows(rO, rows_of_split(head.options.A, split, head), first, end, thread)
        write_values(rl, rows_of_split(head.options.l, split, head), first, end, thread)
        write_values(rm, rows_of_split(head.options.m, split, head), first, end, thread)

    return write_split
