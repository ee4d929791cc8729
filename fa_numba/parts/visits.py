"""Which tiles of S a thread block visits.

To visit a tile of S means to compute it. The causal mask, the window and the lengths of sequences
limit the visited tiles to a range. A block mask removes further tiles from this range. Two arrays
tell kernels which tile to visit next:

- ``options.next_column[b, h, i, j]`` is for row tile number i. It is the number of the first
  visited column tile that is not before column tile number j.
- ``options.next_row[b, h, j, i]`` is for column tile number j. It is the number of the first
  visited row tile that is not before row tile number i.

Arguments such as ``j0`` and ``col0`` are the first column of a column tile, and ``i0`` is the first
row of a row tile. "Column tile j0" is the column tile that begins at column j0.
"""

from functools import cache

from fa_numba.device import cuda, device_function, int32, uint32
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head

# With a block mask, FlashAttention-1 describes a visit by one word. The low bits are the first row
# of the next row tile. Bit MORE says whether the row tile visits a later column tile. Bit STARTS
# says whether this visit is the first of the row tile, which initialises O, l and m, or dQ.
MORE, STARTS = 1 << 29, 1 << 28


@part
def make_column_range(spec):
    """Make ``column_range(row0, rows_end, head)``, which returns the range of columns that the rows
    ``row0`` to ``rows_end`` - 1 can see.

    The result is the first column of the first column tile, and one past the last column. The
    causal mask, the window and the lengths limit the range. A block mask is ignored.
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
    """Make ``column_passes(row0, rows_end, head)``, which returns the range of columns that FA-1's
    outer loop passes over.

    The block computes the rows ``row0`` to ``rows_end`` - 1. Normally the result is the range that
    ``column_range`` returns for these rows. If the rows see no column, this range is empty. The
    result then contains one column tile, because the first pass writes the initial O, l and m. If
    the kernel writes them before the loop (``features.initialises``), the result can be empty.
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
    """Make ``backward_passes(columns)``, which returns one past the last column of the outer loop
    in FA-1's backward pass.

    Normally the result is ``columns``, the number of keys. A packed sequence can have no keys. The
    result is then 1, so that there is a first pass, which writes dQ = 0.
    """
    packed = spec.features.packed

    def backward_passes(columns):
        if packed:
            return uint32(max(columns, uint32(1)))
        return columns

    return backward_passes


@part
def make_own_rows(spec):
    """Make ``own_rows(split_rows, rows)``, which returns the rows of Q that this thread block of
    FA-1 computes.

    The result is the block's first row, and one past its last row. ``rows`` is the number of rows
    of the head. Each block has ``split_rows`` rows. Without query splits, this is the number of all
    rows.

    The first blocks of the grid have the last rows. With a causal mask, the last rows see the most
    columns. The blocks that start last therefore have the least work.
    """

    def own_rows(split_rows, rows):
        i_first = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * split_rows)
        i_last = uint32(min(rows, uint32(i_first + split_rows)))
        return i_first, i_last

    return own_rows


@cache
def make_row_range(spec):
    """Make ``row_range(col0, rows_begin, rows_end, head)``, which returns the range of rows that
    see the column tile at column ``col0``.

    Only the rows ``rows_begin`` to ``rows_end`` - 1 are considered. The result is the first row of
    the first row tile that sees the column tile, and one past the last row. If no row sees the
    column tile, the range is empty: the first number is at or past the second.
    """
    return _make_row_range(spec, takes_all=False)


@cache
def make_rows_of_pass(spec):
    """Make ``rows_of_pass(col0, rows_begin, rows_end, head)``, which returns the rows that FA-1's
    pass over the column tile at column ``col0`` visits.

    The thread block computes the rows ``rows_begin`` to ``rows_end`` - 1. Normally, a pass visits
    only the rows that see the column tile, as ``row_range`` returns them. The pass over column 0 is
    different: it visits all rows of the block, because it writes the first O, l and m, or the first
    dQ. If the kernel writes these arrays before the loop (``features.initialises``), the pass over
    column 0 is not different.
    """
    return _make_row_range(spec, takes_all=not spec.features.initialises)


@part
def _make_row_range(spec, takes_all):
    """Make ``row_range(col0, rows_begin, rows_end, head)``, which returns the range of rows that
    see the column tile at column ``col0``.

    If ``takes_all`` is true, the column tile at column 0 is treated differently. The result for
    this column tile is ``rows_begin`` and ``rows_end``, which means all rows.
    """
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
    """Make ``next_column(j0, j_end, i0, head)``, which returns the first column of the next column
    tile that row tile i0 visits, from column tile j0 on.

    Without a block mask the result is j0. With a block mask, the result is j0 too if the row tile
    visits column tile j0. Otherwise the function skips the column tiles that the block mask
    removes. If no column tile is left before ``j_end``, the result is at or past ``j_end``.
    """
    Br, Bc, sparse = spec.Br, spec.Bc, spec.features.sparse

    def next_column(j0, j_end, i0, head):
        if sparse and j0 < j_end:
            i, j = i0 // uint32(Br), j0 // uint32(Bc)
            j0 = uint32(head.options.next_column[head.b, head.h, i, j] * Bc)
        return j0

    return next_column


@part
def make_next_row(spec):
    """Make ``next_row(i0, i_end, j0, head)``, which returns the first row of the next row tile that
    visits column tile j0, from row tile i0 on.

    Without a block mask the result is i0. With a block mask, the result is i0 too if row tile i0
    visits the column tile. Otherwise the function skips the row tiles that the block mask removes.
    If no row tile is left before ``i_end``, the result is at or past ``i_end``.
    """
    Br, Bc, sparse = spec.Br, spec.Bc, spec.features.sparse

    def next_row(i0, i_end, j0, head):
        if sparse and i0 < i_end:
            i, j = i0 // uint32(Br), j0 // uint32(Bc)
            i0 = uint32(head.options.next_row[head.b, head.h, j, i] * Br)
        return i0

    return next_row


@part
def _make_first_of_heads(spec):
    """Make ``first_of_heads(h, i0, head, j0, h_end, i_first, i_end)``, which returns the next query
    head and row tile that visit column tile j0.

    The result is a query head and the first row of a row tile. Without a block mask the result is h
    and i0. With a block mask, the search begins at row tile i0 of query head h, and skips the tiles
    that the block mask removes. If no row tile of head h is left, the search continues at row
    ``i_first`` of the next query head. It ends before head ``h_end``. A block with a single query
    head searches only this head.

    If no row tile is left, the row in the result is at or past ``i_end``, or the head is ``h_end``.
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
    """Make ``first_visit(head, j0, h_end, i_first, i_end)``, which returns the first query head and
    row tile of the block that visit column tile j0.

    The result is the number of a query head, and the first row of a row tile. ``head`` is the
    block's first query head, and ``h_end`` is one past the block's last query head. In each head,
    only the rows ``i_first`` to ``i_end`` - 1 are considered.
    """
    first_of_heads = _make_first_of_heads(spec)

    def first_visit(head, j0, h_end, i_first, i_end):
        return first_of_heads(head.h, i_first, head, j0, h_end, i_first, i_end)

    return first_visit


@part
def make_next_visit(spec):
    """Make ``next_visit(h, i0, head, j0, h_end, i_first, i_end)``, which returns the next query
    head and row tile that visit column tile j0, after row tile i0 of query head h.

    The result is the number of a query head, and the first row of a row tile. After the last row
    tile of a head comes the first row tile of the next head. If a block has a single query head
    (``spec.single_head``), the result contains ``h`` unchanged, and ``i_first`` is not used.
    ``make_first_visit`` explains the other arguments.
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
    """Make ``columns_seen(i0, head)``, which returns the range of columns that row tile i0 visits.

    The result is the first column of the first visited column tile, and one past the last column.
    """
    ROWS, column_range = spec.head_rows, make_column_range(spec)
    next_column = make_next_column(spec)

    def columns_seen(i0, head):
        j0, j_end = column_range(i0, uint32(i0 + ROWS), head)
        return next_column(j0, j_end, i0, head), j_end

    return columns_seen


@part
def make_rows_seen(spec):
    """Make ``rows_seen(j0, rows_begin, rows_end, head)``, which returns the rows that FA-1's pass
    over column tile j0 visits.

    The thread block has the rows ``rows_begin`` to ``rows_end`` - 1. The result is the first row of
    the first visited row tile, and one past the last row.
    """
    rows_of_pass, next_row = make_rows_of_pass(spec), make_next_row(spec)

    def rows_seen(j0, rows_begin, rows_end, head):
        i0, i_end = rows_of_pass(j0, rows_begin, rows_end, head)
        return next_row(i0, i_end, j0, head), i_end

    return rows_seen


@part
def make_sees_more(spec):
    """Make ``sees_more(i0, j0, head)``, which says whether row tile i0 visits any column tile after
    column tile j0.
    """
    Br, Bc = spec.Br, spec.Bc
    column_range, next_column = make_column_range(spec), make_next_column(spec)

    def sees_more(i0, j0, head):
        _, j_last = column_range(i0, uint32(i0 + Br), head)
        return next_column(uint32(j0 + Bc), j_last, i0, head) < j_last

    return sees_more


@part
def make_is_unseen(spec):
    """Make ``is_unseen(i0, head)``, which says whether the kernel must write the first values of O,
    l and m (or dQ) of row tile i0 before its loops.

    Kernels call the function only if the first pass can skip row tiles (``features.initialises``).
    Without a block mask, the result is always true. With a block mask, the first visit of a row
    tile writes the first values. The result is then true in two cases:

    - The row tile visits no column tile.
    - With ``q_lens``, some rows of the row tile are past the valid length.
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
    """Make ``visit_ahead(i_next, i0, j0, head)``, which packs three facts about the visit of row
    tile i0 and column tile j0 into one 32-bit integer.

    FA-1's kernels with a block mask use the integer, because the facts come from the lists of the
    block mask, which take time to read.

    | bits of the integer | fact |
    |---|---|
    | all bits below bit STARTS | ``i_next``: the first row of the next row tile in this pass |
    | bit MORE | whether row tile i0 visits a column tile after j0 |
    | bit STARTS | whether j0 is the first column tile that row tile i0 visits |
    """
    Br, Bc, column_range = spec.Br, spec.Bc, make_column_range(spec)

    def visit_ahead(i_next, i0, j0, head):
        j_first, j_end = column_range(i0, uint32(i0 + Br), head)
        # The lists have an entry past the end. No branch is needed, and all loads start at once.
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
    """Make ``row_ahead(i0, i_end, j0, head)``, which returns a 32-bit integer about the visit of
    row tile i0 and column tile j0. Other functions take this integer as the argument ``visit``.

    With a block mask, the integer packs three facts: which row tile comes next, whether row tile i0
    visits a later column tile, and whether this is its first visit (``visit_ahead``). ``row_ahead``
    reads these facts from global memory. Kernels call it some time before they need the facts.

    Without a block mask, the result is i0, and other functions do not use their argument ``visit``.
    ``i_end`` is one past the last row of the pass. If i0 is at or past ``i_end``, there is no
    visit, and the result has no meaning.
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
    """Return the first row of the row tile that is visited next, from ``visit``, the integer that
    ``visit_ahead`` returns.
    """
    return uint32(visit & uint32(STARTS - 1))


@device_function
def more_by(visit):
    """Return whether the row tile visits a later column tile, from ``visit``, the integer that
    ``visit_ahead`` returns.
    """
    return uint32(visit & uint32(MORE)) != uint32(0)


@part
def make_row_after(spec):
    """Make ``row_after(visit, i0)``, which returns the first row of the row tile that is visited
    after row tile i0.

    Without a block mask, the result is i0 + Br. With a block mask, it comes from ``visit``, the
    integer that ``row_ahead`` returns.
    """
    Br, sparse = spec.Br, spec.features.sparse

    def row_after(visit, i0):
        if sparse:
            return next_by(visit)
        return uint32(i0 + Br)

    return row_after


@part
def make_row_sees_more(spec):
    """Make ``row_sees_more(visit, i0, j0, head)``, which says whether row tile i0 visits a column
    tile after column tile j0.

    Without a block mask, the function computes the result from the causal mask, the window and the
    lengths (``sees_more``). With a block mask, the result comes from ``visit``, the integer that
    ``row_ahead`` returns.
    """
    sparse, sees_more = spec.features.sparse, make_sees_more(spec)

    def row_sees_more(visit, i0, j0, head):
        if sparse:
            return more_by(visit)
        return sees_more(i0, j0, head)

    return row_sees_more


@part
def make_row_starts(spec):
    """Make ``row_starts(visit, j0)``, which says whether a visit in FA-1 is the first of its row
    tile, so that global memory contains no values of the row tile yet.

    If the result is true, the visit starts from O = 0, l = 0 and m = -inf (or from dQ = 0). If the
    result is false, the visit reads O, l and m (or dQ) from global memory.

    - With a block mask, the result comes from ``visit``, the integer that ``row_ahead`` returns.
    - Without a block mask, the result is true in the pass over the column tile at column 0. It is
      always false if the kernel has written the first values to global memory before its loops
      (``features.initialises``).
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
    """Make ``share(j0, j_end, split, options)``, which returns the range of columns of key split
    number ``split``.

    The columns from j0 to ``j_end`` - 1 are divided among ``options.kv_splits`` splits. A split
    gets complete column tiles. All splits get an equal number of tiles, except that some get one
    more. The result is the first column of the split, and one past its last column. If there are
    fewer tiles than splits, some splits get no column.
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
    """Make ``share_of_columns(j0, j_end, split, i0, head)``, which returns the range of columns of
    key split number ``split`` for row tile i0.

    The result is the first visited column of the split, and one past its last column. The range
    from j0 to ``j_end`` is divided among all splits (``make_share``). Without key splits, the
    result is j0 and ``j_end``.
    """
    share, next_column, splits = make_share(spec), make_next_column(spec), spec.features.splits

    def share_of_columns(j0, j_end, split, i0, head):
        if splits:
            first, end = share(j0, j_end, split, head.options)
            return next_column(first, end, i0, head), end
        return j0, j_end

    return share_of_columns
