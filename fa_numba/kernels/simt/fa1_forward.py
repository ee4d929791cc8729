"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on CUDA cores.

One thread block computes one (batch entry, head): both loops run inside it. Each step of the outer
loop loads O, l and m from global memory, normalises O, and stores O, l and m. With query splits,
several thread blocks share a head, as in the released code: each thread block has its own rows of
Q, and reads all of K and V. The paper has one thread block per head. Scores and m are multiplied by
log2(e), so that exponentials are powers of 2. Shared memory and accesses are at the end.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, simt
from fa_numba.parts.records import State, Tile


@cache
def make_forward(spec):
    """Return the kernel for ``spec``. The grid is (query splits, query heads, batch entries)."""
    grid, visits, load = bind(spec, simt.grid, simt.visits, simt.load)
    products, scores, softmax = bind(spec, simt.products, simt.scores, simt.softmax)
    (fa1_state,) = bind(spec, simt.fa1_state)
    Bc = spec.Bc
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4

    arrays = [array_type(4)] * 4 + [array_type(3)] * 3

    @cuda.jit(arguments(arrays, 1, 2, spec.features.argument_type), *spec.launch)
    def fa1_forward(Q, K, V, O, L, l, m, scale, group, split_rows, options):
        sQ, sK, sV, sP = load.shared_memory()
        rS, rO = cuda.local.array(RS, float32), cuda.local.array(RO, float32)
        rT, rm = cuda.local.array(RO, float32), cuda.local.array(TM, float32)
        rl, rf = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, Oh = grid.query_rows(Q, head), grid.query_rows(O, head)
        Kh, Vh = grid.key_rows(K, head), grid.key_rows(V, head)
        state = State(Oh, Oh, grid.query_rows(l, head), grid.query_rows(m, head))
        rows = uint32(Qh.shape[0])

        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        i_first, i_last = visits.own_rows(split_rows, rows)
        j0, j_end = visits.column_passes(i_first, i_last, head)
        fa1_state.initialise(rO, rl, rm, state, i_first, i_last, head, thread)
        i_stop = uint32(min(i_last, head.Nq))

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            i0, i_end = visits.rows_seen(j0, i_first, i_stop, head)
            cuda.syncthreads()  # nobody reads sQ, sK and sV any more
            # Alg. 1 lines 6, 8: load Kj, Vj and the first Qi
            if i0 < i_end:
                load.k(sK, Kh, j0, head.Nk)
                load.v(sV, Vh, j0, head.Nk)
                load.q(sQ, Qh, i0, i_stop)
            commit_async()
            # Alg. 1 line 7: for each row tile i that sees column tile j; the first pass takes all
            while i0 < i_end:
                visit = visits.row_ahead(i0, i_end, j0, head)
                wait_async()
                cuda.syncthreads()  # Qi is there; nobody reads sP any more
                tile = Tile(i0, j0, head, thread)
                # Alg. 1 line 8: load Oi, li, mi; line 12: diag(li) Oi, before line 11 replaces li
                fa1_state.read_state(rO, rl, rm, state, visit, tile, i_stop)
                softmax.scale_rows(rO, rl)
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                products.scores(rS, sQ, sK, thread)
                scores.scale_and_mask(rS, scale, tile)
                # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
                softmax.online(rS, scale, rm, rl, rf)
                softmax.drop(rS, tile)
                products.store_p(sP, rS, options, thread)
                cuda.syncthreads()  # Pij is there; nobody reads sQ any more
                # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
                i_next = load.next_q(sQ, Qh, visit, i0, i_end, i_stop)
                commit_async()
                # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                products.output(rT, sP, sV, thread)
                products.scale_and_add(rO, rf, rT)
                # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
                softmax.normalise_rows(rO, rl)
                fa1_state.write_state(rO, rl, rm, state, i0, i_stop, thread)
                i0 = i_next
            j0 = uint32(j0 + Bc)
        # FA-2 lines 13, 15: L = m + log l
        fa1_state.write_logsumexp(rl, rm, L, state, i_first, i_last, head, thread)

    return fa1_forward


__doc__ = f"""{__doc__ or ""}
Shared memory, floats:  Br d + 2 Bc d + Br Bc, swizzled
    in bytes at the default tiles:  163840 (d=64, 128 x 128), 163840 (d=128, 128 x 64), 139264
    (d=256, 64 x 32); up to 255 registers per thread, and no spills

Accesses, elements per head:
    loads   2 Nk d for each query split + Tc Nq d + (Tc - 1) (Nq d + 2 Nq)
    stores  Tc (Nq d + 2 Nq)

With a causal mask, a pass visits only the row tiles that see column tile j. With a returned L there
are 2 Nq loads and Nq stores more. Line 2 of the algorithm sets O = 0, l = 0 and m = -inf:

    case              where line 2 is carried out
    normally          in the first pass, which visits all row tiles and does not read O, l and m.
                      With Nq > Nk it also visits row tiles that see no column
    window, q_lens    before the passes, with Nq (d + 2) stores; all passes read O, l and m
    block mask        in the first visit of each row tile, which does not read O, l and m, and
                      before the passes in row tiles that no column tile visits
"""
