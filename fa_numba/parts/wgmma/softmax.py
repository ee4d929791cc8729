"""The online softmax on Hopper's tensor cores.

FA-2 computes the maxima of all rows first (``maxima``), and then P of all rows (``exponentials``).
FA-1 uses ``online_to_p``, which stores P in 16 bits or e4m3 so that the registers of S become free.
"""

import math

from fa_numba.device import cuda, device_function, float32
from fa_numba.intrinsics.arithmetic import NEG_INF, exp2, maximum
from fa_numba.intrinsics.float8 import pack_e4m3
from fa_numba.parts.lanes import FULL_WARP, sum_of_lanes
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import make_drop as make_drop
from fa_numba.parts.softmax import make_row_maximum
from fa_numba.parts.softmax import make_scale_rows as make_scale_rows
from fa_numba.parts.softmax import make_start_of_lanes as make_start_of_lanes
from fa_numba.parts.softmax import make_sum_lanes as make_sum_lanes
from fa_numba.parts.wgmma.products import make_round_pair

# Largest number of running maxima of a row.
MOST_CHAINS = 4


@device_function
def _nothing(rP, n, low, high):
    pass


@part
def make_online_to_p(spec):
    """Make ``online_to_p(rP, rS, scale, rm, rl, rf)``, which computes one step of FA-1's online
    softmax.

    ``softmax.make_online`` explains the arguments. Two results differ: P goes to rP in 16 bits, and
    rf is l exp(m - m_new), by which FlashAttention-1 multiplies its normalised O.

    The maxima of all rows are computed first. Then P is computed for two columns of all rows at a
    time, from the last columns to the first. In this order, the compiler ptxas finds registers for
    all of P.
    """
    TM, TN, TX, folds = spec.TM, spec.TN, spec.tx_count, spec.folds_scale
    row_maximum = make_row_maximum(spec)
    STEP = 2 * spec.per_half  # elements of a word of P
    wide, round_pair = STEP == 4, _nothing if STEP == 4 else make_round_pair(spec)

    def online_to_p(rP, rS, scale, rm, rl, rf):
        rshift = cuda.local.array(TM, float32)
        for i in range(TM):
            m_new = row_maximum(rS, i, scale, rm[i])
            rshift[i] = m_new
            if m_new == NEG_INF:  # -inf - -inf would be NaN
                rshift[i] = float32(0.0)
            rf[i] = rl[i] * exp2(rm[i] - rshift[i])
            rl[i] = float32(0.0)
            rm[i] = m_new
        for j in range(0, TN, STEP):
            for i in range(TM):
                e = i * TN + (TN - STEP - j)
                s0, s1 = rS[e], rS[e + 1]
                if folds:
                    s0, s1 = s0 * scale, s1 * scale
                p0, p1 = exp2(s0 - rshift[i]), exp2(s1 - rshift[i])
                rl[i] += p0 + p1
                if wide:
                    s2, s3 = rS[e + 2], rS[e + 3]
                    if folds:
                        s2, s3 = s2 * scale, s3 * scale
                    p2, p3 = exp2(s2 - rshift[i]), exp2(s3 - rshift[i])
                    rl[i] += p2 + p3
                    rP[e // 4] = pack_e4m3(p0, p1, p2, p3)
                else:
                    round_pair(rP, e // 2, p0, p1)
        for i in range(TM):
            rl[i] = sum_of_lanes(rl[i], TX, 1)
            rl[i] += rf[i]

    return online_to_p


@part
def make_online_of_rows(spec):
    """Make ``online_of_rows(rS, scale, rm, rl, rf)``, which computes one step of the online
    softmax.

    ``softmax.make_online`` explains the arguments. One result differs: a thread's l is the sum over
    its own columns only. ``sum_lanes`` later adds the sums of the lanes that share a row.
    """
    maxima, exponentials = make_maxima(spec), make_exponentials(spec)

    def online_of_rows(rS, scale, rm, rl, rf):
        maxima(rS, scale, rm, rl, rf)
        exponentials(rS, scale, rm, rl)

    return online_of_rows


@part
def make_maxima(spec):
    """Make ``maxima(rS, scale, rm, rl, rf)``, the first half of a step of the online softmax.

    Before the call, rS holds the scores of a tile, and rm and rl hold m and l of the columns
    before. The function returns whether the maximum of a row has changed in any lane of the warp.
    If the result is true, three register arrays are changed:

    - rm holds the new m.
    - rf holds the factor f = exp(m_old - m_new), by which O must be multiplied.
    - rl holds f l.

    If the result is false, rm, rl and rf are unchanged, and O must not be multiplied.

    Each row has several running maxima, which are combined at the end, so that few instructions
    wait for the one before. ``scale`` is used only if ``spec.folds_scale`` is true. If
    ``spec.p_exponent`` is not 0, it is subtracted from the maximum of the tile.
    """
    TM, TN, TX, folds = spec.TM, spec.TN, spec.tx_count, spec.folds_scale
    CHAINS = math.gcd(MOST_CHAINS, TN)
    RX, EXPONENT, lowers = CHAINS * TM, float32(spec.p_exponent), spec.p_exponent > 0

    def maxima(rS, scale, rm, rl, rf):
        rx, rm_new = cuda.local.array(RX, float32), cuda.local.array(TM, float32)
        for c in range(CHAINS):
            for i in range(TM):
                rx[c * TM + i] = rS[i * TN + c]
        for j in range(CHAINS, TN, CHAINS):
            for c in range(CHAINS):
                for i in range(TM):
                    rx[c * TM + i] = maximum(rx[c * TM + i], rS[i * TN + j + c])
        for i in range(TM):
            m_new = rx[i]
            for c in range(1, CHAINS):
                m_new = maximum(m_new, rx[c * TM + i])
            if folds:
                m_new = m_new * scale
            if lowers:
                m_new = m_new - EXPONENT
            rm_new[i] = maximum(m_new, rm[i])
        lane = TX // 2
        while lane > 0:
            for i in range(TM):
                other = cuda.shfl_xor_sync(FULL_WARP, rm_new[i], lane)
                rm_new[i] = maximum(rm_new[i], other)
            lane //= 2
        changes = False
        for i in range(TM):
            if rm_new[i] != rm[i]:
                changes = True
        changes = cuda.any_sync(FULL_WARP, changes)
        if changes:
            for i in range(TM):
                rf[i] = exp2(rm[i] - shift_of(rm_new[i]))
                rl[i] *= rf[i]
                rm[i] = rm_new[i]
        return changes

    return maxima


@device_function
def shift_of(m):
    """Return the number that is subtracted from the scores of a row with the maximum m.

    Normally it is m. If m is -inf, it is 0, because -inf - -inf would be NaN.
    """
    shift = m
    if m == NEG_INF:
        shift = float32(0.0)
    return shift


@part
def make_exponentials(spec):
    """Make ``exponentials(rS, scale, rm, rl)``, the second half of a step of the online softmax.

    It replaces the scores in rS by P = exp(S - m), and adds the sum of each row of P to rl. The
    sums are over this thread's own columns. With planes, the elements of a tile are added to each
    other first, because a sum of many small numbers loses accuracy. Without planes, they are added
    to l one by one, because the assembler then starts the exponentials earlier. ``scale`` is used
    only if ``spec.folds_scale`` is true.
    """
    TM, TN, folds, apart = spec.TM, spec.TN, spec.folds_scale, spec.planes > 1

    def exponentials(rS, scale, rm, rl):
        rsum = cuda.local.array(TM, float32)
        for i in range(TM):
            rsum[i] = rl[i]
            if apart:
                rsum[i] = float32(0.0)
        for j in range(TN):
            for i in range(TM):
                s = rS[i * TN + j]
                if folds:
                    s = s * scale
                p = exp2(s - shift_of(rm[i]))
                rS[i * TN + j] = p
                rsum[i] += p
        for i in range(TM):
            if apart:
                rsum[i] += rl[i]
            rl[i] = rsum[i]

    return exponentials


@part
def make_rescale_changed(spec):
    """Make ``rescale_changed(rO, rf, changes, ratio)``, which multiplies each row of O by its
    factor in rf if ``changes`` is true. ``changes`` is the result of ``maxima``.

    If V has scales of blocks, it also multiplies all rows by ``ratio``, a result of ``next_unit``.
    Otherwise ``ratio`` is not used.
    """
    TM, blocks, scale_rows = spec.TM, spec.features.value_block_scales, make_scale_rows(spec)

    def rescale_changed(rO, rf, changes, ratio):
        if blocks:
            for i in range(TM):
                rf[i] = rf[i] * ratio if changes else ratio
            scale_rows(rO, rf)
        elif changes:
            scale_rows(rO, rf)

    return rescale_changed
