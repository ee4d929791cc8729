"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on tensor cores.

One thread block takes one (batch, head): both loops run inside it. O, l and m pass through global
memory in every pass over K/V, and O is normalised each time: in float32 (``A``) until a row tile's
last pass rounds it to O, as the released code did. ``query_splits`` as on CUDA cores.

``warp_partition``: a warp takes 32 or 16 rows of a tile and all columns; or, with "keys", all rows
and its share of the columns, as in the released code ("split-K", arXiv 2307.08691, section 3.3).
Each warp then has an O, l and m of its own, all of which meet in shared memory: once, after the
product, where the released code exchanged m and l before it and O after it.

Shared memory, 16-bit elements:  (Br + 2 Bc) (d + 8)
    in bytes at the default tiles:  92160 (d=64, 128 x 256), 174080 (d=128, 128 x 256), 202752
    (d=256, 128 x 128)
    With "keys" and W warps 4 (W - 1) Br (d + 2) bytes more.
Accesses, elements per head:  loads 2 Nk d for each query split + Tc Nq d + (Tc - 1) (Nq d + 2 Nq),
    stores (Tc - 1) Nq d + Nq d + 2 Tc Nq; with a causal mask only the row tiles that see column
    tile j. The first pass knows line 2's O = 0, l = 0, m = -inf and reads none of them. With L for
    the caller 2 Nq loads and Nq stores more.
m is kept in units of log2.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.dropout import make_drop
from fa_numba.parts.fragments import (
    make_add_fragment_product,
    make_combine,
    make_fragment_scores,
    make_load_halves,
    make_load_q,
    make_read_fragments,
    make_write_fragments,
    make_write_halves,
)
from fa_numba.parts.layout import make_warp_column
from fa_numba.parts.rows import (
    make_normalise_rows,
    make_read_values,
    make_scale_rows,
    make_start,
    make_write_values,
)
from fa_numba.parts.softmax import (
    make_logsumexp,
    make_online_softmax,
    make_scale_and_mask,
)
from fa_numba.parts.visits import (
    make_column_range,
    make_key_head,
    make_key_rows,
    make_lengths,
    make_next_column,
    make_next_row,
    make_query_rows,
    make_row_range,
)


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (query splits, Hq, B) blocks."""
    Br, Bc, d = spec.Br, spec.Bc, spec.head_dim
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RQ, ROWS = spec.q_registers, spec.warp_rows
    NQ, NK, NV = spec.tile_halves
    AT_K, AT_V = NQ, NQ + NK
    AT_O, NO = sum(spec.tile_halves) // 2, spec.exchange_floats
    return_lse, initialises = spec.return_lse, spec.features.initialises

    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    key_head = make_key_head(spec)
    lengths = make_lengths(spec.features)
    column_range = make_column_range(spec)
    row_range = make_row_range(spec, first_pass_takes_all=not initialises)
    next_column = make_next_column(spec)
    next_row = make_next_row(spec)
    load_rows = make_load_halves(Br, spec)
    load_columns = make_load_halves(Bc, spec)
    load_fragments = make_load_q(spec)
    start = make_start(spec)
    warp_column = make_warp_column(spec)
    scores = make_fragment_scores(spec)
    scale_and_mask = make_scale_and_mask(spec)
    online_softmax = make_online_softmax(spec)
    drop = make_drop(spec)
    scale_rows = make_scale_rows(spec)
    add_product = make_add_fragment_product(spec)
    combine = make_combine(spec)
    normalise_rows = make_normalise_rows(spec)
    logsumexp = make_logsumexp(spec)
    read_fragments = make_read_fragments(spec)
    read_values = make_read_values(spec)
    read_maxima = make_read_values(spec, unread=NEG_INF)
    write_fragments = make_write_fragments(spec)
    write_rows = make_write_halves(spec)
    write_values = make_write_values(spec)

    def fa1_forward(Q, K, V, O, A, L, l, m, scale, group, split_rows, options):
        sQ = half_tile(0, NQ)
        sK = half_tile(AT_K, NK)
        sV = half_tile(AT_V, NV)
        sO = shared_tile(AT_O, NO)
        rQ = cuda.local.array(RQ, uint32)
        rS = cuda.local.array(RS, float32)
        rO = cuda.local.array(RO, float32)
        rm = cuda.local.array(TM, float32)
        rl = cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        tx = uint32(cuda.threadIdx.x) % uint32(4)
        warp_row = uint32(uint32(cuda.threadIdx.x) // uint32(32) * ROWS)
        ty = uint32(warp_row + uint32(cuda.threadIdx.x) % uint32(32) // uint32(4))
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        hk = key_head(h, group)
        Qh, Oh = query_rows(Q, b, h, options), query_rows(O, b, h, options)
        Ah = query_rows(A, b, h, options)
        Kh, Vh = key_rows(K, b, hk, options), key_rows(V, b, hk, options)
        lh, mh = query_rows(l, b, h, options), query_rows(m, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = lengths(rows, Kh.shape[0], b, options)

        # The rows of this block: all of them, unless the queries are split. The splits with most
        # columns go first: a shorter tail.
        i_first = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * split_rows)
        i_last = uint32(min(rows, uint32(i_first + split_rows)))
        j0, j_end = column_range(i_first, i_last, Nq, Nk, options)

        # Alg. 1 line 2: O = 0, l = 0, m = -inf; the first pass does it where it takes all rows
        if initialises:
            i0 = i_first
            while i0 < i_last:
                start(rO, rl, rm)
                write_rows(rO, Oh, i0, i_last, ty, tx)
                write_fragments(rO, Ah, i0, i_last, ty, tx)
                write_values(rl, lh, i0, i_last, ty, tx)
                write_values(rm, mh, i0, i_last, ty, tx)
                i0 = uint32(i0 + Br)
        else:
            j_end = uint32(max(j_end, uint32(1)))
        i_stop = uint32(min(i_last, Nq))

        # Alg. 1 line 5: for each column tile j that these rows see
        while j0 < j_end:
            # Alg. 1 line 7: the row tiles that see column tile j; the first pass takes all
            i0, i_end = row_range(j0, i_first, i_stop, Nq, Nk, options)
            i0 = next_row(i0, i_end, j0, b, h, options)
            seen = i_stop  # rows whose O, l and m some pass has written
            if not initialises and j0 == uint32(0):
                seen = uint32(0)
            cuda.syncthreads()  # nobody reads sQ, sK and sV any more
            # Alg. 1 lines 6, 8: load Kj, Vj and the first Qi
            if i0 < i_end:
                load_columns(sK, Kh, j0, Nk, d)
                load_columns(sV, Vh, j0, Nk, d)
                load_rows(sQ, Qh, i0, i_stop, d)
            commit_async()
            # Alg. 1 line 7: for each row tile i
            while i0 < i_end:
                wait_async()
                cuda.syncthreads()  # Qi is there
                load_fragments(rQ, sQ, warp_row)
                # Alg. 1 line 8: load Oi, li, mi
                read_fragments(rO, Ah, i0, seen, ty, tx)
                read_values(rl, lh, i0, seen, ty, tx)
                read_maxima(rm, mh, i0, seen, ty, tx)
                # Alg. 1 line 9: Sij = scale Qi KjT
                scores(rS, rQ, sQ, sK, warp_row, warp_column())
                # Alg. 1 line 12: diag(li) Oi, before line 11 replaces li
                scale_rows(rO, rl)
                scale_and_mask(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
                cuda.syncthreads()  # nobody reads sQ any more
                # Alg. 1 line 8 of the next i: load Qi+1, in flight from line 10 on
                i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
                if i_next < i_end:
                    load_rows(sQ, Qh, i_next, i_stop, d)
                commit_async()
                # Alg. 1 lines 10, 11: m, P and l, with e^(m~ - m_new) folded into P
                online_softmax(rS, scale, rm, rl, rf)
                drop(rS, i0, j0, b, h, options, ty, tx)
                # Alg. 1 line 12: O = diag(l_new)^-1 (diag(li) e^(mi - m_new) Oi + Pij Vj)
                scale_rows(rO, rf)
                add_product(rO, rS, sV, options)
                # ... its sum over warps, and their m and l, where they split the keys
                combine(rO, rm, rl, sO, ty, tx)
                normalise_rows(rO, rl)
                # ... in float32, until no column tile is left that row tile i sees
                _, j_last = column_range(i0, uint32(i0 + Br), Nq, Nk, options)
                if next_column(uint32(j0 + Bc), j_last, i0, b, h, options) < j_last:
                    write_fragments(rO, Ah, i0, i_stop, ty, tx)
                else:
                    write_rows(rO, Oh, i0, i_stop, ty, tx)
                # Alg. 1 line 13: write li, mi
                write_values(rl, lh, i0, i_stop, ty, tx)
                write_values(rm, mh, i0, i_stop, ty, tx)
                i0 = i_next
            j0 = uint32(j0 + Bc)

        if return_lse:
            # Not in Algorithm 1: L = m + log l, for the caller
            Lh = query_rows(L, b, h, options)
            i0 = i_first
            while i0 < i_last:
                read_values(rl, lh, i0, i_last, ty, tx)
                read_values(rm, mh, i0, i_last, ty, tx)
                logsumexp(rl, rm, rl)
                write_values(rl, Lh, i0, i_last, ty, tx)
                i0 = uint32(i0 + Br)

    halves = array_type(4, types.uint16)
    arrays = [*[halves] * 4, array_type(4), *[array_type(3)] * 3]
    scalars = (types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
