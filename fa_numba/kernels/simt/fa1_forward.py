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

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.dropout import make_drop
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
from fa_numba.parts.visits import (
    make_column_range,
    make_key_head,
    make_key_rows,
    make_lengths,
    make_next_row,
    make_query_rows,
    make_row_range,
)


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (query splits, Hq, B) blocks."""
    Br, Bc, TX, d = spec.Br, spec.Bc, spec.tx_count, spec.head_dim
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    NQ, NK, NV, NP = spec.tile_floats
    AT_K, AT_V, AT_P = NQ, NQ + NK, NQ + NK + NV
    return_lse, initialises = spec.return_lse, spec.features.initialises

    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    key_head = make_key_head(spec)
    lengths = make_lengths(spec.features)
    column_range = make_column_range(spec)
    row_range = make_row_range(spec, first_pass_takes_all=not initialises)
    next_row = make_next_row(spec)
    load_q = make_load_tile(Br, spec.d4, spec.pitch_qk, spec.threads, spec.aligned)
    load_k = make_load_tile(Bc, spec.d4, spec.pitch_qk, spec.threads, spec.aligned)
    load_v = make_load_tile(Bc, spec.pitch_v, spec.pitch_v, spec.threads, spec.aligned)
    start = make_start(spec)
    scores = make_scores(spec)
    scale_and_mask = make_scale_and_mask(spec)
    online_softmax = make_online_softmax(spec)
    drop = make_drop(spec)
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
        tx = uint32(cuda.threadIdx.x) % uint32(TX)
        ty = uint32(cuda.threadIdx.x) // uint32(TX)
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        hk = key_head(h, group)
        Qh, Oh = query_rows(Q, b, h, options), query_rows(O, b, h, options)
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
            cuda.syncthreads()  # nobody reads sQ, sK and sV any more
            # Alg. 1 lines 6, 8: load Kj, Vj and the first Qi
            if i0 < i_end:
                load_k(sK, Kh, j0, Nk, 0, d)
                load_v(sV, Vh, j0, Nk, 0, d)
                load_q(sQ, Qh, i0, i_stop, 0, d)
            commit_async()
            # Alg. 1 line 7: for each row tile i
            while i0 < i_end:
                wait_async()
                cuda.syncthreads()  # Qi is there; nobody reads sP any more
                # Alg. 1 line 8: load Oi, li, mi
                if initialises or j0 > uint32(0):
                    read_rows(rO, Oh, i0, i_stop, ty, tx)
                    read_values(rl, lh, i0, i_stop, ty, tx)
                    read_values(rm, mh, i0, i_stop, ty, tx)
                else:
                    start(rO, rl, rm)
                # Alg. 1 line 12: diag(li) Oi, before line 11 replaces li
                scale_rows(rO, rl)
                # Alg. 1 line 9: Sij = scale Qi KjT
                scores(rS, sQ, sK, ty, tx)
                scale_and_mask(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
                # Alg. 1 lines 10, 11: m, P and l, with e^(m~ - m_new) folded into P
                online_softmax(rS, scale, rm, rl, rf)
                drop(rS, i0, j0, b, h, options, ty, tx)
                store_p(sP, rS, options, ty, tx)
                cuda.syncthreads()  # Pij is there; nobody reads sQ any more
                # Alg. 1 line 8 of the next i: load Qi+1, in flight during line 12
                i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
                if i_next < i_end:
                    load_q(sQ, Qh, i_next, i_stop, 0, d)
                commit_async()
                # Alg. 1 line 12: O = diag(l_new)^-1 (diag(li) e^(mi - m_new) Oi + Pij Vj)
                product(rT, sP, sV, ty, tx)
                scale_and_add(rO, rf, rT)
                normalise_rows(rO, rl)
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

    arrays = [array_type(4)] * 4 + [array_type(3)] * 3
    scalars = (types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
