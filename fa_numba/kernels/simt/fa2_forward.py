"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on CUDA cores.

One thread block takes one row tile Qi: the outer loop (line 3) is the grid. O, m and l stay in
registers from the first K/V tile to the last; O is normalised once, and one logsumexp leaves.

Shared memory, floats:  Br (d + 4) + Bc (d + 4) + Bc d + Br (Bc + TX)
    in bytes at the default tiles:  105472 (d=64, 128 x 64), 175104 (d=128, 128 x 64), 219136
    (d=256, 64 x 64); up to 255 registers, none spilled
Accesses, elements per head:  loads Nq d + 2 Tr Nk d, stores Nq d + Nq; with a causal mask only the
    K/V tiles that row tile i sees.
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
    make_scale_and_add,
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
    make_next_column,
    make_query_rows,
)


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (Tr, Hq, B) blocks."""
    Br, Bc, TX, d = spec.Br, spec.Bc, spec.tx_count, spec.head_dim
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    NQ, NK, NV, NP = spec.tile_floats
    AT_K, AT_V, AT_P = NQ, NQ + NK, NQ + NK + NV

    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    key_head = make_key_head(spec)
    lengths = make_lengths(spec.features)
    column_range = make_column_range(spec)
    next_column = make_next_column(spec)
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
    normalise_rows = make_normalise_rows(spec)
    logsumexp = make_logsumexp(spec)
    write_rows = make_write_rows(spec)
    write_values = make_write_values(spec)

    def fa2_forward(Q, K, V, O, L, scale, group, options):
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
        Lh = query_rows(L, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = lengths(rows, Kh.shape[0], b, options)

        # Alg. 1 line 3: row tile i. The tiles with most columns go first: a shorter tail.
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        j0 = next_column(j0, j_end, i0, b, h, options)

        # Alg. 1 line 4: load Qi (and the first Kj, ahead of line 7)
        load_q(sQ, Qh, i0, Nq, 0, d)
        if j0 < j_end:
            load_k(sK, Kh, j0, Nk, 0, d)
        commit_async()
        # Alg. 1 line 5: O = 0, l = 0, m = -inf, on chip
        start(rO, rl, rm)

        # Alg. 1 line 6: for each column tile j that row tile i sees
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Kj is there; nobody reads sV and sP any more
            # Alg. 1 line 7: load Vj, in flight during line 8
            load_v(sV, Vh, j0, Nk, 0, d)
            commit_async()
            # Alg. 1 line 8: Sij = scale Qi KjT
            scores(rS, sQ, sK, ty, tx)
            scale_and_mask(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
            # Alg. 1 line 9: m, P and l
            online_softmax(rS, scale, rm, rl, rf)
            drop(rS, i0, j0, b, h, options, ty, tx)
            store_p(sP, rS, options, ty, tx)
            wait_async()
            cuda.syncthreads()  # Vj and Pij are there; nobody reads sK any more
            # Alg. 1 line 7 of the next j: load Kj+1, in flight during line 10
            j0 = next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
            if j0 < j_end:
                load_k(sK, Kh, j0, Nk, 0, d)
            commit_async()
            # Alg. 1 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
            product(rT, sP, sV, ty, tx)
            scale_and_add(rO, rf, rT)
        wait_async()

        # Alg. 1 lines 12, 14: O = diag(l)^-1 O, written once
        normalise_rows(rO, rl)
        write_rows(rO, Oh, i0, rows, ty, tx)
        # Alg. 1 lines 13, 15: L = m + log l
        logsumexp(rl, rm, rl)
        write_values(rl, Lh, i0, rows, ty, tx)

    arrays = [array_type(4)] * 4 + [array_type(3)]
    arguments = (*arrays, types.float32, types.int32, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
