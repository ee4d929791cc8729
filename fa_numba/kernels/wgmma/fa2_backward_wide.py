"""FlashAttention-2, backward: K/V grid, Q inner (arXiv 2307.08691, Algorithm 2), on Hopper's tensor
cores, for head dimensions above 128: without dQ, which a second sweep makes (``fa2_backward``).

dK and dV of 64 columns fill the registers of a warpgroup each. So both consumer warpgroups have the
same 64 columns and all rows of a tile: one makes S, P and dV, the other dP, dS and dK. S passes
from one to the other through shared memory, in float32, each thread's part to its like. The
producers are those of ``fa2_backward``.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, tiled_type, uint32
from fa_numba.intrinsics.mbarrier import mbarrier_tile, wait_mbarrier
from fa_numba.intrinsics.shared import half_tile, index_tile, shared_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts.wgmma import parts


@cache
def make_wide_backward(spec, produce, produce_values):
    """The kernel for ``spec`` and its producers, those of ``fa2_backward.make_producers``; launched
    over the blocks of ``make_column_tile``.
    """
    p, (NQ, NK, NS) = parts(spec), spec.tile_halves
    RS, RP, RK = spec.TM * spec.TN, spec.p_registers, spec.column_registers
    AT_Q, AT_DO, AT_S, AT_L, BARRIER_0 = spec.places
    NQS, NSS, NL, BARRIERS = 2 * NQ, 2 * NS, 4 * spec.Br, spec.barriers
    (FULL_KV, FULL_Q, FULL_DO, EMPTY), FULL_S = spec.barrier_places, spec.barrier_of_scores
    BR2, (FEW, MANY), (TOLD_0, TOLD) = 2 * spec.Br, spec.registers, spec.told

    @device_function
    def consume_values(sK, sQ, sdO, sS, sL, sN, bars, Q, K, dV, scale_log2, group, options):
        rS = cuda.local.array(RS, float32)
        rP = cuda.local.array(RP, uint32)
        rdV = cuda.local.array(RK, float32)
        w, tx, ty = p.place()
        j0, hk, b = p.told_tile(sN)
        h, heads = p.query_heads(sN, hk, group)
        h_end = uint32(h + heads)
        Nq, Nk = p.lengths(sN, Q.shape[2], K.shape[2])
        i_first, i_end = p.row_range(sN, j0, Nq, Nk, options)
        # Alg. 2 line 7: dVj = 0, on chip
        p.start_column(rdV)
        stage, parity, i0 = uint32(0), uint32(0), i_first
        more = i0 < i_end and h < h_end
        wait_mbarrier(bars, uint32(FULL_KV), uint32(0))
        if more:
            wait_mbarrier(bars, uint32(FULL_Q + stage), parity)
            p.begin_scores(rS, sK, uint32(0), sQ, uint32(stage * NQ))
            p.wait_scores(rS, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            at, at_L, at_S = uint32(stage * NQ), uint32(stage * BR2), uint32(stage * NS)
            p.scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
            p.give_scores(sS, at_S, rS, bars, uint32(FULL_S + stage))
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            p.probabilities(rS, scale_log2, sL, at_L, ty)
            p.round_p(rP, rS)
            # Alg. 2 line 12: dVj += PijT dOi
            wait_mbarrier(bars, uint32(FULL_DO + stage), parity)
            p.begin_columns(rdV, rP, sdO, at)
            h_next, i_next = p.next_visit(h, i0, i_first, i_end)
            next_stage, next_parity = p.next_stage(stage, parity)
            more = h_next < h_end
            if more:
                wait_mbarrier(bars, uint32(FULL_Q + next_stage), next_parity)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next i: Sij = scale Qi KjT
            p.begin_scores(rS, sK, uint32(0), sQ, uint32(next_stage * NQ))
            p.wait_column(rdV)
            cuda.syncwarp()  # all lanes have read Li
            p.empty(bars, uint32(EMPTY + stage))
            p.wait_scores(rS, False)
            stage, parity, h, i0 = next_stage, next_parity, h_next, i_next

        # Alg. 2 line 18: write dVj, by way of Kj
        p.meet(w)  # no warp reads Kj any more
        p.write_tile(rdV, sK, uint32(0), dV, w, j0, Nk, b, hk, sN, options, tx, ty)

    @device_function
    def consume_keys(sV, sQ, sdO, sS, sL, sN, bars, Q, K, dK, scale, scale_log2, group, options):
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rdS = cuda.local.array(RP, uint32)
        rdK = cuda.local.array(RK, float32)
        w, tx, ty = p.place()
        j0, hk, b = p.told_tile(sN)
        h, heads = p.query_heads(sN, hk, group)
        h_end = uint32(h + heads)
        Nq, Nk = p.lengths(sN, Q.shape[2], K.shape[2])
        i_first, i_end = p.row_range(sN, j0, Nq, Nk, options)
        # Alg. 2 line 7: dKj = 0, on chip
        p.start_column(rdK)
        stage, parity, i0 = uint32(0), uint32(0), i_first
        more = i0 < i_end and h < h_end
        wait_mbarrier(bars, uint32(FULL_KV), uint32(0))
        if more:
            wait_mbarrier(bars, uint32(FULL_DO + stage), parity)
            p.begin_scores(rdP, sV, uint32(0), sdO, uint32(stage * NQ))
            p.wait_scores(rdP, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            at, at_L, at_S = uint32(stage * NQ), uint32(stage * BR2), uint32(stage * NS)
            wait_mbarrier(bars, uint32(FULL_S + stage), parity)
            p.take_scores(rS, sS, at_S)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            wait_mbarrier(bars, uint32(FULL_Q + stage), parity)
            p.softmax_from_lse(rS, scale_log2, sL, at_L, ty)
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            p.score_gradients(rdS, rdS, rdP, rS, sL, at_L, options, ty)
            # Alg. 2 line 16: dKj += dSijT Qi
            p.begin_columns(rdK, rdS, sQ, at)
            h_next, i_next = p.next_visit(h, i0, i_first, i_end)
            next_stage, next_parity = p.next_stage(stage, parity)
            more = h_next < h_end
            if more:
                wait_mbarrier(bars, uint32(FULL_DO + next_stage), next_parity)
            else:
                next_stage = stage  # dPij once more, for nothing
            # Alg. 2 line 13 of the next i: dPij = dOi VjT
            p.begin_scores(rdP, sV, uint32(0), sdO, uint32(next_stage * NQ))
            p.wait_column(rdK)
            cuda.syncwarp()  # all lanes have read Li, Di and Sij
            p.empty(bars, uint32(EMPTY + stage))
            p.wait_scores(rdP, False)
            stage, parity, h, i0 = next_stage, next_parity, h_next, i_next

        # Alg. 2 line 18: write dKj, by way of Vj
        p.meet(w)  # no warp reads Vj any more
        p.scale_columns(rdK, scale)
        p.write_tile(rdK, sV, uint32(0), dK, w, j0, Nk, b, hk, sN, options, tx, ty)

    def fa2_backward(Q, K, V, dO, L, D, A, dK, dV, scale, scale_log2, group, options):
        sK, sV = half_tile(0, NK), half_tile(NK, NK)
        sQ, sdO = half_tile(AT_Q, NQS), half_tile(AT_DO, NQS)
        sS, sL = shared_tile(AT_S, NSS), shared_tile(AT_L, NL)
        bars, sN = mbarrier_tile(BARRIER_0, BARRIERS), index_tile(TOLD_0, TOLD)
        p.begin_barriers(bars)
        p.tell_tile(sN, Q, K, group, options)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                produce(sK, sV, sQ, sdO, sN, bars, Q, K, V, dO, group, options)
            elif 32 <= cuda.threadIdx.x < 96:
                produce_values(sL, sN, bars, Q, K, L, D, group, options)
        else:
            take_registers(MANY)
            if cuda.threadIdx.x < 256:
                consume_values(sK, sQ, sdO, sS, sL, sN, bars, Q, K, dV, scale_log2, group, options)
            else:
                consume_keys(
                    sV, sQ, sdO, sS, sL, sN, bars, Q, K, dK, scale, scale_log2, group, options
                )

    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    rows = array_type(3)
    columns = tiled_type(4, spec.features.packed)
    arrays = [queries, keys, keys, queries, rows, rows, array_type(4), columns, columns]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, 16-bit elements, d rounded up to 64:  2 Bc d + 4 Br d + 4 Br Bc + 8 Br, and the
    barriers; in bytes:  181320 (d=192, 64 x 64), 230472 (d=256, 64 x 64)
Accesses: those of the kernel on ``mma`` without its adds to A, Q and dO by boxes.
"""
