"""FlashAttention-2, backward: K/V outer, Q inner (arXiv 2307.08691, Algorithm 2), on tensor cores.

One thread block computes one column tile: the outer loop (line 5) becomes the grid. dK and dV stay
in registers. P is computed again from L. Thread blocks add dQ to a float32 array ``A`` by atomic
adds, or a second kernel computes dQ in a fixed order. The end of this file has the details.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type, half_type, result_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, mma
from fa_numba.parts.records import Tile


@cache
def make_backward(spec, atomic=True):
    """Return the kernel (grid: Tc, K/V heads, B). If ``atomic``, it adds to A, the sum of dQ."""
    grid, visits, load = bind(spec, mma.grid, mma.visits, mma.load)
    row_tiles, products, scores = bind(spec, mma.row_tiles, mma.products, mma.scores)
    softmax, gradients = bind(spec, mma.softmax, mma.gradients)
    (transposed,) = bind(spec.scores, mma.products)  # ST = K QT, dPT = V dOT
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, 8 * spec.query_fragments * spec.query_chunks
    RG, (RF, RK) = spec.slope_registers, spec.longest_arrays
    Bc, halves, rows = spec.Bc, half_type(4), array_type(3)
    arrays = [*[halves] * 4, rows, rows, array_type(4), *[result_type(spec.planes, 4)] * 2]

    @cuda.jit(arguments(arrays, 2, 1, spec.features.argument_type), *spec.launch)
    def fa2_backward(Q, K, V, dO, L, D, A, dK, dV, scale, scale_log2, group, options):
        sK, sV, sdS, sP, _ = row_tiles.backward_shared_memory()
        rK, rV = cuda.local.array(RF, uint32), cuda.local.array(RF, uint32)
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rG, rdQ = cuda.local.array(RG, float32), cuda.local.array(RQ, float32)
        rdK, rdV = cuda.local.array(RK, float32), cuda.local.array(RK, float32)
        rL, rD = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        rBS = cuda.local.array(1, float32)
        warp, thread = gradients.warp_and_thread()
        first, heads = grid.heads_of_group(Q, K, group, options)
        Kh, Vh = grid.key_rows(K, first), grid.key_rows(V, first)
        dKh, dVh = grid.key_rows(dK, first), grid.key_rows(dV, first)
        columns = uint32(Kh.shape[0])

        stage = uint32(0)  # row tiles are loaded to two in turn
        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0 = uint32(cuda.blockIdx.x * Bc)  # those with most rows, the first ones, go first
        i_first, i_end = visits.row_range(j0, uint32(0), first.Nq, first)
        # FA-1 line 7, FA-2 line 6: load Kj, Vj
        load.columns(sK, Kh, j0, first.Nk)
        load.value_columns(sV, Vh, j0, first.Nk)
        commit_async()
        # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
        gradients.start_columns(rdK, rdV)
        wait_async()
        cuda.syncthreads()  # Kj and Vj are there
        transposed.load_fragments(rK, sK, warp.column)
        transposed.load_value_fragments(rV, sV, warp.column)
        # The query heads that share this K/V head
        g = uint32(0)
        while g < heads:
            head = grid.head_after(first, g)
            Qh, dOh = grid.query_rows(Q, head), grid.query_rows(dO, head)
            Lh, Dh = grid.query_rows(L, head), grid.query_rows(D, head)
            Ah = grid.query_rows(A, head)
            factor = products.score_factor(scale_log2, head)
            i0 = visits.next_row(i_first, i_end, j0, head)
            if i0 < i_end:
                row_tiles.load(stage, Qh, dOh, Lh, Dh, i0, head.Nq)
            commit_async()
            # FA-1 line 9, FA-2 line 8: for each row tile i that sees column tile j
            while i0 < i_end:
                sQ, sdO, sL, sD = row_tiles.at(stage)
                stage = uint32(stage ^ uint32(1))
                tile = Tile(i0, j0, head, thread)
                visit = visits.row_ahead(i0, i_end, j0, head)
                scores.read_bias_or_state(rBS, tile)
                wait_async()
                cuda.syncthreads()  # row tile i is there; nobody reads the last one, sP nor sdS
                # FA-1 line 10, FA-2 line 9 of the next i: load row tile i+1, in flight
                i_next = visits.row_after(visit, i0)
                if i_next < i_end:
                    row_tiles.load(stage, Qh, dOh, Lh, Dh, i_next, head.Nq)
                commit_async()
                # FA-1 lines 11, 12, FA-2 line 10: Sij = scale Qi KjT
                transposed.scores(rS, rK, sK, sQ, warp.column, warp.row)
                scores.slopes(rG, rS, factor, tile)
                scores.scale_bias_and_mask(rS, rBS, factor, tile)
                # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
                row_tiles.take(rL, sL, thread)
                softmax.from_lse(rS, factor, rL)
                # FA-1 lines 14, 15: Pij without what is dropped
                softmax.drop(rS, tile)
                products.store_p(sP, rS, tile)
                # FA-1 line 17, FA-2 line 13: dPij = dOi VjT
                transposed.value_scores(rdP, rV, sV, sdO, warp.column, warp.row)
                # FA-1 lines 18, 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                row_tiles.take(rD, sD, thread)
                gradients.of_scores(rdP, rS, rD, rG, tile)
                products.store_ds(sdS, rdP, tile)
                cuda.syncthreads()  # Pij and dSij are there
                # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                products.add_dv(rdV, rS, sP, sdO, warp.column, warp.chunk, options)
                # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                products.add_dk(rdK, rdP, sdS, sQ, warp.column, warp.chunk, options)
                # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                if atomic:
                    gradients.start_dq(rdQ)
                    products.dq(rdQ, sdS, sK, 0)
                    gradients.add_dq(rdQ, sdS, sK, Ah, i0, head.Nq)
                i0 = i_next
            g = uint32(g + 1)

        # FA-1 line 24, FA-2 line 18: write dKj, dVj
        gradients.scale_columns(rdK, scale)
        own = gradients.column_thread(warp, thread)
        gradients.write_columns(rdK, dKh, j0, columns, own)
        gradients.write_dv(rdV, dVh, j0, columns, own)

    return fa2_backward


@cache
def make_query_gradients(spec):
    """Return the kernel that computes dQ without atomic adds, in a fixed order.

    The grid is (Tr, query heads, batch entries), and Q is the outer loop. The kernel computes S, P,
    dP and dS again. A thread block adds up one row tile of dQ, and stores the tile once. ``spec``
    is the spec of a forward kernel: each warp computes rows of S, and dS in registers is the left
    operand of the product dS K.
    """
    grid, visits, load = bind(spec, mma.grid, mma.visits, mma.load)
    products, scores, softmax = bind(spec, mma.products, mma.scores, mma.softmax)
    values, gradients, epilogue = bind(spec, mma.values, mma.gradients, mma.epilogue)
    (of_values,) = bind(spec.of_values, mma.products)  # dP = dO VT
    Br, Bc = spec.Br, spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RF, RO, RG = spec.q_registers, spec.of_values.q_registers, spec.slope_registers

    halves, rows = half_type(4), array_type(3)
    arrays = [*[halves] * 4, rows, rows, halves]
    types_ = arguments(arrays, 2, 1, spec.features.argument_type)

    @cuda.jit(types_, *spec.launch)
    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        sQ, sdO, sK, sV = load.dq_shared_memory()
        rQ, rdO = cuda.local.array(RF, uint32), cuda.local.array(RO, uint32)
        rS, rdP = cuda.local.array(RS, float32), cuda.local.array(RS, float32)
        rG, rdQ = cuda.local.array(RG, float32), cuda.local.array(RQ, float32)
        rL, rD = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        warp_row, thread = grid.thread()
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
        commit_async()
        values.read(rL, Lh, i0, head.Nq, thread)
        values.read(rD, Dh, i0, head.Nq, thread)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        wait_async()
        cuda.syncthreads()  # Qi and dOi are there
        products.load_fragments(rQ, sQ, warp_row)
        of_values.load_fragments(rdO, sdO, warp_row)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sK and sV any more
            load.columns(sK, Kh, j0, head.Nk)
            load.value_columns(sV, Vh, j0, head.Nk)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there
            tile = Tile(i0, j0, head, thread)
            products.scores(rS, rQ, sQ, sK, warp_row, uint32(0))
            scores.slopes(rG, rS, scale_log2, tile)
            scores.scale_and_mask(rS, scale_log2, tile)
            softmax.from_lse(rS, scale_log2, rL)
            softmax.drop(rS, tile)
            of_values.scores(rdP, rdO, sdO, sV, warp_row, uint32(0))
            gradients.of_scores(rdP, rS, rD, rG, tile)
            products.add_ds(rdQ, rdP, sK, options)
            j0 = visits.next_column(uint32(j0 + Bc), j_end, i0, head)
        for e in range(RQ):
            rdQ[e] *= scale
        epilogue.write_rows(rdQ, dQh, i0, rows, thread)

    return fa2_backward_dq


__doc__ = f"""{__doc__ or ""}
The order of the atomic adds to A is not fixed. A later kernel multiplies A by the scale and rounds
the result to dQ.

A warp computes 16 or 32 columns and all rows of S. S is transposed in registers, so that PT and
dST are operands without a change of layout. Only dST passes through shared memory, for dQ. Above d
= 64, two warps share their columns. Each computes half of the rows of S, and half of the columns of
dK and dV. PT then passes through shared memory too. If a warp's part of dQ does not fit into
registers next to dK and dV, the warp computes it in two turns.

Shared memory, 16-bit elements:  2 (2 Br + Bc) d + U Bc (Br + 8) + 8 Br
    U = 1 up to d = 64, else 2; d is rounded up to a multiple of 16 U
    in bytes at the default tiles:  59904 (d=64, 32 x 128), 168960 (d=128, 64 x 128), 141824
    (d=256, 32 x 64)
    With P planes, all terms but 8 Br are P times as large.

Accesses, elements per head:
    this kernel           loads 2 Nk d + Tc (2 Nq d + 2 Nq), stores 2 Nk d
    its adds to A         Tc Nq d atomic adds, each of which counts as a load and a store
    the kernel of D       loads 2 Nq d, stores Nq, and Nq d for A = 0
    rounding A to dQ      loads Nq d, stores Nq d
    a separate dQ kernel  loads 2 Nq d + 2 Nq + 2 Tr Nk d, stores Nq d; it replaces the adds and
                          the rounding

With a causal mask, only the row tiles count that see column tile j.
"""
