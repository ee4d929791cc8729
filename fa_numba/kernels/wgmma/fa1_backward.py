"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on Hopper's
tensor cores.

One thread block computes one (batch entry, K/V head): both loops run inside it. Its producers load
Kj and Vj in each step of the outer loop. In the inner loop, they load row tiles and the L of their
rows, alternately into two slots. In every step of the outer loop, two producer warps compute D of
each row tile again, from dO and O.

A consumer warpgroup computes 64 columns of S and all rows of the tile. It keeps its dK and dV in
registers, and computes P again from L. Only dS passes through shared memory, for dQ. Each step of
the outer loop loads and stores dQ in global memory, in the float32 array ``A`` until the last step
of a row tile rounds it. The end of this file explains query splits, shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.device.signature import arguments, array_type, half_type, tiled_type
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Gradients, Slot, Tile


@cache
def make_backward(spec):
    """Return the kernel for ``spec``. The grid is (query splits, K/V heads, batch entries)."""
    grid, gradients = bind(spec, wgmma.grid, wgmma.gradients)
    pipeline, pingpong = bind(spec, wgmma.pipeline, wgmma.pingpong)
    visits, fa1_gradients = bind(spec, wgmma.visits, wgmma.fa1_gradients)
    (transposed,) = bind(spec.transposed, wgmma.products)  # ST = K QT
    (of_values,) = bind(spec.of_values.transposed, wgmma.products)  # dPT = V dOT
    (scores,) = bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, o_pipeline, d_pipeline = wgmma.pipelines(spec)
    RS, RP, RQ, RK, RV = spec.tile_registers
    EARLY, (FEW, MANY) = spec.rounds_early, spec.registers
    Bc, DLSE = spec.Bc, spec.features.dlse

    @device_function
    def produce(shared, Q, K, V, O, dO, rows):
        head, heads, i_begin, i_stop = rows
        h_end = uint32(head.h + heads)
        stage, phase = uint32(0), uint32(1)
        # Alg. 4 line 6: for each column tile j
        j0 = uint32(0)
        while j0 < head.Nk:
            i_first, i_end = visits.rows_of_pass(j0, i_begin, i_stop, head)
            # Alg. 4 line 7: load Kj, Vj
            kv_pipeline.acquire(shared.bars, Slot(uint32(0), uint32(j0 // Bc % 2 ^ 1)))
            fa1_gradients.fa1_load_columns(shared, K, V, j0, head)
            h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
            h, i0 = h_first, i_start
            while fa1_gradients.is_visit(h, h_end, i0, i_end):
                # Alg. 4 line 10: load Qi, dOi, Oi
                slot = Slot(stage, phase)
                word = fa1_gradients.pass_word(h, i0, head, j0, h_end, i_first, i_end)
                q_pipeline.acquire(shared.bars, slot)
                fa1_gradients.write_pass_word(shared, slot, word)
                fa1_gradients.load_rows(shared, Q, dO, O, i0, grid.member(head, h), slot)
                stage, phase = q_pipeline.next(slot)
                h, i0 = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            j0 = uint32(j0 + Bc)

    @device_function
    def produce_values(shared, L, rows):
        head, heads, i_begin, i_stop = rows
        h_end = uint32(head.h + heads)
        stage, phase, j0 = uint32(0), uint32(1), uint32(0)
        while j0 < head.Nk:
            i_first, i_end = visits.rows_of_pass(j0, i_begin, i_stop, head)
            h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
            h, i0 = h_first, i_start
            while fa1_gradients.is_visit(h, h_end, i0, i_end):
                # Alg. 4 line 10: load Li
                slot = Slot(stage, phase)
                q_pipeline.acquire(shared.bars, slot)
                fa1_gradients.load_lse(shared, L, i0, grid.member(head, h), slot)
                stage, phase = q_pipeline.next(slot)
                h, i0 = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            j0 = uint32(j0 + Bc)

    @device_function
    def produce_dots(shared, columns, rows):
        head, heads, i_begin, i_stop = rows
        h_end, n, j0 = uint32(head.h + heads), uint32(0), uint32(0)
        while j0 < head.Nk:
            i_first, i_end = visits.rows_of_pass(j0, i_begin, i_stop, head)
            h, i0 = visits.first_visit(head, j0, h_end, i_first, i_end)
            n_end = uint32(n + fa1_gradients.visits_of_pass(heads, i_first, i_end))
            while fa1_gradients.is_nth_visit(n, n_end, h, h_end, i0, i_end):
                # Alg. 4 line 19: Di = rowsum(dOi o Oi), in every pass
                slot = Slot(uint32(n % 2), uint32(n // 2 % 2))
                do_pipeline.wait(shared.bars, slot)
                o_pipeline.wait(shared.bars, slot)
                if DLSE:  # and dLi with Li
                    q_pipeline.wait(shared.bars, slot)
                fa1_gradients.row_dots(shared, slot.stage, columns)
                n = uint32(n + 1)
                h, i0 = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            j0 = uint32(j0 + Bc)

    @device_function
    def consume(shared, A, results, scale, scale_log2, rows):
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rP, rdS = cuda.local.array(RP, uint32), cuda.local.array(RP, uint32)
        rdQ, rdK = cuda.local.array(RQ, float32), cuda.local.array(RK, float32)
        rdV, rBS = cuda.local.array(RV, float32), cuda.local.array(1, float32)
        sK, sV, (sQ, sdO, sL), sdS, _, _, bars = shared
        thread = grid.transposed_thread()
        head, heads, i_begin, i_stop = rows
        h_end, a_and_dq = uint32(head.h + heads), (A, results.dQ)
        own = uint32(64 * 64 * thread.w)  # this consumer's rows of Kj and Vj
        # Alg. 4 line 5: dQ = 0
        fa1_gradients.initialise_dq(rdQ, a_and_dq, scale, head, h_end, i_begin, i_stop, thread)
        stage, phase = uint32(0), uint32(0)
        # Alg. 4 line 6: for each column tile j
        j0 = uint32(0)
        while j0 < head.Nk:
            i_first, i_end = visits.rows_of_pass(j0, i_begin, i_stop, head)
            column0 = uint32(j0 + 64 * thread.w)
            # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
            gradients.start_columns(rdK, rdV)
            h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
            h, i0 = h_first, i_start
            more = fa1_gradients.is_visit(h, h_end, i0, i_end)
            kv_pipeline.wait(bars, Slot(uint32(0), uint32(j0 // Bc % 2)))
            if more:
                q_pipeline.wait(bars, Slot(stage, phase))
                transposed.multiply(rS, sK, own, sQ, gradients.offsets(stage).rows)
                transposed.wait_scores(rS, False)
            # FA-1 line 9, FA-2 line 8: for each i that sees column tile j, of each query head
            while more:
                slot, at = Slot(stage, phase), gradients.offsets(stage)
                member = grid.member(head, h)
                tile = Tile(i0, column0, member, thread)
                fa1_gradients.read_pass_word(rBS, shared, slot)
                # FA-1 line 17, FA-2 line 13: dPij = dOi VjT, on its way with Sij = scale Qi KjT
                do_pipeline.wait(bars, slot)
                of_values.multiply(rdP, sV, own, sdO, at.out)
                # FA-1 line 12: mask
                scores.scale_bias_and_mask(rS, rBS, scale_log2, tile)
                # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
                gradients.p_of_columns(rS, rP, scale_log2, sL, at.values, tile)
                # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                if EARLY:
                    gradients.round_early(rP, rS)
                    of_values.add_product(rdV, rP, sdO, at.out)
                # FA-1 line 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                transposed.wait_scores(rdP, EARLY)
                d_pipeline.wait(bars, slot)
                gradients.ds_of_columns(rdS, rP, rdP, rS, sL, at.values, tile)
                if not EARLY:
                    of_values.add_product(rdV, rP, sdO, at.out)
                # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                transposed.add_product(rdK, rdS, sQ, at.rows)
                gradients.store_ds(sdS, at.scores, rdS, thread)
                pingpong.sync_consumers()  # dSij is there
                # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                visit = fa1_gradients.read_pass_word(rBS, shared, slot)
                fa1_gradients.read_dq(rdQ, A, visit, j0, i0, i_stop, member, thread)
                gradients.begin_dq(rdQ, sdS, at.scores, sK, thread.w)
                gradients.wait_columns(rdK, rdV, True)
                follow = fa1_gradients.next_by_word(visit, shared, slot, h, i0, i_first, i_end)
                h_next, i_next = follow
                after = q_pipeline.next(slot)
                next_stage, next_phase = after
                more = fa1_gradients.is_visit(h_next, h_end, i_next, i_end)
                if more:
                    q_pipeline.release(bars, slot)
                    q_pipeline.wait(bars, after)
                else:
                    next_stage, next_phase = stage, phase  # Sij once more, for nothing
                # FA-1 line 11, FA-2 line 10 of the next i: Sij = scale Qi KjT
                transposed.multiply(rS, sK, own, sQ, gradients.offsets(next_stage).rows)
                gradients.wait_dq(rdQ)
                sees_more = visits.row_sees_more(visit, i0, j0, member)
                fa1_gradients.write_dq(rdQ, a_and_dq, scale, sees_more, i0, i_stop, member, thread)
                transposed.wait_scores(rS, False)
                stage, phase, h, i0 = next_stage, next_phase, h_next, i_next
            if fa1_gradients.has_visits(head, j0, h_end, i_first, i_end):
                q_pipeline.release(bars, Slot(stage, phase))
                stage, phase = q_pipeline.next(Slot(stage, phase))

            # FA-1 line 24, FA-2 line 18: write dKj, dVj
            pingpong.sync_consumers()  # nobody reads Kj and Vj any more
            gradients.scale_columns(rdK, scale)
            fa1_gradients.fa1_write_columns(rdK, sK, results.dK, column0, head, thread)
            fa1_gradients.fa1_write_dv(rdV, sV, results.dV, column0, head, thread)
            kv_pipeline.release_by(bars, Slot(uint32(0), uint32(0)), thread)
            j0 = uint32(j0 + Bc)

    tiles, floats = tiled_type(4), array_type(4)
    columns = floats if spec.splits_queries else tiles
    arrays = [*[tiles] * 5, array_type(3), floats, half_type(4), columns, columns]

    @cuda.jit(arguments(arrays, 2, 2, spec.features.argument_type), *spec.launch)
    def fa1_backward(
        Q, K, V, O, dO, L, A, dQ, dK, dV, scale, scale_log2, group, split_rows, options
    ):
        shared = fa1_gradients.fa1_backward_shared_memory()
        pipeline.begin(shared.bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                rows = fa1_gradients.rows_of_block(Q, K, group, split_rows, options)
                produce(shared, Q, K, V, O, dO, rows)
            elif 32 <= cuda.threadIdx.x < 96:
                columns = fa1_gradients.dot_columns(Q, O)
                rows = fa1_gradients.rows_of_block(Q, K, group, split_rows, options)
                produce_dots(shared, columns, rows)
            elif 96 <= cuda.threadIdx.x:
                rows = fa1_gradients.rows_of_block(Q, K, group, split_rows, options)
                produce_values(shared, L, rows)
        else:
            take_registers(MANY)
            results = Gradients(dQ, dK, dV)
            rows = fa1_gradients.rows_of_block(Q, K, group, split_rows, options)
            consume(shared, A, results, scale, scale_log2, rows)

    return fa1_backward


__doc__ = f"""{__doc__ or ""}
In every pass, the same thread reads and writes an element of dQ, so that no barrier is needed
between passes. With query splits, several blocks share a head, and each has its own rows of Q. They
add dK and dV in float32 atomically, in no fixed order, and a separate kernel rounds the sums. With
a causal mask or a window, counters of the loops spill up to d = 64: 16 bytes per thread, or 52 with
a gradient of L.

Shared memory, 16-bit elements:  2 Bc d + 6 Br d + 2 Br Bc + 8 Br
    d is rounded up to 64, and the barriers come in addition. In bytes:
    198752 (d=64, 128 x 128), 197728 (d=128, 64 x 128)

Accesses: those of the kernel on unit "mma". TMA loads Q, dO and O.
"""
