"""Online softmax of a score tile held in registers; TX neighbouring lanes share a row.

Scores are scaled by scale log2(e), so m is in units of log2 and every exponential is an exp2.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.arithmetic import LN2, LOG2E, NEG_INF, exp2, log2, maximum
from fa_numba.masks import visible_causal

FULL_WARP = 0xFFFFFFFF

_visible_causal = device_function(visible_causal)


@cache
def make_scale_and_mask(spec):
    """``scale_and_mask(rS, scale, row0, col0, cols_end, diagonal, ty, tx)``.

    Multiplies the scores by ``scale`` and sets those outside the mask or the matrix to -inf.
    """
    TM, TN, TX, TY, Bc = spec.TM, spec.TN, spec.tx_count, spec.ty_count, spec.Bc
    causal = spec.causal

    @device_function
    def scale_and_mask(rS, scale, row0, col0, cols_end, diagonal, ty, tx):
        for e in range(TM * TN):
            rS[e] *= scale
        last = uint32(col0 + (Bc - 1))
        inside = last < cols_end
        if causal:
            inside = inside and _visible_causal(int32(row0), int32(last), diagonal)
        if not inside:
            for i in range(TM):
                row = int32(row0 + ty + i * TY)
                for j in range(TN):
                    col = uint32(col0 + tx + j * TX)
                    visible = col < cols_end
                    if causal:
                        visible = visible and _visible_causal(row, int32(col), diagonal)
                    if not visible:
                        rS[i * TN + j] = NEG_INF

    return scale_and_mask


@cache
def make_online_softmax(spec):
    """``online_softmax(rS, rm, rl, rf)``: scores to P, and m and l brought up to date.

    Takes m and l of the columns seen so far. Leaves P = exp(S - m_new) in rS, m_new in rm,
    the factor f = exp(m - m_new) in rf and l_new = f l + rowsum(P) in rl.
    A row that has seen no column keeps m = -inf, l = 0 and gets P = 0.
    """
    TM, TN, TX = spec.TM, spec.TN, spec.tx_count

    @device_function
    def online_softmax(rS, rm, rl, rf):
        for i in range(TM):
            m_new = rm[i]
            for j in range(TN):
                m_new = maximum(m_new, rS[i * TN + j])
            lane = TX // 2
            while lane > 0:
                m_new = maximum(m_new, cuda.shfl_xor_sync(FULL_WARP, m_new, lane))
                lane //= 2
            shift = m_new
            if m_new == NEG_INF:  # -inf - -inf would be NaN
                shift = float32(0.0)
            rowsum = float32(0.0)
            for j in range(TN):
                p = exp2(rS[i * TN + j] - shift)
                rS[i * TN + j] = p
                rowsum += p
            lane = TX // 2
            while lane > 0:
                rowsum += cuda.shfl_xor_sync(FULL_WARP, rowsum, lane)
                lane //= 2
            rf[i] = exp2(rm[i] - shift)
            rl[i] = rf[i] * rl[i] + rowsum
            rm[i] = m_new

    return online_softmax


@cache
def make_softmax_from_lse(spec):
    """``softmax_from_lse(rS, rL)``: scores to P = exp(S - L); 0 in a row with L = -inf."""
    TM, TN = spec.TM, spec.TN

    @device_function
    def softmax_from_lse(rS, rL):
        for i in range(TM):
            shift = LOG2E * rL[i]
            if rL[i] == NEG_INF:
                shift = float32(0.0)
            for j in range(TN):
                rS[i * TN + j] = exp2(rS[i * TN + j] - shift)

    return softmax_from_lse


@cache
def make_store_p(spec):
    """``store_p(sP, rS, ty, tx)``: P from registers to shared memory."""
    TM, TN, TX, TY, pitch = spec.TM, spec.TN, spec.tx_count, spec.ty_count, spec.pitch_p

    @device_function
    def store_p(sP, rS, ty, tx):
        for i in range(TM):
            for j in range(TN):
                sP[uint32((ty + i * TY) * pitch + tx + j * TX)] = rS[i * TN + j]

    return store_p


@cache
def make_logsumexp(spec):
    """``logsumexp(rv, rm, rl)``: L = m + log l in natural units; -inf where l = 0."""
    TM = spec.TM

    @device_function
    def logsumexp(rv, rm, rl):
        for i in range(TM):
            rv[i] = LN2 * (rm[i] + log2(rl[i]))

    return logsumexp
