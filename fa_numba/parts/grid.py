"""Whose rows and columns a block works on: batch entry and heads, and a sequence's rows in an
array.

``spec`` is any record with ``features`` and, for ``heads`` and ``query_heads``, ``grouped``.
"""

from fa_numba.device import cuda, device_function, uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head


@part
def make_row_tile(spec):
    """``row_tile(options)``: the first row of this block's row tile, and which share of the columns
    it takes. The tiles with most columns go first: a shorter tail.
    """
    ROWS, splits = spec.head_rows, spec.features.splits

    def row_tile(options):
        if splits:
            shares = uint32(options.kv_splits)
            n = uint32(cuda.gridDim.x - 1 - cuda.blockIdx.x)
            return uint32(n // shares * ROWS), uint32(n % shares)
        return uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * ROWS), uint32(0)

    return row_tile


@part
def make_rows_of_split(spec):
    """``rows_of_split(X, split, head)``: of A, l or m the rows that a split of one sequence and
    head has written. Where heads share a tile h counts groups of them, whose rows alternate.
    """
    packed, heads = spec.features.packed, spec.tile_heads

    def rows_of_split(X, split, head):
        if packed:
            first, end = head.options.q_starts[head.b], head.options.q_starts[head.b + 1]
            return X[split, 0, head.h][first * heads : end * heads]
        return X[split, head.b, head.h]

    return rows_of_split


@part
def make_query_rows(spec):
    """``query_rows(A, head)``: the rows of a head in an array of queries: Q, O, dO, L, D, ..."""
    packed = spec.features.packed

    def query_rows(A, head):
        if packed:
            b, starts = head.b, head.options.q_starts
            return A[0, head.h][starts[b] : starts[b + 1]]
        return A[head.b, head.h]

    return query_rows


@part
def make_key_rows(spec):
    """``key_rows(A, head)``: the rows of its K/V head in K, V, dK or dV. Of pages: all of them, the
    head, and the numbers of those that the sequence has.
    """
    packed, paged = spec.features.packed, spec.features.page_size > 0

    def key_rows(A, head):
        b = head.b
        if paged:
            return A, head.hk, head.options.block_table[b]
        if packed:
            starts = head.options.k_starts
            return A[0, head.hk][starts[b] : starts[b + 1]]
        return A[b, head.hk]

    return key_rows


@part
def make_query_end(spec):
    """``query_end(head)``: where the rows of a sequence end in an array of queries."""
    packed = spec.features.packed

    def query_end(head):
        if packed:
            return uint32(head.options.q_starts[head.b + 1])
        return head.Nq

    return query_end


@part
def make_key_end(spec):
    """``key_end(head)``: where the rows of a sequence end in an array of keys."""
    packed = spec.features.packed and not spec.features.page_size

    def key_end(head):
        if packed:
            return uint32(head.options.k_starts[head.b + 1])
        return head.Nk

    return key_end


@part
def make_lengths(spec):
    """``lengths(rows, columns, b, options)``: Nq and Nk of batch entry b, of arrays with so many
    rows of Q and of K: the valid ones.
    """
    features = spec.features
    packed, q_lens, kv_lens = features.packed, features.q_lens, features.kv_lens
    packed_keys = packed and not features.page_size

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


@part
def make_head(spec):
    """``head(Q, K, group, options)``: the head of a block of a (.., Hq, B) grid.

    The K/V head is h // group. Without groups it is h itself: a quotient would take registers of
    every thread. Where query heads of a K/V head share a tile, h counts such groups of them.
    """
    grouped, lengths, of_tile = spec.grouped, make_lengths(spec), spec.tile_heads

    def head(Q, K, group, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        hk = h
        if grouped and of_tile > 1:
            hk = uint32(uint32(h * of_tile) // uint32(group))
        elif grouped:
            hk = h // uint32(group)
        Nq, Nk = lengths(Q.shape[2], K.shape[2], b, options)
        return Head(b, h, hk, Nq, Nk, options)

    return head


@part
def make_query_head(spec):
    """``query_head(rows, columns, options)``: the query head of a block of a (.., Hq, B) grid,
    where no K/V head is asked for.
    """
    lengths = make_lengths(spec)

    def query_head(rows, columns, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        Nq, Nk = lengths(rows, columns, b, options)
        return Head(b, h, h, Nq, Nk, options)

    return query_head


@part
def make_heads_of_group(spec):
    """``heads_of_group(Q, K, group, options)``: the first query head of the K/V head of a block of
    a (.., Hk, B) grid, and how many there are.

    Without groups there is one, known when the kernel is compiled: no loop over heads is left.
    """
    grouped, lengths = spec.grouped, make_lengths(spec)

    def heads_of_group(Q, K, group, options):
        b, hk = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        h, heads = hk, uint32(1)
        if grouped:
            h, heads = uint32(hk * group), uint32(group)
        Nq, Nk = lengths(Q.shape[2], K.shape[2], b, options)
        return Head(b, h, hk, Nq, Nk, options), heads

    return heads_of_group


@device_function
def head_after(head, g):
    """The query head that comes g after another of its group."""
    return Head(head.b, uint32(head.h + g), head.hk, head.Nq, head.Nk, head.options)


@device_function
def member(first, h):
    """Query head h of the same K/V head."""
    return Head(first.b, h, first.hk, first.Nq, first.Nk, first.options)
