"""Tiles from global to shared memory, asynchronously."""

from functools import cache

from fa_numba.device import cuda, device_function, int32, uint32
from fa_numba.intrinsics.async_copy import copy1_async, copy4_async


@cache
def make_load_tile(rows, columns, pitch, threads, aligned):
    """``load_tile(sT, T, row0, rows_end, col0, cols_end)`` starts copying a tile of T to sT.

    The tile is ``rows`` x ``columns`` from (row0, col0), with ``pitch`` floats a row in sT.
    Elements at or past ``rows_end`` or ``cols_end`` become 0 and are not read.
    ``aligned`` uses 16-byte copies: rows of T start at 16-byte addresses.
    """
    width = 4 if aligned else 1
    chunks = columns // width
    copies = rows * chunks
    per_thread = -(-copies // threads)
    even = copies % threads == 0
    copy_async = copy4_async if aligned else copy1_async

    @device_function
    def load_tile(sT, T, row0, rows_end, col0, cols_end):
        for n in range(per_thread):
            copy = uint32(cuda.threadIdx.x + n * threads)
            r = uint32(copy // uint32(chunks))
            c = uint32(uint32(copy % uint32(chunks)) * width)
            row = uint32(row0 + r)
            col = uint32(col0 + c)
            if even or copy < uint32(copies):
                count = int32(0)
                if row < uint32(rows_end) and col < uint32(cols_end):
                    count = int32(min(int32(width), int32(cols_end - col)))
                copy_async(sT, uint32(r * pitch + c), T, row, col, count)

    return load_tile
