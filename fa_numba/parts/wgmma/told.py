"""Which column tile and rows a block of the backward pass takes, told by way of shared memory where
batch entries have lengths of their own or blocks split rows, and the loads of tiles of an entry.
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.bulk_copy import load_box
from fa_numba.intrinsics.mbarrier import expect_bytes
from fa_numba.parts import heads, visits
from fa_numba.parts.heads import make_key_end, make_query_end
from fa_numba.parts.wgmma.schedule import make_column_tile, sequence_tile_of
from fa_numba.parts.wgmma.tile_load import load_to_end, make_place_of
from fa_numba.tiling.wgmma import PANEL


@cache
def _make_range_in_chunk(spec):
    """That of ``visits``; no row of a tile that the last chunk has beyond the others' columns."""
    row_range = visits.make_row_range(spec)
    if not spec.chunk_tiles:
        return row_range

    @device_function
    def row_range_in_chunk(col0, rows_begin, rows_end, Nq, Nk, options):
        i_first, i_end = row_range(col0, rows_begin, rows_end, Nq, Nk, options)
        if col0 >= Nk:
            i_end = i_first
        return i_first, i_end

    return row_range_in_chunk


@cache
def make_tell_tile(spec):
    """``tell_tile(sN, Q, K, group, options)``: where batch entries have lengths of their own, or
    blocks split rows, the first thread tells the others of the block's column tile: where it
    begins, of which entry it is, Nq and Nk, and where these end in the arrays; and of its query
    head and rows. Nobody else looks for them, and no register keeps what can be read again. A grid
    of packed sequences has the tiles of all of them, some empty (``sequence_tile``).
    """
    features, column_tile, lengths = spec.features, make_column_tile(spec), heads.make_lengths(spec)
    query_end, key_end = make_query_end(spec), make_key_end(spec)
    packed, splits_rows, Bc = features.packed, spec.splits_rows, spec.Bc
    row_range, own_rows, tells = _make_range_in_chunk(spec), _make_own_rows(spec), spec.told[1] > 0
    sequence_tile = sequence_tile_of(Bc, keys=True)

    @device_function
    def tell_tile(sN, Q, K, group, options):
        if tells and cuda.threadIdx.x == 0:
            j0, share, b = column_tile()
            if packed:
                j0, b = sequence_tile(uint32(j0 // uint32(Bc)), options)
            Nq, Nk = lengths(Q.shape[2], K.shape[2], b, options)
            sN[0], sN[1], sN[2], sN[3] = j0, b, Nq, Nk
            sN[4], sN[5] = query_end(b, Nq, options), key_end(b, Nk, options)
            if splits_rows:
                i_first, i_end = row_range(j0, uint32(0), Nq, Nq, Nk, options)
                i_first, i_end = own_rows(i_first, i_end, share, group)
                sN[6], sN[7], sN[8] = uint32(share // uint32(group)), i_first, i_end

    return tell_tile


def _make_own_rows(spec):
    """``own_rows(i_first, i_end, share, shares)``: of so many shares of rows one, with as many row
    tiles as the others; what is left over goes to the first of them.
    """
    Br = spec.Br

    @device_function
    def own_rows(i_first, i_end, share, shares):
        tiles, part = uint32(0), uint32(share % uint32(shares))
        if i_first < i_end:
            tiles = uint32(uint32(i_end - i_first + (Br - 1)) // uint32(Br))
        each, left = uint32(tiles // uint32(shares)), uint32(tiles % uint32(shares))
        before = uint32(part * each + uint32(min(part, left)))
        own = each
        if part < left:
            own = uint32(each + 1)
        own_end = uint32(min(i_end, uint32(i_first + uint32(before + own) * Br)))
        return uint32(i_first + before * Br), own_end

    return own_rows


@cache
def make_query_heads(spec):
    """``query_heads(sN, share, group)``: this block's first query head, and how many it has."""
    if not spec.splits_rows:
        of_grid = heads.make_query_heads(spec)

        @device_function
        def heads_of_share(sN, share, group):
            return of_grid(share, group)

        return heads_of_share

    @device_function
    def query_heads(sN, share, group):
        return sN[6], uint32(1)

    return query_heads


@cache
def make_told_head(spec):
    """``told_head(sN, h)``: the query head h; read again where this block has one."""
    splits = spec.splits_rows

    @device_function
    def told_head(sN, h):
        if splits:
            return sN[6]
        return h

    return told_head


@cache
def make_row_range(spec):
    """``row_range(sN, col0, Nq, Nk, options)``: the rows of this block that see a column tile."""
    of_tile, splits = _make_range_in_chunk(spec), spec.splits_rows

    @device_function
    def row_range(sN, col0, Nq, Nk, options):
        if splits:
            return sN[7], sN[8]
        return of_tile(col0, uint32(0), Nq, Nq, Nk, options)

    return row_range


@cache
def make_takes_more(spec):
    """``takes_more(sN, h, h_end, i0)``: whether this block visits row tile i0 of head h, behind
    another.
    """
    splits = spec.splits_rows

    @device_function
    def takes_more(sN, h, h_end, i0):
        if splits:
            return i0 < sN[8]
        return h < h_end

    return takes_more


@cache
def make_told_tile(spec):
    """``told_tile(sN)``: this block's first column, its K/V head and batch entry."""
    column_tile, packed = make_column_tile(spec), spec.features.packed

    @device_function
    def told_tile(sN):
        j0, hk, b = column_tile()
        if packed:
            j0, b = sN[0], sN[1]
        return j0, hk, b

    return told_tile


@cache
def make_lengths(spec):
    """``lengths(sN, rows, columns)``: Nq and Nk, of arrays with so many rows and columns."""
    varies = spec.features.lengths

    @device_function
    def lengths(sN, rows, columns):
        if varies:
            return sN[2], sN[3]
        return uint32(rows), uint32(columns)

    return lengths


@device_function
def told_query_end(b, Nq, sN):
    """Where the Nq rows of entry b end in an array of queries."""
    return sN[4]


@device_function
def told_key_end(b, Nk, sN):
    """The same of keys."""
    return sN[5]


@cache
def make_load_column_tiles(spec):
    """``load_column_tiles(sK, sV, K, V, b, h, col0, Nk, sN, bars, barrier)``: Kj and Vj of a
    sequence of Nk columns, zeros beyond them.
    """
    Bc, panels = spec.Bc, spec.panels
    size = 4 * PANEL * panels * Bc
    place_of = make_place_of(spec.key_ends, told_key_end)

    @device_function
    def load_column_tiles(sK, sV, K, V, b, h, col0, Nk, sN, bars, barrier):
        expect_bytes(bars, barrier, size)
        b_k, h_k, col_k = place_of(K, b, h, col0, Nk, sN)
        b_v, h_v, col_v = place_of(V, b, h, col0, Nk, sN)
        for n in range(panels):
            load_box(sK, uint32(PANEL * Bc * n), K, b_k, h_k, col_k, PANEL * n, bars, barrier)
            load_box(sV, uint32(PANEL * Bc * n), V, b_v, h_v, col_v, PANEL * n, bars, barrier)

    return load_column_tiles


@cache
def make_load_rows(spec):
    """``load_rows(sT, at, T, b, h, row0, Nq, sN, bars, barrier)``: Qi or dOi of a sequence of Nq
    rows, zeros beyond them.
    """
    return load_to_end(spec, spec.Br, spec.Br, spec.query_ends, told_query_end)
