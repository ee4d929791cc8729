"""Key tiles: which column tile, and which rows of queries, a block computes in FA-2's backward
pass.

A key tile is a column tile, together with the range of row tiles that visit it. Normally each
thread computes the key tile itself. The computation is longer in two cases: batch entries can have
different lengths, or several blocks share the rows of a query head. In these cases, thread 0
computes the key tile once. It stores 32-bit integers in shared memory, which are called the words
of the key tile. The other threads read a word each time that they need it. This saves registers.

| number of the word | contents of the word |
|---:|---|
| 0 | first column of the column tile |
| 1 | batch entry |
| 2 | Nq, the number of valid queries of the sequence |
| 3 | Nk, the number of valid keys of the sequence |
| 4 | one past the sequence's last row in arrays of queries |
| 5 | one past the sequence's last row in arrays of keys |
| 6 | query head of the block, if blocks share rows |
| 7 | first row of the block, if blocks share rows |
| 8 | one past the last row of the block, if blocks share rows |
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.parts.grid import make_key_end, make_lengths, make_query_end
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head, KeyTile, KeyTileHead
from fa_numba.parts.visits import make_row_range
from fa_numba.parts.wgmma.load import make_key_box, make_query_box
from fa_numba.parts.wgmma.scheduler import sequence_tile_of


@part
def _make_range_in_chunk(spec):
    """Make the function ``row_range`` that ``visits.make_row_range`` describes, for grids with
    chunks of column tiles.

    The last chunk (``spec.chunk_tiles``) can contain column tiles beyond K. For these column tiles,
    the range of rows is empty.
    """
    row_range = make_row_range(spec)
    if not spec.chunk_tiles:
        return row_range

    def row_range_in_chunk(col0, rows_begin, rows_end, head):
        i_first, i_end = row_range(col0, rows_begin, rows_end, head)
        if col0 >= head.Nk:
            i_end = i_first
        return i_first, i_end

    return row_range_in_chunk


@part
def _make_column_tile(spec):
    """Make ``column_tile()``, which returns the first column of a block's column tile, its K/V head
    and its batch entry.

    The function computes the result from the block's position in the grid (x, y, z). Normally the
    grid has the size (Tc, Hk, B): number of column tiles, K/V heads and batch entries. If n blocks
    share a column tile (``group_splits``), the grid contains n Hk instead of Hk. The second result
    is then the number of the share, and ``shared_key_head`` returns the K/V head.

    With ``spec.chunk_tiles``, the column tiles are divided into chunks of C column tiles. The grid
    then has the size (C Hk, B, ceil(Tc / C)). The first chunk of all heads comes first, then the
    second chunk of all heads, and so on. This has two advantages:

    - With a causal mask, most rows visit the first column tiles. The blocks that start last
      therefore have the least work.
    - The column tiles of a chunk read the same Q and dO at about the same time.

    C is a power of two. The results are therefore bits of x, y and z, and cost little to compute
    again.
    """
    Bc, C = spec.Bc, spec.chunk_tiles

    def column_tile():
        x, y, z = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        if C:
            return uint32(uint32(z * C + x % C) * Bc), uint32(x // C), y
        return uint32(x * Bc), y, z

    return column_tile


@part
def make_shared_key_head(spec):
    """Make ``shared_key_head(head, Q, K)``, which returns the record ``head`` with the number of
    the K/V head in the field ``hk``.

    If several blocks share a column tile, ``head.hk`` is the number of a share, and the function
    computes the K/V head from the query head. Otherwise ``head`` already has the K/V head.
    """
    splits = spec.splits_group

    def shared_key_head(head, Q, K):
        hk = head.hk
        if splits:
            hk = uint32(head.h // uint32(uint32(Q.shape[1]) // uint32(K.shape[1])))
        return KeyTileHead(head.b, head.h, hk, head.Nq, head.Nk, head.options, head.words)

    return shared_key_head


@part
def make_write_key_tile(spec):
    """Make ``write_key_tile(words, Q, K, group, options)``, by which thread 0 of a block computes
    the block's key tile and stores it in shared memory.

    A key tile is a column tile with the range of rows that visit it. It is stored as several 32-bit
    integers, the words of the key tile, in the array ``words``. The table at the top of this module
    lists these words. Kernels that need no words call the function too, but then it does nothing.
    ``make_key_tile`` explains ``group``.

    For packed sequences, the grid contains the column tiles of all sequences, and some column tiles
    are empty (``scheduler.sequence_tile_of``).
    """
    features, column_tile, lengths = spec.features, _make_column_tile(spec), make_lengths(spec)
    query_end, key_end = make_query_end(spec), make_key_end(spec)
    packed, splits_rows, Bc = features.packed, spec.splits_rows, spec.Bc
    row_range, own_rows = _make_range_in_chunk(spec), _make_own_rows(spec)
    sequence_tile, (_, WORDS) = sequence_tile_of(Bc, keys=True), spec.key_tile_words

    def write_key_tile(words, Q, K, group, options):
        if WORDS and cuda.threadIdx.x == 0:
            j0, share, b = column_tile()
            if packed:
                j0, b = sequence_tile(uint32(j0 // uint32(Bc)), options)
            Nq, Nk = lengths(Q.shape[2], K.shape[2], b, options)
            head = Head(b, share, share, Nq, Nk, options)
            words[0], words[1], words[2], words[3] = j0, b, Nq, Nk
            words[4], words[5] = query_end(head), key_end(head)
            if splits_rows:
                i_first, i_end = row_range(j0, uint32(0), Nq, head)
                i_first, i_end = own_rows(i_first, i_end, share, group)
                words[6], words[7], words[8] = uint32(share // uint32(group)), i_first, i_end

    return write_key_tile


@part
def _make_own_rows(spec):
    """Make ``own_rows(i_first, i_end, share, shares)``, which returns the rows of one block, if
    several blocks share the rows of a query head: the first row, and one past the last row.

    The rows from ``i_first`` to ``i_end`` - 1 are divided among ``shares`` blocks. A block gets
    complete row tiles. All blocks get an equal number of row tiles, except that the first blocks
    can get one more. ``share`` is the number of the block among the blocks of all query heads. The
    number of the block in its query head is ``share`` modulo ``shares``.
    """
    Br = spec.Br

    def own_rows(i_first, i_end, share, shares):
        tiles, own = uint32(0), uint32(share % uint32(shares))
        if i_first < i_end:
            tiles = uint32(uint32(i_end - i_first + (Br - 1)) // uint32(Br))
        each, left = uint32(tiles // uint32(shares)), uint32(tiles % uint32(shares))
        before = uint32(own * each + uint32(min(own, left)))
        count = each
        if own < left:
            count = uint32(each + 1)
        own_end = uint32(min(i_end, uint32(i_first + uint32(before + count) * Br)))
        return uint32(i_first + before * Br), own_end

    return own_rows


@part
def make_key_tile(spec):
    """Make ``key_tile(words, Q, K, group, options)``, which returns this block's ``KeyTile``: its
    column tile, and the query heads and rows that visit the column tile.

    ``words`` are the words that ``write_key_tile`` has stored in shared memory. ``group`` is a
    number whose meaning depends on ``group_splits``, the number of blocks for each column tile:

    - With one block for each column tile, ``group`` is the number of query heads per K/V head.
    - If several blocks share the query heads, ``group`` is the number of query heads per block.
    - If several blocks share the rows of each query head, ``group`` is the number of blocks per
      query head.
    """
    column_tile, heads_of = _make_column_tile(spec), _make_query_heads(spec)
    lengths, row_range = _make_read_lengths(spec), _make_read_row_range(spec)
    packed = spec.features.packed

    def key_tile(words, Q, K, group, options):
        j0, hk, b = column_tile()
        if packed:
            j0, b = words[0], words[1]
        h, heads = heads_of(words, hk, group)
        h_end = uint32(h + heads)
        Nq, Nk = lengths(words, Q, K)
        head = KeyTileHead(b, h, hk, Nq, Nk, options, words)
        i_first, i_end = row_range(words, j0, head)
        return KeyTile(j0, head, h_end, i_first, i_end)

    return key_tile


@part
def _make_query_heads(spec):
    """Make ``query_heads(words, share, group)``, which returns the first query head of a block, and
    the number of its query heads.

    ``share`` is the second result of ``column_tile``. It is the number of the K/V head, or the
    number of a share if several blocks share a column tile. ``make_key_tile`` explains ``group``.
    """
    grouped, splits = spec.grouped, spec.splits_rows

    def query_heads(words, share, group):
        if splits:
            return words[6], uint32(1)
        if grouped:
            return uint32(share * group), uint32(group)
        return share, uint32(1)

    return query_heads


@part
def _make_read_lengths(spec):
    """Make ``read_lengths(words, Q, K)``, which returns Nq and Nk of the block's sequence.

    If batch entries have lengths of their own, Nq and Nk come from the words of the key tile.
    Otherwise they come from the shapes of Q and K.
    """
    varies = spec.features.lengths

    def read_lengths(words, Q, K):
        if varies:
            return words[2], words[3]
        return uint32(Q.shape[2]), uint32(K.shape[2])

    return read_lengths


@part
def make_read_head(spec):
    """Make ``read_head(head, h, Q, K)``, which returns the record of query head h, in the group of
    query heads to which ``head`` belongs.

    The function reads the lengths Nq and Nk again. A kernel that calls it therefore needs no
    registers for them between two calls.
    """
    lengths = _make_read_lengths(spec)

    def read_head(head, h, Q, K):
        Nq, Nk = lengths(head.words, Q, K)
        return KeyTileHead(head.b, h, head.hk, Nq, Nk, head.options, head.words)

    return read_head


@part
def make_read_h(spec):
    """Make ``read_h(words, h)``, which returns the number of the query head that the block computes
    now.

    Normally it is ``h``. If several blocks share the rows of a query head, a block has only one
    query head. The function then reads its number from shared memory, where it is one of the words
    of the key tile.
    """
    splits = spec.splits_rows

    def read_h(words, h):
        if splits:
            return words[6]
        return h

    return read_h


@part
def _make_read_row_range(spec):
    """Make ``read_row_range(words, col0, head)``, which returns the range of the block's rows that
    visit the column tile at column ``col0``.

    Normally the function computes the range from the masks. If several blocks share the rows of a
    query head, it reads the range from shared memory, from the words of the key tile.
    """
    of_tile, splits = _make_range_in_chunk(spec), spec.splits_rows

    def read_row_range(words, col0, head):
        if splits:
            return words[7], words[8]
        return of_tile(col0, uint32(0), head.Nq, head)

    return read_row_range


@part
def make_takes_more(spec):
    """Make ``takes_more(words, h, h_end, i0)``, which says whether the block has to compute row
    tile i0 of query head h, or has finished.

    h and i0 must be the result of ``visits.next_visit``. ``h_end`` is one past the block's last
    query head. The block has finished if h is ``h_end``. If several blocks share the rows of a
    query head, a block has finished if row i0 is past its own rows.
    """
    splits = spec.splits_rows

    def takes_more(words, h, h_end, i0):
        if splits:
            return i0 < words[8]
        return h < h_end

    return takes_more


@device_function
def _read_query_end(head):
    """Return where the sequence of the block ends in Q and the other arrays of queries: the number
    of its last row, plus 1.

    The number is one of the words that describe a key tile, ``head.words``.
    """
    return head.words[4]


@device_function
def _read_key_end(head):
    """Return where the sequence of the block ends in K and V: the number of its last row, plus 1.

    The number is one of the words that describe a key tile, ``head.words``.
    """
    return head.words[5]


@cache
def make_read_query_box(spec):
    """Make ``read_query_box(T, row, head)``, which returns the ``Box`` of row ``row`` of a query
    head in T's tensor map.

    The function does the same as ``load.query_box``. It does not compute where the sequence ends,
    but reads this number from the words of the key tile in shared memory.
    """
    return make_query_box(spec, end=_read_query_end)


@cache
def make_read_key_box(spec, ends):
    """Make ``read_key_box(T, row, head)``, which returns the ``Box`` of row ``row`` of a K/V head
    in T's tensor map.

    The function does the same as ``load.key_box``. It does not compute where the sequence ends, but
    reads this number from the words of the key tile in shared memory. ``ends`` says whether
    sequences end within T.
    """
    return make_key_box(spec, ends, _read_key_end)


@device_function
def at_head(head, h):
    """Return the record of query head h, with the K/V head, lengths and options of ``head``."""
    return KeyTileHead(head.b, h, head.hk, head.Nq, head.Nk, head.options, head.words)
