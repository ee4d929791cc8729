"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on CUDA cores.

One thread block computes one row tile Qi: the outer loop (line 3) becomes the grid. Row tiles with
many columns come first, so that short thread blocks run last. O, m and l stay in registers from the
first K/V tile to the last. O is normalised once, and one logsumexp per row is stored. Scores and m
are multiplied by log2(e), so that exponentials are powers of 2. The end of this file gives shared
memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, simt
from fa_numba.parts.records import Tile


@cache
def make_forward(spec):
    """Return the kernel for ``spec``. The grid is (Tr, query heads, batch entries). With n key
    splits, it is (n Tr, query heads, batch entries).
    """
    grid, visits, load = bind(spec, simt.grid, simt.visits, simt.load)
    products, scores, softmax = bind(spec, simt.products, simt.scores, simt.softmax)
    values, epilogue = bind(spec, simt.values, simt.epilogue)
    SPLITS = spec.features.splits
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4

    arrays = [array_type(4)] * 4 + [array_type(3)]

    @cuda.jit(arguments(arrays, 1, 1, spec.features.argument_type), *spec.launch)
    def fa2_forward(Q, K, V, O, L, scale, group, options):
        sQ, sK, sV, sP = load.shared_memory()
        rS, rO = cuda.local.array(RS, float32), cuda.local.array(RO, float32)
        rT, rm = cuda.local.array(RO, float32), cuda.local.array(TM, float32)
        rl, rf = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, Oh = grid.query_rows(Q, head), grid.query_rows(O, head)
        Kh, Vh = grid.key_rows(K, head), grid.key_rows(V, head)
        Lh = grid.query_rows(L, head)
        rows = uint32(Qh.shape[0])

        i0, split = grid.row_tile(options)  # Alg. 1 line 3: row tile i
        j0, j_end = visits.columns_seen(i0, head)
        j0, j_end = visits.share_of_columns(j0, j_end, split, i0, head)

        # Alg. 1 line 4: load Qi (and the first Kj, ahead of line 7)
        load.q(sQ, Qh, i0, head.Nq)
        if j0 < j_end:
            load.k(sK, Kh, j0, head.Nk)
        commit_async()
        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        softmax.start(rO, rl, rm, Tile(i0, j0, head, thread), split)

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Kj is there; nobody reads sV and sP any more
            tile = Tile(i0, j0, head, thread)
            # Alg. 1 line 7: load Vj, in flight during line 8
            load.v(sV, Vh, j0, head.Nk)
            commit_async()
            # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
            products.scores(rS, sQ, sK, thread)
            scores.scale_and_mask(rS, scale, tile)
            # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
            softmax.online(rS, scale, rm, rl, rf)
            softmax.drop(rS, tile)
            products.store_p(sP, rS, options, thread)
            wait_async()
            cuda.syncthreads()  # Vj and Pij are there; nobody reads sK any more
            # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
            j_next = load.next_k(sK, Kh, j0, j_end, head.Nk, i0, head)
            commit_async()
            # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
            products.output(rT, sP, sV, thread)
            products.scale_and_add(rO, rf, rT)
            j0 = j_next
        wait_async()

        if SPLITS:  # merge_splits takes O, l and m of this block's columns
            epilogue.write_split(rO, rl, rm, split, i0, rows, head, thread)
        else:
            # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
            softmax.normalise_rows(rO, rl)
            epilogue.write_rows(rO, Oh, i0, rows, thread)
            # FA-2 lines 13, 15: L = m + log l
            softmax.logsumexp(rl, rm, rl)
            values.write(rl, Lh, i0, rows, thread)

    return fa2_forward


__doc__ = f"""{__doc__ or ""}
Shared memory, floats:  Br d + 2 Bc d + Br Bc, swizzled
    in bytes at the default tiles:  98304 (d=64, 128 x 64), 212992 (d=128, 128 x 96), 212992
    (d=256, 64 x 64); up to 255 registers per thread, and no spills

Accesses, elements per head:
    loads   Nq d + 2 Tr Nk d
    stores  Nq d + Nq

With a causal mask, a block loads only the K/V tiles that its row tile sees. With n key splits, Q is
loaded n times. The kernel then stores n (Nq d + 2 Nq) elements for ``merge_splits``, in place of O
and L.
"""
