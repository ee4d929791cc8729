"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on tensor cores.

One thread block takes one (batch, head): both loops run inside it. O, l and m pass through global
memory in every pass over K/V, and O is normalised each time: in float32 (``A``) until a row tile's
last pass rounds it to O, as the released code did. ``query_splits`` as on CUDA cores.
m is kept in units of log2. Warps, shared memory and accesses: below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.mma import parts


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (query splits, Hq, B) blocks."""
    p, Bc, ROWS, (NQ, NK, NV) = parts(spec), spec.Bc, spec.warp_rows, spec.tile_halves
    TM, RS, RO, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.q_registers
    AT_K, AT_V, AT_O, NO = NQ, NQ + NK, (NQ + NK + NV) // 2, spec.exchange_floats
    RB = spec.bias_registers

    def fa1_forward(Q, K, V, O, A, L, l, m, scale, group, split_rows, options):
        sQ = half_tile(0, NQ)
        sK = half_tile(AT_K, NK)
        sV = half_tile(AT_V, NV)
        sO = shared_tile(AT_O, NO)
        rQ = cuda.local.array(RQ, uint32)
        rS = cuda.local.array(RS, float32)
        rB = cuda.local.array(RB, float32)
        rO = cuda.local.array(RO, float32)
        rm = cuda.local.array(TM, float32)
        rl = cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        tx = uint32(cuda.threadIdx.x) % uint32(4)
        warp_row = uint32(uint32(cuda.threadIdx.x) // uint32(32) * ROWS)
        ty = uint32(warp_row + uint32(cuda.threadIdx.x) % uint32(32) // uint32(4))
        b, h, hk = p.heads(group)
        Qh, Oh = p.query_rows(Q, b, h, options), p.query_rows(O, b, h, options)
        Ah = p.query_rows(A, b, h, options)
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        lh, mh = p.query_rows(l, b, h, options), p.query_rows(m, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = p.lengths(rows, K.shape[2], b, options)

        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        i_first, i_last = p.split(split_rows, rows)
        j0, j_end = p.column_passes(i_first, i_last, Nq, Nk, options)
        p.initialise(rO, rl, rm, Oh, Ah, lh, mh, i_first, i_last, ty, tx)
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
                cuda.syncthreads()  # Qi is there
                p.load_fragments(rQ, sQ, warp_row)
                p.read_bias(rB, i0, j0, Nq, Nk, b, h, options, ty, tx)
                # Alg. 1 line 8: load Oi, li, mi
                p.read_state(rO, rl, rm, Ah, lh, mh, j0, i0, i_stop, ty, tx)
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                p.scores(rS, rQ, sQ, sK, warp_row, p.warp_column())
                p.scale_rows(rO, rl)  # Alg. 1 line 12: diag(li) Oi, before line 11 replaces li
                p.scale_bias_and_mask(rS, rB, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
                cuda.syncthreads()  # nobody reads sQ any more
                # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
                i_next = p.load_next_q(sQ, Qh, i0, i_end, i_stop, j0, b, h, options)
                commit_async()
                # FA-1 lines 10, 11, FA-2 line 9: m, l, and P in units of the new m
                p.online_softmax(rS, scale, rm, rl, rf)
                p.drop(rS, i0, j0, b, h, options, ty, tx)
                # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                p.scale_rows(rO, rf)
                p.add_product(rO, rS, sV, options)
                p.combine(rO, rm, rl, sO, ty, tx)  # ... over warps, where they split the keys
                # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
                p.normalise_rows(rO, rl)
                more = p.sees_more(i0, j0, Nq, Nk, b, h, options)
                p.write_state(rO, rl, rm, Oh, Ah, lh, mh, more, i0, i_stop, ty, tx)
                i0 = i_next
            j0 = uint32(j0 + Bc)
        # FA-2 lines 13, 15: L = m + log l
        p.write_logsumexp(rl, rm, L, lh, mh, b, h, options, i_first, i_last, ty, tx)

    halves = array_type(4, types.uint16)
    arrays = [*[halves] * 4, array_type(4), *[array_type(3)] * 3]
    scalars = (types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
``warp_partition``: a warp takes 32 or 16 rows of a tile and all columns; or, with "keys", all rows
and its share of the columns, as in the released code ("split-K", arXiv 2307.08691, section 3.3).
Each warp then has an O, l and m of its own, all of which meet in shared memory: once, after the
product, where the released code exchanged m and l before it and O after it.

Shared memory, 16-bit elements:  (Br + 2 Bc) d
    in bytes at the default tiles:  81920 (d=64, 128 x 256), 163840 (d=128, 128 x 256), 196608
    (d=256, 128 x 128)
    With "keys" and W warps 4 (W - 1) Br (d + 2) bytes more.
Accesses, elements per head:  loads 2 Nk d for each query split + Tc Nq d + (Tc - 1) (Nq d + 2 Nq),
    stores (Tc - 1) Nq d + Nq d + 2 Tc Nq; with a causal mask only the row tiles that see column
    tile j. The first pass knows line 2's O = 0, l = 0, m = -inf and reads none of them. With L for
    the caller 2 Nq loads and Nq stores more.
"""
