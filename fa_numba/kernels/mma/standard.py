"""Standard attention on tensor cores: S and P pass through global memory (Algorithm 0 of arXiv
2205.14135 and arXiv 2307.08691).

The three kernels use the tiles and products of the FlashAttention kernels. S and P are in 16 bits,
as Q, K and V are. Sums and the softmax are in float32. P overwrites S in the same memory, whose
rows start at 16-byte addresses. No tile is skipped: hidden elements become -inf.

Shared memory, 16-bit elements:
    scores   (Br + Bc) d + Br Bc
    output   2 (Br step + step d), where step = 64 if Bc is a multiple of 64
    in bytes at the default tiles, 128 x 64:  40960 and 49152 (d=64), 65536 and 65536 (d=128)
Accesses, elements per head:
    scores   loads Nq d + Tr Nk d, stores Nq Nk
    softmax  loads Nq Nk (twice if a row does not fit into shared memory), stores Nq Nk
    output   loads Nq Nk + Tr Nk d, stores Nq d
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import array_type, byte_type, half_type
from fa_numba.intrinsics.arithmetic import LN2, NEG_INF, log2, maximum
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts import bind, mma
from fa_numba.parts.dropout import keeps
from fa_numba.parts.mma.chunks import make_load_row, make_read_chunk, make_write_chunk
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
    grid, load, products = bind(spec, mma.grid, mma.load, mma.products)
    scores, epilogue = bind(spec, mma.scores, mma.epilogue)
    Br, Bc = spec.Br, spec.Bc
    RS, RQ = spec.TM * spec.TN, spec.q_registers
    shortened = spec.features.lengths
    NQ, NK, NS = spec.tile_halves
    AT_K, AT_S = NQ, NQ + NK

    matrix = byte_type(4) if spec.features.scales else half_type(4)
    scalars = (types.float32, types.int32)
    arguments = (matrix, matrix, half_type(4), *scalars, spec.features.argument_type)
    shared_bytes, min_blocks = 2 * (NQ + NK + NS), spec.min_blocks_of_scores

    @cuda.jit(arguments, spec.threads, shared_bytes, min_blocks)
    def standard_scores(Q, K, S, scale, group, options):
        sQ = half_tile(0, NQ)
        sK = half_tile(AT_K, NK)
        sS = half_tile(AT_S, NS)
        rQ, rS = cuda.local.array(RQ, uint32), cuda.local.array(RS, float32)
        warp_row, thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, Kh, Sh = grid.query_rows(Q, head), grid.key_rows(K, head), S[head.b, head.h]
        i0 = uint32(cuda.blockIdx.x * Br)
        j_end = head.Nk
        if shortened and i0 >= head.Nq:
            j_end = uint32(0)

        load.q(sQ, Qh, i0, head.Nq)
        load.k(sK, Kh, 0, j_end)
        commit_async()
        wait_async()
        cuda.syncthreads()  # Qi is there
        products.load_fragments(rQ, sQ, warp_row)
        factor = products.score_factor(scale, head)
        j0 = uint32(0)
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Kj is there; nobody reads sS any more
            tile = Tile(i0, j0, head, thread)
            products.scores(rS, rQ, sQ, sK, warp_row, uint32(0))
            cuda.syncthreads()  # nobody reads sK any more
            load.k(sK, Kh, uint32(j0 + Bc), head.Nk)
            commit_async()
            if slopes:
                scores.slopes(rS, rS, scale, tile)
                epilogue.times_scores(rS, Sh, i0, head.Nq, j0, head.Nk, thread)
            else:
                scores.scale_and_mask_all(rS, products.tile_factor(factor, tile), tile)
            epilogue.store_scores(sS, rS, thread)
            cuda.syncwarp()  # this warp's rows of Sij are there
            epilogue.write_scores(sS, Sh, warp_row, i0, head.Nq, j0, head.Nk)
            j0 = uint32(j0 + Bc)
        wait_async()

    return standard_scores


@cache
def make_standard_softmax(row_halves, warps, return_lse, features, dtype):
    """Return the kernel that computes P = softmax(S) by rows (line 2).

    The grid is (Nq, query heads, B). If the call has dropout, the kernel also drops elements of P.
    The kernel keeps a row of up to ``row_halves`` elements in shared memory. If ``row_halves`` is
    0, it reads the row from global memory twice. A thread block has ``warps`` warps. Each thread
    computes m and l of an online softmax over its own chunks of eight columns. The m and l of all
    threads are then merged.
    """
    resident = row_halves > 0
    NR = max(row_halves, 8)
    WARPS, threads = warps, 32 * warps
    AT_M, AT_L = NR // 2, NR // 2 + WARPS
    shortened, dropout = features.lengths, features.dropout
    merge_block = make_merge_block(warps, features.sinks)
    facts = RowFacts(features, dtype=dtype)
    (grid,) = bind(facts, mma.grid)
    load_row = make_load_row(threads, resident)
    read_chunk = make_read_chunk(dtype, resident)
    write_chunk = make_write_chunk(dtype)

    halves = half_type(4)
    arguments = (halves, halves, array_type(3), features.argument_type)
    shared_bytes = 2 * NR + 8 * WARPS

    @cuda.jit(arguments, threads, shared_bytes)
    def standard_softmax(S, P, L, options):
        sRow = half_tile(0, NR)
        sm = shared_tile(AT_M, WARPS)
        sl = shared_tile(AT_L, WARPS)
        r = cuda.local.array(8, float32)
        head = grid.query_head(S.shape[2], S.shape[3], options)
        b, h, Nk, row = head.b, head.h, head.Nk, uint32(cuda.blockIdx.x)
        Sh, Ph = S[b, h], P[b, h]
        if shortened and row >= head.Nq:
            Nk = uint32(0)
        thread = uint32(cuda.threadIdx.x)

        load_row(sRow, Sh, row, Nk)
        commit_async()
        wait_async()
        m = NEG_INF
        l = float32(0.0)
        col = uint32(8 * thread)
        while col < Nk:
            read_chunk(r, sRow, Sh, row, col, Nk)
            if uint32(col + 7) >= Nk:
                for e in range(8):
                    if uint32(col + e) >= Nk:
                        r[e] = NEG_INF
            m_new = m
            for e in range(8):
                m_new = maximum(m_new, r[e])
            l *= exp_of_difference(m, m_new)
            for e in range(8):
                l += exp_of_difference(r[e], m_new)
            m = m_new
            col = uint32(col + 8 * threads)

        m, l = merge_block(m, l, sm, sl, head, row)

        inverse = float32(0.0)
        if l != float32(0.0):
            inverse = float32(1.0) / l
        col = uint32(8 * thread)
        while col < Nk:
            read_chunk(r, sRow, Sh, row, col, Nk)
            for e in range(8):
                pij = exp_of_difference(r[e], m) * inverse
                if dropout:
                    kept = keeps(row, uint32(col + e), head)
                    pij = pij * options.inverse_keep if kept else float32(0.0)
                r[e] = pij
            write_chunk(r, Ph, row, col, Nk)
            col = uint32(col + 8 * threads)
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
    grid, load, products = bind(spec, mma.grid, mma.load, mma.products)
    (epilogue,) = bind(spec, mma.epilogue)
    Br, STEP = spec.Br, spec.step
    RO = spec.TM * spec.DN * 4
    NP, NV = spec.stage_halves
    TWO_P, TWO_V, AT_V = 2 * NP, 2 * NV, 2 * NP

    shortened = spec.features.lengths

    arguments = (*[half_type(4)] * 3, types.int32, spec.features.argument_type)
    shared_bytes, min_blocks = 4 * (NP + NV), spec.min_blocks_of_output

    @cuda.jit(arguments, spec.threads, shared_bytes, min_blocks)
    def standard_output(P, V, O, group, options):
        sP = half_tile(0, TWO_P)
        sV = half_tile(AT_V, TWO_V)
        rO = cuda.local.array(RO, float32)
        warp_row, thread = grid.thread()
        head = grid.head(O, V, group, options)
        Ph, Vh, Oh = P[head.b, head.h], grid.key_rows(V, head), grid.query_rows(O, head)
        rows = uint32(Oh.shape[0])
        i0 = uint32(cuda.blockIdx.x * Br)
        j_end = head.Nk
        if shortened and i0 >= head.Nq:
            j_end = uint32(0)

        for e in range(RO):
            rO[e] = float32(0.0)
        load.p(sP, 0, Ph, i0, head.Nq, 0, j_end)
        load.step(sV, 0, Vh, 0, j_end)
        commit_async()
        stage = uint32(0)
        j0 = uint32(0)
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Pij and Vj are there; nobody reads the other stage any more
            j_next = uint32(j0 + STEP)
            other = uint32(1 - stage)
            load.p(sP, uint32(other * NP), Ph, i0, head.Nq, j_next, j_end)
            load.step(sV, uint32(other * NV), Vh, j_next, j_end)
            commit_async()
            products.add_stage(rO, sP, uint32(stage * NP), sV, uint32(stage * NV), warp_row, 0)
            stage = other
            j0 = j_next
        wait_async()
        epilogue.write_rows(rO, Oh, i0, rows, thread)

    return standard_output
