"""Which tiles of S a block visits: ranges by mask and window, less what a block mask hides."""

from functools import cache

from fa_numba.device import cuda, device_function, int32, uint32


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
def make_column_passes(spec):
    """``column_passes(row0, rows_end, Nq, Nk, options)``: ``column_range`` of FA-1's outer loop.

    The first pass takes place even where no column is seen, if it is the one that initialises O.
    """
    column_range, always = make_column_range(spec), not spec.features.initialises

    @device_function
    def column_passes(row0, rows_end, Nq, Nk, options):
        j_first, j_end = column_range(row0, rows_end, Nq, Nk, options)
        if always:
            j_end = uint32(max(j_end, uint32(1)))
        return j_first, j_end

    return column_passes


@cache
def make_passes(spec):
    """``passes(columns)``: one past the last column that FA-1's backward pass goes to.

    Of packed sequences one may be empty: the first pass still takes place, for dQ = 0.
    """
    packed = spec.features.packed

    @device_function
    def passes(columns):
        if packed:
            return uint32(max(columns, uint32(1)))
        return columns

    return passes


@cache
def make_split(spec):
    """``split(split_rows, rows)``: the first row of this block, and one past the last. All rows of
    the head, unless the queries are split.

    The blocks with most columns go first: a shorter tail.
    """

    @device_function
    def split(split_rows, rows):
        i_first = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * split_rows)
        i_last = uint32(min(rows, uint32(i_first + split_rows)))
        return i_first, i_last

    return split


@cache
def make_row_range(spec):
    """``row_range(col0, rows_begin, rows_end, Nq, Nk, options)``: the rows that see a column tile.

    Gives the first row of the first tile and one past the last row.
    """
    return _make_row_range(spec, takes_all=False)


@cache
def make_rows_of_pass(spec):
    """``rows_of_pass``: ``row_range`` of FA-1's inner loop, whose pass over the tile at column 0
    takes all rows where no step before it has initialised O, or dQ.
    """
    return _make_row_range(spec, takes_all=not spec.features.initialises)


def _make_row_range(spec, takes_all):
    """The same; with ``takes_all`` the tile at column 0 takes all rows."""
    Br, Bc, features = spec.Br, spec.Bc, spec.features
    causal, window, lengths = features.causal, features.window, features.lengths

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


@cache
def make_visited_columns(spec):
    """``visited_columns(i0, Nq, Nk, b, h, options)``: of the row tile at i0 the first column tile
    that it visits, and one past the last column.
    """
    ROWS, column_range = spec.head_rows, make_column_range(spec)
    next_column = make_next_column(spec)

    @device_function
    def visited_columns(i0, Nq, Nk, b, h, options):
        j0, j_end = column_range(i0, uint32(i0 + ROWS), Nq, Nk, options)
        return next_column(j0, j_end, i0, b, h, options), j_end

    return visited_columns


@cache
def make_visited_rows(spec):
    """``visited_rows(j0, rows_begin, rows_end, Nq, Nk, b, h, options)``: the same of a pass of FA-1
    over the column tile at j0: the first row tile, and one past the last row.
    """
    rows_of_pass, next_row = make_rows_of_pass(spec), make_next_row(spec)

    @device_function
    def visited_rows(j0, rows_begin, rows_end, Nq, Nk, b, h, options):
        i0, i_end = rows_of_pass(j0, rows_begin, rows_end, Nq, Nk, options)
        return next_row(i0, i_end, j0, b, h, options), i_end

    return visited_rows


@cache
def make_sees_more(spec):
    """``sees_more(i0, j0, Nq, Nk, b, h, options)``: whether the row tile at i0 visits a column tile
    after the one at j0.
    """
    Br, Bc = spec.Br, spec.Bc
    column_range, next_column = make_column_range(spec), make_next_column(spec)

    @device_function
    def sees_more(i0, j0, Nq, Nk, b, h, options):
        _, j_last = column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        return next_column(uint32(j0 + Bc), j_last, i0, b, h, options) < j_last

    return sees_more
