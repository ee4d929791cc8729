"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on Hopper's tensor
cores.

One thread block computes one (batch entry, head): both loops run inside it. Each step of the outer
loop loads O, l and m from global memory, normalises O, and stores O, l and m. O is stored in the
float32 array ``A`` until the last step of a row tile rounds it. With planes, O itself is float32,
and there is no A.

A consumer warpgroup computes 64 rows of Qi and Oi, and all columns. For each consumer, one producer
thread loads the consumer's rows. The consumers share only K and V: a slot of K or V is filled again
after all consumers have released it. With query splits, several thread blocks share a head. Scores
and m are multiplied by log2(e). The end of this file gives shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.device.signature import arguments, array_type, boxed_type, tiled_type
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts import bind, wgmma
from fa_numba.parts.records import Slot, Tile


@cache
def make_forward(spec):
    """Return the kernel for ``spec``. The grid is (query splits, query heads, batch entries)."""
    grid, load, pipeline = bind(spec, wgmma.grid, wgmma.load, wgmma.pipeline)
    products, scores, softmax = bind(spec, wgmma.products, wgmma.scores, wgmma.softmax)
    visits, fa1_state = bind(spec, wgmma.visits, wgmma.fa1_state)
    q_pipeline, k_pipeline, v_pipeline, *_ = wgmma.pipelines(spec)
    (RS, RO, RP), RB, TM = spec.tile_registers, spec.bias_registers, spec.TM
    Bc, ROWS, (FEW, MANY) = spec.Bc, spec.group_rows, spec.registers
    Br = spec.Br

    @device_function
    def produce_rows(shared, work, w, Q, A):
        bars, stage, phase, written_phase = shared.bars, uint32(0), uint32(1), uint32(0)
        head, j0, j_end, i_first, i_stop = fa1_state.passes(work)
        fa1_state.wait_initialised(bars, w)
        while j0 < j_end:
            i0, i_end = visits.rows_seen(j0, i_first, i_stop, head)
            visited = i0 < i_end
            # FA-1 line 7, FA-2 line 3: for each row tile i
            while i0 < i_end:
                slot = Slot(stage, phase)
                starts = fa1_state.name_own_next(shared, i0, i_end, j0, head, slot, w)
                # FA-1 line 8, FA-2 line 4: load Qi
                load.q(shared, Q, i0, head, slot, w)
                # Alg. 1 line 8: load Oi
                fa1_state.load_output(shared, A, i0, starts, head, slot, w, written_phase)
                stage, phase = q_pipeline.next(slot)
                i0 = visits.next_row(uint32(i0 + Br), i_end, j0, head)
            if visited:
                written_phase = uint32(written_phase ^ 1)
            j0 = uint32(j0 + Bc)

    @device_function
    def produce_columns(shared, work, K, V):
        stage, phase = uint32(0), uint32(1)
        head, j0, j_end, i_first, i_stop = fa1_state.passes(work)
        while j0 < j_end:
            i0, i_end = visits.rows_seen(j0, i_first, i_stop, head)
            if i0 < i_end:
                # FA-1 line 6, FA-2 line 7: load Kj, Vj
                kv = Slot(stage, phase)
                load.columns(shared, K, V, j0, head, kv)
                stage, phase = k_pipeline.next(kv)
            j0 = uint32(j0 + Bc)

    @device_function
    def consume(shared, work, out, scale):
        rS, rBS = cuda.local.array(RS, float32), cuda.local.array(RB, float32)
        rP, rO = cuda.local.array(RP, uint32), cuda.local.array(RO, float32)
        rm, rl = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        rT = products.tile_sums(rO)  # P V of a tile goes here: O itself, of planes others
        bars, thread = shared.bars, grid.thread()
        w = thread.w
        stage, phase, q_stage, q_phase = uint32(0), uint32(0), uint32(0), uint32(0)
        head, j0, j_end, i_first, i_stop = fa1_state.passes(work)
        factor = products.score_factor(scale, head)
        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        own_first = uint32(i_first + ROWS * w)
        fa1_state.initialise(rO, rl, rm, shared, out, Tile(own_first, j0, head, thread))
        fa1_state.end_pass(bars, thread)

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            i0, i_end = visits.rows_seen(j0, i_first, i_stop, head)
            visited = i0 < i_end
            # FA-1 line 7, FA-2 line 3: for each row tile i
            while i0 < i_end:
                row0, q = uint32(i0 + ROWS * w), Slot(q_stage, q_phase)
                own = q_pipeline.own(q, w)
                ahead = fa1_state.own_ahead(i0, i_end, j0, head)
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                kv = Slot(stage, phase)
                k_pipeline.wait(bars, kv)
                q_pipeline.wait(bars, own)
                products.begin_scores(rS, shared.sQ, q_stage, w, shared.sK, stage)
                tile = Tile(row0, j0, head, thread)
                own_factor = products.tile_factor(factor, tile)
                unit = products.value_unit(tile)
                scores.read_bias_or_state(rBS, tile)
                visit, i_next, more = fa1_state.read_named(rBS, shared, q, w, ahead)
                # Alg. 1 line 8: load li, mi
                fa1_state.read_statistics(rl, rm, out, visit, tile)
                products.wait_scores(rS, False)
                if more:
                    q_pipeline.release(bars, own)
                if i_next >= i_end:
                    k_pipeline.release(bars, Slot(stage, phase))
                scores.scale_bias_and_mask(rS, rBS, own_factor, tile)
                # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
                softmax.online_to_p(rP, rS, own_factor, rm, rl, rf)
                # Alg. 1 lines 8, 12: load Oi; diag(li) e^(m_old - m_new) Oi
                fa1_state.enter_unit(rf, unit)
                fa1_state.take_output(rO, rf, shared, q, visit, tile)
                # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                v_pipeline.wait(bars, kv)
                products.begin_output(rT, rP, shared.sV, stage)
                fa1_state.read_output(rO, rf, out, visit, tile)  # the same, of planes
                products.end_output(rO, rT, False)
                if i_next >= i_end:
                    v_pipeline.release(bars, kv)
                products.leave_unit(rO, unit)
                # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
                fa1_state.write_state(rO, rl, rm, shared, q, out, more, tile)
                q_stage, q_phase = q_pipeline.next(q)
                i0 = i_next
            if visited:
                fa1_state.end_pass(bars, thread)
                stage, phase = k_pipeline.next(Slot(stage, phase))
            j0 = uint32(j0 + Bc)
        # FA-2 lines 13, 15: L = m + log l
        fa1_state.write_logsumexp(rl, rm, out.L, out, own_first, out.rows, head, thread)

    queries, keys = tiled_type(4, spec.query_ends), tiled_type(4, spec.key_ends)
    values = tiled_type(4, spec.value_ends)
    out = boxed_type(spec.stores_floats, 4, spec.features.packed)
    sums = boxed_type(spec.planes > 1, 4, spec.features.packed)
    arrays = [queries, keys, values, out, sums, *[array_type(3)] * 3]

    @cuda.jit(arguments(arrays, 1, 2, spec.features.argument_type), *spec.launch)
    def fa1_forward(Q, K, V, O, A, L, l, m, scale, group, split_rows, options):
        shared = load.shared_memory()
        pipeline.begin(shared.bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            w = load.warp()
            if load.produces_rows(w):
                work = fa1_state.block_rows(Q, K, group, split_rows, options)
                produce_rows(shared, work, w, Q, A)
            elif load.produces_columns(w):
                work = fa1_state.block_rows(Q, K, group, split_rows, options)
                produce_columns(shared, work, K, V)
        else:
            take_registers(MANY)
            work = fa1_state.block_rows(Q, K, group, split_rows, options)
            out = fa1_state.out(O, A, L, l, m, work)
            consume(shared, work, out, scale)

    return fa1_forward


__doc__ = f"""{__doc__ or ""}
Shared memory: each slot of Q and O takes 2 Br d + 4 Br d bytes, and each slot of K and V takes 4
Bc d bytes. Barriers come in addition. There are two slots of each kind if they fit. d is rounded up
to 64 in 16-bit tiles, and to 32 in float32 tiles. In bytes, all together, at the default tiles:

    229584 (d=64, 128 x 256), 229488 (d=128, 128 x 256), 221256 (d=192, 64 x 192),
    229448 (d=256, 64 x 128)

At d=256 two consumers leave room for 32 columns of K and V.

With P planes, Q, K and V take P times as much, and d is rounded up to 64. There are no slots of O,
which is loaded into registers while P V is computed. In bytes, with two planes:

    164016 (d=64, 128 x 192), 196720 (d=128, 128 x 128)

Accesses, elements per head: those of the kernel on unit "mma". TMA makes all of them except those
of l, m and L, and with planes those of O.
"""
