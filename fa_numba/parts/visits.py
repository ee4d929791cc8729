"""Which tiles of S a block visits: ranges by mask and window, less what a block mask hides."""

from functools import cache

from fa_numba.device import cuda, device_function, int32, uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head

# Of what a block mask's lists say of a row tile in FlashAttention-1's pass over a column tile, one
# word: where the row tile after it begins, and in these bits whether it visits more column tiles,
# and whether this is the first of them, which starts its O, l and m, or dQ.
MORE, STARTS = 1 << 29, 1 << 28


@part
def make_column_range(spec):
    """``column_range(row0, rows_end, head)``: the columns that some of these rows see.

    Gives the first column of the first tile and one past the last column.
    """
    Bc, features = spec.Bc, spec.features
    causal, window = features.causal, features.window
    short = features.q_lens or features.packed

    def column_range(row0, rows_end, head):
        diagonal = int32(int32(head.Nk) - int32(head.Nq))
        j_first = uint32(0)
        j_end = head.Nk
        if causal:
            j_end = uint32(min(int32(head.Nk), max(int32(0), int32(rows_end + diagonal))))
        if window:
            last = int32(rows_end + diagonal + head.options.window_right)
            j_end = uint32(min(int32(head.Nk), max(int32(0), last)))
            first = int32(row0 + diagonal - head.options.window_left)
            j_first = uint32(max(int32(0), first) // int32(Bc) * int32(Bc))
        if short and row0 >= head.Nq:
            j_end = uint32(0)
        return j_first, j_end

    return column_range


@part
def make_column_passes(spec):
    """``column_passes(row0, rows_end, head)``: ``column_range`` of FA-1's outer loop.

    The first pass takes place even where no column is seen, if it is the one that initialises O.
    """
    column_range, always = make_column_range(spec), not spec.features.initialises

    def column_passes(row0, rows_end, head):
        j_first, j_end = column_range(row0, rows_end, head)
        if always:
            j_end = uint32(max(j_end, uint32(1)))
        return j_first, j_end

    return column_passes


@part
def make_backward_passes(spec):
    """``backward_passes(columns)``: one past the last column that FA-1's backward pass goes to.

    Of packed sequences one may be empty: the first pass still takes place, for dQ = 0.
    """
    packed = spec.features.packed

    def backward_passes(columns):
        if packed:
            return uint32(max(columns, uint32(1)))
        return columns

    return backward_passes


@part
def make_own_rows(spec):
    """``own_rows(split_rows, rows)``: the first row of this block, and one past the last. All rows
    of the head, unless the queries are split.

    The blocks with most columns go first: a shorter tail.
    """

    def own_rows(split_rows, rows):
        i_first = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * split_rows)
        i_last = uint32(min(rows, uint32(i_first + split_rows)))
        return i_first, i_last

    return own_rows


@cache
def make_row_range(spec):
    """``row_range(col0, rows_begin, rows_end, head)``: the rows that see a column tile.

    Gives the first row of the first tile and one past the last row.
    """
    return _make_row_range(spec, takes_all=False)


@cache
def make_rows_of_pass(spec):
    """``rows_of_pass``: ``row_range`` of FA-1's inner loop, whose pass over the tile at column 0
    takes all rows where no step before it has initialised O, or dQ.
    """
    return _make_row_range(spec, takes_all=not spec.features.initialises)


@part
def _make_row_range(spec, takes_all):
    """``row_range``; with ``takes_all`` the tile at column 0 takes all rows."""
    Br, Bc, features = spec.Br, spec.Bc, spec.features
    causal, window, lengths = features.causal, features.window, features.lengths

    def row_range(col0, rows_begin, rows_end, head):
        diagonal = int32(int32(head.Nk) - int32(head.Nq))
        i_first = rows_begin
        i_end = rows_end
        if not takes_all or col0 > uint32(0):
            if causal:
                hidden = max(int32(0), int32(col0) - diagonal - int32(rows_begin))
                i_first = uint32(rows_begin + hidden // int32(Br) * Br)
            if window:
                hidden = int32(
                    int32(col0) - diagonal - head.options.window_right - int32(rows_begin)
                )
                i_first = uint32(rows_begin + max(int32(0), hidden) // int32(Br) * Br)
                last = int32(int32(col0) + Bc - diagonal + head.options.window_left)
                i_end = uint32(min(int32(i_end), max(int32(0), last)))
            if lengths and col0 >= head.Nk:
                i_end = uint32(0)
        return i_first, i_end

    return row_range


@part
def make_next_column(spec):
    """``next_column(j0, j_end, i0, head)``: from column j0 on, a tile not masked out."""
    Br, Bc, sparse = spec.Br, spec.Bc, spec.features.sparse

    def next_column(j0, j_end, i0, head):
        if sparse and j0 < j_end:
            i, j = i0 // uint32(Br), j0 // uint32(Bc)
            j0 = uint32(head.options.next_column[head.b, head.h, i, j] * Bc)
        return j0

    return next_column


@part
def make_next_row(spec):
    """``next_row(i0, i_end, j0, head)``: from i0 on, a row tile that column tile j0 sees."""
    Br, Bc, sparse = spec.Br, spec.Bc, spec.features.sparse

    def next_row(i0, i_end, j0, head):
        if sparse and i0 < i_end:
            i, j = i0 // uint32(Br), j0 // uint32(Bc)
            i0 = uint32(head.options.next_row[head.b, head.h, j, i] * Br)
        return i0

    return next_row


@part
def _make_first_of_heads(spec):
    """``first_of_heads(h, i0, head, j0, h_end, i_first, i_end)``: from row tile i0 of head h on,
    the first visit of column tile j0, of that head or, unless a block has a single one, of those
    behind it, before h_end. Where there is none, i0 is not below i_end, or the head is h_end.
    """
    sparse, single, next_row = spec.features.sparse, spec.single_head, make_next_row(spec)

    def first_of_heads(h, i0, head, j0, h_end, i_first, i_end):
        if sparse:
            b, hk, options = head.b, head.hk, head.options
            i0 = next_row(i0, i_end, j0, Head(b, h, hk, head.Nq, head.Nk, options))
            while not single and h < h_end and i0 >= i_end:
                h, i0 = uint32(h + 1), i_first
                if h < h_end:
                    i0 = next_row(i0, i_end, j0, Head(b, h, hk, head.Nq, head.Nk, options))
        return h, i0

    return first_of_heads


@part
def make_first_visit(spec):
    """``first_visit(head, j0, h_end, i_first, i_end)``: the head and row tile of a column tile's
    first visit; ``head`` is the first of its query heads.
    """
    first_of_heads = _make_first_of_heads(spec)

    def first_visit(head, j0, h_end, i_first, i_end):
        return first_of_heads(head.h, i_first, head, j0, h_end, i_first, i_end)

    return first_visit


@part
def make_next_visit(spec):
    """``next_visit(h, i0, head, j0, h_end, i_first, i_end)``: the head and row tile after this one,
    the next head's first behind the last of a head; of a single head h and i_first are not asked
    for, and take no registers.
    """
    Br, single, sparse = spec.Br, spec.single_head, spec.features.sparse
    first_of_heads = _make_first_of_heads(spec)

    def next_visit(h, i0, head, j0, h_end, i_first, i_end):
        h_next, i_next = h, uint32(i0 + Br)
        if sparse:
            return first_of_heads(h, i_next, head, j0, h_end, i_first, i_end)
        if not single and i_next >= i_end:
            h_next, i_next = uint32(h + 1), i_first
        return h_next, i_next

    return next_visit


@part
def make_columns_seen(spec):
    """``columns_seen(i0, head)``: of the row tile at i0 the first column tile that it visits, and
    one past the last column.
    """
    ROWS, column_range = spec.head_rows, make_column_range(spec)
    next_column = make_next_column(spec)

    def columns_seen(i0, head):
        j0, j_end = column_range(i0, uint32(i0 + ROWS), head)
        return next_column(j0, j_end, i0, head), j_end

    return columns_seen


@part
def make_rows_seen(spec):
    """``rows_seen(j0, rows_begin, rows_end, head)``: of a pass of FA-1 over the column tile at j0
    the first row tile that it visits, and one past the last row.
    """
    rows_of_pass, next_row = make_rows_of_pass(spec), make_next_row(spec)

    def rows_seen(j0, rows_begin, rows_end, head):
        i0, i_end = rows_of_pass(j0, rows_begin, rows_end, head)
        return next_row(i0, i_end, j0, head), i_end

    return rows_seen


@part
def make_sees_more(spec):
    """``sees_more(i0, j0, head)``: whether the row tile at i0 visits a column tile after the one at
    j0.
    """
    Br, Bc = spec.Br, spec.Bc
    column_range, next_column = make_column_range(spec), make_next_column(spec)

    def sees_more(i0, j0, head):
        _, j_last = column_range(i0, uint32(i0 + Br), head)
        return next_column(uint32(j0 + Bc), j_last, i0, head) < j_last

    return sees_more


@part
def make_is_unseen(spec):
    """``is_unseen(i0, head)``: whether O, l and m, or dQ, of some row of the row tile at i0 are
    started by no visit. Without a block mask any may be, as far as the kernel knows.
    """
    Br, sparse, q_lens = spec.Br, spec.features.sparse, spec.features.q_lens
    columns_seen = make_columns_seen(spec)

    def is_unseen(i0, head):
        if sparse:
            j_first, j_end = columns_seen(i0, head)
            unseen = j_first >= j_end
            return unseen or (q_lens and uint32(i0 + Br) > head.Nq)
        return True

    return is_unseen


@part
def make_visit_ahead(spec):
    """``visit_ahead(i_next, i0, j0, head)``: the word of a visit, of the row tile at i0 and the
    column tile at j0: i_next, with the bits MORE and STARTS.
    """
    Br, Bc, column_range = spec.Br, spec.Bc, make_column_range(spec)

    def visit_ahead(i_next, i0, j0, head):
        j_first, j_end = column_range(i0, uint32(i0 + Br), head)
        # Lists have an entry past the end: no branch, so that all are on their way at once.
        columns, b, h, i = head.options.next_column, head.b, head.h, i0 // uint32(Br)
        after = columns[b, h, i, uint32(j0 // uint32(Bc) + uint32(1))]
        first = columns[b, h, i, j_first // uint32(Bc)]
        visit = i_next
        if uint32(after * Bc) < j_end:
            visit = uint32(visit | uint32(MORE))
        if uint32(first * Bc) == j0:
            visit = uint32(visit | uint32(STARTS))
        return visit

    return visit_ahead


@part
def make_row_ahead(spec):
    """``row_ahead(i0, i_end, j0, head)``: ``visit_ahead`` of the row tile at i0, if there is one;
    without a block mask a number that those below do not look at.
    """
    Br, Bc, sparse, visit_ahead = spec.Br, spec.Bc, spec.features.sparse, make_visit_ahead(spec)

    def row_ahead(i0, i_end, j0, head):
        if sparse:
            rows, j = head.options.next_row, j0 // uint32(Bc)
            at = i0 if i0 < i_end else uint32(0)
            i_next = rows[head.b, head.h, j, uint32(at // uint32(Br) + uint32(1))]
            return visit_ahead(uint32(i_next * Br), at, j0, head)
        return i0

    return row_ahead


@device_function
def next_by(visit):
    """The row tile after a visit's, by its word."""
    return uint32(visit & uint32(STARTS - 1))


@device_function
def more_by(visit):
    """Whether a visit's row tile visits another column tile, by its word."""
    return uint32(visit & uint32(MORE)) != uint32(0)


@part
def make_row_after(spec):
    """``row_after(visit, i0)``: the row tile that is visited after the one at i0."""
    Br, sparse = spec.Br, spec.features.sparse

    def row_after(visit, i0):
        if sparse:
            return next_by(visit)
        return uint32(i0 + Br)

    return row_after


@part
def make_row_sees_more(spec):
    """``row_sees_more(visit, i0, j0, head)``: ``sees_more``, of a row tile read ahead."""
    sparse, sees_more = spec.features.sparse, make_sees_more(spec)

    def row_sees_more(visit, i0, j0, head):
        if sparse:
            return more_by(visit)
        return sees_more(i0, j0, head)

    return row_sees_more


@part
def make_row_starts(spec):
    """``row_starts(visit, j0)``: whether the pass over the column tile at j0 is the first that a
    row tile takes part in, and so starts its O, l and m, or dQ, unread. That is the pass over
    column 0, unless the kernel has initialised them.
    """
    sparse, initialises = spec.features.sparse, spec.features.initialises

    def row_starts(visit, j0):
        if sparse:
            return uint32(visit & uint32(STARTS)) != uint32(0)
        if initialises:
            return False
        return j0 == uint32(0)

    return row_starts


@part
def make_share(spec):
    """``share(j0, j_end, split, options)``: of the columns from j0 to j_end those of a split, whole
    tiles: as many as another split has, or one more. None where there are not enough.
    """
    Bc = spec.Bc

    def share(j0, j_end, split, options):
        shares = uint32(options.kv_splits)
        tiles = uint32(0)
        if j0 < j_end:
            tiles = uint32(uint32(j_end - j0 + (Bc - 1)) // uint32(Bc))
        each, more = uint32(tiles // shares), uint32(tiles % shares)
        first = uint32(split * each + min(split, more))
        last = uint32(first + each)
        if split < more:
            last = uint32(last + 1)
        return uint32(j0 + first * Bc), uint32(min(j_end, uint32(j0 + last * Bc)))

    return share


@part
def make_share_of_columns(spec):
    """``share_of_columns(j0, j_end, split, i0, head)``: of the columns that a row tile visits, the
    first tile of a split and one past its last column; all where nobody shares them.
    """
    share, next_column, splits = make_share(spec), make_next_column(spec), spec.features.splits

    def share_of_columns(j0, j_end, split, i0, head):
        if splits:
            first, end = share(j0, j_end, split, head.options)
            return next_column(first, end, i0, head), end
        return j0, j_end

    return share_of_columns
