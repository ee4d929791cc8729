"""Reads and writes of chunks: eight neighbouring 16-bit elements of a row, moved by one 16-byte
access.

Rows start at 16-byte addresses. The threads of a block copy a tile or a row in several turns. In
each turn, every thread copies one chunk. Each thread reads and writes only its own chunks.
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
    """Which chunks of a tile each thread copies. A chunk is eight 16-bit elements of a row.

    The tile has ``rows`` rows of ``chunks`` chunks. The ``threads`` threads of a block copy it in
    several turns. In one turn, each thread copies one chunk. For example, let 128 threads copy a
    tile of 64 rows and 16 chunks. In one turn, they copy the 16 chunks of 8 rows. After 8 turns,
    the tile is complete.

    In general, the chunks of one turn form a rectangle of the tile, one chunk for each thread. The
    next turn copies the rectangle to the right of it. When all rectangles from left to right are
    copied, the next turn begins at the left, below them. Four properties describe the rectangles:

    property   meaning                                                 value in the example
    width      chunks in a row of the rectangle                        16
    right      elements in a row of the rectangle                      128
    down       rows of the rectangle                                   8
    along      rectangles from the left to the right end of the tile   1

    A thread copies one chunk of each rectangle, at the same position in every rectangle. Its n-th
    chunk is ``n // along * down`` rows below its first chunk, and ``n % along * right`` elements to
    the right of it. n counts from 0.
    """

    rows: int
    chunks: int
    threads: int

    @property
    def width(self):
        """Number of neighbouring chunks of a row that the threads copy in one turn."""
        return gcd(self.chunks, self.threads)

    @property
    def along(self):
        """Number of turns after which the current rows are complete: the chunks of a row divided by
        ``width``.
        """
        return self.chunks // self.width

    @property
    def down(self):
        """Number of rows in which the threads copy chunks in one turn: the number of threads
        divided by ``width``.
        """
        return self.threads // self.width

    @property
    def right(self):
        """Number of neighbouring elements of a row that the threads copy in one turn: 8 times
        ``width``.
        """
        return 8 * self.width

    @property
    def turns(self):
        """Number of turns after which the threads have copied the complete tile."""
        return ceil_div(self.rows, self.down) * self.along

    @property
    def whole(self):
        """Whether every thread copies a chunk in every turn. Otherwise the last turns copy fewer
        rows than ``down``.
        """
        return self.rows % self.down == 0


@part
def make_first_chunk(chunks):
    """Make ``first_chunk(thread)``, which returns the row and the column of a thread's first chunk
    in a tile.

    ``chunks`` is a ``ChunkMap``. The column counts elements.
    """
    width = chunks.width

    def first_chunk(thread):
        thread = uint32(thread)
        return uint32(thread // uint32(width)), uint32(uint32(thread % uint32(width)) * 8)

    return first_chunk


@part
def make_turn(chunks):
    """Make ``turn(n)``, which returns how far a thread's n-th chunk is from its first chunk.

    The result is two numbers: the number of rows downwards, and the number of elements to the
    right. ``chunks`` is a ``ChunkMap``, in which n counts the turns of the copy from 0.
    """
    along, down, right = chunks.along, chunks.down, chunks.right

    def turn(n):
        return n // along * down, n % along * right

    return turn


@part
def make_load_row(threads, resident):
    """Make ``load_row(sRow, T, row, cols_end)``, which starts to copy a row of T to shared memory
    sRow.

    Each thread copies its own chunks of the row, one in each turn. ``threads`` is the number of
    threads in a block. Elements at or past column ``cols_end`` are not read. If ``resident`` is
    false, the kernel keeps no rows in shared memory, and ``load_row`` does nothing.
    """

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
    """Make ``read_chunk(r, sRow, T, row, col, cols_end)``, which reads the chunk at column ``col``
    of a row into the registers r.

    ``r: (8,)`` are float32 registers. Elements at or past column ``cols_end`` become 0. If
    ``resident`` is true, the chunk comes from shared memory sRow, where ``load_row`` has stored the
    row. Otherwise it comes from T in global memory.
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
    """Make ``write_chunk(r, T, row, col, cols_end)``, which rounds the chunk r and writes it to a
    row of T.

    ``r: (8,)`` are float32 registers. Elements at or past ``cols_end`` are not written.
    """
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
