"""Kernels that quantise a float array to e4m3, with float32 scales.

A number x is stored as e4m3(x / scale). The scale maps the largest number of its rows to 448, the
largest number of the format:

    scale = max |x| / 448, or 1 if max |x| is below 2^-100

Infinity and NaN are ignored for the scale, and stored as NaN.

``make_quantize_blocks`` returns the kernel with one scale for each 128 rows. It reads X once, keeps
its rows in registers, and stores them. The kernels with one scale for a head, or for the array, are
three launches: the largest number of each 128 rows, then the scales, then the stored numbers.

If X is rotated, each row x is first multiplied by an orthogonal matrix: (x o s) H / sqrt(d). H is
the Hadamard matrix of Sylvester (entry (i, j) is -1 if i & j has an odd number of bits, else 1),
and the signs s depend on the seed. The product takes d log2(d) additions by the fast Walsh-Hadamard
transform. The same rotation of Q and K leaves Q K^T as it is, and spreads outliers over all
columns of a row.

    grid                     ceil(N / 128) thread blocks per head
    thread                   16 columns of 2 rows, in 32 registers
    shared memory            4 bytes per warp

Accesses, elements per head:
    blocks          X: N d loads    Y: N d stores    one store for each 128 rows
    head, tensor    X: 2 N d loads  Y: N d stores
"""

import math
from functools import cache
from typing import Any

from numba import types

from fa_numba.device import Kernel, cuda, device_function, float32, uint32, uint64
from fa_numba.device.signature import array_type
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div, power_of_two
from fa_numba.intrinsics.arithmetic import ONE, maximum
from fa_numba.intrinsics.float8 import LARGEST, pack_e4m3
from fa_numba.intrinsics.global_memory import read4, read8, write16
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.masks import make_philox
from fa_numba.parts.lanes import FULL_WARP, max_of_lanes

ROWS = 128  # rows of X in a thread block
COLUMNS = 16  # columns of a thread, which are 16 bytes of Y
_EACH = 2  # rows of a thread; on an H200, 2 took less time than 4
_APART = ROWS // _EACH  # the rows of a thread are this number of rows apart
_SIZE = _EACH * COLUMNS
_WORDS = _SIZE // 4
_REDUCING = 256  # threads of the kernel that computes the scales
INF, NAN = float32(math.inf), float32(math.nan)
SMALLEST = float32(2.0**-100)  # of max |x|, below which the scale is 1
_philox = device_function(make_philox(uint32, uint64))


def threads(head_dim):
    """Return the number of threads of a block for rows of ``head_dim`` elements."""
    return _APART * lanes(head_dim)


def lanes(head_dim):
    """Return the number of threads that hold one row, a power of two."""
    return power_of_two(ceil_div(head_dim, COLUMNS))


@device_function
def scale_of(largest):
    """Return the scale of rows whose largest absolute number is ``largest``."""
    scale = ONE
    if largest >= SMALLEST:
        scale = float32(largest * float32(1.0 / LARGEST))
    return scale


@device_function
def scaled(x, factor):
    """Return x * factor, or NaN if x is infinite, because e4m3 has no infinity."""
    y = float32(x * factor)
    return y if maximum(y, -y) < INF else NAN


@cache
def make_quantize_blocks(head_dim, dtype, aligned, rotated):
    """Return the kernel that quantises X to Y with one scale for each 128 rows.

    X: (B, H, N, d) has the given ``dtype``, Y: (B, H, N, d) is uint8, and ``scales`` is (B, H,
    ceil(N / 128)). ``aligned`` says whether rows of X start at 16-byte addresses. If ``rotated`` is
    true, rows are rotated with the signs of the seed. The grid is (ceil(N / 128), H, B).
    """
    load, WARPS = _make_load(head_dim, dtype, aligned, rotated), threads(head_dim) // 32
    LANES = lanes(head_dim)

    def quantize_blocks(X, Y, scales, seed_low, seed_high):
        s = shared_tile(0, WARPS)
        rx = cuda.local.array(_SIZE, float32)
        b, h, block = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        load(rx, X[b, h], block, seed_low, seed_high)
        scale = scale_of(max_of_block(_largest(rx), s, WARPS))
        if cuda.threadIdx.x == 0:
            scales[b, h, block] = scale
        _store(rx, Y[b, h], block, scale, head_dim, LANES)

    arrays = float_matrix(dtype), array_type(4, types.uint8), array_type(3)
    return _kernel(quantize_blocks, arrays, head_dim)


@cache
def make_largest(head_dim, dtype, aligned, rotated):
    """Return the kernel that finds the largest absolute number of each 128 rows of X.

    ``most`` is float32, (B, H, ceil(N / 128)). The other arguments and the grid are those of
    ``make_quantize_blocks``.
    """
    load, WARPS = _make_load(head_dim, dtype, aligned, rotated), threads(head_dim) // 32

    def largest_of_blocks(X, most, seed_low, seed_high):
        s = shared_tile(0, WARPS)
        rx = cuda.local.array(_SIZE, float32)
        b, h, block = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        load(rx, X[b, h], block, seed_low, seed_high)
        largest = max_of_block(_largest(rx), s, WARPS)
        if cuda.threadIdx.x == 0:
            most[b, h, block] = largest

    return _kernel(largest_of_blocks, (float_matrix(dtype), array_type(3)), head_dim)


@cache
def make_scales(together):
    """Return the kernel that computes the scales (B, H) from ``most``: (B, H, blocks).

    The grid is (H, B), and thread block (h, b) computes the scale of a head. If ``together`` is
    true, all heads have one scale. The grid is then (1, 1), and the thread block stores the scale
    of all heads.
    """
    WARPS = _REDUCING // 32

    def scales_of_heads(most, scales):
        s = shared_tile(0, WARPS)
        thread = uint32(cuda.threadIdx.x)
        b, h = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        heads, blocks = uint32(most.shape[1]), uint32(most.shape[2])
        largest = float32(0.0)
        if together:
            at = thread
            while at < uint32(uint32(most.shape[0]) * heads * blocks):
                row = uint32(at // blocks)
                x = most[uint32(row // heads), uint32(row % heads), uint32(at % blocks)]
                largest = maximum(largest, x)
                at = uint32(at + _REDUCING)
        else:
            at = thread
            while at < blocks:
                largest = maximum(largest, most[b, h, at])
                at = uint32(at + _REDUCING)
        scale = scale_of(max_of_block(largest, s, WARPS))
        if together:
            at = thread
            while at < uint32(uint32(scales.shape[0]) * heads):
                scales[uint32(at // heads), uint32(at % heads)] = scale
                at = uint32(at + _REDUCING)
        elif thread == uint32(0):
            scales[b, h] = scale

    return Kernel(scales_of_heads, (array_type(3), array_type(2)), _REDUCING, 4 * WARPS)


@cache
def make_quantize_heads(head_dim, dtype, aligned, rotated):
    """Return the kernel that quantises X to Y with the given scales, (B, H).

    The other arguments and the grid are those of ``make_quantize_blocks``.
    """
    load, LANES = _make_load(head_dim, dtype, aligned, rotated), lanes(head_dim)

    def quantize_heads(X, Y, scales, seed_low, seed_high):
        rx = cuda.local.array(_SIZE, float32)
        b, h, block = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        load(rx, X[b, h], block, seed_low, seed_high)
        _store(rx, Y[b, h], block, scales[b, h], head_dim, LANES)

    arrays = float_matrix(dtype), array_type(4, types.uint8), array_type(2)
    return _kernel(quantize_heads, arrays, head_dim)


def _kernel(function, arrays, head_dim):
    """Return the ``Kernel`` of a function that takes these arrays and a seed in two words."""
    kinds = (*arrays, types.int32, types.int32)
    return Kernel(function, kinds, threads(head_dim), threads(head_dim) // 8)


def float_matrix(dtype):
    """Return the Numba type of X. Elements of 16-bit dtypes are uint16."""
    return array_type(4, types.uint16 if DTYPES[dtype].bytes == 2 else types.float32)


@cache
def _make_load(head_dim, dtype, aligned, rotated):
    """Make ``load(rx, X, block, seed_low, seed_high)``, which loads rows of a matrix X: (N, d).

    The registers ``rx`` get 16 columns of 2 rows of the 128 rows of ``block``, rotated if
    ``rotated`` is true. Elements past the end of X are 0.
    """
    LANES, load = lanes(head_dim), make_chunk(dtype, aligned)

    @device_function
    def load_rows(rx, X, block, seed_low, seed_high):
        thread, N = uint32(cuda.threadIdx.x), uint32(X.shape[0])
        lane = uint32(thread % uint32(LANES))
        row0 = uint32(block * uint32(ROWS) + thread // uint32(LANES))
        col = uint32(lane * uint32(COLUMNS))
        for e in range(_SIZE):
            rx[e] = float32(0.0)
        for r in range(_EACH):
            row = uint32(row0 + r * _APART)
            if row < N and col < uint32(head_dim):
                load(rx, r * COLUMNS, X, row, col)
        if rotated:
            place = uint32(col // uint32(32))
            word = _philox(
                place, uint32(0), uint32(0), uint32(0), uint32(seed_low), uint32(seed_high)
            )[0]
            signs = uint32(word >> uint32(col % uint32(32)))
            for e in range(COLUMNS):
                if signs >> uint32(e) & uint32(1):
                    for r in range(_EACH):
                        rx[r * COLUMNS + e] = -rx[r * COLUMNS + e]
            _add_pairs(rx, 1)
            _add_pairs(rx, 2)
            _add_pairs(rx, 4)
            _add_pairs(rx, 8)
            across = 1
            while across < LANES:
                minus = lane & uint32(across)
                for e in range(_SIZE):
                    other = cuda.shfl_xor_sync(FULL_WARP, rx[e], across)
                    rx[e] = other - rx[e] if minus else rx[e] + other
                across *= 2
            for e in range(_SIZE):
                rx[e] *= float32(1.0 / math.sqrt(head_dim))

    return load_rows


@device_function
def _add_pairs(rx, step):
    """Replace columns i and i + ``step`` of each row by their sum and their difference."""
    for n in range(_SIZE // 2):
        i = n // step * (2 * step) + n % step
        x, y = rx[i], rx[i + step]
        rx[i], rx[i + step] = x + y, x - y


@cache
def make_chunk(dtype, aligned):
    """Make ``load(rx, e, X, row, col)``, which loads 16 elements of a row to rx from ``e`` on."""
    halves = DTYPES[dtype].bytes == 2
    unpack: Any = CONVERSIONS[DTYPES[dtype].matrix][1] if halves else None

    @device_function
    def load_chunk(rx, e, X, row, col):
        if not aligned:
            for n in range(COLUMNS):
                if halves:
                    rx[e + n] = unpack(uint32(X[row, col + n]))[0]
                else:
                    rx[e + n] = X[row, col + n]
        elif halves:
            for half in range(2):
                words = read8(X, row, uint32(col + 8 * half))
                for n in range(4):
                    low, high = unpack(words[n])
                    rx[e + 8 * half + 2 * n] = low
                    rx[e + 8 * half + 2 * n + 1] = high
        else:
            for part in range(4):
                x = read4(X, row, uint32(col + 4 * part))
                for n in range(4):
                    rx[e + 4 * part + n] = x[n]

    return load_chunk


@device_function
def _largest(rx):
    """Return the largest absolute value of the registers. Infinity and NaN are ignored."""
    largest = float32(0.0)
    for e in range(_SIZE):
        size = maximum(rx[e], -rx[e])
        largest = maximum(largest, size if size < INF else float32(0.0))
    return largest


@device_function
def max_of_block(x, s, warps):
    """Return the largest x of all threads of the block, through the shared array ``s``.

    Every thread gets the result. The function contains a ``syncthreads``.
    """
    thread = uint32(cuda.threadIdx.x)
    x = max_of_lanes(x, 32, 1)
    if thread % uint32(32) == uint32(0):
        s[thread // uint32(32)] = x
    cuda.syncthreads()
    for w in range(warps):
        x = maximum(x, s[w])
    return x


@device_function
def _store(rx, Y, block, scale, head_dim, row_lanes):
    """Store the registers, divided by ``scale``, to the rows of ``block`` of Y: (N, d)."""
    thread, N = uint32(cuda.threadIdx.x), uint32(Y.shape[0])
    row0 = uint32(block * uint32(ROWS) + thread // uint32(row_lanes))
    col = uint32(thread % uint32(row_lanes) * uint32(COLUMNS))
    factor = float32(ONE / scale)
    words = cuda.local.array(_WORDS, uint32)
    for n in range(_WORDS):
        e = 4 * n
        a, b = scaled(rx[e], factor), scaled(rx[e + 1], factor)
        c, d = scaled(rx[e + 2], factor), scaled(rx[e + 3], factor)
        words[n] = pack_e4m3(a, b, c, d)
    for r in range(_EACH):
        row, w = uint32(row0 + r * _APART), 4 * r
        writes = row < N and col < uint32(head_dim)
        write16(Y, row, col, words[w], words[w + 1], words[w + 2], words[w + 3], writes)
