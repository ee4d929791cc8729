"""FlashAttention-2, backward: K/V grid, Q inner (arXiv 2307.08691, Algorithm 2), on Hopper's tensor
cores.

One thread block takes one column tile: the outer loop is the grid. Its producer brings Kj and Vj
once, and row tiles with their L and D to two places in turn. A consumer warpgroup has 64 columns of
S and all rows of the tile: it keeps its dK and dV in registers, and P is recomputed from L alone.
Only dS passes through shared memory, for dQ. dQ is summed in float32 (``A``) by the copy engine's
atomic adds, in no fixed order, then rounded; or by a second sweep with Q outer, in one order.
Several blocks can share a column tile, each with its own query heads of the K/V head, or rows of
one (``group_splits``). Where it takes more than a block's place to find these, or batch entries
have lengths of their own, one thread tells the others. Shared memory and accesses: at the end.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, tiled_type, uint32
from fa_numba.intrinsics.mbarrier import mbarrier_tile, wait_mbarrier
from fa_numba.intrinsics.shared import half_tile, index_tile, shared_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.kernels.mma.fa2_backward import WARPS, make_round_rows, make_row_sums
from fa_numba.kernels.wgmma.fa2_backward_wide import make_wide_backward
from fa_numba.parts.wgmma import parts

__all__ = ["WARPS", "make_backward", "make_query_gradients", "make_round_rows", "make_row_sums"]


@cache
def make_producers(spec):
    """``produce``, by a thread: Kj and Vj, and row tiles; ``produce_values``, by two warps: their L
    and D.
    """
    p, Br, NQ = parts(spec), spec.Br, spec.tile_halves[0]
    FULL_KV, FULL_Q, FULL_DO, EMPTY = spec.barrier_places

    @device_function
    def produce(sK, sV, sQ, sdO, sN, bars, Q, K, V, dO, group, options):
        j0, hk, b = p.told_tile(sN)
        h, heads = p.query_heads(sN, hk, group)
        h_end = uint32(h + heads)
        Nq, Nk = p.lengths(sN, Q.shape[2], K.shape[2])
        i_first, i_end = p.row_range(sN, j0, Nq, Nk, options)
        # Alg. 2 line 6: load Kj, Vj
        shared = p.shared_head(hk, h, Q.shape[1], K.shape[1])
        p.load_column_tiles(sK, sV, K, V, b, shared, j0, Nk, sN, bars, uint32(FULL_KV))
        stage, parity, i0 = uint32(0), uint32(1), i_first
        while i0 < i_end and h < h_end:
            # Alg. 2 line 9: load Qi, dOi
            wait_mbarrier(bars, uint32(EMPTY + stage), parity)
            at = uint32(stage * NQ)
            p.load_rows(sQ, at, Q, b, h, i0, Nq, sN, bars, uint32(FULL_Q + stage))
            p.load_rows(sdO, at, dO, b, h, i0, Nq, sN, bars, uint32(FULL_DO + stage))
            stage, parity = p.next_stage(stage, parity)
            h, i0 = p.next_visit(h, i0, i_first, i_end)

    @device_function
    def produce_values(sL, sN, bars, Q, K, L, D, group, options):
        j0, hk, b = p.told_tile(sN)
        h, heads = p.query_heads(sN, hk, group)
        h_end = uint32(h + heads)
        Nq, Nk = p.lengths(sN, Q.shape[2], K.shape[2])
        i_first, i_end = p.row_range(sN, j0, Nq, Nk, options)
        stage, parity, i0 = uint32(0), uint32(1), i_first
        while i0 < i_end and h < h_end:
            # Alg. 2 line 9: load Li, Di
            wait_mbarrier(bars, uint32(EMPTY + stage), parity)
            at, full = uint32(stage * (2 * Br)), uint32(FULL_Q + stage)
            Lh, Dh = p.query_rows(L, b, h, options), p.query_rows(D, b, h, options)
            p.load_values(sL, at, Lh, Dh, i0, Nq, bars, full)
            stage, parity = p.next_stage(stage, parity)
            h, i0 = p.next_visit(h, i0, i_first, i_end)

    return produce, produce_values


@cache
def make_backward(spec, atomic=True):
    """The kernel, over the blocks of ``make_column_tile``; without ``atomic`` dQ is
    ``make_query_gradients``'s.
    """
    produce, produce_values = make_producers(spec)
    if spec.wide:
        return make_wide_backward(spec, produce, produce_values)
    p, Br, (NQ, NK, NS) = parts(spec), spec.Br, spec.tile_halves
    RS, RP, RQ = spec.TM * spec.TN, spec.p_registers, spec.query_registers
    RK, EARLY, (FEW, MANY) = spec.column_registers, spec.rounds_early, spec.registers
    AT_Q, AT_DO, AT_DS, AT_DQ, AT_L, BARRIER_0 = spec.places
    NQS, NSS, NDQ, NL, BARRIERS = 2 * NQ, 2 * NS, spec.query_floats, 4 * Br, spec.barriers
    TOLD_0, TOLD = spec.told
    FULL_KV, FULL_Q, FULL_DO, EMPTY = spec.barrier_places

    @device_function
    def consume(sK, sV, sQ, sdO, sdS, sdQ, sL, sN, bars, Q, K, A, dK, dV, scale, scale_log2,
                group, options):  # fmt: skip
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rP = cuda.local.array(RP, uint32)
        rdS = cuda.local.array(RP, uint32)
        rdQ = cuda.local.array(RQ, float32)
        rdK = cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        w, tx, ty = p.place()
        j0, hk, b = p.told_tile(sN)
        h, heads = p.query_heads(sN, hk, group)
        h_end = uint32(h + heads)
        Nq, Nk = p.lengths(sN, Q.shape[2], K.shape[2])
        i_first, i_end = p.row_range(sN, j0, Nq, Nk, options)
        column0 = uint32(j0 + 64 * w)
        own = uint32(64 * 64 * w)
        # Alg. 2 line 7: dKj = 0, dVj = 0, on chip
        p.start_columns(rdK, rdV)
        stage, parity, i0 = uint32(0), uint32(0), i_first
        more = i0 < i_end and h < h_end
        wait_mbarrier(bars, uint32(FULL_KV), uint32(0))
        if more:
            wait_mbarrier(bars, uint32(FULL_Q + stage), parity)
            p.begin_scores(rS, sK, own, sQ, uint32(stage * NQ))
            p.wait_scores(rS, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            at, at_L, at_dS = uint32(stage * NQ), uint32(stage * (2 * Br)), uint32(stage * NS)
            Nq, Nk = p.lengths(sN, Q.shape[2], K.shape[2])
            p.scale_and_bias(rS, scale_log2, i0, column0, Nq, Nk, b, h, options, ty, tx)
            # Alg. 2 line 13: dPij = dOi VjT, on its way with Sij = scale Qi KjT of line 10
            wait_mbarrier(bars, uint32(FULL_DO + stage), parity)
            p.begin_scores(rdP, sV, own, sdO, at)
            p.scale_and_mask(rS, scale_log2, i0, column0, Nq, Nk, b, h, options, ty, tx)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            p.softmax_from_lse(rS, scale_log2, sL, at_L, ty)
            # Alg. 2 line 12: dVj += PijT dOi
            if EARLY:
                p.round_p(rP, rS)
                p.begin_columns(rdV, rP, sdO, at)
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            p.wait_scores(rdP, EARLY)
            p.score_gradients(rdS, rP, rdP, rS, sL, at_L, options, ty)
            if not EARLY:
                p.begin_columns(rdV, rP, sdO, at)
            # Alg. 2 line 16: dKj += dSijT Qi
            p.begin_columns(rdK, rdS, sQ, at)
            # Alg. 2 line 15: dQi += scale dSij Kj, through global memory
            if atomic:
                p.store_ds(sdS, at_dS, rdS, w, ty, tx)
                p.meet_all()  # dSij is there
                p.begin_dq(rdQ, sdS, at_dS, sK, w)
            else:
                cuda.syncwarp()  # all lanes have read Li and Di
            p.wait_columns(rdK, rdV, atomic)
            h_next, i_next = p.next_visit(h, i0, i_first, i_end)
            next_stage, next_parity = p.next_stage(stage, parity)
            more = p.takes_more(sN, h_next, h_end, i_next)
            if more:
                p.empty(bars, uint32(EMPTY + stage))
                wait_mbarrier(bars, uint32(FULL_Q + next_stage), next_parity)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next i: Sij = scale Qi KjT
            p.begin_scores(rS, sK, own, sQ, uint32(next_stage * NQ))
            if atomic:
                p.wait_dq(rdQ)
                p.add_dq(rdQ, sdQ, A, b, p.told_head(sN, h), i0, Nq, sN, w, tx, ty)
            p.wait_scores(rS, False)
            stage, parity, h, i0 = next_stage, next_parity, h_next, i_next

        # Alg. 2 line 18: write dKj, dVj
        p.meet_all()  # nobody reads Kj and Vj any more
        p.scale_columns(rdK, scale)
        p.write_tile(rdK, sK, uint32(0), dK, w, column0, Nk, b, hk, sN, options, tx, ty)
        p.write_tile(rdV, sV, uint32(0), dV, w, column0, Nk, b, hk, sN, options, tx, ty)

    def fa2_backward(Q, K, V, dO, L, D, A, dK, dV, scale, scale_log2, group, options):
        sK, sV = half_tile(0, NK), half_tile(NK, NK)
        sQ, sdO, sdS = half_tile(AT_Q, NQS), half_tile(AT_DO, NQS), half_tile(AT_DS, NSS)
        sdQ, sL = shared_tile(AT_DQ, NDQ), shared_tile(AT_L, NL)
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
            # fmt: off
            consume(sK, sV, sQ, sdO, sdS, sdQ, sL, sN, bars, Q, K, A, dK, dV, scale, scale_log2,
                    group, options)
            # fmt: on

    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    rows = array_type(3)
    sums = queries if atomic else array_type(4)
    columns = array_type(4) if spec.splits_group else tiled_type(4, spec.features.packed)
    arrays = [queries, keys, keys, queries, rows, rows, sums, columns, columns]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


@cache
def make_query_gradients(spec):
    """dQ without atomic adds: a second sweep, Q outer; launched over (Tr, Hq, B) blocks, Tr the row
    tiles of all packed sequences.

    S, P, dP and dS are computed once more, and every dQi is summed in one order and written once.
    The producer brings Qi and dOi once, and column tiles to two places in turn. A consumer
    warpgroup has 64 rows of S and all columns; dS is an operand as it is.
    """
    p, Br, Bc, (NQ, NK) = parts(spec), spec.Br, spec.Bc, spec.tile_halves
    TM, RS, RP, RQ = spec.TM, spec.TM * spec.TN, spec.p_registers, spec.TM * spec.DN * 4
    NKS, AT_K, AT_V = spec.stages * NK, 2 * NQ, 2 * NQ + spec.stages * NK
    BARRIERS, BARRIER_0, (FEW, MANY) = spec.barriers, spec.halves // 4, spec.registers
    FULL_Q, FULL_DO, FULL_K, FULL_V, EMPTY_K, EMPTY_V = spec.barrier_places

    @device_function
    def produce(sQ, sdO, sK, sV, bars, Q, K, V, dO, group, options):
        b, h, hk = p.heads(group)
        i0, b = p.row_tile(b, options)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        j0, j_end = p.column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        p.load_queries(sQ, uint32(0), Q, b, h, i0, Nq, options, bars, uint32(FULL_Q))
        p.load_queries(sdO, uint32(0), dO, b, h, i0, Nq, options, bars, uint32(FULL_DO))
        stage, parity = uint32(0), uint32(1)
        while j0 < j_end:
            at = uint32(stage * NK)
            wait_mbarrier(bars, uint32(EMPTY_K + stage), parity)
            p.load_columns(sK, at, K, b, hk, j0, Nk, options, bars, uint32(FULL_K + stage))
            wait_mbarrier(bars, uint32(EMPTY_V + stage), parity)
            p.load_columns(sV, at, V, b, hk, j0, Nk, options, bars, uint32(FULL_V + stage))
            stage, parity = p.next_stage(stage, parity)
            j0 = uint32(j0 + Bc)

    @device_function
    def consume(sQ, sdO, sK, sV, bars, Q, K, L, D, dQ, scale, scale_log2, group, options):
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rdS = cuda.local.array(RP, uint32)
        rdQ = cuda.local.array(RQ, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        w, ty, tx = p.place()
        b, h, hk = p.heads(group)
        i0, b = p.row_tile(b, options)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        j0, j_end = p.column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        row0, own = uint32(i0 + 64 * w), uint32(64 * 64 * w)
        more = j0 < j_end
        p.read_values(rL, p.query_rows(L, b, h, options), row0, Nq, ty, tx)
        p.read_values(rD, p.query_rows(D, b, h, options), row0, Nq, ty, tx)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        stage, parity = uint32(0), uint32(0)
        wait_mbarrier(bars, uint32(FULL_Q), uint32(0))
        wait_mbarrier(bars, uint32(FULL_DO), uint32(0))
        if more:
            wait_mbarrier(bars, uint32(FULL_K + stage), parity)
            p.begin_scores(rS, sQ, own, sK, uint32(stage * NK))
            p.wait_scores(rS, False)
        while more:
            at = uint32(stage * NK)
            # Alg. 2 line 13: dPij = dOi VjT, on its way with Sij
            wait_mbarrier(bars, uint32(FULL_V + stage), parity)
            p.begin_scores(rdP, sdO, own, sV, at)
            p.scale_and_mask(rS, scale_log2, row0, j0, Nq, Nk, b, h, options, ty, tx)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            p.softmax_from_lse(rS, scale_log2, rL)
            p.wait_scores(rdP, False)
            p.empty(bars, uint32(EMPTY_V + stage))
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            p.score_gradients(rdS, rdP, rS, rL, rD, options)
            # Alg. 2 line 15: dQi += scale dSij Kj, on its way with the next S
            p.begin_output(rdQ, rdS, sK, at)
            next_stage, next_parity = p.next_stage(stage, parity)
            j0 = uint32(j0 + Bc)
            more = j0 < j_end
            if more:
                wait_mbarrier(bars, uint32(FULL_K + next_stage), next_parity)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next j: Sij = scale Qi KjT
            p.begin_scores(rS, sQ, own, sK, uint32(next_stage * NK))
            p.wait_output(rdQ, True)
            p.empty(bars, uint32(EMPTY_K + stage))
            p.wait_scores(rS, False)
            stage, parity = next_stage, next_parity
        for e in range(RQ):
            rdQ[e] *= scale
        p.meet(w)  # no warp reads Qi any more
        p.write_queries(rdQ, sQ, uint32(0), dQ, w, row0, Nq, b, h, options, ty, tx)

    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        sQ, sdO = half_tile(0, NQ), half_tile(NQ, NQ)
        sK, sV = half_tile(AT_K, NKS), half_tile(AT_V, NKS)
        bars = mbarrier_tile(BARRIER_0, BARRIERS)
        p.begin_barriers(bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                produce(sQ, sdO, sK, sV, bars, Q, K, V, dO, group, options)
        else:
            take_registers(MANY)
            consume(sQ, sdO, sK, sV, bars, Q, K, L, D, dQ, scale, scale_log2, group, options)

    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    rows = array_type(3)
    arrays = [queries, keys, keys, queries, rows, rows, tiled_type(4, spec.features.packed)]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_backward_dq, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, 16-bit elements, d rounded up to 64:  2 Bc d + 4 Br d + 2 Br Bc + 8 Br, 32768
    bytes for dQ, and the barriers; in bytes:  198712 (d=64, 128 x 128), 197688 (d=128, 64 x 128);
    with lengths, or rows split, 36 more
Accesses: those of the kernel on ``mma``, Q and dO by boxes. Of S blocks that share a column tile
    each loads Kj and Vj, and stores its parts of dKj and dVj in float32; ``round_rows`` adds these
    up in one order: S Nk d loads and Nk d stores of dK, and of dV.
"""
