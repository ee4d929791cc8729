"""FlashAttention-2, backward: a grid over K/V blocks, Q inner (arXiv 2307.08691, Algorithm 2), on
CUDA cores.

One thread block takes one column tile Kj, Vj: the outer loop (line 5) is the grid. dK and dV stay
in registers; P is recomputed from L alone. dQ is summed in global memory by atomic adds, in no
fixed order, or by a second sweep with Q outer, in one order.

Shared memory, floats:  2 (Br + Bc) (d + 4) + 2 Br (Bc + TX)
Accesses, elements per head:  loads 2 Nk d + Tc (2 Nq d + 2 Nq), stores 2 Nk d, and Tc Nq d atomic
    adds to dQ, each a load and a store; with a causal mask only the row tiles that see column
    tile j. The row sums D take 2 Nq d loads before, and Nq + Nq d stores with dQ = 0. The second
    sweep takes the place of the adds: loads 2 Nq d + 2 Nq + 2 Tr Nk d, stores Nq d.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import shared_tile
from fa_numba.parts.dropout import make_drop
from fa_numba.parts.gradients import (
    make_add_transposed_product,
    make_cap_slopes,
    make_scale_columns,
    make_score_gradients,
    make_start_columns,
    make_store_ds,
    make_write_columns,
)
from fa_numba.parts.products import make_product, make_scores
from fa_numba.parts.rows import make_add_rows, make_read_values, make_write_rows
from fa_numba.parts.softmax import (
    FULL_WARP,
    make_scale_and_mask,
    make_softmax_from_lse,
    make_store_p,
)
from fa_numba.parts.tile_load import make_load_tile
from fa_numba.parts.visits import (
    make_column_range,
    make_key_head,
    make_key_rows,
    make_lengths,
    make_next_column,
    make_next_row,
    make_query_heads,
    make_query_rows,
    make_row_range,
)


@cache
def make_backward(spec, atomic=True):
    """The kernel for ``spec``; launched over (Tc, Hk, B) blocks.

    Without ``atomic`` it leaves dQ to ``make_query_gradients``.
    """
    Br, Bc, TX, d = spec.Br, spec.Bc, spec.tx_count, spec.head_dim
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RK, RG = spec.CM * spec.DN * 4, spec.cap_registers
    NQ, NK, NP = spec.tile_floats
    AT_DO, AT_K, AT_V, AT_P, AT_DS = NQ, 2 * NQ, 2 * NQ + NK, 2 * NQ + 2 * NK, 2 * NQ + 2 * NK + NP

    query_heads = make_query_heads(spec)
    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    lengths = make_lengths(spec.features)
    row_range = make_row_range(spec)
    next_row = make_next_row(spec)
    load_rows = make_load_tile(Br, spec.columns, spec.pitch_qk, spec.threads, spec.aligned)
    load_columns = make_load_tile(Bc, spec.columns, spec.pitch_qk, spec.threads, spec.aligned)
    start_columns = make_start_columns(spec)
    read_values = make_read_values(spec)
    scores = make_scores(spec)
    cap_slopes = make_cap_slopes(spec)
    scale_and_mask = make_scale_and_mask(spec)
    softmax_from_lse = make_softmax_from_lse(spec)
    score_gradients = make_score_gradients(spec)
    drop = make_drop(spec)
    store_p = make_store_p(spec)
    store_ds = make_store_ds(spec)
    add_transposed_product = make_add_transposed_product(spec)
    product = make_product(spec)
    add_rows = make_add_rows(spec)
    scale_columns = make_scale_columns(spec)
    write_columns = make_write_columns(spec)

    def fa2_backward(Q, K, V, dO, L, D, dQ, dK, dV, scale, scale_log2, group, options):
        sQ = shared_tile(0, NQ)
        sdO = shared_tile(AT_DO, NQ)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NK)
        sP = shared_tile(AT_P, NP)
        sdS = shared_tile(AT_DS, NP)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rdQ = cuda.local.array(RQ, float32)
        rdK = cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        tx = uint32(cuda.threadIdx.x) % uint32(TX)
        ty = uint32(cuda.threadIdx.x) // uint32(TX)
        hk = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        Kh, Vh = key_rows(K, b, hk, options), key_rows(V, b, hk, options)
        dKh, dVh = key_rows(dK, b, hk, options), key_rows(dV, b, hk, options)
        columns = uint32(Kh.shape[0])
        h_first, heads = query_heads(hk, group)
        rows = uint32(query_rows(Q, b, h_first, options).shape[0])
        Nq, Nk = lengths(rows, columns, b, options)

        # Alg. 2 line 5: column tile j. The tiles with most rows, the first ones, go first.
        j0 = uint32(cuda.blockIdx.x * Bc)
        i_first, i_end = row_range(j0, uint32(0), Nq, Nq, Nk, options)

        # Alg. 2 line 6: load Kj, Vj
        load_columns(sK, Kh, j0, Nk, 0, d)
        load_columns(sV, Vh, j0, Nk, 0, d)
        # Alg. 2 line 7: dKj = 0, dVj = 0, on chip
        start_columns(rdK, rdV)
        # The query heads that share this K/V head
        g = uint32(0)
        while g < heads:
            h = uint32(h_first + g)
            Qh, dOh = query_rows(Q, b, h, options), query_rows(dO, b, h, options)
            Lh, Dh = query_rows(L, b, h, options), query_rows(D, b, h, options)
            dQh = query_rows(dQ, b, h, options)
            i0 = next_row(i_first, i_end, j0, b, h, options)
            if i0 < i_end:
                load_rows(sQ, Qh, i0, Nq, 0, d)
                load_rows(sdO, dOh, i0, Nq, 0, d)
            commit_async()
            # Alg. 2 line 8: for each row tile i that sees column tile j
            while i0 < i_end:
                wait_async()
                cuda.syncthreads()  # Qi and dOi are there; nobody reads sdS any more
                # Alg. 2 line 9: Li, Di
                read_values(rL, Lh, i0, Nq, ty, tx)
                read_values(rD, Dh, i0, Nq, ty, tx)
                # Alg. 2 line 10: Sij = scale Qi KjT
                scores(rS, sQ, sK, ty, tx)
                cap_slopes(rG, rS, scale_log2, options)
                scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                # Alg. 2 line 11: Pij = exp(Sij - Li)
                softmax_from_lse(rS, scale_log2, rL)
                drop(rS, i0, j0, b, h, options, ty, tx)
                store_p(sP, rS, options, ty, tx)
                # Alg. 2 line 13: dPij = dOi VjT
                scores(rdP, sdO, sV, ty, tx)
                # Alg. 2 line 14: dSij = Pij o (dPij - Di)
                score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                store_ds(sdS, rdP, ty, tx)
                cuda.syncthreads()  # Pij and dSij are there
                # Alg. 2 line 12: dVj += PijT dOi
                add_transposed_product(rdV, sP, sdO, ty, tx)
                # Alg. 2 line 16: dKj += dSijT Qi
                add_transposed_product(rdK, sdS, sQ, ty, tx)
                cuda.syncthreads()  # nobody reads sQ and sdO any more
                # Alg. 2 line 9 of the next i: load Qi+1, dOi+1, in flight during line 15
                i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
                if i_next < i_end:
                    load_rows(sQ, Qh, i_next, Nq, 0, d)
                    load_rows(sdO, dOh, i_next, Nq, 0, d)
                commit_async()
                # Alg. 2 line 15: dQi += scale dSij Kj, in global memory
                if atomic:
                    product(rdQ, sdS, sK, ty, tx)
                    add_rows(rdQ, dQh, scale, i0, Nq, ty, tx)
                i0 = i_next
            g = uint32(g + 1)
        wait_async()

        # Alg. 2 line 18: write dKj, dVj
        scale_columns(rdK, scale)
        write_columns(rdK, dKh, j0, columns, ty, tx)
        write_columns(rdV, dVh, j0, columns, ty, tx)

    arrays = [*[array_type(4)] * 4, *[array_type(3)] * 2, *[array_type(4)] * 3]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


WARPS = 4


@cache
def make_row_sums(head_dim, clear, features):
    """Alg. 2 line 4: D = rowsum(dO o O); line 3 if ``clear``: dQ = 0. Over (Nq / 4, Hq, B) blocks.

    A warp takes a row.
    """
    query_rows = make_query_rows(features)
    lengths = make_lengths(features)

    def row_sums(O, dO, D, dQ, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Oh, dOh = query_rows(O, b, h, options), query_rows(dO, b, h, options)
        Dh, dQh = query_rows(D, b, h, options), query_rows(dQ, b, h, options)
        rows = uint32(Oh.shape[0])
        Nq, _ = lengths(rows, 0, b, options)
        dot = float32(0.0)
        col = lane
        if row < Nq:
            Oi, dOi = Oh[row], dOh[row]
            while col < uint32(head_dim):
                dot += Oi[col] * dOi[col]
                col = uint32(col + 32)
        if clear and row < rows:
            col = lane
            while col < uint32(head_dim):
                dQh[row, col] = float32(0.0)
                col = uint32(col + 32)
        step = 16
        while step > 0:
            dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)
            step //= 2
        if lane == uint32(0) and row < Nq:
            Dh[row] = dot

    arrays = (array_type(4), array_type(4), array_type(3), array_type(4))
    arguments = (*arrays, features.argument_type)
    return Kernel(row_sums, arguments, 32 * WARPS, 0)


@cache
def make_query_gradients(spec):
    """dQ without atomic adds: a second sweep, Q outer; launched over (Tr, Hq, B) blocks.

    S, P, dP and dS are computed once more, and every dQi is summed in one order and written once.
    """
    Br, Bc, TX, d = spec.Br, spec.Bc, spec.tx_count, spec.head_dim
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RG = spec.cap_registers
    NQ, NK, NP = spec.tile_floats
    AT_DO, AT_K, AT_V, AT_DS = NQ, 2 * NQ, 2 * NQ + NK, 2 * NQ + 2 * NK

    query_rows = make_query_rows(spec.features)
    key_head = make_key_head(spec)
    key_rows = make_key_rows(spec.features)
    lengths = make_lengths(spec.features)
    column_range = make_column_range(spec)
    next_column = make_next_column(spec)
    load_rows = make_load_tile(Br, spec.columns, spec.pitch_qk, spec.threads, spec.aligned)
    load_columns = make_load_tile(Bc, spec.columns, spec.pitch_qk, spec.threads, spec.aligned)
    read_values = make_read_values(spec)
    scores = make_scores(spec)
    cap_slopes = make_cap_slopes(spec)
    scale_and_mask = make_scale_and_mask(spec)
    softmax_from_lse = make_softmax_from_lse(spec)
    score_gradients = make_score_gradients(spec)
    drop = make_drop(spec)
    store_ds = make_store_ds(spec)
    product = make_product(spec)
    write_rows = make_write_rows(spec)

    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        sQ = shared_tile(0, NQ)
        sdO = shared_tile(AT_DO, NQ)
        sK = shared_tile(AT_K, NK)
        sV = shared_tile(AT_V, NK)
        sdS = shared_tile(AT_DS, NP)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rT = cuda.local.array(RQ, float32)
        rdQ = cuda.local.array(RQ, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        tx = uint32(cuda.threadIdx.x) % uint32(TX)
        ty = uint32(cuda.threadIdx.x) // uint32(TX)
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        hk = key_head(h, group)
        Qh, dOh = query_rows(Q, b, h, options), query_rows(dO, b, h, options)
        Kh, Vh = key_rows(K, b, hk, options), key_rows(V, b, hk, options)
        Lh, Dh = query_rows(L, b, h, options), query_rows(D, b, h, options)
        dQh = query_rows(dQ, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = lengths(rows, Kh.shape[0], b, options)
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = column_range(i0, uint32(i0 + Br), Nq, Nk, options)
        j0 = next_column(j0, j_end, i0, b, h, options)

        load_rows(sQ, Qh, i0, Nq, 0, d)
        load_rows(sdO, dOh, i0, Nq, 0, d)
        read_values(rL, Lh, i0, Nq, ty, tx)
        read_values(rD, Dh, i0, Nq, ty, tx)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sK and sV any more
            load_columns(sK, Kh, j0, Nk, 0, d)
            load_columns(sV, Vh, j0, Nk, 0, d)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there; nobody reads sdS any more
            scores(rS, sQ, sK, ty, tx)
            cap_slopes(rG, rS, scale_log2, options)
            scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
            softmax_from_lse(rS, scale_log2, rL)
            drop(rS, i0, j0, b, h, options, ty, tx)
            scores(rdP, sdO, sV, ty, tx)
            score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
            store_ds(sdS, rdP, ty, tx)
            cuda.syncthreads()  # dSij is there
            product(rT, sdS, sK, ty, tx)
            for e in range(RQ):
                rdQ[e] += scale * rT[e]
            j0 = next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
        commit_async()
        wait_async()
        write_rows(rdQ, dQh, i0, rows, ty, tx)

    arrays = [*[array_type(4)] * 4, *[array_type(3)] * 2, array_type(4)]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    shared_bytes = 4 * (2 * NQ + 2 * NK + NP)
    return Kernel(fa2_backward_dq, arguments, spec.threads, shared_bytes, spec.min_blocks)
