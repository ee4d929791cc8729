"""The batch entry, heads and rows that a thread block computes, from its number in the grid.

The module also finds the rows of one sequence and head in an array. The factories take a ``spec``.
It can be any record with the field ``features``. The factories of ``head`` and ``heads_of_group``
also need the field ``grouped``, which says whether several query heads share a K/V head. A few
factories need the fields ``tile_heads`` or ``head_rows``.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head


@part
def make_row_tile(spec):
    """Make ``row_tile(options)``, which returns the row tile and the key split of this block in
    FA-2's forward pass.

    The result is the first row of the row tile, and the number of the key split (0 without key
    splits). The first blocks of the grid have the last row tiles. With a causal mask, the last row
    tiles have the most columns. The blocks that start last therefore have the least work.
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
    """Make ``rows_of_split(X, split, head)``, which returns the part of X for one key split, one
    sequence and one head.

    ``X`` is an array of all splits in the workspace: A (the unnormalised O), l (the softmax sums)
    or m (the maxima). If several query heads share a tile, ``head.h`` is the number of a group of
    heads. The result then contains the rows of all heads in the group, one row of each head in
    turn.
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
    """Make ``query_rows(A, head)``, which returns the rows of one head and one sequence in the
    array ``A``.

    ``A`` is any array with one row per query: Q, O, dO, L, D or a gradient.
    """
    packed = spec.features.packed

    def query_rows(A, head):
        if packed:
            b, starts = head.b, head.options.q_starts
            return A[0, head.h][starts[b] : starts[b + 1]]
        return A[head.b, head.h]

    return query_rows


@part
def make_key_rows(spec):
    """Make ``key_rows(A, head)``, which returns the rows of one K/V head and one sequence in the
    array ``A``.

    ``A`` is K, V, dK or dV, and the K/V head is ``head.hk``. If K and V are stored in pages, the
    result is a tuple instead: the array of all pages, the number of the K/V head, and the row of
    the block table for the sequence. For pages of e4m3, ``A`` must be K. A fourth element of the
    tuple then contains the scales of the head's pages.
    """
    packed, paged = spec.features.packed, spec.features.page_size > 0
    scaled = spec.features.page_scales

    def key_rows(A, head):
        b = head.b
        if scaled:
            return A, head.hk, head.options.block_table[b], head.options.k_scale[head.hk]
        if paged:
            return A, head.hk, head.options.block_table[b]
        if packed:
            starts = head.options.k_starts
            return A[0, head.hk][starts[b] : starts[b + 1]]
        return A[b, head.hk]

    return key_rows


@cache
def make_rows_of_values(spec):
    """Make ``rows_of_values(V, head)``, which returns the rows of one K/V head and one sequence in
    the array ``V``.

    ``key_rows`` explains the result.
    """
    return _scaled_rows_of_values(spec) if spec.features.page_scales else make_key_rows(spec)


@part
def _scaled_rows_of_values(spec):
    """Make the function that ``make_rows_of_values`` describes, for pages of e4m3."""

    def rows_of_values(V, head):
        return V, head.hk, head.options.block_table[head.b], head.options.v_scale[head.hk]

    return rows_of_values


@part
def make_query_end(spec):
    """Make ``query_end(head)``, which returns where the sequence of ``head`` ends in arrays of
    queries: the number of its last valid row, plus 1.

    Normally each sequence begins at row 0 of its own rows, and the result is ``head.Nq``. Packed
    sequences are stored one after the other in the same rows. The result is then the row at which
    the next sequence begins.
    """
    packed = spec.features.packed

    def query_end(head):
        if packed:
            return uint32(head.options.q_starts[head.b + 1])
        return head.Nq

    return query_end


@part
def make_key_end(spec):
    """Make ``key_end(head)``, which returns where the sequence of ``head`` ends in arrays of keys:
    the number of its last valid row, plus 1.

    Normally each sequence begins at row 0 of its own rows, and the result is ``head.Nk``. Packed
    sequences are stored one after the other in the same rows. The result is then the row at which
    the next sequence begins.
    """
    packed = spec.features.packed and not spec.features.page_size

    def key_end(head):
        if packed:
            return uint32(head.options.k_starts[head.b + 1])
        return head.Nk

    return key_end


@part
def make_lengths(spec):
    """Make ``lengths(rows, columns, b, options)``, which returns the valid lengths Nq and Nk of
    batch entry b.

    ``rows`` and ``columns`` are the numbers of rows of the arrays Q and K. Normally these numbers
    are the result. Lengths in the call (``q_lens``, ``kv_lens``) or packed sequences replace them.
    A call with pages always has ``kv_lens``, because K then has only the rows of one page.
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
    """Make ``head(Q, K, group, options)``, which returns the ``Head`` record of this thread block.

    In the grid, y is the number of the query head, and z is the batch entry. ``group`` is the
    number of query heads per K/V head, and query head h has the K/V head h // group. If
    ``spec.grouped`` is false, the K/V head is h. The kernel then needs no registers for a division.
    If several query heads share a tile, y is the number of a group of ``spec.tile_heads`` query
    heads.
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
    """Make ``query_head(rows, columns, options)``, which returns the ``Head`` record of this thread
    block, for kernels that read neither K nor V.

    In the grid, y is the number of the query head, and z is the batch entry. The field ``hk`` of
    the result is the query head, not the K/V head. ``rows`` and ``columns`` are the arguments of
    ``lengths``.
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
    """Make ``heads_of_group(Q, K, group, options)``, which returns the query heads of a block's K/V
    head.

    In the grid, y is the number of the K/V head, and z is the batch entry. ``group`` is the number
    of query heads per K/V head. The result is the ``Head`` of the first query head, and the number
    of query heads. If ``spec.grouped`` is false, the number is 1 at compile time, so that the
    compiler removes the loop over heads.
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
    """Return the ``Head`` of the query head that comes g heads after ``head`` in the same group."""
    return Head(head.b, uint32(head.h + g), head.hk, head.Nq, head.Nk, head.options)


@device_function
def member(first, h):
    """Return the ``Head`` of query head h, in the group whose first query head is ``first``."""
    return Head(first.b, h, first.hk, first.Nq, first.Nk, first.options)
