"""The softmax on tensor cores, and the combination of O, l and m of warps that split the keys.

Splitting the keys among warps is described in section 3.3 of arXiv 2307.08691.
"""

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF, exp2, maximum
from fa_numba.intrinsics.shared import load4, store4
from fa_numba.parts.layout import make_owns
from fa_numba.parts.namespace import part
from fa_numba.parts.softmax import make_drop as make_drop
from fa_numba.parts.softmax import make_from_lse as make_from_lse
from fa_numba.parts.softmax import make_kept as make_kept
from fa_numba.parts.softmax import make_logsumexp as make_logsumexp
from fa_numba.parts.softmax import make_normalise_rows as make_normalise_rows
from fa_numba.parts.softmax import make_online as make_online
from fa_numba.parts.softmax import make_online_of_lanes as make_online_of_lanes
from fa_numba.parts.softmax import make_rescale_rows as make_rescale_rows
from fa_numba.parts.softmax import make_scale_rows as make_scale_rows
from fa_numba.parts.softmax import make_start_of_lanes as make_start_of_lanes
from fa_numba.parts.softmax import make_sum_lanes as make_sum_lanes


@part
def make_combine(spec):
    """Make ``combine(rO, rm, rl, sO, thread)``, which combines O, l and m of the warps of a block
    that split the keys.

    Each warp holds O, l and m of all rows over its own columns. The rows are divided among the
    warps: each row has one owner. A warp stores O, l and m of the rows that it does not own in
    shared memory sO, which has ``spec.exchange_floats`` elements. For the rows that it owns, it
    then adds the parts of the other warps:

        m_new = max m,  f = exp(m - m_new),  O = sum f O,  l = sum f l

    The function contains a ``syncthreads``. If the warps do not split the keys, it does nothing.
    """
    TM, DN4, STEP, Br, W = spec.TM, 4 * spec.DN, spec.row_step, spec.Br, spec.threads // 32
    owns, splits, VALUES = make_owns(spec), spec.splits_keys, (W - 1) * spec.Br * spec.columns
    scale_rows = make_scale_rows(spec)

    @device_function
    def part_at(n, i):
        """Return the index in sO of a part of O: row number i of this lane, as warp n stores it.

        n is the number of the warp that stores the part, where 0 is the warp after the row's owner.
        """
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        return uint32(uint32(n * TM + i) * (32 * DN4) + lane * 4)

    @device_function
    def values_at(n, i, ty):
        """Return the index in the shared array sO at which a warp stores its m of one row.

        l of the row is stored at the next index. Warps exchange m and l through sO before they add
        their parts of O. n is the number of the storing warp, where 0 is the warp after the row's
        owner. The row is the i-th row of the lanes whose field ``ty`` has this value.
        """
        return uint32(VALUES + 2 * (n * Br + ty + i * STEP))

    def combine(rO, rm, rl, sO, thread):
        if splits:
            rs = cuda.local.array(TM, float32)
            rf = cuda.local.array(TM, float32)
            warp = uint32(cuda.threadIdx.x) // uint32(32)
            for i in range(TM):
                # The number of this warp, counted from the warp after the owner
                n = uint32(uint32(warp + (W - 1 - i % W)) % uint32(W))
                if not owns(i):
                    at, values = part_at(n, i), values_at(n, i, thread.ty)
                    for c in range(0, DN4, 4):
                        e = i * DN4 + c
                        store4(sO, uint32(at + 32 * c), rO[e], rO[e + 1], rO[e + 2], rO[e + 3])
                    if thread.tx == uint32(0):
                        sO[values] = rm[i]
                        sO[uint32(values + 1)] = rl[i]
            cuda.syncthreads()  # the other warps' parts are there
            for i in range(TM):
                m_new = rm[i]
                if owns(i):
                    for n in range(W - 1):
                        m_new = maximum(m_new, sO[values_at(n, i, thread.ty)])
                rs[i] = m_new
                if m_new == NEG_INF:  # -inf - -inf would be NaN
                    rs[i] = float32(0.0)
                rf[i] = exp2(rm[i] - rs[i])
                rl[i] *= rf[i]
                rm[i] = m_new
            scale_rows(rO, rf)
            for n in range(W - 1):
                for i in range(TM):
                    if owns(i):
                        at, values = part_at(n, i), values_at(n, i, thread.ty)
                        f = exp2(sO[values] - rs[i])
                        rl[i] += f * sO[uint32(values + 1)]
                        for c in range(0, DN4, 4):
                            e = i * DN4 + c
                            o = load4(sO, uint32(at + 32 * c))
                            rO[e] += f * o[0]
                            rO[e + 1] += f * o[1]
                            rO[e + 2] += f * o[2]
                            rO[e + 3] += f * o[3]

    return combine
