"""Rows copied: new keys and values to the pages of a cache, where a block table has their rows;
queries of a batch one after the other.

A thread takes one piece of a row, 16 bytes of K and of V, or one element where rows do not start at
16-byte addresses. Row i of what is new becomes row ``kv_lens[b]`` + i of sequence b.

Accesses, elements: loads and stores of every new row, N d a K/V head each, of K and of V, d of
either its own.
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
    """The kernel; launched over (``blocks`` of the larger dimension, Hk, B). With ``ragged``
    sequence b has ``new_lens[b]`` new rows, else all that the arrays have.
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
    """The kernel for the rows of all batch entries as those of one, entry behind entry: X (B, H, N,
    d) to ``rows`` (1, H, B N, d); launched over (``blocks``, H, B). With ``q_lens`` among the
    ``features`` it leaves out rows that an entry does not have.

    Accesses, elements per head:  loads N d, stores N d, of valid rows.
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
    return array_type(4, types.uint16 if DTYPES[dtype].bytes == 2 else types.float32)


@cache
def _copy(dtype, aligned):
    """``copy(to, row, source, i, col)``: 16 bytes of a row, or an element."""
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
    """Thread blocks for so many rows of a head."""
    width = DTYPES[dtype].chunk if aligned else 1
    return -(-rows * (head_dim // width) // THREADS)
