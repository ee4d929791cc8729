"""Copies of tiles from global to shared memory by TMA, Hopper's copy engine.

TMA copies boxes. A box has rows of 128 bytes. Parts of a box that are beyond the array become 0. If
sequences end within an array, or heads share a tile, the array has a special tensor map
(``TiledArray``). If K and V are stored in pages, all rows of a box are in one page.

Arguments that recur: ``at`` and ``place`` are positions in shared memory and count elements.
``barrier`` is the number of the mbarrier that counts the arriving bytes. ``pages`` are the page
numbers that ``look_up`` has read.
"""

from fa_numba.device import WRAPS, cuda, device_function, uint32
from fa_numba.intrinsics.bulk_copy import load_box, load_box_5d
from fa_numba.intrinsics.mbarrier import expect_bytes, mbarrier_tile
from fa_numba.intrinsics.shared import half_tile, index_tile, shared_tile
from fa_numba.parts.grid import make_key_end, make_query_end
from fa_numba.parts.namespace import part
from fa_numba.parts.pages import common_rows, pages_of_tile
from fa_numba.parts.records import Box, Shared, SharedWithO, Slot
from fa_numba.parts.wgmma.pipeline import make_acquire, make_own
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL

# Number of threads that load K and V -> (thread that loads K, thread that loads V).
COLUMN_PRODUCERS = {1: (32, 32), 2: (32, 64)}


@part
def make_shared_memory(spec):
    """Make ``shared_memory()``, which returns a forward kernel's shared memory as a record.

    The record contains the slots of Q, K and V, and the barriers. Normally it is a ``Shared``.
    FlashAttention-1 without planes gets a ``SharedWithO``, which also contains slots of O.
    """
    NQ, NK, NV = spec.tile_halves
    NQS, NKS, NVS = spec.q_stages * NQ, spec.stages * NK, spec.stages * NV
    AT_V, AT_O, NOS = NQS + NKS, spec.halves // 2, spec.q_stages * spec.tile_floats
    AT_BARRIERS, BARRIERS = spec.first_barrier, spec.barriers
    AT_WORDS, WORDS = 2 * (AT_BARRIERS + BARRIERS), spec.index_words

    def shared_memory():
        sQ, sK, sV = half_tile(0, NQS), half_tile(NQS, NKS), half_tile(AT_V, NVS)
        return Shared(sQ, sK, sV, mbarrier_tile(AT_BARRIERS, BARRIERS))

    def shared_memory_with_o():
        sQ, sK, sV = half_tile(0, NQS), half_tile(NQS, NKS), half_tile(AT_V, NVS)
        bars, words = mbarrier_tile(AT_BARRIERS, BARRIERS), index_tile(AT_WORDS, WORDS)
        return SharedWithO(sQ, sK, sV, shared_tile(AT_O, NOS), bars, words)

    return shared_memory_with_o if spec.tile_floats else shared_memory


@part
def make_q(spec):
    """Make ``q(shared, Q, i0, head, slot, w)``, which starts to load the row tile Qi into a slot.

    Normally the slot must be empty, and the function loads the complete row tile. In
    FlashAttention-1 (``spec.loads_own_rows``), it loads only the rows of consumer w into the
    consumer's part of the slot, and first waits until this part is empty. With ``spec.query_ends``,
    rows beyond the sequence become 0.
    """
    (NQ, _, _), facts, ROWS = spec.tile_halves, spec.pipelines.q, GROUP_ROWS
    load = make_tile_of_queries(spec, GROUP_ROWS)
    sizes, find = (spec.Br, spec.panels, PANEL, NQ), make_query_box(spec)
    load_own = make_own_tile(*sizes, facts, find, spec.per_half)
    own_of, acquire = make_own(facts), make_acquire(facts)

    def q(shared, Q, i0, head, slot, w):
        barrier = facts.full + slot.stage
        load(shared.sQ, uint32(slot.stage * NQ), Q, i0, head, shared.bars, barrier)

    def own_q(shared, Q, i0, head, slot, w):
        row0 = uint32(i0 + ROWS * w)
        acquire(shared.bars, own_of(slot, w))
        load_own(shared.sQ, Q, row0, head, shared.bars, slot, w)

    return own_q if spec.loads_own_rows else q


@part
def make_k(spec):
    """Make ``k(sK, K, j0, head, pages, bars, slot)``, which starts to load Kj into an empty slot.

    Rows beyond the sequence become 0. ``pages`` are the pages that ``look_up`` has found.
    """
    return _make_columns(spec, spec.pipelines.k.full, spec.panels)


@part
def make_v(spec):
    """Make ``v(sV, V, j0, head, pages, bars, slot)``, which starts to load Vj into an empty slot.

    Rows beyond the sequence become 0. If they contained NaN, the product with P = 0 would be NaN.
    ``pages`` are the pages that ``look_up`` has found.
    """
    if spec.per_half > 1:
        return _make_turned_v(spec)
    return _make_columns(spec, spec.pipelines.v.full, spec.panels_v)


@part
def _make_turned_v(spec):
    """Make ``v(sV, V, j0, head, pages, bars, slot)``, which starts to load Vj by columns.

    A row of the array V contains all keys of one column, and zeros after the end of the sequence
    (``kernels/turned_values.py``). ``pages`` is not used.
    """
    (ROWS, panels), NV, full = spec.value_tile, spec.tile_halves[2], spec.pipelines.v.full
    WIDE, size = PANEL * spec.per_half, 2 * spec.tile_halves[2]

    def v(sV, V, j0, head, pages, bars, slot):
        at, barrier = uint32(slot.stage * NV), full + slot.stage
        expect_bytes(bars, barrier, size)
        for n in range(panels):
            place, col = uint32(at + PANEL * ROWS * n), uint32(j0 + WIDE * n)
            load_box(sV, place, V, head.b, head.hk, 0, col, bars, barrier)

    return v


@part
def _make_columns(spec, full, panels):
    """Make ``columns(sT, T, j0, head, pages, bars, slot)``, which starts to load a column tile into
    a slot.

    ``full`` is the number of the mbarrier that completes when slot 0 is full. ``panels`` is the
    number of boxes of 64 columns in a row. ``pages`` are the pages that ``look_up`` has found.
    """
    NK, paged = PANEL * panels * spec.Bc, spec.features.page_size > 0
    load = _make_pages(spec, panels) if paged else make_tile_of_keys(spec, panels)

    def columns(sT, T, j0, head, pages, bars, slot):
        at, barrier = uint32(slot.stage * NK), full + slot.stage
        if paged:
            load(sT, at, T, j0, head, pages, bars, barrier)
        else:
            load(sT, at, T, j0, head, bars, barrier)

    return columns


@part
def make_columns(spec):
    """Make ``columns(shared, K, V, j0, head, slot)``, which starts to load Kj and Vj after their
    slots are empty.

    If different threads load K and V, each thread loads its own tile. ``slot`` is the ``Slot`` of
    both pipelines.
    """
    acquire_k, acquire_v = make_acquire(spec.pipelines.k), make_acquire(spec.pipelines.v)
    k, v, look_up, PAGES = make_k(spec), make_v(spec), make_look_up(spec), pages_of_tile(spec)
    produces_k, produces_v = make_produces_k(spec), make_produces_v(spec)

    def columns(shared, K, V, j0, head, slot):
        pages = cuda.local.array(PAGES, uint32)  # not used without pages
        look_up(pages, j0, head)
        if produces_k():
            acquire_k(shared.bars, slot)
            k(shared.sK, K, j0, head, pages, shared.bars, slot)
        if produces_v():
            acquire_v(shared.bars, slot)
            v(shared.sV, V, j0, head, pages, shared.bars, slot)

    return columns


@part
def make_first_columns(spec):
    """Make ``first_columns(shared, K, V, j0, j_end, head)``, which starts to load the first column
    tiles of a work tile into all slots.

    It is for kernels without a producer warpgroup. The first tile begins at column j0, and columns
    from ``j_end`` on are not visited.
    """
    columns, Bc, STAGES = make_columns(spec), spec.Bc, spec.stages

    def first_columns(shared, K, V, j0, j_end, head):
        for stage in range(STAGES):
            at = uint32(j0 + Bc * stage)
            if at < j_end:
                columns(shared, K, V, at, head, Slot(uint32(stage), uint32(1)))

    return first_columns


@part
def make_refill_k(spec):
    """Make ``refill_k(shared, K, j0, j_end, head, slot)``, by which a consumer loads a further tile
    of K into a slot that it has read.

    The slot contained column tile j0. The function waits until all consumers have read the slot.
    Then it starts to load the column tile that is ``spec.stages`` tiles after column tile j0,
    unless this column tile is at or after ``j_end``. Only thread 0 of the block does this. In
    kernels with a producer warpgroup the function does nothing.
    """
    refill = _make_refill(spec, make_acquire(spec.pipelines.k), make_k(spec))

    def refill_k(shared, K, j0, j_end, head, slot):
        refill(shared.sK, shared.bars, K, j0, j_end, head, slot)

    return refill_k


@part
def make_refill_v(spec):
    """Make ``refill_v(shared, V, j0, j_end, head, slot)``, by which a consumer loads a further tile
    of V into a slot that it has read.

    ``make_refill_k`` explains the arguments.
    """
    refill = _make_refill(spec, make_acquire(spec.pipelines.v), make_v(spec))

    def refill_v(shared, V, j0, j_end, head, slot):
        refill(shared.sV, shared.bars, V, j0, j_end, head, slot)

    return refill_v


@part
def _make_refill(spec, acquire, load):
    """Make ``refill(sT, bars, T, j0, j_end, head, slot)``, which loads a tile of T into sT as
    ``make_refill_k`` describes.

    ``acquire`` and ``load`` are device functions for the pipeline of T.
    """
    alone, AHEAD, PAGES = not spec.specialised, spec.stages * spec.Bc, pages_of_tile(spec)

    def refill(sT, bars, T, j0, j_end, head, slot):
        if alone and cuda.threadIdx.x == 0:
            pages = cuda.local.array(PAGES, uint32)  # not used, because there are no pages
            at = uint32(j0 + AHEAD)
            if at < j_end:
                # The phase in which consumers read the slot is the loader's next phase.
                acquire(bars, slot)
                load(sT, T, at, head, pages, bars, slot)

    return refill


@part
def make_tile_of_queries(spec, box):
    """Make ``load(sT, at, T, row0, head, bars, barrier)``, which starts to load a row tile from T
    to sT.

    A TMA box has ``box`` rows. ``make_tile`` explains the tile.
    """
    find, wide = make_query_box(spec), PANEL * spec.per_half
    return make_tile(spec.Br, box, spec.panels, find, spec.tile_heads, wide)


@part
def make_tile_of_keys(spec, panels):
    """Make ``load(sT, at, T, row0, head, bars, barrier)``, which starts to load a column tile of K
    or V from T to sT.

    ``panels`` is the number of boxes of 64 columns in a row. ``make_tile`` explains the tile.
    """
    find, wide = make_key_box(spec), PANEL * spec.per_half
    return make_tile(spec.Bc, spec.Bc, panels, find, 1, wide)


@part
def make_tile(rows, box, panels, find, heads=1, wide=PANEL):
    """Make ``tile(sT, at, T, row0, head, bars, barrier)``, which starts to load a tile of ``rows``
    rows into sT.

    The tile is loaded by several TMA boxes. A box has ``box`` rows of 128 bytes, which are ``wide``
    columns of T. ``panels`` boxes side by side cover the columns of the tile.
    ``find(T, row0, head)`` is a device function that returns the ``Box`` of the first row. The
    barrier completes only after all bytes have arrived. If ``heads`` is above 1, several heads
    share the tile, and a box contains rows of all these heads.
    """
    size, step, members = 2 * PANEL * panels * rows, box // heads, heads > 1

    def tile(sT, at, T, row0, head, bars, barrier):
        expect_bytes(bars, barrier, size)
        first = find(T, row0, head)
        for n in range(panels):
            for r in range(rows // box):
                place = uint32(at + PANEL * (n * rows + r * box))
                row = uint32(first.row + r * step)
                if members:
                    load_box_5d(
                        sT, place, T, first.outer, first.inner, row, 0, wide * n, bars, barrier
                    )
                else:
                    load_box(sT, place, T, first.outer, first.inner, row, wide * n, bars, barrier)

    return tile


@part
def make_own_tile(Br, panels, width, tile, facts, find, per_element=1):
    """Make ``load(sT, T, row0, head, bars, slot, w)``, which starts to load the 64 rows of consumer
    w into the consumer's part of a slot.

    The rows are loaded by several TMA boxes, which are side by side. Each box has 64 rows of 128
    bytes. The arguments of the factory are:

    - ``Br``: the number of rows of the complete tile in the slot.
    - ``panels``: the number of boxes side by side.
    - ``width``: the number of elements of sT in a row of one box.
    - ``tile``: the number of elements of sT in a slot.
    - ``facts``: the ``tiling.wgmma.Pipeline`` to which the slot belongs.
    - ``find(T, row0, head)``: a device function that returns the ``Box`` of the first row.
    - ``per_element``: the number of columns of T in one element of sT. It is 2 for e4m3, because an
      element of sT has 16 bits, and otherwise 1.
    """
    size, full, groups = 128 * GROUP_ROWS * panels, facts.full, facts.groups
    wide = per_element * width

    def load(sT, T, row0, head, bars, slot, w):
        barrier = uint32(full + uint32(slot.stage * groups + w))
        own = uint32(uint32(slot.stage * tile) + width * GROUP_ROWS * w)
        expect_bytes(bars, barrier, size)
        box = find(T, row0, head)
        for n in range(panels):
            place = uint32(own + width * Br * n)
            load_box(sT, place, T, box.outer, box.inner, box.row, wide * n, bars, barrier)

    return load


@part
def _make_pages(spec, panels):
    """Make ``load(sT, at, T, row0, head, pages, bars, barrier)``, which starts to load a column
    tile from pages into sT.

    ``panels`` is the number of boxes of 64 columns in a row. All rows of a box are in one page. The
    valid rows of a page end where the sequence or the page ends. A box without valid rows is
    outside of the tensor map, and becomes 0.
    """
    page_size, Bc = spec.features.page_size, spec.Bc
    size, box = 2 * PANEL * panels * Bc, common_rows(page_size, Bc)

    def load(sT, at, T, row0, head, pages, bars, barrier):
        expect_bytes(bars, barrier, size)
        for n in range(Bc // box):
            row = uint32(row0 + n * box)
            first, rows = uint32(row % uint32(page_size)), uint32(0)
            if row < head.Nk:
                rows = uint32(min(uint32(page_size), uint32(first + head.Nk - row)))
            inner = end_of(T, pages[n], head.hk, rows)
            first = uint32(first + uint32(WRAPS) - rows)
            for panel in range(panels):
                place = uint32(at + PANEL * (panel * Bc + n * box))
                load_box(sT, place, T, uint32(WRAPS), inner, first, PANEL * panel, bars, barrier)

    return load


@part
def make_look_up(spec):
    """Make ``look_up(pages, j0, head)``, which reads the numbers of the pages that contain Kj and
    Vj from the block table.

    ``pages: (pages_of_tile,)`` are registers. Register n gets the page of the n-th run of rows of
    the tile (``pages.common_rows``). Pages past the end of the sequence are 0. A kernel calls the
    function before it waits for an empty slot. It then waits for the slot and for the block table
    at the same time. Without pages the function does nothing.
    """
    page_size, PAGES = spec.features.page_size, pages_of_tile(spec)
    rows = spec.Bc // PAGES

    def look_up(pages, j0, head):
        if page_size:
            for n in range(PAGES):
                row = uint32(j0 + n * rows)
                pages[n] = uint32(0)
                if row < head.Nk:
                    page = uint32(row // uint32(page_size))
                    pages[n] = uint32(head.options.block_table[head.b, page])

    return look_up


@device_function
def warp():
    """Return the number of this thread's warp in the block."""
    return uint32(cuda.threadIdx.x // 32)


@part
def make_produces_rows(spec):
    """Make ``produces_rows(w)``, which says whether this thread loads Q. ``w`` is the number of the
    thread's warp.

    In FlashAttention-1, each consumer has its own loading thread, which loads only the consumer's
    rows of Q.
    """
    own, GROUPS = spec.loads_own_rows, spec.consumers

    def produces_rows(w):
        if own:
            first = cuda.threadIdx.x % 32 == 0
            return first and w < uint32(GROUPS)
        return cuda.threadIdx.x == 0

    return produces_rows


@part
def make_produces_columns(spec):
    """Make ``produces_columns(w)``, which says whether this thread loads K, V or both. ``w`` is the
    number of the thread's warp.

    In FlashAttention-1 it is a thread of the fourth warp, because the first three warps can load
    rows of Q.
    """
    own, (keys, values) = spec.loads_own_rows, COLUMN_PRODUCERS[spec.column_producers]

    def produces_columns(w):
        if own:
            first = cuda.threadIdx.x % 32 == 0
            return first and w == uint32(3)
        thread = uint32(cuda.threadIdx.x)
        return thread == uint32(keys) or thread == uint32(values)

    return produces_columns


@part
def make_produces_k(spec):
    """Make ``produces_k()``, which says whether this thread loads K. Only threads that load K or V
    may call it.
    """
    return _make_produces(*COLUMN_PRODUCERS[spec.column_producers])


@part
def make_produces_v(spec):
    """Make ``produces_v()``, which says whether this thread loads V. Only threads that load K or V
    may call it.
    """
    return _make_produces(*reversed(COLUMN_PRODUCERS[spec.column_producers]))


@part
def _make_produces(own, other):
    """Make ``produces()``, which says whether this thread loads one of K and V: the tile that
    belongs to thread number ``own``.

    Only threads that load K or V call the function. ``other`` is the number of the thread that
    loads the other tile. If ``own`` and ``other`` are equal, one thread loads K and V, and the
    result is always true.
    """

    def produces():
        if own == other:
            return True
        return cuda.threadIdx.x == own

    return produces


@part
def make_query_box(spec, ends=None, end=None):
    """Make ``query_box(T, row, head)``, which returns the ``Box`` of row ``row`` of a query head in
    T's tensor map.

    ``ends`` says whether sequences end within T. ``end(head)`` returns one past the last row of
    this sequence. If ``ends`` or ``end`` is None, it is derived from ``spec``.
    """
    ends = spec.query_ends if ends is None else ends
    end = end or make_query_end(spec)

    def query_box(T, row, head):
        if ends:
            inner = end_of(T, head.b, head.h, end(head))
            return Box(uint32(WRAPS), inner, uint32(row + uint32(WRAPS) - head.Nq))
        return Box(head.b, head.h, row)

    return query_box


@part
def make_key_box(spec, ends=None, end=None):
    """Make ``key_box(T, row, head)``, which returns the ``Box`` of row ``row`` of a K/V head in T's
    tensor map.

    ``make_query_box`` explains ``ends`` and ``end``.
    """
    ends = spec.key_ends if ends is None else ends
    end = end or make_key_end(spec)

    def key_box(T, row, head):
        if ends:
            inner = end_of(T, head.b, head.hk, end(head))
            return Box(uint32(WRAPS), inner, uint32(row + uint32(WRAPS) - head.Nk))
        return Box(head.b, head.hk, row)

    return key_box


@device_function
def whole_box(T, row, head):
    """Return the ``Box`` of a row of a query head, for an array in which no sequence ends early."""
    return Box(head.b, head.h, row)


@device_function
def end_of(T, b, h, end):
    """Return where a sequence ends, as an index along the axis "end" of T's tensor map.

    ``T`` is a ``TiledArray`` in which sequences follow each other. A box copy gets the index as a
    coordinate. The copy engine then takes rows at or past the end as outside of the array, and
    fills them with zeros. ``b`` and ``h`` are the batch entry and the head, and ``end`` is one past
    the sequence's last row.
    """
    of_batch, of_head, of_row = T.steps
    return uint32(b * uint32(of_batch) + h * uint32(of_head) + end * uint32(of_row))
