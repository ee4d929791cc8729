"""Standard attention, backward (Algorithm 3 of arXiv 2205.14135), on CUDA cores.

P is made anew in global memory by the forward kernels; these read it back. dS overwrites dP.

Accesses, elements per head, beside those of scores and softmax:
    dV = PT dO   loads Nq Nk + Tc Nq d, stores Nk d          (line 1)
    dP = dO VT   loads Nq d + Tr Nk d, stores Nq Nk          (line 2, the scores kernel)
    dS           loads 2 Nq Nk, twice where a row exceeds shared memory, stores Nq Nk   (line 3)
    dQ = dS K    loads Nq Nk + Tr Nk d, stores Nq d          (line 4, the output kernel)
    dK = dST Q   as dV                                        (line 5)
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.dropout import keeps
from fa_numba.parts.namespace import RowFacts
from fa_numba.parts.simt import parts
from fa_numba.parts.softmax import FULL_WARP


@cache
def make_standard_transposed_output(spec):
    """dV = PT dO, or dK = dST Q, summed over the heads of a group; over (Tc, Hk, B) blocks."""
    p, Br, Bc = parts(spec), spec.Br, spec.Bc
    RK = spec.CM * spec.DN * 4
    NQ, _, NP = spec.tile_floats
    AT_P = NQ

    shortened = spec.features.lengths

    def standard_transposed_output(P, dO, dV, group, options):
        sdO = shared_tile(0, NQ)
        sP = shared_tile(AT_P, NP)
        rdV = cuda.local.array(RK, float32)
        tx, ty = p.thread()
        hk = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        dVh = p.key_rows(dV, b, hk, options)
        columns = uint32(dVh.shape[0])
        h = uint32(hk * group)
        h_end = uint32(h + group)
        rows = p.query_rows(dO, b, h, options).shape[0]
        Nq, Nk = p.lengths(rows, columns, b, options)
        j0 = uint32(cuda.blockIdx.x * Bc)
        i_end = Nq
        if shortened and j0 >= Nk:
            i_end = uint32(0)

        for e in range(RK):
            rdV[e] = float32(0.0)
        while h < h_end:
            Ph, dOh = P[b, h], p.query_rows(dO, b, h, options)
            i0 = uint32(0)
            while i0 < i_end:
                cuda.syncthreads()  # nobody reads sP and sdO any more
                p.load_p(sP, Ph, i0, Nq, j0, Nk)
                p.load_rows(sdO, dOh, i0, Nq)
                commit_async()
                wait_async()
                cuda.syncthreads()  # Pij and dOi are there
                p.add_transposed_product(rdV, sP, sdO, ty, tx)
                i0 = uint32(i0 + Br)
            h = uint32(h + 1)
        p.write_columns(rdV, dVh, j0, columns, ty, tx)

    arguments = (*[array_type(4)] * 3, types.int32, spec.features.argument_type)
    return Kernel(standard_transposed_output, arguments, spec.threads, 4 * (NQ + NP))


@cache
def make_standard_score_gradients(row_floats, warps, features):
    """dS = scale P o (dP - rowsum(P o dP)), in place of dP; over (Nq, Hq, B) blocks.

    With dropout P is left without what is dropped, for dV. dS / scale is added to dbias.

    A row of P and one of dP, up to ``row_floats`` each, are kept in shared memory; 0 reads them
    from global memory twice.
    """
    resident = row_floats > 0
    NR = max(row_floats, 4)
    WARPS, threads = warps, 32 * warps
    AT_DP, AT_D = NR, 2 * NR
    shortened, dropout, dbias = features.lengths, features.dropout, features.dbias
    p = parts(RowFacts(features))

    def standard_score_gradients(P, dP, dS, scale, options):
        sP = shared_tile(0, NR)
        sdP = shared_tile(AT_DP, NR)
        sD = shared_tile(AT_D, WARPS)
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        row = uint32(cuda.blockIdx.x)
        Pi, dPi, dSi = P[b, h, row], dP[b, h, row], dS[b, h, row]
        Nq, Nk = p.lengths(P.shape[2], P.shape[3], b, options)
        if shortened and row >= Nq:
            Nk = uint32(0)
        thread = uint32(cuda.threadIdx.x)

        dot = float32(0.0)
        col = thread
        while col < Nk:
            pij = Pi[col]
            g = dPi[col]
            if dropout:
                g = g * options.inverse_keep
                if not keeps(row, col, b, h, options):
                    pij = -pij
                    g = float32(0.0)
            if resident:
                sP[col] = pij
                sdP[col] = g
            dot += abs(pij) * g
            col = uint32(col + threads)
        lane = 16
        while lane > 0:
            dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)
            lane //= 2
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
                if not keeps(row, col, b, h, options):
                    pij = -pij
                    g = float32(0.0)
            ds = abs(pij) * (g - D)
            if dbias:
                add_global(options.dbias[b, h], row, col, ds)
            dSi[col] = scale * ds
            if dropout:
                Pi[col] = p.kept(pij, options)
            col = uint32(col + threads)

    arguments = (*[array_type(4)] * 3, types.float32, features.argument_type)
    return Kernel(standard_score_gradients, arguments, threads, 4 * (2 * NR + WARPS))
