"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on tensor cores.

One thread block computes one (batch entry, head): both loops run inside it. Each step of the outer
loop loads O, l and m from global memory, normalises O, and stores O, l and m. O is stored in the
float32 array ``A`` until the last step of a row tile rounds it. With query splits, several thread
blocks share a head. The end of this file explains warps, shared memory and accesses.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.device.signature import arguments, array_type, half_type, result_type
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.parts import bind, mma
from fa_numba.parts.records import State, Tile


@cache
def make_forward(spec):
    """Return the kernel for ``spec``. The grid is (query splits, query heads, batch entries)."""
    grid, visits, load = bind(spec, mma.grid, mma.visits, mma.load)
    products, scores, softmax = bind(spec, mma.products, mma.scores, mma.softmax)
    (fa1_state,) = bind(spec, mma.fa1_state)
    TM, RS, RO, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.q_registers
    Bc, RB, halves = spec.Bc, spec.bias_registers, half_type(4)
    arrays = [*[halves] * 3, result_type(spec.planes, 4), array_type(4), *[array_type(3)] * 3]

    @cuda.jit(arguments(arrays, 1, 2, spec.features.argument_type), *spec.launch)
    def fa1_forward(Q, K, V, O, A, L, l, m, scale, group, split_rows, options):
        sQ, sK, sV, sO = load.shared_memory()
        rQ, rS = cuda.local.array(RQ, uint32), cuda.local.array(RS, float32)
        rBS, rO = cuda.local.array(RB, float32), cuda.local.array(RO, float32)
        rm, rl = cuda.local.array(TM, float32), cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        warp_row, thread = grid.thread()
        head = grid.head(Q, K, group, options)
        Qh, Oh = grid.query_rows(Q, head), grid.query_rows(O, head)
        Ah = grid.query_rows(A, head)
        Kh, Vh = grid.key_rows(K, head), grid.rows_of_values(V, head)
        lh, mh = grid.query_rows(l, head), grid.query_rows(m, head)
        state = State(Oh, Ah, lh, mh)
        rows = uint32(Qh.shape[0])
        scale, unit = products.units(scale, head)

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
                cuda.syncthreads()  # Qi is there
                tile = Tile(i0, j0, head, thread)
                products.load_fragments(rQ, sQ, warp_row)
                scores.read_bias_or_state(rBS, tile)
                # Alg. 1 line 8: load Oi, li, mi
                fa1_state.read_state(rO, rl, rm, state, visit, tile, i_stop)
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                products.scores(rS, rQ, sQ, sK, warp_row, products.warp_column())
                # Alg. 1 line 12: diag(li) Oi, before line 11 replaces li
                softmax.scale_rows(rO, rl)
                scores.scale_bias_and_mask(rS, rBS, scale, tile)
                cuda.syncthreads()  # nobody reads sQ any more
                # FA-1 line 8, FA-2 line 7 of the next tile: load it, in flight meanwhile
                i_next = load.next_q(sQ, Qh, visit, i0, i_end, i_stop)
                commit_async()
                # FA-1 lines 10, 11, FA-2 line 9: m, l, and P = e^(S - m) of the new m
                softmax.online(rS, scale, rm, rl, rf)
                softmax.drop(rS, tile)
                # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                softmax.scale_rows(rO, rf)
                unit = products.add_output(rO, rS, sV, unit, options)
                softmax.combine(rO, rm, rl, sO, thread)  # ... over warps, where they split the keys
                # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
                softmax.normalise_rows(rO, rl)
                fa1_state.write_state(rO, rl, rm, state, visit, tile, i_stop)
                i0 = i_next
            j0 = uint32(j0 + Bc)
        # FA-2 lines 13, 15: L = m + log l
        fa1_state.write_logsumexp(rl, rm, L, state, i_first, i_last, head, thread)

    return fa1_forward


__doc__ = f"""{__doc__ or ""}
Scores and m are multiplied by log2(e), so that exponentials are powers of 2.
``warp_partition`` says what the warps of a thread block divide:

    rows    a warp computes 32 or 16 rows of a tile, and all columns
    keys    a warp computes all rows, and its share of the columns, as in the released code
            ("split-K", arXiv 2307.08691, section 3.3)

With "keys", each warp has its own O, l and m. They are combined in shared memory once, after the
product P V. The released code exchanged m and l before this product, and O after it.

Shared memory, 16-bit elements:  (Br + 2 Bc) d
    in bytes at the default tiles:  81920 (d=64, 128 x 256), 163840 (d=128, 128 x 256), 196608
    (d=256, 128 x 128)
    With P planes, d is rounded up to a multiple of 16, and the size is P times as large.
    With "keys" and W warps there are 4 (W - 1) Br (d + 2) bytes more.

Accesses, elements per head:
    loads   2 Nk d for each query split + Tc Nq d + (Tc - 1) (Nq d + 2 Nq)
    stores  (Tc - 1) Nq d + Nq d + 2 Tc Nq

With a causal mask, a pass visits only the row tiles that see column tile j. With planes, A is O
itself. With a returned L there are 2 Nq loads and Nq stores more. Line 2 of the algorithm sets O =
0, l = 0 and m = -inf:

    case              where line 2 is carried out
    normally          in the first pass, which visits all row tiles and does not read O, l and m.
                      With Nq > Nk it also visits row tiles that see no column
    window, q_lens    before the passes, in A and in O, with Nq (2 d + 2) stores; all passes read
                      A, l and m
    block mask        in the first visit of each row tile, which does not read A, l and m, and
                      before the passes, without A, in row tiles that no column tile visits
"""
