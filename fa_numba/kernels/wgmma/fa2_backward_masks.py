"""FlashAttention-2, backward, on Hopper's tensor cores: the consumers of ``fa2_backward`` for calls
without options except a causal mask and a block mask (arXiv 2307.08691, Algorithm 2).

A consumer begins the products Sij and dPij together, so that the tensor cores compute dPij during
the exponentials. dQi needs dSij of both consumers. Each consumer stores its own dSij, and begins
dVj before it waits for the dSij of the other consumer. dQi moves from registers to shared memory
while dKj is computed. Each warp adds its part of dQi by one contiguous copy, because the sum of dQ
is stored in fragments (``kernels.mma.rows``).

No product of the next row tile begins before dKj ends. In a trial, the next Sij began directly
after dKj, and the kernel took 1.2 times as long (tests/data/h200_trials.csv).
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Slot, Tile


@cache
def make_masks_consumer(spec):
    """Return the device function ``consume``, which the consumers of ``fa2_backward`` run.

    Each column tile must belong to one query head and one thread block: query heads share no K/V
    head, and there are no group splits.
    """
    grid, key_tiles, gradients = bind(spec, wgmma.grid, wgmma.key_tiles, wgmma.gradients)
    pingpong, visits = bind(spec, wgmma.pingpong, wgmma.visits)
    (transposed,) = bind(spec.transposed, wgmma.products)  # ST = K QT, dPT = V dOT
    (scores,) = bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, *_ = wgmma.pipelines(spec)
    (ds_pipeline,) = bind(spec.ds_pipeline, wgmma.pipeline)
    RS, RP, RQ, RK, _ = spec.tile_registers
    Br = spec.Br

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
        stage, phase = uint32(0), uint32(0)
        i0 = visits.next_row(i_first, i_end, j0, head)
        kv_pipeline.wait(bars, Slot(stage, phase))
        more = i0 < i_end
        # Alg. 2 line 8: for each row tile i that sees column tile j
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            tile = Tile(i0, column0, head, thread)
            # Alg. 2 line 10: Sij = scale Qi KjT
            q_pipeline.wait(bars, slot)
            transposed.multiply(rS, sK, own, sQ, at.rows)
            # Alg. 2 line 13: dPij = dOi VjT, on its way with Sij
            do_pipeline.wait(bars, slot)
            transposed.multiply(rdP, sV, own, sdO, at.out)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            transposed.wait_scores(rS, True)
            scores.scale_and_mask(rS, scale_log2, tile)
            gradients.p_of_columns(rS, rP, scale_log2, sL, at.values, tile)
            transposed.round_p(rP, rS)
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            transposed.wait_scores(rdP, False)
            gradients.ds_of_columns(rdS, rP, rdP, rS, sL, at.values, tile)
            gradients.store_ds(sdS, at.scores, rdS, thread)
            ds_pipeline.commit_warp(bars, slot)
            # Alg. 2 line 12: dVj += PijT dOi
            transposed.add_product(rdV, rP, sdO, at.out)
            # Alg. 2 line 15: dSij Kj
            ds_pipeline.wait(bars, slot)
            gradients.begin_dq(rdQ, sdS, at.scores, sK, thread.w)
            # Alg. 2 line 16: dKj += dSijT Qi
            transposed.add_product(rdK, rdS, sQ, at.rows)
            # Alg. 2 line 15: dQi += scale dSij Kj, to global memory
            gradients.wait_dq(rdQ)
            gradients.copy_dq(rdQ, sdQ, results.dQ, i0, head, thread)
            stage, phase = q_pipeline.next(slot)
            i0 = visits.next_row(uint32(i0 + Br), i_end, j0, head)
            more = i0 < i_end
            gradients.wait_columns(rdK, rdV, False)
            q_pipeline.release(bars, slot)
        # Alg. 2 line 18: write dKj, dVj
        pingpong.sync_consumers()  # nobody reads Kj and Vj any more
        gradients.scale_columns(rdK, scale)
        gradients.write_columns(rdK, sK, results.dK, column0, head, thread)
        gradients.write_columns(rdV, sV, results.dV, column0, head, thread)
        gradients.end_copies()

    return consume
