"""The state that FlashAttention-1 passes through global memory on Hopper: O, l and m of a row tile.

A pass is one step of the outer loop over column tiles. Two arrays in global memory store O. Between
the passes, O is in the float32 array ``A`` of the workspace. The last pass of a row tile rounds O
to 16 bits and writes it to the output ``O``. The copy engine (TMA) copies O between global memory
and slots in shared memory. For l and m of a row, the same thread reads and writes them in every
pass.

Kernels that work with planes have a float32 output. They do not use ``A``, and store O in the
output between the passes, too. The same thread reads and writes an element of O in every pass.
"""

from fa_numba.device import device_function, float32, uint32
from fa_numba.intrinsics.bulk_copy import (
    commit_boxes,
    fence_async_proxy,
    store_box,
    wait_boxes,
    wait_boxes_read,
)
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, wait_mbarrier
from fa_numba.intrinsics.shared import load_pair, store_pair
from fa_numba.parts.fa1_state import make_write_logsumexp as make_write_logsumexp
from fa_numba.parts.fragments.rows import make_read_fragments, make_write_fragments
from fa_numba.parts.fragments.value_scales import make_enter_unit as make_enter_unit
from fa_numba.parts.grid import make_head, make_query_rows
from fa_numba.parts.namespace import part
from fa_numba.parts.records import BlockOut, BlockRows, Tile
from fa_numba.parts.softmax import (
    make_normalise_rows,
    make_scale_rows,
    make_start,
    make_take_sinks,
)
from fa_numba.parts.values import make_read, make_read_maxima, make_write
from fa_numba.parts.visits import (
    make_column_passes,
    make_is_unseen,
    make_own_rows,
    make_row_ahead,
    make_row_starts,
    make_sees_more,
    more_by,
    next_by,
)
from fa_numba.parts.wgmma.epilogue import make_rows_of, make_write_tile
from fa_numba.parts.wgmma.listed import make_read_word, make_word
from fa_numba.parts.wgmma.load import make_own_tile, whole_box
from fa_numba.parts.wgmma.pingpong import make_sync_group
from fa_numba.parts.wgmma.pipeline import (
    make_acquire,
    make_commit,
    make_own,
    make_release,
    make_release_by,
    make_wait,
)
from fa_numba.parts.wgmma.planes import make_write_floats
from fa_numba.parts.wgmma.products import make_unscale_output
from fa_numba.tiling.wgmma import GROUP_ROWS
from fa_numba.tiling.wgmma_fa1 import FLOAT_PANEL


@part
def make_block_rows(spec):
    """Make ``block_rows(Q, K, group, split_rows, options)``, which returns the head and the rows
    that this thread block computes, as a ``BlockRows`` record.

    With query splits, a block has ``split_rows`` rows. Otherwise it has all rows of the head.
    """
    head_of, own_rows, rows_of = make_head(spec), make_own_rows(spec), make_rows_of(spec)

    def block_rows(Q, K, group, split_rows, options):
        head = head_of(Q, K, group, options)
        i_first, i_last = own_rows(split_rows, rows_of(Q.shape[2], head))
        return BlockRows(head, i_first, i_last)

    return block_rows


@part
def make_out(spec):
    """Make ``out(O, A, L, l, m, block_rows)``, which returns the arrays that this block writes.

    The result is a ``BlockOut`` record, with l and m of the block's head. ``block_rows`` is the
    ``BlockRows`` record of the block.
    """
    query_rows = make_query_rows(spec)

    def out(O, A, L, l, m, block_rows):
        head, _, i_last = block_rows
        return BlockOut(O, A, L, query_rows(l, head), query_rows(m, head), i_last)

    return out


@part
def make_passes(spec):
    """Make ``passes(block_rows)``, which returns the ranges of columns and rows of FA-1's two loops
    in this block.

    ``block_rows`` is the ``BlockRows`` record of the block. The result has five values:

    1. the ``Head`` of the block,
    2. the first column of the first column tile,
    3. one past the last column,
    4. the block's first row,
    5. one past the block's last valid row.
    """
    column_passes = make_column_passes(spec)

    def passes(block_rows):
        head, i_first, i_last = block_rows
        j0, j_end = column_passes(i_first, i_last, head)
        return head, j0, j_end, i_first, uint32(min(i_last, head.Nq))

    return passes


@part
def make_load_output(spec):
    """Make ``load_output(shared, A, i0, starts, head, slot, w, written_phase)``, which starts to
    load the rows of Oi that belong to consumer ``w`` from A into the consumer's part of a slot.

    A is the float32 array that stores O between the passes. The function first waits for two
    events: the consumer's part of the slot is empty, and the consumer has written its rows of O in
    the pass before. ``written_phase`` is the phase of the barrier for the second event.

    ``starts`` is the result of ``name_own_next``. If it is true, O of the row tile has not been
    written to A yet. The function then loads nothing and marks the consumer's part as full. In
    kernels that work with planes, the function does nothing, because ``read_output`` reads O.
    """
    (_, _, _, o, written), ROWS = spec.pipelines, GROUP_ROWS
    boxes = spec.Br, spec.float_panels, FLOAT_PANEL, spec.tile_floats
    load, acquire, commit = make_own_tile(*boxes, o, whole_box), make_acquire(o), make_commit(o)
    own_of, first_written, in_place = make_own(o), written.full, spec.planes > 1

    def load_output(shared, A, i0, starts, head, slot, w, written_phase):
        bars = shared.bars
        if not in_place:
            acquire(bars, own_of(slot, w))
            wait_mbarrier(bars, uint32(first_written + w), written_phase)
            if not starts:
                load(shared.sO, A, uint32(i0 + ROWS * w), head, bars, slot, w)
            else:
                commit(bars, own_of(slot, w))

    return load_output


@part
def make_name_own_next(spec):
    """Make ``name_own_next(shared, i0, i_end, j0, head, slot, w)``, by which the loader of Q tells
    consumer w which row tile comes after row tile i0.

    The function returns whether global memory contains no O, l and m of row tile i0 yet
    (``visits.make_row_starts``).

    Without a block mask, the function does nothing else, because consumers add Br to i0 themselves.
    With a block mask, the loader waits until the consumer's part of the slot is empty. It then
    stores a 32-bit integer for the consumer in shared memory. ``listed.make_word`` describes the
    integer: it contains the first row of the next row tile.
    """
    named, word, GROUPS = spec.slots_name_next, make_word(spec), spec.consumers
    row_ahead, row_starts, q = make_row_ahead(spec), make_row_starts(spec), spec.pipelines.q
    own_of, acquire = make_own(q), make_acquire(q)

    def name_own_next(shared, i0, i_end, j0, head, slot, w):
        visit = row_ahead(i0, i_end, j0, head)
        if named:
            following = word(visit, Tile(i0, j0, head, w))
            acquire(shared.bars, own_of(slot, w))
            shared.words[uint32(slot.stage * GROUPS + w)] = following
        return row_starts(visit, j0)

    return name_own_next


@part
def make_own_ahead(spec):
    """Make ``own_ahead(i0, i_end, j0, head)``, by which a consumer computes what comes after row
    tile i0, if there is no block mask.

    The result is the first row of the next row tile, and whether row tile i0 visits a column tile
    after j0. With a block mask, a consumer reads both facts from shared memory (``read_named``),
    and the result of ``own_ahead`` is not used.
    """
    Br, named, sees_more = spec.Br, spec.slots_name_next, make_sees_more(spec)

    def own_ahead(i0, i_end, j0, head):
        if named:
            return i_end, True
        return uint32(i0 + Br), sees_more(i0, j0, head)

    return own_ahead


@part
def make_read_named(spec):
    """Make ``read_named(rBS, shared, slot, w, ahead)``, by which consumer w gets three values about
    the current visit.

    1. ``visit``: the integer that ``visits.row_starts`` takes. It is used only with a block mask.
    2. The first row of the next row tile.
    3. Whether the current row tile visits a later column tile.

    Without a block mask, the second and third value are ``ahead``, the result of ``own_ahead``.
    With a block mask, all values come from the integer that ``name_own_next`` has stored in shared
    memory. With ``spec.reads_state``, the function also sets ``rBS[0]`` to the state of the tile in
    the block mask: EMPTY, MIXED or FULL of ``mods.blocks``.
    """
    named, read, GROUPS = spec.slots_name_next, make_read_word(spec), spec.consumers

    def read_named(rBS, shared, slot, w, ahead):
        i_next, more = ahead
        if named:
            visit = read(rBS, shared.words, uint32(slot.stage * GROUPS + w))
            return visit, next_by(visit), more_by(visit)
        return i_next, i_next, more

    return read_named


@part
def make_read_statistics(spec):
    """Make ``read_statistics(rl, rm, out, visit, tile)``, which reads l and m of a row tile from
    global memory into registers.

    If l and m of the row tile have not been written yet, the function reads nothing. It then sets l
    = 0 and m = -inf. With a sink s, it sets l = 1 and m = s. ``visits.row_starts`` recognises this
    case. With a block mask, it needs ``visit`` for this, the first result of ``read_named``.
    """
    row_starts, take_sinks = make_row_starts(spec), make_take_sinks(spec)
    read_values, read_maxima = make_read(spec), make_read_maxima(spec)

    def read_statistics(rl, rm, out, visit, tile):
        seen = uint32(min(out.rows, tile.head.Nq))  # rows whose l and m some pass has written
        if row_starts(visit, tile.j0):
            seen = uint32(0)
        read_values(rl, out.l, tile.i0, seen, tile.thread)
        read_maxima(rm, out.m, tile.i0, seen, tile.thread)
        if row_starts(visit, tile.j0):
            take_sinks(rl, rm, tile, uint32(0))

    return read_statistics


@part
def make_take_output(spec):
    """Make ``take_output(rO, rf, shared, slot, visit, tile)``, which reads O from a slot in shared
    memory into rO, and multiplies each row by its factor in rf.

    The function first waits until this consumer's part of the slot is full. If O of the row tile
    has not been written to global memory yet, the slot contains no O, and rO is set to 0.
    ``visits.row_starts`` recognises this case. With a block mask, it needs ``visit`` for this, the
    first result of ``read_named``. In kernels that work with planes, the function does nothing,
    because ``read_output`` reads O.
    """
    if spec.planes > 1:
        return _no_output
    TM, DN4, STEP, NO = spec.TM, 4 * spec.DN, spec.row_step, spec.tile_floats
    row_starts, first_place = make_row_starts(spec), _make_first_place(spec)
    further = _make_further(spec)
    own_of, wait = make_own(spec.pipelines.o), make_wait(spec.pipelines.o)

    def take_output(rO, rf, shared, slot, visit, tile):
        wait(shared.bars, own_of(slot, tile.thread.w))
        if not row_starts(visit, tile.j0):
            first = first_place(uint32(slot.stage * NO), tile.thread)
            for i in range(TM):
                for n in range(DN4 // 2):
                    pair = load_pair(shared.sO, further(first, i * STEP, n))
                    rO[i * DN4 + 2 * n] = pair[0] * rf[i]
                    rO[i * DN4 + 2 * n + 1] = pair[1] * rf[i]
        else:
            for e in range(TM * DN4):
                rO[e] = float32(0.0)

    return take_output


@device_function
def _no_output(rO, rf, shared, slot, visit, tile):
    pass


@part
def make_read_output(spec):
    """Make ``read_output(rO, rf, out, visit, tile)``, which reads O from global memory into rO and
    multiplies each row by its factor in rf, in kernels that work with planes.

    This thread has written these elements of O in the pass before. If they have not been written
    yet, rO is set to 0 (``visits.row_starts``). The function may be called while the product P V is
    computed in other registers. In kernels without planes, it does nothing, because ``take_output``
    reads O.
    """
    row_starts, in_place = make_row_starts(spec), spec.planes > 1
    query_rows, read_fragments = make_query_rows(spec), make_read_fragments(spec)
    scale_rows = make_scale_rows(spec)

    def read_output(rO, rf, out, visit, tile):
        if in_place:
            seen = uint32(min(out.rows, tile.head.Nq))
            if row_starts(visit, tile.j0):
                seen = uint32(0)
            read_fragments(rO, query_rows(out.O, tile.head), tile.i0, seen, tile.thread)
            scale_rows(rO, rf)

    return read_output


@part
def _make_first_place(spec):
    """Make ``first_place(at, thread)``, which returns the index in shared memory at which a
    thread's part of a tile of O begins.

    The tile begins at element ``at``, and has the swizzle of the copy engine. The index is that of
    the first two columns in the thread's first row.
    """

    def first_place(at, thread):
        row = uint32(at + FLOAT_PANEL * (GROUP_ROWS * thread.w + thread.ty))
        return uint32(row + uint32(uint32(2 * thread.tx) ^ uint32(4 * (thread.ty % 8))))

    return first_place


@part
def _make_further(spec):
    """Make ``further(first, down, n)``, which returns the index of the element ``down`` rows below
    and 8 n columns to the right of the element at index ``first``.

    ``down`` must be a multiple of 8.
    """
    Br = spec.Br

    def further(first, down, n):
        return uint32(uint32(first ^ uint32(8 * (n % 4))) + FLOAT_PANEL * (down + Br * (n // 4)))

    return further


@part
def _make_write_sums(spec):
    """Make ``write_sums(rO, sO, at, A, row0, head, thread)``, which writes a consumer's rows of O
    to A, the float32 array that stores O between the passes.

    The rows are first stored in shared memory, in the consumer's rows of a slot that begins at
    element ``at`` of sO. The copy engine copies them from there to A. The consumer's first thread
    waits until the copy engine has read them.
    """
    TM, DN4, Br, STEP = spec.TM, 4 * spec.DN, spec.Br, spec.row_step
    panels, sync_group = spec.float_panels, make_sync_group(spec)
    first_place, further = _make_first_place(spec), _make_further(spec)

    def write_sums(rO, sO, at, A, row0, head, thread):
        first = first_place(at, thread)
        for i in range(TM):
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                store_pair(sO, further(first, i * STEP, n), rO[e], rO[e + 1])
        fence_async_proxy()
        sync_group(thread.w)
        if thread.ty == uint32(0) and thread.tx == uint32(0):
            own = uint32(at + FLOAT_PANEL * GROUP_ROWS * thread.w)
            for n in range(panels):
                place = uint32(own + FLOAT_PANEL * Br * n)
                store_box(A, head.b, head.h, row0, FLOAT_PANEL * n, sO, place)
            commit_boxes()
            wait_boxes_read()

    return write_sums


@part
def _make_write_result(spec):
    """Make ``write_result(rO, sQ, at, O, row0, head, thread)``, which writes a consumer's rows of O
    to the array O.

    Normally it is ``write_tile``, which rounds O to 16 bits. For e4m3 inputs, the array can be
    float32. The rows are then written from registers directly.
    """
    if not spec.stores_floats or spec.planes > 1:
        return make_write_tile(spec, whole_box)
    write_floats, sync_group = make_write_floats(spec), make_sync_group(spec)

    def write_result(rO, sQ, at, O, row0, head, thread):
        sync_group(thread.w)  # this warpgroup has read its slots
        write_floats(rO, O, row0, head, thread)

    return write_result


@part
def make_initialise(spec):
    """Make ``initialise(rO, rl, rm, shared, out, tile)``, which writes the first values of O, l and
    m to global memory, before the loops of the kernel begin.

    Normally the function does nothing, because the first pass over K/V writes O, l and m of all row
    tiles. With a window, ``q_lens`` or a block mask, the first pass can skip row tiles. The
    function then writes O = 0, l = 0 and m = -inf. With a sink s, it writes O = 0, l = 1 and m = s.

    - Without a block mask, the function writes these values for all row tiles of the block from row
      ``tile.i0`` on.
    - With a block mask, it writes them only for two kinds of row tiles: those that visit no column
      tile, and those with rows past ``q_lens``.

    Each consumer writes its own rows. O = 0 is written to the output ``out.O``. Without a block
    mask, it is also written to ``out.A``, the float32 array that stores O between the passes.
    Kernels that work with planes do not use ``out.A``.
    """
    Br, start, initialises = spec.Br, make_start(spec), spec.features.initialises
    write_tile, write_sums = _make_write_result(spec), _make_write_sums(spec)
    write_values, is_unseen, sparse = make_write(spec), make_is_unseen(spec), spec.features.sparse
    sync_group, ROWS = make_sync_group(spec), GROUP_ROWS
    query_rows, write_fragments = make_query_rows(spec), make_write_fragments(spec)
    in_place = spec.planes > 1

    def initialise(rO, rl, rm, shared, out, tile):
        rows_end, head, thread = out.rows, tile.head, tile.thread
        if initialises:
            i0 = tile.i0
            while i0 < rows_end:
                if is_unseen(uint32(i0 - ROWS * thread.w), head):
                    start(rO, rl, rm, Tile(i0, tile.j0, head, thread), uint32(0))
                    if in_place:
                        write_fragments(rO, query_rows(out.O, head), i0, rows_end, thread)
                    else:
                        write_tile(rO, shared.sQ, uint32(0), out.O, i0, head, thread)
                        if sparse:  # with a block mask, the first visit does not read A
                            sync_group(thread.w)
                        else:
                            write_sums(rO, shared.sO, uint32(0), out.A, i0, head, thread)
                    write_values(rl, out.l, i0, rows_end, thread)
                    write_values(rm, out.m, i0, rows_end, thread)
                i0 = uint32(i0 + Br)

    return initialise


@part
def make_wait_initialised(spec):
    """Make ``wait_initialised(bars, w)``, by which the loader of consumer w's rows waits until the
    consumer has called ``initialise``.

    The wait is necessary because ``initialise`` uses the slots of Q and O. If ``initialise`` does
    nothing or uses no slots, there is no wait.
    """
    initialises = spec.features.initialises and spec.planes == 1
    written = spec.pipelines.written.full

    def wait_initialised(bars, w):
        if initialises:
            wait_mbarrier(bars, uint32(written + w), uint32(0))

    return wait_initialised


@part
def make_write_state(spec):
    """Make ``write_state(rO, rl, rm, shared, slot, out, more, tile)``, which writes O, l and m of a
    row tile to global memory.

    The function first divides O by l. If ``more`` is true, a later pass visits the row tile again.
    O then goes to ``out.A``, the float32 array that stores O between the passes, through a slot of
    O in shared memory. In the last pass, O is rounded and goes to the output ``out.O``, through a
    slot of Q. The function releases the slots that this consumer still holds.
    """
    if spec.planes > 1:
        return _make_write_state_in_place(spec)
    NQ, NO, write_values = spec.tile_halves[0], spec.tile_floats, make_write(spec)
    write_tile, write_sums = _make_write_result(spec), _make_write_sums(spec)
    own_of, release_q = make_own(spec.pipelines.q), make_release(spec.pipelines.q)
    release_o, normalise_rows = make_release_by(spec.pipelines.o), make_normalise_rows(spec)
    scales, unscale_output = bool(spec.features.scales), make_unscale_output(spec)

    def write_state(rO, rl, rm, shared, slot, out, more, tile):
        head, thread, own = tile.head, tile.thread, own_of(slot, tile.thread.w)
        normalise_rows(rO, rl)
        if scales and not more:
            unscale_output(rO, head)
        if more:
            at = uint32(slot.stage * NO)
            write_sums(rO, shared.sO, at, out.A, tile.i0, head, thread)
        else:
            at = uint32(slot.stage * NQ)
            write_tile(rO, shared.sQ, at, out.O, tile.i0, head, thread)
        rows_end = uint32(min(out.rows, head.Nq))
        write_values(rl, out.l, tile.i0, rows_end, thread)
        write_values(rm, out.m, tile.i0, rows_end, thread)
        if not more:
            release_q(shared.bars, own)
        release_o(shared.bars, own, thread)

    return write_state


@part
def _make_write_state_in_place(spec):
    """Make the function ``write_state(rO, rl, rm, shared, slot, out, more, tile)`` that
    ``make_write_state`` describes, for planes.

    Here O always goes to the array O in float32. Only the last pass of a row tile undoes the
    scaling of planes.
    """
    own_of, release_q = make_own(spec.pipelines.q), make_release(spec.pipelines.q)
    unscale_output, normalise_rows = make_unscale_output(spec), make_normalise_rows(spec)
    query_rows, write_fragments = make_query_rows(spec), make_write_fragments(spec)
    write_values = make_write(spec)

    def write_state(rO, rl, rm, shared, slot, out, more, tile):
        i0, head, thread = tile.i0, tile.head, tile.thread
        if not more:
            release_q(shared.bars, own_of(slot, thread.w))
            unscale_output(rO, head)
        normalise_rows(rO, rl)
        rows_end = uint32(min(out.rows, head.Nq))
        write_fragments(rO, query_rows(out.O, head), i0, rows_end, thread)
        write_values(rl, out.l, i0, rows_end, thread)
        write_values(rm, out.m, i0, rows_end, thread)

    return write_state


@part
def make_end_pass(spec):
    """Make ``end_pass(bars, thread)``, by which a consumer ends a pass over a column tile.

    The function waits until the consumer's rows of O are in global memory. Then it signals a
    barrier, at which the thread that loads these rows in the next pass waits. In kernels that work
    with planes, it does nothing.
    """
    written, by_boxes = spec.pipelines.written.full, spec.planes == 1

    def end_pass(bars, thread):
        if by_boxes and thread.ty == uint32(0) and thread.tx == uint32(0):
            wait_boxes()
            arrive_mbarrier(bars, uint32(written + thread.w))

    return end_pass
