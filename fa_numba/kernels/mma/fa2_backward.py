"""FlashAttention-2, backward: a grid over K/V blocks, Q inner (arXiv 2307.08691, Algorithm 2), on
tensor cores.

One thread block takes one column tile Kj, Vj: the outer loop (line 5) is the grid. dK and dV stay
in registers; P is recomputed from L alone. A warp takes 16 or 32 of the columns and all rows of S,
which stands transposed: PT and dST are operands as they are, and only dST passes through shared
memory, for dQ. Beyond d = 64 two warps share these columns: each takes half of the rows, and of the
columns of dK and dV, and PT passes through shared memory too. dQ is summed in float32 (``A``) by
atomic adds, in no fixed order, and rounded by a kernel of its own; or by a second sweep with Q
outer, in one order.

Shared memory, 16-bit elements:  2 (2 Br + Bc) (d + 8) + U Bc (Br + 8) + 8 Br
    U = 1 up to d = 64, else 2; d rounded up to a multiple of 16 U
    in bytes at the default tiles:  66048 (d=64, 32 x 128), 177152 (d=128, 64 x 128), 145920
    (d=256, 32 x 64)
Accesses, elements per head:  loads 2 Nk d + Tc (2 Nq d + 2 Nq), stores 2 Nk d, and Tc Nq d atomic
    adds to A, each a load and a store; with a causal mask only the row tiles that see column
    tile j. The row sums D take 2 Nq d loads before, and Nq + Nq d stores with A = 0; rounding A to
    dQ Nq d loads and stores. The second sweep takes the place of the adds and of the rounding:
    loads 2 Nq d + 2 Nq + 2 Tr Nk d, stores Nq d.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.dropout import make_drop
from fa_numba.parts.fragments import (
    make_add_fragment_product,
    make_add_query_fragments,
    make_add_transposed_fragments,
    make_fragment_product,
    make_fragment_scores,
    make_load_halves,
    make_load_q,
    make_load_row_values,
    make_read_two,
    make_store_fragments,
    make_take_row_values,
    make_write_halves,
    make_write_two,
)
from fa_numba.parts.gradients import make_cap_slopes, make_score_gradients
from fa_numba.parts.rows import make_read_values
from fa_numba.parts.softmax import FULL_WARP, make_scale_and_mask, make_softmax_from_lse
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
    Br, Bc, d, U = spec.Br, spec.Bc, spec.head_dim, spec.row_warps
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, 8 * spec.query_fragments * spec.query_chunks
    RG, RF, RK = spec.cap_registers, spec.scores.q_registers, 4 * spec.TN * spec.gradients.DN
    COLUMNS, ROWS, WIDTH = 8 * spec.TN, Br // U, spec.columns // U
    NQ, NK, NS = spec.tile_halves
    AT_V, AT_DS, AT_P, AT_Q = NK, 2 * NK, 2 * NK + (U - 1) * NS, 2 * NK + U * NS
    AT_L = (AT_Q + 4 * NQ) // 2

    query_heads = make_query_heads(spec)
    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    lengths = make_lengths(spec.features)
    row_range = make_row_range(spec)
    next_row = make_next_row(spec)
    load_halves = make_load_halves(Br, spec)
    load_columns = make_load_halves(Bc, spec)
    load_values = make_load_row_values(spec)
    take_values = make_take_row_values(spec)
    load_fragments = make_load_q(spec.scores)
    scores = make_fragment_scores(spec.scores)
    cap_slopes = make_cap_slopes(spec)
    scale_and_mask = make_scale_and_mask(spec)
    softmax_from_lse = make_softmax_from_lse(spec)
    score_gradients = make_score_gradients(spec)
    drop = make_drop(spec)
    store_p = make_store_fragments(spec, drops=True)
    store_ds = make_store_fragments(spec)
    add_dropped_product = make_add_transposed_fragments(spec, drops=True)
    add_transposed_product = make_add_transposed_fragments(spec)
    add_product = make_fragment_product(spec)
    add_rows = make_add_query_fragments(spec)
    write_columns = make_write_halves(spec.gradients, d)

    @device_function
    def row_tile(stage):
        at, at_L = uint32(AT_Q + stage * (2 * NQ)), uint32(AT_L + stage * (2 * Br))
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NQ)
        return sQ, sdO, shared_tile(at_L, Br), shared_tile(uint32(at_L + Br), Br)

    @device_function
    def load_rows(stage, Qh, dOh, Lh, Dh, i0, Nq):
        sQ, sdO, sL, sD = row_tile(stage)
        load_halves(sQ, Qh, i0, Nq, d)
        load_halves(sdO, dOh, i0, Nq, d)
        load_values(sL, Lh, i0, Nq)
        load_values(sD, Dh, i0, Nq)

    def fa2_backward(Q, K, V, dO, L, D, A, dK, dV, scale, scale_log2, group, options):
        sK = half_tile(0, NK)
        sV = half_tile(AT_V, NK)
        sdS = half_tile(AT_DS, NS)
        sP = half_tile(AT_P, NS)
        rK = cuda.local.array(RF, uint32)
        rV = cuda.local.array(RF, uint32)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rdQ = cuda.local.array(RQ, float32)
        rdK = cuda.local.array(RK, float32)
        rdV = cuda.local.array(RK, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        # Which rows of S, columns of S and columns of dK and dV are this warp's
        warp_row = uint32(warp % uint32(U) * ROWS)
        warp_column = uint32(warp // uint32(U) * COLUMNS)
        warp_chunk = uint32(warp % uint32(U) * WIDTH)
        ty = uint32(warp_row // uint32(2) + lane % uint32(4))
        tx = uint32(warp_column + lane // uint32(4))
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
        load_columns(sK, Kh, j0, Nk, d)
        load_columns(sV, Vh, j0, Nk, d)
        commit_async()
        # Alg. 2 line 7: dKj = 0, dVj = 0, on chip
        for e in range(RK):
            rdK[e] = float32(0.0)
            rdV[e] = float32(0.0)
        wait_async()
        cuda.syncthreads()  # Kj and Vj are there
        load_fragments(rK, sK, warp_column)
        load_fragments(rV, sV, warp_column)
        # Row tiles are loaded to two stages in turn
        stage = uint32(0)
        # The query heads that share this K/V head
        g = uint32(0)
        while g < heads:
            h = uint32(h_first + g)
            Qh, dOh = query_rows(Q, b, h, options), query_rows(dO, b, h, options)
            Lh, Dh = query_rows(L, b, h, options), query_rows(D, b, h, options)
            Ah = query_rows(A, b, h, options)
            i0 = next_row(i_first, i_end, j0, b, h, options)
            if i0 < i_end:
                load_rows(stage, Qh, dOh, Lh, Dh, i0, Nq)
            commit_async()
            # Alg. 2 line 8: for each row tile i that sees column tile j
            while i0 < i_end:
                sQ, sdO, sL, sD = row_tile(stage)
                stage = uint32(stage ^ uint32(1))
                wait_async()
                cuda.syncthreads()  # Qi and dOi are there; nobody reads those before, sP nor sdS
                # Alg. 2 line 9 of the next i: load Qi+1, dOi+1, Li+1, Di+1, in flight meanwhile
                i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
                if i_next < i_end:
                    load_rows(stage, Qh, dOh, Lh, Dh, i_next, Nq)
                commit_async()
                # Alg. 2 line 10: Sij = scale Qi KjT
                scores(rS, rK, sK, sQ, warp_column, warp_row)
                cap_slopes(rG, rS, scale_log2, options)
                scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                # Alg. 2 line 11: Pij = exp(Sij - Li)
                take_values(rL, sL, ty)
                softmax_from_lse(rS, scale_log2, rL)
                drop(rS, i0, j0, b, h, options, ty, tx)
                if U > 1:
                    store_p(sP, rS, options, ty, tx)
                # Alg. 2 line 13: dPij = dOi VjT
                scores(rdP, rV, sV, sdO, warp_column, warp_row)
                # Alg. 2 line 14: dSij = Pij o (dPij - Di)
                take_values(rD, sD, ty)
                score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                store_ds(sdS, rdP, options, ty, tx)
                cuda.syncthreads()  # Pij and dSij are there
                # Alg. 2 line 12: dVj += PijT dOi
                add_dropped_product(rdV, rS, sP, sdO, warp_column, warp_chunk, options)
                # Alg. 2 line 16: dKj += dSijT Qi
                add_transposed_product(rdK, rdP, sdS, sQ, warp_column, warp_chunk, options)
                # Alg. 2 line 15: dQi += scale dSij Kj, in global memory
                if atomic:
                    for e in range(RQ):
                        rdQ[e] = float32(0.0)
                    add_product(rdQ, sdS, sK)
                    add_rows(rdQ, Ah, i0, Nq)
                i0 = i_next
            g = uint32(g + 1)

        # Alg. 2 line 18: write dKj, dVj
        for e in range(RK):
            rdK[e] *= scale
        t = uint32(warp_chunk // uint32(2) + lane % uint32(4))
        write_columns(rdK, dKh, j0, columns, tx, t)
        write_columns(rdV, dVh, j0, columns, tx, t)

    halves, rows = array_type(4, types.uint16), array_type(3)
    arrays = [*[halves] * 4, rows, rows, array_type(4), halves, halves]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa2_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


WARPS = 4


@cache
def make_row_sums(head_dim, dtype, aligned, clear, features):
    """Alg. 2 line 4: D = rowsum(dO o O); line 3 if ``clear``: A = 0. Over (Nq / 4, Hq, B) blocks.

    A warp takes a row.
    """
    query_rows = make_query_rows(features)
    lengths = make_lengths(features)
    read_two = make_read_two(dtype, aligned)

    def row_sums(O, dO, D, A, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Oh, dOh = query_rows(O, b, h, options), query_rows(dO, b, h, options)
        Dh, Ah = query_rows(D, b, h, options), query_rows(A, b, h, options)
        rows = uint32(Oh.shape[0])
        Nq, _ = lengths(rows, 0, b, options)
        dot = float32(0.0)
        col = uint32(2 * lane)
        if row < Nq:
            while col < uint32(head_dim):
                o, g = read_two(Oh, row, col, head_dim), read_two(dOh, row, col, head_dim)
                dot += o[0] * g[0] + o[1] * g[1]
                col = uint32(col + 64)
        if clear and row < rows:
            col = lane
            while col < uint32(head_dim):
                Ah[row, col] = float32(0.0)
                col = uint32(col + 32)
        step = 16
        while step > 0:
            dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)
            step //= 2
        if lane == uint32(0) and row < Nq:
            Dh[row] = dot

    halves = array_type(4, types.uint16)
    arguments = (halves, halves, array_type(3), array_type(4), features.argument_type)
    return Kernel(row_sums, arguments, 32 * WARPS, 0)


@cache
def make_round_rows(head_dim, dtype, aligned, features, keys=False):
    """dQ = scale A, rounded to 16 bits. Over (Nq / 4, Hq, B) blocks; a warp takes a row.

    With ``keys`` the same for dK or dV, over (Nk / 4, Hk, B) blocks.
    """
    rows_of = make_key_rows(features) if keys else make_query_rows(features)
    write_two = make_write_two(dtype, aligned)

    def round_rows(A, dQ, scale, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Ah, dQh = rows_of(A, b, h, options), rows_of(dQ, b, h, options)
        col = uint32(2 * (uint32(cuda.threadIdx.x) % uint32(32)))
        if row < uint32(Ah.shape[0]):
            while col < uint32(head_dim):
                low, high = Ah[row, col], float32(0.0)
                if uint32(col + 1) < uint32(head_dim):
                    high = Ah[row, uint32(col + 1)]
                write_two(dQh, row, col, head_dim, scale * low, scale * high)
                col = uint32(col + 64)

    arrays = (array_type(4), array_type(4, types.uint16))
    arguments = (*arrays, types.float32, features.argument_type)
    return Kernel(round_rows, arguments, 32 * WARPS, 0)


@cache
def make_query_gradients(spec):
    """dQ without atomic adds: a second sweep, Q outer; launched over (Tr, Hq, B) blocks.

    S, P, dP and dS are computed once more, and every dQi is summed in one order and written once.
    ``spec`` is that of a forward kernel: a warp takes rows of S, and dS is an operand as it is.
    """
    Br, Bc, d = spec.Br, spec.Bc, spec.head_dim
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RF, RG, ROWS = spec.q_registers, spec.cap_registers, 8 * spec.TM
    NQ, NK, _ = spec.tile_halves
    AT_DO, AT_K, AT_V = NQ, 2 * NQ, 2 * NQ + NK

    query_rows = make_query_rows(spec.features)
    key_head = make_key_head(spec)
    key_rows = make_key_rows(spec.features)
    lengths = make_lengths(spec.features)
    column_range = make_column_range(spec)
    next_column = make_next_column(spec)
    load_rows = make_load_halves(Br, spec)
    load_columns = make_load_halves(Bc, spec)
    load_fragments = make_load_q(spec)
    read_values = make_read_values(spec)
    scores = make_fragment_scores(spec)
    cap_slopes = make_cap_slopes(spec)
    scale_and_mask = make_scale_and_mask(spec)
    softmax_from_lse = make_softmax_from_lse(spec)
    score_gradients = make_score_gradients(spec)
    drop = make_drop(spec)
    add_product = make_add_fragment_product(spec, drops=False)
    write_rows = make_write_halves(spec)

    def fa2_backward_dq(Q, K, V, dO, L, D, dQ, scale, scale_log2, group, options):
        sQ = half_tile(0, NQ)
        sdO = half_tile(AT_DO, NQ)
        sK = half_tile(AT_K, NK)
        sV = half_tile(AT_V, NK)
        rQ = cuda.local.array(RF, uint32)
        rdO = cuda.local.array(RF, uint32)
        rS = cuda.local.array(RS, float32)
        rdP = cuda.local.array(RS, float32)
        rG = cuda.local.array(RG, float32)
        rdQ = cuda.local.array(RQ, float32)
        rL = cuda.local.array(TM, float32)
        rD = cuda.local.array(TM, float32)
        tx = uint32(cuda.threadIdx.x) % uint32(4)
        warp_row = uint32(uint32(cuda.threadIdx.x) // uint32(32) * ROWS)
        ty = uint32(warp_row + uint32(cuda.threadIdx.x) % uint32(32) // uint32(4))
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

        load_rows(sQ, Qh, i0, Nq, d)
        load_rows(sdO, dOh, i0, Nq, d)
        commit_async()
        read_values(rL, Lh, i0, Nq, ty, tx)
        read_values(rD, Dh, i0, Nq, ty, tx)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        wait_async()
        cuda.syncthreads()  # Qi and dOi are there
        load_fragments(rQ, sQ, warp_row)
        load_fragments(rdO, sdO, warp_row)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sK and sV any more
            load_columns(sK, Kh, j0, Nk, d)
            load_columns(sV, Vh, j0, Nk, d)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there
            scores(rS, rQ, sQ, sK, warp_row, uint32(0))
            cap_slopes(rG, rS, scale_log2, options)
            scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
            softmax_from_lse(rS, scale_log2, rL)
            drop(rS, i0, j0, b, h, options, ty, tx)
            scores(rdP, rdO, sdO, sV, warp_row, uint32(0))
            score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
            add_product(rdQ, rdP, sK, options)
            j0 = next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
        for e in range(RQ):
            rdQ[e] *= scale
        write_rows(rdQ, dQh, i0, rows, ty, tx)

    halves, values = array_type(4, types.uint16), array_type(3)
    arrays = [*[halves] * 4, values, values, halves]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    shared_bytes = 4 * (NQ + NK)
    return Kernel(fa2_backward_dq, arguments, spec.threads, shared_bytes, spec.min_blocks)
