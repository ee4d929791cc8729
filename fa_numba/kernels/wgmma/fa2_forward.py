"""FlashAttention-2, forward, Q outer, on Hopper's tensor cores."""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.device.tensor_map import TiledType
from fa_numba.intrinsics.mbarrier import (
    arrive_mbarrier, fence_mbarrier_init, init_mbarrier, mbarrier_tile, wait_mbarrier,
)
from fa_numba.intrinsics.shared import half_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts.wgmma import parts


@cache
def make_forward(spec):
    p, Br, Bc, STAGES, C = parts(spec), spec.Br, spec.Bc, spec.stages, spec.consumers
    NQ, NK = spec.tile_halves
    TM, RS, RO, RP = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.TM * spec.TN // 2
    FEW, MANY = spec.registers
    ARRIVALS = 128 * C
    BARS = (NQ + 2 * STAGES * NK) // 4
    NBARS = 1 + 4 * STAGES
    NKS = NK * STAGES
    VFIRST = NQ + NKS
    FULL_K, FULL_V, EMPTY_K, EMPTY_V = 1, 1 + STAGES, 1 + 2 * STAGES, 1 + 3 * STAGES

    def fa2_forward(Q, K, V, O, L, scale, group, options):
        sQ = half_tile(0, NQ)
        sK = half_tile(NQ, NKS)
        sV = half_tile(VFIRST, NKS)
        bars = mbarrier_tile(BARS, NBARS)
        b, h, hk = p.heads(group)
        Lh = p.query_rows(L, b, h, options)
        rows = uint32(Q.shape[2])
        Nq, Nk = p.lengths(rows, K.shape[2], b, options)
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = p.column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        if cuda.threadIdx.x == 0:
            init_mbarrier(bars, 0, 1)
            for s in range(STAGES):
                init_mbarrier(bars, FULL_K + s, 1)
                init_mbarrier(bars, FULL_V + s, 1)
                init_mbarrier(bars, EMPTY_K + s, ARRIVALS)
                init_mbarrier(bars, EMPTY_V + s, ARRIVALS)
            fence_mbarrier_init()
        cuda.syncthreads()
        wg = uint32(uint32(cuda.threadIdx.x) // uint32(128))
        if wg == uint32(0):
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                p.load_q(sQ, uint32(0), Q, b, h, i0, bars, uint32(0))
                stage = uint32(0)
                parity = uint32(1)
                while j0 < j_end:
                    wait_mbarrier(bars, uint32(EMPTY_K + stage), parity)
                    p.load_rows(sK, uint32(stage * NK), K, b, hk, j0, bars, uint32(FULL_K + stage))
                    wait_mbarrier(bars, uint32(EMPTY_V + stage), parity)
                    p.load_rows(sV, uint32(stage * NK), V, b, hk, j0, bars, uint32(FULL_V + stage))
                    j0 = uint32(j0 + Bc)
                    stage = uint32(stage + 1)
                    if stage == uint32(STAGES):
                        stage = uint32(0)
                        parity = uint32(parity ^ 1)
        else:
            take_registers(MANY)
            wg = uint32(wg - 1)
            rS = cuda.local.array(RS, float32)
            rP = cuda.local.array(RP, uint32)
            rO = cuda.local.array(RO, float32)
            rm = cuda.local.array(TM, float32)
            rl = cuda.local.array(TM, float32)
            rf = cuda.local.array(TM, float32)
            tx = uint32(cuda.threadIdx.x) % uint32(4)
            ty = uint32(
                uint32(cuda.threadIdx.x) % uint32(128) // uint32(32) * 16
                + uint32(cuda.threadIdx.x) % uint32(32) // uint32(4)
            )
            row0 = uint32(i0 + wg * 64)
            p.start(rO, rl, rm)
            p.first_turn(wg)
            stage = uint32(0)
            parity = uint32(0)
            if j0 < j_end:
                wait_mbarrier(bars, uint32(0), uint32(0))
                wait_mbarrier(bars, uint32(FULL_K), uint32(0))
                p.take_turn(wg)
                p.begin_scores(rS, sQ, uint32(wg * 64), sK, uint32(0))
                p.end_turn(wg)
                p.wait_first(rS)
                arrive_mbarrier(bars, uint32(EMPTY_K))
                p.scale_and_mask(rS, scale, row0, j0, Nq, Nk, b, h, options, ty, tx)
                p.online_softmax_of_lanes(rS, scale, rm, rl, rf)
                p.pack(rP, rS)
                j0 = uint32(j0 + Bc)
                while j0 < j_end:
                    next_stage = uint32(stage + 1)
                    next_parity = parity
                    if next_stage == uint32(STAGES):
                        next_stage = uint32(0)
                        next_parity = uint32(parity ^ 1)
                    wait_mbarrier(bars, uint32(FULL_K + next_stage), next_parity)
                    p.take_turn(wg)
                    p.begin_scores(rS, sQ, uint32(wg * 64), sK, uint32(next_stage * NK))
                    wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                    p.begin_output(rO, rP, sV, uint32(stage * NK))
                    p.end_turn(wg)
                    p.wait_scores(rS)
                    arrive_mbarrier(bars, uint32(EMPTY_K + next_stage))
                    p.scale_and_mask(rS, scale, row0, j0, Nq, Nk, b, h, options, ty, tx)
                    p.online_softmax_of_lanes(rS, scale, rm, rl, rf)
                    p.wait_output(rO)
                    arrive_mbarrier(bars, uint32(EMPTY_V + stage))
                    p.rescale_rows(rO, rf)
                    p.pack(rP, rS)
                    stage = next_stage
                    parity = next_parity
                    j0 = uint32(j0 + Bc)
                wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                p.begin_output(rO, rP, sV, uint32(stage * NK))
                p.wait_output(rO)
            p.sum_lanes(rl)
            p.normalise_rows(rO, rl)
            p.write_tile(rO, sQ, O, wg, row0, b, h, ty, tx)
            p.logsumexp(rl, rm, rl)
            p.write_values(rl, Lh, row0, rows, ty, tx)

    tiled, floats = TiledType(4), array_type(3)
    scalars = (types.float32, types.int32)
    arguments = (*[tiled] * 4, floats, *scalars, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
