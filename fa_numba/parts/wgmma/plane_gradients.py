"""Backward of float32 matrices as sums of 16-bit ones on Hopper's tensor cores (``planes``): a
consumer makes dV, dK and dQ of its own columns of S, each tile's apart, and adds them up in
float32, times what undoes the powers of two.
"""

from functools import cache

from fa_numba.device import cuda, float32, uint32
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.arithmetic import ONE, inverse_power, maximum, opaque
from fa_numba.intrinsics.bulk_copy import fence_async_proxy
from fa_numba.intrinsics.shared import load4, shared_tile, store2
from fa_numba.intrinsics.warpgroup import STEP
from fa_numba.parts.fragments.pairs import make_add_two, make_write_two
from fa_numba.parts.fragments.planes import (
    FINITE,
    P_SCALE_BACKWARD,
    make_split,
    power_of_two,
)
from fa_numba.parts.grid import make_key_rows, make_query_rows
from fa_numba.parts.lanes import max_of_lanes
from fa_numba.parts.namespace import part
from fa_numba.parts.wgmma import planes
from fa_numba.parts.wgmma.pingpong import make_sync_group
from fa_numba.parts.wgmma.products import wait_for
from fa_numba.tiling.spec import FRAGMENT_ROWS
from fa_numba.tiling.wgmma import GROUP, GROUP_ROWS, PANEL


@cache
def make_begin_st(spec):
    """``begin_st(rS, sK, own, sQ, at)``: ST = K QT, or dPT = V dOT, of the columns from ``own``."""
    return planes.make_multiply_planes(spec.transposed)


@cache
def make_begin_product(spec):
    """``begin_product(rT, rP, sQ, at)``: T = PT dO, or dST Q, of a tile."""
    return planes.make_product_of_planes(spec.transposed, spec.products)


@cache
def make_split_pt(spec):
    """``split_pt(rP, rS)``: PT's planes."""
    return planes.make_split_p(spec.transposed, P_SCALE_BACKWARD)


@part
def make_ds_of_planes(spec):
    """``ds_of_planes(rdP, rS, sL, at, tile)``: dST = PT o (dPT - D) in float32, in place of dPT."""
    TM, TN, Br = spec.TM, spec.TN, spec.Br
    scaled, packed = spec.features.scaled, spec.features.packed

    def ds_of_planes(rdP, rS, sL, at, tile):
        head, unit = tile.head, ONE
        if scaled:
            b = uint32(0) if packed else head.b
            unit = head.options.dout_power[b, head.h] * head.options.v_power[b, head.hk]
        for m in range(TM // 4):
            dots = load4(sL, uint32(uint32(at + Br) + 16 * m + 4 * tile.thread.ty))
            for n in range(4):
                for j in range(TN):
                    e = j * TM + 4 * m + n
                    dp = rdP[e]
                    if scaled:
                        dp = dp * unit
                    rdP[e] = rS[e] * (dp - dots[n])

    return ds_of_planes


@part
def make_power_of_ds(spec):
    """``power_of_ds(rdS, w)``: what this consumer's planes of dS are multiplied by: a power of two
    of its largest element that is finite. The consumer's threads have met then, and none reads the
    last dS any more.
    """
    RS, scaled, (AT, WORDS) = spec.TM * spec.TN, spec.features.scaled, spec.largest_words
    sync_group = make_sync_group(spec)

    def power_of_ds(rdS, w):
        if not scaled:
            sync_group(w)
            return ONE
        found = float32(0.0)
        for e in range(RS):
            size = abs(rdS[e])
            if size <= FINITE:
                found = maximum(found, size)
        found = max_of_lanes(found, 32, 1)
        words, own = shared_tile(AT, WORDS), uint32(4 * w)
        within = uint32(uint32(cuda.threadIdx.x) % uint32(GROUP))
        if within % uint32(32) == uint32(0):
            words[uint32(own + within // 32)] = found
        sync_group(w)
        four = load4(words, own)
        found = maximum(maximum(four[0], four[1]), maximum(four[2], four[3]))
        return power_of_two(found)

    return power_of_ds


@part
def make_unit_of_dv(spec):
    """``unit_of_dv(head)``: what PT dO is to be multiplied by."""
    scaled, packed, P = spec.features.scaled, spec.features.packed, float32(1.0 / P_SCALE_BACKWARD)

    def unit_of_dv(head):
        unit = ONE
        if scaled:
            unit = P * head.options.dout_power[uint32(0) if packed else head.b, head.h]
        return unit

    return unit_of_dv


@part
def make_units_of_ds(spec):
    """``units_of_ds(power, head)``: what dST Q and dS K are to be multiplied by."""
    scaled, packed = spec.features.scaled, spec.features.packed

    def units_of_ds(power, head):
        of_q, of_k = ONE, ONE
        if scaled:
            options, b = head.options, uint32(0) if packed else head.b
            inverse = inverse_power(power)
            of_q = inverse * options.q_power[b, head.h]
            of_k = inverse * options.k_power[b, head.hk]
        return of_q, of_k

    return units_of_ds


@part
def make_split_ds(spec):
    """``split_ds(rdS, rT, power)``: planes of ``power`` times dST."""
    WORDS, scaled = spec.p_registers, spec.features.scaled
    split = make_split(spec.dtype, spec.planes)

    def split_ds(rdS, rT, power):
        for n in range(WORDS):
            low, high = rT[2 * n], rT[2 * n + 1]
            if scaled:
                low, high = power * low, power * high
            split(rdS, n, WORDS, low, high)

    return split_ds


@part
def make_store_planes(spec):
    """``store_planes(sdS, rdS, thread)``: dST's planes one behind the other, each of one panel as
    ``gradients.make_store_ds`` has it.
    """
    TM, TN, PLANES, WORDS = spec.TM, spec.TN, spec.planes, spec.p_registers
    PLANE = spec.tile_halves[2]

    def store_planes(sdS, rdS, thread):
        first = uint32(
            PANEL * (GROUP_ROWS * thread.w + thread.tx) + 8 * (thread.tx % 8) + 2 * thread.ty
        )
        for j in range(TN):
            for n in range(TM // 2):
                place = uint32(uint32(first + 8 * PANEL * j) ^ uint32(8 * n))
                for p in range(PLANES):
                    word = rdS[p * WORDS + j * (TM // 2) + n]
                    store2(sdS, uint32(place + p * PLANE), word)
        fence_async_proxy()

    return store_planes


@cache
def make_begin_own_dq(spec):
    """``begin_own_dq(rdQ, sdS, at, sK, first)``: 64 rows and a panel of dQ = dS K, of 64 columns
    of S from ``at`` on. Both operands' rows run across the sum.
    """
    of_ds, of_k = spec.tile_halves[2], spec.plane_panels * PANEL * spec.Bc
    a, b = (spec.Bc, of_ds, 1), (spec.Bc, of_k, 1)
    return planes.multiply_pairs(spec, spec.products, PANEL, a, b, GROUP_ROWS // STEP)


@cache
def make_wait_dv(spec):
    """``wait_dv(rT)``: a tile's dV is there, and no other product is on its way."""
    return wait_for(spec.column_registers, 0)


@cache
def make_wait_tile(spec):
    """``wait_tile(rT)``: a tile's dV or dK is there; a later product may be on its way."""
    return wait_for(spec.column_registers, spec.products)


@cache
def make_wait_dk(spec):
    """``wait_dk(rT)``: a tile's dK is there; dQ and the next S may be on their way."""
    return wait_for(spec.column_registers, 2 * spec.products)


@cache
def make_wait_own_dq(spec):
    """``wait_own_dq(rdQ)``: dQ is there; a later product may be on its way."""
    return wait_for(spec.query_registers, spec.products)


@cache
def make_wait_last_dq(spec):
    """``wait_last_dq(rdQ)``: dQ is there, and no other product is on its way."""
    return wait_for(spec.query_registers, 0)


@part
def make_add_columns(spec):
    """``add_columns(rdK, rT, unit)``: dK += unit T."""
    RK = spec.column_registers

    def add_columns(rdK, rT, unit):
        for e in range(RK):
            rdK[e] += unit * rT[e]

    return add_columns


@part
def make_add_own_dq(spec):
    """``add_own_dq(rdQ, A, row0, col0, unit, head)``: A += unit times this consumer's part of dQ,
    from registers: nothing beyond the rows of the sequence.
    """
    query_rows, add_two = make_query_rows(spec), make_add_two(spec)
    TILES = ceil_div(min(spec.head_dim, PANEL), 8)

    def add_own_dq(rdQ, A, row0, col0, unit, head):
        Ah = query_rows(A, head)
        # Anew: no registers are kept for the places all through the loop.
        within = opaque(uint32(uint32(cuda.threadIdx.x) % uint32(GROUP)))
        lane, warp = uint32(within % 32), uint32(within // 32)
        first, col = uint32(row0 + FRAGMENT_ROWS * warp + lane // 4), uint32(col0 + 2 * (lane % 4))
        for i in range(2):
            row = uint32(first + 8 * i)
            inside = row < head.Nq
            for n in range(TILES):
                e = i * (PANEL // 4) + 2 * n
                low, high = unit * rdQ[e], unit * rdQ[e + 1]
                add_two(Ah, row, uint32(col + 8 * n), inside, low, high)

    return add_own_dq


@part
def make_write_own_columns(spec):
    """``write_own_columns(rdK, dK, row0, head, thread)``: this consumer's rows of dK, float32."""
    TN, DN4, STEP_ = spec.TN, 4 * spec.DN, spec.column_step
    write_two, key_rows = make_write_two(spec), make_key_rows(spec)

    def write_own_columns(rdK, dK, row0, head, thread):
        dKh = key_rows(dK, head)
        for i in range(TN):
            row = uint32(row0 + thread.tx + STEP_ * i)
            if row < uint32(dKh.shape[0]):
                for n in range(DN4 // 2):
                    e, col = i * DN4 + 2 * n, uint32(8 * n + 2 * thread.ty)
                    write_two(dKh, row, col, rdK[e], rdK[e + 1])

    return write_own_columns


# --- two consumers that share columns -----------------------------------------------------------


@part
def make_second_panel(spec):
    """``second_panel()``: where Kj's second panel begins in shared memory."""
    AT = PANEL * spec.Bc

    def second_panel():
        return uint32(AT)

    return second_panel


@part
def make_give_power(spec):
    """``give_power(power)``: what dS is multiplied by, for the other consumer."""
    (AT, WORDS), scaled = spec.largest_words, spec.features.scaled

    def give_power(power):
        if scaled and uint32(cuda.threadIdx.x) % uint32(GROUP) == uint32(0):
            shared_tile(AT, WORDS)[0] = power

    return give_power


@part
def make_read_power(spec):
    """``read_power()``: what ``give_power`` gave."""
    (AT, WORDS), scaled = spec.largest_words, spec.features.scaled

    def read_power():
        power = ONE
        if scaled:
            power = shared_tile(AT, WORDS)[0]
        return power

    return read_power
