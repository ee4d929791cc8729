"""Emulation: the elements of matrices that each lane holds, in compiled loops over the lanes.

Arrays are over all lanes of whole warps; lane l of a warp has group l // 4 and place l % 4.
"""

from fa_numba.emulator import compiling

WARP = 32

compiled = compiling.compiled()


@compiled
def operands(values, a0, a1, a2, a3, b0, b1, A, B):
    """A, (warps, 16, 16), and B, (warps, 16, 8), of their words; ``values``: what 16 bits mean."""
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
    """C, (4, lanes), plus a product of each warp, (warps, 16, 8), in single precision."""
    for k in range(C.shape[1]):
        w, g, t = k // WARP, k % WARP // 4, k % 4 * 2
        for n in range(4):
            p = product[w, g + 8 * (n // 2), t + n % 2]
            made[n, k] = C[n, k] + p


@compiled
def dealt(rows, transposed, words):
    """ldmatrix: of eight elements of every lane's row, (8, lanes), the words that lanes get."""
    for k in range(rows.shape[1]):
        first, g, t = k // WARP * WARP, k % WARP // 4, k % 4 * 2
        for m in range(4):
            at = first + 8 * m
            if transposed:
                words[m, k] = rows[g, at + t] | rows[g, at + t + 1] << 16
            else:
                words[m, k] = rows[t, at + g] | rows[t + 1, at + g] << 16
