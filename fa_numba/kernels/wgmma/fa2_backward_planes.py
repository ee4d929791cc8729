"""FlashAttention-2, backward, on Hopper's tensor cores: the consumers of ``fa2_backward`` for
float32 matrices in two planes of 16 bits (arXiv 2307.08691, Algorithm 2).

A product of float32 matrices consists of three products of planes. The products for dV, dK and dQ
of one tile are summed separately, and then added to the sums over all tiles. The consumers add dQ
from registers to global memory.

Up to d = 64, a consumer computes 64 rows and 64 columns of S, and the part of dQ that these columns
contribute. Each consumer multiplies its dS by a power of two, which depends on its own dS. While
one consumer splits P or dS into planes, the tensor cores compute products of the other consumer.
Above d = 64, dK and dV and the separate sums do not fit into the registers of one consumer. One
consumer therefore computes S, P and dV, and the other computes dP, dS and dK. Shared memory and
accesses are at the end.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import GroupThread, Slot, Tile


@cache
def make_planes_consumer(spec):
    """Return the device function ``consume`` of a consumer warpgroup, for planes and d up to 64."""
    grid, key_tiles, gradients = bind(spec, wgmma.grid, wgmma.key_tiles, wgmma.gradients)
    pingpong, visits, planes = bind(spec, wgmma.pingpong, wgmma.visits, wgmma.plane_gradients)
    (products,) = bind(spec, wgmma.products)
    (transposed,) = bind(spec.transposed, wgmma.products)
    (of_values,) = bind(spec.of_values, wgmma.plane_gradients)  # dPT = V dOT, dV = PT dO
    (scores,) = bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, *_ = wgmma.pipelines(spec)
    RS, RP, RQ, RK, RV = spec.tile_registers
    RP, RT = spec.planes * RP, max(RK, RV)

    @device_function
    def consume(shared, Q, K, results, scale, scale_log2, group, options):
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rP, rdS = cuda.local.array(RP, uint32), cuda.local.array(RP, uint32)
        rdQ, rdK = cuda.local.array(RQ, float32), cuda.local.array(RK, float32)
        rdV, rT = cuda.local.array(RV, float32), cuda.local.array(RT, float32)
        sK, sV, (sQ, sdO, sL), sdS, _, _, words, bars = shared
        thread = grid.transposed_thread()
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        column0 = uint32(j0 + 64 * thread.w)
        own = uint32(64 * 64 * thread.w)  # this consumer's rows of Kj and Vj
        # Alg. 2 line 7: dKj = 0, dVj = 0, on chip
        gradients.start_columns(rdK, rdV)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(0), h_first, i_start
        more = i0 < i_end
        kv_pipeline.wait(bars, Slot(uint32(0), uint32(0)))
        if more:
            q_pipeline.wait(bars, Slot(stage, phase))
            planes.begin_st(rS, sK, own, sQ, gradients.offsets(stage).rows)
            transposed.wait_scores(rS, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            member = key_tiles.read_head(head, h, Q, K)
            tile = Tile(i0, column0, member, thread)
            factor = products.score_factor(scale_log2, member)
            # Alg. 2 line 13: dPij = dOi VjT
            do_pipeline.wait(bars, slot)
            of_values.begin_st(rdP, sV, own, sdO, at.out)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            scores.scale_and_mask(rS, factor, tile)
            gradients.probabilities(rS, factor, sL, at.values, thread)
            # Alg. 2 line 12: PijT dOi
            planes.split_pt(rP, rS)
            of_values.begin_product(rT, rP, sdO, at.out)
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            transposed.wait_scores(rdP, True)
            planes.ds_of_planes(rdP, rS, sL, at.values, tile)
            power = planes.power_of_ds(rdP, thread.w)
            of_q, of_k = planes.units_of_ds(power, member)
            planes.split_ds(rdS, rdP, power)
            planes.store_planes(sdS, rdS, thread)
            # Alg. 2 line 12: dVj += PijT dOi
            of_values.wait_dv(rT)
            of_values.add_columns(rdV, rT, planes.unit_of_dv(member))
            # Alg. 2 line 16: dSijT Qi
            planes.begin_product(rT, rdS, sQ, at.rows)
            pingpong.sync_group(thread.w)  # dSij is there
            # Alg. 2 line 15: dSij Kj
            planes.begin_own_dq(rdQ, sdS, own, sK, own)
            h_next, i_next = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            after = q_pipeline.next(slot)
            next_stage, next_phase = after
            more = key_tiles.takes_more(words, h_next, h_end, i_next)
            if more:
                q_pipeline.wait(bars, after)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next i: Sij = scale Qi KjT
            planes.begin_st(rS, sK, own, sQ, gradients.offsets(next_stage).rows)
            # Alg. 2 line 16: dKj += dSijT Qi
            planes.wait_dk(rT)
            planes.add_columns(rdK, rT, of_q)
            if more:
                q_pipeline.release(bars, slot)
            # Alg. 2 line 15: dQi += scale dSij Kj, through global memory
            planes.wait_own_dq(rdQ)
            planes.add_own_dq(rdQ, results.dQ, i0, uint32(0), of_k, member)
            transposed.wait_scores(rS, False)
            stage, phase, h, i0 = next_stage, next_phase, h_next, i_next

        # Alg. 2 line 18: write dKj, dVj
        gradients.scale_columns(rdK, scale)
        head = key_tiles.read_head(head, head.h, Q, K)
        planes.write_own_columns(rdK, results.dK, column0, head, thread)
        of_values.write_own_columns(rdV, results.dV, column0, head, thread)

    return consume


@cache
def make_planes_consumers_by_product(spec):
    """Return the device function ``consume`` of a consumer warpgroup, for planes and d above 64.

    One warpgroup computes S, P and dV, and the other computes dP, dS and dK.
    """
    grid, key_tiles, gradients = bind(spec, wgmma.grid, wgmma.key_tiles, wgmma.gradients)
    pingpong, visits, planes = bind(spec, wgmma.pingpong, wgmma.visits, wgmma.plane_gradients)
    products, wide = bind(spec, wgmma.products, wgmma.wide_gradients)
    (transposed,) = bind(spec.transposed, wgmma.products)
    (scores,) = bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, *_ = wgmma.pipelines(spec)
    RS, RP, RQ, RK, _ = spec.tile_registers
    RP = spec.planes * RP

    @device_function
    def consume_values(shared, Q, K, results, scale_log2, group, options):
        rS, rP = cuda.local.array(RS, float32), cuda.local.array(RP, uint32)
        rdV, rT = cuda.local.array(RK, float32), cuda.local.array(RK, float32)
        rdQ = cuda.local.array(RQ, float32)
        sK, _, (sQ, sdO, sL), sdS, sP, _, words, bars = shared
        thread = grid.transposed_thread()
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        # Alg. 2 line 7: dVj = 0, on chip
        wide.start_column(rdV)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(0), h_first, i_start
        more = i0 < i_end
        kv_pipeline.wait(bars, Slot(uint32(0), uint32(0)))
        if more:
            q_pipeline.wait(bars, Slot(stage, phase))
            planes.begin_st(rS, sK, uint32(0), sQ, gradients.offsets(stage).rows)
            transposed.wait_scores(rS, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            member = key_tiles.read_head(head, h, Q, K)
            tile = Tile(i0, j0, member, thread)
            factor = products.score_factor(scale_log2, member)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            scores.scale_and_mask(rS, factor, tile)
            gradients.probabilities(rS, factor, sL, at.values, thread)
            wide.store_scores(sP, uint32(0), rS)
            pingpong.give_other()  # Pij is there
            # Alg. 2 line 12: PijT dOi
            planes.split_pt(rP, rS)
            do_pipeline.wait(bars, slot)
            planes.begin_product(rT, rP, sdO, at.out)
            h_next, i_next = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            after = q_pipeline.next(slot)
            next_stage, next_phase = after
            more = key_tiles.takes_more(words, h_next, h_end, i_next)
            if more:
                q_pipeline.wait(bars, after)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next i: Sij = scale Qi KjT
            planes.begin_st(rS, sK, uint32(0), sQ, gradients.offsets(next_stage).rows)
            # Alg. 2 line 12: dVj += PijT dOi
            planes.wait_tile(rT)
            planes.add_columns(rdV, rT, planes.unit_of_dv(member))
            cuda.syncwarp()  # all lanes have read Li
            if more:
                q_pipeline.release(bars, slot)
            # Alg. 2 line 15: dQi += scale dSij Kj, this panel, through global memory
            pingpong.sync_consumers()  # dSij is there
            _, of_k = planes.units_of_ds(planes.read_power(), member)
            planes.begin_own_dq(rdQ, sdS, uint32(0), sK, uint32(0))
            planes.wait_last_dq(rdQ)
            planes.add_own_dq(rdQ, results.dQ, i0, uint32(0), of_k, member)
            transposed.wait_scores(rS, False)
            stage, phase, h, i0 = next_stage, next_phase, h_next, i_next

        # Alg. 2 line 18: write dVj
        head = key_tiles.read_head(head, head.h, Q, K)
        planes.write_own_columns(rdV, results.dV, j0, head, thread)

    @device_function
    def consume_keys(shared, Q, K, results, scale, group, options):
        rP, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rdS, rT = cuda.local.array(RP, uint32), cuda.local.array(RK, float32)
        rdK, rdQ = cuda.local.array(RK, float32), cuda.local.array(RQ, float32)
        sK, sV, (sQ, sdO, sL), sdS, sP, _, words, bars = shared
        thread, second = grid.transposed_thread(), planes.second_panel()
        own = GroupThread(thread.ty, thread.tx, uint32(0))
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        # Alg. 2 line 7: dKj = 0, on chip
        wide.start_column(rdK)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(0), h_first, i_start
        more = i0 < i_end
        kv_pipeline.wait(bars, Slot(uint32(0), uint32(0)))
        if more:
            do_pipeline.wait(bars, Slot(stage, phase))
            planes.begin_st(rdP, sV, uint32(0), sdO, gradients.offsets(stage).out)
            transposed.wait_scores(rdP, False)
        # Alg. 2 line 8: for each row tile i that sees column tile j, of each query head
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            member = key_tiles.read_head(head, h, Q, K)
            tile = Tile(i0, j0, member, thread)
            q_pipeline.wait(bars, slot)
            pingpong.take_other()  # Pij is there
            wide.take_scores(rP, sP, uint32(0))
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            planes.ds_of_planes(rdP, rP, sL, at.values, tile)
            power = planes.power_of_ds(rdP, thread.w)
            of_q, of_k = planes.units_of_ds(power, member)
            planes.split_ds(rdS, rdP, power)
            planes.store_planes(sdS, rdS, own)
            planes.give_power(power)
            # Alg. 2 line 16: dSijT Qi
            planes.begin_product(rT, rdS, sQ, at.rows)
            pingpong.sync_consumers()  # dSij is there
            # Alg. 2 line 15: dSij Kj, this panel
            planes.begin_own_dq(rdQ, sdS, uint32(0), sK, second)
            # Alg. 2 line 16: dKj += dSijT Qi
            planes.wait_tile(rT)
            planes.add_columns(rdK, rT, of_q)
            h_next, i_next = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            after = q_pipeline.next(slot)
            next_stage, next_phase = after
            more = key_tiles.takes_more(words, h_next, h_end, i_next)
            if more:
                do_pipeline.wait(bars, after)
            else:
                next_stage = stage  # dPij once more, for nothing
            # Alg. 2 line 13 of the next i: dPij = dOi VjT
            planes.begin_st(rdP, sV, uint32(0), sdO, gradients.offsets(next_stage).out)
            if more:
                q_pipeline.release(bars, slot)
            # Alg. 2 line 15: dQi += scale dSij Kj, through global memory
            planes.wait_own_dq(rdQ)
            planes.add_own_dq(rdQ, results.dQ, i0, uint32(64), of_k, member)
            transposed.wait_scores(rdP, False)
            stage, phase, h, i0 = next_stage, next_phase, h_next, i_next

        # Alg. 2 line 18: write dKj
        gradients.scale_columns(rdK, scale)
        head = key_tiles.read_head(head, head.h, Q, K)
        planes.write_own_columns(rdK, results.dK, j0, head, thread)

    @device_function
    def consume(shared, Q, K, results, scale, scale_log2, group, options):
        if cuda.threadIdx.x < 256:
            consume_values(shared, Q, K, results, scale_log2, group, options)
        else:
            consume_keys(shared, Q, K, results, scale, group, options)

    return consume


__doc__ = f"""{__doc__ or ""}
Shared memory is that of 16-bit matrices whose rows have two planes, with two differences. dS
takes two planes in the place of two slots. P in float32 takes the space of dQ. Up to d = 64,
neither P nor dQ needs space. In bytes, 32 more with lengths:

    164960 (d=64, 64 x 128), 230496 (d=128, 64 x 64)

Accesses: those of the kernel on unit "mma". TMA loads Q and dO. Up to d = 64 each consumer adds to
A, 2 Tc Nq d in all.
"""
