"""Key tiles: which column tile, and which rows of queries, a block of the backward pass takes.

Where batch entries have lengths of their own, or blocks split rows, the first thread finds these
and writes them to words in shared memory: no other thread looks for them, and no register keeps
what can be read again. The words: where the column tile begins, of which entry it is, Nq and Nk,
and where these rows end in the arrays; where rows are split, the block's query head, its first row
and one past its last.
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
    """``visits.row_range``; no rows for a tile beyond K, of which the last chunk may have some."""
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
    """``column_tile()``: a backward block's first column, K/V head and batch entry. The grid is
    (Tc, Hk, B), or in chunks of C tiles (C Hk, B, ceil(Tc / C)). Where S blocks share the query
    heads of a K/V head, or their rows, it has Hk S in the place of Hk, and the head is a share:
    see ``shared_key_head``.

    Under a causal mask the first columns are seen by most rows. In chunks those of all heads go
    before the next ones, so that the last blocks to start are short; the tiles of a chunk read Q
    and dO together. C is a power of two: bits of the block's number say all three, at no cost where
    they are asked for again.
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
    """``shared_key_head(head, Q, K)``: the head with hk its K/V head, where hk has been the block's
    share. Shares of a K/V head are neighbours; where there are none hk is the K/V head already.
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
    """``write_key_tile(words, Q, K, group, options)``: the first thread writes the words. A grid of
    packed sequences has the tiles of all, some empty (``scheduler.sequence_tile_of``).
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
    """``own_rows(i_first, i_end, share, shares)``: of the rows, split into so many shares, this
    one's: as many row tiles as the others have, or one more in the first ones.
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
    """``key_tile(words, Q, K, group, options)``: this block's column tile, its first query head,
    one past its last, and its rows.
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
    """``query_heads(words, share, group)``: this block's first query head, and how many it has."""
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
    """``read_lengths(words, Q, K)``: Nq and Nk, read again."""
    varies = spec.features.lengths

    def read_lengths(words, Q, K):
        if varies:
            return words[2], words[3]
        return uint32(Q.shape[2]), uint32(K.shape[2])

    return read_lengths


@part
def make_read_head(spec):
    """``read_head(head, h, Q, K)``: query head h of the same K/V head, its lengths read again."""
    lengths = _make_read_lengths(spec)

    def read_head(head, h, Q, K):
        Nq, Nk = lengths(head.words, Q, K)
        return KeyTileHead(head.b, h, head.hk, Nq, Nk, head.options, head.words)

    return read_head


@part
def make_read_h(spec):
    """``read_h(words, h)``: the query head h; read again where this block has one."""
    splits = spec.splits_rows

    def read_h(words, h):
        if splits:
            return words[6]
        return h

    return read_h


@part
def _make_read_row_range(spec):
    """``read_row_range(words, col0, head)``: the rows of this block that see a column tile."""
    of_tile, splits = _make_range_in_chunk(spec), spec.splits_rows

    def read_row_range(words, col0, head):
        if splits:
            return words[7], words[8]
        return of_tile(col0, uint32(0), head.Nq, head)

    return read_row_range


@part
def make_takes_more(spec):
    """``takes_more(words, h, h_end, i0)``: whether this block visits row tile i0 of head h, which
    came behind another one.
    """
    splits = spec.splits_rows

    def takes_more(words, h, h_end, i0):
        if splits:
            return i0 < words[8]
        return h < h_end

    return takes_more


@device_function
def _read_query_end(head):
    return head.words[4]


@device_function
def _read_key_end(head):
    return head.words[5]


@cache
def make_read_query_box(spec):
    """``read_query_box(T, row, head)``: ``load.query_box``, the sequence's end read again."""
    return make_query_box(spec, end=_read_query_end)


@cache
def make_read_key_box(spec, ends):
    """``read_key_box(T, row, head)``: ``load.key_box``, the sequence's end read again."""
    return make_key_box(spec, ends, _read_key_end)


@device_function
def at_head(head, h):
    """The head h of the same K/V head."""
    return KeyTileHead(head.b, h, head.hk, head.Nq, head.Nk, head.options, head.words)
