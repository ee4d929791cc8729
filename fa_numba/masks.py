"""Masks, distances and random bits as plain functions of a row and a column.

The kernels, the emulator and the reference use these functions. The arguments are integers (also
inside a compiled kernel), or integer NumPy arrays that broadcast against each other. `diagonal` is
the number of valid columns minus the number of valid rows. Column `row + diagonal` is called the
diagonal column of a row.
"""

import numpy as np


def visible_causal(row, col, diagonal):
    """Return whether row `row` sees column `col` under the causal mask.

    `diagonal` is the number of valid columns minus the number of valid rows. The mask is aligned to
    the bottom right: the last row sees every column. If `diagonal` is negative, the first -diagonal
    rows see no column.
    """
    return col <= row + diagonal


def visible_window(row, col, diagonal, left, right):
    """Return whether row `row` sees column `col` in a window.

    A row sees its diagonal column (column `row + diagonal`), `left` columns before it, and `right`
    columns after it. `diagonal` is the number of valid columns minus the number of valid rows.
    """
    return (col >= row + diagonal - left) & (col <= row + diagonal + right)


def distance(row, col, diagonal):
    """Return the distance between column `col` and column `row + diagonal`.

    `diagonal` is the number of valid columns minus the number of valid rows. ALiBi subtracts slope
    times this distance from the score (arXiv 2108.12409).
    """
    return abs(row + diagonal - col)


def numeric_mask(mask):
    """Return the float32 array that a NumPy mask adds to the scores.

    A bool mask becomes 0 for True and -inf for False. A mask of numbers keeps its values.
    """
    if mask.dtype == bool:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    return np.asarray(mask, np.float32)


def make_philox(uint32, uint64, rounds=7):
    """Return the random number generator Philox4x32 (Salmon et al., SC 2011).

    ``philox(c0, c1, c2, c3, k0, k1)`` returns four random 32-bit words for a counter of four words
    and a key of two words. ``uint32`` and ``uint64`` are the casts of Numba or of NumPy. The paper
    finds that 7 rounds are the fewest that pass the test suite BigCrush.
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


# One call of philox (a draw) gives 16 random bits for each of eight elements: rows r and r + 8 of
# 16 rows, and columns c, c + 8, c + 16 and c + 24 of 32 columns. A thread has these elements in the
# results of a matrix instruction. The counter is ((col // 32) * 8 + col % 8, (row // 16) * 8 +
# row % 8, (batch << 16) + head, offset), and the key is the seed. The 16-bit halves of the words,
# the lower half first, belong to the four columns of row r, and then to those of row r + 8.
APART = 8  # rows, and columns, of a draw
DRAW_ROWS, DRAW_COLUMNS = 2, 4
