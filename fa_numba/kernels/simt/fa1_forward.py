"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on CUDA cores.

One thread block takes one (batch, head): both loops run inside it. O, l and m pass through global
memory in every pass over K/V, and O is normalised each time. ``query_splits`` blocks can share a
head, each with its own rows of Q and all of K/V, as the released code did later; 1 is the paper's.
m is kept in units of log2. Shared memory and accesses are given below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.simt import parts


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (query splits, Hq, B) blocks."""
    p, Bc = parts(spec), spec.Bc
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    NQ, NK, NV, NP = spec.tile_floats
    AT_K, AT_V, AT_P = NQ, NQ + NK, NQ + NK + NV

    def fa1_forward(Q, K, V, O, L, l, m, scale, group, split_rows, options):
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
        lh, mh = p.query_rows(l, b, h, options), p.query_rows(m, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = p.lengths(rows, K.shape[2], b, options)

        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        i_first, i_last = p.split(split_rows, rows)
        j0, j_end = p.column_passes(i_first, i_last, Nq, Nk, options)
        p.initialise(rO, rl, rm, Oh, lh, mh, i_first, i_last, ty, tx)
        i_stop = uint32(min(i_last, Nq))

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            i0, i_end = p.visited_rows(j0, i_first, i_stop, Nq, Nk, b, h, options)
            cuda.syncthreads()  # nobody reads sQ, sK and sV any more
            # Alg. 1 lines 6, 8: load Kj, Vj and the first Qi
            if i0 < i_end:
                p.load_k(sK, Kh, j0, Nk)
                p.load_v(sV, Vh, j0, Nk)
                p.load_q(sQ, Qh, i0, i_stop)
            commit_async()
            # Alg. 1 line 7: for each row tile i that sees column tile j; the first pass takes all
            while i0 < i_end:
                wait_async()
                cuda.syncthreads()  # Qi is there; nobody reads sP any more
                # Alg. 1 line 8: load Oi, li, mi; line 12: diag(li) Oi, before line 11 replaces li
                p.read_state(rO, rl, rm, Oh, lh, mh, j0, i0, i_stop, ty, tx)
                p.scale_rows(rO, rl)
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                p.scores(rS, sQ, sK, ty, tx)
                p.scale_and_mask(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
                # FA-1 lines 10, 11, FA-2 line 9: m, l, and P in units of the new m
                p.online_softmax(rS, scale, rm, rl, rf)
                p.drop(rS, i0, j0, b, h, options, ty, tx)
                p.store_p(sP, rS, options, ty, tx)
                cuda.syncthreads()  # Pij is there; nobody reads sQ any more
                # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
                i_next = p.load_next_q(sQ, Qh, i0, i_end, i_stop, j0, b, h, options)
                commit_async()
                # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                p.product(rT, sP, sV, ty, tx)
                p.scale_and_add(rO, rf, rT)
                # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
                p.normalise_rows(rO, rl)
                p.write_state(rO, rl, rm, Oh, lh, mh, i0, i_stop, ty, tx)
                i0 = i_next
            j0 = uint32(j0 + Bc)
        # FA-2 lines 13, 15: L = m + log l
        p.write_logsumexp(rl, rm, L, lh, mh, b, h, options, i_first, i_last, ty, tx)

    arrays = [array_type(4)] * 4 + [array_type(3)] * 3
    scalars = (types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, floats:  Br d + 2 Bc d + Br Bc, swizzled
    in bytes at the default tiles:  163840 (d=64, 128 x 128), 163840 (d=128, 128 x 64), 139264
    (d=256, 64 x 32); up to 255 registers, none spilled
Accesses, elements per head:  loads 2 Nk d for each query split + Tc Nq d + (Tc - 1) (Nq d + 2 Nq),
    stores Tc (Nq d + 2 Nq); with a causal mask only the row tiles that see column tile j. The
    first pass knows line 2's O = 0, l = 0, m = -inf and reads none of them. With L for the
    caller 2 Nq loads and Nq stores more.
"""
