"""Parts of the backward pass for float32 matrices, as sums of 16-bit planes, on Hopper.

Two consumer warpgroups share a tile of S. The head dimension decides how:

- Up to 64, a tile of S has 128 columns. Each consumer has 64 of these columns. It computes dV and
  dK for them, and its part of the sum dQ.
- Above 64, a tile of S has only 64 columns. One consumer computes dV and the other computes dK, for
  all 64 columns. Each consumer computes half of the columns of dQ.

The products of each tile are summed in separate registers. These sums are multiplied by the factor
that undoes the powers of two of scaled planes. They are then added to the results in float32.
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
    """Make ``begin_st(rS, sK, own, sQ, at)``, which begins the product ST = K QT (or dPT = V dOT)
    in the registers rS.

    The consumer's 64 rows of K begin at element ``own`` of sK. The tile of Q begins at element
    ``at`` of sQ.
    """
    return planes.make_multiply_planes(spec.transposed)


@cache
def make_begin_product(spec):
    """Make ``begin_product(rT, rP, sQ, at)``, which begins the product T = PT dO (or dST Q) of one
    tile in the registers rT.

    The planes of PT are in the registers rP. The tile of dO (or Q) begins at element ``at`` of sQ.
    """
    return planes.make_product_of_planes(spec.transposed, spec.products)


@cache
def make_split_pt(spec):
    """Make ``split_pt(rP, rS)``, which splits PT in the registers rS into planes in the registers
    rP.
    """
    return planes.make_split_p(spec.transposed, P_SCALE_BACKWARD)


@part
def make_ds_of_planes(spec):
    """Make ``ds_of_planes(rdP, rS, sL, at, tile)``, which replaces dPT in the registers rdP by dST
    = PT o (dPT - D).

    ``rS`` holds PT. L of the row tile begins at element ``at`` of sL, and D comes after L. With
    scaled planes, dPT is first multiplied by the factor that undoes the scaling.
    """
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
    """Make ``power_of_ds(rdS, w)``, which returns the power of two by which consumer warpgroup w
    multiplies dS before it splits dS into planes.

    The power depends on the largest finite |dS| of all threads of the consumer. Without scaled
    planes it is 1. In both cases, the threads of the consumer wait for each other in this function.
    After it, no thread of the consumer still reads the dS of the previous tile from shared memory.
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
    """Make ``unit_of_dv(head)``, which returns the factor by which the product PT dO of planes is
    multiplied before it is added to dV.

    In ``precision="fp16x3"``, P and dO were multiplied by powers of two before they were split into
    float16 planes. The factor is the inverse of the product of these powers. Without such scaled
    planes, the factor is 1.
    """
    scaled, packed, P = spec.features.scaled, spec.features.packed, float32(1.0 / P_SCALE_BACKWARD)

    def unit_of_dv(head):
        unit = ONE
        if scaled:
            unit = P * head.options.dout_power[uint32(0) if packed else head.b, head.h]
        return unit

    return unit_of_dv


@part
def make_units_of_ds(spec):
    """Make ``units_of_ds(power, head)``, which returns two factors that undo the scaling of planes:
    one for the product dST Q, one for dS K.

    ``power`` is the result of ``power_of_ds``. Without scaled planes both factors are 1.
    """
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
    """Make ``split_ds(rdS, rT, power)``, which splits dST into planes.

    ``rT`` holds dST in float32. Each element is multiplied by ``power``, a power of two, if planes
    are scaled. Its planes are then stored in the registers ``rdS``, as words of two 16-bit
    elements.
    """
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
    """Make ``store_planes(sdS, rdS, thread)``, which stores the planes of dST in shared memory, one
    plane after the other.

    Each plane is a panel of 64 columns. Its layout is that of ``gradients.make_store_ds``.
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
    """Make ``begin_own_dq(rdQ, sdS, at, sK, first)``, which begins the product dQ = dS K over 64
    columns of S.

    The result has 64 rows and 64 columns. The 64 columns of S, which are rows of sdS, begin at
    element ``at`` of sdS. The panel of K, with 64 columns, begins at element ``first`` of sK.
    """
    of_ds, of_k = spec.tile_halves[2], spec.plane_panels * PANEL * spec.Bc
    a, b = (spec.Bc, of_ds, 1), (spec.Bc, of_k, 1)
    return planes.multiply_pairs(spec, spec.products, PANEL, a, b, GROUP_ROWS // STEP)


@cache
def make_wait_dv(spec):
    """Make ``wait_dv(rT)``, which waits until a tile's part of dV is in the registers rT. No other
    product is running then.
    """
    return wait_for(spec.column_registers, 0)


@cache
def make_wait_tile(spec):
    """Make ``wait_tile(rT)``, which waits until a tile's part of dV or dK is in the registers rT.

    One product of float32 matrices that was begun later may still be running.
    """
    return wait_for(spec.column_registers, spec.products)


@cache
def make_wait_dk(spec):
    """Make ``wait_dk(rT)``, which waits until a tile's part of dK is in the registers rT.

    The products for dQ and for the next S may still be running.
    """
    return wait_for(spec.column_registers, 2 * spec.products)


@cache
def make_wait_own_dq(spec):
    """Make ``wait_own_dq(rdQ)``, which waits until the product dQ is in the registers rdQ.

    One product of float32 matrices that was begun later may still be running.
    """
    return wait_for(spec.query_registers, spec.products)


@cache
def make_wait_last_dq(spec):
    """Make ``wait_last_dq(rdQ)``, which waits until the product dQ is in the registers rdQ. No
    other product is running then.
    """
    return wait_for(spec.query_registers, 0)


@part
def make_add_columns(spec):
    """Make ``add_columns(rdK, rT, unit)``, which adds ``unit`` times the registers rT to the
    registers rdK.

    ``rT`` holds a tile's part of dK (or dV). ``unit`` is a float32 factor.
    """
    RK = spec.column_registers

    def add_columns(rdK, rT, unit):
        for e in range(RK):
            rdK[e] += unit * rT[e]

    return add_columns


@part
def make_add_own_dq(spec):
    """Make ``add_own_dq(rdQ, A, row0, col0, unit, head)``, which adds ``unit`` times dQ to the
    array A atomically.

    A is the float32 sum of dQ in global memory. ``rdQ`` holds this thread's part of 64 x 64
    elements, which begin at (row0, col0) of A. Rows beyond the sequence are not added.
    """
    query_rows, add_two = make_query_rows(spec), make_add_two(spec)
    TILES = ceil_div(min(spec.head_dim, PANEL), 8)

    def add_own_dq(rdQ, A, row0, col0, unit, head):
        Ah = query_rows(A, head)
        # Computed again here, so that they take no registers during the loop.
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
    """Make ``write_own_columns(rdK, dK, row0, head, thread)``, which writes this thread's part of
    dK to global memory in float32.

    The consumer's rows begin at row ``row0`` of dK.
    """
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
    """Make ``second_panel()``, which returns the index in sK at which the second panel of Kj, its
    columns from 64 on, begins.
    """
    AT = PANEL * spec.Bc

    def second_panel():
        return uint32(AT)

    return second_panel


@part
def make_give_power(spec):
    """Make ``give_power(power)``, by which one consumer warpgroup passes a power of two to the
    other consumer warpgroup.

    The calling consumer computes dS, and multiplies dS by ``power`` before it splits dS into
    planes. The function stores ``power`` in shared memory. The other consumer reads ``power`` by
    ``read_power`` after the next barrier, because it also multiplies with dS. Without scaled
    planes, the function does nothing.
    """
    (AT, WORDS), scaled = spec.largest_words, spec.features.scaled

    def give_power(power):
        if scaled and uint32(cuda.threadIdx.x) % uint32(GROUP) == uint32(0):
            shared_tile(AT, WORDS)[0] = power

    return give_power


@part
def make_read_power(spec):
    """Make ``read_power()``, which returns the power of two by which the other consumer warpgroup
    has multiplied dS.

    The other consumer has stored the power in shared memory by ``give_power``. Without scaled
    planes, the result is 1.
    """
    (AT, WORDS), scaled = spec.largest_words, spec.features.scaled

    def read_power():
        power = ONE
        if scaled:
            power = shared_tile(AT, WORDS)[0]
        return power

    return read_power
