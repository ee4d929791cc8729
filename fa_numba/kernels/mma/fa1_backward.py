"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on tensor cores.

One thread block takes one (batch, K/V head): both loops run inside it. P is recomputed from L (l
and m in one), D in every pass, and dQ passes through global memory in every pass: in float32
(``A``) until the last one rounds it. Query splits, shared memory, accesses: below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.mma import parts
from fa_numba.parts.mma.backward import places


@cache
def make_backward(spec):
    """The kernel for ``spec``; launched over (query splits, Hk, B) blocks."""
    p, Br, Bc, (_, NK, NS) = parts(spec), spec.Br, spec.Bc, spec.tile_halves
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, 8 * spec.query_fragments * spec.query_chunks
    RG, RF, RK = spec.cap_registers, spec.scores.q_registers, spec.column_registers
    U, ROWS, COLUMNS, WIDTH = spec.warp_parts
    AT_V, AT_DS, AT_P = NK, 2 * NK, 2 * NK + (U - 1) * NS
    AT_D, EARLY = places(spec)[1] + 2 * Br, U > 1

    def fa1_backward(
        Q, K, V, O, dO, L, A, dQ, dK, dV, scale, scale_log2, group, split_rows, options
    ):
        sK = half_tile(0, NK)
        sV = half_tile(AT_V, NK)
        sdS = half_tile(AT_DS, NS)
        sP = half_tile(AT_P, NS)
        sD = shared_tile(AT_D, Br)
        rK = cuda.local.array(RF, uint32)
        rV = cuda.local.array(RF, uint32)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rdQ = cuda.local.array(RQ, float32)
        rdK = cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        warp, lane = uint32(cuda.threadIdx.x) // uint32(32), uint32(cuda.threadIdx.x) % uint32(32)
        warp_row = uint32(warp % uint32(U) * ROWS)
        warp_column = uint32(warp // uint32(U) * COLUMNS)
        warp_chunk = uint32(warp % uint32(U) * WIDTH)  # of dK and dV
        ty = uint32(warp_row // uint32(2) + lane % uint32(4))
        tx = uint32(warp_column + lane // uint32(4))
        b, hk = p.key_head()
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        dKh, dVh = p.key_rows(dK, b, hk, options), p.key_rows(dV, b, hk, options)
        h_first, heads = p.query_heads(hk, group)
        columns, rows = uint32(Kh.shape[0]), uint32(p.query_rows(Q, b, h_first, options).shape[0])
        Nq, Nk = p.lengths(rows, columns, b, options)

        # Alg. 4 line 5: dQ = 0
        i_begin = uint32(cuda.blockIdx.x * split_rows)
        i_last = uint32(min(rows, uint32(i_begin + split_rows)))
        i_stop = uint32(min(i_last, Nq))
        p.initialise_dq(rdQ, A, dQ, scale, b, h_first, heads, i_begin, i_last, options)

        # Row tiles are loaded to two stages in turn
        stage = uint32(0)
        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0, j_end = uint32(0), p.passes(columns)
        while j0 < j_end:
            i_first, i_end = p.rows_of_pass(j0, i_begin, i_stop, Nq, Nk, options)
            cuda.syncthreads()  # nobody reads sK and sV any more, nor row tiles
            # FA-1 line 7, FA-2 line 6: load Kj, Vj
            p.load_columns(sK, Kh, j0, Nk)
            p.load_columns(sV, Vh, j0, Nk)
            commit_async()
            # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
            p.start_columns(rdK, rdV)
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there
            p.load_fragments(rK, sK, warp_column)
            p.load_fragments(rV, sV, warp_column)
            # The query heads that share this K/V head
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                Qh, Oh = p.query_rows(Q, b, h, options), p.query_rows(O, b, h, options)
                dOh, Lh = p.query_rows(dO, b, h, options), p.query_rows(L, b, h, options)
                Ah, dQh = p.query_rows(A, b, h, options), p.query_rows(dQ, b, h, options)
                i0 = p.next_row(i_first, i_end, j0, b, h, options)
                if i0 < i_end:
                    p.load_row_tile_with_o(stage, Qh, dOh, Oh, Lh, i0, i_stop)
                commit_async()
                # FA-1 line 9, FA-2 line 8: for each row tile i that sees column tile j
                while i0 < i_end:
                    sQ, sdO, sO, sL = p.row_tile_with_o(stage)
                    stage = uint32(stage ^ uint32(1))
                    wait_async()
                    cuda.syncthreads()  # row tile i is there; nobody reads the last one, sP nor sdS
                    # FA-1 line 10, FA-2 line 9 of the next i: load row tile i+1, in flight
                    if EARLY:  # a warp with all rows of S would spill registers
                        i_next = p.load_next_with_o(
                            stage, Qh, dOh, Oh, Lh, i0, i_end, i_stop, j0, b, h, options
                        )
                        commit_async()
                    # Alg. 4 line 19: Di = rowsum(dOi o Oi), in every pass
                    p.row_dots(sD, sdO, sO)
                    # FA-1 lines 11, 12, FA-2 line 10: Sij = scale Qi KjT
                    p.scores(rS, rK, sK, sQ, warp_column, warp_row)
                    p.cap_slopes(rG, rS, scale_log2, options)
                    p.scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
                    p.take_values(rL, sL, ty)
                    p.softmax_from_lse(rS, scale_log2, rL)
                    # FA-1 lines 14, 15: Pij without what is dropped
                    p.drop(rS, i0, j0, b, h, options, ty, tx)
                    p.store_p(sP, rS, options, ty, tx)
                    # FA-1 line 17, FA-2 line 13: dPij = dOi VjT
                    p.scores(rdP, rV, sV, sdO, warp_column, warp_row)
                    cuda.syncthreads()  # Di is there
                    # FA-1 lines 18, 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                    p.take_values(rD, sD, ty)
                    p.score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    p.store_ds(sdS, rdP, options, ty, tx)
                    # ... or in flight during lines 16, 22 and 21
                    if not EARLY:
                        i_next = p.load_next_with_o(
                            stage, Qh, dOh, Oh, Lh, i0, i_end, i_stop, j0, b, h, options
                        )
                        commit_async()
                    cuda.syncthreads()  # Pij and dSij are there
                    # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                    p.add_dv_product(rdV, rS, sP, sdO, warp_column, warp_chunk, options)
                    # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                    p.add_dk_product(rdK, rdP, sdS, sQ, warp_column, warp_chunk, options)
                    # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                    p.read_dq(rdQ, Ah, j0, i0, i_stop)
                    p.add_dq_product(rdQ, sdS, sK)
                    more = p.sees_more(i0, j0, Nq, Nk, b, h, options)
                    p.write_dq(rdQ, Ah, dQh, scale, more, i0, i_stop)
                    i0 = i_next
                g = uint32(g + 1)

            # FA-1 line 24, FA-2 line 18: write dKj, dVj
            p.scale_columns(rdK, scale)
            t = uint32(warp_chunk // uint32(2) + lane % uint32(4))
            p.write_columns(rdK, dKh, j0, columns, tx, t)
            p.write_columns(rdV, dVh, j0, columns, tx, t)
            j0 = uint32(j0 + Bc)

    halves, floats = array_type(4, types.uint16), array_type(4)
    columns_type = floats if spec.splits_queries else halves
    arrays = [*[halves] * 5, array_type(3), floats, halves, columns_type, columns_type]
    scalars = (types.float32, types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Warps share a tile as in FlashAttention-2's backward pass. With query splits several blocks share a
head, each with its own rows of Q, and sum dK and dV in float32 by atomic adds, in no fixed order; a
kernel of its own rounds them.

Shared memory, 16-bit elements:  2 (3 Br + Bc) d + U Bc (Br + 8) + 8 Br
    U = 1 up to d = 64, else 2; d rounded up to a multiple of 16 U
    in bytes at the default tiles:  111104 (d=64, 32 x 256), 201728 (d=128, 64 x 128), 174592
    (d=256, 32 x 64)
Accesses, elements per head:  loads 2 Nk d + Tc (3 Nq d + Nq) + (Tc - 1) Nq d,
    stores 2 Nk d + Tc Nq d; with a causal mask only the row tiles that see column tile j. The
    first pass knows line 5's dQ = 0 and does not read it. Each query split loads K and V and adds
    to dK and dV, Nk d each, and rounding these takes 2 Nk d loads and as many stores.
"""
