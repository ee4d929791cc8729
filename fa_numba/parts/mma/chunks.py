"""Eight neighbouring 16-bit elements of a row, which starts at a 16-byte address: a chunk.

The threads of a block take the chunks of a row in turn, and each touches its own alone.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.async_copy import copy8_async
from fa_numba.intrinsics.global_memory import read8, write8
from fa_numba.intrinsics.matrix import pack_bf16, pack_f16, unpack_bf16, unpack_f16
from fa_numba.intrinsics.shared import load8


def conversions(dtype):
    """(pack, unpack) of two floats and a word."""
    return (pack_f16, unpack_f16) if dtype == "float16" else (pack_bf16, unpack_bf16)


@dataclass(frozen=True)
class ChunkMap:
    """How ``takers`` share ``rows`` of ``chunks``: in turns of neighbouring chunks of some rows.

    As many neighbours share a row as divide both counts, so that all that a taker has lies at
    constants from its first: the n-th ``n // along * down`` rows below and ``n % along * right``
    elements to the right. ``whole`` is for turns that end with the last row.
    """

    rows: int
    chunks: int
    takers: int

    @property
    def width(self):
        return gcd(self.chunks, self.takers)

    @property
    def along(self):
        return self.chunks // self.width

    @property
    def down(self):
        return self.takers // self.width

    @property
    def right(self):
        return 8 * self.width

    @property
    def turns(self):
        return -(-self.rows // self.down) * self.along

    @property
    def whole(self):
        return self.rows % self.down == 0


@cache
def make_first_chunk(deal):
    """``first_chunk(taker)``: (row, column) of a taker's first chunk."""
    width = deal.width

    @device_function
    def first_chunk(taker):
        taker = uint32(taker)
        return uint32(taker // uint32(width)), uint32(uint32(taker % uint32(width)) * 8)

    return first_chunk


@cache
def make_turn(deal):
    """``turn(n)``: how far below and to the right of a taker's first chunk its n-th lies."""
    along, down, right = deal.along, deal.down, deal.right

    @device_function
    def turn(n):
        return n // along * down, n % along * right

    return turn


@cache
def make_load_row(threads, resident):
    """``load_row(sRow, T, row, cols_end)``: this thread's chunks of a row, where ``resident``."""

    @device_function
    def load_row(sRow, T, row, cols_end):
        if resident:
            col = uint32(8 * cuda.threadIdx.x)
            while col < cols_end:
                count = int32(min(int32(8), int32(cols_end - col)))
                copy8_async(sRow, col, T, row, col, count)
                col = uint32(col + 8 * threads)

    return load_row


@cache
def make_read_chunk(dtype, resident):
    """``read_chunk(r, sRow, T, row, col, cols_end)``: a chunk, 0 beyond the row's end, as float32.

    From shared memory where ``load_row`` has put it there, or from T.
    """
    _, unpack = conversions(dtype)

    @device_function
    def spread(r, w):
        for n in range(4):
            pair = unpack(w[n])
            r[2 * n] = pair[0]
            r[2 * n + 1] = pair[1]

    @device_function
    def read_chunk(r, sRow, T, row, col, cols_end):
        if resident:
            spread(r, load8(sRow, col))
        elif uint32(col + 7) < cols_end:
            spread(r, read8(T, row, col))
        else:
            for e in range(8):
                r[e] = float32(0.0)
                if uint32(col + e) < cols_end:
                    r[e] = unpack(uint32(T[row, uint32(col + e)]))[0]

    return read_chunk


@cache
def make_write_chunk(dtype):
    """``write_chunk(r, T, row, col, cols_end)``: a chunk of float32, rounded."""
    pack, _ = conversions(dtype)

    @device_function
    def write_chunk(r, T, row, col, cols_end):
        if uint32(col + 7) < cols_end:
            w0, w1 = pack(r[0], r[1]), pack(r[2], r[3])
            w2, w3 = pack(r[4], r[5]), pack(r[6], r[7])
            write8(T, row, col, w0, w1, w2, w3, True)
        else:
            for e in range(7):
                if uint32(col + e) < cols_end:
                    T[row, uint32(col + e)] = pack(r[e], r[e]) & uint32(0xFFFF)

    return write_chunk
