"""Chunks: eight neighbouring 16-bit elements of a row, which one 16-byte access moves.

Rows start at 16-byte addresses. The threads of a block take the chunks of a tile or of a row in
turns, and each thread touches its own chunks alone.
"""

from dataclasses import dataclass
from math import gcd

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.async_copy import copy8_async
from fa_numba.intrinsics.global_memory import read8, write8
from fa_numba.intrinsics.shared import load8
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.namespace import part


@dataclass(frozen=True)
class ChunkMap:
    """Which chunks of a tile each thread copies: ``rows`` rows of ``chunks`` chunks, ``threads``
    threads.

    In one turn the threads cover ``width`` neighbouring chunks of ``down`` rows, a chunk each. The
    width divides both counts, so that all chunks of a thread lie at constants from its first: the
    n-th is ``n // along * down`` rows below and ``n % along * right`` elements to the right.
    """

    rows: int
    chunks: int
    threads: int

    @property
    def width(self):
        """Neighbouring chunks of a row in one turn."""
        return gcd(self.chunks, self.threads)

    @property
    def along(self):
        """Turns that a row takes."""
        return self.chunks // self.width

    @property
    def down(self):
        """Rows in one turn."""
        return self.threads // self.width

    @property
    def right(self):
        """Elements of a row in one turn."""
        return 8 * self.width

    @property
    def turns(self):
        return ceil_div(self.rows, self.down) * self.along

    @property
    def whole(self):
        """Whether the last turn ends with the last row, so that no thread is without a chunk."""
        return self.rows % self.down == 0


@part
def make_first_chunk(chunks):
    """``first_chunk(thread)``: (row, column) of a thread's first chunk in the tile."""
    width = chunks.width

    def first_chunk(thread):
        thread = uint32(thread)
        return uint32(thread // uint32(width)), uint32(uint32(thread % uint32(width)) * 8)

    return first_chunk


@part
def make_turn(chunks):
    """``turn(n)``: rows below and elements to the right of a thread's first chunk, of its n-th."""
    along, down, right = chunks.along, chunks.down, chunks.right

    def turn(n):
        return n // along * down, n % along * right

    return turn


@part
def make_load_row(threads, resident):
    """``load_row(sRow, T, row, cols_end)``: this thread's chunks of a row, where ``resident``."""

    def load_row(sRow, T, row, cols_end):
        if resident:
            col = uint32(8 * cuda.threadIdx.x)
            while col < cols_end:
                count = int32(min(int32(8), int32(cols_end - col)))
                copy8_async(sRow, col, T, row, col, count)
                col = uint32(col + 8 * threads)

    return load_row


@part
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


@part
def make_write_chunk(dtype):
    """``write_chunk(r, T, row, col, cols_end)``: a chunk of float32, rounded."""
    pack, _ = conversions(dtype)

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
