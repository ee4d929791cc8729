"""What the second sweep of the backward pass on Hopper's tensor cores does otherwise: Qi and dOi
stay, and of S and dP, rows in registers as in the forward pass, comes dS, an operand.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import LOG2E, NEG_INF, exp2
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import fence_mbarrier_init, init_mbarrier
from fa_numba.parts import softmax
from fa_numba.parts.heads import make_key_end
from fa_numba.parts.wgmma.backward import make_cap_slope
from fa_numba.parts.wgmma.schedule import sequence_tile_of
from fa_numba.parts.wgmma.tile_load import load_to_end


@cache
def make_begin_barriers(spec):
    """``begin_barriers(bars)``: one arrival fills a place; every consumer warp empties one of K or
    V.
    """
    full_q, full_do, full_k, full_v, empty_k, empty_v = spec.barrier_places
    stages, warps = spec.stages, 4 * spec.consumers

    @device_function
    def begin_barriers(bars):
        if cuda.threadIdx.x == 0:
            init_mbarrier(bars, full_q, 1)
            init_mbarrier(bars, full_do, 1)
            for s in range(stages):
                init_mbarrier(bars, full_k + s, 1)
                init_mbarrier(bars, full_v + s, 1)
                init_mbarrier(bars, empty_k + s, warps)
                init_mbarrier(bars, empty_v + s, warps)
            fence_mbarrier_init()

    return begin_barriers


@cache
def make_row_tile(spec):
    """``row_tile(b, options)``: the first row of this block's, and its batch entry, which is b but
    for packed sequences; those with most columns go first.
    """
    Br, packed, sequence_tile = spec.Br, spec.features.packed, sequence_tile_of(spec.Br)

    @device_function
    def row_tile(b, options):
        if packed:
            return sequence_tile(uint32(cuda.gridDim.x - 1 - cuda.blockIdx.x), options)
        return uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br), b

    return row_tile


@cache
def make_load_columns(spec):
    """``load_columns(sT, at, T, b, h, row0, Nk, options, bars, barrier)``: Kj or Vj of a sequence
    of Nk columns, zeros beyond them.
    """
    return load_to_end(spec, spec.Bc, spec.Bc, spec.key_ends, make_key_end(spec))


@cache
def make_softmax_from_lse(spec):
    """``softmax_from_lse(rS, scale, rL)``: S to P = exp(S - L); with a cap nothing:
    ``score_gradients`` does it then.
    """
    if not spec.features.softcap:
        return softmax.make_softmax_from_lse(spec)

    @device_function
    def softmax_from_lse(rS, scale, rL):
        pass

    return softmax_from_lse


@cache
def make_score_gradients(spec):
    """``score_gradients(rdS, rdP, rS, rL, rD, options)``: dS = P o (dP - D) in 16 bits, of P in rS;
    with a cap of S, which its slope is made of.
    """
    TM, TN, softcap = spec.TM, spec.TN, spec.features.softcap
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]
    cap_slope = make_cap_slope(spec)

    @device_function
    def score_gradients(rdS, rdP, rS, rL, rD, options):
        if softcap:
            inverse = float32(1.0) / options.softcap
        for i in range(TM):
            if softcap:
                shift = float32(0.0) if rL[i] == NEG_INF else LOG2E * rL[i]
            for j in range(0, TN, 2):
                e = i * TN + j
                g0, g1 = rS[e], rS[e + 1]
                if softcap:
                    g0 = exp2(g0 - shift) * cap_slope(g0, inverse)
                    g1 = exp2(g1 - shift) * cap_slope(g1, inverse)
                rdS[e // 2] = pack(g0 * (rdP[e] - rD[i]), g1 * (rdP[e + 1] - rD[i]))

    return score_gradients
