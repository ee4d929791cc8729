"""The online softmax on Hopper's tensor cores.

FA-1 uses ``online_to_p``, which stores P in 16 bits or e4m3 so that the registers of S become free.
"""

from fa_numba.device import cuda, device_function, float32
from fa_numba.intrinsics.arithmetic import NEG_INF, exp2
from fa_numba.intrinsics.float8 import pack_e4m3
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import make_drop as make_drop
from fa_numba.parts.softmax import make_online_of_lanes as make_online_of_lanes
from fa_numba.parts.softmax import make_row_maximum
from fa_numba.parts.softmax import make_scale_rows as make_scale_rows
from fa_numba.parts.softmax import make_start_of_lanes as make_start_of_lanes
from fa_numba.parts.softmax import make_sum_lanes as make_sum_lanes
from fa_numba.parts.wgmma.products import make_round_pair


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
