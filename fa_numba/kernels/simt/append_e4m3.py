"""The kernel that appends keys and values to e4m3 pages, with a scale for each page and head.

A scale is a power of two, so that a change of the scale changes no digit of the rows that a page
has already: e4m3 is a floating-point format. Only numbers below 2^-6 times the scale lose digits.

    new scale = max(old scale, least power of two s with max |new rows| / s <= 448)

A page without earlier rows has no old scale. A thread block appends the rows of one sequence to one
page of a head. One launch appends keys, and another one values. A thread block reads the new rows
twice, for the largest number and to store them. If the scale of a page grows, the block reads and
writes the earlier rows of the page too.

    grid                     pages that a sequence can touch x heads x sequences
    thread                   16 columns of a row at a time
    shared memory            4 bytes per warp

Accesses, elements per K/V head, for N new rows:
    new: 2 N d loads    pages: N d stores    scales: one load and one store for each page
    and n d loads and stores of pages for n earlier rows of a page whose scale grows
"""

from functools import cache
from typing import Any, NamedTuple

from numba import types

from fa_numba.device import Kernel, cuda, device_function, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.arithmetic import ONE, inverse_power, maximum
from fa_numba.intrinsics.float8 import LARGEST, pack_e4m3, unpack_e4m3
from fa_numba.intrinsics.global_memory import read16, write16
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.kernels.simt.quantize import (
    COLUMNS,
    INF,
    SMALLEST,
    float_matrix,
    lanes,
    make_chunk,
    max_of_block,
    scaled,
)

THREADS = 256
_WARPS = THREADS // 32


class Run(NamedTuple):
    """New rows that go to one page.

    field      meaning
    earlier    number of rows that the page has already
    first      number of the first of the new rows
    rows       number of new rows
    """

    earlier: Any
    first: Any
    rows: Any


def pages_touched(rows, page_size):
    """Return the largest number of pages that ``rows`` consecutive rows of a sequence can be in."""
    return ceil_div(rows + page_size - 1, page_size)


@cache
def make_append_e4m3(head_dim, dtype, page_size, aligned, ragged):
    """Return the kernel that appends new keys, or new values, to e4m3 pages.

    ``pages``: (pages, H, page_size, head_dim) is uint8 and aligned to 16 bytes, and ``scales`` is
    (pages, H). The new rows, (B, H, N, head_dim), have the given ``dtype``. ``aligned`` says
    whether they start at 16-byte addresses. The grid is (``pages_touched``, H, B). If ``ragged`` is
    true, sequence b has ``new_lens[b]`` new rows. Otherwise every new row is appended.
    """
    append = _make_append_rows(head_dim, dtype, aligned)
    lengths, table = array_type(1, types.int32), array_type(2, types.int32)
    arrays = array_type(4, types.uint8), array_type(2), float_matrix(dtype)

    def append_e4m3(pages, scales, new, block_table, kv_lens, new_lens):
        s = shared_tile(0, _WARPS)
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        rows, before = uint32(new.shape[2]), uint32(kv_lens[b])
        if ragged:
            rows = uint32(new_lens[b])
        place = uint32(before // uint32(page_size) + uint32(cuda.blockIdx.x))
        begin = uint32(
            place * uint32(page_size)
        )  # the row of the sequence at which the page begins
        end = uint32(before + rows)
        if begin < end and rows > uint32(0):
            page = uint32(block_table[b, place])
            old = uint32(0)  # earlier rows of the page
            if begin < before:
                old = uint32(before - begin)
            first = uint32(uint32(begin + old) - before)  # the first new row of the page
            count = uint32(min(uint32(end - begin), uint32(page_size)) - old)
            run = Run(old, first, count)
            append(pages[page, h], scales[page], new[b, h], s, h, run)

    kinds = (*arrays, table, lengths, lengths)
    return Kernel(append_e4m3, kinds, THREADS, 4 * _WARPS)


@cache
def _make_append_rows(head_dim, dtype, aligned):
    """Make ``append(T, scales, new, s, h, run)``, which appends the rows of a ``Run`` to a page.

    ``T: (page_size, d)`` is the page, and ``new: (N, d)`` are the new rows. The scale is
    ``scales[h]``. ``s`` is shared memory with a float per warp.
    """
    LANES, load = lanes(head_dim), make_chunk(dtype, aligned)
    DOWN = THREADS // LANES  # rows that the threads access together

    @device_function
    def append_rows(T, scales, new, s, h, run):
        old, first, count = run.earlier, run.first, run.rows
        rx = cuda.local.array(COLUMNS, float32)
        thread = uint32(cuda.threadIdx.x)
        row0, col = uint32(thread // uint32(LANES)), uint32(thread % uint32(LANES)) * COLUMNS
        inside = col < uint32(head_dim)

        largest = float32(0.0)
        row = row0
        while row < count:
            if inside:
                load(rx, 0, new, uint32(first + row), uint32(col))
                for e in range(COLUMNS):
                    size = maximum(rx[e], -rx[e])
                    largest = maximum(largest, size if size < INF else float32(0.0))
            row = uint32(row + DOWN)
        scale = _power_above(max_of_block(largest, s, _WARPS))

        if old > uint32(0):
            before = scales[h]
            if scale > before:
                shrink = float32(before * inverse_power(scale))
                row = row0
                while row < old:
                    if inside:
                        _shrink(T, row, uint32(col), shrink)
                    row = uint32(row + DOWN)
            scale = maximum(scale, before)
            cuda.syncthreads()  # every thread has read the old scale
        if thread == uint32(0):
            scales[h] = scale
        factor = inverse_power(scale)
        row = row0
        while row < count:
            if inside:
                load(rx, 0, new, uint32(first + row), uint32(col))
                _store(T, uint32(old + row), uint32(col), rx, factor)
            row = uint32(row + DOWN)

    return append_rows


@device_function
def _power_above(largest):
    """Return the least power of two s with largest / s <= 448, but at least 2^-100."""
    x = maximum(float32(largest * float32(1.0 / LARGEST)), SMALLEST)
    factor = inverse_power(x)
    if x * factor > ONE:
        factor *= float32(0.5)
    return inverse_power(factor)


@device_function
def _shrink(T, row, col, factor):
    """Multiply 16 e4m3 of a row by ``factor``."""
    w = read16(T, row, col)
    words = cuda.local.array(4, uint32)
    for n in range(4):
        x = unpack_e4m3(w[n])
        words[n] = pack_e4m3(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor)
    write16(T, row, col, words[0], words[1], words[2], words[3], True)


@device_function
def _store(T, row, col, rx, factor):
    """Store 16 registers, multiplied by ``factor``, as e4m3 to a row."""
    words = cuda.local.array(4, uint32)
    for n in range(4):
        e = 4 * n
        a, b = scaled(rx[e], factor), scaled(rx[e + 1], factor)
        c, d = scaled(rx[e + 2], factor), scaled(rx[e + 3], factor)
        words[n] = pack_e4m3(a, b, c, d)
    write16(T, row, col, words[0], words[1], words[2], words[3], True)
