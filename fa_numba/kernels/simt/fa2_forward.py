"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on CUDA cores.

One thread block takes one row tile Qi: the outer loop (line 3) is the grid, the tiles with most
columns first: a shorter tail. O, m and l stay in registers from the first K/V tile to the last; O
is normalised once, and one logsumexp leaves. m is kept in units of log2. Shared memory and accesses
are given below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.simt import parts


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (Tr, Hq, B) blocks, with splits over (Tr splits, Hq,
    B).
    """
    p, SPLITS = parts(spec), spec.features.splits
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    NQ, NK, NV, NP = spec.tile_floats
    AT_K, AT_V, AT_P = NQ, NQ + NK, NQ + NK + NV

    def fa2_forward(Q, K, V, O, L, scale, group, options):
        sQ = shared_tile(0, NQ)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NV)
        sP = shared_tile(AT_P, NP)
        rS = cuda.local.array(RS, float32)
        rO = cuda.local.array(RO, float32)
        rT = cuda.local.array(RO, float32)
        rm = cuda.local.array(TM, float32)
        rl = cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        tx, ty = p.thread()
        b, h, hk = p.heads(group)
        Qh, Oh = p.query_rows(Q, b, h, options), p.query_rows(O, b, h, options)
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        Lh = p.query_rows(L, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = p.lengths(rows, K.shape[2], b, options)

        i0, split = p.tile_and_split(options)  # Alg. 1 line 3: row tile i
        j0, j_end = p.visited_columns(i0, Nq, Nk, b, h, options)
        j0, j_end = p.share_of_columns(j0, j_end, split, i0, b, h, options)

        # Alg. 1 line 4: load Qi (and the first Kj, ahead of line 7)
        p.load_q(sQ, Qh, i0, Nq)
        if j0 < j_end:
            p.load_k(sK, Kh, j0, Nk)
        commit_async()
        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        p.start(rO, rl, rm)

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Kj is there; nobody reads sV and sP any more
            # Alg. 1 line 7: load Vj, in flight during line 8
            p.load_v(sV, Vh, j0, Nk)
            commit_async()
            # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
            p.scores(rS, sQ, sK, ty, tx)
            p.scale_and_mask(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
            # FA-1 lines 10, 11, FA-2 line 9: m, l, and P in units of the new m
            p.online_softmax(rS, scale, rm, rl, rf)
            p.drop(rS, i0, j0, b, h, options, ty, tx)
            p.store_p(sP, rS, options, ty, tx)
            wait_async()
            cuda.syncthreads()  # Vj and Pij are there; nobody reads sK any more
            # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
            j_next = p.load_next_k(sK, Kh, j0, j_end, Nk, i0, b, h, options)
            commit_async()
            # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
            p.product(rT, sP, sV, ty, tx)
            p.scale_and_add(rO, rf, rT)
            j0 = j_next
        wait_async()

        if SPLITS:  # merge_splits takes O, l and m of this block's columns
            p.write_split(rO, rl, rm, split, i0, rows, b, h, options, ty, tx)
        else:
            # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
            p.normalise_rows(rO, rl)
            p.write_rows(rO, Oh, i0, rows, ty, tx)
            # FA-2 lines 13, 15: L = m + log l
            p.logsumexp(rl, rm, rl)
            p.write_values(rl, Lh, i0, rows, ty, tx)

    arrays = [array_type(4)] * 4 + [array_type(3)]
    arguments = (*arrays, types.float32, types.int32, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, floats:  Br d + 2 Bc d + Br Bc, swizzled
    in bytes at the default tiles:  98304 (d=64, 128 x 64), 163840 (d=128, 128 x 64), 212992
    (d=256, 64 x 64); up to 255 registers, none spilled
Accesses, elements per head:  loads Nq d + 2 Tr Nk d, stores Nq d + Nq; with a causal mask only the
    K/V tiles that row tile i sees. With S splits Q is loaded S times, and in place of O and L leave
    S (Nq d + 2 Nq), for merge_splits.
"""
