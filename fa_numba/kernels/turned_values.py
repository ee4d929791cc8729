"""Kernel that stores V by columns, for products of e4m3 matrices on Hopper.

The instruction that multiplies e4m3 matrices cannot transpose an operand. In O += P V, it needs the
keys of one column of V next to each other. This kernel therefore copies V: (batch, heads, rows, d)
to VT: (batch, heads, d, keys). Keys after the end of a sequence are 0. The number of keys is the
number of rows, rounded up to GROUP, and GROUP more. A box of GROUP keys that begins at any row is
then within VT.

Within 16 keys, the order is the order of P in the registers of a thread. A word of four elements of
VT contains the keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where t is the number of the word, 0 to 3.
A thread with the same t has P of these four columns (``products.make_round_p``). It can use them as
an operand without exchanging elements with other threads.

A thread copies 16 keys of 16 columns. A warp reads 64 bytes of each of 128 rows, and writes 128
bytes of each of 64 rows.

Accesses, elements per K/V head:  loads N d, stores GROUP (ceil(N / GROUP) + 1) d.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.device.signature import byte_type
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.global_memory import read16, write16
from fa_numba.intrinsics.halfwords import permute_bytes
from fa_numba.parts import bind
from fa_numba.parts import grid as grid_parts
from fa_numba.parts.namespace import RowFacts

GROUP = 256  # keys that a thread block copies
SIDE = 16  # keys and columns that a thread copies
_CHUNKS, _SIDES = 4, 8  # columns and keys that a warp copies, in units of SIDE
# Selectors of ``permute_bytes``: bytes of a and b in turn, and halves of a and b.
_LOW_BYTES, _HIGH_BYTES = uint32(0x5140), uint32(0x7362)
_LOW_HALVES, _HIGH_HALVES = uint32(0x5410), uint32(0x7632)


@device_function
def _transpose(a, b, c, d):
    """Return four words: word n contains byte n of each of the words a, b, c and d."""
    low, high = permute_bytes(a, b, _LOW_BYTES), permute_bytes(a, b, _HIGH_BYTES)
    low_cd, high_cd = permute_bytes(c, d, _LOW_BYTES), permute_bytes(c, d, _HIGH_BYTES)
    return (
        permute_bytes(low, low_cd, _LOW_HALVES),
        permute_bytes(low, low_cd, _HIGH_HALVES),
        permute_bytes(high, high_cd, _LOW_HALVES),
        permute_bytes(high, high_cd, _HIGH_HALVES),
    )


@cache
def make_turn_values(d_v, features):
    """Return the kernel that copies V to VT. The grid is (keys / GROUP, K/V heads, batch entries).

    ``d_v`` is a multiple of 16. ``features`` contain the lengths of the sequences.
    """
    (grid,) = bind(RowFacts(features), grid_parts)
    COLUMNS = ceil_div(d_v, SIDE)
    WARPS = ceil_div(COLUMNS, _CHUNKS)  # that copy the same keys
    THREADS = 32 * WARPS * GROUP // (_SIDES * SIDE)

    @cuda.jit((byte_type(4), byte_type(4), features.argument_type), THREADS, 0)
    def turn_values(V, VT, options):
        words = cuda.local.array(64, uint32)  # four words of each key
        made = cuda.local.array(16, uint32)  # four words of each of four columns
        head, thread = grid.query_head(V.shape[2], V.shape[2], options), uint32(cuda.threadIdx.x)
        Vh, VTh = V[head.b, head.h], VT[head.b, head.h]
        warp, lane = uint32(thread // uint32(32)), uint32(thread % uint32(32))
        chunk = uint32(warp % uint32(WARPS) * _CHUNKS + lane % uint32(_CHUNKS))
        side = uint32(warp // uint32(WARPS) * _SIDES + lane // uint32(_CHUNKS))
        key0 = uint32(GROUP * cuda.blockIdx.x + SIDE * side)
        col0, inside = uint32(SIDE * chunk), chunk < uint32(COLUMNS)
        for k in range(SIDE):
            for n in range(4):
                words[4 * k + n] = uint32(0)
            if inside and uint32(key0 + k) < head.Nk:
                found = read16(Vh, uint32(key0 + k), col0)
                words[4 * k], words[4 * k + 1] = found[0], found[1]
                words[4 * k + 2], words[4 * k + 3] = found[2], found[3]
        for n in range(4):
            for t in range(4):
                first, last = 8 * t + n, 8 * t + 32 + n  # keys 2 t and 2 t + 8
                turned = _transpose(words[first], words[first + 4], words[last], words[last + 4])
                made[t] = turned[0]
                made[4 + t] = turned[1]
                made[8 + t] = turned[2]
                made[12 + t] = turned[3]
            for i in range(4):
                row, m = uint32(col0 + 4 * n + i), 4 * i
                write16(VTh, row, key0, made[m], made[m + 1], made[m + 2], made[m + 3], inside)

    return turn_values
