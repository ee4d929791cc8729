"""Standard attention, backward (Algorithm 3 of arXiv 2205.14135), on tensor cores.

The forward kernels compute P again and store it in global memory. The kernels of this file load P.
dS overwrites dP. P, dP, dS and the gradients are in 16 bits. Sums are in float32.

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
from fa_numba.device.signature import half_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts import bind, mma
from fa_numba.parts.dropout import keeps
from fa_numba.parts.lanes import sum_of_lanes
from fa_numba.parts.mma.chunks import make_load_row, make_read_chunk, make_write_chunk
from fa_numba.parts.namespace import RowFacts


@cache
def make_standard_transposed_output(spec):
    """Return the kernel that computes dV = PT dO, or dK = dST Q.

    The grid is (Tc, K/V heads, B). The kernel adds up the products of all query heads that share a
    K/V head. ``spec`` describes the transposed tile: a row of the spec is a column of P.
    """
    grid, load, products = bind(spec, mma.grid, mma.load, mma.products)
    (epilogue,) = bind(spec, mma.epilogue)
    Bc, STEP = spec.Br, spec.step
    RK = spec.TM * spec.DN * 4
    NP, NQ = spec.transposed_halves
    TWO_P, TWO_Q, AT_Q = 2 * NP, 2 * NQ, 2 * NP

    shortened = spec.features.lengths

    arguments = (*[half_type(4)] * 3, types.int32, spec.features.argument_type)
    shared_bytes, min_blocks = 4 * (NP + NQ), spec.min_blocks_of_output

    @cuda.jit(arguments, spec.threads, shared_bytes, min_blocks)
    def standard_transposed_output(P, dO, dV, group, options):
        sP = half_tile(0, TWO_P)
        sdO = half_tile(AT_Q, TWO_Q)
        rdV = cuda.local.array(RK, float32)
        warp_row, thread = grid.thread()
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
            cuda.syncthreads()  # nobody reads the head before any more
            load.p_transposed(sP, 0, Ph, 0, i_end, j0, first.Nk)
            load.step(sdO, 0, dOh, 0, i_end)
            commit_async()
            stage = uint32(0)
            i0 = uint32(0)
            while i0 < i_end:
                wait_async()
                cuda.syncthreads()  # Pij and dOi are there; nobody reads the other stage any more
                i_next = uint32(i0 + STEP)
                other = uint32(1 - stage)
                load.p_transposed(sP, uint32(other * NP), Ph, i_next, i_end, j0, first.Nk)
                load.step(sdO, uint32(other * NQ), dOh, i_next, i_end)
                commit_async()
                at_p, at_q = uint32(stage * NP), uint32(stage * NQ)
                products.add_stage_transposed(rdV, sP, at_p, sdO, at_q, warp_row, 0)
                stage = other
                i0 = i_next
            wait_async()
            g = uint32(g + 1)
        epilogue.write_rows(rdV, dVh, j0, columns, thread)

    return standard_transposed_output


@cache
def make_standard_score_gradients(row_halves, warps, features, dtype):
    """Return the kernel that replaces dP by dS = scale P o (dP - rowsum(P o dP) + dL).

    The grid is (Nq, query heads, batch entries). If the call computes ``dbias``, the kernel also
    adds dS / scale to ``dbias``. With dropout, the kernel also prepares P for the computation of
    dV: dropped elements become 0, and kept elements are multiplied by 1 / (1 - dropout_p).

    A thread block has ``warps`` warps. The kernel keeps a row of P and a row of dP of up to
    ``row_halves`` elements in shared memory. If ``row_halves`` is 0, it reads the rows from global
    memory twice.
    """
    resident = row_halves > 0
    NR = max(row_halves, 8)
    WARPS, threads = warps, 32 * warps
    AT_DP, AT_D = NR, NR
    shortened, dropout = features.lengths, features.dropout
    dbias, dlse = features.dbias, features.dlse
    facts = RowFacts(features, dtype=dtype)
    grid, softmax, gradients = bind(facts, mma.grid, mma.softmax, mma.gradients)
    load_row = make_load_row(threads, resident)
    read_chunk = make_read_chunk(dtype, resident)
    write_chunk = make_write_chunk(dtype)

    arguments = (*[half_type(4)] * 3, types.float32, features.argument_type)

    @cuda.jit(arguments, threads, 4 * (NR + WARPS))
    def standard_score_gradients(P, dP, dS, scale, options):
        sP = half_tile(0, NR)
        sdP = half_tile(AT_DP, NR)
        sD = shared_tile(AT_D, WARPS)
        rP, rG = cuda.local.array(8, float32), cuda.local.array(8, float32)
        head = grid.query_head(P.shape[2], P.shape[3], options)
        b, h, Nk, row = head.b, head.h, head.Nk, uint32(cuda.blockIdx.x)
        Ph, dPh, dSh = P[b, h], dP[b, h], dS[b, h]
        if shortened and row >= head.Nq:
            Nk = uint32(0)
        thread = uint32(cuda.threadIdx.x)

        load_row(sP, Ph, row, Nk)
        load_row(sdP, dPh, row, Nk)
        commit_async()
        wait_async()
        dot = float32(0.0)
        col = uint32(8 * thread)
        while col < Nk:
            read_chunk(rP, sP, Ph, row, col, Nk)
            read_chunk(rG, sdP, dPh, row, col, Nk)
            for e in range(8):
                g = rG[e]
                if dropout:
                    g = g * options.inverse_keep
                    if not keeps(row, uint32(col + e), head):
                        g = float32(0.0)
                dot += rP[e] * g
            col = uint32(col + 8 * threads)
        dot = sum_of_lanes(dot, 32, 1)
        if dlse and thread == uint32(0) and row < head.Nq:
            dot = gradients.row_less_dlse(dot, head, row)
        if thread % uint32(32) == uint32(0):
            sD[thread // uint32(32)] = dot
        cuda.syncthreads()
        D = float32(0.0)
        for w in range(WARPS):
            D += sD[w]

        col = uint32(8 * thread)
        while col < Nk:
            read_chunk(rP, sP, Ph, row, col, Nk)
            read_chunk(rG, sdP, dPh, row, col, Nk)
            for e in range(8):
                pij = rP[e]
                g = rG[e]
                if dropout:
                    g = g * options.inverse_keep
                    if not keeps(row, uint32(col + e), head):
                        pij = -pij
                        g = float32(0.0)
                ds = abs(pij) * (g - D)
                if dbias and uint32(col + e) < Nk:
                    add_global(options.dbias[b, h], row, uint32(col + e), ds)
                rG[e] = scale * ds
                rP[e] = softmax.kept(pij, options)
            write_chunk(rG, dSh, row, col, Nk)
            if dropout:
                write_chunk(rP, Ph, row, col, Nk)
            col = uint32(col + 8 * threads)

    return standard_score_gradients
