"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on CUDA cores.

One thread block takes one (batch, head): both loops run inside it. O, l and m pass through global
memory in every pass over K/V, and O is normalised each time. ``query_splits`` blocks can share a
head, each with its own rows of Q and all of K/V, as the released code did later; 1 is the paper's.

Shared memory, floats:  Br (d + 4) + Bc (d + 4) + Bc d + Br (Bc + TX)
    in bytes at the default tiles:  176128 (d=64, 128 x 128), 175104 (d=128, 128 x 64), 144896
    (d=256, 64 x 32); up to 255 registers, none spilled
Accesses, elements per head:  loads 2 Nk d for each query split + Tc Nq d + (Tc - 1) (Nq d + 2 Nq),
    stores Tc (Nq d + 2 Nq); with a causal mask only the row tiles that see column tile j. The
    first pass knows line 2's O = 0, l = 0, m = -inf and reads none of them. With L for the
    caller 2 Nq loads and Nq stores more.
m is kept in units of log2.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, int32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.products import make_product, make_scores
from fa_numba.parts.rows import (
    make_normalise_rows,
    make_read_rows,
    make_read_values,
    make_scale_and_add,
    make_scale_rows,
    make_start,
    make_write_rows,
    make_write_values,
)
from fa_numba.parts.softmax import (
    make_logsumexp,
    make_online_softmax,
    make_scale_and_mask,
    make_store_p,
)
from fa_numba.parts.tile_load import make_load_tile


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (query splits, Hq, B) blocks."""
    Br, Bc, TX, d, causal = spec.Br, spec.Bc, spec.tx_count, spec.head_dim, spec.causal
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    NQ, NK, NV, NP = spec.tile_floats
    AT_K, AT_V, AT_P = NQ, NQ + NK, NQ + NK + NV
    return_lse = spec.return_lse

    load_q = make_load_tile(Br, spec.d4, spec.pitch_qk, spec.threads, spec.aligned)
    load_k = make_load_tile(Bc, spec.d4, spec.pitch_qk, spec.threads, spec.aligned)
    load_v = make_load_tile(Bc, spec.pitch_v, spec.pitch_v, spec.threads, spec.aligned)
    start = make_start(spec)
    scores = make_scores(spec)
    scale_and_mask = make_scale_and_mask(spec)
    online_softmax = make_online_softmax(spec)
    store_p = make_store_p(spec)
    product = make_product(spec)
    scale_and_add = make_scale_and_add(spec)
    scale_rows = make_scale_rows(spec)
    normalise_rows = make_normalise_rows(spec)
    logsumexp = make_logsumexp(spec)
    read_rows = make_read_rows(spec)
    read_values = make_read_values(spec)
    write_rows = make_write_rows(spec)
    write_values = make_write_values(spec)

    def fa1_forward(Q, K, V, O, L, l, m, scale, diagonal, group, split_rows):
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
        tx = uint32(cuda.threadIdx.x) % uint32(TX)
        ty = uint32(cuda.threadIdx.x) // uint32(TX)
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        Qh, Oh, lh, mh = Q[b, h], O[b, h], l[b, h], m[b, h]
        Kh, Vh = K[b, h // uint32(group)], V[b, h // uint32(group)]
        Nq = uint32(Qh.shape[0])
        Nk = uint32(Kh.shape[0])

        # The rows of this block: all of them, unless the queries are split. The splits with most
        # columns go first: a shorter tail.
        i_first = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * split_rows)
        i_end = uint32(min(Nq, uint32(i_first + split_rows)))
        j_end = Nk
        if causal:
            j_end = uint32(min(int32(Nk), max(int32(1), int32(i_end + diagonal))))

        # Alg. 1 line 5: for each column tile j that these rows see
        j0 = uint32(0)
        while j0 < j_end:
            # Alg. 1 line 7: the first row tile that sees column tile j; the first pass takes all
            i0 = i_first
            if causal and j0 > uint32(0):
                skipped = max(int32(0), int32(j0) - diagonal - int32(i_first)) // int32(Br)
                i0 = uint32(i_first + skipped * Br)
            cuda.syncthreads()  # nobody reads sQ, sK and sV any more
            # Alg. 1 lines 6, 8: load Kj, Vj and the first Qi
            load_k(sK, Kh, j0, Nk, 0, d)
            load_v(sV, Vh, j0, Nk, 0, d)
            load_q(sQ, Qh, i0, i_end, 0, d)
            commit_async()
            # Alg. 1 line 7: for each row tile i
            while i0 < i_end:
                wait_async()
                cuda.syncthreads()  # Qi is there; nobody reads sP any more
                # Alg. 1 line 8: load Oi, li, mi
                if j0 > uint32(0):
                    read_rows(rO, Oh, i0, i_end, ty, tx)
                    read_values(rl, lh, i0, i_end, ty, tx)
                    read_values(rm, mh, i0, i_end, ty, tx)
                else:
                    start(rO, rl, rm)
                # Alg. 1 line 12: diag(li) Oi, before line 11 replaces li
                scale_rows(rO, rl)
                # Alg. 1 line 9: Sij = scale Qi KjT
                scores(rS, sQ, sK, ty, tx)
                scale_and_mask(rS, scale, i0, j0, Nk, diagonal, ty, tx)
                # Alg. 1 lines 10, 11: m, P and l, with e^(m~ - m_new) folded into P
                online_softmax(rS, rm, rl, rf)
                store_p(sP, rS, ty, tx)
                cuda.syncthreads()  # Pij is there; nobody reads sQ any more
                # Alg. 1 line 8 of the next i: load Qi+1, in flight during line 12
                if uint32(i0 + Br) < i_end:
                    load_q(sQ, Qh, uint32(i0 + Br), i_end, 0, d)
                commit_async()
                # Alg. 1 line 12: O = diag(l_new)^-1 (diag(li) e^(mi - m_new) Oi + Pij Vj)
                product(rT, sP, sV, ty, tx)
                scale_and_add(rO, rf, rT)
                normalise_rows(rO, rl)
                write_rows(rO, Oh, i0, i_end, ty, tx)
                # Alg. 1 line 13: write li, mi
                write_values(rl, lh, i0, i_end, ty, tx)
                write_values(rm, mh, i0, i_end, ty, tx)
                i0 = uint32(i0 + Br)
            j0 = uint32(j0 + Bc)

        if return_lse:
            # Not in Algorithm 1: L = m + log l, for the caller
            i0 = i_first
            while i0 < i_end:
                read_values(rl, lh, i0, i_end, ty, tx)
                read_values(rm, mh, i0, i_end, ty, tx)
                logsumexp(rl, rm, rl)
                write_values(rl, L[b, h], i0, i_end, ty, tx)
                i0 = uint32(i0 + Br)

    arrays = [array_type(4)] * 4 + [array_type(3)] * 3
    arguments = (*arrays, types.float32, types.int32, types.int32, types.int32)
    return Kernel(fa1_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
