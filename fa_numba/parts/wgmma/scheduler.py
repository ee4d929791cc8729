"""The tile scheduler of FlashAttention-2's forward kernel on Hopper: it decides which work tiles a
thread block computes.

A work tile is a row tile of Q. With ``kv_splits``, it is one key split of a row tile. A persistent
thread block computes several work tiles. The thread that loads Q is called the loader of Q. It
chooses the next work tile and writes it to shared memory, next to the slot of Q. The loader of K
and V and the consumers read it there.

Arguments that recur: ``schedule`` is the ``Schedule`` record of the block. ``slot`` is a slot of Q
unless a docstring says otherwise. ``stage`` is the number of a slot.
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

# The low bits of a word that contain the batch entry, below 2^16. The bits above contain the split.
ENTRY_BITS = 16
# The largest size of K and V, in bytes, of heads that are computed at the same time, so that L2
# can hold them.
TOGETHER = 16 << 20
# A block takes its next work tile when at most this number of column tiles of the current one is
# left. This is early enough to load Q in time. It is late enough that the last work tiles go to
# blocks that have no work.
LAST_TILES = 8


@part
def make_schedule(spec):
    """Make ``schedule(Q, K, taken, group, options)``, which returns the block's ``Schedule``
    record.

    ``taken`` is a counter in global memory. It counts the work tiles that blocks have taken, except
    the first work tile of each block. ``group`` is the number of query heads per K/V head.
    """
    first, words, row_tiles = spec.first_index, spec.index_words, _make_row_tiles(spec)

    def schedule(Q, K, taken, group, options):
        tiles = row_tiles(Q.shape, options)
        return Schedule(index_tile(first, words), tiles, taken, Q, K, group, options)

    return schedule


@device_function
def is_valid(schedule, stage):
    """Return whether the slot of Q with the number ``stage`` contains a work tile.

    If it does not, the block has finished its work.
    """
    return schedule.words[WORK_WORDS * stage] < schedule.tiles


@part
def make_announce(spec):
    """Make ``announce(schedule, bars, slot, n)``, by which the loader of Q writes the number n of a
    work tile to a slot.

    The function first waits until the slot is empty. It returns whether the launch has a work tile
    number n. If there is no such work tile, the block has no work left. The function then marks the
    slot as full. The loader of K and V and the consumers read the slot and end.
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
    """Make ``give(schedule, bars, slot, n)``, by which the loader of Q writes the position of work
    tile number n to a slot.

    The function returns four values: the first row of the work tile, its ``Head``, the first
    visited column, and one past the last column.
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
    """Make ``write_work_tile(schedule, slot, work)``, which stores the ``WorkTile`` ``work`` in
    shared memory, in the words that belong to a slot of Q.

    The first word of a slot is the number of the work tile, which ``announce`` has stored. The
    function writes the words after it: the first row, the query head, and the batch entry together
    with the key split.
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
    """Make ``read_work_tile(schedule, stage)``, which returns the ``WorkTile`` of the slot number
    ``stage``.
    """
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
    """Make ``has_work(schedule, bars, slot)``, by which a consumer waits until Q is in the slot.

    The function returns whether the slot contains a work tile. If not, the block has finished its
    work. A block without a producer warpgroup has one work tile, in the first slot.
    """
    return (_make_is_given if spec.specialised else _make_is_first)(spec.pipelines.q)


@cache
def make_has_columns(spec):
    """Make ``has_columns(schedule, bars, slot)``, by which the loader of K and V waits until a work
    tile has been written to the slot.

    The function does not wait until Q is in the slot. It returns whether the slot contains a work
    tile. If not, the block has finished its work.
    """
    return _make_is_given(spec.pipelines.work)


@part
def _make_is_given(facts):
    """Make ``is_given(schedule, bars, slot)``, which waits until a slot is full, and returns
    whether the slot contains a work tile.

    ``facts`` is the pipeline whose barrier the function waits at.
    """
    wait = make_wait(facts)

    def is_given(schedule, bars, slot):
        wait(bars, slot)
        return is_valid(schedule, slot.stage)

    return is_given


@part
def _make_is_first(facts):
    """Make ``is_first(schedule, bars, slot)``, which waits until the first slot is full and returns
    whether it contains a work tile.

    The result is false for all slots after the first one. ``facts`` is the pipeline of ``slot``.
    """
    is_given = _make_is_given(facts)

    def is_first(schedule, bars, slot):
        if slot.stage == uint32(0) and slot.phase == uint32(0):
            return is_given(schedule, bars, slot)
        return False

    return is_first


@part
def make_take_columns(spec):
    """Make ``take_columns(schedule, bars, slot)``, by which the loader of K and V reads the work
    tile of a slot, and then says that it has read the slot.

    The function returns four values: the first row of the work tile, its ``Head``, the first
    visited column, and one past the last column.
    """
    read_work_tile, columns_of = make_read_work_tile(spec), make_columns_of(spec)
    release_alone = make_release_alone(spec.pipelines.q)

    def take_columns(schedule, bars, slot):
        work = read_work_tile(schedule, slot.stage)
        release_alone(bars, slot)
        return columns_of(schedule, work)

    return take_columns


@part
def make_next_number(spec):
    """Make ``next_number(schedule, n)``, which returns the number of the work tile that this block
    computes after work tile number n.

    Normally the number comes from the counter in global memory. If the measure "counter" is
    switched off, it is n plus the number of blocks.
    """
    counts = spec.counts_tiles

    def following(schedule, n):
        if counts:
            taken = cuda.atomic.add(schedule.taken, 0, 1)
            return uint32(uint32(cuda.gridDim.x) + uint32(taken))
        return uint32(n + uint32(cuda.gridDim.x))

    return following


@part
def make_columns_of(spec):
    """Make ``columns_of(schedule, work)``, which returns the rows and columns of S that a work tile
    visits.

    ``work`` is a ``WorkTile``. The result has four values: the first row of the work tile, its
    ``Head``, the first visited column, and one past the last column. With key splits, the columns
    are only those of the work tile's split.
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
    """Make ``take(schedule, stage)``, by which a consumer reads the work tile of the slot number
    ``stage``.

    The result has six values: the ``WorkTile``, Nq, Nk, the first visited column, one past the last
    column, and the number of the K/V head. The function does not return a ``Head``, because the
    consumer's loop carries these values, and a record would take more registers.
    """
    read_work_tile, columns_of = make_read_work_tile(spec), make_columns_of(spec)

    def take(schedule, stage):
        work = read_work_tile(schedule, stage)
        _, head, j0, j_end = columns_of(schedule, work)
        return work, head.Nq, head.Nk, j0, j_end, head.hk

    return take


@part
def make_begins_next(spec):
    """Make ``begins_next(schedule, bars, slot)``, which says whether the first S of the next work
    tile may begin together with the last P V of the current work tile.

    The function waits until Q of the next work tile is in ``slot``. The result is true if there is
    a next work tile, and if it visits a column tile. The consumer then calls
    ``pingpong.begin_last``. If ``spec.begins_next`` is false, the function does not wait, and the
    result is false.
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
    """Make ``name_next(schedule, bars, slot, j0, j_end, i0, head)``, by which the loader of K tells
    the consumers which column tile comes after column tile j0.

    Without a block mask, the function does nothing, because consumers add Bc to j0 themselves. With
    a block mask, it waits until ``slot``, the slot of K for column tile j0, is empty. Then it
    stores the first column of the next column tile in shared memory, next to this slot. Consumers
    read this number with ``look_ahead``. With ``spec.reads_state``, the upper bits of the number
    contain the state of tile (i0, j0) in the block mask (``listed.make_word``).
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
    """Make ``look_ahead(rBS, schedule, stage, j0)``, by which a consumer finds the column tile that
    comes after column tile j0.

    With a block mask, the loader of K has stored the first column of the next column tile in shared
    memory (``name_next``). The function reads this number for slot number ``stage`` of K, and
    returns it. With ``spec.reads_state``, the function also sets ``rBS[0]`` to the state of the
    current tile in the block mask: EMPTY, MIXED or FULL of ``mods.blocks``.

    Without a block mask, the function returns j0, and ``step`` later adds Bc.
    """
    named, first, read = spec.slots_name_next, WORK_WORDS * spec.q_stages, make_read_word(spec)

    def look_ahead(rBS, schedule, stage, j0):
        if named:
            return read(rBS, schedule.words, uint32(first + stage))
        return j0

    return look_ahead


@part
def make_step(spec):
    """Make ``step(ahead)``, which returns the first column of the next column tile.

    ``ahead`` is the result of ``look_ahead``. With a block mask, it already is the first column of
    the next column tile. Otherwise it is the first column of the current column tile, and the
    function adds Bc.
    """
    Bc, named = spec.Bc, spec.slots_name_next

    def step(ahead):
        if named:
            return ahead
        return uint32(ahead + Bc)

    return step


@part
def make_is_long(spec):
    """Make ``is_long(j0, j_end, i0, head)``, which says whether the block still has much work left
    in its current work tile.

    The block takes its next work tile only when little work is left. The result is true if row tile
    i0 still visits a column tile that is LAST_TILES or more tiles after column tile j0. If the
    measure "late" is switched off, the result is always false, so that the block takes the next
    work tile early.
    """
    soon = LAST_TILES * spec.Bc if spec.takes_late else 1 << 31  # beyond all columns: false
    next_column = make_next_column(spec)

    def is_long(j0, j_end, i0, head):
        return next_column(uint32(j0 + soon), j_end, i0, head) < j_end

    return is_long


@part
def make_wait_late(spec):
    """Make ``wait_late(bars, late, j0, j_end, i0, head)``, by which the loader of Q waits before it
    takes the next work tile.

    If the work tile is long (``is_long``), the loader of Q waits at a barrier until the loader of K
    calls ``commit_late``. Otherwise it does not wait. ``late`` is the phase of the barrier. The
    function returns the phase for the next wait.
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
    """Make ``commit_late(bars, waits, j0, j_end, i0, head)``, by which the loader of K ends the
    wait of the loader of Q (``wait_late``).

    The loader of K calls the function for each column tile j0. ``waits`` says whether the loader of
    Q still waits. The function ends the wait when few column tiles come after column tile j0
    (``is_long``). It returns whether the loader of Q still waits after this call.
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
    """Make ``commit_at_last(bars, waits)``, by which the loader of K ends a wait of the loader of Q
    (``wait_late``) after the last column tile.

    ``waits`` says whether the loader of Q still waits. It is the result of the last
    ``commit_late``. Without a block mask, the wait has always ended before, and the function does
    nothing.
    """
    sparse, commit = spec.features.sparse, make_commit(spec.pipelines.late)

    def commit_at_last(bars, waits):
        if sparse and waits:
            commit(bars, Slot(uint32(0), uint32(0)))

    return commit_at_last


@part
def _make_row_tiles(spec):
    """Make ``row_tiles(shape, options)``, which returns the number of work tiles of a launch: the
    row tiles of all heads, times the number of key splits.

    ``shape`` is the shape of the array Q.
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
    """Make ``tile_of(n, options)``, which returns the row tile and the key split of work tile
    number n.
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
    """Make ``head_tiles(rows, options)``, which returns the number of row tiles of a head.

    Normally ``rows`` is the number of rows of the head, and the result is exact.

    For packed sequences, ``rows`` is the number of rows of all sequences together. The result is an
    upper bound, and some row tiles are empty. Packed sequence number b begins with row tile number
    t + b, where t is the sequence's first row divided by the rows of a tile, rounded down. With
    this rule, no thread has to count the tiles of earlier sequences.
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
    """Make ``sequence_tile(i, options)``, which finds the sequence that contains row tile number i
    of packed sequences.

    The result is the first row of the tile, counted within its sequence, and the number of the
    sequence. A tile has ``rows_of_tile`` rows. If ``keys`` is true, the tiles are column tiles of K
    instead. ``_make_head_tiles`` explains how tiles are numbered.
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
    """Make ``row_tile(n, q_shape, k_shape, options)``, which returns the position of row tile
    number n.

    The result is the first row, the head and the batch entry. If several heads share a tile, the
    head is the number of their group. ``q_shape`` and ``k_shape`` are the shapes of the arrays Q
    and K.

    Row tiles have numbers in the order in which blocks compute them. The order has two aims:

    - K and V should remain in L2. The heads of all batch entries are therefore divided into sets. K
      and V of a set have at most TOGETHER bytes, or a set is a single head. All row tiles of one
      set come before the row tiles of the next set.
    - The last work tiles should be short. In each set, the last rows of the heads therefore come
      first, because with a causal mask they have the most columns. Consecutive numbers belong to
      different heads.
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
