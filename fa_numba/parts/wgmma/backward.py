"""What the backward kernel on Hopper's tensor cores does otherwise: S and dP stand transposed in
registers, row tiles come to two places in turn, and their L and D with them.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, anew, exp2, maximum
from fa_numba.intrinsics.barriers import sync_named
from fa_numba.intrinsics.bulk_copy import (
    add_box,
    commit_boxes,
    fence_async_proxy,
    wait_boxes_read,
)
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import (
    arrive_mbarrier,
    fence_mbarrier_init,
    init_mbarrier,
)
from fa_numba.intrinsics.shared import load4, store2
from fa_numba.intrinsics.warpgroup import MULTIPLY, STEP, wait_products
from fa_numba.parts import softmax
from fa_numba.parts.bias import make_add_bias
from fa_numba.parts.heads import make_key_rows
from fa_numba.parts.mma.pairs import make_write_floats
from fa_numba.parts.wgmma import products, stages, stores, tile_load
from fa_numba.parts.wgmma.told import told_key_end, told_query_end
from fa_numba.parts.wgmma.turns import make_meet
from fa_numba.tiling.wgmma import GROUP, GROUP_ROWS, PANEL
from fa_numba.tiling.wgmma_backward import STAGES

# A named barrier of all consumers, beside those of ``turns``.
ALL = 7
WARP = 32
FLOATS = 32  # of a box's row
VALUE_THREADS = 64  # that bring L and D


# --- row tiles -------------------------------------------------------------------------------


@cache
def make_begin_barriers(spec):
    """``begin_barriers(bars)``: a place of Q is full when its L and D are there too, which two
    warps bring; every consumer warp empties one of Q and dO.
    """
    full_kv, full_q, full_do, empty = spec.barrier_places
    warps = 4 * spec.consumers

    @device_function
    def begin_barriers(bars):
        if cuda.threadIdx.x == 0:
            init_mbarrier(bars, full_kv, 1)
            for s in range(STAGES):
                init_mbarrier(bars, full_q + s, 1 + VALUE_THREADS)
                init_mbarrier(bars, full_do + s, 1)
                init_mbarrier(bars, empty + s, warps)
            fence_mbarrier_init()

    return begin_barriers


@cache
def make_next_stage(spec):
    """``next_stage(stage, parity)``, as in the forward pass."""
    return stages.next_of(STAGES)


@cache
def make_next_visit(spec):
    """``next_visit(h, i0, i_first, i_end)``: the head and row tile after this one; the next query
    head's first behind the last of a head.
    """
    Br, single = spec.Br, spec.splits_rows

    @device_function
    def next_visit(h, i0, i_first, i_end):
        h_next, i_next = h, uint32(i0 + Br)
        if not single and i_next >= i_end:
            h_next, i_next = uint32(h + 1), i_first
        return h_next, i_next

    return next_visit


@device_function
def value_place(r):
    """Where the L and D of row r lie: of 16 rows those four that a thread has lie side by side, 2
    ty, the next, and 8 further.
    """
    return uint32(r // 16 * 16 + r % 8 // 2 * 4 + r % 16 // 8 * 2 + r % 2)


@cache
def make_load_values(spec):
    """``load_values(sL, at, L, D, row0, rows_end, bars, barrier)``: two warps bring L, in units of
    log2, and behind it D. Rows past the end have 0, and so have those that see no column.
    """
    Br, place_of = spec.Br, value_place

    @device_function
    def load_values(sL, at, L, D, row0, rows_end, bars, barrier):
        r = uint32(uint32(cuda.threadIdx.x) - WARP)
        place = uint32(at + place_of(r))
        for n in range(Br // VALUE_THREADS):
            row = uint32(row0 + r + VALUE_THREADS * n)
            shift, d = float32(0.0), float32(0.0)
            if row < rows_end:
                shift, d = LOG2E * L[row], D[row]
            if shift == NEG_INF:
                shift = float32(0.0)
            sL[uint32(place + VALUE_THREADS * n)] = shift
            sL[uint32(place + (Br + VALUE_THREADS * n))] = d
        arrive_mbarrier(bars, barrier)

    return load_values


# --- S, P and dS -----------------------------------------------------------------------------


@cache
def make_begin_scores(spec):
    """``begin_scores(rS, sK, first, sQ, at)``: ST = K QT of the 64 columns from ``first`` on, or
    dPT = V dOT.
    """
    return products.make_begin_scores(spec.transposed)


@cache
def make_begin_columns(spec):
    """``begin_columns(rdV, rP, sdO, at)``: dV += PT dO, or dK += dST Q."""
    return products.make_begin_output(spec.transposed)


@cache
def make_scale_and_bias(spec):
    """``scale_and_bias(rS, scale, row0, col0, Nq, Nk, b, h, options, ty, tx)``: what of
    ``scale_and_mask`` goes before dP's product: nothing; or the bias, where its loads and dP would
    need more registers than there are.
    """
    part, bias_first = spec.part, spec.bias_first
    add_bias = make_add_bias(part, LOG2E, False)
    RS = spec.TM * spec.TN

    @device_function
    def scale_and_bias(rS, scale, row0, col0, Nq, Nk, b, h, options, ty, tx):
        if bias_first:
            for e in range(RS):
                rS[e] *= scale
            add_bias(rS, rS, row0, col0, Nq, Nk, b, h, options, ty, tx)

    return scale_and_bias


@cache
def make_scale_and_mask(spec):
    """``scale_and_mask``, of this consumer's columns from ``col0`` on."""
    return softmax.make_scale_and_mask(spec.masked_part)


@cache
def make_softmax_from_lse(spec):
    """``softmax_from_lse(rS, scale, sL, at, ty)``: ST to PT = exp(ST - L), as in ``softmax``; with
    a cap nothing: ``score_gradients`` does it then.
    """
    if not spec.features.softcap:
        return softmax_of(spec)

    @device_function
    def softmax_from_lse(rS, scale, sL, at, ty):
        pass

    return softmax_from_lse


@cache
def softmax_of(spec):
    """The same, with a cap too."""
    TM, TN, folds = spec.TM, spec.TN, spec.folds_scale

    @device_function
    def softmax_from_lse(rS, scale, sL, at, ty):
        for m in range(TM // 4):
            shifts = load4(sL, uint32(at + 16 * m + 4 * ty))
            for n in range(4):
                for j in range(TN):
                    s = rS[j * TM + 4 * m + n]
                    if folds:
                        s = s * scale
                    rS[j * TM + 4 * m + n] = exp2(s - shifts[n])

    return softmax_from_lse


@cache
def make_score_gradients(spec):
    """``score_gradients(rdS, rP, rdP, rS, sL, at, options, ty)``: dST = PT o (dPT - D) in 16 bits,
    of PT in rS; and PT in 16 bits, unless it was rounded early. D lies behind L.

    With a cap, of ST in rS, which its slope is made of, and PT here. By few rows at a time: what
    was rounded leaves its registers to others.
    """
    TM, TN, Br, late, softcap = (
        spec.TM,
        spec.TN,
        spec.Br,
        not spec.rounds_early,
        spec.features.softcap,
    )
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]
    cap_slope = make_cap_slope(spec)

    @device_function
    def score_gradients(rdS, rP, rdP, rS, sL, at, options, ty):
        if softcap:
            inverse = float32(1.0) / options.softcap
        for m in range(TM // 4):
            dots = load4(sL, uint32(uint32(at + Br) + 16 * m + 4 * ty))
            if softcap:
                shifts = load4(sL, uint32(at + 16 * m + 4 * ty))
            for j in range(TN):
                for n in range(0, 4, 2):
                    e = j * TM + 4 * m + n
                    p0, p1 = rS[e], rS[e + 1]
                    g0, g1 = p0, p1
                    if softcap:
                        p0, p1 = exp2(p0 - shifts[n]), exp2(p1 - shifts[n + 1])
                        g0, g1 = p0 * cap_slope(g0, inverse), p1 * cap_slope(g1, inverse)
                    rdS[e // 2] = pack(g0 * (rdP[e] - dots[n]), g1 * (rdP[e + 1] - dots[n + 1]))
                    if late:
                        rP[e // 2] = pack(p0, p1)

    return score_gradients


@cache
def make_cap_slope(spec):
    """``cap_slope(s, inverse)``: the derivative 1 - tanh^2 of the cap where it gave the score s; 0
    where s is masked. ``inverse`` is that of the cap.
    """

    @device_function
    def cap_slope(s, inverse):
        t = maximum(s * inverse, float32(-1.0))
        return float32(1.0) - t * t

    return cap_slope


@cache
def make_store_ds(spec):
    """``store_ds(sdS, at, rdS, w, ty, tx)``: dST in 16 bits, for all consumers; a row for a column
    of S, in panels of 64 rows of S, as the copy engine would swizzle it.
    """
    TM, TN, Bc = spec.TM, spec.TN, spec.Bc

    @device_function
    def store_ds(sdS, at, rdS, w, ty, tx):
        first = uint32(at + PANEL * (GROUP_ROWS * w + tx) + 8 * (tx % 8) + 2 * ty)
        for j in range(TN):
            for n in range(TM // 2):
                place = uint32(
                    uint32(first + PANEL * (8 * j + Bc * (n // 8))) ^ uint32(8 * (n % 8))
                )
                store2(sdS, place, rdS[j * (TM // 2) + n])
        fence_async_proxy()

    return store_ds


@cache
def make_meet_all(spec):
    """``meet_all()``: all consumers wait for each other."""
    threads = GROUP * spec.consumers

    @device_function
    def meet_all():
        sync_named(ALL, threads)

    return meet_all


# --- dQ, dK and dV ---------------------------------------------------------------------------


@cache
def make_begin_dq(spec):
    """``begin_dq(rdQ, sdS, at, sK, w)``: this consumer's 64 x 64 part of dQ = dS K: its rows, or
    its columns, in FlashAttention-1 added to what it is. Both operands' rows run across the sum,
    which is over all columns of S.
    """
    Bc, STEPS, by_rows = spec.Bc, spec.Bc // STEP, spec.Br > GROUP_ROWS
    ADDS = int(spec.row_tiles == 3)
    multiply = MULTIPLY[DTYPES[spec.dtype].matrix]

    @device_function
    def begin_dq(rdQ, sdS, at, sK, w):
        rows, columns = uint32(0), uint32(PANEL * Bc * w)
        if by_rows:
            rows, columns = columns, rows
        multiply(rdQ, PANEL, sdS, uint32(at + rows), Bc, 1, sK, columns, Bc, 1, STEPS, ADDS)

    return begin_dq


@cache
def make_wait_dq(spec):
    """``wait_dq(rdQ)``: dQ is there, and all but the last product have ended."""
    RQ = spec.query_registers

    @device_function
    def wait_dq(rdQ):
        wait_products(rdQ, RQ, 1)

    return wait_dq


@cache
def make_wait_columns(spec):
    """``wait_columns(rdK, rdV, more)``: both are there; with ``more`` dQ may be on its way."""
    RK = spec.column_registers

    @device_function
    def wait_columns(rdK, rdV, more):
        if more:
            wait_products(rdK, RK, 1)
            wait_products(rdV, RK, 1)
        else:
            wait_products(rdK, RK, 0)
            wait_products(rdV, RK, 0)

    return wait_columns


@cache
def make_add_dq(spec):
    """``add_dq(rdQ, sdQ, A, b, h, row0, Nq, sN, w, tx, ty)``: A += this consumer's part of dQ,
    by the copy engine, which takes it from this consumer's part of sdQ: two boxes of 32 columns.
    Nothing beyond the Nq rows of a sequence.
    """
    by_rows, meet = spec.Br > GROUP_ROWS, make_meet(spec)
    place_of = tile_load.make_place_of(spec.query_ends, told_query_end)
    BOX = GROUP_ROWS * FLOATS

    @device_function
    def add_dq(rdQ, sdQ, A, b, h, row0, Nq, sN, w, tx, ty):
        if tx == uint32(0) and ty == uint32(0):
            wait_boxes_read()
        meet(w)  # the last part has been read
        # Anew: no registers are kept for the places all through the loop.
        thread = anew(uint32(uint32(cuda.threadIdx.x) - GROUP))
        quad = uint32(thread // 4)
        row, col = uint32(quad % 32 // 8 * 16 + quad % 8), uint32(thread % 4)
        own = uint32(2 * BOX * uint32(thread // GROUP))
        chunk = uint32(uint32(col // 2) ^ uint32(row % 8))
        first = uint32(own + FLOATS * row + 4 * chunk + 2 * (col % 2))
        for i in range(2):
            for n in range(PANEL // 8):
                e = i * (PANEL // 4) + 2 * n
                place = uint32(
                    uint32(first + FLOATS * 8 * i + BOX * (n // 4)) ^ uint32(8 * (n % 4))
                )
                sdQ[place] = rdQ[e]
                sdQ[uint32(place + 1)] = rdQ[e + 1]
        fence_async_proxy()
        meet(w)
        if tx == uint32(0) and ty == uint32(0):
            row, col = row0, uint32(PANEL * w)
            if by_rows:
                row, col = uint32(row0 + GROUP_ROWS * w), uint32(0)
            outer, which, first = place_of(A, b, h, row, Nq, sN)
            add_box(A, outer, which, first, col, sdQ, own)
            add_box(A, outer, which, first, uint32(col + FLOATS), sdQ, uint32(own + BOX))
            commit_boxes()

    return add_dq


@cache
def make_write_tile(spec):
    """``write_tile(rdK, sK, at, dK, w, row0, Nk, b, h, sN, options, tx, ty)``: this consumer's rows
    of dK or dV, nothing beyond the Nk of a packed sequence; or, where blocks share a head, those of
    this block's float32 part of them.
    """
    if spec.splits_group:
        return _make_write_part(spec)
    write = stores.write_to_end(spec.transposed, spec.features.packed, told_key_end)

    @device_function
    def write_tile(rdK, sK, at, dK, w, row0, Nk, b, h, sN, options, tx, ty):
        write(rdK, sK, at, dK, w, row0, Nk, b, h, sN, tx, ty)

    return write_tile


def _make_write_part(spec):
    """``write_part(rdK, sK, at, A, w, row0, Nk, b, h, sN, options, tx, ty)``: A = this thread's
    part of dK, from registers; a place of its own for each share h.
    """
    TM, DN4, STEP_, write_floats = spec.TN, 4 * spec.DN, spec.column_step, make_write_floats(spec)
    key_rows = make_key_rows(spec)

    @device_function
    def write_part(rdK, sK, at, A, w, row0, Nk, b, h, sN, options, tx, ty):
        if tx == uint32(0) and ty == uint32(0):
            wait_boxes_read()  # those of dQ, before the thread ends
        Ah = key_rows(A, b, h, options)
        for i in range(TM):
            row = uint32(row0 + tx + STEP_ * i)
            inside = row < uint32(Ah.shape[0])
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                write_floats(Ah, row, uint32(8 * n + 2 * ty), inside, rdK[e], rdK[e + 1])

    return write_part
