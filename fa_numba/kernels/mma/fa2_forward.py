"""FlashAttention-2, forward: Q outer, K/V inner (arXiv 2307.08691, Algorithm 1), on tensor cores.

One thread block takes one row tile Qi: the outer loop (line 3) is the grid. A warp takes 32 or 16
of its rows and all columns, so that only its own lanes share a row. S, P, O, m and l stay in
registers; O is normalised once, and one logsumexp leaves.

With one stage of K and V, Vj is on its way during Sij = Qi KjT, and Kj+1 during the softmax and
Pij Vj. With two, Kj+1 and Vj+1 are on their way during all of it: one barrier less, more memory.

Shared memory, 16-bit elements:  (Br + 2 stages Bc) (d + 8)
    in bytes at the default tiles:  55296 (d=64, 128 x 128), 69632 (d=128, 128 x 64), 101376
    (d=256, 64 x 64)
Accesses, elements per head:  loads Nq d + 2 Tr Nk d, stores Nq d + Nq; with a causal mask only the
    K/V tiles that row tile i sees.
m is kept in units of log2.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile
from fa_numba.parts.dropout import make_drop
from fa_numba.parts.fragments import (
    make_add_fragment_product,
    make_fragment_scores,
    make_load_halves,
    make_load_q,
    make_write_tile,
)
from fa_numba.parts.rows import (
    make_normalise_rows,
    make_rescale_rows,
    make_start,
    make_write_values,
)
from fa_numba.parts.softmax import (
    make_logsumexp,
    make_online_softmax,
    make_scale_and_mask,
    make_sum_lanes,
)
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
    Br, Bc, d = spec.Br, spec.Bc, spec.head_dim
    TM, RS, RO = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RQ, ROWS = spec.q_registers, spec.warp_rows
    NQ, NK, NV = spec.tile_halves
    STAGES = spec.stages
    AT_K, AT_V = NQ, NQ + STAGES * NK

    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    key_head = make_key_head(spec)
    lengths = make_lengths(spec.features)
    column_range = make_column_range(spec)
    next_column = make_next_column(spec)
    load_rows = make_load_halves(Br, spec)
    load_columns = make_load_halves(Bc, spec)
    load_fragments = make_load_q(spec)
    start = make_start(spec)
    scores = make_fragment_scores(spec)
    scale_and_mask = make_scale_and_mask(spec)
    online_softmax = make_online_softmax(spec, whole_rows=False)
    sum_lanes = make_sum_lanes(spec)
    drop = make_drop(spec)
    rescale_rows = make_rescale_rows(spec)
    add_product = make_add_fragment_product(spec)
    normalise_rows = make_normalise_rows(spec)
    logsumexp = make_logsumexp(spec)
    write_rows = make_write_tile(spec)
    write_values = make_write_values(spec)

    @device_function
    def column_tiles(stage):
        sK = half_tile(uint32(AT_K + stage * NK), NK)
        return sK, half_tile(uint32(AT_V + stage * NV), NV)

    def fa2_forward(Q, K, V, O, L, scale, group, options):
        sQ = half_tile(0, NQ)
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
        Kh, Vh = key_rows(K, b, hk, options), key_rows(V, b, hk, options)
        Lh = query_rows(L, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = lengths(rows, Kh.shape[0], b, options)

        # Alg. 1 line 3: row tile i. The tiles with most columns go first: a shorter tail.
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        j0 = next_column(j0, j_end, i0, b, h, options)

        # Alg. 1 line 4: load Qi (and the first Kj, ahead of line 7)
        load_rows(sQ, Qh, i0, Nq, d)
        stage = uint32(0)
        sK, sV = column_tiles(stage)
        if j0 < j_end:
            load_columns(sK, Kh, j0, Nk, d)
            if STAGES == 2:
                load_columns(sV, Vh, j0, Nk, d)
        commit_async()
        # Alg. 1 line 5: O = 0, l = 0, m = -inf, on chip
        start(rO, rl, rm)
        wait_async()
        cuda.syncthreads()  # Qi is there
        load_fragments(rQ, sQ, warp_row)

        # Alg. 1 line 6: for each column tile j that row tile i sees
        while j0 < j_end:
            wait_async()
            cuda.syncthreads()  # Kj is there, or Kj and Vj; nobody reads what is loaded next
            if STAGES == 1:
                # Alg. 1 line 7: load Vj, in flight during line 8
                load_columns(sV, Vh, j0, Nk, d)
            else:
                # Alg. 1 line 7 of the next j: load Kj+1 and Vj+1, in flight during lines 8 to 10
                j_next = next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
                sK, sV = column_tiles(stage)
                stage = uint32(stage ^ uint32(1))
                if j_next < j_end:
                    sK_next, sV_next = column_tiles(stage)
                    load_columns(sK_next, Kh, j_next, Nk, d)
                    load_columns(sV_next, Vh, j_next, Nk, d)
            commit_async()
            # Alg. 1 line 8: Sij = scale Qi KjT
            scores(rS, rQ, sQ, sK, warp_row, uint32(0))
            scale_and_mask(rS, scale, i0, j0, Nq, Nk, b, h, options, ty, tx)
            if STAGES == 1:
                wait_async()
                cuda.syncthreads()  # Vj is there; nobody reads sK any more
                # Alg. 1 line 7 of the next j: load Kj+1, in flight during lines 9 and 10
                j_next = next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
                if j_next < j_end:
                    load_columns(sK, Kh, j_next, Nk, d)
                commit_async()
            # Alg. 1 line 9: m, P and l
            online_softmax(rS, scale, rm, rl, rf)
            drop(rS, i0, j0, b, h, options, ty, tx)
            # Alg. 1 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
            rescale_rows(rO, rf)
            add_product(rO, rS, sV, options)
            j0 = j_next

        # Alg. 1 line 9: l of whole rows, whose columns lie with four lanes
        sum_lanes(rl)
        # Alg. 1 lines 12, 14: O = diag(l)^-1 O, written once
        normalise_rows(rO, rl)
        write_rows(rO, sQ, Oh, warp_row, i0, rows, ty, tx)
        # Alg. 1 lines 13, 15: L = m + log l
        logsumexp(rl, rm, rl)
        write_values(rl, Lh, i0, rows, ty, tx)

    halves, floats = array_type(4, types.uint16), array_type(3)
    scalars = (types.float32, types.int32)
    arguments = (*[halves] * 4, floats, *scalars, spec.features.argument_type)
    return Kernel(fa2_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
