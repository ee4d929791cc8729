"""FlashAttention-1, backward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 4), on CUDA cores.

One thread block takes one (batch, K/V head): both loops run inside it. P is recomputed from the
saved statistics, D in every pass, and dQ passes through global memory in every pass over K/V.
L = m + log l stands for l and m, as in the released code.

Shared memory, floats:  2 (Br + Bc) (d + 4) + 2 Br (Bc + TX)
Accesses, elements per head:  loads 2 Nk d + Tc (3 Nq d + Nq) + (Tc - 1) Nq d,
    stores 2 Nk d + Tc Nq d; with a causal mask only the row tiles that see column tile j. The
    first pass knows line 5's dQ = 0 and does not read it.
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
    make_row_dots,
    make_scale_columns,
    make_score_gradients,
    make_start_columns,
    make_store_ds,
    make_write_columns,
)
from fa_numba.parts.products import make_product, make_scores
from fa_numba.parts.rows import make_read_values, make_update_rows, make_write_rows
from fa_numba.parts.softmax import make_scale_and_mask, make_softmax_from_lse, make_store_p
from fa_numba.parts.tile_load import make_load_tile
from fa_numba.parts.visits import (
    make_key_rows,
    make_lengths,
    make_next_row,
    make_query_heads,
    make_query_rows,
    make_row_range,
)


@cache
def make_backward(spec):
    """The kernel for ``spec``; launched over (1, Hk, B) blocks."""
    Br, Bc, TX, d = spec.Br, spec.Bc, spec.tx_count, spec.head_dim
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RK, RG = spec.CM * spec.DN * 4, spec.cap_registers
    NQ, NK, NP = spec.tile_floats
    AT_DO, AT_K, AT_V, AT_P, AT_DS = NQ, 2 * NQ, 2 * NQ + NK, 2 * NQ + 2 * NK, 2 * NQ + 2 * NK + NP

    initialises, packed = spec.features.initialises, spec.features.packed

    query_heads = make_query_heads(spec)
    query_rows = make_query_rows(spec.features)
    key_rows = make_key_rows(spec.features)
    lengths = make_lengths(spec.features)
    row_range = make_row_range(spec, first_pass_takes_all=not initialises)
    next_row = make_next_row(spec)
    load_rows = make_load_tile(Br, spec.columns, spec.pitch_qk, spec.threads, spec.aligned)
    load_columns = make_load_tile(Bc, spec.columns, spec.pitch_qk, spec.threads, spec.aligned)
    start_columns = make_start_columns(spec)
    read_values = make_read_values(spec)
    row_dots = make_row_dots(spec)
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
    update_rows = make_update_rows(spec)
    write_rows = make_write_rows(spec)
    scale_columns = make_scale_columns(spec)
    write_columns = make_write_columns(spec)

    def fa1_backward(Q, K, V, O, dO, L, dQ, dK, dV, scale, scale_log2, group, options):
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

        # Alg. 4 line 5: dQ = 0; the first pass does it where it takes all rows
        if initialises:
            for e in range(RQ):
                rdQ[e] = float32(0.0)
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                dQh = query_rows(dQ, b, h, options)
                i0 = uint32(0)
                while i0 < rows:
                    write_rows(rdQ, dQh, i0, rows, ty, tx)
                    i0 = uint32(i0 + Br)
                g = uint32(g + 1)

        # Alg. 4 line 6: for each column tile j
        j0 = uint32(0)
        j_end = columns
        if packed:
            j_end = uint32(max(columns, uint32(1)))
        while j0 < j_end:
            # Alg. 4 line 9: the row tiles that see column tile j; the first pass takes all
            i_first, i_end = row_range(j0, uint32(0), Nq, Nq, Nk, options)
            cuda.syncthreads()  # nobody reads sK and sV any more
            # Alg. 4 line 7: load Kj, Vj
            load_columns(sK, Kh, j0, Nk, 0, d)
            load_columns(sV, Vh, j0, Nk, 0, d)
            # Alg. 4 line 8: dKj = 0, dVj = 0, on chip
            start_columns(rdK, rdV)
            # The query heads that share this K/V head
            g = uint32(0)
            while g < heads:
                h = uint32(h_first + g)
                Qh, Oh = query_rows(Q, b, h, options), query_rows(O, b, h, options)
                dOh, Lh = query_rows(dO, b, h, options), query_rows(L, b, h, options)
                dQh = query_rows(dQ, b, h, options)
                i0 = next_row(i_first, i_end, j0, b, h, options)
                if i0 < i_end:
                    load_rows(sQ, Qh, i0, Nq, 0, d)
                    load_rows(sdO, dOh, i0, Nq, 0, d)
                commit_async()
                # Alg. 4 line 9: for each row tile i
                while i0 < i_end:
                    wait_async()
                    cuda.syncthreads()  # Qi and dOi are there; nobody reads sdS any more
                    # Alg. 4 lines 10, 19: li and mi as Li; Di = rowsum(dOi o Oi), in every pass
                    read_values(rL, Lh, i0, Nq, ty, tx)
                    row_dots(rD, sdO, Oh, i0, Nq, ty, tx)
                    # Alg. 4 lines 11, 12: Sij = scale Qi KjT
                    scores(rS, sQ, sK, ty, tx)
                    cap_slopes(rG, rS, scale_log2, options)
                    scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    # Alg. 4 line 13: Pij = diag(li)^-1 exp(Sij - mi)
                    softmax_from_lse(rS, scale_log2, rL)
                    # Alg. 4 lines 14, 15: Pij without what is dropped
                    drop(rS, i0, j0, b, h, options, ty, tx)
                    store_p(sP, rS, options, ty, tx)
                    # Alg. 4 line 17: dPij = dOi VjT
                    scores(rdP, sdO, sV, ty, tx)
                    # Alg. 4 lines 18, 20: dSij = Pij o (dPij - Di), dropped dPij being 0
                    score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                    store_ds(sdS, rdP, ty, tx)
                    cuda.syncthreads()  # Pij and dSij are there
                    # Alg. 4 line 16: dVj += PijT dOi
                    add_transposed_product(rdV, sP, sdO, ty, tx)
                    # Alg. 4 line 22: dKj += dSijT Qi
                    add_transposed_product(rdK, sdS, sQ, ty, tx)
                    cuda.syncthreads()  # nobody reads sQ and sdO any more
                    # Alg. 4 line 10 of the next i: load Qi+1, dOi+1, in flight during line 21
                    i_next = next_row(uint32(i0 + Br), i_end, j0, b, h, options)
                    if i_next < i_end:
                        load_rows(sQ, Qh, i_next, Nq, 0, d)
                        load_rows(sdO, dOh, i_next, Nq, 0, d)
                    commit_async()
                    # Alg. 4 line 21: dQi += scale dSij Kj, through global memory
                    product(rdQ, sdS, sK, ty, tx)
                    update_rows(rdQ, dQh, scale, j0 > uint32(0), i0, Nq, ty, tx)
                    i0 = i_next
                g = uint32(g + 1)
            wait_async()
            # Alg. 4 line 24: write dKj, dVj
            scale_columns(rdK, scale)
            write_columns(rdK, dKh, j0, columns, ty, tx)
            write_columns(rdV, dVh, j0, columns, ty, tx)
            j0 = uint32(j0 + Bc)

    arrays = [*[array_type(4)] * 5, array_type(3), *[array_type(4)] * 3]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_backward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)
