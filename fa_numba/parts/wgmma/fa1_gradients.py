"""Parts of FlashAttention-1's backward pass on Hopper's tensor cores.

A pass is one step of the outer loop over column tiles. In every pass, O is loaded with the row
tiles, D is computed again, and dQ moves from global memory to registers and back.

A visit is the computation of one tile of S. It belongs to column tile j0 of the pass, and to a row
tile of one query head. Arguments that recur:

- ``h`` and ``i0`` identify a visit: ``h`` is the number of the query head, and ``i0`` is the first
  row of the row tile.
- ``first`` is the ``Head`` of the block's first query head, and ``h_end`` is one past the block's
  last query head.
- ``i_first`` is the first row that the pass visits in each query head, and ``i_end`` is one past
  the last row.
"""

from functools import cache

from fa_numba.device import cuda, float32, int32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, opaque
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, mbarrier_tile
from fa_numba.intrinsics.shared import half_tile, index_tile, load8, shared_tile
from fa_numba.parts.fragments.pairs import (
    make_add_two,
    make_read_floats,
    write_pairs_of,
    write_rounded_of,
)
from fa_numba.parts.grid import make_heads_of_group, member
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Fa1BackwardShared, GroupThread, RowSlots, Tile
from fa_numba.parts.visits import (
    make_first_visit,
    make_is_unseen,
    make_next_visit,
    make_row_starts,
    make_visit_ahead,
    next_by,
)
from fa_numba.parts.wgmma.epilogue import make_write_tile
from fa_numba.parts.wgmma.gradients import (
    column_pairs,
    load_column_tiles,
    make_offsets,
    value_place,
)
from fa_numba.parts.wgmma.listed import make_read_word, make_word
from fa_numba.parts.wgmma.load import make_key_box, make_tile, whole_box
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL

WARP = 32
DOT_THREADS = 64  # threads that compute D
CHUNK = 8  # 16-bit elements in 16 bytes


@part
def make_fa1_backward_shared_memory(spec):
    """Make ``fa1_backward_shared_memory()``, which returns the shared memory as a
    ``Fa1BackwardShared`` record.
    """
    (NQ, NK, NS), (NO, NV, _) = spec.tile_halves, spec.of_values.tile_halves
    AT_Q, AT_DO, AT_DS, _, AT_L, AT_BARRIERS = spec.offsets
    NQS, NOS, NSS, NL, AT_O = 2 * NQ, 2 * NO, 2 * NS, 4 * spec.Br, spec.offset_of_o
    (AT_WORDS, WORDS), BARRIERS = spec.key_tile_words, spec.barriers

    def fa1_backward_shared_memory():
        sK, sV = half_tile(0, NK), half_tile(NK, NV)
        sQ, sdO, sdS = half_tile(AT_Q, NQS), half_tile(AT_DO, NOS), half_tile(AT_DS, NSS)
        sO = half_tile(AT_O, NOS)
        sL, words = shared_tile(AT_L, NL), index_tile(AT_WORDS, WORDS)
        bars = mbarrier_tile(AT_BARRIERS, BARRIERS)
        return Fa1BackwardShared(sK, sV, RowSlots(sQ, sdO, sL), sdS, sO, words, bars)

    return fa1_backward_shared_memory


# --- row tiles -------------------------------------------------------------------------------


@part
def make_rows_of_block(spec):
    """Make ``rows_of_block(Q, K, group, split_rows, options)``, which returns the query heads and
    the rows that this block computes.

    The result has four values: the ``Head`` of the first query head, the number of query heads, the
    first row of Q in each head, and one past the last row. ``group`` is the number of query heads
    per K/V head. With query splits, a block gets ``split_rows`` rows. Otherwise it gets all rows.
    """
    splits, heads_of_group = spec.splits_queries, make_heads_of_group(spec)

    def rows_of_block(Q, K, group, split_rows, options):
        head, heads = heads_of_group(Q, K, group, options)
        first, end = uint32(0), head.Nq
        if splits:
            first = uint32(cuda.blockIdx.x * split_rows)
            end = uint32(min(end, uint32(first + split_rows)))
        return head, heads, first, end

    return rows_of_block


@part
def make_pass_word(spec):
    """Make ``pass_word(h, i0, first, j0, h_end, i_first, i_end)``, which returns two integers by
    which the loader of Q tells the consumers what comes after the visit (h, i0).

    Only kernels with a block mask use the integers. The loader stores both in shared memory, next
    to the slot of Q. The consumers then need not search in the lists of the block mask.

    - The first integer is the query head of the next visit.
    - The second integer contains the first row of the next visit, and two bits about the current
      visit (``visits.make_visit_ahead``). With ``spec.reads_state``, its highest bits also contain
      the state of the tile in the block mask (``listed.make_word``).
    """
    sparse, word, next_visit = spec.features.sparse, make_word(spec), make_next_visit(spec)
    visit_ahead = make_visit_ahead(spec)

    def pass_word(h, i0, first, j0, h_end, i_first, i_end):
        if sparse:
            head = member(first, h)
            h_next, i_next = next_visit(h, i0, first, j0, h_end, i_first, i_end)
            visit = visit_ahead(i_next, i0, j0, head)
            return h_next, word(visit, Tile(i0, j0, head, uint32(0)))
        return h, i0

    return pass_word


@part
def make_write_pass_word(spec):
    """Make ``write_pass_word(shared, slot, word)``, by which the loader of Q stores ``word`` in
    shared memory, next to a slot of Q.

    ``word`` is the pair of integers that ``pass_word`` returns. Without a block mask, the function
    does nothing.
    """
    sparse, grouped = spec.features.sparse, spec.grouped

    def write_pass_word(shared, slot, word):
        if sparse:
            shared.words[uint32(2 * slot.stage)] = word[1]
            if grouped:
                shared.words[uint32(2 * slot.stage + 1)] = word[0]

    return write_pass_word


@part
def make_read_pass_word(spec):
    """Make ``read_pass_word(rBS, shared, slot)``, by which a consumer reads what the loader of Q
    has stored about the visit in a slot.

    With a block mask, the result is the integer that ``visits.visit_ahead`` describes: the first
    row of the next visit, and two bits about the current visit. With ``spec.reads_state``, the
    function also sets ``rBS[0]`` to the state of the tile in the block mask: EMPTY, MIXED or FULL
    of ``mods.blocks``.

    Without a block mask, the loader has stored nothing. The result is then 0, and the functions
    that take it as the argument ``visit`` do not use it.
    """
    sparse, read = spec.features.sparse, make_read_word(spec)

    def read_pass_word(rBS, shared, slot):
        if sparse:
            return read(rBS, shared.words, uint32(2 * slot.stage))
        return uint32(0)

    return read_pass_word


@part
def make_next_by_word(spec):
    """Make ``next_by_word(visit, shared, slot, h, i0, i_first, i_end)``, by which a consumer finds
    the visit that comes after the visit (h, i0).

    The result is the query head and the first row of the next visit. With a block mask, the loader
    of Q has found both numbers. The function reads the head from shared memory, and the row from
    ``visit``, the result of ``read_pass_word``. Without a block mask, the function computes the
    next row tile, or the first row tile of the next head.
    """
    Br, grouped, sparse = spec.Br, spec.grouped, spec.features.sparse

    def next_by_word(visit, shared, slot, h, i0, i_first, i_end):
        h_next, i_next = h, uint32(i0 + Br)
        if sparse:
            if grouped:
                h_next = shared.words[uint32(2 * slot.stage + 1)]
                cuda.syncwarp()  # all lanes have read, before one releases the slot
            i_next = next_by(visit)
        elif grouped and i_next >= i_end:
            h_next, i_next = uint32(h + 1), i_first
        return h_next, i_next

    return next_by_word


@part
def make_visits_of_pass(spec):
    """Make ``visits_of_pass(heads, i_first, i_end)``, which returns the number of visits in one
    pass, if there is no block mask.

    It is the number of row tiles between row ``i_first`` and row ``i_end``, times ``heads``, the
    number of query heads of the block.
    """
    Br = spec.Br

    def visits_of_pass(heads, i_first, i_end):
        count = uint32(0)
        if i_first < i_end:
            count = uint32((i_end - i_first + (Br - 1)) // Br)
        return uint32(count * heads)

    return visits_of_pass


@part
def make_is_nth_visit(spec):
    """Make ``is_nth_visit(n, n_end, h, h_end, i0, i_end)``, which says whether visit number n,
    which is (h, i0), belongs to the current pass.

    Without a block mask, the kernel counts the visits of all passes. The result is ``n < n_end``,
    where ``n_end`` is one past the last visit of this pass. With a block mask, the number of visits
    in a pass is not known before the pass. The result is then that of
    ``is_visit(h, h_end, i0, i_end)``.
    """
    sparse, is_visit = spec.features.sparse, make_is_visit(spec)

    def is_nth_visit(n, n_end, h, h_end, i0, i_end):
        if sparse:
            return is_visit(h, h_end, i0, i_end)
        return n < n_end

    return is_nth_visit


@part
def make_has_visits(spec):
    """Make ``has_visits(first, j0, h_end, i_first, i_end)``, which returns whether the thread block
    computes any tile of S in the column tile that begins at column j0.

    argument   meaning
    first      the ``Head`` of the thread block's first query head
    h_end      number of the thread block's last query head, plus 1
    i_first    first row of Q that the pass visits in each query head
    i_end      last row of Q that the pass visits in each query head, plus 1

    With a block mask, the function searches for a tile that is computed. Without a block mask,
    the result is true if there is a row from ``i_first`` to ``i_end`` - 1.
    """
    sparse = spec.features.sparse
    first_visit, is_visit = make_first_visit(spec), make_is_visit(spec)

    def has_visits(first, j0, h_end, i_first, i_end):
        if sparse:
            h, i0 = first_visit(first, j0, h_end, i_first, i_end)
            return is_visit(h, h_end, i0, i_end)
        return i_first < i_end

    return has_visits


@part
def make_is_visit(spec):
    """Make ``is_visit(h, h_end, i0, i_end)``, which says whether query head h and row i0 are a
    visit of the pass.

    The result is false if the pass has ended: row i0 is at or past ``i_end``, or head h is
    ``h_end``.
    """
    grouped = spec.grouped

    def is_visit(h, h_end, i0, i_end):
        return i0 < i_end and (not grouped or h < h_end)

    return is_visit


@cache
def make_fa1_load_columns(spec):
    """Make ``fa1_load_columns(shared, K, V, j0, head)``, which starts to load the column tiles Kj
    and Vj.

    Rows beyond the arrays become 0.
    """
    return load_column_tiles(spec, make_key_box(spec, False))


@part
def make_load_rows(spec):
    """Make ``load_rows(shared, Q, dO, O, i0, head, slot)``, which starts to load Qi, dOi and Oi
    into a slot.
    """
    loads = (make_tile(s.Br, s.Br, s.panels, whole_box) for s in (spec, spec.of_values))
    (load_q, load_o), offsets = loads, make_offsets(spec)
    _, q, do, o, _ = spec.pipelines
    full_q, full_do, full_o = q.full, do.full, o.full

    def load_rows(shared, Q, dO, O, i0, head, slot):
        bars, stage, at = shared.bars, slot.stage, offsets(slot.stage)
        load_q(shared.slots.sQ, at.rows, Q, i0, head, bars, uint32(full_q + stage))
        load_o(shared.slots.sdO, at.out, dO, i0, head, bars, uint32(full_do + stage))
        load_o(shared.sO, at.out, O, i0, head, bars, uint32(full_o + stage))

    return load_rows


@part
def make_load_lse(spec):
    """Make ``load_lse(shared, L, i0, head, slot)``, by which a warp loads L of a row tile into a
    slot.

    L is stored in units of log2. If the call has a gradient dL of L, dL is stored at the positions
    of D. ``row_dots`` replaces it by D - dL. In rows past the end and in rows with L = -inf, zeros
    are stored for L and dL.
    """
    Br, place_of, full = spec.Br, value_place, spec.pipelines.q.full
    dlse = spec.features.dlse

    def load_lse(shared, L, i0, head, slot):
        Lh, rows_end, sL = L[head.b, head.h], head.Nq, shared.slots.sL
        at = uint32(slot.stage * (2 * Br))
        r = uint32(uint32(cuda.threadIdx.x) % WARP)
        place = uint32(at + place_of(r))
        for n in range(Br // WARP):
            row = uint32(i0 + r + WARP * n)
            shift = float32(0.0)
            if row < rows_end:
                shift = LOG2E * Lh[row]
            if dlse:
                dL = float32(0.0)
                if row < rows_end:
                    dL = head.options.dL[head.b, head.h, row]
                if shift == NEG_INF:
                    dL = float32(0.0)
                sL[uint32(place + Br + WARP * n)] = dL
            if shift == NEG_INF:
                shift = float32(0.0)
            sL[uint32(place + WARP * n)] = shift
        arrive_mbarrier(shared.bars, uint32(full + slot.stage))

    return load_lse


@part
def make_dot_columns(spec):
    """Make ``dot_columns(Q, O)``, which returns the number of columns of O.

    If V has a head dimension of its own, the number comes from the shape of O. Otherwise it comes
    from the shape of Q, which the kernel reads in any case.
    """
    own = bool(spec.head_dim_v)

    def dot_columns(Q, O):
        if own:
            return uint32(O.shape[3])
        return uint32(Q.shape[3])

    return dot_columns


@part
def make_row_dots(spec):
    """Make ``row_dots(shared, stage, columns)``, by which two warps compute D = rowsum(dO o O) of
    the row tile in slot number ``stage``.

    ``columns`` is the number of columns of O. If the call has a gradient dL of the logsumexp, D -
    dL is stored instead of D. A thread computes a row in chunks of 16 bytes. The compiler must not
    unroll the two loops, because these warps have few registers. The function therefore hides from
    the compiler how often the loops run.
    """
    Br, NO = spec.Br, spec.of_values.tile_halves[0]
    place_of, full, dlse = value_place, spec.pipelines.d.full, spec.features.dlse
    _, unpack = CONVERSIONS[DTYPES[spec.dtype].matrix]

    def row_dots(shared, stage, columns):
        _, sdO, sL = shared.slots
        at_rows, at = uint32(stage * NO), uint32(stage * (2 * Br) + Br)
        r, rows = uint32(uint32(cuda.threadIdx.x) - WARP), opaque(uint32(Br))
        while r < rows:
            dot, col = float32(0.0), uint32(0)
            if dlse:
                dot = -sL[uint32(at + place_of(r))]
            while col < columns:
                chunk = uint32(uint32(col % PANEL) ^ uint32(CHUNK * (r % 8)))
                place = uint32(at_rows + PANEL * (r + Br * (col // PANEL)) + chunk)
                os, gs = load8(shared.sO, place), load8(sdO, place)
                for e in range(4):
                    o, g = unpack(os[e]), unpack(gs[e])
                    dot += o[0] * g[0] + o[1] * g[1]
                col = uint32(col + CHUNK)
            sL[uint32(at + place_of(r))] = dot
            r = uint32(r + DOT_THREADS)
        arrive_mbarrier(shared.bars, uint32(full + stage))

    return row_dots


# --- dQ --------------------------------------------------------------------------------------


# In every pass, the same thread reads and writes an element of dQ. It reads what it has written
# itself in the pass before, which needs no fence and no barrier.
def pairs_of_dq(spec):
    """Return the position of each of a thread's pairs of elements of dQ, relative to the thread's
    first element.

    A position is (rows, columns). Pair number e consists of the registers 2 e and 2 e + 1, which
    hold two neighbouring elements of a row.
    """
    return tuple((8 * i, 8 * n) for i in range(2) for n in range(spec.query_columns // 8))


@part
def make_query_place(spec):
    """Make ``query_place(row0, rows_end, thread)``, which returns the position in the array dQ at
    which this thread's part begins.

    The row tile begins at row ``row0``. The result is the row and the column of the thread's first
    element, and the number of rows from this row to ``rows_end``. ``pairs_of_dq`` gives the
    positions of the other elements relative to the first.
    """
    by_rows, COLUMNS = spec.Br > GROUP_ROWS, spec.query_columns

    def query_place(row0, rows_end, thread):
        row, col = uint32(row0 + thread.tx), uint32(2 * thread.ty)
        if by_rows:
            row = uint32(row + GROUP_ROWS * thread.w)
        else:
            col = uint32(col + COLUMNS * thread.w)
        return int64(row), int64(col), int32(int32(rows_end) - int32(row))

    return query_place


@part
def make_read_dq(spec):
    """Make ``read_dq(rdQ, A, visit, j0, row0, rows_end, head, thread)``, which reads this thread's
    part of dQ from A, the float32 array that stores dQ between the passes.

    Rows at or past ``rows_end`` become 0. If this row tile of A has not been written yet, the
    function reads nothing, and sets rdQ to 0. ``visits.row_starts`` recognises this case. With a
    block mask, it needs ``visit`` for this, the result of ``read_pass_word``.
    """
    pairs, row_starts = pairs_of_dq(spec), make_row_starts(spec)
    place, read_floats = make_query_place(spec), make_read_floats(spec)

    def read_dq(rdQ, A, visit, j0, row0, rows_end, head, thread):
        seen = uint32(0)
        if not row_starts(visit, j0):
            seen = rows_end
        Ah = A[head.b, head.h]
        row, col, left = place(row0, seen, thread)
        for e in range(len(pairs)):
            down, along = pairs[e]
            pair = read_floats(Ah, row + down, col + along, left > down)
            rdQ[2 * e] = pair[0]
            rdQ[2 * e + 1] = pair[1]

    return read_dq


@part
def make_write_dq(spec):
    """Make ``write_dq(rdQ, a_and_dq, scale, more, row0, rows_end, head, thread)``, which writes a
    thread's part of dQ to global memory.

    ``a_and_dq`` is a pair of arrays: A, which stores dQ between the passes in float32, and the
    output dQ. If ``more`` is true, a later pass visits the row tile again, and the part goes to A.
    Otherwise the part is multiplied by ``scale``, rounded, and goes to the output.
    """
    write_sums, write_rounded = _make_write_dq_sums(spec), _make_write_rounded(spec)

    def write_dq(rdQ, a_and_dq, scale, more, row0, rows_end, head, thread):
        A, dQ = a_and_dq
        if more:
            write_sums(rdQ, A[head.b, head.h], row0, rows_end, thread)
        else:
            write_rounded(rdQ, dQ[head.b, head.h], scale, row0, rows_end, thread)

    return write_dq


@part
def make_initialise_dq(spec):
    """Make ``initialise_dq(rdQ, a_and_dq, scale, first, h_end, row0, rows_end, thread)``, which
    writes dQ = 0 for some row tiles, before the loops of the kernel begin.

    Normally the function does nothing, because the first pass over K/V writes dQ of all row tiles.
    With a window, ``q_lens`` or a block mask, the first pass can skip row tiles. The function then
    writes zeros.

    - Without a block mask, it writes zeros for all row tiles of the block's query heads between row
      ``row0`` and row ``rows_end``.
    - With a block mask, it writes zeros only for two kinds of row tiles: those that visit no column
      tile, and those with rows past ``q_lens``.

    ``a_and_dq`` is a pair of arrays: A, which stores dQ between the passes in float32, and the
    output dQ. The zeros are written to the output, and without a block mask also to A. ``first`` is
    the ``Head`` of the block's first query head, and ``h_end`` is one past the last query head.
    ``rdQ`` are registers that the function may overwrite.
    """
    Br, RQ, initialises = spec.Br, spec.query_registers, spec.features.initialises
    is_unseen, sparse = make_is_unseen(spec), spec.features.sparse
    write_sums, write_rounded = _make_write_dq_sums(spec), _make_write_rounded(spec)

    def initialise_dq(rdQ, a_and_dq, scale, first, h_end, row0, rows_end, thread):
        A, dQ = a_and_dq
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            b, h = first.b, first.h
            while h < h_end:
                i0 = row0
                while i0 < rows_end:
                    if is_unseen(i0, member(first, h)):
                        if not sparse:  # otherwise the first visit does not read A
                            write_sums(rdQ, A[b, h], i0, rows_end, thread)
                        write_rounded(rdQ, dQ[b, h], scale, i0, rows_end, thread)
                    i0 = uint32(i0 + Br)
                h = uint32(h + 1)

    return initialise_dq


@cache
def _make_write_dq_sums(spec):
    """Make ``write_sums(rdQ, A, row0, rows_end, thread)``, which writes this thread's part of dQ to
    A, the float32 array that stores dQ between the passes.
    """
    return write_pairs_of(spec, pairs_of_dq(spec), make_query_place(spec))


@cache
def _make_write_rounded(spec):
    """Make ``write_rounded(rdQ, dQ, factor, row0, rows_end, thread)``, which multiplies this
    thread's part of dQ by ``factor``, rounds it and writes it.
    """
    return write_rounded_of(spec, pairs_of_dq(spec), make_query_place(spec))


# --- dK and dV -------------------------------------------------------------------------------


@cache
def make_fa1_write_dv(spec):
    """Make ``fa1_write_dv(rdV, sV, dV, row0, head, thread)``, which writes this consumer
    warpgroup's rows of dV to global memory.

    It works as ``fa1_write_columns``, with shared memory sV in the place of sK.
    """
    return make_fa1_write_columns(spec.of_values)


@part
def make_fa1_write_columns(spec):
    """Make ``fa1_write_columns(rdK, sK, dK, row0, head, thread)``, which writes this consumer
    warpgroup's rows of dK to global memory.

    The column tile begins at row ``row0`` of dK. Normally the rows are rounded to 16 bits and
    stored in shared memory sK, where the consumer's rows of K were. The copy engine copies them
    from there to dK. With query splits, several blocks compute parts of the same dK. ``dK`` is then
    the float32 sum of these parts. Each thread adds its part atomically from registers.
    """
    if spec.splits_queries:
        return _make_add_columns(spec)
    write = make_write_tile(spec.transposed, make_key_box(spec, False))

    def fa1_write_columns(rdK, sK, dK, row0, head, thread):
        own = GroupThread(thread.tx, thread.ty, thread.w)
        write(rdK, sK, uint32(0), dK, row0, head, own)

    return fa1_write_columns


@part
def _make_add_columns(spec):
    """Make ``add_columns(rdK, sK, A, row0, head, thread)``, which adds this thread's part of dK to
    the array A atomically.

    A is the float32 sum of dK in global memory, to which several blocks add. ``sK`` is not used.
    """
    add = column_pairs(spec, make_add_two(spec))

    def add_columns(rdK, sK, A, row0, head, thread):
        add(rdK, A[head.b, head.hk], row0, thread)

    return add_columns
