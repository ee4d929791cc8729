"""Tiles and rows in e4m3 (a float of 8 bits) of standard attention on tensor cores.

Kernels convert e4m3 to float16 when they load a tile to shared memory, which is exact. The products
are those of float16. They have the same sums as ``mma.sync`` with e4m3 operands has on Hopper:
there, the assembler replaces this instruction by conversions to float16 and ``mma.sync`` of
float16.
"""

from fa_numba.device import cuda, float32, uint32
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.intrinsics.float8 import pack_e4m3, widen_e4m3
from fa_numba.intrinsics.global_memory import read16, write16
from fa_numba.intrinsics.shared import store8
from fa_numba.parts.mma.chunks import make_read_chunk
from fa_numba.parts.mma.swizzle import make_exchange
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import exp_of_difference

PIECE = 16  # elements that a thread reads at a time
# P is e^(S - m + 8 log(2)) and at most 256, so that it uses the range of e4m3.
P_FACTOR = float32(256.0)


@part
def make_widened_tile(count, rows, threads):
    """Make ``widened_tile(sT, place, T, row0, rows_end, col0, cols_end)``, which loads a tile of T
    in e4m3, and stores it in shared memory sT in float16.

    ``load.make_half_tile`` explains the arguments. The copies are not asynchronous. Rows of T start
    at 16-byte addresses, and ``col0`` is a multiple of 16.
    """
    PIECES = rows.columns // PIECE
    PARTS = count * PIECES
    turns, whole = ceil_div(PARTS, threads), PARTS % threads == 0
    exchange, pitch = make_exchange(rows), rows.pitch

    def widened_tile(sT, place, T, row0, rows_end, col0, cols_end):
        words = cuda.local.array(4, uint32)
        for n in range(turns):
            number = uint32(cuda.threadIdx.x + n * threads)
            if whole or number < uint32(PARTS):
                r, c = uint32(number // uint32(PIECES)), uint32(number % uint32(PIECES) * PIECE)
                row, col = uint32(row0 + r), uint32(col0 + c)
                for e in range(4):
                    words[e] = uint32(0)
                if row < rows_end:
                    if uint32(col + (PIECE - 1)) < cols_end:
                        found = read16(T, row, col)
                        words[0], words[1] = found[0], found[1]
                        words[2], words[3] = found[2], found[3]
                    else:
                        for e in range(PIECE - 1):
                            if uint32(col + e) < cols_end:
                                element = uint32(uint32(T[row, uint32(col + e)]) << 8 * (e % 4))
                                words[e // 4] = uint32(words[e // 4] | element)
                first, turned = uint32(place + r * pitch), exchange(r)
                for e in range(2):
                    a, b = widen_e4m3(words[2 * e])
                    c0, d0 = widen_e4m3(words[2 * e + 1])
                    store8(sT, uint32(first + (uint32(c + 8 * e) ^ turned)), a, b, c0, d0)

    return widened_tile


@part
def make_write_exponentials(dtype, resident):
    """Make ``write_exponentials(P, sRow, S, row, col, cols_end, m)``, which computes 16 elements of
    a row of P, from column ``col`` on, and writes them in e4m3.

    P is 256 e^(S - m). ``dtype`` is the dtype of S. ``chunks.make_read_chunk`` explains
    ``resident`` and the arguments ``sRow`` and ``S``. Elements at or past ``cols_end`` are not
    written.
    """
    read_chunk = make_read_chunk(dtype, resident)

    def write_exponentials(P, sRow, S, row, col, cols_end, m):
        r, words = cuda.local.array(8, float32), cuda.local.array(4, uint32)
        for half in range(2):
            at = uint32(col + 8 * half)
            for e in range(8):
                r[e] = NEG_INF
            if at < cols_end:
                read_chunk(r, sRow, S, row, at, cols_end)
            for e in range(8):
                r[e] = P_FACTOR * exp_of_difference(r[e], m)
            words[2 * half] = pack_e4m3(r[0], r[1], r[2], r[3])
            words[2 * half + 1] = pack_e4m3(r[4], r[5], r[6], r[7])
        if uint32(col + (PIECE - 1)) < cols_end:
            write16(P, row, col, words[0], words[1], words[2], words[3], True)
        else:
            for e in range(PIECE - 1):
                if uint32(col + e) < cols_end:
                    P[row, uint32(col + e)] = words[e // 4] >> uint32(8 * (e % 4)) & uint32(0xFF)

    return write_exponentials
