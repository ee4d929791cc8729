"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on CUDA cores.

One thread block takes one (batch, K/V head): both loops run inside it. P is recomputed from the
saved statistics, D in every pass, and dQ passes through global memory in every pass over K/V.
L = m + log l stands for l and m, as in the released code. Query splits, memory and accesses: below
the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.simt import parts


@cache
def make_backward(spec):
    """The kernel for ``spec``; launched over (query splits, Hk, B) blocks."""
    p, Bc = parts(spec), spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RK, RG = spec.column_registers, spec.cap_registers
    NQ, NK, NP = spec.tile_floats
    AT_DO, AT_K, AT_V, AT_P, AT_DS = NQ, 2 * NQ, 2 * NQ + NK, 2 * NQ + 2 * NK, 2 * NQ + 2 * NK + NP

    def fa1_backward(Q, K, V, O, dO, L, dQ, dK, dV, scale, scale_log2, group, split_rows, options):
        sQ = shared_tile(0, NQ)
        sdO = shared_tile(AT_DO, NQ)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NK)
        sP = shared_tile(AT_P, NP)
        sdS = shared_tile(AT_DS, NP)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rdQ = cuda.local.array(RQ, float32)
        rdK = cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        tx, ty = p.thread()
        b, hk = p.key_head()
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        dKh, dVh = p.key_rows(dK, b, hk, options), p.key_rows(dV, b, hk, options)
        columns = uint32(Kh.shape[0])
        h_first, heads = p.query_heads(hk, group)
        rows = uint32(p.query_rows(Q, b, h_first, options).shape[0])
        Nq, Nk = p.lengths(rows, columns, b, options)

        # Alg. 4 line 5: dQ = 0, of this block's rows, whole tiles
        i_begin = uint32(cuda.blockIdx.x * split_rows)
        i_last = uint32(min(rows, uint32(i_begin + split_rows)))
        p.initialise_dq(rdQ, dQ, b, h_first, heads, i_begin, i_last, options, ty, tx)

        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0, j_end = uint32(0), p.passes(columns)
        while j0 < j_end:
            i_first, i_end = p.rows_of_pass(j0, i_begin, min(i_last, Nq), Nq, Nk, options)
            cuda.syncthreads()  # nobody reads sK and sV any more
            # FA-1 line 7, FA-2 line 6: load Kj, Vj
            p.load_columns(sK, Kh, j0, Nk)
            p.load_columns(sV, Vh, j0, Nk)
            # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
            p.start_columns(rdK, rdV)
            # The query heads that share this K/V head
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                Qh, Oh = p.query_rows(Q, b, h, options), p.query_rows(O, b, h, options)
                dOh, Lh = p.query_rows(dO, b, h, options), p.query_rows(L, b, h, options)
                dQh = p.query_rows(dQ, b, h, options)
                i0 = p.next_row(i_first, i_end, j0, b, h, options)
                if i0 < i_end:
                    p.load_rows(sQ, Qh, i0, Nq)
                    p.load_rows(sdO, dOh, i0, Nq)
                commit_async()
                # FA-1 line 9, FA-2 line 8: for each row tile i that sees column tile j
                while i0 < i_end:
                    wait_async()
                    cuda.syncthreads()  # Qi and dOi are there; nobody reads sdS any more
                    # Alg. 4 lines 10, 19: li and mi as Li; Di = rowsum(dOi o Oi), in every pass
                    p.read_values(rL, Lh, i0, Nq, ty, tx)
                    p.row_dots(rD, sdO, Oh, i0, Nq, ty, tx)
                    # FA-1 lines 11, 12, FA-2 line 10: Sij = scale Qi KjT
                    p.scores(rS, sQ, sK, ty, tx)
                    p.cap_slopes(rG, rS, scale_log2, options)
                    p.scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
                    p.softmax_from_lse(rS, scale_log2, rL)
                    # FA-1 lines 14, 15: Pij without what is dropped
                    p.drop(rS, i0, j0, b, h, options, ty, tx)
                    p.store_p(sP, rS, options, ty, tx)
                    # FA-1 line 17, FA-2 line 13: dPij = dOi VjT
                    p.scores(rdP, sdO, sV, ty, tx)
                    # FA-1 lines 18, 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                    p.score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    p.store_ds(sdS, rdP, ty, tx)
                    cuda.syncthreads()  # Pij and dSij are there
                    # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                    p.add_transposed_product(rdV, sP, sdO, ty, tx)
                    # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                    p.add_transposed_product(rdK, sdS, sQ, ty, tx)
                    cuda.syncthreads()  # nobody reads sQ and sdO any more
                    # FA-1 line 10, FA-2 line 9 of the next i: load Qi+1, dOi+1, in flight meanwhile
                    i_next = p.load_next_rows(sQ, sdO, Qh, dOh, i0, i_end, Nq, j0, b, h, options)
                    commit_async()
                    # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                    p.product(rdQ, sdS, sK, ty, tx)
                    p.update_rows(rdQ, dQh, scale, j0 > uint32(0), i0, Nq, ty, tx)
                    i0 = i_next
                g = uint32(g + 1)
            wait_async()

            # FA-1 line 24, FA-2 line 18: write dKj, dVj
            p.scale_columns(rdK, scale)
            p.write_columns(rdK, dKh, j0, columns, ty, tx)
            p.write_columns(rdV, dVh, j0, columns, ty, tx)
            j0 = uint32(j0 + Bc)

    arrays = [*[array_type(4)] * 5, array_type(3), *[array_type(4)] * 3]
    scalars = (types.float32, types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
With query splits several blocks share a head, each with its own rows of Q, and add to dK and dV,
which are 0 before, by atomic adds, in no fixed order.

Shared memory, floats:  2 (Br + Bc) d + 2 Br Bc, swizzled
Accesses, elements per head:  loads 2 Nk d + Tc (3 Nq d + Nq) + (Tc - 1) Nq d,
    stores 2 Nk d + Tc Nq d; with a causal mask only the row tiles that see column tile j. The
    first pass knows line 5's dQ = 0 and does not read it. Each query split loads K and V and adds
    to dK and dV, Nk d each, an add a load and a store.
"""
