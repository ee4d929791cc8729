"""Standard attention, backward (Algorithm 3 of arXiv 2205.14135), on CUDA cores.

The forward kernels compute P again and store it in global memory. The kernels of this file load P.
dS overwrites dP.

Accesses, elements per head, in addition to the accesses of the scores and softmax kernels:
    dV = PT dO   loads Nq Nk + Tc Nq d, stores Nk d          (line 1)
    dP = dO VT   loads Nq d + Tr Nk d, stores Nq Nk          (line 2, the scores kernel)
    dS           loads 2 Nq Nk, stores Nq Nk                 (line 3)
    dQ = dS K    loads Nq Nk + Tr Nk d, stores Nq d          (line 4, the output kernel)
    dK = dST Q   loads Nq Nk + Tc Nq d, stores Nk d          (line 5, the kernel of dV)

The kernel of dS loads its arrays twice if their rows do not fit into shared memory.
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts import bind, simt
from fa_numba.parts.dropout import keeps
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.namespace import RowFacts


@cache
def make_standard_transposed_output(spec):
    """Return the kernel that computes dV = PT dO, or dK = dST Q.

    The grid is (Tc, K/V heads, B). The kernel adds up the products of all query heads that share a
    K/V head.
    """
    grid, load, products = bind(spec, simt.grid, simt.load, simt.products)
    (epilogue,) = bind(spec, simt.epilogue)
    Br, Bc = spec.Br, spec.Bc
    RK = spec.CM * spec.DN * 4
    NQ, _, NP = spec.tile_floats
    AT_P = NQ

    shortened = spec.features.lengths

    arguments = (*[array_type(4)] * 3, types.int32, spec.features.argument_type)

    @cuda.jit(arguments, spec.threads, 4 * (NQ + NP))
    def standard_transposed_output(P, dO, dV, group, options):
        sdO = shared_tile(0, NQ)
        sP = shared_tile(AT_P, NP)
        rdV = cuda.local.array(RK, float32)
        thread = grid.thread()
        first, heads = grid.heads_of_group(dO, dV, group, options)
        dVh = grid.key_rows(dV, first)
        columns = uint32(dVh.shape[0])
        j0 = uint32(cuda.blockIdx.x * Bc)
        i_end = first.Nq
        if shortened and j0 >= first.Nk:
            i_end = uint32(0)

        for e in range(RK):
            rdV[e] = float32(0.0)
        g = uint32(0)
        while g < heads:
            head = grid.head_after(first, g)
            Ph, dOh = P[head.b, head.h], grid.query_rows(dO, head)
            i0 = uint32(0)
            while i0 < i_end:
                cuda.syncthreads()  # nobody reads sP and sdO any more
                load.p(sP, Ph, i0, first.Nq, j0, first.Nk)
                load.rows(sdO, dOh, i0, first.Nq)
                commit_async()
                wait_async()
                cuda.syncthreads()  # Pij and dOi are there
                products.add_transposed(rdV, sP, sdO, thread)
                i0 = uint32(i0 + Br)
            g = uint32(g + 1)
        epilogue.write_columns(rdV, dVh, j0, columns, thread)

    return standard_transposed_output


@cache
def make_standard_score_gradients(row_floats, warps, features):
    """Return the kernel that replaces dP by dS = scale P o (dP - rowsum(P o dP) + dL).

    The grid is (Nq, query heads, batch entries). If the call computes ``dbias``, the kernel also
    adds dS / scale to ``dbias``. With dropout, the kernel also prepares P for the computation of
    dV: dropped elements become 0, and kept elements are multiplied by 1 / (1 - dropout_p).

    A thread block has ``warps`` warps. The kernel keeps a row of P and a row of dP of up to
    ``row_floats`` elements in shared memory. If ``row_floats`` is 0, it reads the rows from global
    memory twice.
    """
    resident = row_floats > 0
    NR = max(row_floats, 4)
    WARPS, threads = warps, 32 * warps
    AT_DP, AT_D = NR, 2 * NR
    shortened, dropout = features.lengths, features.dropout
    dbias, dlse = features.dbias, features.dlse
    facts = RowFacts(features)
    grid, softmax, gradients = bind(facts, simt.grid, simt.softmax, simt.gradients)

    arguments = (*[array_type(4)] * 3, types.float32, features.argument_type)

    @cuda.jit(arguments, threads, 4 * (2 * NR + WARPS))
    def standard_score_gradients(P, dP, dS, scale, options):
        sP = shared_tile(0, NR)
        sdP = shared_tile(AT_DP, NR)
        sD = shared_tile(AT_D, WARPS)
        head = grid.query_head(P.shape[2], P.shape[3], options)
        b, h, Nk, row = head.b, head.h, head.Nk, uint32(cuda.blockIdx.x)
        Pi, dPi, dSi = P[b, h, row], dP[b, h, row], dS[b, h, row]
        if shortened and row >= head.Nq:
            Nk = uint32(0)
        thread = uint32(cuda.threadIdx.x)

        dot = float32(0.0)
        col = thread
        while col < Nk:
            pij = Pi[col]
            g = dPi[col]
            if dropout:
                g = g * options.inverse_keep
                if not keeps(row, col, head):
                    pij = -pij
                    g = float32(0.0)
            if resident:
                sP[col] = pij
                sdP[col] = g
            dot += abs(pij) * g
            col = uint32(col + threads)
        dot = sum_of_lanes(dot, 32, 1)
        if dlse and thread == uint32(0) and row < head.Nq:
            dot = gradients.row_less_dlse(dot, head, row)
        if thread % uint32(32) == uint32(0):
            sD[thread // uint32(32)] = dot
        cuda.syncthreads()
        D = float32(0.0)
        for w in range(WARPS):
            D += sD[w]

        col = thread
        while col < Nk:
            pij = sP[col] if resident else Pi[col]
            g = sdP[col] if resident else dPi[col]
            if dropout and not resident:
                g = g * options.inverse_keep
                if not keeps(row, col, head):
                    pij = -pij
                    g = float32(0.0)
            ds = abs(pij) * (g - D)
            if dbias:
                add_global(options.dbias[b, h], row, col, ds)
            dSi[col] = scale * ds
            if dropout:
                Pi[col] = softmax.kept(pij, options)
            col = uint32(col + threads)

    return standard_score_gradients
