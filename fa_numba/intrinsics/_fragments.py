"""Compiled loops for emulations: the elements of matrices that each lane of a warp holds.

The last axis of an array of registers counts lanes, 32 for each warp. In the loops, lane l of a
warp has g = l // 4 and t = 2 (l % 4). In the matrices A and C, g is the lane's first row, and t is
the lane's first column. matrix.py describes this layout of fragments.
"""

from fa_numba.emulator import compiling

WARP = 32

compiled = compiling.compiled()


@compiled
def operands(values, a0, a1, a2, a3, b0, b1, A, B):
    """Fill the matrices A: (warps, 16, 16) and B: (warps, 16, 8) from the fragments of the lanes.

    Each of a0 to a3, b0 and b1 contains one 32-bit word per lane, with two 16-bit elements.
    ``values[bits]`` is the value of an element with these 16 bits.
    """
    for k in range(a0.size):
        w, g, t = k // WARP, k % WARP // 4, k % 4 * 2
        for half in range(2):
            shift, c = 16 * half, t + half
            A[w, g, c] = values[a0[k] >> shift & 0xFFFF]
            A[w, g + 8, c] = values[a1[k] >> shift & 0xFFFF]
            A[w, g, c + 8] = values[a2[k] >> shift & 0xFFFF]
            A[w, g + 8, c + 8] = values[a3[k] >> shift & 0xFFFF]
            B[w, c, g] = values[b0[k] >> shift & 0xFFFF]
            B[w, c + 8, g] = values[b1[k] >> shift & 0xFFFF]


@compiled
def sums(C, product, made):
    """Compute made = C + product in float32, for the fragments of all lanes.

    `C` and `made` have the shape (4, lanes): the four elements of the result that each lane holds.
    `product`: (warps, 16, 8) contains one complete matrix per warp.
    """
    for k in range(C.shape[1]):
        w, g, t = k // WARP, k % WARP // 4, k % 4 * 2
        for n in range(4):
            p = product[w, g + 8 * (n // 2), t + n % 2]
            made[n, k] = C[n, k] + p


@compiled
def dealt(rows, transposed, words):
    """Distribute the elements of rows to the lanes, as ``ldmatrix`` does.

    `rows`: (8, lanes) contains the rows of the 8 x 8 tiles, one row per lane. Lane l of a warp has
    the eight 16-bit elements of row l % 8 of tile l // 8. The function fills `words`: (4, lanes).
    Entry [m, lane] becomes the two elements of tile m that ``ldmatrix`` returns to this lane.
    `transposed` says whether each tile is transposed.
    """
    for k in range(rows.shape[1]):
        first, g, t = k // WARP * WARP, k % WARP // 4, k % 4 * 2
        for m in range(4):
            at = first + 8 * m
            if transposed:
                words[m, k] = rows[g, at + t] | rows[g, at + t + 1] << 16
            else:
                words[m, k] = rows[t, at + g] | rows[t + 1, at + g] << 16
