"""Which rows and columns a block works on: a head's sequences, and the tiles to visit."""

from functools import cache

from fa_numba.device import device_function, int32, uint32


@cache
def make_query_rows(features):
    """``query_rows(A, b, h, options)``: of Q, O, L ... the rows of one sequence and head."""
    packed = features.packed

    @device_function
    def query_rows(A, b, h, options):
        if packed:
            return A[0, h][options.q_starts[b] : options.q_starts[b + 1]]
        return A[b, h]

    return query_rows


@cache
def make_key_rows(features):
    """``key_rows(A, b, h, options)``: the same of K, V, dK and dV."""
    packed = features.packed

    @device_function
    def key_rows(A, b, h, options):
        if packed:
            return A[0, h][options.k_starts[b] : options.k_starts[b + 1]]
        return A[b, h]

    return key_rows


@cache
def make_key_head(spec):
    """``key_head(h, group)``: the K/V head of query head h, h // group.

    Without groups it is h itself: a quotient would take registers of every thread.
    """
    grouped = spec.grouped

    @device_function
    def key_head(h, group):
        return h // uint32(group) if grouped else h

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
def make_lengths(features):
    """``lengths(rows, columns, b, options)``: Nq and Nk, of rows and columns the valid ones."""
    packed, q_lens, kv_lens = features.packed, features.q_lens, features.kv_lens

    @device_function
    def lengths(rows, columns, b, options):
        Nq = uint32(rows)
        Nk = uint32(columns)
        if packed:
            Nq = uint32(options.q_starts[b + 1] - options.q_starts[b])
            Nk = uint32(options.k_starts[b + 1] - options.k_starts[b])
        if q_lens:
            Nq = uint32(options.q_lens[b])
        if kv_lens:
            Nk = uint32(options.kv_lens[b])
        return Nq, Nk

    return lengths


@cache
def make_column_range(spec):
    """``column_range(row0, rows_end, Nq, Nk, options)``: the columns that some of these rows see.

    Gives the first column of the first tile and one past the last column.
    """
    Bc, features = spec.Bc, spec.features
    causal, window = features.causal, features.window
    short = features.q_lens or features.packed

    @device_function
    def column_range(row0, rows_end, Nq, Nk, options):
        diagonal = int32(int32(Nk) - int32(Nq))
        j_first = uint32(0)
        j_end = Nk
        if causal:
            j_end = uint32(min(int32(Nk), max(int32(0), int32(rows_end + diagonal))))
        if window:
            last = int32(rows_end + diagonal + options.window_right)
            j_end = uint32(min(int32(Nk), max(int32(0), last)))
            first = int32(row0 + diagonal - options.window_left)
            j_first = uint32(max(int32(0), first) // int32(Bc) * int32(Bc))
        if short and row0 >= Nq:
            j_end = uint32(0)
        return j_first, j_end

    return column_range


@cache
def make_row_range(spec, first_pass_takes_all=False):
    """``row_range(col0, rows_begin, rows_end, Nq, Nk, options)``: the rows that see a column tile.

    Gives the first row of the first tile and one past the last row. With ``first_pass_takes_all``
    the tile at column 0 takes all rows.
    """
    Br, Bc, features = spec.Br, spec.Bc, spec.features
    causal, window, lengths = features.causal, features.window, features.lengths
    takes_all = first_pass_takes_all

    @device_function
    def row_range(col0, rows_begin, rows_end, Nq, Nk, options):
        diagonal = int32(int32(Nk) - int32(Nq))
        i_first = rows_begin
        i_end = rows_end
        if not takes_all or col0 > uint32(0):
            if causal:
                hidden = max(int32(0), int32(col0) - diagonal - int32(rows_begin))
                i_first = uint32(rows_begin + hidden // int32(Br) * Br)
            if window:
                hidden = int32(int32(col0) - diagonal - options.window_right - int32(rows_begin))
                i_first = uint32(rows_begin + max(int32(0), hidden) // int32(Br) * Br)
                last = int32(int32(col0) + Bc - diagonal + options.window_left)
                i_end = uint32(min(int32(i_end), max(int32(0), last)))
            if lengths and col0 >= Nk:
                i_end = uint32(0)
        return i_first, i_end

    return row_range


@cache
def make_next_column(spec):
    """``next_column(j0, j_end, i0, b, h, options)``: from column j0 on, a tile not masked out."""
    Br, Bc, sparse = spec.Br, spec.Bc, spec.features.sparse

    @device_function
    def next_column(j0, j_end, i0, b, h, options):
        if sparse:
            i = i0 // uint32(Br)
            while j0 < j_end and options.block_mask[b, h, i, j0 // uint32(Bc)] == 0:
                j0 = uint32(j0 + Bc)
        return j0

    return next_column


@cache
def make_next_row(spec):
    """``next_row(i0, i_end, j0, b, h, options)``: the same down the rows of column tile j0."""
    Br, Bc, sparse = spec.Br, spec.Bc, spec.features.sparse

    @device_function
    def next_row(i0, i_end, j0, b, h, options):
        if sparse:
            j = j0 // uint32(Bc)
            while i0 < i_end and options.block_mask[b, h, i0 // uint32(Br), j] == 0:
                i0 = uint32(i0 + Br)
        return i0

    return next_row
