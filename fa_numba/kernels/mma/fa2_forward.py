"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on tensor cores.

One thread block takes one row tile Qi: the outer loop (line 3) is the grid, the tiles with most
columns first: a shorter tail. A warp takes 32 or 16 of its rows and all columns, so that only its
own lanes share a row. S, P, O, m and l stay in registers; O is normalised once, and one logsumexp
leaves.
m is kept in units of log2. Stages, shared memory and accesses: below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile
from fa_numba.parts.mma import parts


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (Tr, Hq, B) blocks, with splits over (Tr splits, Hq,
    B). Where heads share a tile Hq counts groups of them.
    """
    p, ROWS, NQ, STAGES = parts(spec), spec.warp_rows, spec.tile_halves[0], spec.stages
    SPLITS, axes = spec.features.splits, 4 if spec.tile_heads == 1 else 5
    TM, RS, RO, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.q_registers
    RB = spec.bias_registers

    def fa2_forward(Q, K, V, O, L, scale, group, options):
        sQ = half_tile(0, NQ)
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
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        Lh = p.query_rows(L, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = p.lengths(rows, K.shape[2], b, options)

        i0, split = p.tile_and_split(options)  # Alg. 1 line 3: row tile i
        j0, j_end = p.visited_columns(i0, Nq, Nk, b, h, options)
        j0, j_end = p.share_of_columns(j0, j_end, split, i0, b, h, options)

        # Alg. 1 line 4: load Qi (and the first Kj, ahead of line 7)
        p.load_q(sQ, Qh, i0, Nq)
        stage = uint32(0)
        p.load_first_columns(Kh, Vh, j0, j_end, Nk)
        commit_async()
        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        p.start(rO, rl, rm)
        wait_async()
        cuda.syncthreads()  # Qi is there
        p.load_fragments(rQ, sQ, warp_row)

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            p.read_bias(rB, i0, j0, Nq, Nk, b, h, options, ty, tx)
            wait_async()
            cuda.syncthreads()  # Kj is there, or Kj and Vj; nobody reads what is loaded next
            # Alg. 1 line 7: load Vj, in flight during line 8; with two stages Kj+1 and Vj+1
            sK, sV, stage, j_next = p.load_columns_early(
                stage, Kh, Vh, j0, j_end, Nk, i0, b, h, options
            )
            commit_async()
            # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
            p.scores(rS, rQ, sQ, sK, warp_row, p.warp_column())
            p.scale_bias_and_mask(rS, rB, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
            if STAGES == 1:
                wait_async()
                cuda.syncthreads()  # Vj is there; nobody reads sK any more
                # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
                j_next = p.load_next_k(sK, Kh, j0, j_end, Nk, i0, b, h, options)
                commit_async()
            # FA-1 lines 10, 11, FA-2 line 9: m, l, and P in units of the new m
            p.online_softmax_of_lanes(rS, scale, rm, rl, rf)
            p.drop(rS, i0, j0, b, h, options, ty, tx)
            # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
            p.rescale_rows(rO, rf)
            p.add_product(rO, rS, sV, options)
            j0 = j_next

        p.sum_lanes(rl)  # Alg. 1 line 9: l of whole rows, whose columns lie with four lanes
        if SPLITS:  # merge_splits takes O, l and m of this block's columns
            p.write_split(rO, rl, rm, split, i0, rows, b, h, options, ty, tx)
        else:
            # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
            p.normalise_rows(rO, rl)
            p.write_tile(rO, sQ, Oh, warp_row, i0, rows, ty, tx)
            # FA-2 lines 13, 15: L = m + log l
            p.logsumexp(rl, rm, rl)
            p.write_values(rl, Lh, i0, rows, ty, tx)

    queries, halves = array_type(axes, types.uint16), array_type(4, types.uint16)
    arrays = (queries, halves, halves, queries, array_type(axes - 1))
    arguments = (*arrays, types.float32, types.int32, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
With one stage of K and V, Vj is on its way during Sij = Qi KjT, and Kj+1 during the softmax and
Pij Vj. With two, Kj+1 and Vj+1 are on their way during all of it: one barrier less, more memory.

Shared memory, 16-bit elements:  (Br + 2 stages Bc) d
    in bytes at the default tiles:  49152 (d=64, 128 x 128), 65536 (d=128, 128 x 64), 98304
    (d=256, 64 x 64)
Accesses, elements per head:  loads Nq d + 2 Tr Nk d, stores Nq d + Nq; with a causal mask only the
    K/V tiles that row tile i sees. With S splits Q is loaded S times, and in place of O and L leave
    S (Nq d + 2 Nq), for merge_splits.
"""
