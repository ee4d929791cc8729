"""FlashAttention-1 backward on Hopper's tensor cores: O comes with the row tiles, D is made in
every pass, and dQ passes through global memory in every pass.
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
DOT_THREADS = 64  # that make D
CHUNK = 8  # 16-bit elements in 16 bytes


@part
def make_fa1_backward_shared_memory(spec):
    """``fa1_backward_shared_memory()``: Kj and Vj, slots of Q, dO, O, dS, L and D, words of visits
    where a block mask hides some, and the barriers.
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
    """``rows_of_block(Q, K, group, split_rows, options)``: the first head of this block, how many
    there are, its first row of Q of each, and one past its last.
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
    """``pass_word(h, i0, first, j0, h_end, i_first, i_end)``: what a slot of Q says to consumers,
    which read no list of a block mask: the head of the next visit, and a word (``listed.word``).
    Without a block mask nobody looks at it.
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
    """``write_pass_word(shared, slot, word)``: what ``pass_word`` gave, to the slot, beside Qi."""
    sparse, grouped = spec.features.sparse, spec.grouped

    def write_pass_word(shared, slot, word):
        if sparse:
            shared.words[uint32(2 * slot.stage)] = word[1]
            if grouped:
                shared.words[uint32(2 * slot.stage + 1)] = word[0]

    return write_pass_word


@part
def make_read_pass_word(spec):
    """Make ``read_pass_word(rBS, shared, slot)``, which reads the word of a visit from the slot.

    ``rBS[0]`` gets the state of the tile's block if a ``mask_mod`` needs it. Without a block mask
    the result is 0, and the functions that take a ``visit`` ignore it.
    """
    sparse, read = spec.features.sparse, make_read_word(spec)

    def read_pass_word(rBS, shared, slot):
        if sparse:
            return read(rBS, shared.words, uint32(2 * slot.stage))
        return uint32(0)

    return read_pass_word


@part
def make_next_by_word(spec):
    """``next_by_word(visit, shared, slot, h, i0, i_first, i_end)``: ``next_visit`` of a consumer,
    which with a block mask reads in the slot what comes next.
    """
    Br, grouped, sparse = spec.Br, spec.grouped, spec.features.sparse

    def next_by_word(visit, shared, slot, h, i0, i_first, i_end):
        h_next, i_next = h, uint32(i0 + Br)
        if sparse:
            if grouped:
                h_next = shared.words[uint32(2 * slot.stage + 1)]
                cuda.syncwarp()  # one thread says for its warp that the slot is read
            i_next = next_by(visit)
        elif grouped and i_next >= i_end:
            h_next, i_next = uint32(h + 1), i_first
        return h_next, i_next

    return next_by_word


@part
def make_visits_of_pass(spec):
    """``visits_of_pass(heads, i_first, i_end)``: how many visits, if no block mask hides any."""
    Br = spec.Br

    def visits_of_pass(heads, i_first, i_end):
        count = uint32(0)
        if i_first < i_end:
            count = uint32((i_end - i_first + (Br - 1)) // Br)
        return uint32(count * heads)

    return visits_of_pass


@part
def make_is_nth_visit(spec):
    """``is_nth_visit(n, n_end, h, h_end, i0, i_end)``: whether visit n comes before n_end;
    with a block mask, whose visits cannot be counted beforehand, ``is_visit``.
    """
    sparse, is_visit = spec.features.sparse, make_is_visit(spec)

    def is_nth_visit(n, n_end, h, h_end, i0, i_end):
        if sparse:
            return is_visit(h, h_end, i0, i_end)
        return n < n_end

    return is_nth_visit


@part
def make_has_visits(spec):
    """``has_visits(first, j0, h_end, i_first, i_end)``: whether a pass has a visit."""
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
    """``is_visit(h, h_end, i0, i_end)``: whether there is a row tile at i0 of head h."""
    grouped = spec.grouped

    def is_visit(h, h_end, i0, i_end):
        return i0 < i_end and (not grouped or h < h_end)

    return is_visit


@cache
def make_fa1_load_columns(spec):
    """``fa1_load_columns(shared, K, V, j0, head)``: Kj and Vj, zeros beyond the arrays."""
    return load_column_tiles(spec, make_key_box(spec, False))


@part
def make_load_rows(spec):
    """``load_rows(shared, Q, dO, O, i0, head, slot)``: Qi, dOi and Oi to a slot."""
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
    """``load_lse(shared, L, i0, head, slot)``: a warp loads L, in units of log2, and the
    gradient of L, to where D will be. Both are 0 past the end and in rows whose L is -inf.
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
    """``dot_columns(Q, O)``: the columns of O; by the shape of Q where it has as many, which the
    kernel reads in any case.
    """
    own = bool(spec.head_dim_v)

    def dot_columns(Q, O):
        if own:
            return uint32(O.shape[3])
        return uint32(Q.shape[3])

    return dot_columns


@part
def make_row_dots(spec):
    """``row_dots(shared, stage, columns)``: D = rowsum(dO o O), less dL, by two warps; a thread
    takes a row, in chunks of 16 bytes. They have few registers, so loops are not to be unrolled:
    the compiler is not told their ends.
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


# A part of dQ is always the same thread's: it reads what it has written itself in the pass before,
# which needs no fence and no barrier.
def pairs_of_dq(spec):
    """Rows and columns from a thread's first element of dQ to each of its pairs."""
    return tuple((8 * i, 8 * n) for i in range(2) for n in range(spec.query_columns // 8))


@part
def make_query_place(spec):
    """``query_place(row0, rows_end, thread)``: row and column of this thread's first element of dQ,
    and the rows from there to the end. Others stand as ``pairs_of_dq`` says.
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
    """``read_dq(rdQ, A, visit, j0, row0, rows_end, head, thread)``: this thread's part of dQ so
    far, zeros past the end; of a visit that starts it nothing is read.
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
    """``write_dq(rdQ, sums, scale, more, row0, rows_end, head, thread)``: this thread's part of dQ:
    to A, if there is more to come, else scale times it to dQ, rounded; ``sums`` are both.
    """
    write_sums, write_rounded = _make_write_dq_sums(spec), _make_write_rounded(spec)

    def write_dq(rdQ, sums, scale, more, row0, rows_end, head, thread):
        A, dQ = sums
        if more:
            write_sums(rdQ, A[head.b, head.h], row0, rows_end, thread)
        else:
            write_rounded(rdQ, dQ[head.b, head.h], scale, row0, rows_end, thread)

    return write_dq


@part
def make_initialise_dq(spec):
    """``initialise_dq(rdQ, sums, scale, first, h_end, row0, rows_end, thread)``: dQ = 0 of the
    query heads from ``first`` on and these rows, as far as no visit starts it.
    """
    Br, RQ, initialises = spec.Br, spec.query_registers, spec.features.initialises
    is_unseen, sparse = make_is_unseen(spec), spec.features.sparse
    write_sums, write_rounded = _make_write_dq_sums(spec), _make_write_rounded(spec)

    def initialise_dq(rdQ, sums, scale, first, h_end, row0, rows_end, thread):
        A, dQ = sums
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            b, h = first.b, first.h
            while h < h_end:
                i0 = row0
                while i0 < rows_end:
                    if is_unseen(i0, member(first, h)):
                        if not sparse:  # whose first visit reads no A
                            write_sums(rdQ, A[b, h], i0, rows_end, thread)
                        write_rounded(rdQ, dQ[b, h], scale, i0, rows_end, thread)
                    i0 = uint32(i0 + Br)
                h = uint32(h + 1)

    return initialise_dq


@cache
def _make_write_dq_sums(spec):
    """``write_sums(rdQ, A, row0, rows_end, thread)``: this thread's part of dQ, in float32."""
    return write_pairs_of(spec, pairs_of_dq(spec), make_query_place(spec))


@cache
def _make_write_rounded(spec):
    """``write_rounded(rdQ, dQ, factor, row0, rows_end, thread)``: factor times dQ, rounded."""
    return write_rounded_of(spec, pairs_of_dq(spec), make_query_place(spec))


# --- dK and dV -------------------------------------------------------------------------------


@cache
def make_fa1_write_dv(spec):
    """``fa1_write_dv(rdV, sV, dV, row0, head, thread)``: as ``fa1_write_columns``, of dV."""
    return make_fa1_write_columns(spec.of_values)


@part
def make_fa1_write_columns(spec):
    """``fa1_write_columns(rdK, sK, dK, row0, head, thread)``: this consumer's rows of dK; or,
    where blocks share them, added to their float32 sum atomically.
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
    """``add_columns(rdK, sK, A, row0, head, thread)``: A += this thread's part of dK."""
    add = column_pairs(spec, make_add_two(spec))

    def add_columns(rdK, sK, A, row0, head, thread):
        add(rdK, A[head.b, head.hk], row0, thread)

    return add_columns
