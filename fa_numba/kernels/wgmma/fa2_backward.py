"""FlashAttention-2, backward: K/V outer, Q inner (arXiv 2307.08691, Algorithm 2), on Hopper's
tensor cores.

One thread block computes one column tile: the outer loop becomes the grid. Its producers load Kj
and Vj once, and row tiles with the L and D of their rows, alternately into two slots. A consumer
warpgroup computes 64 columns of S and all rows of the tile. It keeps its dK and dV in registers,
and computes P again from L. Only dS passes through shared memory, for dQ.

The copy engine (TMA) adds dQ to the float32 array ``A`` by atomic adds, and a later kernel rounds
A. Alternatively, a separate kernel with Q outer computes dQ in a fixed order. The end of this file
explains group splits, dropout, shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.device.signature import arguments, array_type, tiled_type
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.kernels.wgmma.fa2_backward_masks import make_masks_consumer
from fa_numba.kernels.wgmma.fa2_backward_planes import (
    make_planes_consumer,
    make_planes_consumers_by_product,
)
from fa_numba.kernels.wgmma.fa2_backward_wide import make_consumers_by_product
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Gradients, QueryRows, RowTiles, Slot, Tile


@cache
def make_producers(spec):
    """Return three device functions for producers.

    - ``produce``, run by one thread, loads Kj and Vj, and row tiles of Q and dO.
    - ``produce_values``, run by two warps, loads L and D of the row tiles.
    - ``produce_drawing`` is for calls with dropout. All threads of the producer warpgroup run it.
      It does the work of ``produce`` and ``produce_values``, and draws random bits.
    """
    grid, key_tiles, gradients = bind(spec, wgmma.grid, wgmma.key_tiles, wgmma.gradients)
    drawing, visits = bind(spec, wgmma.drawing, wgmma.visits)
    (q_pipeline,) = bind(spec.pipelines.q, wgmma.pipeline)

    @device_function
    def produce(shared, Q, K, V, dO, group, options):
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(shared.words, Q, K, group, options)
        # Alg. 2 line 6: load Kj, Vj
        gradients.load_columns(shared, K, V, j0, key_tiles.shared_key_head(head, Q, K))
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(1), h_first, i_start
        while i0 < i_end and h < h_end:
            # Alg. 2 line 9: load Qi, dOi
            slot, member = Slot(stage, phase), key_tiles.at_head(head, h)
            q_pipeline.acquire(shared.bars, slot)
            gradients.load_q(shared, Q, i0, member, slot)
            gradients.load_do(shared, dO, i0, member, slot)
            stage, phase = q_pipeline.next(slot)
            h, i0 = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)

    @device_function
    def produce_values(shared, Q, K, L, D, group, options):
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(shared.words, Q, K, group, options)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(1), h_first, i_start
        while i0 < i_end and h < h_end:
            # Alg. 2 line 9: load Li, Di
            slot, member = Slot(stage, phase), key_tiles.at_head(head, h)
            q_pipeline.acquire(shared.bars, slot)
            Lh, Dh = grid.query_rows(L, member), grid.query_rows(D, member)
            gradients.load_values(shared, Lh, Dh, i0, head.Nq, slot)
            stage, phase = q_pipeline.next(slot)
            h, i0 = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)

    @device_function
    def produce_drawing(shared, rows, K, V, group, options):
        Q, dO, L, D = rows
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(shared.words, Q, K, group, options)
        # Whether this thread loads the matrices, and whether it loads L and D
        first, of_values = cuda.threadIdx.x == 0, 32 <= cuda.threadIdx.x < 96
        if first:
            # Alg. 2 line 6: load Kj, Vj
            gradients.load_columns(shared, K, V, j0, key_tiles.shared_key_head(head, Q, K))
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(1), h_first, i_start
        while i0 < i_end and h < h_end:
            # Alg. 2 line 9: load Qi, dOi, Li, Di
            slot, member = Slot(stage, phase), key_tiles.at_head(head, h)
            q_pipeline.acquire(shared.bars, slot)
            if first:
                gradients.load_q(shared, Q, i0, member, slot)
                gradients.load_do(shared, dO, i0, member, slot)
            elif of_values:
                Lh, Dh = grid.query_rows(L, member), grid.query_rows(D, member)
                gradients.load_values(shared, Lh, Dh, i0, head.Nq, slot)
            drawing.draw_tile(shared, i0, j0, member, slot)
            stage, phase = q_pipeline.next(slot)
            h, i0 = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)

    return produce, produce_values, produce_drawing


@cache
def make_consumer(spec):
    """Return the device function ``consume``, which a consumer warpgroup runs.

    ``consume`` computes 64 rows of dK and dV. Normally it also computes a part of dQ, which the
    copy engine (TMA) adds to A, the float32 sum of dQ. If the kernel of ``make_query_gradients``
    computes dQ, ``consume`` computes only dK and dV.
    """
    grid, gradients, pingpong = bind(spec, wgmma.grid, wgmma.gradients, wgmma.pingpong)
    key_tiles, drawing, visits = bind(spec, wgmma.key_tiles, wgmma.drawing, wgmma.visits)
    (transposed,) = bind(spec.transposed, wgmma.products)  # ST = K QT
    (of_values,) = bind(spec.of_values.transposed, wgmma.products)  # dPT = V dOT
    (scores,) = bind(spec.masked_part, wgmma.scores)
    kv_pipeline, q_pipeline, do_pipeline, *_ = wgmma.pipelines(spec)
    RS, RP, RQ, RK, RV = spec.tile_registers
    EARLY, DROPS, atomic = spec.rounds_early, spec.features.dropout, spec.variant.adds_dq

    @device_function
    def consume(shared, Q, K, results, scale, scale_log2, group, options):
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rP, rdS = cuda.local.array(RP, uint32), cuda.local.array(RP, uint32)
        rdQ, rdK = cuda.local.array(RQ, float32), cuda.local.array(RK, float32)
        rdV = cuda.local.array(RV, float32)
        sK, sV, (sQ, sdO, sL), sdS, sdQ, sB, words, bars = shared
        thread = grid.transposed_thread()
        j0, head, h_end, i_first, i_end = key_tiles.key_tile(words, Q, K, group, options)
        column0 = uint32(j0 + 64 * thread.w)
        own = uint32(64 * 64 * thread.w)  # this consumer's rows of Kj and Vj
        # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
        gradients.start_columns(rdK, rdV)
        h_first, i_start = visits.first_visit(head, j0, h_end, i_first, i_end)
        stage, phase, h, i0 = uint32(0), uint32(0), h_first, i_start
        more = i0 < i_end and h < h_end
        kv_pipeline.wait(bars, Slot(uint32(0), uint32(0)))
        if more:
            q_pipeline.wait(bars, Slot(stage, phase))
            transposed.multiply(rS, sK, own, sQ, gradients.offsets(stage).rows)
            transposed.wait_scores(rS, False)
        # FA-1 line 9, FA-2 line 8: for each i that sees column tile j, of each query head
        while more:
            slot, at = Slot(stage, phase), gradients.offsets(stage)
            member = key_tiles.read_head(head, h, Q, K)
            tile = Tile(i0, column0, member, thread)
            gradients.scale_and_bias(rS, scale_log2, tile)
            # FA-1 line 17, FA-2 line 13: dPij = dOi VjT, on its way with Sij = scale Qi KjT
            do_pipeline.wait(bars, slot)
            of_values.multiply(rdP, sV, own, sdO, at.out)
            # FA-1 line 12: mask
            scores.scale_and_mask(rS, scale_log2, tile)
            # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
            gradients.p_of_columns(rS, rP, scale_log2, sL, at.values, tile)
            if DROPS:
                drawing.drop_drawn(rS, sB, stage)
            # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
            if EARLY:
                gradients.round_early(rP, rS)
                of_values.add_product(rdV, rP, sdO, at.out)
            # FA-1 line 20, FA-2 line 14: dSij = Pij o (dPij - Di)
            transposed.wait_scores(rdP, EARLY)
            gradients.ds_of_columns(rdS, rP, rdP, rS, sL, at.values, tile)
            if not EARLY:
                of_values.add_product(rdV, rP, sdO, at.out)
            # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
            transposed.add_product(rdK, rdS, sQ, at.rows)
            # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
            if atomic:
                gradients.store_ds(sdS, at.scores, rdS, thread)
                pingpong.sync_consumers()  # dSij is there
                gradients.begin_dq(rdQ, sdS, at.scores, sK, thread.w)
            else:
                cuda.syncwarp()  # all lanes have read Li and Di
            gradients.wait_columns(rdK, rdV, atomic)
            h_next, i_next = visits.next_visit(h, i0, head, j0, h_end, i_first, i_end)
            after = q_pipeline.next(slot)
            next_stage, next_phase = after
            more = key_tiles.takes_more(words, h_next, h_end, i_next)
            if more:
                q_pipeline.release(bars, slot)
                q_pipeline.wait(bars, after)
            else:
                next_stage = stage  # Sij once more, for nothing
            # FA-1 line 11, FA-2 line 10 of the next i: Sij = scale Qi KjT
            transposed.multiply(rS, sK, own, sQ, gradients.offsets(next_stage).rows)
            if atomic:
                gradients.wait_dq(rdQ)
                member = key_tiles.at_head(member, key_tiles.read_h(words, h))
                gradients.add_dq(rdQ, sdQ, results.dQ, i0, member, thread)
            transposed.wait_scores(rS, False)
            stage, phase, h, i0 = next_stage, next_phase, h_next, i_next

        # FA-1 line 24, FA-2 line 18: write dKj, dVj
        pingpong.sync_consumers()  # nobody reads Kj and Vj any more
        gradients.scale_columns(rdK, scale)
        if DROPS:
            gradients.scale_dv(rdV, options.inverse_keep)
        head = key_tiles.read_head(head, head.h, Q, K)
        gradients.write_columns(rdK, sK, results.dK, column0, head, thread)
        gradients.write_dv(rdV, sV, results.dV, column0, head, thread)

    return consume


# Name of the consumers in ``tiling.wgmma_variants`` -> the factory of ``consume``.
CONSUMERS = {
    "columns": make_consumer,
    "masks": make_masks_consumer,
    "planes": make_planes_consumer,
    "planes by product": make_planes_consumers_by_product,
    "products": make_consumers_by_product,
}


@cache
def make_backward(spec, atomic=True):
    """Return the kernel of the variant ``spec.variant``.

    The grid has one thread block for each column tile. With group splits, it has one thread block
    for each split of a column tile (``key_tiles``). The variant decides whether this kernel or the
    kernel of ``make_query_gradients`` computes dQ. The argument ``atomic`` is ignored: it exists
    because the kernels of the other units take it.
    """
    produce, produce_values, produce_drawing = make_producers(spec)
    consume = CONSUMERS[spec.variant.consumer](spec)
    gradients, pipeline = bind(spec, wgmma.gradients, wgmma.pipeline)
    (key_tiles,) = bind(spec, wgmma.key_tiles)
    (FEW, MANY), DROPS = spec.registers, spec.features.dropout
    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    rows = array_type(3)
    sums = queries if spec.variant.copies_dq else array_type(4)
    columns = tiled_type(4, spec.features.packed)
    if spec.splits_group or spec.planes > 1:  # the results are float32
        columns = array_type(4)
    arrays = [queries, keys, keys, queries, rows, rows, sums, columns, columns]

    @cuda.jit(arguments(arrays, 2, 1, spec.features.argument_type), *spec.launch)
    def fa2_backward(Q, K, V, dO, L, D, A, dK, dV, scale, scale_log2, group, options):
        shared = gradients.backward_shared_memory()
        pipeline.begin(shared.bars)
        key_tiles.write_key_tile(shared.words, Q, K, group, options)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if DROPS:
                produce_drawing(shared, RowTiles(Q, dO, L, D), K, V, group, options)
            elif cuda.threadIdx.x == 0:
                produce(shared, Q, K, V, dO, group, options)
            elif 32 <= cuda.threadIdx.x < 96:
                produce_values(shared, Q, K, L, D, group, options)
        else:
            take_registers(MANY)
            results = Gradients(A, dK, dV)
            consume(shared, Q, K, results, scale, scale_log2, group, options)

    return fa2_backward


@cache
def make_query_gradients(spec):
    """Return the kernel that computes dQ without atomic adds, in a fixed order.

    The grid is (Tr, query heads, batch entries), and Q is the outer loop. For packed sequences, Tr
    counts the row tiles of all sequences. The kernel computes S, P, dP and dS again. A thread block
    adds up one row tile of dQ, and stores the tile once. The producer loads Qi and dOi once, and
    column tiles alternately into slots. A consumer warpgroup computes 64 rows of S and all columns.
    dS in registers is the left operand of the product dS K.
    """
    grid, visits, load = bind(spec, wgmma.grid, wgmma.visits, wgmma.load)
    pipeline, pingpong, products = bind(spec, wgmma.pipeline, wgmma.pingpong, wgmma.products)
    values, dq_kernel = bind(spec, wgmma.values, wgmma.dq_kernel)
    (scores,) = bind(spec.masked_part, wgmma.scores)
    softmax, epilogue = bind(spec, wgmma.softmax, wgmma.epilogue)
    q_pipeline, do_pipeline, k_pipeline, v_pipeline = wgmma.pipelines(spec)
    RS, RQ, RP = spec.tile_registers
    TM, Br, Bc, (FEW, MANY) = spec.TM, spec.Br, spec.Bc, spec.registers

    @device_function
    def produce(shared, Q, K, V, dO, group, options):
        pages = cuda.local.array(1, uint32)  # not used without pages
        i0, head = dq_kernel.dq_row_tile(Q, K, group, options)
        j0, j_end = visits.column_range(i0, uint32(i0 + Br), head)
        bars, once = shared.bars, Slot(uint32(0), uint32(0))
        load.q(shared, Q, i0, head, once, uint32(0))
        dq_kernel.load_do_once(shared.sdO, dO, i0, head, bars, once)
        stage, phase = uint32(0), uint32(1)
        while j0 < j_end:
            kv = Slot(stage, phase)
            k_pipeline.acquire(bars, kv)
            load.k(shared.sK, K, j0, head, pages, bars, kv)
            v_pipeline.acquire(bars, kv)
            dq_kernel.load_v(shared.sV, V, j0, head, pages, bars, kv)
            stage, phase = k_pipeline.next(kv)
            j0 = uint32(j0 + Bc)

    @device_function
    def consume(shared, Q, K, rows, scale, scale_log2, group, options):
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rdS, rdQ = cuda.local.array(RP, uint32), cuda.local.array(RQ, float32)
        rL, rD = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        sQ, sdO, sK, sV, bars = shared
        thread = grid.thread()
        w = thread.w
        i0, head = dq_kernel.dq_row_tile(Q, K, group, options)
        j0, j_end = visits.column_range(i0, uint32(i0 + Br), head)
        row0 = uint32(i0 + 64 * w)
        more = j0 < j_end
        values.read(rL, grid.query_rows(rows.L, head), row0, head.Nq, thread)
        values.read(rD, grid.query_rows(rows.D, head), row0, head.Nq, thread)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        stage, phase, once = uint32(0), uint32(0), Slot(uint32(0), uint32(0))
        q_pipeline.wait(bars, once)
        do_pipeline.wait(bars, once)
        if more:
            k_pipeline.wait(bars, Slot(stage, phase))
            products.begin_scores(rS, sQ, uint32(0), w, sK, stage)
            products.wait_scores(rS, False)
        while more:
            kv, tile = Slot(stage, phase), Tile(row0, j0, head, thread)
            # Alg. 2 line 13: dPij = dOi VjT, on its way with Sij
            v_pipeline.wait(bars, kv)
            dq_kernel.begin_dp(rdP, sdO, uint32(0), w, sV, stage)
            scores.scale_and_mask(rS, scale_log2, tile)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            dq_kernel.p_of_rows(rS, scale_log2, rL)
            softmax.drop(rS, tile)
            products.wait_scores(rdP, False)
            v_pipeline.release(bars, kv)
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            dq_kernel.ds_of_rows(rdS, rdP, rS, rL, rD, tile)
            # Alg. 2 line 15: dQi += scale dSij Kj, on its way with the next S
            products.begin_output(rdQ, rdS, sK, stage)
            after = k_pipeline.next(kv)
            next_stage, next_phase = after
            j0 = uint32(j0 + Bc)
            more = j0 < j_end
            if more:
                k_pipeline.wait(bars, after)
            else:
                next_stage = stage  # Sij once more, for nothing
            # Alg. 2 line 10 of the next j: Sij = scale Qi KjT
            products.begin_scores(rS, sQ, uint32(0), w, sK, next_stage)
            products.wait_output(rdQ, True)
            k_pipeline.release(bars, kv)
            products.wait_scores(rS, False)
            stage, phase = next_stage, next_phase
        for e in range(RQ):
            rdQ[e] *= scale
        pingpong.sync_group(w)  # no warp reads Qi any more
        epilogue.write_queries(rdQ, sQ, once, rows.dQ, row0, head, thread)

    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    rows = array_type(3)
    arrays = [queries, keys, keys, queries, rows, rows, tiled_type(4, spec.features.packed)]

    @cuda.jit(arguments(arrays, 2, 1, spec.features.argument_type), *spec.launch)
    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        shared = dq_kernel.dq_shared_memory()
        pipeline.begin(shared.bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            if cuda.threadIdx.x == 0:
                produce(shared, Q, K, V, dO, group, options)
        else:
            take_registers(MANY)
            consume(shared, Q, K, QueryRows(L, D, dQ), scale, scale_log2, group, options)

    return fa2_backward_dq


__doc__ = f"""{__doc__ or ""}
With ``group_splits``, several blocks share a column tile. Each has its own query heads of the
K/V head, or its own rows of one query head. If the number of a block does not give these rows, or
batch entries have lengths of their own, one thread finds the rows for the block
(``parts.wgmma.key_tiles``). With dropout, the producers draw one bit per element before the
products need it. The file ``fa2_backward_masks.py`` contains the consumers for calls that have only
masks.

Shared memory, 16-bit elements:  2 Bc d + 4 Br d + 2 Br Bc + 8 Br
    d is rounded up to 64. dQ takes 32768 bytes more, and the barriers come in addition.
    In bytes, with only masks:  198728 (d=64, 128 x 128) and 197704 (d=128, 64 x 128)
    Other calls take 16 bytes less. With lengths, or if blocks share rows, 36 bytes more.
    With dropout, Br Bc / 4 bytes more. If only V's head dimension is above 64, dQ takes 16384
    bytes: a consumer then computes 32 columns of dQ.

Accesses: those of the kernel on unit "mma". TMA loads Q and dO. If n blocks share a column tile,
each loads Kj and Vj, and stores its parts of dKj and dVj in float32. ``round_rows`` adds the parts
in one order, with n Nk d loads and Nk d stores for dK, and as many for dV.
"""
