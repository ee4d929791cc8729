"""FlashAttention-1, forward: K/V outer, Q inner (arXiv 2205.14135, Algorithm 1), on Hopper's tensor
cores.

One thread block takes one (batch, head): both loops run inside it. O, l and m pass through global
memory in every pass over K/V, and O is normalised each time: in float32 (``A``) until a row tile's
last pass rounds it to O. ``query_splits`` as on CUDA cores.
A consumer warpgroup has 64 rows of Qi and Oi and all columns, and a thread of the producer that
brings it its rows: consumers wait for each other's K and V alone. m is kept in units of log2.
Shared memory and accesses: below the kernel.
"""

from functools import cache

from numba import types

from fa_numba.device import Kernel, array_type, cuda, device_function, float32, tiled_type, uint32
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, mbarrier_tile, wait_mbarrier
from fa_numba.intrinsics.shared import half_tile, shared_tile
from fa_numba.intrinsics.warpgroup import give_registers, take_registers
from fa_numba.parts.wgmma import parts


@cache
def make_forward(spec):
    """The kernel for ``spec``; launched over (query splits, Hq, B) blocks."""
    p, Br, Bc, GROUPS = parts(spec), spec.Br, spec.Bc, spec.consumers
    STAGES, Q_STAGES, (NQ, NK), NO = spec.stages, spec.q_stages, spec.tile_halves, spec.tile_floats
    TM, RS, RO, RP = spec.TM, spec.TM * spec.TN, spec.TM * spec.DN * 4, spec.p_registers
    (FEW, MANY), RB = spec.registers, spec.bias_registers
    NQS, NKS, V0 = Q_STAGES * NQ, STAGES * NK, Q_STAGES * NQ + STAGES * NK
    NOS, AT_O, BARRIERS, BARRIER_0 = (
        Q_STAGES * NO,
        spec.halves // 2,
        spec.barriers,
        spec.first_barrier,
    )
    FULL_Q, EMPTY_Q, FULL_O, EMPTY_O, WRITTEN, FULL_K, FULL_V, EMPTY_K, EMPTY_V = (
        spec.barrier_places
    )

    @device_function
    def produce_columns(sK, sV, bars, Q, K, V, group, split_rows, options):
        b, h, hk = p.heads(group)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        i_first, i_last = p.split(split_rows, uint32(Q.shape[2]))
        j0, j_end = p.column_passes(i_first, i_last, Nq, Nk, options)
        i_stop = uint32(min(i_last, Nq))
        stage, parity = uint32(0), uint32(1)
        while j0 < j_end:
            i0, i_end = p.visited_rows(j0, i_first, i_stop, Nq, Nk, b, h, options)
            if i0 < i_end:
                # Alg. 1 line 6: load Kj, Vj
                at = uint32(stage * NK)
                wait_mbarrier(bars, uint32(EMPTY_K + stage), parity)
                p.load_columns(sK, at, K, b, hk, j0, bars, uint32(FULL_K + stage))
                wait_mbarrier(bars, uint32(EMPTY_V + stage), parity)
                p.load_columns(sV, at, V, b, hk, j0, bars, uint32(FULL_V + stage))
                stage, parity = p.next_stage(stage, parity)
            j0 = uint32(j0 + Bc)

    @device_function
    def produce_rows(sQ, sO, bars, w, Q, K, A, group, split_rows, options):
        b, h, _ = p.heads(group)
        Nq, Nk = p.lengths(Q.shape[2], K.shape[2], b, options)
        i_first, i_last = p.split(split_rows, uint32(Q.shape[2]))
        j0, j_end = p.column_passes(i_first, i_last, Nq, Nk, options)
        i_stop = uint32(min(i_last, Nq))
        stage, parity, written = uint32(0), uint32(1), uint32(0)
        p.wait_initialised(bars, uint32(WRITTEN + w))
        while j0 < j_end:
            i0, i_end = p.visited_rows(j0, i_first, i_stop, Nq, Nk, b, h, options)
            visits = i0 < i_end
            while i0 < i_end:
                # Alg. 1 line 8: load Qi, Oi
                row0, place = uint32(i0 + 64 * w), uint32(stage * GROUPS + w)
                wait_mbarrier(bars, uint32(EMPTY_Q + place), parity)
                p.load_q(sQ, uint32(stage * NQ), w, Q, b, h, row0, bars, uint32(FULL_Q + place))
                wait_mbarrier(bars, uint32(EMPTY_O + place), parity)
                wait_mbarrier(bars, uint32(WRITTEN + w), written)
                if p.has_state(j0):
                    p.load_o(sO, uint32(stage * NO), w, A, b, h, row0, bars, uint32(FULL_O + place))
                else:
                    arrive_mbarrier(bars, uint32(FULL_O + place))
                stage, parity = p.next_q_stage(stage, parity)
                i0 = uint32(i0 + Br)
            if visits:
                written = uint32(written ^ 1)
            j0 = uint32(j0 + Bc)

    @device_function
    def consume(sQ, sK, sV, sO, bars, Q, K, O, A, L, l, m, scale, group, split_rows, options):
        rS = cuda.local.array(RS, float32)
        rB = cuda.local.array(RB, float32)
        rP = cuda.local.array(RP, uint32)
        rO = cuda.local.array(RO, float32)
        rm = cuda.local.array(TM, float32)
        rl = cuda.local.array(TM, float32)
        rf = cuda.local.array(TM, float32)
        w, ty, tx = p.place()
        b, h, _ = p.heads(group)
        lh, mh = l[b, h], m[b, h]
        rows = uint32(Q.shape[2])
        Nq, Nk = p.lengths(rows, K.shape[2], b, options)
        stage, parity = uint32(0), uint32(0)
        q_stage, q_parity = uint32(0), uint32(0)

        # FA-1 line 2, FA-2 line 5: O = 0, l = 0, m = -inf
        i_first, i_last = p.split(split_rows, rows)
        j0, j_end = p.column_passes(i_first, i_last, Nq, Nk, options)
        own_first = uint32(i_first + 64 * w)
        p.initialise(rO, rl, rm, sQ, sO, O, A, lh, mh, w, own_first, i_last, b, h, ty, tx)
        p.pass_is_written(bars, uint32(WRITTEN + w), ty, tx)
        i_stop = uint32(min(i_last, Nq))

        # FA-1 line 5, FA-2 line 6: for each column tile j that is seen
        while j0 < j_end:
            i0, i_end = p.visited_rows(j0, i_first, i_stop, Nq, Nk, b, h, options)
            visits = i0 < i_end
            # Alg. 1 line 7: for each row tile i that sees column tile j; the first pass takes all
            while i0 < i_end:
                row0, i_next = uint32(i0 + 64 * w), uint32(i0 + Br)
                place, at_Q, at_O = (
                    uint32(q_stage * GROUPS + w),
                    uint32(q_stage * NQ),
                    uint32(q_stage * NO),
                )
                more = p.sees_more(i0, j0, Nq, Nk, b, h, options)
                # FA-1 line 9, FA-2 line 8: Sij = scale Qi KjT
                wait_mbarrier(bars, uint32(FULL_K + stage), parity)
                wait_mbarrier(bars, uint32(FULL_Q + place), q_parity)
                p.begin_scores(rS, sQ, uint32(at_Q + 64 * 64 * w), sK, uint32(stage * NK))
                # Alg. 1 line 8: load li, mi
                p.read_state(rl, rm, lh, mh, j0, row0, i_stop, ty, tx)
                p.read_bias(rB, row0, j0, Nq, Nk, b, h, options, ty, tx)
                p.wait_scores(rS, False)
                if more:
                    p.empty(bars, uint32(EMPTY_Q + place))
                if i_next >= i_end:
                    p.empty(bars, uint32(EMPTY_K + stage))
                p.scale_bias_and_mask(rS, rB, scale, row0, j0, Nq, Nk, b, h, options, ty, tx)
                # FA-1 lines 10, 11, FA-2 line 9: m, l, and P in units of the new m
                p.softmax_to_p(rP, rS, scale, rm, rl, rf)
                # Alg. 1 lines 8, 12: load Oi; diag(li) e^(m_old - m_new) Oi
                wait_mbarrier(bars, uint32(FULL_O + place), q_parity)
                p.take_output(rO, rf, sO, at_O, w, j0, ty, tx)
                # FA-1 line 12, FA-2 line 10: O = diag(e^(m_old - m_new)) O + Pij Vj
                wait_mbarrier(bars, uint32(FULL_V + stage), parity)
                p.begin_output(rO, rP, sV, uint32(stage * NK))
                p.wait_output(rO, False)
                if i_next >= i_end:
                    p.empty(bars, uint32(EMPTY_V + stage))
                # FA-1 lines 12, 13, FA-2 lines 12, 14: O = diag(l)^-1 O, to global memory
                p.normalise_rows(rO, rl)
                # fmt: off
                p.write_state(rO, rl, rm, sQ, at_Q, sO, at_O, O, A, lh, mh, more, w, row0, i_stop,
                              b, h, ty, tx)
                # fmt: on
                if not more:
                    p.empty(bars, uint32(EMPTY_Q + place))
                p.o_is_empty(bars, uint32(EMPTY_O + place), ty, tx)
                q_stage, q_parity = p.next_q_stage(q_stage, q_parity)
                i0 = i_next
            if visits:
                p.pass_is_written(bars, uint32(WRITTEN + w), ty, tx)
                stage, parity = p.next_stage(stage, parity)
            j0 = uint32(j0 + Bc)
        # FA-2 lines 13, 15: L = m + log l
        p.write_logsumexp(rl, rm, L, lh, mh, b, h, options, own_first, i_last, ty, tx)

    def fa1_forward(Q, K, V, O, A, L, l, m, scale, group, split_rows, options):
        sQ, sK, sV = half_tile(0, NQS), half_tile(NQS, NKS), half_tile(V0, NKS)
        sO = shared_tile(AT_O, NOS)
        bars = mbarrier_tile(BARRIER_0, BARRIERS)
        p.begin_barriers(bars)
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            give_registers(FEW)
            w, first = uint32(cuda.threadIdx.x // 32), cuda.threadIdx.x % 32 == 0
            if first and w < uint32(GROUPS):
                produce_rows(sQ, sO, bars, w, Q, K, A, group, split_rows, options)
            elif first and w == uint32(3):
                produce_columns(sK, sV, bars, Q, K, V, group, split_rows, options)
        else:
            take_registers(MANY)
            # fmt: off
            consume(sQ, sK, sV, sO, bars, Q, K, O, A, L, l, m, scale, group, split_rows, options)
            # fmt: on

    arrays = [*[tiled_type(4)] * 5, *[array_type(3)] * 3]
    scalars = (types.float32, types.int32, types.int32)
    arguments = (*arrays, *scalars, spec.features.argument_type)
    return Kernel(fa1_forward, arguments, spec.threads, spec.shared_bytes, spec.min_blocks)


__doc__ += """
Shared memory, bytes beside the barriers, d rounded up to 64 in 16 bits and to 32 in float32:
    (2 + 4) Br d for each place of Q and O, 4 Bc d for each of K and V; two places of either where
    they fit. In bytes:  229584 (d=64, 128 x 256), 229488 (d=128, 128 x 256), 221256 (d=192,
    64 x 192), 229448 (d=256, 64 x 128)
    At d=256 two consumers leave room for 32 columns of K and V.
Accesses, elements per head: those of the kernel on ``mma``, Q, O and A by boxes.
"""
