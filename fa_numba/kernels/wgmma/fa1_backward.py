"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on Hopper's
tensor cores.

One thread block takes one (batch, K/V head): both loops run inside it. Its producer brings Kj and
Vj in every pass, and row tiles with their L to two places in turn; two of its warps make D of them,
in every pass. A consumer warpgroup has 64 columns of S and all rows of the tile: it keeps its
dK and dV in registers, and P is recomputed from L alone. Only dS passes through shared memory, for
dQ, which passes through global memory in every pass: in float32 (``A``) until the last one rounds
it. Query splits, shared memory and accesses: below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, tiled_type, uint32
from fa_numba.intrinsics.mbarrier import mbarrier_tile, wait_mbarrier
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts.wgmma import parts


@cache
def make_backward(spec):
    """The kernel for ``spec``; launched over (query splits, Hk, B) blocks."""
    p, Br, Bc, (NQ, NK, NS) = parts(spec), spec.Br, spec.Bc, spec.tile_halves
    RS, RP, RQ = spec.TM * spec.TN, spec.p_registers, spec.query_registers
    RK, EARLY, (FEW, MANY) = spec.column_registers, spec.rounds_early, spec.registers
    AT_Q, AT_DO, AT_DS, _, AT_L, BARRIER_0 = spec.places
    NQS, NSS, NL, BARRIERS = 2 * NQ, 2 * NS, 4 * Br, spec.barriers
    FULL_KV, FULL_Q, FULL_DO, EMPTY = spec.barrier_places
    (FULL_O, FULL_D, EMPTY_KV), AT_O = spec.barrier_places_with_o, spec.place_of_o

    @device_function
    def produce(sK, sV, sQ, sdO, sO, bars, Q, K, V, O, dO, group, split_rows, options):
        b, hk = p.key_head()
        h_first, heads = p.query_heads(hk, group)
        h_end = uint32(h_first + heads)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        i_begin, i_stop = p.own_rows(split_rows, Nq)
        stage, parity = uint32(0), uint32(1)
        # Alg. 4 line 6: for each column tile j
        j0 = uint32(0)
        while j0 < Nk:
            i_first, i_end = p.rows_of_pass(j0, i_begin, i_stop, Nq, Nk, options)
            # Alg. 4 line 7: load Kj, Vj
            wait_mbarrier(bars, uint32(EMPTY_KV), uint32(j0 // Bc % 2 ^ 1))
            p.load_column_tiles(sK, sV, K, V, b, hk, j0, bars, uint32(FULL_KV))
            h, i0 = h_first, i_first
            while p.visits(h, h_end, i0, i_end):
                # Alg. 4 line 10: load Qi, dOi, Oi
                wait_mbarrier(bars, uint32(EMPTY + stage), parity)
                at = uint32(stage * NQ)
                p.load_rows(sQ, at, Q, b, h, i0, bars, uint32(FULL_Q + stage))
                p.load_rows(sdO, at, dO, b, h, i0, bars, uint32(FULL_DO + stage))
                p.load_rows(sO, at, O, b, h, i0, bars, uint32(FULL_O + stage))
                stage, parity = p.next_stage(stage, parity)
                h, i0 = p.next_visit(h, i0, i_first, i_end)
            j0 = uint32(j0 + Bc)

    @device_function
    def produce_values(sL, bars, Q, K, L, group, split_rows, options):
        b, hk = p.key_head()
        h_first, heads = p.query_heads(hk, group)
        h_end = uint32(h_first + heads)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        i_begin, i_stop = p.own_rows(split_rows, Nq)
        stage, parity, j0 = uint32(0), uint32(1), uint32(0)
        while j0 < Nk:
            i_first, i_end = p.rows_of_pass(j0, i_begin, i_stop, Nq, Nk, options)
            h, i0 = h_first, i_first
            while p.visits(h, h_end, i0, i_end):
                # Alg. 4 line 10: load Li
                wait_mbarrier(bars, uint32(EMPTY + stage), parity)
                at_L = uint32(stage * (2 * Br))
                p.load_values(sL, at_L, L[b, h], i0, Nq, bars, uint32(FULL_Q + stage))
                stage, parity = p.next_stage(stage, parity)
                h, i0 = p.next_visit(h, i0, i_first, i_end)
            j0 = uint32(j0 + Bc)

    @device_function
    def produce_dots(sdO, sO, sL, bars, Q, K, group, split_rows, options):
        _, hk = p.key_head()
        _, heads = p.query_heads(hk, group)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], uint32(0), options)
        i_begin, i_stop = p.own_rows(split_rows, Nq)
        columns = uint32(Q.shape[3])
        n, j0 = uint32(0), uint32(0)
        while j0 < Nk:
            i_first, i_end = p.rows_of_pass(j0, i_begin, i_stop, Nq, Nk, options)
            n_end = uint32(n + p.row_tiles(i_first, i_end) * heads)
            while n < n_end:
                # Alg. 4 line 19: Di = rowsum(dOi o Oi), in every pass
                stage, parity = uint32(n % 2), uint32(n // 2 % 2)
                wait_mbarrier(bars, uint32(FULL_DO + stage), parity)
                wait_mbarrier(bars, uint32(FULL_O + stage), parity)
                at, at_D = uint32(stage * NQ), uint32(stage * (2 * Br) + Br)
                p.row_dots(sL, at_D, sdO, sO, at, columns, bars, uint32(FULL_D + stage))
                n = uint32(n + 1)
            j0 = uint32(j0 + Bc)

    @device_function
    def consume(sK, sV, sQ, sdO, sdS, sL, bars, Q, K, A, dQ, dK, dV, scale, scale_log2, group,
                split_rows, options):  # fmt: skip
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rP = cuda.local.array(RP, uint32)
        rdS = cuda.local.array(RP, uint32)
        rdQ = cuda.local.array(RQ, float32)
        rdK = cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        w, tx, ty = p.place()
        b, hk = p.key_head()
        h_first, heads = p.query_heads(hk, group)
        h_end = uint32(h_first + heads)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        own = uint32(64 * 64 * w)
        # Alg. 4 line 5: dQ = 0
        i_begin, i_stop = p.own_rows(split_rows, Nq)
        p.initialise_dq(rdQ, A, dQ, scale, b, h_first, h_end, i_begin, i_stop, w, tx, ty)
        stage, parity = uint32(0), uint32(0)
        # Alg. 4 line 6: for each column tile j
        j0 = uint32(0)
        while j0 < Nk:
            i_first, i_end = p.rows_of_pass(j0, i_begin, i_stop, Nq, Nk, options)
            column0 = uint32(j0 + 64 * w)
            # Alg. 4 line 8: dKj = 0, dVj = 0, on chip
            p.start_columns(rdK, rdV)
            h, i0 = h_first, i_first
            more = p.visits(h, h_end, i0, i_end)
            wait_mbarrier(bars, uint32(FULL_KV), uint32(j0 // Bc % 2))
            if more:
                wait_mbarrier(bars, uint32(FULL_Q + stage), parity)
                p.begin_scores(rS, sK, own, sQ, uint32(stage * NQ))
                p.wait_scores(rS, False)
            # Alg. 4 line 9: for each row tile i that sees column tile j, of each query head
            while more:
                at, at_L, at_dS = uint32(stage * NQ), uint32(stage * (2 * Br)), uint32(stage * NS)
                # Alg. 4 line 17: dPij = dOi VjT, on its way with Sij = scale Qi KjT of line 11
                wait_mbarrier(bars, uint32(FULL_DO + stage), parity)
                p.begin_scores(rdP, sV, own, sdO, at)
                # Alg. 4 line 12: mask
                p.scale_and_mask(rS, scale_log2, i0, column0, Nq, Nk, b, h, options, ty, tx)
                # Alg. 4 line 13: Pij = exp(Sij - Li)
                p.softmax_from_lse(rS, scale_log2, sL, at_L, ty)
                # Alg. 4 line 16: dVj += PijT dOi
                if EARLY:
                    p.round_p(rP, rS)
                    p.begin_columns(rdV, rP, sdO, at)
                # Alg. 4 line 20: dSij = Pij o (dPij - Di)
                p.wait_scores(rdP, EARLY)
                wait_mbarrier(bars, uint32(FULL_D + stage), parity)
                p.score_gradients(rdS, rP, rdP, rS, sL, at_L, options, ty)
                if not EARLY:
                    p.begin_columns(rdV, rP, sdO, at)
                # Alg. 4 line 22: dKj += dSijT Qi
                p.begin_columns(rdK, rdS, sQ, at)
                p.store_ds(sdS, at_dS, rdS, w, ty, tx)
                p.meet_all()  # dSij is there
                # Alg. 4 line 21: dQi += scale dSij Kj, through global memory
                p.read_dq(rdQ, A, b, h, j0, i0, i_stop, w, tx, ty)
                p.begin_dq(rdQ, sdS, at_dS, sK, w)
                p.wait_columns(rdK, rdV, True)
                h_next, i_next = p.next_visit(h, i0, i_first, i_end)
                next_stage, next_parity = p.next_stage(stage, parity)
                more = p.visits(h_next, h_end, i_next, i_end)
                if more:
                    p.empty(bars, uint32(EMPTY + stage))
                    wait_mbarrier(bars, uint32(FULL_Q + next_stage), next_parity)
                else:
                    next_stage, next_parity = stage, parity  # Sij once more, for nothing
                # Alg. 4 line 11 of the next i: Sij = scale Qi KjT
                p.begin_scores(rS, sK, own, sQ, uint32(next_stage * NQ))
                p.wait_dq(rdQ)
                sees_more = p.sees_more(i0, j0, Nq, Nk, b, h, options)
                p.write_dq(rdQ, A, dQ, b, h, scale, sees_more, i0, i_stop, w, tx, ty)
                p.wait_scores(rS, False)
                stage, parity, h, i0 = next_stage, next_parity, h_next, i_next
            if i_first < i_end:
                p.empty(bars, uint32(EMPTY + stage))
                stage, parity = p.next_stage(stage, parity)

            # Alg. 4 line 24: write dKj, dVj
            p.meet_all()  # nobody reads Kj and Vj any more
            p.scale_columns(rdK, scale)
            p.write_tile(rdK, sK, uint32(0), dK, w, column0, b, hk, tx, ty)
            p.write_tile(rdV, sV, uint32(0), dV, w, column0, b, hk, tx, ty)
            p.q_is_empty(bars, uint32(EMPTY_KV), tx, ty)
            j0 = uint32(j0 + Bc)

    def fa1_backward(
        Q, K, V, O, dO, L, A, dQ, dK, dV, scale, scale_log2, group, split_rows, options
    ):
        sK, sV = half_tile(0, NK), half_tile(NK, NK)
        sQ, sdO, sdS = half_tile(AT_Q, NQS), half_tile(AT_DO, NQS), half_tile(AT_DS, NSS)
        sO = half_tile(AT_O, NQS)
        sL, bars = shared_tile(AT_L, NL), mbarrier_tile(BARRIER_0, BARRIERS)
        p.begin_barriers(bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                produce(sK, sV, sQ, sdO, sO, bars, Q, K, V, O, dO, group, split_rows, options)
            elif 32 <= cuda.threadIdx.x < 96:
                produce_dots(sdO, sO, sL, bars, Q, K, group, split_rows, options)
            elif 96 <= cuda.threadIdx.x:
                produce_values(sL, bars, Q, K, L, group, split_rows, options)
        else:
            take_registers(MANY)
            # fmt: off
            consume(sK, sV, sQ, sdO, sdS, sL, bars, Q, K, A, dQ, dK, dV, scale, scale_log2, group,
                    split_rows, options)
            # fmt: on

    tiles, floats = tiled_type(4), array_type(4)
    columns = floats if spec.splits_queries else tiles
    arrays = [*[tiles] * 5, array_type(3), floats, array_type(4, types.uint16), columns, columns]
    scalars = (types.float32, types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
A part of dQ is the same thread's in every pass, so that it reads what it has written itself. With
query splits several blocks share a head, each with its own rows of Q, and sum dK and dV in float32
by atomic adds, in no fixed order; a kernel of its own rounds them. With a window counters of
the loops spill, up to 96 bytes a thread.

Shared memory, 16-bit elements, d rounded up to 64:  2 Bc d + 6 Br d + 2 Br Bc + 8 Br, and the
    barriers; in bytes:  198752 (d=64, 128 x 128), 197728 (d=128, 64 x 128)
Accesses: those of the kernel on ``mma``, Q, dO and O by boxes.
"""
