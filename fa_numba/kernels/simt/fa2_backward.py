"""FlashAttention-2, backward: K/V outer, Q inner (arXiv 2307.08691, Algorithm 2), on CUDA cores.

One thread block computes one column tile Kj, Vj: the outer loop (line 5) becomes the grid. dK and
dV stay in registers. P is computed again from L. Thread blocks add to dQ in global memory by atomic
adds, in no fixed order. Alternatively, a second kernel computes dQ in a fixed order. The end of
this file gives shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, simt
from fa_numba.parts.records import Tile


@cache
def make_backward(spec, atomic=True):
    """Return the kernel for ``spec``. The grid is (Tc, K/V heads, batch entries).

    If ``atomic`` is false, the kernel of ``make_query_gradients`` computes dQ.
    """
    grid, visits, load = bind(spec, simt.grid, simt.visits, simt.load)
    products, scores, softmax = bind(spec, simt.products, simt.scores, simt.softmax)
    values, gradients, epilogue = bind(spec, simt.values, simt.gradients, simt.epilogue)
    Bc = spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RK, RG, RV = spec.column_registers, spec.slope_registers, spec.of_values.column_registers
    arrays = [*[array_type(4)] * 4, *[array_type(3)] * 2, *[array_type(4)] * 3]

    @cuda.jit(arguments(arrays, 2, 1, spec.features.argument_type), *spec.launch)
    def fa2_backward(Q, K, V, dO, L, D, dQ, dK, dV, scale, scale_log2, group, options):
        sQ, sdO, sK, sV, sP, sdS = load.backward_shared_memory()
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rG, rdQ = cuda.local.array(RG, float32), cuda.local.array(RQ, float32)
        rdK, rdV = cuda.local.array(RK, float32), cuda.local.array(RV, float32)
        rL, rD = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        thread = grid.thread()
        first, heads = grid.heads_of_group(Q, K, group, options)
        Kh, Vh = grid.key_rows(K, first), grid.key_rows(V, first)
        dKh, dVh = grid.key_rows(dK, first), grid.key_rows(dV, first)
        columns = uint32(Kh.shape[0])

        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0 = uint32(cuda.blockIdx.x * Bc)  # those with most rows, the first ones, go first
        i_first, i_end = visits.row_range(j0, uint32(0), first.Nq, first)
        # FA-1 line 7, FA-2 line 6: load Kj, Vj
        load.columns(sK, Kh, j0, first.Nk)
        load.value_columns(sV, Vh, j0, first.Nk)
        # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
        gradients.start_columns(rdK, rdV)
        # The query heads that share this K/V head
        g = uint32(0)
        while g < heads:
            head = grid.head_after(first, g)
            Qh, dOh = grid.query_rows(Q, head), grid.query_rows(dO, head)
            Lh, Dh = grid.query_rows(L, head), grid.query_rows(D, head)
            dQh = grid.query_rows(dQ, head)
            i0 = visits.next_row(i_first, i_end, j0, head)
            if i0 < i_end:
                load.rows(sQ, Qh, i0, head.Nq)
                load.value_rows(sdO, dOh, i0, head.Nq)
            commit_async()
            # FA-1 line 9, FA-2 line 8: for each row tile i that sees column tile j
            while i0 < i_end:
                visit = visits.row_ahead(i0, i_end, j0, head)
                wait_async()
                cuda.syncthreads()  # Qi and dOi are there; nobody reads sdS any more
                tile = Tile(i0, j0, head, thread)
                # Alg. 2 line 9: Li, Di
                values.read(rL, Lh, i0, head.Nq, thread)
                values.read(rD, Dh, i0, head.Nq, thread)
                # FA-1 lines 11, 12, FA-2 line 10: Sij = scale Qi KjT
                products.scores(rS, sQ, sK, thread)
                scores.slopes(rG, rS, scale_log2, tile)
                scores.scale_and_mask(rS, scale_log2, tile)
                # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
                softmax.from_lse(rS, scale_log2, rL)
                # FA-1 lines 14, 15: Pij without what is dropped
                softmax.drop(rS, tile)
                products.store_p(sP, rS, options, thread)
                # FA-1 line 17, FA-2 line 13: dPij = dOi VjT
                products.value_scores(rdP, sdO, sV, thread)
                # FA-1 lines 18, 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                gradients.of_scores(rdP, rS, rD, rG, tile)
                products.store_ds(sdS, rdP, thread)
                cuda.syncthreads()  # Pij and dSij are there
                # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                products.add_dv(rdV, sP, sdO, thread)
                # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                products.add_transposed(rdK, sdS, sQ, thread)
                cuda.syncthreads()  # nobody reads sQ and sdO any more
                # FA-1 line 10, FA-2 line 9 of the next i: load Qi+1, dOi+1, in flight meanwhile
                i_next = visits.row_after(visit, i0)
                if i_next < i_end:
                    load.rows(sQ, Qh, i_next, head.Nq)
                    load.value_rows(sdO, dOh, i_next, head.Nq)
                commit_async()
                # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                if atomic:
                    products.output(rdQ, sdS, sK, thread)
                    gradients.add_rows(rdQ, dQh, scale, i0, head.Nq, thread)
                i0 = i_next
            g = uint32(g + 1)
        wait_async()

        # FA-1 line 24, FA-2 line 18: write dKj, dVj
        gradients.scale_columns(rdK, scale)
        epilogue.write_columns(rdK, dKh, j0, columns, thread)
        epilogue.write_dv(rdV, dVh, j0, columns, thread)

    return fa2_backward


@cache
def make_query_gradients(spec):
    """Return the kernel that computes dQ without atomic adds, in a fixed order.

    The grid is (Tr, query heads, batch entries), and Q is the outer loop. The kernel computes S, P,
    dP and dS again. A thread block adds up one row tile of dQ, and stores the tile once.
    """
    grid, visits, load = bind(spec, simt.grid, simt.visits, simt.load)
    products, scores, softmax = bind(spec, simt.products, simt.scores, simt.softmax)
    values, gradients, epilogue = bind(spec, simt.values, simt.gradients, simt.epilogue)
    Br, Bc = spec.Br, spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RG = spec.slope_registers
    dq_bytes = spec.shared_bytes - 4 * spec.tile_floats[-1]  # without sP

    arrays = [*[array_type(4)] * 4, *[array_type(3)] * 2, array_type(4)]
    types_ = arguments(arrays, 2, 1, spec.features.argument_type)

    @cuda.jit(types_, spec.threads, dq_bytes, spec.min_blocks)
    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        sQ, sdO, sK, sV, sdS = load.dq_shared_memory()
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rG, rT = cuda.local.array(RG, float32), cuda.local.array(RQ, float32)
        rdQ, rL = cuda.local.array(RQ, float32), cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, dOh = grid.query_rows(Q, head), grid.query_rows(dO, head)
        Kh, Vh = grid.key_rows(K, head), grid.key_rows(V, head)
        Lh, Dh = grid.query_rows(L, head), grid.query_rows(D, head)
        dQh = grid.query_rows(dQ, head)
        rows = uint32(Qh.shape[0])
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = visits.columns_seen(i0, head)

        load.rows(sQ, Qh, i0, head.Nq)
        load.value_rows(sdO, dOh, i0, head.Nq)
        values.read(rL, Lh, i0, head.Nq, thread)
        values.read(rD, Dh, i0, head.Nq, thread)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sK and sV any more
            load.columns(sK, Kh, j0, head.Nk)
            load.value_columns(sV, Vh, j0, head.Nk)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there; nobody reads sdS any more
            tile = Tile(i0, j0, head, thread)
            products.scores(rS, sQ, sK, thread)
            scores.slopes(rG, rS, scale_log2, tile)
            scores.scale_and_mask(rS, scale_log2, tile)
            softmax.from_lse(rS, scale_log2, rL)
            softmax.drop(rS, tile)
            products.value_scores(rdP, sdO, sV, thread)
            gradients.of_scores(rdP, rS, rD, rG, tile)
            products.store_ds(sdS, rdP, thread)
            cuda.syncthreads()  # dSij is there
            products.output(rT, sdS, sK, thread)
            for e in range(RQ):
                rdQ[e] += scale * rT[e]
            j0 = visits.next_column(uint32(j0 + Bc), j_end, i0, head)
        commit_async()
        wait_async()
        epilogue.write_rows(rdQ, dQh, i0, rows, thread)

    return fa2_backward_dq


__doc__ = f"""{__doc__ or ""}
Shared memory, floats:  2 (Br + Bc) d + 2 Br Bc, swizzled

Accesses, elements per head:
    this kernel           loads 2 Nk d + Tc (2 Nq d + 2 Nq), stores 2 Nk d
    its adds to dQ        Tc Nq d atomic adds, each of which counts as a load and a store
    the kernel of D       loads 2 Nq d, stores Nq, and Nq d for dQ = 0
    a separate dQ kernel  loads 2 Nq d + 2 Nq + 2 Tr Nk d, stores Nq d; it replaces the adds

With a causal mask, only the row tiles count that see column tile j.
"""
