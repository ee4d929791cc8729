"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on Hopper's tensor
cores, with the schedule of FlashAttention-3 (arXiv 2407.08608, Algorithms 1 and 2).

A persistent thread block computes one work tile after the other. A work tile is a row tile Qi (line
3), and a counter in global memory assigns it. One producer thread loads Qi and writes the position
of the work tile to shared memory. Another loads Kj and Vj; with pages, two threads do this.

A consumer warpgroup computes 64 rows of Qi and all columns. During its softmax, the tensor cores
compute P V of the previous column tile, and products of other consumers. While it writes Oi, they
compute the first S of its next work tile. The end of this file has the details.
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.device.signature import arguments, array_type, boxed_type, tiled_type
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Head, Out, Slot, Tile


@cache
def make_forward(spec):
    """Return the kernel for ``spec``. The grid has one thread block for each work tile. Persistent
    thread blocks are an exception: the grid has no more of them than the GPU runs at the same time.
    """
    grid, load, pipeline = bind(spec, wgmma.grid, wgmma.load, wgmma.pipeline)
    products, scores, softmax = bind(spec, wgmma.products, wgmma.scores, wgmma.softmax)
    scheduler, pingpong, epilogue = bind(spec, wgmma.scheduler, wgmma.pingpong, wgmma.epilogue)
    q_pipeline, k_pipeline, v_pipeline, *_ = wgmma.pipelines(spec)
    (RS, RO, RP), RB, TM = spec.tile_registers, spec.bias_registers, spec.TM
    Bc, ROWS, (FEW, MANY) = spec.Bc, spec.group_rows, spec.registers
    OVERLAPS, SPECIALISED = spec.overlaps, spec.specialised

    @device_function
    def produce_rows(shared, work, w, Q):
        bars, n, more = shared.bars, uint32(cuda.blockIdx.x), True
        stage, phase, late_phase = uint32(0), uint32(1), uint32(0)
        while more:
            slot = Slot(stage, phase)
            more = scheduler.announce(work, bars, slot, n)
            if more:
                # FA-1 line 7, FA-2 line 3: for each row tile i
                i0, head, j0, j_end = scheduler.give(work, bars, slot, n)
                # FA-1 line 8, FA-2 line 4: load Qi
                load.q(shared, Q, i0, head, slot, w)
                late_phase = scheduler.wait_late(bars, late_phase, j0, j_end, i0, head)
                n = scheduler.next_number(work, n)
            stage, phase = q_pipeline.next(slot)

    @device_function
    def produce_columns(shared, work, K, V):
        stage, phase = uint32(0), uint32(1)
        bars, q_stage, q_phase = shared.bars, uint32(0), uint32(0)
        while scheduler.has_columns(work, bars, Slot(q_stage, q_phase)):
            q = Slot(q_stage, q_phase)
            i0, head, j0, j_end = scheduler.take_columns(work, bars, q)
            waits = load.produces_k() and scheduler.is_long(j0, j_end, i0, head)
            while j0 < j_end:
                waits = scheduler.commit_late(bars, waits, j0, j_end, i0, head)
                # FA-1 line 6, FA-2 line 7: load Kj, Vj
                kv = Slot(stage, phase)
                scheduler.name_next(work, bars, kv, j0, j_end, i0, head)
                load.columns(shared, K, V, j0, head, kv)
                stage, phase = k_pipeline.next(kv)
                j0 = scheduler.next_column(uint32(j0 + Bc), j_end, i0, head)
            scheduler.commit_at_last(bars, waits)
            q_stage, q_phase = q_pipeline.next(q)

    @device_function
    def produce_first(shared, work, Q, K, V):
        slot, n = Slot(uint32(0), uint32(1)), uint32(cuda.blockIdx.x)
        if scheduler.announce(work, shared.bars, slot, n):
            i0, head, j0, j_end = scheduler.give(work, shared.bars, slot, n)
            load.q(shared, Q, i0, head, slot, uint32(0))
            load.first_columns(shared, K, V, j0, j_end, head)

    @device_function
    def consume(shared, work, out, scale, K, V):
        rS, rBS = cuda.local.array(RS, float32), cuda.local.array(RB, float32)
        rP, rO = cuda.local.array(RP, uint32), cuda.local.array(RO, float32)
        rm, rl = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        rT = products.tile_sums(rO)  # P V of a tile goes here: O itself, of planes others
        bars, thread = shared.bars, grid.thread()
        w = thread.w
        stage, phase, q_stage, q_phase = uint32(0), uint32(0), uint32(0), uint32(0)
        pingpong.first_turn(w)
        unit = float32(1.0)  # O is in units of a scale of V
        while scheduler.has_work(work, bars, Slot(q_stage, q_phase)):
            # FA-1 line 7, FA-2 line 3: for each row tile i
            (i0, h, b, split), Nq, Nk, j0, j_end, hk = scheduler.take(work, q_stage)
            head = Head(b, h, hk, Nq, Nk, work.options)
            factor = products.score_factor(scale, head)
            # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
            tile = Tile(uint32(i0 + ROWS * w), j0, head, thread)
            softmax.start_of_lanes(rO, rl, rm, tile, split)
            if j0 < j_end:
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                kv = Slot(stage, phase)
                k_pipeline.wait(bars, kv)
                pingpong.take_turn(w)
                products.begin_scores(rS, shared.sQ, q_stage, w, shared.sK, stage)
                pingpong.give_turn(w)
                while True:  # and through the next work tile, if its first S is begun in here
                    head, row0 = Head(b, h, hk, Nq, Nk, work.options), uint32(i0 + ROWS * w)
                    tile = Tile(row0, j0, head, thread)
                    own_factor = products.tile_factor(factor, tile)
                    unit = products.value_unit(tile)
                    scores.read_bias_or_state(rBS, tile)
                    j_next = scheduler.look_ahead(rBS, work, stage, j0)
                    products.wait_scores(rS, False)
                    k_pipeline.release(bars, Slot(stage, phase))
                    scores.scale_bias_and_mask(rS, rBS, own_factor, tile)
                    # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
                    softmax.online_of_rows(rS, own_factor, rm, rl, rf)
                    softmax.drop(rS, tile)
                    products.round_p(rP, rS)
                    load.refill_k(shared, K, j0, j_end, head, Slot(stage, phase))
                    j0 = scheduler.step(j_next)
                    # FA-1 line 5, FA-2 line 6: for each column tile j that is seen, after the first
                    while j0 < j_end:
                        # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT, on its way with Pij-1 Vj-1
                        kv = Slot(stage, phase)
                        after = k_pipeline.next(kv)
                        pingpong.begin_products(rS, rT, rP, shared, q_stage, kv, after, w)
                        tile = Tile(row0, j0, head, thread)
                        own_factor = products.tile_factor(factor, tile)
                        unit, ratio = products.next_unit(unit, tile)
                        scores.read_bias_or_state(rBS, tile)
                        j_next = scheduler.look_ahead(rBS, work, after.stage, j0)
                        products.wait_scores(rS, OVERLAPS)
                        k_pipeline.release(bars, after)
                        scores.scale_bias_and_mask(rS, rBS, own_factor, tile)
                        # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
                        changes = softmax.maxima(rS, own_factor, rm, rl, rf)
                        products.end_output(rO, rT, False)
                        v_pipeline.release(bars, kv)
                        # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                        softmax.rescale_changed(rO, rf, changes, ratio)
                        softmax.exponentials(rS, own_factor, rm, rl)
                        softmax.drop(rS, tile)
                        products.round_p(rP, rS)
                        load.refill_k(shared, K, j0, j_end, head, after)
                        load.refill_v(shared, V, uint32(j0 - Bc), j_end, head, kv)
                        stage, phase = after
                        j0 = scheduler.step(j_next)
                    kv, q = Slot(stage, phase), Slot(q_stage, q_phase)
                    v_pipeline.wait(bars, kv)
                    after, q_after = k_pipeline.next(kv), q_pipeline.next(q)
                    if not scheduler.begins_next(work, bars, q_after):
                        break
                    # FA-2 line 10 of the last tile, on its way with the next work tile's first S
                    pingpong.begin_last(rS, rT, rP, shared, q_after.stage, kv, after, w)
                    # FA-2 line 9: l of whole rows, whose columns lie with four lanes
                    softmax.sum_lanes(rl)
                    products.end_output(rO, rT, True)
                    v_pipeline.release(bars, kv)
                    products.leave_unit(rO, unit)
                    done = Tile(uint32(i0 + ROWS * w), j0, head, thread)
                    epilogue.write_out(rO, rl, rm, shared, q, out, split, done)
                    (stage, phase), (q_stage, q_phase) = after, q_after
                    (i0, h, b, split), Nq, Nk, j0, j_end, hk = scheduler.take(work, q_stage)
                    head = Head(b, h, hk, Nq, Nk, work.options)
                    factor = products.score_factor(scale, head)
                    tile = Tile(uint32(i0 + ROWS * w), j0, head, thread)
                    softmax.start_of_lanes(rO, rl, rm, tile, split)
                products.begin_output(rT, rP, shared.sV, stage)
                softmax.sum_lanes(rl)
                products.end_output(rO, rT, False)
                v_pipeline.release(bars, Slot(stage, phase))
                stage, phase = k_pipeline.next(Slot(stage, phase))
            # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
            # FA-2 lines 13, 15: L = m + log l
            q = Slot(q_stage, q_phase)
            head = Head(b, h, hk, Nq, Nk, work.options)
            products.leave_unit(rO, unit)
            done = Tile(uint32(i0 + ROWS * w), j0, head, thread)
            epilogue.write_out(rO, rl, rm, shared, q, out, split, done)
            q_stage, q_phase = q_pipeline.next(q)

    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    values = tiled_type(4, spec.value_ends)
    out = boxed_type(spec.stores_floats, 4, spec.features.packed)
    arrays = [queries, keys, values, out, array_type(3), array_type(1, types.int32)]

    @cuda.jit(arguments(arrays, 1, 1, spec.features.argument_type), *spec.launch)
    def fa2_forward(Q, K, V, O, L, taken, scale, group, options):
        shared = load.shared_memory()
        work = scheduler.schedule(Q, K, taken, group, options)
        pipeline.begin(shared.bars)
        cuda.syncthreads()
        if SPECIALISED and cuda.threadIdx.x < 128:
            give_registers(FEW)
            w = load.warp()
            if load.produces_rows(w):
                produce_rows(shared, work, w, Q)
            elif load.produces_columns(w):
                produce_columns(shared, work, K, V)
        else:
            if SPECIALISED:
                take_registers(MANY)
            elif cuda.threadIdx.x == 0:
                produce_first(shared, work, Q, K, V)
            out = Out(O, L, Q.shape[2])
            consume(shared, work, out, scale, K, V)

    return fa2_forward


__doc__ = f"""{__doc__ or ""}
If ``ablate`` contains "specialisation", there is no producer. The first consumer thread then loads
all tiles, and a thread block has one work tile.

S, P, O, m and l stay in registers. Scores and m are multiplied by log2(e), so that exponentials are
powers of 2. With planes, the sums for P V of one tile are separate from O, and O is stored from
registers to global memory in float32.

Shared memory, 16-bit elements:  (stages of Q) Br d + 2 stages Bc d
    d is rounded up to 64. In bytes at the default tiles:  114688 (d=64, 192 x 128), 196608
    (d=128, 128 x 128), 229376 (d=256, 128 x 80, one stage of Q)
    With P planes, the tiles are P times as large. In e4m3, tiles of K and V have half the bytes,
    and O decides the size of the slots of Q: 155800 bytes (d=128, 192 x 96, O in 16 bits).

Behind the tiles come the barriers, four words for each slot of Q, which describe a work tile, and
with a block mask one word for each slot of K, which says which column tile comes next. If V has its
own head dimension, it gives the size of the slots of V. The larger one of both head dimensions then
gives the size of the slots of Q, because O passes through a slot of Q. The complete size is then
213104 bytes (192 and 128, 128 x 128, one stage of Q).

Accesses, elements per head:
    loads   Nq d + 2 Tr Nk d
    stores  Nq d + Nq

With a causal mask, a block loads only the K/V tiles that its row tile sees. If query heads share
row tiles, because there are few rows of Q, the heads together load 2 Tr Nk d, where Tr counts the
row tiles of all their rows. With n key splits, Q is loaded n times. The kernel then stores n (Nq d
+ 2 Nq) elements for ``merge_splits``, in place of O and L.
"""
