"""Masks, biases and dropout, each a plain function of (row, column).

One definition serves the kernels, the emulator and the reference: the functions take integers
(also inside a compiled kernel) or integer NumPy arrays that broadcast against each other.
`diagonal` is seqlen_k - seqlen_q, the valid ones: row i is aligned to column i + diagonal.
"""

import numpy as np


def visible_causal(row, col, diagonal):
    """Whether query `row` sees key `col` under the causal mask, aligned to the bottom right.

    The last query sees every key, and where `diagonal` is negative the first -diagonal queries see
    none.
    """
    return col <= row + diagonal


def visible_window(row, col, diagonal, left, right):
    """Whether key `col` is at most `left` before and `right` after the diagonal key of `row`."""
    return (col >= row + diagonal - left) & (col <= row + diagonal + right)


def distance(row, col, diagonal):
    """Keys between `col` and the diagonal key of `row`: ALiBi adds -slope times it (2108.12409)."""
    return abs(row + diagonal - col)


def numeric_mask(mask):
    """A mask as float32 to add to scores: 0 where True, -inf where False; numbers as they are."""
    if mask.dtype == bool:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    return np.asarray(mask, np.float32)


def make_philox(uint32, uint64, rounds=7):
    """Philox4x32 (Salmon et al., SC 2011) with these casts, of Numba or NumPy. Of 7 rounds, the
    fewest that pass BigCrush there.

    ``philox(c0, c1, c2, c3, k0, k1)`` gives four 32-bit words for a counter and a key.
    """

    def philox(c0, c1, c2, c3, k0, k1):
        m0, m1, high = uint64(0xD2511F53), uint64(0xCD9E8D57), uint64(32)
        w0, w1 = uint32(0x9E3779B9), uint32(0xBB67AE85)
        for _ in range(rounds):
            p0 = uint64(c0) * m0
            p1 = uint64(c2) * m1
            c0 = uint32(uint32(p1 >> high) ^ c1 ^ k0)
            c1 = uint32(p1)
            c2 = uint32(uint32(p0 >> high) ^ c3 ^ k1)
            c3 = uint32(p0)
            k0 = uint32(k0 + w0)
            k1 = uint32(k1 + w1)
        return c0, c1, c2, c3

    return philox


# A draw has 16 bits for each of eight elements: of rows r and r + 8 of 16, of columns c, c + 8,
# c + 16 and c + 24 of 32, which one thread has of a matrix instruction's results. They are the
# halves, the lower first, of the words of the counter ((col // 32) * 8 + col % 8,
# (row // 16) * 8 + row % 8, (batch << 16) + head, offset), keyed by the seed: those of row r, then
# those of row r + 8.
APART = 8  # rows, and columns, of a draw
DRAW_ROWS, DRAW_COLUMNS = 2, 4
