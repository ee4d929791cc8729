"""The tile scheduler: which work tiles, row tiles of Q, a block takes that stays on its
multiprocessor for several.
"""

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.shared import index_tile
from fa_numba.parts.grid import make_lengths
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head, Schedule, WorkTile
from fa_numba.parts.visits import make_column_range, make_share_of_columns
from fa_numba.parts.visits import make_next_column as make_next_column
from fa_numba.tiling.wgmma import WORK_WORDS

# Bits of a word that name a batch entry, of which a grid has less than 2^16; the others a split.
ENTRY_BITS = 16
# Bytes of K and V that heads computed side by side may have, so that the L2 cache serves them.
TOGETHER = 16 << 20
# A block takes its next work tile when at most so many column tiles of the last one taken are left:
# soon enough for Q to come in time, late enough that the last work tiles go to blocks without work.
LAST_TILES = 8


@part
def make_schedule(spec):
    """``schedule(Q, taken, options)``: where a block's work tiles are written, how many there are,
    and the counter of those taken beside each block's first.
    """
    first, words, row_tiles = spec.first_index, WORK_WORDS * spec.q_stages, _make_row_tiles(spec)

    def schedule(Q, taken, options):
        return Schedule(index_tile(first, words), row_tiles(Q.shape, options), taken)

    return schedule


@device_function
def is_valid(schedule, stage):
    """Whether there is a work tile in this slot of Q, or the block is done."""
    return schedule.words[WORK_WORDS * stage] < schedule.tiles


@device_function
def begin(schedule, slot, n):
    """Whether work tile number n exists: the slot's readers see the number."""
    schedule.words[WORK_WORDS * slot.stage] = n
    return n < schedule.tiles


@part
def make_work_tile(spec):
    """``work_tile(n, Q, K, options)``: work tile number n."""
    tile_of, row_tile = _make_tile_of(spec), _make_row_tile(spec)

    def work_tile(n, Q, K, options):
        tile, split = tile_of(n, options)
        i0, h, b = row_tile(tile, Q.shape, K.shape, options)
        return WorkTile(i0, h, b, split)

    return work_tile


@part
def make_write_work_tile(spec):
    """``write_work_tile(schedule, slot, work)``: the work tile, for the slot's readers, behind
    its number.
    """
    splits = spec.features.splits

    def write_work_tile(schedule, slot, work):
        words, at = schedule.words, uint32(WORK_WORDS * slot.stage)
        words[uint32(at + 1)] = work.i0
        words[uint32(at + 2)] = work.h
        if splits:
            words[uint32(at + 3)] = uint32(work.b | work.split << uint32(ENTRY_BITS))
        else:
            words[uint32(at + 3)] = work.b

    return write_work_tile


@part
def make_read_work_tile(spec):
    """``read_work_tile(schedule, stage)``: the slot's work tile."""
    splits, entries = spec.features.splits, 2**ENTRY_BITS - 1

    def read_work_tile(schedule, stage):
        words, at = schedule.words, uint32(WORK_WORDS * stage)
        i0, h, b = words[uint32(at + 1)], words[uint32(at + 2)], words[uint32(at + 3)]
        if splits:
            entry = uint32(b & uint32(entries))
            return WorkTile(i0, h, entry, uint32(b >> uint32(ENTRY_BITS)))
        return WorkTile(i0, h, b, uint32(0))

    return read_work_tile


@part
def make_next_number(spec):
    """``next_number(schedule, n)``: the number of this block's work tile after number n."""
    counts = spec.counts_tiles

    def following(schedule, n):
        if counts:
            taken = cuda.atomic.add(schedule.taken, 0, 1)
            return uint32(uint32(cuda.gridDim.x) + uint32(taken))
        return uint32(n + uint32(cuda.gridDim.x))

    return following


@part
def make_columns_of(spec):
    """``columns_of(work, Q, K, options)``: Nq and Nk of a work tile's sequence, the first column
    tile of its share of the columns, and one past the share's last column.
    """
    lengths, column_range = make_lengths(spec), make_column_range(spec)
    share_of_columns, rows = make_share_of_columns(spec), spec.head_rows
    next_column = make_next_column(spec)

    def columns_of(work, Q, K, options):
        Nq, Nk = lengths(Q.shape[2], K.shape[2], work.b, options)
        head = Head(work.b, work.h, work.h, Nq, Nk, options)
        j0, j_end = column_range(work.i0, uint32(work.i0 + rows), head)
        j0, j_end = share_of_columns(j0, j_end, work.split, work.i0, head)
        return Nq, Nk, next_column(j0, j_end, work.i0, head), j_end

    return columns_of


@part
def make_look_ahead(spec):
    """``look_ahead(j0, j_end, i0, head)``: what ``step`` makes the next column tile of: that tile
    where it is read from memory, before anybody waits for it; else this one.
    """
    Bc, sparse, next_column = spec.Bc, spec.features.sparse, make_next_column(spec)

    def look_ahead(j0, j_end, i0, head):
        if sparse:
            return next_column(uint32(j0 + Bc), j_end, i0, head)
        return j0

    return look_ahead


@part
def make_step(spec):
    """``step(ahead)``: the column tile after the one that ``look_ahead`` was asked for."""
    Bc, sparse = spec.Bc, spec.features.sparse

    def step(ahead):
        if sparse:
            return ahead
        return uint32(ahead + Bc)

    return step


@part
def make_is_long(spec):
    """``is_long(j0, j_end, i0, head)``: whether it is too early to take the next work tile: whether
    a column tile is visited so far behind this one.
    """
    soon = LAST_TILES * spec.Bc if spec.takes_late else 1 << 31  # beyond all columns: never
    next_column = make_next_column(spec)

    def is_long(j0, j_end, i0, head):
        return next_column(uint32(j0 + soon), j_end, i0, head) < j_end

    return is_long


@part
def make_key_head_of(spec):
    """``key_head_of(work, group)``: the K/V head of a work tile's query head, or group of them."""
    by_group = spec.by_group

    def key_head_of(work, group):
        return work.h // uint32(group) if by_group else work.h

    return key_head_of


@part
def _make_row_tiles(spec):
    """``row_tiles(shape, options)``: how many row tiles a Q of this shape has in all, each as often
    as its columns are split.
    """
    head_tiles, of_tile, splits = _make_head_tiles(spec), spec.tile_heads, spec.features.splits

    def row_tiles(shape, options):
        batch, heads = uint32(shape[0]), uint32(shape[1])
        if of_tile > 1:
            heads = uint32(heads // uint32(of_tile))
        tiles = uint32(head_tiles(uint32(shape[2]), options) * heads * batch)
        if splits:
            return uint32(tiles * uint32(options.kv_splits))
        return tiles

    return row_tiles


@part
def _make_tile_of(spec):
    """``tile_of(n, options)``: the row tile of a block's n-th piece of work, and which share of its
    columns that is.
    """
    splits = spec.features.splits

    def tile_of(n, options):
        if splits:
            shares = uint32(options.kv_splits)
            return uint32(n // shares), uint32(n % shares)
        return n, uint32(0)

    return tile_of


@part
def _make_head_tiles(spec):
    """``head_tiles(rows, options)``: those of a head. Of packed sequences one may be empty: a
    sequence that begins within tile t of all rows, cut without regard to sequences, has t + (its
    number) before it, so that nobody counts the tiles of those before.
    """
    rows_of_tile, packed = spec.head_rows, spec.features.packed

    def head_tiles(rows, options):
        if packed:
            sequences = uint32(options.q_starts.shape[0] - 1)
            return uint32(rows // uint32(rows_of_tile) + sequences)
        return uint32((rows + (rows_of_tile - 1)) // uint32(rows_of_tile))

    return head_tiles


@part
def sequence_tile_of(rows_of_tile, keys=False):
    """``sequence_tile(i, options)``: the first row, and the sequence, of a head's tile i of so many
    rows of Q, or with ``keys`` of K.
    """

    @device_function
    def starts_of(options):
        if keys:
            return options.k_starts
        return options.q_starts

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


@part
def _make_row_tile(spec):
    """``row_tile(n, q_shape, k_shape, options)``: the first row, head and batch entry of row tile
    number n. Where heads share a tile, the group of heads.

    Heads whose K and V lie in the L2 cache together go side by side, the row tiles with most
    columns first: a shorter tail.
    """
    rows_of_tile, of_tile, pair_bytes = (
        spec.head_rows,
        spec.tile_heads,
        2 * (spec.head_dim + spec.d_v),
    )
    head_tiles, packed = _make_head_tiles(spec), spec.features.packed
    sequence_tile, page_size = sequence_tile_of(rows_of_tile), spec.features.page_size

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
