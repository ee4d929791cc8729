"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on tensor cores.

One thread block takes one (batch, K/V head): both loops run inside it. Warps share a tile as in
FlashAttention-2's backward pass. P is recomputed from the saved statistics, D in every pass, and dQ
passes through global memory in every pass over K/V: in float32 (``A``) until a row tile's last pass
rounds it to dQ. L = m + log l stands for l and m, as in the released code. With query splits
several blocks share a head, each with its own rows of Q, and sum dK and dV in float32 by atomic
adds, in no fixed order; a kernel of its own rounds them.

Shared memory, 16-bit elements:  2 (3 Br + Bc) (d + 8) + U Bc (Br + 8) + 8 Br
    U = 1 up to d = 64, else 2; d rounded up to a multiple of 16 U
    in bytes at the default tiles:  122368 (d=64, 32 x 256), 211968 (d=128, 64 x 128), 179712
    (d=256, 32 x 64)
Accesses, elements per head:  loads 2 Nk d + Tc (3 Nq d + Nq) + (Tc - 1) Nq d,
    stores 2 Nk d + Tc Nq d; with a causal mask only the row tiles that see column tile j. The
    first pass knows line 5's dQ = 0 and does not read it. Each query split loads K and V and adds
    to dK and dV, Nk d each, and rounding these takes 2 Nk d loads and as many stores.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.parts.dropout import make_drop
from fa_numba.parts.fragments import (
    make_add_columns,
    make_add_transposed_fragments,
    make_fragment_product,
    make_fragment_scores,
    make_load_halves,
    make_load_q,
    make_load_row_values,
    make_read_query_fragments,
    make_row_dots,
    make_store_fragments,
    make_take_row_values,
    make_write_halves,
    make_write_query_fragments,
    make_write_query_halves,
)
from fa_numba.parts.gradients import make_cap_slopes, make_score_gradients
from fa_numba.parts.softmax import make_scale_and_mask, make_softmax_from_lse
from fa_numba.parts.visits import (
    make_column_range,
    make_key_rows,
    make_lengths,
    make_next_column,
    make_next_row,
    make_query_heads,
    make_query_rows,
    make_row_range,
)


@cache
def make_backward(spec):
    """The kernel for ``spec``; launched over (query splits, Hk, B) blocks."""
    Br, Bc, d, U = spec.Br, spec.Bc, spec.head_dim, spec.row_warps
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, 8 * spec.query_fragments * spec.query_chunks
    RG, RF, RK = spec.cap_registers, spec.scores.q_registers, 4 * spec.TN * spec.gradients.DN
    COLUMNS, ROWS, WIDTH = 8 * spec.TN, Br // U, spec.columns // U
    NQ, NK, NS = spec.tile_halves
    AT_V, AT_DS, AT_P, AT_Q = NK, 2 * NK, 2 * NK + (U - 1) * NS, 2 * NK + U * NS
    AT_L = (AT_Q + 6 * NQ) // 2

    EARLY = U > 1  # a warp with all rows of S would spill registers
    initialises, packed = spec.features.initialises, spec.features.packed
    splits = spec.splits_queries

    query_heads = make_query_heads(spec)
    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    lengths = make_lengths(spec.features)
    row_range = make_row_range(spec, first_pass_takes_all=not initialises)
    column_range = make_column_range(spec)
    next_row = make_next_row(spec)
    next_column = make_next_column(spec)
    load_halves = make_load_halves(Br, spec)
    load_columns = make_load_halves(Bc, spec)
    load_values = make_load_row_values(spec)
    take_values = make_take_row_values(spec)
    row_dots = make_row_dots(spec)
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
    read_fragments = make_read_query_fragments(spec)
    write_fragments = make_write_query_fragments(spec)
    write_rows = make_write_query_halves(spec)
    write_columns = make_write_halves(spec.gradients, d)
    add_columns = make_add_columns(spec)

    @device_function
    def row_tile(stage):
        at, at_L = uint32(AT_Q + stage * (3 * NQ)), uint32(AT_L + stage * Br)
        sQ, sdO = half_tile(at, NQ), half_tile(uint32(at + NQ), NQ)
        return sQ, sdO, half_tile(uint32(at + 2 * NQ), NQ), shared_tile(at_L, Br)

    @device_function
    def load_rows(stage, Qh, dOh, Oh, Lh, i0, Nq):
        sQ, sdO, sO, sL = row_tile(stage)
        load_halves(sQ, Qh, i0, Nq, d)
        load_halves(sdO, dOh, i0, Nq, d)
        load_halves(sO, Oh, i0, Nq, d)
        load_values(sL, Lh, i0, Nq)

    @device_function
    def load_next(stage, Qh, dOh, Oh, Lh, i0, i_end, i_stop, j0, b, h, options):
        i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
        if i_next < i_end:
            load_rows(stage, Qh, dOh, Oh, Lh, i_next, i_stop)
        commit_async()
        return i_next

    def fa1_backward(
        Q, K, V, O, dO, L, A, dQ, dK, dV, scale, scale_log2, group, split_rows, options
    ):
        sK = half_tile(0, NK)
        sV = half_tile(AT_V, NK)
        sdS = half_tile(AT_DS, NS)
        sP = half_tile(AT_P, NS)
        sD = shared_tile(AT_L + 2 * Br, Br)
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

        # The rows of this block: all of them, unless the queries are split
        i_begin = uint32(cuda.blockIdx.x * split_rows)
        i_last = uint32(min(rows, uint32(i_begin + split_rows)))
        i_stop = uint32(min(i_last, Nq))

        # Alg. 4 line 5: dQ = 0; the first pass does it where it takes all rows
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                Ah, dQh = query_rows(A, b, h, options), query_rows(dQ, b, h, options)
                i0 = i_begin
                while i0 < i_last:
                    write_fragments(rdQ, Ah, i0, i_last)
                    write_rows(rdQ, dQh, scale, i0, i_last)
                    i0 = uint32(i0 + Br)
                g = uint32(g + 1)

        # Row tiles are loaded to two stages in turn
        stage = uint32(0)
        # Alg. 4 line 6: for each column tile j
        j0 = uint32(0)
        j_end = columns
        if packed:
            j_end = uint32(max(columns, uint32(1)))
        while j0 < j_end:
            # Alg. 4 line 9: the row tiles that see column tile j; the first pass takes all
            i_first, i_end = row_range(j0, i_begin, i_stop, Nq, Nk, options)
            cuda.syncthreads()  # nobody reads sK and sV any more, nor row tiles
            # Alg. 4 line 7: load Kj, Vj
            load_columns(sK, Kh, j0, Nk, d)
            load_columns(sV, Vh, j0, Nk, d)
            commit_async()
            # Alg. 4 line 8: dKj = 0, dVj = 0, on chip
            for e in range(RK):
                rdK[e] = float32(0.0)
                rdV[e] = float32(0.0)
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there
            load_fragments(rK, sK, warp_column)
            load_fragments(rV, sV, warp_column)
            # The query heads that share this K/V head
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                Qh, Oh = query_rows(Q, b, h, options), query_rows(O, b, h, options)
                dOh, Lh = query_rows(dO, b, h, options), query_rows(L, b, h, options)
                Ah, dQh = query_rows(A, b, h, options), query_rows(dQ, b, h, options)
                i0 = next_row(i_first, i_end, j0, b, h, options)
                if i0 < i_end:
                    load_rows(stage, Qh, dOh, Oh, Lh, i0, i_stop)
                commit_async()
                # Alg. 4 line 9: for each row tile i
                while i0 < i_end:
                    sQ, sdO, sO, sL = row_tile(stage)
                    stage = uint32(stage ^ uint32(1))
                    wait_async()
                    cuda.syncthreads()  # Qi, dOi, Oi are there; nobody reads those before, sP, sdS
                    # Alg. 4 line 10 of the next i: load Qi+1, dOi+1, Oi+1, in flight meanwhile
                    if EARLY:
                        i_next = load_next(
                            stage, Qh, dOh, Oh, Lh, i0, i_end, i_stop, j0, b, h, options
                        )
                    # Alg. 4 line 19: Di = rowsum(dOi o Oi), in every pass
                    row_dots(sD, sdO, sO)
                    # Alg. 4 lines 11, 12: Sij = scale Qi KjT
                    scores(rS, rK, sK, sQ, warp_column, warp_row)
                    cap_slopes(rG, rS, scale_log2, options)
                    scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    # Alg. 4 line 13: Pij = diag(li)^-1 exp(Sij - mi), li and mi as Li
                    take_values(rL, sL, ty)
                    softmax_from_lse(rS, scale_log2, rL)
                    # Alg. 4 lines 14, 15: Pij without what is dropped
                    drop(rS, i0, j0, b, h, options, ty, tx)
                    if U > 1:
                        store_p(sP, rS, options, ty, tx)
                    # Alg. 4 line 17: dPij = dOi VjT
                    scores(rdP, rV, sV, sdO, warp_column, warp_row)
                    cuda.syncthreads()  # Di is there
                    # Alg. 4 lines 18, 20: dSij = Pij o (dPij - Di), dropped dPij being 0
                    take_values(rD, sD, ty)
                    score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    store_ds(sdS, rdP, options, ty, tx)
                    # ... or in flight during lines 16, 22 and 21
                    if not EARLY:
                        i_next = load_next(
                            stage, Qh, dOh, Oh, Lh, i0, i_end, i_stop, j0, b, h, options
                        )
                    cuda.syncthreads()  # Pij and dSij are there
                    # Alg. 4 line 16: dVj += PijT dOi
                    add_dropped_product(rdV, rS, sP, sdO, warp_column, warp_chunk, options)
                    # Alg. 4 line 22: dKj += dSijT Qi
                    add_transposed_product(rdK, rdP, sdS, sQ, warp_column, warp_chunk, options)
                    # Alg. 4 line 10: load dQi
                    seen = uint32(0)
                    if initialises or j0 > uint32(0):
                        seen = i_stop
                    read_fragments(rdQ, Ah, i0, seen)
                    # Alg. 4 line 21: dQi += scale dSij Kj, through global memory
                    add_product(rdQ, sdS, sK)
                    # ... in float32, until no column tile is left that row tile i sees
                    _, j_last = column_range(i0, uint32(i0 + Br), Nq, Nk, options)
                    if next_column(uint32(j0 + Bc), j_last, i0, b, h, options) < j_last:
                        write_fragments(rdQ, Ah, i0, i_stop)
                    else:
                        write_rows(rdQ, dQh, scale, i0, i_stop)
                    i0 = i_next
                g = uint32(g + 1)
            # Alg. 4 line 24: write dKj, dVj
            for e in range(RK):
                rdK[e] *= scale
            t = uint32(warp_chunk // uint32(2) + lane % uint32(4))
            if splits:
                add_columns(rdK, dKh, j0, columns, tx, t)
                add_columns(rdV, dVh, j0, columns, tx, t)
            else:
                write_columns(rdK, dKh, j0, columns, tx, t)
                write_columns(rdV, dVh, j0, columns, tx, t)
            j0 = uint32(j0 + Bc)

    halves, floats = array_type(4, types.uint16), array_type(4)
    columns_type = floats if splits else halves
    arrays = [*[halves] * 5, array_type(3), floats, halves, columns_type, columns_type]
    scalars = (types.float32, types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
