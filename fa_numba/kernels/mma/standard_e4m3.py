"""Standard attention of e4m3 arrays (a float of 8 bits) on tensor cores: softmax and output.

S = Q KT is computed by the kernel of ``standard``, which converts Q and K to float16 and contains
their scales. S is in float16, as the intermediate results of FlashAttention-3's FP8 baseline are
(arXiv 2407.08608, section 4.3). P is rounded to e4m3, so that P V has two e4m3 operands too.

P is not normalised: it is 256 e^(S - m), with the largest score m of the complete row. Normalised P
of long rows would be too small for e4m3, whose smallest number is 2^-9. The sum l of a row takes
e^(S - m) before it is rounded. The kernel of O divides by 256 l, and multiplies by the scale of V.

Shared memory in bytes:
    softmax  a row of S in float16, if it fits
    output   4 (Br step + step d), as in ``standard``
Accesses, elements per head:
    softmax  loads Nq Nk (twice if a row does not fit into shared memory), stores Nq Nk + Nq
    output   loads Nq Nk + Nq + Tr Nk d, stores Nq d
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import array_type, byte_type, half_type
from fa_numba.intrinsics.arithmetic import LN2, NEG_INF, log2, maximum
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts import bind, mma
from fa_numba.parts.mma.chunks import make_load_row, make_read_chunk
from fa_numba.parts.mma.e4m3 import PIECE, make_write_exponentials
from fa_numba.parts.mma.epilogue import make_write_as
from fa_numba.parts.namespace import RowFacts
from fa_numba.parts.records import Tile
from fa_numba.parts.softmax import exp_of_difference, make_merge_block


@cache
def make_softmax(row_halves, warps, return_lse, features, dtype):
    """Return the kernel that computes P = 256 e^(S - m) and l = rowsum(e^(S - m)) (line 2).

    The grid is (Nq, query heads, B). ``standard.make_standard_softmax`` explains the arguments.
    ``dtype`` is the dtype of S.
    """
    resident = row_halves > 0
    NR = max(row_halves, 8)
    WARPS, threads = warps, 32 * warps
    AT_M, AT_L = NR // 2, NR // 2 + WARPS
    shortened = features.lengths
    merge_block = make_merge_block(warps, False)
    (grid,) = bind(RowFacts(features, dtype=dtype), mma.grid)
    load_row, read_chunk = make_load_row(threads, resident), make_read_chunk(dtype, resident)
    write_exponentials = make_write_exponentials(dtype, resident)

    rows = array_type(3)
    arguments = (half_type(4), byte_type(4), rows, rows, features.argument_type)
    shared_bytes = 2 * NR + 8 * WARPS

    @cuda.jit(arguments, threads, shared_bytes)
    def standard_softmax_e4m3(S, P, l, L, options):
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
        mi = NEG_INF
        li = float32(0.0)
        col = uint32(8 * thread)
        while col < Nk:
            read_chunk(r, sRow, Sh, row, col, Nk)
            m_new = mi
            for e in range(8):
                if uint32(col + e) >= Nk:
                    r[e] = NEG_INF
                m_new = maximum(m_new, r[e])
            li *= exp_of_difference(mi, m_new)
            for e in range(8):
                li += exp_of_difference(r[e], m_new)
            mi = m_new
            col = uint32(col + 8 * threads)

        mi, li = merge_block(mi, li, sm, sl, head, row)

        col = uint32(PIECE * thread)
        while col < Nk:
            write_exponentials(Ph, sRow, Sh, row, col, Nk, mi)
            col = uint32(col + PIECE * threads)
        lh = grid.query_rows(l, head)
        if thread == uint32(0):
            lh[row] = li
            if return_lse:
                Lh = grid.query_rows(L, head)
                Lh[row] = mi + LN2 * log2(li)

    return standard_softmax_e4m3


@cache
def make_output(spec, out_dtype):
    """Return the kernel that computes O = diag(256 l)^-1 P V, with the scale of V (line 3).

    ``out_dtype`` is the dtype of O. The grid is (Tr, query heads, batch entries).
    """
    grid, load, products = bind(spec, mma.grid, mma.load, mma.products)
    (values,), write_rows = bind(spec, mma.values), make_write_as(spec, out_dtype)
    Br, STEP, TM = spec.Br, spec.step, spec.TM
    RO = spec.TM * spec.DN * 4
    NP, NV = spec.stage_halves
    TWO_P, TWO_V, AT_V = 2 * NP, 2 * NV, 2 * NP

    shortened = spec.features.lengths

    O_type = array_type(4) if out_dtype == "float32" else half_type(4)
    codes = byte_type(4)
    arguments = (codes, codes, array_type(3), O_type, types.int32, spec.features.argument_type)
    shared_bytes, min_blocks = 4 * (NP + NV), spec.min_blocks_of_output

    @cuda.jit(arguments, spec.threads, shared_bytes, min_blocks)
    def standard_output_e4m3(P, V, l, O, group, options):
        sP = half_tile(0, TWO_P)
        sV = half_tile(AT_V, TWO_V)
        rO, rl = cuda.local.array(RO, float32), cuda.local.array(TM, float32)
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
        stage = uint32(0)
        j0 = uint32(0)
        unit = products.value_unit(Tile(i0, j0, head, thread))
        while j0 < j_end:
            cuda.syncthreads()  # Pij and Vj are there; nobody reads the other stage any more
            j_next = uint32(j0 + STEP)
            other = uint32(1 - stage)
            load.p(sP, uint32(other * NP), Ph, i0, head.Nq, j_next, j_end)
            load.step(sV, uint32(other * NV), Vh, j_next, j_end)
            unit = products.to_unit(rO, unit, Tile(i0, j0, head, thread))
            products.add_stage(rO, sP, uint32(stage * NP), sV, uint32(stage * NV), warp_row, 0)
            stage = other
            j0 = j_next
        values.read(rl, grid.query_rows(l, head), i0, uint32(min(rows, head.Nq)), thread)
        products.divide_rows(rO, rl, unit, head)
        write_rows(rO, Oh, i0, rows, thread)

    return standard_output_e4m3
