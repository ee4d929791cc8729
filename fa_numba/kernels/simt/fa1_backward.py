"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on CUDA cores.

One thread block computes one (batch entry, K/V head): both loops run inside it. P is computed again
from the saved L = m + log l, which replaces l and m as in the released code. Each step of the outer
loop computes D again, and loads and stores dQ in global memory. The end of this file explains query
splits, shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, simt
from fa_numba.parts.records import Tile


@cache
def make_backward(spec):
    """Return the kernel for ``spec``. The grid is (query splits, K/V heads, batch entries)."""
    grid, visits, load = bind(spec, simt.grid, simt.visits, simt.load)
    products, scores, softmax = bind(spec, simt.products, simt.scores, simt.softmax)
    values, gradients, epilogue = bind(spec, simt.values, simt.gradients, simt.epilogue)
    Bc = spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RK, RG, RV = spec.column_registers, spec.slope_registers, spec.of_values.column_registers

    arrays = [*[array_type(4)] * 5, array_type(3), *[array_type(4)] * 3]

    @cuda.jit(arguments(arrays, 2, 2, spec.features.argument_type), *spec.launch)
    def fa1_backward(Q, K, V, O, dO, L, dQ, dK, dV, scale, scale_log2, group, split_rows, options):
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
        rows = uint32(grid.query_rows(Q, first).shape[0])

        # Alg. 4 line 5: dQ = 0, of this block's rows, whole tiles
        i_begin = uint32(cuda.blockIdx.x * split_rows)
        i_last = uint32(min(rows, uint32(i_begin + split_rows)))
        gradients.initialise_dq(rdQ, dQ, first, heads, i_begin, i_last, thread)

        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0, j_end = uint32(0), visits.backward_passes(columns)
        while j0 < j_end:
            i_first, i_end = visits.rows_of_pass(j0, i_begin, min(i_last, first.Nq), first)
            cuda.syncthreads()  # nobody reads sK and sV any more
            # FA-1 line 7, FA-2 line 6: load Kj, Vj
            load.columns(sK, Kh, j0, first.Nk)
            load.value_columns(sV, Vh, j0, first.Nk)
            # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
            gradients.start_columns(rdK, rdV)
            # The query heads that share this K/V head
            g = uint32(0)
            while g < heads:
                head = grid.head_after(first, g)
                Qh, Oh = grid.query_rows(Q, head), grid.query_rows(O, head)
                dOh, Lh = grid.query_rows(dO, head), grid.query_rows(L, head)
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
                    # Alg. 4 lines 10, 19: li and mi as Li; Di = rowsum(dOi o Oi), in every pass
                    values.read(rL, Lh, i0, head.Nq, thread)
                    gradients.row_dots(rD, rL, sdO, Oh, tile)
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
                    products.output(rdQ, sdS, sK, thread)
                    gradients.update_rows(rdQ, dQh, scale, visit, tile, head.Nq)
                    i0 = i_next
                g = uint32(g + 1)
            wait_async()

            # FA-1 line 24, FA-2 line 18: write dKj, dVj
            gradients.scale_columns(rdK, scale)
            epilogue.write_columns(rdK, dKh, j0, columns, thread)
            epilogue.write_dv(rdV, dVh, j0, columns, thread)
            j0 = uint32(j0 + Bc)

    return fa1_backward


__doc__ = f"""{__doc__ or ""}
With query splits, several blocks share a head, and each has its own rows of Q. They add to dK
and dV atomically, in no fixed order. dK and dV must be 0 before.

Shared memory, floats:  2 (Br + Bc) d + 2 Br Bc, swizzled

Accesses, elements per head:
    loads   2 Nk d + Tc (3 Nq d + Nq) + (Tc - 1) Nq d
    stores  2 Nk d + Tc Nq d

With a causal mask, a pass visits only the row tiles that see column tile j. Each query split loads
K and V, and adds Nk d elements to dK and as many to dV. An atomic add counts as a load and a store.
Line 5 of the algorithm sets dQ = 0:

    case              where line 5 is carried out
    normally          in the first pass, which visits all row tiles and does not read dQ
    window, q_lens    before the passes, with Nq d stores; all passes read dQ
    block mask        in the first visit of each row tile, which does not read dQ, and before the
                      passes in row tiles that no column tile visits
"""
