"""Whose rows and columns a block works on: batch entry and heads, and a sequence's rows in an
array.

``spec`` is any record with ``features`` and, for ``heads`` and ``query_heads``, ``grouped``.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32


@cache
def make_query_rows(spec):
    """``query_rows(A, b, h, options)``: of Q, O, L ... the rows of one sequence and head."""
    packed = spec.features.packed

    @device_function
    def query_rows(A, b, h, options):
        if packed:
            return A[0, h][options.q_starts[b] : options.q_starts[b + 1]]
        return A[b, h]

    return query_rows


@cache
def make_key_rows(spec):
    """``key_rows(A, b, h, options)``: the same of K, V, dK and dV. Of pages: all of them, the head,
    and the numbers of those that the sequence has.
    """
    packed, paged = spec.features.packed, spec.features.page_size > 0

    @device_function
    def key_rows(A, b, h, options):
        if paged:
            return A, h, options.block_table[b]
        if packed:
            return A[0, h][options.k_starts[b] : options.k_starts[b + 1]]
        return A[b, h]

    return key_rows


@cache
def make_query_end(spec):
    """``query_end(b, Nq, options)``: where the Nq rows of a sequence end in an array of queries."""
    packed = spec.features.packed

    @device_function
    def query_end(b, Nq, options):
        if packed:
            return uint32(options.q_starts[b + 1])
        return Nq

    return query_end


@cache
def make_key_end(spec):
    """``key_end(b, Nk, options)``: the same of keys."""
    packed = spec.features.packed and not spec.features.page_size

    @device_function
    def key_end(b, Nk, options):
        if packed:
            return uint32(options.k_starts[b + 1])
        return Nk

    return key_end


@cache
def make_heads(spec):
    """``heads(group)``: batch entry, query head and K/V head of a block of a (.., Hq, B) grid.

    The K/V head is h // group. Without groups it is h itself: a quotient would take registers of
    every thread.
    """
    grouped = spec.grouped

    @device_function
    def heads(group):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        hk = h // uint32(group) if grouped else h
        return b, h, hk

    return heads


@cache
def make_key_head(spec):
    """``key_head()``: batch entry and K/V head of a block of a (.., Hk, B) grid."""

    @device_function
    def key_head():
        return uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)

    return key_head


@cache
def make_query_heads(spec):
    """``query_heads(hk, group)``: the first query head of K/V head hk, and how many there are.

    Without groups that is one, known when the kernel is compiled: no loop over heads is left.
    """
    grouped = spec.grouped

    @device_function
    def query_heads(hk, group):
        if grouped:
            return uint32(hk * group), uint32(group)
        return hk, uint32(1)

    return query_heads


@cache
def make_lengths(spec):
    """``lengths(rows, columns, b, options)``: Nq and Nk, of rows and columns the valid ones."""
    features = spec.features
    packed, q_lens, kv_lens = features.packed, features.q_lens, features.kv_lens
    packed_keys = packed and not features.page_size

    @device_function
    def lengths(rows, columns, b, options):
        Nq = uint32(rows)
        Nk = uint32(columns)
        if packed:
            Nq = uint32(options.q_starts[b + 1] - options.q_starts[b])
        if packed_keys:
            Nk = uint32(options.k_starts[b + 1] - options.k_starts[b])
        if q_lens:
            Nq = uint32(options.q_lens[b])
        if kv_lens:
            Nk = uint32(options.kv_lens[b])
        return Nq, Nk

    return lengths
