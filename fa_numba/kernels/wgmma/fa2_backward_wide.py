"""FlashAttention-2, backward: K/V outer, Q inner (arXiv 2307.08691, Algorithm 2), on Hopper's
tensor cores, for head dimensions above 128. A separate kernel computes dQ (``fa2_backward``).

For a tile with 64 columns, dK alone fills the registers of a warpgroup, and dV alone fills them
too. Both consumer warpgroups therefore compute with the same 64 columns, and all rows of a tile:
one computes S, P and dV, and the other computes dP, dS and dK. The first warpgroup stores S in
shared memory in float32, and the second warpgroup reads it. Thread t of the second warpgroup reads
exactly the elements that thread t of the first warpgroup has stored. The producers are the
producers of ``fa2_backward``.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Head, Slot, Tile


@cache
def make_consumers_by_product(spec):
    """Return the device function ``consume``, which the consumers of ``fa2_backward`` run.

    One warpgroup computes S, P and dV, and the other computes dP, dS and dK.
    """
    grid, key_tiles, gradients = bind(spec, wgmma.grid, wgmma.key_tiles, wgmma.gradients)
    pingpong, wide = bind(spec, wgmma.pingpong, wgmma.wide_gradients)
    drawing, visits = bind(spec, wgmma.drawing, wgmma.visits)
    (transposed,) = bind(spec.transposed, wgmma.products)  # ST = K QT
    (of_values,) = bind(spec.of_values.transposed, wgmma.products)  # dPT = V dOT
    (wide_dv,) = bind(spec.of_values, wgmma.wide_gradients)
    (scores,), (hidden,) = bind(spec.part, wgmma.scores), bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, s_pipeline = wgmma.pipelines(spec)
    RS, RP, _, RK, RV = spec.tile_registers
    DROPS, STAYS = spec.features.dropout, spec.features.scores_stay

    @device_function
    def consume_values(shared, Q, K, dV, scale_log2, group, options):
        rS, rP = cuda.local.array(RS, float32), cuda.local.array(RP, uint32)
        rdV = cuda.local.array(RV, float32)
        sK, _, (sQ, sdO, sL), _, sB, words, bars = shared
        thread = grid.transposed_thread()
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        # Alg. 2 line 7: dVj = 0, on chip
        wide_dv.start_column(rdV)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(0), h_first, i_start
        more = i0 < i_end and h < h_end
        kv_pipeline.wait(bars, Slot(uint32(0), uint32(0)))
        if more:
            q_pipeline.wait(bars, Slot(stage, phase))
            transposed.multiply(rS, sK, uint32(0), sQ, gradients.offsets(stage).rows)
            transposed.wait_scores(rS, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            member = Head(head.b, h, head.hk, head.Nq, head.Nk, options)
            tile = Tile(i0, j0, member, thread)
            if STAYS:  # unmodified
                wide.give_scores(shared, at.scores, stage, rS)
            scores.scale_and_mask(rS, scale_log2, tile)
            if not STAYS:
                wide.give_scores(shared, at.scores, stage, rS)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            gradients.probabilities(rS, scale_log2, sL, at.values, thread)
            if DROPS:
                drawing.drop_drawn(rS, sB, stage)
            transposed.round_p(rP, rS)
            # Alg. 2 line 12: dVj += PijT dOi
            do_pipeline.wait(bars, slot)
            of_values.add_product(rdV, rP, sdO, at.out)
            h_next, i_next = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            after = q_pipeline.next(slot)
            next_stage, next_phase = after
            more = h_next < h_end
            if more:
                q_pipeline.wait(bars, after)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next i: Sij = scale Qi KjT
            transposed.multiply(rS, sK, uint32(0), sQ, gradients.offsets(next_stage).rows)
            wide_dv.wait_column(rdV)
            cuda.syncwarp()  # all lanes have read Li
            q_pipeline.release(bars, slot)
            transposed.wait_scores(rS, False)
            stage, phase, h, i0 = next_stage, next_phase, h_next, i_next

        # Alg. 2 line 18: write dVj, by way of Kj
        pingpong.sync_group(thread.w)  # no warp reads Kj any more
        if DROPS:
            gradients.scale_dv(rdV, options.inverse_keep)
        gradients.write_dv(rdV, sK, dV, j0, head, thread)

    @device_function
    def consume_keys(shared, Q, K, dK, scale, scale_log2, group, options):
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rdS, rdK = cuda.local.array(RP, uint32), cuda.local.array(RK, float32)
        _, sV, (sQ, sdO, sL), sS, sB, words, bars = shared
        thread = grid.transposed_thread()
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        # Alg. 2 line 7: dKj = 0, on chip
        wide.start_column(rdK)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(0), h_first, i_start
        more = i0 < i_end and h < h_end
        kv_pipeline.wait(bars, Slot(uint32(0), uint32(0)))
        if more:
            do_pipeline.wait(bars, Slot(stage, phase))
            of_values.multiply(rdP, sV, uint32(0), sdO, gradients.offsets(stage).out)
            transposed.wait_scores(rdP, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            s_pipeline.wait(bars, slot)
            wide.take_scores(rS, sS, at.scores)
            member = Head(head.b, h, head.hk, head.Nq, head.Nk, options)
            tile = Tile(i0, j0, member, thread)
            if STAYS:
                hidden.scale_and_mask(rS, scale_log2, tile)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            q_pipeline.wait(bars, slot)
            gradients.p_of_columns(rS, rdS, scale_log2, sL, at.values, tile)
            if DROPS:
                drawing.drop_drawn(rS, sB, stage)
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            gradients.ds_of_columns(rdS, rdS, rdP, rS, sL, at.values, tile)
            # Alg. 2 line 16: dKj += dSijT Qi
            transposed.add_product(rdK, rdS, sQ, at.rows)
            h_next, i_next = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            after = q_pipeline.next(slot)
            next_stage, next_phase = after
            more = h_next < h_end
            if more:
                do_pipeline.wait(bars, after)
            else:
                next_stage = stage  # dPij once more, for nothing
            # Alg. 2 line 13 of the next i: dPij = dOi VjT
            of_values.multiply(rdP, sV, uint32(0), sdO, gradients.offsets(next_stage).out)
            wide.wait_column(rdK)
            cuda.syncwarp()  # all lanes have read Li, Di and Sij
            q_pipeline.release(bars, slot)
            transposed.wait_scores(rdP, False)
            stage, phase, h, i0 = next_stage, next_phase, h_next, i_next

        # Alg. 2 line 18: write dKj, by way of Vj
        pingpong.sync_group(thread.w)  # no warp reads Vj any more
        gradients.scale_columns(rdK, scale)
        gradients.write_columns(rdK, sV, dK, j0, head, thread)

    @device_function
    def consume(shared, Q, K, results, scale, scale_log2, group, options):
        if cuda.threadIdx.x < 256:
            consume_values(shared, Q, K, results.dV, scale_log2, group, options)
        else:
            consume_keys(shared, Q, K, results.dK, scale, scale_log2, group, options)

    return consume


__doc__ = f"""{__doc__ or ""}
Shared memory, 16-bit elements:  2 Bc d + 4 Br d + 4 Br Bc + 8 Br
    d is rounded up to 64, and the barriers come in addition. In bytes:
    181320 (d=192, 64 x 64), 230472 (d=256, 64 x 64); with dropout Br Bc / 4 more

Accesses: those of the kernel on unit "mma" without its adds to A. TMA loads Q and dO.
"""
