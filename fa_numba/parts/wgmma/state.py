"""What FlashAttention-1 passes through global memory on Hopper's tensor cores: O, l and m.

O is in float32 there (``A``), until a row tile's last pass rounds it to O. It comes and goes by
boxes, by way of a place in shared memory. A row's l and m are read and written by one thread, the
same in every pass.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import NEG_INF, exp2, maximum
from fa_numba.intrinsics.bulk_copy import (
    commit_boxes,
    fence_async_proxy,
    load_box,
    store_box,
    wait_boxes,
    wait_boxes_read,
)
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.mbarrier import (
    arrive_mbarrier,
    expect_bytes,
    fence_mbarrier_init,
    init_mbarrier,
    wait_mbarrier,
)
from fa_numba.intrinsics.shared import load_pair, store_pair
from fa_numba.parts.rows import make_read_maxima, make_read_values, make_start, make_write_values
from fa_numba.parts.softmax import FULL_WARP
from fa_numba.parts.wgmma.stores import make_write_tile
from fa_numba.parts.wgmma.turns import make_meet
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL
from fa_numba.tiling.wgmma_fa1 import FLOAT_PANEL


@cache
def make_begin_barriers(spec):
    """``begin_barriers(bars)``: one arrival fills a place. All warps of a consumer empty one of Q,
    its first thread one of O; every consumer warp empties one of K or V.
    """
    STAGES, groups = spec.stages, spec.consumers
    parts = spec.q_stages * groups
    full_q, empty_q, full_o, empty_o, written, full_k, full_v, empty_k, empty_v = (
        spec.barrier_places
    )

    @device_function
    def begin_barriers(bars):
        if cuda.threadIdx.x == 0:
            for s in range(parts):
                init_mbarrier(bars, full_q + s, 1)
                init_mbarrier(bars, empty_q + s, 4)
                init_mbarrier(bars, full_o + s, 1)
                init_mbarrier(bars, empty_o + s, 1)
            for s in range(groups):
                init_mbarrier(bars, written + s, 1)
            for s in range(STAGES):
                init_mbarrier(bars, full_k + s, 1)
                init_mbarrier(bars, full_v + s, 1)
                init_mbarrier(bars, empty_k + s, 4 * groups)
                init_mbarrier(bars, empty_v + s, 4 * groups)
            fence_mbarrier_init()

    return begin_barriers


@cache
def make_load_q(spec):
    """``load_q(sQ, at, w, Q, b, h, row0, bars, barrier)``: the rows of Qi that consumer w takes,
    from ``row0`` on.
    """
    return _load_of(spec.Br, spec.panels, PANEL)


@cache
def make_load_o(spec):
    """``load_o(sO, at, w, A, b, h, row0, bars, barrier)``: the same of Oi in float32."""
    return _load_of(spec.Br, spec.float_panels, FLOAT_PANEL)


@cache
def _load_of(Br, panels, width):
    """64 rows by ``panels`` boxes of 128 bytes, ``width`` columns each."""
    size = 128 * GROUP_ROWS * panels

    @device_function
    def load(sT, at, w, T, b, h, row0, bars, barrier):
        own = uint32(at + width * GROUP_ROWS * w)
        expect_bytes(bars, barrier, size)
        for n in range(panels):
            load_box(sT, uint32(own + width * Br * n), T, b, h, row0, width * n, bars, barrier)

    return load


@cache
def make_has_state(spec):
    """``has_state(j0)``: whether O, l and m are in global memory when the pass over column ``j0``
    begins. The pass over column 0 knows them, unless the kernel has initialised them.
    """
    initialises = spec.features.initialises

    @device_function
    def has_state(j0):
        return initialises or j0 != uint32(0)

    return has_state


@cache
def make_read_state(spec):
    """``read_state(rl, rm, l, m, j0, row0, rows_end, ty, tx)``: l and m of a row tile."""
    has_state = make_has_state(spec)
    read_values, read_maxima = make_read_values(spec), make_read_maxima(spec)

    @device_function
    def read_state(rl, rm, l, m, j0, row0, rows_end, ty, tx):
        seen = rows_end  # rows whose l and m some pass has written
        if not has_state(j0):
            seen = uint32(0)
        read_values(rl, l, row0, seen, ty, tx)
        read_maxima(rm, m, row0, seen, ty, tx)

    return read_state


@cache
def make_softmax_to_p(spec):
    """``softmax_to_p(rP, rS, scale, rm, rl, rf)``: ``online_softmax`` with P in 16 bits, and in rf
    what O is multiplied by, l exp(m - m_new).

    All maxima come first: then a few columns of all rows at a time leave S for P, from the last
    on, where ptxas finds a place for all of P.
    """
    TM, TN, TX, folds = spec.TM, spec.TN, spec.tx_count, spec.folds_scale
    pack, _ = CONVERSIONS[DTYPES[spec.dtype].matrix]

    @device_function
    def softmax_to_p(rP, rS, scale, rm, rl, rf):
        rshift = cuda.local.array(TM, float32)
        for i in range(TM):
            m_new = rm[i]
            if folds:
                m_new = NEG_INF
            for j in range(TN):
                m_new = maximum(m_new, rS[i * TN + j])
            if folds:
                m_new = maximum(rm[i], m_new * scale)
            lane = TX // 2
            while lane > 0:
                m_new = maximum(m_new, cuda.shfl_xor_sync(FULL_WARP, m_new, lane))
                lane //= 2
            rshift[i] = m_new
            if m_new == NEG_INF:  # -inf - -inf would be NaN
                rshift[i] = float32(0.0)
            rf[i] = rl[i] * exp2(rm[i] - rshift[i])
            rl[i] = float32(0.0)
            rm[i] = m_new
        for j in range(0, TN, 2):
            for i in range(TM):
                e = i * TN + (TN - 2 - j)
                s0, s1 = rS[e], rS[e + 1]
                if folds:
                    s0, s1 = s0 * scale, s1 * scale
                p0, p1 = exp2(s0 - rshift[i]), exp2(s1 - rshift[i])
                rl[i] += p0 + p1
                rP[e // 2] = pack(p0, p1)
        for i in range(TM):
            lane = TX // 2
            while lane > 0:
                rl[i] += cuda.shfl_xor_sync(FULL_WARP, rl[i], lane)
                lane //= 2
            rl[i] += rf[i]

    return softmax_to_p


@cache
def make_take_output(spec):
    """``take_output(rO, rf, sO, at, w, j0, ty, tx)``: diag(f) O of this consumer's rows of sO;
    zeros in the pass that knows O.
    """
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    has_state, first_place, further = make_has_state(spec), make_first_place(spec), _further(spec)

    @device_function
    def take_output(rO, rf, sO, at, w, j0, ty, tx):
        if has_state(j0):
            first = first_place(at, w, ty, tx)
            for i in range(TM):
                for n in range(DN4 // 2):
                    pair = load_pair(sO, further(first, i * STEP, n))
                    rO[i * DN4 + 2 * n] = pair[0] * rf[i]
                    rO[i * DN4 + 2 * n + 1] = pair[1] * rf[i]
        else:
            for e in range(TM * DN4):
                rO[e] = float32(0.0)

    return take_output


@cache
def make_first_place(spec):
    """``first_place(at, w, ty, tx)``: where a thread's first two columns of its first row of a tile
    of O lie, in the copy engine's swizzle.
    """

    @device_function
    def first_place(at, w, ty, tx):
        row = uint32(at + FLOAT_PANEL * (GROUP_ROWS * w + ty))
        return uint32(row + uint32(uint32(2 * tx) ^ uint32(4 * (ty % 8))))

    return first_place


@cache
def _further(spec):
    """The place ``down`` rows, a multiple of 8, and 8 n columns further."""
    Br = spec.Br

    @device_function
    def further(first, down, n):
        return uint32(uint32(first ^ uint32(8 * (n % 4))) + FLOAT_PANEL * (down + Br * (n // 4)))

    return further


@cache
def make_write_output(spec):
    """``write_output(rO, sO, at, A, w, row0, b, h, ty, tx)``: a consumer's rows of O to A, by way
    of its own rows of sO. Its first thread waits until they have been read.
    """
    TM, DN4, Br, STEP = spec.TM, 4 * spec.DN, spec.Br, spec.row_step
    panels, meet = spec.float_panels, make_meet(spec)
    first_place, further = make_first_place(spec), _further(spec)

    @device_function
    def write_output(rO, sO, at, A, w, row0, b, h, ty, tx):
        first = first_place(at, w, ty, tx)
        for i in range(TM):
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                store_pair(sO, further(first, i * STEP, n), rO[e], rO[e + 1])
        fence_async_proxy()
        meet(w)
        if ty == uint32(0) and tx == uint32(0):
            own = uint32(at + FLOAT_PANEL * GROUP_ROWS * w)
            for n in range(panels):
                place = uint32(own + FLOAT_PANEL * Br * n)
                store_box(A, b, h, row0, FLOAT_PANEL * n, sO, place)
            commit_boxes()
            wait_boxes_read()

    return write_output


@cache
def make_initialise(spec):
    """``initialise(rO, rl, rm, sQ, sO, O, A, l, m, w, row0, rows_end, b, h, ty, tx)``: O = 0,
    l = 0, m = -inf of this consumer's rows, unless the first pass does it, which then takes all of
    them.
    """
    Br, start, initialises = spec.Br, make_start(spec), spec.features.initialises
    write_tile, write_output = make_write_tile(spec), make_write_output(spec)
    write_values = make_write_values(spec)

    @device_function
    def initialise(rO, rl, rm, sQ, sO, O, A, l, m, w, row0, rows_end, b, h, ty, tx):
        if initialises:
            i0 = row0
            while i0 < rows_end:
                start(rO, rl, rm)
                write_tile(rO, sQ, uint32(0), O, w, i0, b, h, ty, tx)
                write_output(rO, sO, uint32(0), A, w, i0, b, h, ty, tx)
                write_values(rl, l, i0, rows_end, ty, tx)
                write_values(rm, m, i0, rows_end, ty, tx)
                i0 = uint32(i0 + Br)

    return initialise


@cache
def make_wait_initialised(spec):
    """``wait_initialised(bars, barrier)``: nothing of the places is needed for that any more."""
    initialises = spec.features.initialises

    @device_function
    def wait_initialised(bars, barrier):
        if initialises:
            wait_mbarrier(bars, barrier, uint32(0))

    return wait_initialised


@cache
def make_write_state(spec):
    """``write_state(rO, rl, rm, sQ, at_Q, sO, at_O, O, A, l, m, more, w, row0, rows_end, b, h, ty,
    tx)``: O, l and m of a row tile to memory, O to A if there is ``more`` to come.
    """
    write_tile, write_output = make_write_tile(spec), make_write_output(spec)
    write_values = make_write_values(spec)

    @device_function
    def write_state(
        rO, rl, rm, sQ, at_Q, sO, at_O, O, A, l, m, more, w, row0, rows_end, b, h, ty, tx
    ):
        if more:
            write_output(rO, sO, at_O, A, w, row0, b, h, ty, tx)
        else:
            write_tile(rO, sQ, at_Q, O, w, row0, b, h, ty, tx)
        write_values(rl, l, row0, rows_end, ty, tx)
        write_values(rm, m, row0, rows_end, ty, tx)

    return write_state


@cache
def make_o_is_empty(spec):
    """``o_is_empty(bars, barrier, ty, tx)``: by the thread that has waited for the boxes, behind a
    barrier of its warpgroup.
    """

    @device_function
    def o_is_empty(bars, barrier, ty, tx):
        if ty == uint32(0) and tx == uint32(0):
            arrive_mbarrier(bars, barrier)

    return o_is_empty


@cache
def make_pass_is_written(spec):
    """``pass_is_written(bars, barrier, ty, tx)``: what this consumer has written is in global
    memory; its boxes of A may be loaded again.
    """

    @device_function
    def pass_is_written(bars, barrier, ty, tx):
        if ty == uint32(0) and tx == uint32(0):
            wait_boxes()
            arrive_mbarrier(bars, barrier)

    return pass_is_written
