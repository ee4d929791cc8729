"""Parts of the backward pass on Hopper's tensor cores, for FA-2 and partly for FA-1.

Registers hold the transposed S and dP. Row tiles are loaded into the slots of a pipeline in shared
memory. A row tile consists of Q, dO, L and D.

For each slot, the array ``sL`` in shared memory contains L of a row tile in units of log2, followed
by D. ``value_place`` gives the order of the rows in it. An argument ``at`` that follows ``sL`` is
the element of sL at which the slot begins.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, exp2, maximum, opaque
from fa_numba.intrinsics.bulk_copy import (
    add_box,
    add_bulk,
    commit_boxes,
    fence_async_proxy,
    load_box,
    wait_boxes_read,
)
from fa_numba.intrinsics.matrix import CONVERSIONS, stmatrix
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, expect_bytes, mbarrier_tile
from fa_numba.intrinsics.reduction import add_four_vector, add_pair_vector
from fa_numba.intrinsics.shared import (
    half_tile,
    index_tile,
    load4,
    load_pair,
    shared_tile,
    store2,
    store4,
)
from fa_numba.intrinsics.warpgroup import MULTIPLY, STEP
from fa_numba.parts.bias import make_add_bias
from fa_numba.parts.fragments.pairs import make_write_floats
from fa_numba.parts.gradients import make_scale_columns as make_scale_columns
from fa_numba.parts.gradients import make_start_columns as make_start_columns
from fa_numba.parts.grid import make_key_rows, make_query_rows
from fa_numba.parts.mods import (
    kept_sums,
    make_add_sums,
    make_p_and_ds,
    make_p_and_slope,
    make_pairs,
    make_start_sums,
    make_times_slope,
)
from fa_numba.parts.namespace import part
from fa_numba.parts.records import BackwardShared, GroupThread, RowSlots, SlotOffsets
from fa_numba.parts.wgmma.drawing import make_read_drawn
from fa_numba.parts.wgmma.epilogue import make_write_tile
from fa_numba.parts.wgmma.key_tiles import make_read_key_box, make_read_query_box
from fa_numba.parts.wgmma.load import make_tile
from fa_numba.parts.wgmma.pingpong import make_sync_group
from fa_numba.parts.wgmma.products import make_round_p, pack_p, wait_for, wait_with
from fa_numba.parts.wgmma.wide_gradients import make_wide_shared_memory
from fa_numba.tiling.spec import FRAGMENT, FRAGMENT_ROWS
from fa_numba.tiling.wgmma import GROUP, GROUP_ROWS, PANEL

WARP = 32
FLOATS = 32  # floats in a row of a box
VALUE_THREADS = 64  # threads that load L and D


@part
def make_backward_shared_memory(spec):
    """Make ``backward_shared_memory()``, which returns the kernel's shared memory as a record.

    Normally the record is a ``BackwardShared``. For head dimensions above 128, both consumers
    compute the same columns, and the record is a ``WideShared``.
    """
    if spec.wide:
        return make_wide_shared_memory(spec)
    (NQ, NK, NS), (NO, NV, _) = spec.tile_halves, spec.of_values.tile_halves
    AT_Q, AT_DO, AT_DS, AT_DQ, AT_L, AT_BARRIERS = spec.offsets
    NQS, NOS, NSS, NDQ, NL = 2 * NQ, 2 * NO, 2 * NS, spec.query_floats, 4 * spec.Br
    (AT_WORDS, WORDS), (AT_B, NB), BARRIERS = spec.key_tile_words, spec.drawn_span, spec.barriers

    def backward_shared_memory():
        sK, sV = half_tile(0, NK), half_tile(NK, NV)
        sQ, sdO, sdS = half_tile(AT_Q, NQS), half_tile(AT_DO, NOS), half_tile(AT_DS, NSS)
        sdQ, sL = shared_tile(AT_DQ, NDQ), shared_tile(AT_L, NL)
        bars, words = mbarrier_tile(AT_BARRIERS, BARRIERS), index_tile(AT_WORDS, WORDS)
        sB = index_tile(AT_B, NB)
        return BackwardShared(sK, sV, RowSlots(sQ, sdO, sL), sdS, sdQ, sB, words, bars)

    return backward_shared_memory


@part
def make_offsets(spec):
    """Make ``offsets(stage)``, which returns where the parts of slot number ``stage`` begin.

    The result is a ``SlotOffsets`` record.
    """
    (NQ, _, NS), values, NO = spec.tile_halves, 2 * spec.Br, spec.of_values.tile_halves[0]

    def offsets(stage):
        rows, out = uint32(stage * NQ), uint32(stage * NO)
        return SlotOffsets(rows, out, uint32(stage * values), uint32(stage * NS))

    return offsets


# --- row tiles -------------------------------------------------------------------------------


@cache
def make_load_columns(spec):
    """Make ``load_columns(shared, K, V, j0, head)``, which starts to load Kj and Vj.

    Rows beyond the sequence become 0.
    """
    return load_column_tiles(spec, make_read_key_box(spec, spec.key_ends))


@part
def load_column_tiles(spec, find):
    """Make ``load_columns(shared, K, V, j0, head)``, which starts to load the column tiles Kj and
    Vj.

    ``find(T, row, head)`` is a device function that returns the ``Box`` of a row in the tensor map
    of K or V.
    """
    Bc, OF_K, OF_V = spec.Bc, spec.panels, spec.of_values.panels
    BOTH, size, barrier = min(OF_K, OF_V), 2 * PANEL * (OF_K + OF_V) * Bc, spec.pipelines.kv.full

    def load_columns(shared, K, V, j0, head):
        bars = shared.bars
        expect_bytes(bars, uint32(barrier), size)
        k, v = find(K, j0, head), find(V, j0, head)
        for n in range(BOTH):
            at, col = uint32(PANEL * Bc * n), PANEL * n
            load_box(shared.sK, at, K, k.outer, k.inner, k.row, col, bars, uint32(barrier))
            load_box(shared.sV, at, V, v.outer, v.inner, v.row, col, bars, uint32(barrier))
        for n in range(BOTH, OF_K):
            at, col = uint32(PANEL * Bc * n), PANEL * n
            load_box(shared.sK, at, K, k.outer, k.inner, k.row, col, bars, uint32(barrier))
        for n in range(BOTH, OF_V):
            at, col = uint32(PANEL * Bc * n), PANEL * n
            load_box(shared.sV, at, V, v.outer, v.inner, v.row, col, bars, uint32(barrier))

    return load_columns


@part
def make_load_q(spec):
    """Make ``load_q(shared, Q, i0, head, slot)``, which starts to load Qi into a slot.

    Rows beyond the sequence become 0.
    """
    load, NQ, full = _make_load_rows(spec), spec.tile_halves[0], spec.pipelines.q.full

    def load_q(shared, Q, i0, head, slot):
        at, barrier = uint32(slot.stage * NQ), uint32(full + slot.stage)
        load(shared.slots.sQ, at, Q, i0, head, shared.bars, barrier)

    return load_q


@part
def make_load_do(spec):
    """Make ``load_do(shared, dO, i0, head, slot)``, which starts to load dOi into a slot.

    Rows beyond the sequence become 0.
    """
    load, full = _make_load_rows(spec.of_values), spec.pipelines.do.full
    NO = spec.of_values.tile_halves[0]

    def load_do(shared, dO, i0, head, slot):
        at, barrier = uint32(slot.stage * NO), uint32(full + slot.stage)
        load(shared.slots.sdO, at, dO, i0, head, shared.bars, barrier)

    return load_do


@part
def _make_load_rows(spec):
    """Make ``load(sT, at, T, row0, head, bars, barrier)``, which starts to load a row tile of Q or
    dO from T to sT.

    The tile begins at element ``at`` of sT. ``barrier`` is the number of the mbarrier that counts
    the arriving bytes.
    """
    return make_tile(spec.Br, spec.Br, spec.panels, make_read_query_box(spec))


@device_function
def value_place(r):
    """Return the index at which L and D of row r of a tile are stored, relative to the first row.

    Of 16 rows, a thread holds four: 2 ty, 2 ty + 1, 2 ty + 8 and 2 ty + 9. The values of these four
    rows are stored side by side, so that one load of 16 bytes reads them.
    """
    return uint32(r // 16 * 16 + r % 8 // 2 * 4 + r % 16 // 8 * 2 + r % 2)


@part
def make_load_values(spec):
    """Make ``load_values(shared, L, D, i0, rows_end, slot)``, by which two warps load L and D of a
    row tile into a slot.

    In the slot, D follows L. L is stored in units of log2. Rows at or past ``rows_end`` get L = 0
    and D = 0. In rows that see no column, L is -inf, and 0 is stored instead.
    """
    Br, place_of, full = spec.Br, value_place, spec.pipelines.q.full

    def load_values(shared, L, D, i0, rows_end, slot):
        at, barrier = uint32(slot.stage * (2 * Br)), uint32(full + slot.stage)
        r = uint32(uint32(cuda.threadIdx.x) - WARP)
        place, sL = uint32(at + place_of(r)), shared.slots.sL
        for n in range(Br // VALUE_THREADS):
            row = uint32(i0 + r + VALUE_THREADS * n)
            shift, d = float32(0.0), float32(0.0)
            if row < rows_end:
                shift, d = LOG2E * L[row], D[row]
            if shift == NEG_INF:
                shift = float32(0.0)
            sL[uint32(place + VALUE_THREADS * n)] = shift
            sL[uint32(place + (Br + VALUE_THREADS * n))] = d
        arrive_mbarrier(shared.bars, barrier)

    return load_values


# --- S, P and dS -----------------------------------------------------------------------------


@part
def make_scale_and_bias(spec):
    """Make ``scale_and_bias(rS, scale, tile)``, which multiplies S by ``scale`` and adds the bias,
    if ``spec.bias_first`` is true.

    This happens before the product dP begins, because the loads of the bias and dP together would
    need more registers than there are. If ``spec.bias_first`` is false, the function does nothing,
    and ``scale_and_mask`` does both steps.
    """
    part, bias_first = spec.part, spec.bias_first
    add_bias = make_add_bias(part, LOG2E, False)
    RS = spec.TM * spec.TN

    def scale_and_bias(rS, scale, tile):
        if bias_first:
            for e in range(RS):
                rS[e] *= scale
            add_bias(rS, rS, tile)

    return scale_and_bias


@part
def make_p_of_columns(spec):
    """Make ``p_of_columns(rS, rP, scale, sL, at, tile)``, which replaces the scores in the
    registers rS by PT = exp(ST - L).

    ``sL`` and ``at`` give L of the row tile in shared memory. Two kinds of kernels are different:

    - If the derivatives of ``score_mod`` are computed together with P (``spec.slopes_early``), rS
      gets PT times these derivatives, and rP gets PT in 16 bits.
    - With a cap, or if the kernel keeps the scores until it computes dS (``features.scores_stay``),
      the function does nothing. ``ds_of_columns`` then computes PT.

    The first kind has priority if both descriptions fit.
    """
    if spec.slopes_early:
        return _make_p_and_slopes(spec)
    late = spec.features.softcap or spec.features.scores_stay
    probabilities = make_probabilities(spec)

    def p_of_columns(rS, rP, scale, sL, at, tile):
        if not late:
            probabilities(rS, scale, sL, at, tile.thread)

    return p_of_columns


@part
def _make_p_and_slopes(spec):
    """Make the function ``p_of_columns`` that ``make_p_of_columns`` describes, for kernels that
    compute the derivatives of ``score_mod`` together with P (``spec.slopes_early``).

    The registers rS get PT times the derivatives of the scores, and the registers rP get PT in 16
    bits.
    """
    slopes_of_pair, round_pair = _make_slopes_of_pair(spec), pack_p(spec)
    times_slope = make_times_slope(spec.features)

    @device_function
    def of_pair(rP, rS, e, given, place, head):
        p0, p1, g0, g1 = slopes_of_pair(rS, e, given, place, head)
        rP[e // 2] = round_pair(p0, p1)
        rS[e], rS[e + 1] = times_slope(p0, g0), times_slope(p1, g1)

    pairs = make_pairs(spec, of_pair)

    def p_of_columns(rS, rP, scale, sL, at, tile):
        pairs(rP, rS, (sL, uint32(at + 4 * tile.thread.ty)), tile)

    return p_of_columns


@part
def _make_slopes_of_pair(spec):
    """Make ``slopes_of_pair(rS, e, given, place, head)``, which returns P and the slope of two
    elements, in the registers e and e + 1 of rS.

    The result has four values: both P, then both slopes. A slope is the derivative of the score.
    ``given`` is a pair: the array sL, and the index in sL at which this thread's first L is stored.
    ``place`` is the position of the first element.
    """
    TM, p_and_slope = spec.TM, make_p_and_slope(spec)

    def slopes_of_pair(rS, e, given, place, head):
        row, col, origin = place
        shifts = load_pair(given[0], uint32(given[1] + e % TM // 4 * 16 + e % 4))
        p0, g0, _ = p_and_slope(rS[e], shifts[0], True, place, head)
        below = int32(row + 1), col, origin
        p1, g1, _ = p_and_slope(rS[e + 1], shifts[1], True, below, head)
        return p0, p1, g0, g1

    return slopes_of_pair


@part
def make_round_early(spec):
    """Make ``round_early(rP, rS)``, which rounds P in the registers rS to 16 bits in the registers
    rP.

    With ``spec.slopes_early`` it does nothing, because ``p_of_columns`` has already rounded P.
    """
    early, round_p = spec.slopes_early, make_round_p(spec.transposed)

    def round_early(rP, rS):
        if not early:
            round_p(rP, rS)

    return round_early


@part
def make_probabilities(spec):
    """Make ``probabilities(rS, scale, sL, at, thread)``, which replaces the scores in the registers
    rS by PT = exp(ST - L).

    With ``spec.folds_scale``, the scores are first multiplied by ``scale``. Otherwise
    ``scale_and_mask`` has done this before.
    """
    TM, TN, folds = spec.TM, spec.TN, spec.folds_scale

    def probabilities(rS, scale, sL, at, thread):
        for m in range(TM // 4):
            shifts = load4(sL, uint32(at + 16 * m + 4 * thread.ty))
            for n in range(4):
                for j in range(TN):
                    s = rS[j * TM + 4 * m + n]
                    if folds:
                        s = s * scale
                    rS[j * TM + 4 * m + n] = exp2(s - shifts[n])

    return probabilities


@part
def make_ds_of_columns(spec):
    """Make ``ds_of_columns(rdS, rP, rdP, rS, sL, at, tile)``, which computes dST = PT o (dPT - D)
    and rounds it to 16 bits in rdS.

    ``rdP`` holds dPT. Where P is before the call depends on the kernel. The first case that fits
    holds:

    1. ``spec.rounds_before_ds``: rP holds PT in 16 bits.
    2. ``spec.slopes_early``: rS holds PT times the derivatives of the scores. The result contains
       these derivatives.
    3. A cap, or ``features.scores_stay``: rS holds the scores. The function computes PT and the
       derivatives of the scores. The result contains these derivatives.
    4. All other kernels: rS holds PT.

    In the cases 3 and 4, the function also rounds PT to 16 bits in rP, if this has not been done
    before (``spec.rounds_early`` is false). It handles few rows at a time, so that the registers of
    rounded values become free.
    """
    if spec.rounds_before_ds or spec.slopes_early:
        return _make_ds_of_dp(spec)
    if spec.slopes_alone:
        return _make_ds_of_pairs(spec)
    if spec.features.scores_stay:
        return _make_ds_of_modified(spec)
    TM, TN, Br, late, softcap = (
        spec.TM,
        spec.TN,
        spec.Br,
        not spec.rounds_early,
        spec.features.softcap,
    )
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]
    ds_of_kept, round_pair = make_ds_of_kept(spec), pack_p(spec)

    def ds_of_columns(rdS, rP, rdP, rS, sL, at, tile):
        options, thread = tile.head.options, tile.thread
        if softcap:
            inverse = float32(1.0) / options.softcap
        for m in range(TM // 4):
            dots = load4(sL, uint32(uint32(at + Br) + 16 * m + 4 * thread.ty))
            if softcap:
                shifts = load4(sL, uint32(at + 16 * m + 4 * thread.ty))
            for j in range(TN):
                for n in range(0, 4, 2):
                    e = j * TM + 4 * m + n
                    p0, p1 = rS[e], rS[e + 1]
                    g0, g1 = p0, p1
                    if softcap:
                        p0, p1 = exp2(p0 - shifts[n]), exp2(p1 - shifts[n + 1])
                        g0, g1 = p0 * cap_slope(g0, inverse), p1 * cap_slope(g1, inverse)
                    ds0 = ds_of_kept(g0, rdP[e], dots[n], options)
                    ds1 = ds_of_kept(g1, rdP[e + 1], dots[n + 1], options)
                    rdS[e // 2] = pack(ds0, ds1)
                    if late:
                        rP[e // 2] = round_pair(p0, p1)

    return ds_of_columns


@part
def _make_ds_of_dp(spec):
    """Make the function ``ds_of_columns`` that ``make_ds_of_columns`` describes, for kernels that
    have already computed and rounded PT.

    These are kernels with ``spec.rounds_before_ds`` or ``spec.slopes_early``. With
    ``spec.rounds_before_ds``, PT is read from rP in 16 bits. Otherwise rS holds PT times the
    derivatives of the scores.
    """
    TM, TN, Br, rounded = spec.TM, spec.TN, spec.Br, spec.rounds_before_ds
    times_slope = make_times_slope(spec.features)
    pack, unpack = CONVERSIONS[DTYPES[spec.dtype].matrix]

    def ds_of_columns(rdS, rP, rdP, rS, sL, at, tile):
        for m in range(TM // 4):
            dots = load4(sL, uint32(uint32(at + Br) + 16 * m + 4 * tile.thread.ty))
            for j in range(TN):
                for n in range(0, 4, 2):
                    e = j * TM + 4 * m + n
                    if rounded:
                        p0, p1 = unpack(rP[e // 2])
                        ds0, ds1 = p0 * (rdP[e] - dots[n]), p1 * (rdP[e + 1] - dots[n + 1])
                    else:
                        ds0 = times_slope(rdP[e] - dots[n], rS[e])
                        ds1 = times_slope(rdP[e + 1] - dots[n + 1], rS[e + 1])
                    rdS[e // 2] = pack(ds0, ds1)

    return ds_of_columns


@part
def _make_ds_of_pairs(spec):
    """Make the function ``ds_of_columns`` that ``make_ds_of_columns`` describes, for kernels that
    compute P and the derivatives of ``score_mod`` together with dS.

    Registers hold the scores until dS is computed, because dS needs the derivative of ``score_mod``
    (``spec.slopes_alone``). The function computes P and this derivative for two neighbouring rows
    at a time.
    """
    TM, COUNT, Br, late = spec.TM, spec.TM * spec.TN, spec.Br, not spec.rounds_early
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]
    slopes_of_pair, round_pair = _make_slopes_of_pair(spec), pack_p(spec)
    times_slope = make_times_slope(spec.features)

    @device_function
    def of_pair(rdP, rS, e, given, place, head):
        p0, p1, g0, g1 = slopes_of_pair(rS, e, given, place, head)
        dots = load_pair(given[0], uint32(uint32(given[1] + Br) + e % TM // 4 * 16 + e % 4))
        rS[e], rS[e + 1] = p0, p1
        rdP[e] = times_slope(p0 * (rdP[e] - dots[0]), g0)
        rdP[e + 1] = times_slope(p1 * (rdP[e + 1] - dots[1]), g1)

    pairs = make_pairs(spec, of_pair)

    def ds_of_columns(rdS, rP, rdP, rS, sL, at, tile):
        pairs(rdP, rS, (sL, uint32(at + 4 * tile.thread.ty)), tile)
        for e in range(0, COUNT, 2):
            rdS[e // 2] = pack(rdP[e], rdP[e + 1])
            if late:
                rP[e // 2] = round_pair(rS[e], rS[e + 1])

    return ds_of_columns


@part
def _make_ds_of_modified(spec):
    """Make the function ``ds_of_columns`` that ``make_ds_of_columns`` describes, for kernels that
    compute ``score_mod`` and further options together with dS.

    The further options are ALiBi, a bias, dropout, and gradients of captured arrays. Registers hold
    the scores until dS is computed (``features.scores_stay``). The function computes P and dS for
    one element at a time.
    """
    TM, COUNT, Br, late = spec.TM, spec.TM * spec.TN, spec.Br, not spec.rounds_early
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]
    round_pair, dropout, WORDS = pack_p(spec), spec.features.dropout, max(1, spec.drawn_words)
    read_drawn = make_read_drawn(spec)

    @device_function
    def values_of(given, e):
        _, sL, at, rBits = given
        place, kept = uint32(at + e % TM // 4 * 16 + e % 4), True
        if dropout:
            row = e % TM
            kept = (rBits[row // 16] >> uint32(row % 16 + 16 * (e // TM))) & uint32(1) != uint32(0)
        return sL[place], sL[uint32(place + Br)], kept

    p_and_ds, (SUMS, PLACES) = (
        make_p_and_ds(spec, values_of, make_ds_of_kept(spec)),
        kept_sums(spec),
    )
    start_sums, add_sums = make_start_sums(spec), make_add_sums(spec)

    def ds_of_columns(rdS, rP, rdP, rS, sL, at, tile):
        sums = cuda.local.array(SUMS, float32), cuda.local.array(PLACES, uint32)
        rBits = cuda.local.array(WORDS, uint32)
        start_sums(sums)
        if dropout:
            read_drawn(rBits, uint32(at // uint32(2 * Br)))
        p_and_ds(rdP, rS, (sums, sL, uint32(at + 4 * tile.thread.ty), rBits), tile)
        add_sums(sums, tile.head)
        for e in range(0, COUNT, 2):
            rdS[e // 2] = pack(rdP[e], rdP[e + 1])
            if late:
                rP[e // 2] = round_pair(rS[e], rS[e + 1])

    return ds_of_columns


@part
def make_ds_of_kept(spec):
    """Make ``ds_of_kept(p, dp, d, options)``, which returns one element of dS = P o (dP - D).

    ``p`` is the element of P, which is negative if ``drop`` has marked it as dropped. ``dp`` is the
    element of dP, and ``d`` is D of the row.
    """
    dropout = spec.features.dropout

    def ds_of_kept(p, dp, d, options):
        if dropout:
            # P is negative if it was dropped. kept is then 0, otherwise 2 P. The additions run on
            # units that have little else to do.
            kept = p + abs(p)
            return kept * (dp * (float32(0.5) * options.inverse_keep)) - abs(p) * d
        return p * (dp - d)

    return ds_of_kept


@device_function
def cap_slope(s, inverse):
    """Return the derivative of the cap, 1 - tanh^2, where ``s`` is the score after the cap.

    The result is 0 if the score is masked. ``inverse`` is 1 divided by the cap.
    """
    t = maximum(s * inverse, float32(-1.0))
    return float32(1.0) - t * t


@part
def make_store_ds(spec):
    """Make ``store_ds(sdS, at, rdS, thread)``, which stores dST in shared memory for all consumers.

    ``rdS`` holds the thread's elements of dST in 16 bits. The slot begins at element ``at`` of sdS.
    A row of sdS is a column of S, and a panel contains 64 rows of S. The layout has the swizzle of
    the copy engine.
    """
    if spec.stores_tiles:
        return _make_store_tiles(spec)
    TM, TN, Bc = spec.TM, spec.TN, spec.Bc

    def store_ds(sdS, at, rdS, thread):
        first = uint32(
            at + PANEL * (GROUP_ROWS * thread.w + thread.tx) + 8 * (thread.tx % 8) + 2 * thread.ty
        )
        for j in range(TN):
            for n in range(TM // 2):
                place = uint32(
                    uint32(first + PANEL * (8 * j + Bc * (n // 8))) ^ uint32(8 * (n % 8))
                )
                store2(sdS, place, rdS[j * (TM // 2) + n])
        fence_async_proxy()

    return store_ds


@part
def _make_store_tiles(spec):
    """Make ``store_tiles(sdS, at, rdS, thread)``, which does the work of ``store_ds`` by the
    instruction ``stmatrix``.

    One instruction stores four tiles of 8 columns and 8 rows of S.
    """
    TN, TILES, Bc = spec.TN, spec.TM // 2, spec.Bc

    def store_tiles(sdS, at, rdS, thread):
        line = uint32(4 * (thread.tx % 2) + thread.ty)  # the column of a tile that this lane stores
        column = uint32(GROUP_ROWS * thread.w + thread.tx // 8 * 8 + line)
        exchange = uint32(uint32(thread.tx % 8 // 2) ^ line)  # the copy engine's swizzle
        first = uint32(at + PANEL * column + 8 * exchange)
        for j in range(TN):
            for n in range(0, TILES, 4):
                e = j * TILES + n
                place = uint32(
                    uint32(first + PANEL * (8 * j + Bc * (n // 8))) ^ uint32(8 * (n % 8))
                )
                stmatrix(sdS, place, rdS[e], rdS[e + 1], rdS[e + 2], rdS[e + 3])
        fence_async_proxy()

    return store_tiles


# --- dQ, dK and dV ---------------------------------------------------------------------------


@part
def make_begin_dq(spec):
    """Make ``begin_dq(rdQ, sdS, at, sK, w)``, which begins consumer warpgroup w's part of the
    product dQ = dS K.

    The part has 64 rows and ``spec.query_columns`` columns. If the row tile has 128 rows, each
    consumer has its own 64 rows. Otherwise, each consumer has its own columns. The sum is over all
    columns of S, which are the rows of sdS and of sK. FlashAttention-1 adds the product to rdQ.
    FlashAttention-2 overwrites rdQ.
    """
    Bc, STEPS, by_rows = spec.Bc, spec.Bc // STEP, spec.Br > GROUP_ROWS
    ADDS, COLUMNS = int(spec.algorithm == "fa1"), spec.query_columns
    PART = PANEL * Bc if COLUMNS == PANEL else COLUMNS
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]

    def begin_dq(rdQ, sdS, at, sK, w):
        rows, columns = uint32(0), uint32(PART * w)
        if by_rows:
            rows, columns = columns, rows
        multiply(rdQ, COLUMNS, sdS, uint32(at + rows), Bc, 1, sK, columns, Bc, 1, STEPS, ADDS)

    return begin_dq


@cache
def make_wait_dq(spec):
    """Make ``wait_dq(rdQ)``, which waits until the product dQ is in the registers rdQ.

    One product that was begun later may still be running.
    """
    return wait_for(spec.query_registers, 1)


@part
def make_wait_columns(spec):
    """Make ``wait_columns(rdK, rdV, more)``, which waits until dK and dV are in registers.

    If ``more`` is true, one product that was begun later, dQ, may still be running.
    """
    *_, RK, RV = spec.tile_registers
    wait_dk, wait_dv = wait_with(RK, 1), wait_with(RV, 1)

    def wait_columns(rdK, rdV, more):
        wait_dk(rdK, more)
        wait_dv(rdV, more)

    return wait_columns


@part
def make_add_dq(spec):
    """Make ``add_dq(rdQ, sdQ, A, row0, head, thread)``, which adds this consumer's part of dQ to
    the float32 array A atomically.

    A contains the sum of dQ over all column tiles. The part is stored in shared memory, in the
    consumer's part of sdQ. The copy engine adds it from there to A, in boxes of 32 columns. Rows
    beyond the sequence are not added.
    """
    by_rows, sync_group = spec.Br > GROUP_ROWS, make_sync_group(spec)
    find, BOX, COLUMNS = make_read_query_box(spec), GROUP_ROWS * FLOATS, spec.query_columns
    BOXES = COLUMNS // FLOATS

    def add_dq(rdQ, sdQ, A, row0, head, thread):
        w, tx, ty = thread.w, thread.tx, thread.ty
        if tx == uint32(0) and ty == uint32(0):
            wait_boxes_read()
        sync_group(w)  # the copy engine has read the part before
        # Computed again here, so that they take no registers during the loop.
        own_thread = opaque(uint32(uint32(cuda.threadIdx.x) - GROUP))
        quad = uint32(own_thread // 4)
        row, col = uint32(quad % 32 // 8 * 16 + quad % 8), uint32(own_thread % 4)
        own = uint32(BOXES * BOX * uint32(own_thread // GROUP))
        chunk = uint32(uint32(col // 2) ^ uint32(row % 8))
        first = uint32(own + FLOATS * row + 4 * chunk + 2 * (col % 2))
        for i in range(2):
            for n in range(COLUMNS // 8):
                e = i * (COLUMNS // 4) + 2 * n
                place = uint32(
                    uint32(first + FLOATS * 8 * i + BOX * (n // 4)) ^ uint32(8 * (n % 4))
                )
                sdQ[place] = rdQ[e]
                sdQ[uint32(place + 1)] = rdQ[e + 1]
        fence_async_proxy()
        sync_group(w)
        if tx == uint32(0) and ty == uint32(0):
            row, col = row0, uint32(COLUMNS * w)
            if by_rows:
                row, col = uint32(row0 + GROUP_ROWS * w), uint32(0)
            box = find(A, row, head)
            add_box(A, box.outer, box.inner, box.row, col, sdQ, own)
            if BOXES > 1:
                further = uint32(col + FLOATS)
                add_box(A, box.outer, box.inner, box.row, further, sdQ, uint32(own + BOX))
            commit_boxes()

    return add_dq


@part
def make_end_copies(spec):
    """Make ``end_copies()``, by which each warp waits until the copy engine has read the warp's
    data in shared memory.

    The threads of the warp must not end earlier.
    """

    def end_copies():
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            wait_boxes_read()

    return end_copies


@part
def make_copy_dq(spec):
    """Make ``copy_dq(rdQ, sdQ, A, row0, head, thread)``, which adds each warp's part of dQ to the
    float32 array A atomically.

    A contains the sum of dQ over all column tiles, in the order of fragments
    (``kernels.mma.rows``). A warp's part has 16 rows and 64 columns. It is stored in the warp's
    part of shared memory sdQ, and the copy engine adds it from there to A by one contiguous copy.
    If the 16 rows end beyond the sequence, the part is added from registers instead.
    """
    query_rows, TILES, HALF = make_query_rows(spec), spec.head_dim // 8, PANEL // 4
    OF_PANEL, by_rows, WHOLE = PANEL // 8, spec.Br > GROUP_ROWS, spec.head_dim % PANEL == 0
    PART = OF_PANEL * FRAGMENT

    def copy_dq(rdQ, sdQ, A, row0, head, thread):
        Ah, first = query_rows(A, head), uint32(cuda.threadIdx.x) % uint32(32) == uint32(0)
        if first:
            wait_boxes_read()
        cuda.syncwarp()  # the copy engine has read the part before
        # Computed again here, so that they take no registers during the loop.
        within = opaque(uint32(uint32(cuda.threadIdx.x) % uint32(GROUP)))
        lane, warp = uint32(within % 32), uint32(within // 32)
        own = uint32(PART * uint32(4 * thread.w + warp))
        group, tile0 = uint32(row0 // uint32(FRAGMENT_ROWS) + warp), uint32(OF_PANEL * thread.w)
        if by_rows:
            group, tile0 = uint32(group + 4 * thread.w), uint32(0)
        row = uint32(FRAGMENT_ROWS * group + lane // 4)
        if uint32(FRAGMENT_ROWS * group + FRAGMENT_ROWS) <= head.Nq:
            place = int64(uint32(own + 4 * lane))
            for n in range(OF_PANEL):
                e, at = 2 * n, place + FRAGMENT * n
                store4(sdQ, at, rdQ[e], rdQ[e + 1], rdQ[HALF + e], rdQ[HALF + e + 1])
            fence_async_proxy()
            cuda.syncwarp()
            if first:
                size = uint32(PART)
                if not WHOLE:
                    size = uint32(FRAGMENT * min(uint32(OF_PANEL), uint32(TILES - tile0)))
                add_bulk(Ah, group, uint32(FRAGMENT * tile0), sdQ, own, size)
                commit_boxes()
        else:
            for n in range(OF_PANEL):
                e, at = 2 * n, int64(FRAGMENT * uint32(tile0 + n) + 4 * lane)
                if WHOLE or uint32(tile0 + n) < uint32(TILES):
                    if uint32(row + 8) < head.Nq:
                        x2, x3 = rdQ[HALF + e], rdQ[HALF + e + 1]
                        add_four_vector(Ah, group, at, rdQ[e], rdQ[e + 1], x2, x3)
                    elif row < head.Nq:
                        add_pair_vector(Ah, group, at, rdQ[e], rdQ[e + 1], True)

    return copy_dq


@cache
def make_scale_dv(spec):
    """Make ``scale_dv(rdV, factor)``, which multiplies dV in registers by ``factor``."""
    return make_scale_columns(spec.of_values)


@cache
def make_write_dv(spec):
    """Make ``write_dv(rdV, sV, dV, row0, head, thread)``, which writes this consumer warpgroup's
    rows of dV to global memory.

    It works as ``write_columns``, with shared memory sV in the place of sK.
    """
    return make_write_columns(spec.of_values)


@part
def make_write_columns(spec):
    """Make ``write_columns(rdK, sK, dK, row0, head, thread)``, which writes this consumer
    warpgroup's rows of dK to global memory.

    The column tile begins at row ``row0`` of dK. Normally the rows are rounded to 16 bits and
    stored in shared memory sK, where the consumer's rows of K were. The copy engine copies them
    from there to dK. Rows beyond a packed sequence are not written. If several blocks share a
    column tile (``spec.splits_group``), each thread writes its part of the block's dK in float32
    from registers instead.
    """
    if spec.splits_group:
        return _make_write_part(spec)
    write = make_write_tile(spec.transposed, make_read_key_box(spec, spec.features.packed))

    def write_columns(rdK, sK, dK, row0, head, thread):
        own = GroupThread(thread.tx, thread.ty, thread.w)  # dK is not transposed
        write(rdK, sK, uint32(0), dK, row0, head, own)

    return write_columns


@part
def _make_write_part(spec):
    """Make ``write_part(rdK, sK, A, row0, head, thread)``, which writes this thread's part of dK to
    A in float32.

    The function is for kernels in which several blocks share a column tile. Each block computes dK
    for its share of the query heads or rows. A is an array in the workspace that contains separate
    rows for each share. ``head.hk`` is the number of the share. ``sK`` is not used.
    """
    write, key_rows = column_pairs(spec, make_write_floats(spec)), make_key_rows(spec)

    def write_part(rdK, sK, A, row0, head, thread):
        if thread.tx == uint32(0) and thread.ty == uint32(0):
            wait_boxes_read()  # the copies of dQ must be read before the thread ends
        write(rdK, key_rows(A, head), row0, thread)

    return write_part


@part
def column_pairs(spec, put):
    """Make ``pairs(rdK, A, row0, thread)``, which calls the device function ``put`` for each pair
    of neighbouring elements of dK that the thread holds.

    The call is ``put(A, row, col, inside, low, high)``. ``low`` and ``high`` are the two elements.
    They belong to row ``row`` and the columns col and col + 1 of the array A. ``inside`` says
    whether A has this row. The tile begins at row ``row0`` of A.
    """
    TN, DN4, STEP_ = spec.TN, 4 * spec.DN, spec.column_step

    def pairs(rdK, A, row0, thread):
        for i in range(TN):
            row = uint32(row0 + thread.tx + STEP_ * i)
            inside = row < uint32(A.shape[0])
            for n in range(DN4 // 2):
                e, col = i * DN4 + 2 * n, uint32(8 * n + 2 * thread.ty)
                put(A, row, col, inside, rdK[e], rdK[e + 1])

    return pairs
