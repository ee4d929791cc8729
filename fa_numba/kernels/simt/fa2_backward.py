"""FlashAttention-2, backward: a grid over K/V blocks, Q inner (arXiv 2307.08691, Algorithm 2), on
CUDA cores.

One thread block takes one column tile Kj, Vj: the outer loop (line 5) is the grid. dK and dV stay
in registers; P is recomputed from L alone. dQ is summed in global memory by atomic adds, in no
fixed order, or by a second sweep with Q outer, in one order. Memory and accesses: at the end.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.namespace import RowFacts
from fa_numba.parts.simt import parts
from fa_numba.parts.softmax import FULL_WARP


@cache
def make_backward(spec, atomic=True):
    """The kernel for ``spec``; launched over (Tc, Hk, B) blocks.

    Without ``atomic`` it leaves dQ to ``make_query_gradients``.
    """
    p, Bc = parts(spec), spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RK, RG = spec.column_registers, spec.cap_registers
    NQ, NK, NP = spec.tile_floats
    AT_DO, AT_K, AT_V, AT_P, AT_DS = NQ, 2 * NQ, 2 * NQ + NK, 2 * NQ + 2 * NK, 2 * NQ + 2 * NK + NP

    def fa2_backward(Q, K, V, dO, L, D, dQ, dK, dV, scale, scale_log2, group, options):
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

        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0 = uint32(cuda.blockIdx.x * Bc)  # those with most rows, the first ones, go first
        i_first, i_end = p.row_range(j0, uint32(0), Nq, Nq, Nk, options)
        # FA-1 line 7, FA-2 line 6: load Kj, Vj
        p.load_columns(sK, Kh, j0, Nk)
        p.load_columns(sV, Vh, j0, Nk)
        # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
        p.start_columns(rdK, rdV)
        # The query heads that share this K/V head
        g = uint32(0)
        while g < heads:
            h = uint32(h_first + g)
            Qh, dOh = p.query_rows(Q, b, h, options), p.query_rows(dO, b, h, options)
            Lh, Dh = p.query_rows(L, b, h, options), p.query_rows(D, b, h, options)
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
                # Alg. 2 line 9: Li, Di
                p.read_values(rL, Lh, i0, Nq, ty, tx)
                p.read_values(rD, Dh, i0, Nq, ty, tx)
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
                if atomic:
                    p.product(rdQ, sdS, sK, ty, tx)
                    p.add_rows(rdQ, dQh, scale, i0, Nq, ty, tx)
                i0 = i_next
            g = uint32(g + 1)
        wait_async()

        # FA-1 line 24, FA-2 line 18: write dKj, dVj
        p.scale_columns(rdK, scale)
        p.write_columns(rdK, dKh, j0, columns, ty, tx)
        p.write_columns(rdV, dVh, j0, columns, ty, tx)

    arrays = [*[array_type(4)] * 4, *[array_type(3)] * 2, *[array_type(4)] * 3]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


WARPS = 4


@cache
def make_row_sums(head_dim, clear, features):
    """Alg. 2 line 4: D = rowsum(dO o O); line 3 if ``clear``: dQ = 0. Over (Nq / 4, Hq, B) blocks.

    A warp takes a row.
    """
    p = parts(RowFacts(features))

    def row_sums(O, dO, D, dQ, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Oh, dOh = p.query_rows(O, b, h, options), p.query_rows(dO, b, h, options)
        Dh, dQh = p.query_rows(D, b, h, options), p.query_rows(dQ, b, h, options)
        rows = uint32(Oh.shape[0])
        Nq, _ = p.lengths(rows, 0, b, options)
        dot = float32(0.0)
        col = lane
        if row < Nq:
            Oi, dOi = Oh[row], dOh[row]
            while col < uint32(head_dim):
                dot += Oi[col] * dOi[col]
                col = uint32(col + 32)
        if clear and row < rows:
            col = lane
            while col < uint32(head_dim):
                dQh[row, col] = float32(0.0)
                col = uint32(col + 32)
        step = 16
        while step > 0:
            dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)
            step //= 2
        if lane == uint32(0) and row < Nq:
            Dh[row] = dot

    arrays = (array_type(4), array_type(4), array_type(3), array_type(4))
    arguments = (*arrays, features.argument_type)
    return Kernel(row_sums, arguments, 32 * WARPS, 0)


@cache
def make_query_gradients(spec):
    """dQ without atomic adds: a second sweep, Q outer; launched over (Tr, Hq, B) blocks.

    S, P, dP and dS are computed once more, and every dQi is summed in one order and written once.
    """
    p, Br, Bc = parts(spec), spec.Br, spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RG = spec.cap_registers
    NQ, NK, NP = spec.tile_floats
    AT_DO, AT_K, AT_V, AT_DS = NQ, 2 * NQ, 2 * NQ + NK, 2 * NQ + 2 * NK

    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        sQ = shared_tile(0, NQ)
        sdO = shared_tile(AT_DO, NQ)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NK)
        sdS = shared_tile(AT_DS, NP)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rT = cuda.local.array(RQ, float32)
        rdQ = cuda.local.array(RQ, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        tx, ty = p.thread()
        b, h, hk = p.heads(group)
        Qh, dOh = p.query_rows(Q, b, h, options), p.query_rows(dO, b, h, options)
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        Lh, Dh = p.query_rows(L, b, h, options), p.query_rows(D, b, h, options)
        dQh = p.query_rows(dQ, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = p.lengths(rows, Kh.shape[0], b, options)
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = p.visited_columns(i0, Nq, Nk, b, h, options)

        p.load_rows(sQ, Qh, i0, Nq)
        p.load_rows(sdO, dOh, i0, Nq)
        p.read_values(rL, Lh, i0, Nq, ty, tx)
        p.read_values(rD, Dh, i0, Nq, ty, tx)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sK and sV any more
            p.load_columns(sK, Kh, j0, Nk)
            p.load_columns(sV, Vh, j0, Nk)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there; nobody reads sdS any more
            p.scores(rS, sQ, sK, ty, tx)
            p.cap_slopes(rG, rS, scale_log2, options)
            p.scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
            p.softmax_from_lse(rS, scale_log2, rL)
            p.drop(rS, i0, j0, b, h, options, ty, tx)
            p.scores(rdP, sdO, sV, ty, tx)
            p.score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
            p.store_ds(sdS, rdP, ty, tx)
            cuda.syncthreads()  # dSij is there
            p.product(rT, sdS, sK, ty, tx)
            for e in range(RQ):
                rdQ[e] += scale * rT[e]
            j0 = p.next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
        commit_async()
        wait_async()
        p.write_rows(rdQ, dQh, i0, rows, ty, tx)

    arrays = [*[array_type(4)] * 4, *[array_type(3)] * 2, array_type(4)]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    shared_bytes = 4 * (2 * NQ + 2 * NK + NP)
    return Kernel(fa2_backward_dq, arguments, spec.threads, shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, floats:  2 (Br + Bc) d + 2 Br Bc, swizzled
Accesses, elements per head:  loads 2 Nk d + Tc (2 Nq d + 2 Nq), stores 2 Nk d, and Tc Nq d atomic
    adds to dQ, each a load and a store; with a causal mask only the row tiles that see column
    tile j. The row sums D take 2 Nq d loads before, and Nq + Nq d stores with dQ = 0. The second
    sweep takes the place of the adds: loads 2 Nq d + 2 Nq + 2 Tr Nk d, stores Nq d.
"""
