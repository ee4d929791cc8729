"""Masks, each a plain function of (row, column).

One definition serves the kernels, the emulator and the reference: the functions take integers
(also inside a compiled kernel) or integer NumPy arrays that broadcast against each other.
"""


def visible_causal(row, col, diagonal):
    """Whether query `row` sees key `col` under the causal mask, aligned to the bottom right.

    `diagonal` is seqlen_k - seqlen_q: the last query sees every key, and where it is negative the
    first -diagonal queries see none.
    """
    return col <= row + diagonal
