"""Standard attention on CUDA cores: S and P pass through global memory (Algorithm 0 of arXiv
2205.14135 and arXiv 2307.08691).

The three kernels use the tiles and products of the FlashAttention kernels. P overwrites S in the
same memory. No tile is skipped: hidden elements become -inf.

Accesses, elements per head:
    scores   loads Nq d + Tr Nk d, stores Nq Nk
    softmax  loads Nq Nk (twice if a row does not fit into shared memory), stores Nq Nk
    output   loads Nq Nk + Tr Nk d, stores Nq d
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.intrinsics.arithmetic import LN2, NEG_INF, log2, maximum
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts import bind, simt
from fa_numba.parts.dropout import keeps
from fa_numba.parts.mods import make_times_slope
from fa_numba.parts.namespace import RowFacts
from fa_numba.parts.records import Tile
from fa_numba.parts.softmax import exp_of_difference, make_merge_block

MAX_WARPS = 8


@cache
def make_standard_scores(spec, slopes=False):
    """Return the kernel that computes S = scale Q KT with masks (line 1).

    The grid is (Tr, query heads, B). If ``slopes`` is true, the kernel computes something else: it
    reads dS from the array S, multiplies dS by the derivatives of a softcap and of ``score_mod``,
    and stores the product in S.
    """
    grid, load, products = bind(spec, simt.grid, simt.load, simt.products)
    (scores,) = bind(spec, simt.scores)
    Br, Bc, TX, TY = spec.Br, spec.Bc, spec.tx_count, spec.ty_count
    TM, TN, RS = spec.TM, spec.TN, spec.TM * spec.TN
    shortened, times_slope = spec.features.lengths, make_times_slope(spec.features)
    NQ, NK, _, _ = spec.tile_floats
    AT_K = NQ

    scalars = (types.float32, types.int32)
    arguments = (*[array_type(4)] * 3, *scalars, spec.features.argument_type)
    shared_bytes = 4 * (NQ + NK)

    @cuda.jit(arguments, spec.threads, shared_bytes)
    def standard_scores(Q, K, S, scale, group, options):
        sQ = shared_tile(0, NQ)
        sK = shared_tile(AT_K, NK)
        rS = cuda.local.array(RS, float32)
        thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, Kh, Sh = grid.query_rows(Q, head), grid.key_rows(K, head), S[head.b, head.h]
        i0 = uint32(cuda.blockIdx.x * Br)
        j_end = head.Nk
        if shortened and i0 >= head.Nq:
            j_end = uint32(0)

        load.q(sQ, Qh, i0, head.Nq)
        load.k(sK, Kh, 0, j_end)
        commit_async()
        j0 = uint32(0)
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Kj is there
            tile = Tile(i0, j0, head, thread)
            products.scores(rS, sQ, sK, thread)
            cuda.syncthreads()  # nobody reads sK any more
            load.k(sK, Kh, uint32(j0 + Bc), head.Nk)
            commit_async()
            if slopes:
                scores.slopes(rS, rS, scale, tile)
            else:
                scores.scale_and_mask_all(rS, scale, tile)
            for i in range(TM):
                row = uint32(i0 + thread.ty + i * TY)
                for j in range(TN):
                    col = uint32(j0 + thread.tx + j * TX)
                    if row < head.Nq and col < head.Nk:
                        s = rS[i * TN + j]
                        if slopes:
                            s = times_slope(Sh[row, col], s)
                        Sh[row, col] = s
            j0 = uint32(j0 + Bc)
        wait_async()

    return standard_scores


@cache
def make_standard_softmax(row_floats, warps, return_lse, features):
    """Return the kernel that computes P = softmax(S) by rows (line 2).

    The grid is (Nq, query heads, B). If the call has dropout, the kernel also drops elements of P.
    The kernel keeps a row of up to ``row_floats`` elements in shared memory. If ``row_floats`` is
    0, it reads the row from global memory twice. A thread block has ``warps`` warps. Each thread
    computes m and l of an online softmax over its own columns. The m and l of all threads are then
    merged.
    """
    resident = row_floats > 0
    NR = max(row_floats, 4)
    WARPS, threads = warps, 32 * warps
    AT_M, AT_L = NR, NR + WARPS
    shortened, dropout = features.lengths, features.dropout
    merge_block = make_merge_block(warps, features.sinks)
    facts = RowFacts(features)
    (grid,) = bind(facts, simt.grid)

    arguments = (array_type(4), array_type(4), array_type(3), features.argument_type)
    shared_bytes = 4 * (NR + 2 * WARPS)

    @cuda.jit(arguments, threads, shared_bytes)
    def standard_softmax(S, P, L, options):
        sRow = shared_tile(0, NR)
        sm = shared_tile(AT_M, WARPS)
        sl = shared_tile(AT_L, WARPS)
        head = grid.query_head(S.shape[2], S.shape[3], options)
        b, h, Nk, row = head.b, head.h, head.Nk, uint32(cuda.blockIdx.x)
        Si, Pi = S[b, h, row], P[b, h, row]
        if shortened and row >= head.Nq:
            Nk = uint32(0)
        thread = uint32(cuda.threadIdx.x)

        m = NEG_INF
        l = float32(0.0)
        col = thread
        while col < Nk:
            s = Si[col]
            if resident:
                sRow[col] = s
            m_new = maximum(m, s)
            l = l * exp_of_difference(m, m_new) + exp_of_difference(s, m_new)
            m = m_new
            col = uint32(col + threads)

        m, l = merge_block(m, l, sm, sl, head, row)

        inverse = float32(0.0)
        if l != float32(0.0):
            inverse = float32(1.0) / l
        col = thread
        while col < Nk:
            s = sRow[col] if resident else Si[col]
            pij = exp_of_difference(s, m) * inverse
            if dropout:
                pij = pij * options.inverse_keep if keeps(row, col, head) else float32(0.0)
            Pi[col] = pij
            col = uint32(col + threads)
        if return_lse:
            Lh = grid.query_rows(L, head)
            if thread == uint32(0) and row < uint32(Lh.shape[0]):
                Lh[row] = m + LN2 * log2(l)

    return standard_softmax


@cache
def make_standard_output(spec):
    """Return the kernel that computes O = P V (line 3).

    The grid is (Tr, query heads, batch entries).
    """
    grid, load, products = bind(spec, simt.grid, simt.load, simt.products)
    (epilogue,) = bind(spec, simt.epilogue)
    Br, Bc = spec.Br, spec.Bc
    TM, RO = spec.TM, spec.TM * spec.DN * 4
    _, _, NV, NP = spec.tile_floats
    AT_P = NV

    shortened = spec.features.lengths

    arguments = (*[array_type(4)] * 3, types.int32, spec.features.argument_type)
    shared_bytes = 4 * (NV + NP)

    @cuda.jit(arguments, spec.threads, shared_bytes)
    def standard_output(P, V, O, group, options):
        sV = shared_tile(0, NV)
        sP = shared_tile(AT_P, NP)
        rO, rT = cuda.local.array(RO, float32), cuda.local.array(RO, float32)
        rf = cuda.local.array(TM, float32)
        thread = grid.thread()
        head = grid.head(O, V, group, options)
        Ph, Vh, Oh = P[head.b, head.h], grid.key_rows(V, head), grid.query_rows(O, head)
        rows = uint32(Oh.shape[0])
        i0 = uint32(cuda.blockIdx.x * Br)
        j_end = head.Nk
        if shortened and i0 >= head.Nq:
            j_end = uint32(0)

        for e in range(RO):
            rO[e] = float32(0.0)
        for i in range(TM):
            rf[i] = float32(1.0)
        j0 = uint32(0)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sP and sV any more
            load.p(sP, Ph, i0, head.Nq, j0, head.Nk)
            load.v(sV, Vh, j0, head.Nk)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Pij and Vj are there
            products.output(rT, sP, sV, thread)
            products.scale_and_add(rO, rf, rT)
            j0 = uint32(j0 + Bc)
        epilogue.write_rows(rO, Oh, i0, rows, thread)

    return standard_output
