"""FlashAttention-2, backward: K/V grid, Q inner (arXiv 2307.08691, Algorithm 2), on tensor cores.

One thread block takes one column tile: the outer loop is the grid. dK and dV stay in registers, P
is recomputed from L alone. dQ is summed in float32 (``A``) by atomic adds, in no fixed order, then
rounded; or by a second sweep with Q outer, in one order. Warps, memory, accesses: at the end.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, float32, uint32
from fa_numba.intrinsics.async_copy import commit_async, wait_async
from fa_numba.intrinsics.shared import half_tile
from fa_numba.options import PLAIN
from fa_numba.parts.mma import parts
from fa_numba.parts.namespace import RowFacts
from fa_numba.parts.softmax import FULL_WARP


@cache
def make_backward(spec, atomic=True):
    """The kernel, over (Tc, Hk, B) blocks; without ``atomic`` dQ is ``make_query_gradients``'s."""
    p, Bc, (_, NK, NS) = parts(spec), spec.Bc, spec.tile_halves
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, 8 * spec.query_fragments * spec.query_chunks
    RG, RF, RK = spec.cap_registers, spec.scores.q_registers, spec.column_registers
    U, ROWS, COLUMNS, WIDTH = spec.warp_parts
    AT_V, AT_DS, AT_P = NK, 2 * NK, 2 * NK + (U - 1) * NS

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
        warp, lane = uint32(cuda.threadIdx.x) // uint32(32), uint32(cuda.threadIdx.x) % uint32(32)
        warp_row = uint32(warp % uint32(U) * ROWS)
        warp_column = uint32(warp // uint32(U) * COLUMNS)
        warp_chunk = uint32(warp % uint32(U) * WIDTH)  # of dK and dV
        ty = uint32(warp_row // uint32(2) + lane % uint32(4))
        tx = uint32(warp_column + lane // uint32(4))
        b, hk = p.key_head()
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        dKh, dVh = p.key_rows(dK, b, hk, options), p.key_rows(dV, b, hk, options)
        h_first, heads = p.query_heads(hk, group)
        columns, rows = uint32(Kh.shape[0]), uint32(p.query_rows(Q, b, h_first, options).shape[0])
        Nq, Nk = p.lengths(rows, columns, b, options)

        # Row tiles are loaded to two stages in turn
        stage = uint32(0)
        # FA-1 line 6, FA-2 line 5: for each column tile j
        j0 = uint32(cuda.blockIdx.x * Bc)  # those with most rows, the first ones, go first
        i_first, i_end = p.row_range(j0, uint32(0), Nq, Nq, Nk, options)
        # FA-1 line 7, FA-2 line 6: load Kj, Vj
        p.load_columns(sK, Kh, j0, Nk)
        p.load_columns(sV, Vh, j0, Nk)
        commit_async()
        # FA-1 line 8, FA-2 line 7: dKj = 0, dVj = 0, on chip
        p.start_columns(rdK, rdV)
        wait_async()
        cuda.syncthreads()  # Kj and Vj are there
        p.load_fragments(rK, sK, warp_column)
        p.load_fragments(rV, sV, warp_column)
        # The query heads that share this K/V head
        g = uint32(0)
        while g < heads:
            h = uint32(h_first + g)
            Qh, dOh = p.query_rows(Q, b, h, options), p.query_rows(dO, b, h, options)
            Lh, Dh = p.query_rows(L, b, h, options), p.query_rows(D, b, h, options)
            Ah = p.query_rows(A, b, h, options)
            i0 = p.next_row(i_first, i_end, j0, b, h, options)
            if i0 < i_end:
                p.load_row_tile(stage, Qh, dOh, Lh, Dh, i0, Nq)
            commit_async()
            # FA-1 line 9, FA-2 line 8: for each row tile i that sees column tile j
            while i0 < i_end:
                sQ, sdO, sL, sD = p.row_tile(stage)
                stage = uint32(stage ^ uint32(1))
                wait_async()
                cuda.syncthreads()  # row tile i is there; nobody reads the last one, sP nor sdS
                # FA-1 line 10, FA-2 line 9 of the next i: load row tile i+1, in flight
                i_next = p.load_next_rows(stage, Qh, dOh, Lh, Dh, i0, i_end, Nq, j0, b, h, options)
                commit_async()
                # FA-1 lines 11, 12, FA-2 line 10: Sij = scale Qi KjT
                p.scores(rS, rK, sK, sQ, warp_column, warp_row)
                p.cap_slopes(rG, rS, scale_log2, options)
                p.scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
                # FA-1 line 13, FA-2 line 11: Pij = exp(Sij - Li)
                p.take_values(rL, sL, ty)
                p.softmax_from_lse(rS, scale_log2, rL)
                # FA-1 lines 14, 15: Pij without what is dropped
                p.drop(rS, i0, j0, b, h, options, ty, tx)
                p.store_p(sP, rS, options, ty, tx)
                # FA-1 line 17, FA-2 line 13: dPij = dOi VjT
                p.scores(rdP, rV, sV, sdO, warp_column, warp_row)
                # FA-1 lines 18, 20, FA-2 line 14: dSij = Pij o (dPij - Di)
                p.take_values(rD, sD, ty)
                p.score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
                p.store_ds(sdS, rdP, options, ty, tx)
                cuda.syncthreads()  # Pij and dSij are there
                # FA-1 line 16, FA-2 line 12: dVj += PijT dOi
                p.add_dv_product(rdV, rS, sP, sdO, warp_column, warp_chunk, options)
                # FA-1 line 22, FA-2 line 16: dKj += dSijT Qi
                p.add_dk_product(rdK, rdP, sdS, sQ, warp_column, warp_chunk, options)
                # FA-1 line 21, FA-2 line 15: dQi += scale dSij Kj, through global memory
                if atomic:
                    p.start_dq(rdQ)
                    p.add_dq_product(rdQ, sdS, sK)
                    p.add_dq(rdQ, Ah, i0, Nq)
                i0 = i_next
            g = uint32(g + 1)

        # FA-1 line 24, FA-2 line 18: write dKj, dVj
        p.scale_columns(rdK, scale)
        t = uint32(warp_chunk // uint32(2) + lane % uint32(4))
        p.write_columns(rdK, dKh, j0, columns, tx, t)
        p.write_columns(rdV, dVh, j0, columns, tx, t)

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
    p = parts(RowFacts(features, head_dim, dtype, aligned))

    def row_sums(O, dO, D, A, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Oh, dOh = p.query_rows(O, b, h, options), p.query_rows(dO, b, h, options)
        Dh, Ah = p.query_rows(D, b, h, options), p.query_rows(A, b, h, options)
        rows = uint32(Oh.shape[0])
        Nq, _ = p.lengths(rows, 0, b, options)
        dot = float32(0.0)
        col = uint32(2 * lane)
        if row < Nq:
            while col < uint32(head_dim):
                o, g = p.read_two(Oh, row, col), p.read_two(dOh, row, col)
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
def make_round_rows(head_dim, dtype, aligned, splits=1):
    """dQ = scale A in 16 bits, or dK, or dV. Over (N / 4, H, B) blocks; a warp takes a row.

    A may be in so many ``splits``, neighbours along the axis of heads, which are added up in their
    order.
    """
    p = parts(RowFacts(PLAIN, head_dim, dtype, aligned))

    def round_rows(A, dQ, scale, options):
        h = uint32(cuda.blockIdx.y)
        b = uint32(cuda.blockIdx.z)
        row = uint32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        Ah, dQh = A[b, uint32(h * splits)], dQ[b, h]
        col = uint32(2 * (uint32(cuda.threadIdx.x) % uint32(32)))
        if row < uint32(Ah.shape[0]):
            while col < uint32(head_dim):
                low, high = Ah[row, col], float32(0.0)
                if uint32(col + 1) < uint32(head_dim):
                    high = Ah[row, uint32(col + 1)]
                if splits > 1:
                    for n in range(1, splits):
                        part = A[b, uint32(h * splits + n)]
                        more = p.read_floats(part, row, col, col < uint32(head_dim))
                        low, high = low + more[0], high + more[1]
                p.write_two(dQh, row, col, scale * low, scale * high)
                col = uint32(col + 64)

    arrays = (array_type(4), array_type(4, types.uint16))
    arguments = (*arrays, types.float32, PLAIN.argument_type)
    return Kernel(round_rows, arguments, 32 * WARPS, 0)


@cache
def make_query_gradients(spec):
    """dQ without atomic adds: a second sweep, Q outer; launched over (Tr, Hq, B) blocks.

    S, P, dP and dS are computed once more, and every dQi is summed in one order and written once.
    ``spec`` is that of a forward kernel: a warp takes rows of S, and dS is an operand as it is.
    """
    p, Br, Bc = parts(spec), spec.Br, spec.Bc
    TM, RS, RQ = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4
    RF, RG, ROWS = spec.q_registers, spec.cap_registers, spec.warp_rows
    NQ, NK, _ = spec.tile_halves
    AT_DO, AT_K, AT_V = NQ, 2 * NQ, 2 * NQ + NK

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
        b, h, hk = p.heads(group)
        Qh, dOh = p.query_rows(Q, b, h, options), p.query_rows(dO, b, h, options)
        Kh, Vh = p.key_rows(K, b, hk, options), p.key_rows(V, b, hk, options)
        Lh, Dh = p.query_rows(L, b, h, options), p.query_rows(D, b, h, options)
        dQh = p.query_rows(dQ, b, h, options)
        rows = uint32(Qh.shape[0])
        Nq, Nk = p.lengths(rows, Kh.shape[0], b, options)
        i0 = uint32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * Br)
        j0, j_end = p.visited_columns(i0, Nq, Nk, b, h, options)

        p.load_rows(sQ, Qh, i0, Nq)
        p.load_rows(sdO, dOh, i0, Nq)
        commit_async()
        p.read_values(rL, Lh, i0, Nq, ty, tx)
        p.read_values(rD, Dh, i0, Nq, ty, tx)
        for e in range(RQ):
            rdQ[e] = float32(0.0)
        wait_async()
        cuda.syncthreads()  # Qi and dOi are there
        p.load_fragments(rQ, sQ, warp_row)
        p.load_fragments(rdO, sdO, warp_row)
        while j0 < j_end:
            cuda.syncthreads()  # nobody reads sK and sV any more
            p.load_columns(sK, Kh, j0, Nk)
            p.load_columns(sV, Vh, j0, Nk)
            commit_async()
            wait_async()
            cuda.syncthreads()  # Kj and Vj are there
            p.scores(rS, rQ, sQ, sK, warp_row, uint32(0))
            p.cap_slopes(rG, rS, scale_log2, options)
            p.scale_and_mask(rS, scale_log2, i0, j0, Nq, Nk, b, h, options, ty, tx)
            p.softmax_from_lse(rS, scale_log2, rL)
            p.drop(rS, i0, j0, b, h, options, ty, tx)
            p.scores(rdP, rdO, sdO, sV, warp_row, uint32(0))
            p.score_gradients(rdP, rS, rD, rG, i0, j0, Nq, Nk, b, h, options, ty, tx)
            p.add_ds_product(rdQ, rdP, sK, options)
            j0 = p.next_column(uint32(j0 + Bc), j_end, i0, b, h, options)
        for e in range(RQ):
            rdQ[e] *= scale
        p.write_rows(rdQ, dQh, i0, rows, ty, tx)

    halves, values = array_type(4, types.uint16), array_type(3)
    arrays = [*[halves] * 4, values, values, halves]
    scalars = (types.float32, types.float32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    shared_bytes = 4 * (NQ + NK)
    return Kernel(fa2_backward_dq, arguments, spec.threads, shared_bytes, spec.min_blocks)


__doc__ += """
A warp takes 16 or 32 of the columns and all rows of S, which stands transposed: PT and dST are
operands as they are, and only dST passes through shared memory, for dQ. Beyond d = 64 two warps
share these columns: each takes half of the rows, and of the columns of dK and dV, and PT passes
through shared memory too.

Shared memory, 16-bit elements:  2 (2 Br + Bc) d + U Bc (Br + 8) + 8 Br
    U = 1 up to d = 64, else 2; d rounded up to a multiple of 16 U
    in bytes at the default tiles:  59904 (d=64, 32 x 128), 168960 (d=128, 64 x 128), 141824
    (d=256, 32 x 64)
Accesses, elements per head:  loads 2 Nk d + Tc (2 Nq d + 2 Nq), stores 2 Nk d, and Tc Nq d atomic
    adds to A, each a load and a store; with a causal mask only the row tiles that see column
    tile j. The row sums D take 2 Nq d loads before, and Nq + Nq d stores with A = 0; rounding A to
    dQ Nq d loads and stores. The second sweep takes the place of the adds and of the rounding:
    loads 2 Nq d + 2 Nq + 2 Tr Nk d, stores Nq d.
"""
