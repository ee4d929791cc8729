"""The tile scheduler of FlashAttention-2's forward kernel: which work tiles a block takes in turn.
A work tile is a row tile of Q, or of a row tile a share of its columns (``kv_splits``).
"""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.shared import index_tile
from fa_numba.parts.grid import make_lengths
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Head, Schedule, Slot, Tile, WorkTile
from fa_numba.parts.visits import make_column_range, make_share_of_columns
from fa_numba.parts.visits import make_next_column as make_next_column
from fa_numba.parts.wgmma.listed import make_read_word, make_word
from fa_numba.parts.wgmma.load import make_produces_k
from fa_numba.parts.wgmma.pipeline import make_acquire, make_commit, make_release_alone, make_wait
from fa_numba.tiling.wgmma import WORK_WORDS

# Low bits of a word that name a batch entry, of fewer than 2^16; those above name a split.
ENTRY_BITS = 16
# Bytes of K and V that heads computed side by side may have, so that the L2 cache serves them.
TOGETHER = 16 << 20
# A block takes its next work tile when at most so many column tiles of the last one taken are left:
# soon enough for Q to come in time, late enough that the last work tiles go to blocks without work.
LAST_TILES = 8


@part
def make_schedule(spec):
    """``schedule(Q, K, taken, group, options)``: where a block's work tiles are written, how many
    there are in all, and the counter ``taken`` of those given out after each block's first.
    """
    first, words, row_tiles = spec.first_index, spec.index_words, _make_row_tiles(spec)

    def schedule(Q, K, taken, group, options):
        tiles = row_tiles(Q.shape, options)
        return Schedule(index_tile(first, words), tiles, taken, Q, K, group, options)

    return schedule


@device_function
def is_valid(schedule, stage):
    """Whether this slot of Q has a work tile; if not, the block is done."""
    return schedule.words[WORK_WORDS * stage] < schedule.tiles


@part
def make_announce(spec):
    """``announce(schedule, bars, slot, n)``: writes n to the slot, once that is empty, and gives
    whether a work tile has this number. If none has, the slot is full: its readers end.
    """
    (q, _, _, work, _), WORDS = spec.pipelines, WORK_WORDS
    acquire, commit_q, commit_work = make_acquire(q), make_commit(q), make_commit(work)

    def announce(schedule, bars, slot, n):
        acquire(bars, slot)
        schedule.words[WORDS * slot.stage] = n
        more = n < schedule.tiles
        if not more:
            commit_work(bars, slot)
            commit_q(bars, slot)
        return more

    return announce


@part
def make_give(spec):
    """``give(schedule, bars, slot, n)``: writes work tile number n for the slot's readers, and
    gives ``columns_of`` it.
    """
    tile_of, row_tile, columns_of = _make_tile_of(spec), _make_row_tile(spec), make_columns_of(spec)
    write_work_tile, commit = _make_write_work_tile(spec), make_commit(spec.pipelines.work)

    def give(schedule, bars, slot, n):
        tile, split = tile_of(n, schedule.options)
        i0, h, b = row_tile(tile, schedule.Q.shape, schedule.K.shape, schedule.options)
        work = WorkTile(i0, h, b, split)
        write_work_tile(schedule, slot, work)
        commit(bars, slot)
        return columns_of(schedule, work)

    return give


@part
def _make_write_work_tile(spec):
    """``write_work_tile(schedule, slot, work)``: the work tile to the words of the slot, behind
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


@cache
def make_has_work(spec):
    """``has_work(schedule, bars, slot)``: whether this slot has a work tile (``is_valid``), once
    its Q is there too.
    """
    return _make_is_given(spec.pipelines.q)


@cache
def make_has_columns(spec):
    """``has_columns(schedule, bars, slot)``: ``has_work`` without Q, to load K and V."""
    return _make_is_given(spec.pipelines.work)


@part
def _make_is_given(facts):
    wait = make_wait(facts)

    def is_given(schedule, bars, slot):
        wait(bars, slot)
        return is_valid(schedule, slot.stage)

    return is_given


@part
def make_take_columns(spec):
    """``take_columns(schedule, bars, slot)``: ``columns_of`` the work tile; releases the slot."""
    read_work_tile, columns_of = make_read_work_tile(spec), make_columns_of(spec)
    release_alone = make_release_alone(spec.pipelines.q)

    def take_columns(schedule, bars, slot):
        work = read_work_tile(schedule, slot.stage)
        release_alone(bars, slot)
        return columns_of(schedule, work)

    return take_columns


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
    """``columns_of(schedule, work)``: a work tile's first row, its head, the first column tile of
    its share of the columns, and one past the share's last column.
    """
    lengths, column_range = make_lengths(spec), make_column_range(spec)
    share_of_columns, rows = make_share_of_columns(spec), spec.head_rows
    next_column, by_group = make_next_column(spec), spec.by_group

    def columns_of(schedule, work):
        Q, K, group, options = schedule.Q, schedule.K, schedule.group, schedule.options
        hk = work.h // uint32(group) if by_group else work.h
        Nq, Nk = lengths(Q.shape[2], K.shape[2], work.b, options)
        head = Head(work.b, work.h, hk, Nq, Nk, options)
        j0, j_end = column_range(work.i0, uint32(work.i0 + rows), head)
        j0, j_end = share_of_columns(j0, j_end, work.split, work.i0, head)
        return work.i0, head, next_column(j0, j_end, work.i0, head), j_end

    return columns_of


@part
def make_take(spec):
    """``take(schedule, stage)``: a slot's work tile, Nq and Nk, the first column tile and the end
    of ``columns_of`` it, and its K/V head: plain numbers, which a consumer's loops carry.
    """
    read_work_tile, columns_of = make_read_work_tile(spec), make_columns_of(spec)

    def take(schedule, stage):
        work = read_work_tile(schedule, stage)
        _, head, j0, j_end = columns_of(schedule, work)
        return work, head.Nq, head.Nk, j0, j_end, head.hk

    return take


@part
def make_begins_next(spec):
    """``begins_next(schedule, bars, slot)``: whether ``pingpong.begin_last`` is to begin the first
    S of the next work tile, which is in this slot: the spec does so, and it has columns.
    """
    ahead, columns_of = spec.begins_next, make_columns_of(spec)
    wait, read_work_tile = make_wait(spec.pipelines.q), make_read_work_tile(spec)

    def begins_next(schedule, bars, slot):
        more = ahead
        if ahead:
            wait(bars, slot)
            more = is_valid(schedule, slot.stage)
            if more:
                work = read_work_tile(schedule, slot.stage)
                _, _, j0, j_end = columns_of(schedule, work)
                more = j0 < j_end
        return more

    return begins_next


@part
def make_name_next(spec):
    """``name_next(schedule, bars, slot, j0, j_end, i0, head)``: with a block mask who loads Kj
    writes, to the word of its slot, the column tile after it and the state of its own block.
    """
    Bc, named, first = spec.Bc, spec.slots_name_next, WORK_WORDS * spec.q_stages
    next_column, word = make_next_column(spec), make_word(spec)
    acquire = make_acquire(spec.pipelines.k)
    produces_k = make_produces_k(spec)

    def name_next(schedule, bars, slot, j0, j_end, i0, head):
        if named and produces_k():
            j_next = next_column(uint32(j0 + Bc), j_end, i0, head)
            following = word(j_next, Tile(i0, j0, head, uint32(0)))
            acquire(bars, slot)
            schedule.words[uint32(first + slot.stage)] = following

    return name_next


@part
def make_look_ahead(spec):
    """``look_ahead(rBS, schedule, stage, j0)``: for ``step`` the column tile after the one at j0,
    where K's slot names it, and in rBS the state of that at j0; else j0.
    """
    named, first, read = spec.slots_name_next, WORK_WORDS * spec.q_stages, make_read_word(spec)

    def look_ahead(rBS, schedule, stage, j0):
        if named:
            return read(rBS, schedule.words, uint32(first + stage))
        return j0

    return look_ahead


@part
def make_step(spec):
    """``step(ahead)``: the next column tile, of what ``look_ahead`` gave."""
    Bc, named = spec.Bc, spec.slots_name_next

    def step(ahead):
        if named:
            return ahead
        return uint32(ahead + Bc)

    return step


@part
def make_is_long(spec):
    """``is_long(j0, j_end, i0, head)``: whether it is too early to take the next work tile: whether
    a column tile LAST_TILES or more behind the one at j0 is visited.
    """
    soon = LAST_TILES * spec.Bc if spec.takes_late else 1 << 31  # beyond all columns: never
    next_column = make_next_column(spec)

    def is_long(j0, j_end, i0, head):
        return next_column(uint32(j0 + soon), j_end, i0, head) < j_end

    return is_long


@part
def make_wait_late(spec):
    """``wait_late(bars, late, j0, j_end, i0, head)``: who loads Q waits until it is time to take
    the next work tile, in phase ``late``; gives the phase of the next such wait.
    """
    is_long, wait = make_is_long(spec), make_wait(spec.pipelines.late)

    def wait_late(bars, late, j0, j_end, i0, head):
        if is_long(j0, j_end, i0, head):
            wait(bars, Slot(uint32(0), late))
            late = uint32(late ^ 1)
        return late

    return wait_late


@part
def make_commit_late(spec):
    """``commit_late(bars, waits, j0, j_end, i0, head)``: who loads K ends ``wait_late``, if that
    still ``waits``, once the column tile at j0 is late enough; gives whether it waits on.
    """
    is_long, commit = make_is_long(spec), make_commit(spec.pipelines.late)

    def commit_late(bars, waits, j0, j_end, i0, head):
        if waits and not is_long(j0, j_end, i0, head):
            commit(bars, Slot(uint32(0), uint32(0)))
            waits = False
        return waits

    return commit_late


@part
def make_commit_at_last(spec):
    """``commit_at_last(bars, waits)``: ends ``wait_late`` behind the last tile of a block mask."""
    sparse, commit = spec.features.sparse, make_commit(spec.pipelines.late)

    def commit_at_last(bars, waits):
        if sparse and waits:
            commit(bars, Slot(uint32(0), uint32(0)))

    return commit_at_last


@part
def _make_row_tiles(spec):
    """``row_tiles(shape, options)``: how many work tiles a Q of this shape has in all: row tiles,
    each as often as its columns are split.
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
    """``tile_of(n, options)``: the number of the row tile that work tile n is of, and which share
    of its columns that is.
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
    """``head_tiles(rows, options)``: row tiles of a head. Packed sequence number b has its first at
    t + b, where row tile t of all rows, cut without regard to sequences, is the one that it begins
    in: nobody counts the tiles before. The last tile of each may be empty.
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
    number n; where heads share a tile, for the head the number of their group.

    As many heads as have K and V in the L2 cache together (TOGETHER) go side by side, of these the
    row tiles with most columns first: a shorter tail.
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
        together = uint32(min(fit, all_heads))  # together * Tr stays within 32 bits
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
