"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on Hopper's tensor
cores, as FlashAttention-3 arranges it (arXiv 2407.08608, Algorithms 1 and 2).

A block stays on its multiprocessor and takes one row tile Qi after the other (line 3), as a counter
gives them out. Its producers run ahead: the next tiles are on their way while these are multiplied.
One brings Qi and tells which row tile that is, so that nobody else divides for it; one Kj and Vj,
or, of pages, one Kj and one Vj.
A consumer warpgroup has 64 rows of Qi and all columns. While it computes the softmax of one column
tile, its products with the one before, and the other warpgroups' products, keep the tensor cores
busy; while it writes Oi, the first product of the next row tile. S, P, O, m and l stay in
registers. m is kept in units of log2. Shared memory and accesses: below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, tiled_type, uint32
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, mbarrier_tile, wait_mbarrier
from fa_numba.intrinsics.shared import half_tile, index_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts.pages import pages_of_tile
from fa_numba.parts.wgmma import parts
from fa_numba.tiling.wgmma import PANEL, TOLD

# A block takes its next row tile when at most so many column tiles of the last one taken are left:
# soon enough for Q to come in time, late enough that the last row tiles go to blocks without work.
LAST_TILES = 8


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over as many blocks as all multiprocessors hold."""
    p, Bc, ROWS, GROUPED = parts(spec), spec.Bc, spec.head_rows, spec.by_group
    STAGES, Q_STAGES, (NQ, NK) = spec.stages, spec.q_stages, spec.tile_halves
    TM, RS, RO, RP = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.p_registers
    RB = spec.bias_registers
    (FEW, MANY), OVERLAPS, AHEAD = spec.registers, spec.overlaps, spec.begins_next
    WQ = PANEL * 64  # elements of a warpgroup's rows in a panel
    GROUP_ROWS, SPLITS = 64 // spec.tile_heads, spec.features.splits  # rows of a head
    NQS, NKS, V0 = Q_STAGES * NQ, STAGES * NK, Q_STAGES * NQ + STAGES * NK
    NN = TOLD * Q_STAGES
    BARRIERS, BARRIER_0, TILE_0 = spec.barriers, spec.halves // 4, spec.first_index
    NEXT, FULL_N, FULL_Q, EMPTY_Q, FULL_K, FULL_V, EMPTY_K, EMPTY_V = spec.barrier_places
    SOON = LAST_TILES * Bc if spec.takes_late else 1 << 31  # beyond all columns: never
    PAGES = pages_of_tile(spec)

    @device_function
    def seen(i0, b, h, split, Q, K, options):
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        j0, j_end = p.column_range(i0, uint32(i0 + ROWS), Nq, Nk, options)
        j0, j_end = p.share_of_columns(j0, j_end, split, i0, b, h, options)
        return Nq, Nk, j0, j_end

    @device_function
    def produce_rows(sQ, sN, bars, Q, K, taken, tiles, options):
        stage, parity, next_parity = uint32(0), uint32(1), uint32(0)
        n = uint32(cuda.blockIdx.x)
        there = True
        while there:
            wait_mbarrier(bars, uint32(EMPTY_Q + stage), parity)
            sN[TOLD * stage] = n
            there = n < tiles
            if there:
                tile, split = p.tile_of(n, options)
                i0, h, b = p.row_tile(tile, Q.shape, K.shape, options)  # Alg. 1 line 3: row tile i
                p.tell(sN, stage, i0, h, b, split)
                arrive_mbarrier(bars, uint32(FULL_N + stage))
                Nq, Nk, j0, j_end = seen(i0, b, h, split, Q, K, options)
                # Alg. 1 line 4: load Qi
                p.load_queries(
                    sQ, uint32(stage * NQ), Q, b, h, i0, Nq, options, bars, FULL_Q + stage
                )
                if uint32(j0 + SOON) < j_end:
                    wait_mbarrier(bars, NEXT, next_parity)
                    next_parity = uint32(next_parity ^ 1)
                n = p.next_tile(n, taken)
            else:
                arrive_mbarrier(bars, uint32(FULL_N + stage))
                arrive_mbarrier(bars, uint32(FULL_Q + stage))
            stage, parity = p.next_q_stage(stage, parity)

    @device_function
    def produce_columns(sK, sV, sN, bars, Q, K, V, tiles, group, options):
        pages = cuda.local.array(PAGES, uint32)
        brings_keys, brings_values = p.brings_keys(), p.brings_values()
        stage, parity = uint32(0), uint32(1)
        q_stage, q_parity = uint32(0), uint32(0)
        wait_mbarrier(bars, uint32(FULL_N + q_stage), q_parity)
        while sN[TOLD * q_stage] < tiles:
            i0, h, b, split = p.told(sN, q_stage)
            arrive_mbarrier(bars, uint32(EMPTY_Q + q_stage))
            hk = h // uint32(group) if GROUPED else h
            Nq, Nk, j0, j_end = seen(i0, b, h, split, Q, K, options)
            is_long = brings_keys and uint32(j0 + SOON) < j_end
            while j0 < j_end:
                if is_long and uint32(j0 + SOON) >= j_end:
                    arrive_mbarrier(bars, NEXT)
                    is_long = False
                # Alg. 1 line 7: load Kj, Vj
                at = uint32(stage * NK)
                p.look_up(pages, b, j0, Nk, options)
                if brings_keys:
                    wait_mbarrier(bars, uint32(EMPTY_K + stage), parity)
                    p.load_keys(sK, at, K, b, hk, j0, Nk, pages, options, bars, FULL_K + stage)
                if brings_values:
                    wait_mbarrier(bars, uint32(EMPTY_V + stage), parity)
                    p.load_keys(sV, at, V, b, hk, j0, Nk, pages, options, bars, FULL_V + stage)
                stage, parity = p.next_stage(stage, parity)
                j0 = uint32(j0 + Bc)
            q_stage, q_parity = p.next_q_stage(q_stage, q_parity)
            wait_mbarrier(bars, uint32(FULL_N + q_stage), q_parity)

    @device_function
    def finish(rO, rl, rm, sQ, q_stage, bars, Q, O, L, w, i0, Nq, b, h, split, options, ty, tx):
        row0 = uint32(i0 + GROUP_ROWS * w)
        if SPLITS:  # merge_splits takes O, l and m of these columns
            p.meet(w)  # nobody of this warpgroup reads Qi any more
            p.q_is_empty(bars, uint32(EMPTY_Q + q_stage), ty, tx)
            rows = p.rows_of(Q.shape, Nq)
            p.write_split(rO, rl, rm, split, row0, rows, b, h, options, ty, tx)
        else:
            # FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
            p.normalise_rows(rO, rl)
            p.write_queries(rO, sQ, uint32(q_stage * NQ), O, w, row0, Nq, b, h, options, ty, tx)
            p.q_is_empty(bars, uint32(EMPTY_Q + q_stage), ty, tx)
            # FA-2 lines 13, 15: L = m + log l
            p.logsumexp(rl, rm, rl)
            p.write_logsumexps(rl, L, b, h, row0, Q.shape[2], Nq, options, ty, tx)

    @device_function
    def consume(sQ, sK, sV, sN, bars, Q, K, O, L, tiles, scale, options):
        rS = cuda.local.array(RS, float32)
        rB = cuda.local.array(RB, float32)
        rP = cuda.local.array(RP, uint32)
        rO = cuda.local.array(RO, float32)
        rm = cuda.local.array(TM, float32)
        rl = cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        w, ty, tx = p.place()
        stage, parity = uint32(0), uint32(0)
        q_stage, q_parity = uint32(0), uint32(0)
        p.begin_turns(w)
        wait_mbarrier(bars, uint32(FULL_Q + q_stage), q_parity)
        while sN[TOLD * q_stage] < tiles:
            i0, h, b, split = p.told(sN, q_stage)  # Alg. 1 line 3: row tile i
            Nq, Nk, j0, j_end = seen(i0, b, h, split, Q, K, options)
            # FA-2 line 5: O = 0, l = 0, m = -inf
            p.start(rO, rl, rm)
            if j0 < j_end:
                # FA-2 line 8 of the first tile: Sij = scale Qi KjT
                wait_mbarrier(bars, uint32(FULL_K + stage), parity)
                p.take_turn(w)
                p.begin_scores(rS, sQ, uint32(q_stage * NQ + WQ * w), sK, uint32(stage * NK))
                p.end_turn(w)
                while True:
                    row0 = uint32(i0 + GROUP_ROWS * w)
                    p.read_bias(rB, row0, j0, Nq, Nk, b, h, options, ty, tx)
                    p.wait_scores(rS, False)
                    p.empty(bars, uint32(EMPTY_K + stage))
                    p.scale_bias_and_mask(rS, rB, scale, row0, j0, Nq, Nk, b, h, options, ty, tx)
                    # FA-2 line 9: m, l, and P in units of the new m
                    p.online_softmax_of_lanes(rS, scale, rm, rl, rf)
                    p.round_p(rP, rS)
                    j0 = uint32(j0 + Bc)
                    # FA-2 line 6: for each column tile j that is seen, after the first
                    while j0 < j_end:
                        after, after_parity = p.next_stage(stage, parity)
                        # FA-2 line 8: Sij = scale Qi KjT, on its way with Pij-1 Vj-1 of line 10
                        if OVERLAPS:
                            wait_mbarrier(bars, uint32(FULL_K + after), after_parity)
                            p.take_turn(w)
                        else:  # Pij-1 Vj-1 before, by itself
                            wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                            p.take_turn(w)
                            p.begin_output(rO, rP, sV, uint32(stage * NK))
                            p.wait_output(rO, False)
                            wait_mbarrier(bars, uint32(FULL_K + after), after_parity)
                        p.begin_scores(
                            rS, sQ, uint32(q_stage * NQ + WQ * w), sK, uint32(after * NK)
                        )
                        if OVERLAPS:
                            wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                            p.begin_output(rO, rP, sV, uint32(stage * NK))
                        p.end_turn(w)
                        p.read_bias(rB, row0, j0, Nq, Nk, b, h, options, ty, tx)
                        p.wait_scores(rS, OVERLAPS)
                        p.empty(bars, uint32(EMPTY_K + after))
                        p.scale_bias_and_mask(
                            rS, rB, scale, row0, j0, Nq, Nk, b, h, options, ty, tx
                        )
                        # FA-2 line 9: m, l, and P in units of the new m
                        p.online_softmax_of_lanes(rS, scale, rm, rl, rf)
                        p.wait_output(rO, False)
                        p.empty(bars, uint32(EMPTY_V + stage))
                        # FA-2 line 10: O = diag(e^(m_old - m_new)) O, before Pij Vj
                        p.scale_rows(rO, rf)
                        p.round_p(rP, rS)
                        stage, parity = after, after_parity
                        j0 = uint32(j0 + Bc)
                    wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                    after, after_parity = p.next_stage(stage, parity)
                    if not AHEAD:
                        break
                    q_after, q_after_parity = p.next_q_stage(q_stage, q_parity)
                    wait_mbarrier(bars, uint32(FULL_Q + q_after), q_after_parity)
                    more = sN[TOLD * q_after] < tiles
                    if more:
                        i_after, h_after, b_after, split_after = p.told(sN, q_after)
                        _, _, begin, end = seen(
                            i_after, b_after, h_after, split_after, Q, K, options
                        )
                        more = begin < end
                    if not more:
                        break
                    # FA-2 line 10 of the last tile: O = O + Pij Vj, on its way with the first S
                    # of the next row tile
                    wait_mbarrier(bars, uint32(FULL_K + after), after_parity)
                    p.take_turn(w)
                    p.begin_output(rO, rP, sV, uint32(stage * NK))
                    p.begin_scores(rS, sQ, uint32(q_after * NQ + WQ * w), sK, uint32(after * NK))
                    p.end_turn(w)
                    p.sum_lanes(rl)  # line 9: l of whole rows, whose columns lie with four lanes
                    p.wait_output(rO, True)
                    p.empty(bars, uint32(EMPTY_V + stage))
                    finish(
                        rO, rl, rm, sQ, q_stage, bars, Q, O, L, w, i0, Nq, b, h, split, options,
                        ty, tx,
                    )  # fmt: skip
                    stage, parity = after, after_parity
                    q_stage, q_parity = q_after, q_after_parity
                    i0, h, b, split = p.told(sN, q_stage)
                    Nq, Nk, j0, j_end = seen(i0, b, h, split, Q, K, options)
                    p.start(rO, rl, rm)
                p.begin_output(rO, rP, sV, uint32(stage * NK))
                p.sum_lanes(rl)
                p.wait_output(rO, False)
                p.empty(bars, uint32(EMPTY_V + stage))
                stage, parity = after, after_parity
            finish(rO, rl, rm, sQ, q_stage, bars, Q, O, L, w, i0, Nq, b, h, split, options, ty, tx)
            q_stage, q_parity = p.next_q_stage(q_stage, q_parity)
            wait_mbarrier(bars, uint32(FULL_Q + q_stage), q_parity)

    def fa2_forward(Q, K, V, O, L, taken, scale, group, options):
        sQ, sK, sV = half_tile(0, NQS), half_tile(NQS, NKS), half_tile(V0, NKS)
        bars = mbarrier_tile(BARRIER_0, BARRIERS)
        sN = index_tile(TILE_0, NN)
        tiles = p.row_tiles(Q.shape, options)
        p.begin_barriers(bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                produce_rows(sQ, sN, bars, Q, K, taken, tiles, options)
            elif p.produces_columns():
                produce_columns(sK, sV, sN, bars, Q, K, V, tiles, group, options)
        else:
            take_registers(MANY)
            consume(sQ, sK, sV, sN, bars, Q, K, O, L, tiles, scale, options)

    keys, ends = tiled_type(4, spec.key_ends), (spec.query_ends, spec.features.packed)
    Q, O = (tiled_type(4, end) for end in ends)
    arrays = (Q, keys, keys, O, array_type(3), array_type(1, types.int32))
    scalars = (types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, 16-bit elements, d rounded up to 64:  (stages of Q) Br d + 2 stages Bc d, and the
    barriers; in bytes at the default tiles, beside these:  114688 (d=64, 192 x 128), 196608
    (d=128, 128 x 128), 229376 (d=256, 128 x 80, one stage of Q)
Accesses, elements per head:  loads Nq d + 2 Tr Nk d, stores Nq d + Nq; with a causal mask only the
    K/V tiles that row tile i sees. Where the query heads of a K/V head share row tiles, rows of Q
    being few, 2 Tr Nk d for all of them, Tr of all their rows. With S splits Q is loaded S times,
    and in place of O and L leave S (Nq d + 2 Nq), for merge_splits.
"""
