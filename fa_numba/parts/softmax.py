"""Scores and their online softmax in registers; TX neighbouring lanes share a row.

Scores are scaled by scale log2(e), so m is in units of log2 and every exponential is an exp2.
"""

import math
from functools import cache

from fa_numba import masks
from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.arithmetic import LN2, LOG2E, NEG_INF, ONE, exp2, log2, maximum
from fa_numba.parts.bias import make_add_bias
from fa_numba.parts.layout import make_column, make_row, make_warp_column
from fa_numba.problem import UNBOUNDED

FULL_WARP = 0xFFFFFFFF

_visible_causal = device_function(masks.visible_causal)
_visible_window = device_function(masks.visible_window)
_distance = device_function(masks.distance)


@device_function
def exp_of_difference(s, m):
    """e^(s - m), and 0 where s is -inf, whatever m."""
    p = float32(0.0)
    if s != NEG_INF:
        p = exp2((s - m) * LOG2E)
    return p


@cache
def make_scale_and_mask(spec):
    """``scale_and_mask(rS, scale, row0, col0, Nq, Nk, b, h, options, ty, tx)``: scores in units of
    log2.

    Multiplies them by ``scale``, caps them, adds slopes and bias, and sets those outside the mask
    or the matrix to -inf. With a cap, ``scale`` is that of its argument and ``options.softcap`` is
    in the unit of the scores.
    """
    return _without_bias_read(_make_scale_and_mask(spec, LOG2E, hides_blocks=False))


@cache
def make_scale_and_mask_all(spec):
    """The same in natural units, for a kernel that visits every tile: those that the block mask
    leaves out are hidden here.
    """
    return _without_bias_read(_make_scale_and_mask(spec, ONE, hides_blocks=True))


@cache
def make_scale_bias_and_mask(spec):
    """``scale_bias_and_mask(rS, rB, scale, ...)``: the first, with the bias that ``read_bias`` has
    left in rB.
    """
    return _make_scale_and_mask(spec, LOG2E, hides_blocks=False, ahead=True)


def _without_bias_read(scale_and_mask):
    @device_function
    def without(rS, scale, row0, col0, Nq, Nk, b, h, options, ty, tx):
        scale_and_mask(rS, rS, scale, row0, col0, Nq, Nk, b, h, options, ty, tx)

    return without


def _make_scale_and_mask(spec, unit, hides_blocks, ahead=False):
    TM, TN, (EI, EJ) = spec.TM, spec.TN, spec.element_steps
    Br, Bc, features = spec.head_rows, spec.Bc, spec.features
    causal, window, q_lens = features.causal, features.window, features.q_lens
    softcap, alibi, bias = features.softcap, features.alibi, features.bias
    row_of, column_of, warp_column = make_row(spec), make_column(spec), make_warp_column(spec)
    scales, COLUMNS = not spec.folds_scale, spec.warp_columns or spec.Bc
    hides_blocks = hides_blocks and features.sparse
    add_bias = make_add_bias(spec, unit, ahead)

    @device_function
    def scale_and_mask(rS, rB, scale, row0, col0, Nq, Nk, b, h, options, ty, tx):
        diagonal = int32(int32(Nk) - int32(Nq))
        col0 = uint32(col0 + warp_column())
        if scales:
            for e in range(TM * TN):
                rS[e] *= scale
        if softcap:
            for e in range(TM * TN):
                rS[e] = options.softcap * math.tanh(rS[e])
        if alibi:
            slope = unit * options.slopes[b, h]
            # Columns count from this thread's first, so that they are constants, and rows from
            # there: one number becomes a float for a row. Columns past the end are hidden below.
            first = int32(int32(col0 + column_of(tx, 0)) - diagonal)
            for i in range(TM):
                row = uint32(row0 + row_of(ty, i))
                if row < Nq:
                    key = float32(int32(int32(row) - first))
                    for j in range(TN):
                        col = float32(int32(column_of(uint32(0), j)))
                        rS[i * EI + j * EJ] -= slope * _distance(key, col, float32(0.0))
        if bias:
            add_bias(rS, rB, row0, col0, Nq, Nk, b, h, options, ty, tx)
        last = uint32(col0 + (COLUMNS - 1))
        inside = last < Nk
        if causal:
            along = int32(int32(last) - int32(row0))  # in 32 bits: a sum of two would take 64
            inside = inside and _visible_causal(int32(0), along, diagonal)
        if window:
            left, right = options.window_left, options.window_right
            lowest = int32(row0 + (Br - 1))
            inside = inside and _visible_window(
                int32(row0), int32(last), diagonal, UNBOUNDED, right
            )
            inside = inside and _visible_window(lowest, int32(col0), diagonal, left, UNBOUNDED)
        if q_lens:
            inside = inside and uint32(row0 + Br) <= Nq
        if hides_blocks:
            block = options.block_mask[b, h, row0 // uint32(Br), col0 // uint32(Bc)]
            inside = inside and block != 0
        if not inside:
            # Columns count from this thread's first, so that they are constants, and rows from the
            # one whose diagonal column that is.
            first = int32(col0 + column_of(tx, 0))
            top = int32(first - diagonal)
            for i in range(TM):
                row = int32(int32(row0 + row_of(ty, i)) - top)
                for j in range(TN):
                    col = int32(column_of(uint32(0), j))
                    if causal:  # hides the matrix's end too: the last row sees column Nk - 1
                        visible = _visible_causal(row, col, 0)
                    else:
                        visible = col < int32(int32(Nk) - first)
                    if window:
                        seen = _visible_window(row, col, 0, left, right)
                        visible = visible and seen
                    if q_lens:
                        visible = visible and uint32(row0 + row_of(ty, i)) < Nq
                    if hides_blocks:
                        visible = visible and block != 0
                    if not visible:
                        rS[i * EI + j * EJ] = NEG_INF

    return scale_and_mask


@cache
def make_online_softmax(spec):
    """``online_softmax(rS, scale, rm, rl, rf)``: scores to P, and m and l brought up to date.

    Takes m and l of the columns seen so far. Leaves P = exp(S - m_new) in rS, m_new in rm,
    the factor f = exp(m - m_new) in rf and l_new = f l + rowsum(P) in rl. ``scale`` multiplies
    the scores where ``scale_and_mask`` has left that to the exponent.
    A row that has seen no column keeps m = -inf, l = 0 and gets P = 0.
    """
    return _make_online_softmax(spec, whole_rows=True)


@cache
def make_online_softmax_of_lanes(spec):
    """The same, but l is of this thread's own columns, for ``sum_lanes`` to add up in the end."""
    return _make_online_softmax(spec, whole_rows=False)


def _make_online_softmax(spec, whole_rows):
    TM, TN, TX, folds = spec.TM, spec.TN, spec.tx_count, spec.folds_scale

    @device_function
    def online_softmax(rS, scale, rm, rl, rf):
        for i in range(TM):
            m_new = rm[i]
            if folds:
                m_new = NEG_INF
            for j in range(TN):
                m_new = maximum(m_new, rS[i * TN + j])
            if folds:
                m_new = maximum(rm[i], m_new * scale)
            lane = TX // 2
            while lane > 0:
                m_new = maximum(m_new, cuda.shfl_xor_sync(FULL_WARP, m_new, lane))
                lane //= 2
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
            lane = TX // 2 if whole_rows else 0
            while lane > 0:
                rowsum += cuda.shfl_xor_sync(FULL_WARP, rowsum, lane)
                lane //= 2
            rf[i] = exp2(rm[i] - shift)
            rl[i] = rf[i] * rl[i] + rowsum
            rm[i] = m_new

    return online_softmax


@cache
def make_sum_lanes(spec):
    """``sum_lanes(rl)``: the sum of each row's value over the lanes that share the row."""
    TM, TX = spec.TM, spec.tx_count

    @device_function
    def sum_lanes(rl):
        for i in range(TM):
            lane = TX // 2
            while lane > 0:
                rl[i] += cuda.shfl_xor_sync(FULL_WARP, rl[i], lane)
                lane //= 2

    return sum_lanes


@cache
def make_softmax_from_lse(spec):
    """``softmax_from_lse(rS, scale, rL)``: scores to P = exp(S - L); 0 in a row with L = -inf.

    ``scale`` as in ``online_softmax``.
    """
    TM, TN, (EI, EJ), folds = spec.TM, spec.TN, spec.element_steps, spec.folds_scale

    @device_function
    def softmax_from_lse(rS, scale, rL):
        for i in range(TM):
            shift = LOG2E * rL[i]
            if rL[i] == NEG_INF:
                shift = float32(0.0)
            for j in range(TN):
                s = rS[i * EI + j * EJ]
                if folds:
                    s = s * scale
                rS[i * EI + j * EJ] = exp2(s - shift)

    return softmax_from_lse


@cache
def make_logsumexp(spec):
    """``logsumexp(rv, rm, rl)``: L = m + log l in natural units; -inf where l = 0."""
    TM = spec.TM

    @device_function
    def logsumexp(rv, rm, rl):
        for i in range(TM):
            rv[i] = LN2 * (rm[i] + log2(rl[i]))

    return logsumexp
