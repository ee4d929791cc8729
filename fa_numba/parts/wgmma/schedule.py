"""Which row tiles a block takes, where it stays on its multiprocessor for several."""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.tiling.wgmma import TOLD

# Bits of a word that name a batch entry, of which a grid has less than 2^16; the others a split.
ENTRY_BITS = 16
# Bytes of K and V that heads computed side by side may have, so that the L2 cache serves them.
TOGETHER = 16 << 20


@cache
def make_row_tiles(spec):
    """``row_tiles(shape, options)``: how many row tiles a Q of this shape has in all, each as often
    as its columns are split.
    """
    head_tiles, of_tile, splits = _make_head_tiles(spec), spec.tile_heads, spec.features.splits

    @device_function
    def row_tiles(shape, options):
        batch, heads = uint32(shape[0]), uint32(shape[1])
        if of_tile > 1:
            heads = uint32(heads // uint32(of_tile))
        tiles = uint32(head_tiles(uint32(shape[2]), options) * heads * batch)
        if splits:
            return uint32(tiles * uint32(options.kv_splits))
        return tiles

    return row_tiles


@cache
def make_tile_of(spec):
    """``tile_of(n, options)``: the row tile of a block's n-th piece of work, and which share of its
    columns that is.
    """
    splits = spec.features.splits

    @device_function
    def tile_of(n, options):
        if splits:
            shares = uint32(options.kv_splits)
            return uint32(n // shares), uint32(n % shares)
        return n, uint32(0)

    return tile_of


def _make_head_tiles(spec):
    """``head_tiles(rows, options)``: those of a head. Of packed sequences one may be empty: a
    sequence that begins within tile t of all rows, cut without regard to sequences, has t + (its
    number) before it, so that nobody counts the tiles of those before.
    """
    rows_of_tile, packed = spec.head_rows, spec.features.packed

    @device_function
    def head_tiles(rows, options):
        if packed:
            sequences = uint32(options.q_starts.shape[0] - 1)
            return uint32(rows // uint32(rows_of_tile) + sequences)
        return uint32((rows + (rows_of_tile - 1)) // uint32(rows_of_tile))

    return head_tiles


@cache
def sequence_tile_of(rows_of_tile, keys=False):
    """``sequence_tile(i, options)``: the first row, and the sequence, of a head's tile i of so many
    rows of Q, or with ``keys`` of K.
    """

    @device_function
    def starts_of(options):
        if keys:
            return options.k_starts
        return options.q_starts

    @device_function
    def sequence_tile(i, options):
        b, after = uint32(0), uint32(starts_of(options).shape[0] - 1)
        while uint32(after - b) > uint32(1):
            middle = uint32(uint32(after + b) // uint32(2))
            begin = uint32(uint32(starts_of(options)[middle]) // uint32(rows_of_tile) + middle)
            if begin <= i:
                b = middle
            else:
                after = middle
        begin = uint32(uint32(starts_of(options)[b]) // uint32(rows_of_tile) + b)
        return uint32(uint32(i - begin) * rows_of_tile), b

    return sequence_tile


@cache
def make_row_tile(spec):
    """``row_tile(n, q_shape, k_shape, options)``: the first row, head and batch entry of row tile
    number n. Where heads share a tile, the group of heads.

    Heads whose K and V lie in the L2 cache together go side by side, the row tiles with most
    columns first: a shorter tail.
    """
    rows_of_tile, of_tile, pair_bytes = spec.head_rows, spec.tile_heads, 4 * spec.head_dim
    head_tiles, packed = _make_head_tiles(spec), spec.features.packed
    sequence_tile, page_size = sequence_tile_of(rows_of_tile), spec.features.page_size

    @device_function
    def row_tile(n, q_shape, k_shape, options):
        heads, rows, columns = uint32(q_shape[1]), uint32(q_shape[2]), uint32(k_shape[2])
        if page_size:
            columns = uint32(options.block_table.shape[1] * page_size)
        if of_tile > 1:
            heads = uint32(heads // uint32(of_tile))
        Tr = head_tiles(rows, options)
        all_heads = uint32(heads * uint32(q_shape[0]))
        fit = uint32(max(uint32(1), uint32(TOGETHER // pair_bytes) // columns))
        together = uint32(min(fit, all_heads))  # so that together Tr stays within 32 bits
        first = uint32(n // uint32(together * Tr) * together)
        place = uint32(n % uint32(together * Tr))
        here = uint32(min(together, uint32(all_heads - first)))
        i = uint32(Tr - 1 - place // here)
        head = uint32(first + place % here)
        if packed:
            i0, b = sequence_tile(i, options)
            return i0, head, b
        return uint32(i * rows_of_tile), uint32(head % heads), uint32(head // heads)

    return row_tile


@cache
def make_tell(spec):
    """``tell(sN, stage, i0, h, b, split)``: first row, head, batch entry and share of the columns
    of the row tile in a place of Q, behind its number.
    """
    splits = spec.features.splits

    @device_function
    def tell(sN, stage, i0, h, b, split):
        at = uint32(TOLD * stage)
        sN[uint32(at + 1)] = i0
        sN[uint32(at + 2)] = h
        if splits:
            sN[uint32(at + 3)] = uint32(b | split << uint32(ENTRY_BITS))
        else:
            sN[uint32(at + 3)] = b

    return tell


@cache
def make_told(spec):
    """``told(sN, stage)``: what ``tell`` has told."""
    splits, entries = spec.features.splits, 2**ENTRY_BITS - 1

    @device_function
    def told(sN, stage):
        at = uint32(TOLD * stage)
        i0, h, b = sN[uint32(at + 1)], sN[uint32(at + 2)], sN[uint32(at + 3)]
        if splits:
            return i0, h, uint32(b & uint32(entries)), uint32(b >> uint32(ENTRY_BITS))
        return i0, h, b, uint32(0)

    return told


@cache
def make_next_tile(spec):
    """``next_tile(n, taken)``: the number of this block's row tile after n; ``taken`` counts those
    that blocks have taken beside their first.
    """
    counts = spec.counts_tiles

    @device_function
    def next_tile(n, taken):
        if counts:
            return uint32(uint32(cuda.gridDim.x) + uint32(cuda.atomic.add(taken, 0, 1)))
        return uint32(n + uint32(cuda.gridDim.x))

    return next_tile


@cache
def make_column_tile(spec):
    """``column_tile()``: a backward block's first column, K/V head and batch entry, of a grid (Tc,
    Hk, B), in chunks of C tiles (C Hk, B, ceil(Tc / C)). Where S blocks share the query heads of a
    K/V head these are Hk S shares: see ``shared_head``.

    A causal mask leaves the first columns most rows. In chunks those of all heads go before the
    next ones, so that the last blocks to start are short; the tiles of a chunk read Q and dO
    together. C is a power of two: places are found from the block's, in no register.
    """
    Bc, C = spec.Bc, spec.chunk_tiles

    @device_function
    def column_tile():
        x, y, z = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        if C:
            return uint32(uint32(z * C + x % C) * Bc), uint32(x // C), y
        return uint32(x * Bc), y, z

    return column_tile


@cache
def make_shared_head(spec):
    """``shared_head(share, h, heads_q, heads_k)``: the K/V head of a block's share of query heads,
    the first of them h. A head's shares are neighbours; without them a share is its head.
    """
    splits = spec.splits_group

    @device_function
    def shared_head(share, h, heads_q, heads_k):
        if splits:
            return uint32(h // uint32(uint32(heads_q) // uint32(heads_k)))
        return share

    return shared_head
