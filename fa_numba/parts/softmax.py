"""The online softmax of scores in registers, and O, l and m with it.

TX lanes, ``lane_step`` apart, share a row. Scores are in units of log2, and so is m. A thread's row
i of O is registers i DN4 .. (i + 1) DN4 - 1, DN4 = 4 DN; ``layout`` says which row and columns
these are.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.arithmetic import LN2, LOG2E, NEG_INF, exp2, log2, maximum
from fa_numba.parts.dropout import make_drop as make_drop
from fa_numba.parts.dropout import make_kept as make_kept
from fa_numba.parts.dropout import make_scale_kept as make_scale_kept
from fa_numba.parts.lanes import FULL_WARP, max_of_lanes, sum_of_lanes
from fa_numba.parts.layout import make_head_of_row, make_owns, make_row
from fa_numba.parts.namespace import part

# Up to so many registers of O are scaled without asking whether a maximum is new.
LARGEST_SCALED = 64


@cache
def make_start(spec):
    """``start(rO, rl, rm, tile, split)``: O = 0, l = 0, m = -inf, before any column has been seen;
    with sinks the first of the splits has seen these.
    """
    return _make_start(spec, whole_rows=True)


@cache
def make_start_of_lanes(spec):
    """``start``, but l is of this thread's own columns, for ``sum_lanes`` to add up in the end."""
    return _make_start(spec, whole_rows=False)


@part
def _make_start(spec, whole_rows):
    TM, RO, take_sinks = spec.TM, spec.TM * spec.DN * 4, _make_take_sinks(spec, whole_rows)

    def start(rO, rl, rm, tile, split):
        for e in range(RO):
            rO[e] = float32(0.0)
        for i in range(TM):
            rl[i] = float32(0.0)
            rm[i] = NEG_INF
        take_sinks(rl, rm, tile, split)

    return start


@cache
def make_take_sinks(spec):
    """``take_sinks(rl, rm, tile, split)``: with sinks l = 1, m = s in the first of the splits."""
    return _make_take_sinks(spec, whole_rows=True)


@part
def _make_take_sinks(spec, whole_rows):
    TM, sinks, q_lens = spec.TM, spec.features.sinks, spec.features.q_lens
    row_of, head_of_row, owns = make_row(spec), make_head_of_row(spec), make_owns(spec)

    def take_sinks(rl, rm, tile, split):
        if sinks and split == uint32(0):
            head, thread = tile.head, tile.thread
            for i in range(TM):
                there = owns(i)
                if q_lens:  # a row past the end has no sink either
                    there = there and uint32(tile.i0 + row_of(thread.ty, i)) < head.Nq
                if there:
                    rm[i] = LOG2E * head.options.sinks[head_of_row(head, thread.ty, i)]
                    if whole_rows or thread.tx == uint32(0):
                        rl[i] = float32(1.0)

    return take_sinks


@part
def make_scale_rows(spec):
    """``scale_rows(rO, rf)``: diag(f) O."""
    TM, DN4 = spec.TM, 4 * spec.DN

    def scale_rows(rO, rf):
        for i in range(TM):
            for c in range(DN4):
                rO[i * DN4 + c] *= rf[i]

    return scale_rows


@part
def make_rescale_rows(spec):
    """``rescale_rows(rO, rf)``: diag(f) O, where f = exp(m_old - m_new).

    A long row seldom has a new maximum: f is 1 then and O stays as it is. Where O is small the
    products are made in any case, for the sake of what they can be interleaved with.
    """
    TM, tests = spec.TM, spec.TM * 4 * spec.DN > LARGEST_SCALED
    scale_rows = make_scale_rows(spec)

    def rescale_rows(rO, rf):
        changes = not tests
        if tests:
            for i in range(TM):
                if rf[i] != float32(1.0):
                    changes = True
        if changes:
            scale_rows(rO, rf)

    return rescale_rows


@part
def make_normalise_rows(spec):
    """``normalise_rows(rO, rl)``: diag(l)^-1 O, and 0 in a row without a visible column (l = 0)."""
    TM, DN4 = spec.TM, 4 * spec.DN

    def normalise_rows(rO, rl):
        for i in range(TM):
            factor = float32(0.0)
            if rl[i] != float32(0.0):
                factor = float32(1.0) / rl[i]
            for c in range(DN4):
                # V may hold NaN or inf, and 0 times those is no 0.
                rO[i * DN4 + c] = rO[i * DN4 + c] * factor if factor != float32(0.0) else factor

    return normalise_rows


@device_function
def exp_of_difference(s, m):
    """e^(s - m), and 0 where s is -inf, whatever m."""
    p = float32(0.0)
    if s != NEG_INF:
        p = exp2((s - m) * LOG2E)
    return p


@part
def make_merge_block(warps, sinks):
    """``merge_block(m, l, sm, sl, head, row)``: m and l, in natural units, of a whole row, given
    those of each thread's own columns; sinks take part. ``sm`` and ``sl``: shared, one a warp.
    """

    def merge_block(m, l, sm, sl, head, row):
        thread = uint32(cuda.threadIdx.x)
        lane = 16
        while lane > 0:
            m_other = cuda.shfl_xor_sync(FULL_WARP, m, lane)
            l_other = cuda.shfl_xor_sync(FULL_WARP, l, lane)
            m_new = maximum(m, m_other)
            l = l * exp_of_difference(m, m_new) + l_other * exp_of_difference(m_other, m_new)
            m = m_new
            lane //= 2
        if thread % uint32(32) == uint32(0):
            sm[thread // uint32(32)] = m
            sl[thread // uint32(32)] = l
        cuda.syncthreads()
        l, m = float32(0.0), NEG_INF
        if sinks and row < head.Nq:
            l, m = float32(1.0), head.options.sinks[head.h]
        for w in range(warps):
            m_new = maximum(m, sm[w])
            l = l * exp_of_difference(m, m_new) + sl[w] * exp_of_difference(sm[w], m_new)
            m = m_new
        return m, l

    return merge_block


@part
def make_row_maximum(spec):
    """``row_maximum(rS, i, scale, m)``: of row i of S and of m, its maximum before."""
    TN, TX, STEP, folds = spec.TN, spec.tx_count, spec.lane_step, spec.folds_scale

    def row_maximum(rS, i, scale, m):
        m_new = m
        if folds:
            m_new = NEG_INF
        for j in range(TN):
            m_new = maximum(m_new, rS[i * TN + j])
        if folds:
            m_new = maximum(m, m_new * scale)
        m_new = max_of_lanes(m_new, TX, STEP)
        return m_new

    return row_maximum


@cache
def make_online(spec):
    """``online(rS, scale, rm, rl, rf)``: scores to P, and m and l brought up to date.

    Takes m and l of the columns seen so far. Leaves P = exp(S - m_new) in rS, m_new in rm, the
    factor f = exp(m - m_new) in rf and l_new = f l + rowsum(P) in rl. ``scale`` multiplies the
    scores where ``scale_and_mask`` has left that to the exponent. A row that has seen no column
    keeps m = -inf, l = 0 and gets P = 0.
    """
    return _make_online(spec, whole_rows=True)


@cache
def make_online_of_lanes(spec):
    """``online``, but l is of this thread's own columns, for ``sum_lanes`` to add up in the end."""
    return _make_online(spec, whole_rows=False)


@part
def _make_online(spec, whole_rows):
    TM, TN, folds, row_maximum = spec.TM, spec.TN, spec.folds_scale, make_row_maximum(spec)
    SHARING, STEP = spec.tx_count if whole_rows else 1, spec.lane_step

    def online_softmax(rS, scale, rm, rl, rf):
        for i in range(TM):
            m_new = row_maximum(rS, i, scale, rm[i])
            shift = m_new
            if m_new == NEG_INF:  # -inf - -inf would be NaN
                shift = float32(0.0)
            rowsum = float32(0.0)
            for j in range(TN):
                s = rS[i * TN + j]
                if folds:
                    s = s * scale
                p = exp2(s - shift)
                rS[i * TN + j] = p
                rowsum += p
            rowsum = sum_of_lanes(rowsum, SHARING, STEP)
            rf[i] = exp2(rm[i] - shift)
            rl[i] = rf[i] * rl[i] + rowsum
            rm[i] = m_new

    return online_softmax


@part
def make_sum_lanes(spec):
    """``sum_lanes(rl)``: the sum of each row's value over the lanes that share the row."""
    TM, TX, STEP = spec.TM, spec.tx_count, spec.lane_step

    def sum_lanes(rl):
        for i in range(TM):
            rl[i] = sum_of_lanes(rl[i], TX, STEP)

    return sum_lanes


@part
def make_from_lse(spec):
    """``from_lse(rS, scale, rL)``: scores to P = exp(S - L); 0 in a row with L = -inf.

    ``scale`` as of ``online``.
    """
    TM, TN, (EI, EJ), folds = spec.TM, spec.TN, spec.element_steps, spec.folds_scale

    def from_lse(rS, scale, rL):
        for i in range(TM):
            shift = LOG2E * rL[i]
            if rL[i] == NEG_INF:
                shift = float32(0.0)
            for j in range(TN):
                s = rS[i * EI + j * EJ]
                if folds:
                    s = s * scale
                rS[i * EI + j * EJ] = exp2(s - shift)

    return from_lse


@part
def make_logsumexp(spec):
    """``logsumexp(rv, rm, rl)``: L = m + log l in natural units; -inf where l = 0."""
    TM = spec.TM

    def logsumexp(rv, rm, rl):
        for i in range(TM):
            rv[i] = LN2 * (rm[i] + log2(rl[i]))

    return logsumexp
