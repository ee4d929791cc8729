"""FlashAttention-2, forward, Q outer, on Hopper's tensor cores."""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.device.tensor_map import TiledType
from fa_numba.intrinsics.mbarrier import (
    arrive_mbarrier, fence_mbarrier_init, init_mbarrier, mbarrier_tile, wait_mbarrier,
)
from fa_numba.intrinsics.shared import half_tile, index_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts.wgmma import parts


@cache
def make_forward(spec):
    p, Br, Bc, STAGES, C = parts(spec), spec.Br, spec.Bc, spec.stages, spec.consumers
    QS = spec.q_stages
    spec_grouped = spec.grouped
    NQ, NK = spec.tile_halves
    TM, RS, RO, RP = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.TM * spec.TN // 2
    FEW, MANY = spec.registers
    WARPS = 4 * C
    NQS, NKS = QS * NQ, STAGES * NK
    VFIRST = NQS + NKS
    BARS = (NQS + 2 * NKS) // 4
    NBARS = 2 * QS + 4 * STAGES
    EMPTY_Q, FULL_K = QS, 2 * QS
    FULL_V, EMPTY_K, EMPTY_V = FULL_K + STAGES, FULL_K + 2 * STAGES, FULL_K + 3 * STAGES

    def fa2_forward(Q, K, V, O, L, taken, scale, group, options):
        sQ = half_tile(0, NQS)
        sK = half_tile(NQS, NKS)
        sV = half_tile(VFIRST, NKS)
        bars = mbarrier_tile(BARS, NBARS)
        sN = index_tile(2 * (BARS + NBARS), QS)
        batch = uint32(Q.shape[0])
        heads = uint32(Q.shape[1])
        rows = uint32(Q.shape[2])
        columns = uint32(K.shape[2])
        if cuda.threadIdx.x == 0:
            for s in range(QS):
                init_mbarrier(bars, s, 1)
                init_mbarrier(bars, EMPTY_Q + s, C)
            for s in range(STAGES):
                init_mbarrier(bars, FULL_K + s, 1)
                init_mbarrier(bars, FULL_V + s, 1)
                init_mbarrier(bars, EMPTY_K + s, WARPS)
                init_mbarrier(bars, EMPTY_V + s, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        wg = uint32(uint32(cuda.threadIdx.x) // uint32(128))
        tiles = p.row_tiles(rows, heads, batch)
        stage = uint32(0)
        q_stage = uint32(0)
        if wg == uint32(0):
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                parity = uint32(1)
                q_parity = uint32(1)
                n = uint32(cuda.blockIdx.x)
                there = True
                while there:
                    wait_mbarrier(bars, uint32(EMPTY_Q + q_stage), q_parity)
                    sN[q_stage] = n
                    there = n < tiles
                    if there:
                        i0, h, b = p.row_tile(n, rows, columns, heads, batch)
                        hk = h // uint32(group) if spec_grouped else h
                        Nq, Nk = p.lengths(rows, columns, b, options)
                        j0, j_end = p.column_range(i0, uint32(i0 + Br), Nq, Nk, options)
                        p.load_q(sQ, uint32(q_stage * NQ), Q, b, h, i0, bars, q_stage)
                        n = uint32(cuda.gridDim.x + cuda.atomic.add(taken, 0, 1))
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
                        arrive_mbarrier(bars, q_stage)
                    q_stage = uint32(q_stage + 1)
                    if q_stage == uint32(QS):
                        q_stage = uint32(0)
                        q_parity = uint32(q_parity ^ 1)
        else:
            take_registers(MANY)
            wg = uint32(wg - 1)
            rS = cuda.local.array(RS, float32)
            rP = cuda.local.array(RP, uint32)
            rO = cuda.local.array(RO, float32)
            rm = cuda.local.array(TM, float32)
            rl = cuda.local.array(TM, float32)
            rf = cuda.local.array(TM, float32)
            lane = uint32(cuda.threadIdx.x) % uint32(32)
            tx = uint32(lane % uint32(4))
            ty = uint32(uint32(cuda.threadIdx.x) % uint32(128) // uint32(32) * 16 + lane // uint32(4))
            p.first_turn(wg)
            parity = uint32(0)
            q_parity = uint32(0)
            wait_mbarrier(bars, q_stage, q_parity)
            n = sN[q_stage]
            while n < tiles:
                i0, h, b = p.row_tile(n, rows, columns, heads, batch)
                Nq, Nk = p.lengths(rows, columns, b, options)
                j0, j_end = p.column_range(i0, uint32(i0 + Br), Nq, Nk, options)
                row0 = uint32(i0 + wg * 64)
                first = uint32(q_stage * NQ + wg * (64 * 64))
                p.start(rO, rl, rm)
                if j0 < j_end:
                    wait_mbarrier(bars, uint32(FULL_K + stage), parity)
                    p.take_turn(wg)
                    p.begin_scores(rS, sQ, first, sK, uint32(stage * NK))
                    p.end_turn(wg)
                    p.wait_first(rS)
                    if lane == uint32(0):
                        arrive_mbarrier(bars, uint32(EMPTY_K + stage))
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
                        p.begin_scores(rS, sQ, first, sK, uint32(next_stage * NK))
                        wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                        p.begin_output(rO, rP, sV, uint32(stage * NK))
                        p.end_turn(wg)
                        p.wait_scores(rS)
                        if lane == uint32(0):
                            arrive_mbarrier(bars, uint32(EMPTY_K + next_stage))
                        p.scale_and_mask(rS, scale, row0, j0, Nq, Nk, b, h, options, ty, tx)
                        p.online_softmax_of_lanes(rS, scale, rm, rl, rf)
                        p.wait_output(rO)
                        if lane == uint32(0):
                            arrive_mbarrier(bars, uint32(EMPTY_V + stage))
                        p.rescale(rO, rf)
                        p.pack(rP, rS)
                        stage = next_stage
                        parity = next_parity
                        j0 = uint32(j0 + Bc)
                    wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                    p.begin_output(rO, rP, sV, uint32(stage * NK))
                    p.sum_lanes(rl)
                    p.wait_output(rO)
                    if lane == uint32(0):
                        arrive_mbarrier(bars, uint32(EMPTY_V + stage))
                    stage = uint32(stage + 1)
                    if stage == uint32(STAGES):
                        stage = uint32(0)
                        parity = uint32(parity ^ 1)
                p.normalise_rows(rO, rl)
                p.write_tile(rO, sQ, uint32(q_stage * NQ), O, wg, row0, b, h, ty, tx)
                if ty == uint32(0) and tx == uint32(0):
                    arrive_mbarrier(bars, uint32(EMPTY_Q + q_stage))
                p.logsumexp(rl, rm, rl)
                p.write_values(rl, p.query_rows(L, b, h, options), row0, rows, ty, tx)
                q_stage = uint32(q_stage + 1)
                if q_stage == uint32(QS):
                    q_stage = uint32(0)
                    q_parity = uint32(q_parity ^ 1)
                wait_mbarrier(bars, q_stage, q_parity)
                n = sN[q_stage]

    tiled, floats = TiledType(4), array_type(3)
    scalars = (types.float32, types.int32)
    arguments = (*[tiled] * 4, floats, array_type(1, types.int32), *scalars, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
