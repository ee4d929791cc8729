"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on tensor cores.

One thread block computes one row tile Qi: the outer loop (line 3) becomes the grid. Row tiles with
many columns come first, so that short thread blocks run last. A warp computes 32 or 16 rows and all
columns. S, P, O, m and l stay in registers. O is normalised once, and one logsumexp per row is
stored. The end of this file explains stages, shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type, half_type, result_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile
from fa_numba.parts import bind, mma
from fa_numba.parts.records import Tile


@cache
def make_forward(spec):
    """Return the kernel for ``spec``. The grid is (Tr, query heads, batch entries). With n key
    splits, Tr becomes n Tr. If heads share row tiles, the second number counts groups of heads.
    """
    grid, visits, load = bind(spec, mma.grid, mma.visits, mma.load)
    products, scores, softmax = bind(spec, mma.products, mma.scores, mma.softmax)
    values, epilogue = bind(spec, mma.values, mma.epilogue)
    NQ, STAGES = spec.tile_halves[0], spec.stages
    SPLITS, axes = spec.features.splits, 4 if spec.tile_heads == 1 else 5
    TM, RS, RO, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.q_registers
    RB, queries, halves = spec.bias_registers, half_type(axes), half_type(4)
    arrays = (queries, halves, halves, result_type(spec.planes, axes), array_type(axes - 1))

    @cuda.jit(arguments(arrays, 1, 1, spec.features.argument_type), *spec.launch)
    def fa2_forward(Q, K, V, O, L, scale, group, options):
        sQ = half_tile(0, NQ)
        rQ, rS = cuda.local.array(RQ, uint32), cuda.local.array(RS, float32)
        rBS, rO = cuda.local.array(RB, float32), cuda.local.array(RO, float32)
        rm, rl = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        warp_row, thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, Oh, Lh = grid.query_rows(Q, head), grid.query_rows(O, head), grid.query_rows(L, head)
        Kh, Vh = grid.key_rows(K, head), grid.rows_of_values(V, head)
        rows = uint32(Qh.shape[0])
        i0, split = grid.row_tile(options)  # Alg. 1 line 3: row tile i
        j0, j_end = visits.columns_seen(i0, head)
        j0, j_end = visits.share_of_columns(j0, j_end, split, i0, head)
        scale, unit = products.units(scale, head)

        # Alg. 1 line 4: load Qi (and the first Kj, ahead of line 7)
        load.q(sQ, Qh, i0, head.Nq)
        stage = uint32(0)
        load.first_columns(Kh, Vh, j0, j_end, head.Nk)
        commit_async()
        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        softmax.start_of_lanes(rO, rl, rm, Tile(i0, j0, head, thread), split)
        wait_async()
        cuda.syncthreads()  # Qi is there
        products.load_fragments(rQ, sQ, warp_row)

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            tile = Tile(i0, j0, head, thread)
            scores.read_bias_or_state(rBS, tile)
            wait_async()
            cuda.syncthreads()  # Kj is there, or Kj and Vj; nobody reads what is loaded next
            # Alg. 1 line 7: load Vj, in flight during line 8; with two stages Kj+1 and Vj+1
            sK, sV, stage, j_next = load.columns_early(stage, Kh, Vh, j0, j_end, head.Nk, i0, head)
            commit_async()
            # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
            products.scores(rS, rQ, sQ, sK, warp_row, products.warp_column())
            scores.scale_bias_and_mask(rS, rBS, scale, tile)
            if STAGES == 1:
                wait_async()
                cuda.syncthreads()  # Vj is there; nobody reads sK any more
                # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
                j_next = load.next_k(sK, Kh, j0, j_end, head.Nk, i0, head)
                commit_async()
            # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
            softmax.online_of_lanes(rS, scale, rm, rl, rf)
            softmax.drop(rS, tile)
            # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
            softmax.rescale_rows(rO, rf)
            unit = products.add_output(rO, rS, sV, unit, options)
            j0 = j_next

        products.finish_output(rO, unit)
        softmax.sum_lanes(rl)  # Alg. 1 line 9: l of whole rows, whose columns lie with four lanes
        if SPLITS:  # merge_splits takes O, l and m of this block's columns
            epilogue.write_split(rO, rl, rm, split, i0, rows, head, thread)
        else:
            # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
            softmax.normalise_rows(rO, rl)
            epilogue.write_tile(rO, sQ, Oh, warp_row, i0, rows, thread)
            # FA-2 lines 13, 15: L = m + log l
            softmax.logsumexp(rl, rm, rl)
            epilogue.write_values(rl, Lh, i0, rows, thread)

    return fa2_forward


__doc__ = f"""{__doc__ or ""}
Scores and m are multiplied by log2(e), so that exponentials are powers of 2.
``stages`` is the number of tiles of K and of V in shared memory:

    stages    what is loaded while the kernel computes with Kj and Vj
    1         Vj during Sij = Qi KjT, and Kj+1 during the softmax and Pij Vj
    2         Kj+1 and Vj+1 during the complete step j; one barrier less, and more shared memory

Shared memory, 16-bit elements:  (Br + 2 stages Bc) d
    in bytes at the default tiles:  49152 (d=64, 128 x 128), 65536 (d=128, 128 x 64), 98304
    (d=256, 64 x 64)
    With P planes, d is rounded up to a multiple of 16, and the size is P times as large.

Accesses, elements per head:
    loads   Nq d + 2 Tr Nk d
    stores  Nq d + Nq

With a causal mask, a block loads only the K/V tiles that its row tile sees. With n key splits, Q is
loaded n times. The kernel then stores n (Nq d + 2 Nq) elements for ``merge_splits``, in place of O
and L.
"""
