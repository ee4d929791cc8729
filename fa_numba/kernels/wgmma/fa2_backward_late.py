"""FlashAttention-2, backward, on Hopper's tensor cores: a consumer of ``fa2_backward`` with a late
dQ (arXiv 2307.08691, Algorithm 2).

dQi needs dSij of both consumers. Each stores its part, begins dKj and the next Sij, and only then
waits for the other's: dQi is on its way during the next exponentials. For calls without options,
but for a causal mask or a block mask. At head dimensions of one box it goes to global memory from
registers, in fragments (``kernels.mma.rows``), without shared memory, and dPij's product is ahead
of dVj's, so that dSij, of Pij in 16 bits, is made while dVj is. Beyond, its warps add it by the
copy engine, each for itself, while dVj is made.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Slot, Tile


@cache
def make_late_consumer(spec):
    """``consume`` of ``fa2_backward.make_backward``."""
    grid, key_tiles, gradients = bind(spec, wgmma.grid, wgmma.key_tiles, wgmma.gradients)
    pingpong, visits = bind(spec, wgmma.pingpong, wgmma.visits)
    (transposed,) = bind(spec.transposed, wgmma.products)  # ST = K QT, dPT = V dOT
    (scores,) = bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, *_ = wgmma.pipelines(spec)
    (ds_pipeline,) = bind(spec.ds_pipeline, wgmma.pipeline)
    RS, RP, RQ, RK, _ = spec.tile_registers
    Br, AHEAD, SPARSE = spec.Br, spec.adds_fragments, spec.features.sparse
    NONE = SPARSE or spec.chunk_tiles > 1  # a column tile may be seen by no row, or be beyond Kj

    @device_function
    def consume(shared, Q, K, results, scale, scale_log2, group, options):
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rP, rdS = cuda.local.array(RP, uint32), cuda.local.array(RP, uint32)
        rdQ, rdK = cuda.local.array(RQ, float32), cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        sK, sV, (sQ, sdO, sL), sdS, sdQ, _, words, bars = shared
        thread = grid.transposed_thread()
        j0, head, _, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        column0 = uint32(j0 + 64 * thread.w)
        own = uint32(64 * 64 * thread.w)  # this consumer's rows of Kj and Vj
        # Alg. 2 line 7: dKj = 0, dVj = 0, on chip
        gradients.start_columns(rdK, rdV)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        i_begin = visits.next_row(i_first, i_end, j0, head)
        stage, phase, i0, i_before, more = uint32(0), uint32(0), i_begin, i_begin, True
        if NONE:
            more = i0 < i_end
        kv_pipeline.wait(bars, Slot(stage, phase))
        if more:
            q_pipeline.wait(bars, Slot(stage, phase))
            transposed.multiply(rS, sK, own, sQ, gradients.offsets(stage).rows)
            transposed.wait_scores(rS, False)
            # Alg. 2 line 8: for each row tile i that sees column tile j
            while more:
                slot, at = Slot(stage, phase), gradients.offsets(stage)
                tile = Tile(i0, column0, head, thread)
                # Alg. 2 line 11: Pij = exp(Sij - Li)
                scores.scale_and_mask(rS, scale_log2, tile)
                gradients.p_of_columns(rS, rP, scale_log2, sL, at.values, tile)
                do_pipeline.wait(bars, slot)
                gradients.wait_late_dq(rdQ)
                # Alg. 2 line 12: dVj += PijT dOi
                if not AHEAD:
                    transposed.round_p(rP, rS)
                    transposed.add_product(rdV, rP, sdO, at.out)
                # Alg. 2 line 15 of the last i: dQi += scale dSij Kj, to global memory
                if SPARSE and i_before != i0:
                    gradients.add_late_dq(rdQ, sdQ, results.dQ, i_before, head, thread)
                if not SPARSE and i0 != i_begin:
                    gradients.add_late_dq(rdQ, sdQ, results.dQ, uint32(i0 - Br), head, thread)
                # Alg. 2 line 13: dPij = dOi VjT
                transposed.multiply(rdP, sV, own, sdO, at.out)
                if AHEAD:
                    transposed.round_p(rP, rS)
                    transposed.add_product(rdV, rP, sdO, at.out)
                # Alg. 2 line 14: dSij = Pij o (dPij - Di)
                transposed.wait_scores(rdP, AHEAD)
                gradients.ds_of_columns(rdS, rP, rdP, rS, sL, at.values, tile)
                gradients.store_ds(sdS, at.scores, rdS, thread)
                ds_pipeline.commit_warp(bars, slot)
                # Alg. 2 line 16: dKj += dSijT Qi
                transposed.add_product(rdK, rdS, sQ, at.rows)
                after = q_pipeline.next(slot)
                next_stage, next_phase = after
                i_next = visits.next_row(uint32(i0 + Br), i_end, j0, head)
                more = i_next < i_end
                if more:
                    q_pipeline.wait(bars, after)
                else:
                    next_stage = stage  # Sij once more, for nothing
                # Alg. 2 line 10 of the next i: Sij = scale Qi KjT
                transposed.multiply(rS, sK, own, sQ, gradients.offsets(next_stage).rows)
                gradients.wait_columns(rdK, rdV, True)
                if more:
                    q_pipeline.release(bars, slot)
                # Alg. 2 line 15: dSij Kj
                ds_pipeline.wait(bars, slot)
                gradients.begin_dq(rdQ, sdS, at.scores, sK, thread.w)
                transposed.wait_scores(rS, True)
                stage, phase, i_before, i0 = next_stage, next_phase, i0, i_next
            gradients.wait_late_dq(rdQ)
            if not SPARSE:
                i_before = uint32(i0 - Br)
            gradients.add_late_dq(rdQ, sdQ, results.dQ, i_before, head, thread)
        # Alg. 2 line 18: write dKj, dVj
        pingpong.sync_consumers()  # nobody reads Kj and Vj any more
        gradients.scale_columns(rdK, scale)
        gradients.write_columns(rdK, sK, results.dK, column0, head, thread)
        gradients.write_columns(rdV, sV, results.dV, column0, head, thread)
        gradients.end_dq()

    return consume
