"""Kernels that copy rows of keys, values or queries.

The kernel of ``make_append`` copies new keys and values to the pages of a cache. Row i of the new
keys and values becomes row ``kv_lens[b]`` + i of sequence b. The block table says where this row is
stored. The kernel of ``make_gather`` copies the queries of a batch to one sequence.

A thread copies 16 bytes of a row, or one element if rows do not start at 16-byte addresses.

Accesses of ``make_append``, elements per K/V head: N d loads and N d stores for N new rows of K,
and for V the same numbers with V's head dimension.
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, device_function, uint32
from fa_numba.device.signature import array_type
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.global_memory import read4, read8, write4, write8
from fa_numba.options import PLAIN

THREADS = 128


@cache
def make_append(head_dim, d_v, dtype, page_size, aligned, ragged):
    """Return the kernel that appends new keys and values to the pages of a cache.

    The grid is (``blocks``, K/V heads, batch entries), where ``blocks`` is computed for the larger
    one of the head dimensions of K and V. If ``ragged`` is true, sequence b has ``new_lens[b]`` new
    rows. Otherwise every row of the new arrays is appended.
    """
    width, most = DTYPES[dtype].chunk if aligned else 1, max(head_dim, d_v)
    pieces, copy, matrix = most // width, _copy(dtype, aligned), _matrix(dtype)
    ALL_K, ALL_V = head_dim == most, d_v == most
    lengths = array_type(1, types.int32)
    arguments = (*[matrix] * 4, array_type(2, types.int32), lengths, lengths)

    @cuda.jit(arguments, THREADS, 0)
    def append_kv(K, V, newK, newV, block_table, kv_lens, new_lens):
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        piece = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        i = uint32(piece // uint32(pieces))
        col = uint32(uint32(piece % uint32(pieces)) * width)
        rows = uint32(newK.shape[2])
        if ragged:
            rows = uint32(new_lens[b])
        if i < rows:
            at = uint32(uint32(kv_lens[b]) + i)
            page = uint32(block_table[b, uint32(at // uint32(page_size))])
            row = uint32(at % uint32(page_size))
            if ALL_K or col < uint32(head_dim):
                copy(K[page, h], row, newK[b, h], i, col)
            if ALL_V or col < uint32(d_v):
                copy(V[page, h], row, newV[b, h], i, col)

    return append_kv


@cache
def make_gather(head_dim, dtype, aligned, features=PLAIN):
    """Return the kernel that copies the rows of all batch entries into one sequence.

    The rows of one batch entry follow the rows of the previous batch entry. The copy is from X: (B,
    H, N, d) to ``rows``: (1, H, B N, d). The grid is (``blocks``, H, B). If ``features`` include
    ``q_lens``, rows past the valid length of a batch entry are not copied.

    Accesses, elements per head:  N d loads and N d stores, for N valid rows.
    """
    width = DTYPES[dtype].chunk if aligned else 1
    pieces, copy, matrix = head_dim // width, _copy(dtype, aligned), _matrix(dtype)

    q_lens = features.q_lens

    @cuda.jit((matrix, matrix, features.argument_type), THREADS, 0)
    def gather_rows(X, rows, options):
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        piece = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        i, N = uint32(piece // uint32(pieces)), uint32(X.shape[2])
        col = uint32(uint32(piece % uint32(pieces)) * width)
        Nq = N
        if q_lens:
            Nq = uint32(options.q_lens[b])
        if i < Nq:
            copy(rows[0, h], uint32(b * N + i), X[b, h], i, col)

    return gather_rows


def _matrix(dtype):
    """Return the Numba type of a 4-D array of this dtype. Elements of 16-bit dtypes are uint16."""
    return array_type(4, types.uint16 if DTYPES[dtype].bytes == 2 else types.float32)


@cache
def _copy(dtype, aligned):
    """Make ``copy(to, row, source, i, col)``, which copies 16 bytes of a row.

    The bytes are copied from row i of ``source`` to row ``row`` of ``to``, and begin at column
    ``col`` in both rows. If ``aligned`` is false, the function copies only one element.
    """
    halves = DTYPES[dtype].bytes == 2

    @device_function
    def copy(to, row, source, i, col):
        if not aligned:
            to[row, col] = source[i, col]
        elif halves:
            w = read8(source, i, col)
            write8(to, row, col, w[0], w[1], w[2], w[3], True)
        else:
            x = read4(source, i, col)
            write4(to, row, col, x[0], x[1], x[2], x[3])

    return copy


def blocks(rows, head_dim, dtype, aligned):
    """Return the number of thread blocks that copy ``rows`` rows of a head."""
    width = DTYPES[dtype].chunk if aligned else 1
    return -(-rows * (head_dim // width) // THREADS)
