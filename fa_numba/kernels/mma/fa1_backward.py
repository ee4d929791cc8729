"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on tensor cores.

One thread block computes one (batch entry, K/V head): both loops run inside it. Each step of the
outer loop computes D again, and loads and stores dQ. The end of this file has the details.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type, half_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, mma
from fa_numba.parts.records import Tile


@cache
def make_backward(spec):
    """Return the kernel for ``spec``. The grid is (query splits, K/V heads, batch entries)."""
    grid, visits, load = bind(spec, mma.grid, mma.visits, mma.load)
    row_tiles, products, scores = bind(spec, mma.row_tiles, mma.products, mma.scores)
    softmax, gradients = bind(spec, mma.softmax, mma.gradients)
    (transposed,) = bind(spec.scores, mma.products)  # ST = K QT, dPT = V dOT
    Bc, halves, floats = spec.Bc, half_type(4), array_type(4)
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, 8 * spec.query_fragments * spec.query_chunks
    RG, (RF, RK) = spec.slope_registers, spec.longest_arrays
    EARLY, keys = spec.row_warps > 1, floats if spec.splits_queries else halves
    arrays = [*[halves] * 5, array_type(3), floats, halves, keys, keys]

    @cuda.jit(arguments(arrays, 2, 2, spec.features.argument_type), *spec.launch)
    def fa1_backward(
        Q, K, V, O, dO, L, A, dQ, dK, dV, scale, scale_log2, group, split_rows, options
    ):
        sK, sV, sdS, sP, sD = row_tiles.backward_shared_memory()
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
        columns, rows = uint32(Kh.shape[0]), uint32(grid.query_rows(Q, first).shape[0])
        # Alg. 4 line 5: dQ = 0
        i_begin = uint32(cuda.blockIdx.x * split_rows)
        i_last = uint32(min(rows, uint32(i_begin + split_rows)))
        i_stop = uint32(min(i_last, first.Nq))
        gradients.initialise_dq(rdQ, A, dQ, scale, first, heads, i_begin, i_last)

        stage = uint32(0)  # row tiles are loaded to two in turn
        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0, j_end = uint32(0), visits.backward_passes(columns)
        while j0 < j_end:
            i_first, i_end = visits.rows_of_pass(j0, i_begin, i_stop, first)
            cuda.syncthreads()  # nobody reads sK and sV any more, nor row tiles
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
                Qh, Oh = grid.query_rows(Q, head), grid.query_rows(O, head)
                dOh, Lh = grid.query_rows(dO, head), grid.query_rows(L, head)
                Ah, dQh = grid.query_rows(A, head), grid.query_rows(dQ, head)
                factor = products.score_factor(scale_log2, head)
                i0 = visits.next_row(i_first, i_end, j0, head)
                if i0 < i_end:
                    row_tiles.load_with_o(stage, Qh, dOh, Oh, Lh, i0, i_stop)
                commit_async()
                visit = visits.row_ahead(i0, i_end, j0, head)
                # FA-1 line 9, FA-2 line 8: for each row tile i that sees column tile j
                while i0 < i_end:
                    sQ, sdO, sO, sL = row_tiles.at_with_o(stage)
                    stage = uint32(stage ^ uint32(1))
                    tile = Tile(i0, j0, head, thread)
                    if EARLY:
                        visit = visits.row_ahead(i0, i_end, j0, head)
                    scores.read_bias_or_state(rBS, tile)
                    wait_async()
                    cuda.syncthreads()  # row tile i is there; nobody reads the last one, sP nor sdS
                    # FA-1 line 10, FA-2 line 9 of the next i: load row tile i+1, in flight
                    if EARLY:  # a warp with all rows of S would spill registers
                        i_next = visits.row_after(visit, i0)
                        if i_next < i_end:
                            row_tiles.load_with_o(stage, Qh, dOh, Oh, Lh, i_next, i_stop)
                        commit_async()
                    # Alg. 4 line 19: Di = rowsum(dOi o Oi), in every pass
                    gradients.row_dots(sD, sL, sdO, sO, tile)
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
                    cuda.syncthreads()  # Di is there
                    # FA-1 lines 18, 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                    row_tiles.take(rD, sD, thread)
                    gradients.of_scores(rdP, rS, rD, rG, tile)
                    products.store_ds(sdS, rdP, tile)
                    # ... or in flight during lines 16, 22 and 21
                    if not EARLY:
                        i_next = visits.row_after(visit, i0)
                        if i_next < i_end:
                            row_tiles.load_with_o(stage, Qh, dOh, Oh, Lh, i_next, i_stop)
                        commit_async()
                        visit_next = visits.row_ahead(i_next, i_end, j0, head)
                    cuda.syncthreads()  # Pij and dSij are there
                    # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                    products.add_dv(rdV, rS, sP, sdO, warp.column, warp.chunk, options)
                    # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                    products.add_dk(rdK, rdP, sdS, sQ, warp.column, warp.chunk, options)
                    # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                    gradients.read_dq(rdQ, Ah, visit, tile, i_stop, 0)
                    products.dq(rdQ, sdS, sK, 0)
                    gradients.write_dq(rdQ, (sdS, sK), (Ah, dQh), scale, visit, tile, i_stop)
                    if not EARLY:
                        visit = visit_next
                    i0 = i_next
                g = uint32(g + 1)

            # FA-1 line 24, FA-2 line 18: write dKj, dVj
            gradients.scale_columns(rdK, scale)
            own = gradients.column_thread(warp, thread)
            gradients.write_columns(rdK, dKh, j0, columns, own)
            gradients.write_dv(rdV, dVh, j0, columns, own)
            j0 = uint32(j0 + Bc)

    return fa1_backward


__doc__ = f"""{__doc__ or ""}
dQ is stored in the float32 array A until the last step of a row tile rounds it. P is computed again
from L = m + log l, which replaces l and m. The warps share a tile as in FlashAttention-2's backward
pass. With query splits, several thread blocks share a head, and each has its own rows of Q. They
add dK and dV in float32 atomically, in no fixed order, and a separate kernel rounds the sums.

Shared memory, 16-bit elements:  2 (3 Br + Bc) d + U Bc (Br + 8) + 8 Br
    U = 1 up to d = 64, else 2; d is rounded up to a multiple of 16 U
    in bytes at the default tiles:  111104 (d=64, 32 x 256), 201728 (d=128, 64 x 128), 174592
    (d=256, 32 x 64)

Accesses, elements per head:
    loads   2 Nk d + Tc (3 Nq d + Nq) + (Tc - 1) Nq d
    stores  2 Nk d + Tc Nq d

With a causal mask, a pass visits only the row tiles that see column tile j. Each query split loads
K and V, and adds Nk d elements to dK and as many to dV. Rounding these sums takes 2 Nk d loads and
2 Nk d stores. Line 5 of the algorithm sets dQ = 0:

    case              where line 5 is carried out
    normally          in the first pass, which visits all row tiles and does not read dQ
    window, q_lens    before the passes, in A and in dQ, with 2 Nq d stores; all passes read A
    block mask        in the first visit of each row tile, which does not read A, and before the
                      passes, only in dQ, in row tiles that no column tile visits
"""
