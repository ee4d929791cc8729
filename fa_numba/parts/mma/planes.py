"""Matrix products of float32 matrices on tensor cores (``mma.sync``): each matrix is a sum of
planes.

A plane is a 16-bit matrix (``parts.fragments.planes``). A tensor core drops the low bits of a
product if the sum in its registers is much larger than the product. Therefore errors grow with the
number of additions. To keep errors small, the kernels compute several sums, and add these sums in
float32:

- one sum for A0 B0, and another sum for the smaller products of planes,
- for P V, separate sums for each tile.

In a row of a tile in shared memory, the planes are stored one after the other. In an array of
registers, the planes are stored one after the other too.
"""

from functools import cache
from typing import Any, NamedTuple

from fa_numba.device import cuda, device_function, float32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import ONE, inverse_power, maximum
from fa_numba.intrinsics.matrix import MMA, ldmatrix, ldmatrix_transposed
from fa_numba.intrinsics.shared import shared_tile, store2
from fa_numba.parts.fragments.planes import (
    FINITE,
    P_SCALE,
    P_SCALE_BACKWARD,
    make_split,
    pairs_of_planes,
    power_of_two,
)
from fa_numba.parts.lanes import max_of_lanes
from fa_numba.parts.layout import make_column, make_row, make_warp_column
from fa_numba.parts.mma.fragments import make_load_fragment, make_place
from fa_numba.parts.mma.swizzle import make_further
from fa_numba.parts.namespace import part
from fa_numba.tiling.mma_backward import UNITS

# The number of turns of a loop over registers, which the compiler unrolls.
UNROLLED = 2


@device_function
def _nothing(a, b, c, d, e):
    pass


@device_function
def _no_product(a, b, c, d, e, f, g):
    pass


@part
def _make_multiply(dtype, planes, step, beside=2, count=None):
    """Make ``multiply(rL, rT, low, high, rA, a, rB)``, which multiplies a fragment of A and a
    fragment of B, where both are split into planes.

    The result has 16 x 16 elements. It is added to two register arrays. The product of the first
    planes, A0 B0, is added to rL. The smaller products of planes are added to rT, from the smallest
    to the largest.

    - ``rA`` holds the planes of A. The first plane begins at register ``a``, and the next planes
      follow ``step`` registers apart.
    - ``rB`` holds the planes of B.
    - ``low`` and ``high`` are indices in rL and rT. This lane's elements in the first 8 columns of
      the result begin at ``low`` for the upper 8 rows, and at ``high`` for the lower 8 rows. For
      the last 8 columns, both indices are larger by ``beside``.

    If ``count`` is not None, only the ``count`` smallest products are computed.
    """
    order = pairs_of_planes(planes)
    count = len(order) if count is None else count
    i, j = order[count - 1]
    A, B, largest = step * i, 4 * j, count == len(order)
    mma = MMA[DTYPES[dtype].matrix]
    before = _make_multiply(dtype, planes, step, beside, count - 1) if count > 1 else _no_product

    def multiply(rL, rT, low, high, rA, a, rB):
        before(rL, rT, low, high, rA, a, rB)
        rC = rL if largest else rT
        e = a + A
        mma(rC, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], rB[B], rB[B + 1])
        low, high = low + beside, high + beside
        mma(rC, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], rB[B + 2], rB[B + 3])

    return multiply


@part
def make_scores_of_planes(spec):
    """Make ``scores(rS, rQ, sQ, sK, row0, col0)``, which computes S = Qi KjT from the planes of Q
    and K.

    Q and K are float32 matrices. Each of them is stored as several 16-bit matrices, its planes. S
    is the sum of several products of a plane of Q and a plane of K. ``products.make_scores``
    explains the arguments.
    """
    pitch, RS, place = spec.rows.pitch, spec.TM * spec.TN, make_place(spec.rows)
    add_from = _make_add_scores_from(spec, 0)

    def scores(rS, rQ, sQ, sK, row0, col0):
        rT = cuda.local.array(RS, float32)
        at_q = uint32(row0 * pitch + place(True, 0))
        at_k = uint32(col0 * pitch + place(False, 0))
        for e in range(RS):
            rS[e] = float32(0.0)
            rT[e] = float32(0.0)
        add_from(rS, rT, rQ, sQ, sK, at_q, at_k)
        for e in range(RS):
            rS[e] += rT[e]

    return scores


@part
def _make_add_scores_from(spec, first):
    """Make ``add_from(rS, rT, rQ, sQ, sK, at_q, at_k)``, which adds a part of the product Q KT to
    registers.

    The part is the sum over the columns of Q and K from 16 * ``first`` on. Q and K are split into
    planes. The product of the first planes is added to rS, and the smaller products of planes are
    added to rT. ``at_q`` and ``at_k`` are the indices of the warp's first fragments in sQ and sK.
    ``products.make_scores`` explains ``rQ``.

    The compiler unrolls the loop over columns completely. The function therefore handles at most
    UNROLLED times 16 columns. A second function of the same kind handles the columns after them.
    This factory makes the second function by calling itself with a larger ``first``.
    """
    R, TN, K, keeps, PLANES = spec.TM // 2, spec.TN, spec.DK, spec.keeps_q, spec.planes
    COLUMNS, RK, LAST = TN // 4, 4 * spec.planes, min(spec.DK, first + UNROLLED)
    load_fragment, further = make_load_fragment(spec), make_further(spec.rows)
    multiply = _make_multiply(spec.dtype, PLANES, 4 * K)
    rest = _make_add_scores_from(spec, LAST) if LAST < K else _no_product

    def add_from(rS, rT, rQ, sQ, sK, at_q, at_k):
        rK = cuda.local.array(RK, uint32)
        for k in range(first, LAST):
            for r in range(R):
                for p in range(PLANES):
                    if not keeps:
                        load_fragment(rQ, sQ, at_q, r, p * K + k)
            for c in range(COLUMNS):
                for p in range(PLANES):
                    b = ldmatrix(sK, further(at_k, 16 * c, 16 * (p * K + k)))
                    for n in range(4):
                        rK[4 * p + n] = b[n]
                for r in range(R):
                    low = 2 * r * TN + 4 * c
                    multiply(rS, rT, low, low + TN, rQ, 4 * (r * PLANES * K + k), rK)
        rest(rS, rT, rQ, sQ, sK, at_q, at_k)

    return add_from


class Sums(NamedTuple):
    """The sizes and layouts of a product A B of planes that one warp computes.

    The result has 16 ``R`` rows and 16 ``DN`` columns, and the sum has 16 ``K`` terms. ``rows`` is
    the layout of B in shared memory. ``carries`` is the argument of ``make_further`` for the
    columns of B.
    """

    R: int  # fragments of 16 rows of A
    K: int  # the sum has 16 K terms
    DN: int  # the result has 16 DN columns
    planes: int
    dtype: str
    rows: Any  # the layout of B in shared memory (``tiling.mma_rows.TileRows``)
    carries: bool = False  # the argument of ``make_further`` for the columns of B


@cache
def make_add_output_of_planes(spec):
    """Make ``add_output(rO, rP, sV, unit, options)``, which adds ``unit`` times P V to O, for
    planes.

    ``products.make_add_output`` explains the arguments.
    """
    return add_fragment_product_of_planes(spec, spec.features.dropout, P_SCALE)


@part
def add_fragment_product_of_planes(spec, drops, times):
    """Make ``add_output(rO, rP, sV, unit, options)``, which adds ``unit`` times P V to rO, for
    planes.

    ``rP`` holds P in float32. The function splits P into planes. With scaled planes, it first
    multiplies P by ``times``, and the caller's ``unit`` must contain the inverse of ``times``. If
    ``drops`` is true, negative elements of P are dropped elements and count as 0. The caller's
    ``unit`` must then contain 1 / (1 - dropout_p).
    """
    R, TN, K, rows, PLANES = spec.TM // 2, spec.TN, spec.TN // 4, spec.value_rows, spec.planes
    STEP, scaled = spec.TM * spec.TN // 2, spec.features.scaled and times != ONE
    RA, place, pitch = PLANES * STEP, make_place(rows), rows.pitch
    warp_column, split = make_warp_column(spec), make_split(spec.dtype, PLANES)
    add_from = _make_add_columns_from(Sums(R, K, spec.DN, PLANES, spec.dtype, rows), 0)

    def add_output(rO, rP, sV, unit, options):
        rA = cuda.local.array(RA, uint32)
        for k in range(K):
            for r in range(R):
                for n in range(4):
                    e = (2 * r + n % 2) * TN + 4 * k + n // 2 * 2
                    low, high = rP[e], rP[e + 1]
                    if drops:
                        low = float32(0.0) if low < float32(0.0) else low
                        high = float32(0.0) if high < float32(0.0) else high
                    if scaled:
                        low, high = times * low, times * high
                    split(rA, 4 * (k * R + r) + n, STEP, low, high)
        add_from(rO, rA, sV, uint32(warp_column() * pitch + place(True, 0)), unit)

    return add_output


@part
def _make_add_columns_from(sums, first):
    """Make ``add_from(rO, rA, sV, at, unit)``, which adds ``unit`` times the last columns of a
    product A B to the registers rO.

    These are the columns from 16 * ``first`` on. ``sums`` gives the sizes of the product
    (``Sums``). ``rA`` holds the planes of A. B is in shared memory sV, and ``at`` is the index that
    this lane passes to ``ldmatrix`` for the first element of B. The function computes 16 columns of
    the product at a time in separate registers. It multiplies them by ``unit`` and adds them to rO.

    The compiler unrolls the loop over columns completely. The function therefore handles at most
    UNROLLED times 16 columns. A second function of the same kind handles the columns after them.
    This factory makes the second function by calling itself with a larger ``first``.
    """
    R, K, DN, PLANES, dtype, rows, carries = sums
    STEP, RF, RV, PLANE = 4 * R * K, 8 * R, 4 * PLANES, rows.columns // PLANES
    LAST, further = min(DN, first + UNROLLED), make_further(rows, carries)
    multiply = _make_multiply(dtype, PLANES, STEP)
    rest = _make_add_columns_from(sums, LAST) if LAST < DN else _nothing

    def add_from(rO, rA, sV, at, unit):
        rV = cuda.local.array(RV, uint32)
        rL, rT = cuda.local.array(RF, float32), cuda.local.array(RF, float32)
        for c in range(first, LAST):
            for e in range(RF):
                rL[e] = float32(0.0)
                rT[e] = float32(0.0)
            for k in range(K):
                for p in range(PLANES):
                    b = ldmatrix_transposed(sV, further(at, 16 * k, PLANE * p + 16 * c))
                    for n in range(4):
                        rV[4 * p + n] = b[n]
                for r in range(R):
                    multiply(rL, rT, 8 * r, 8 * r + 4, rA, 4 * (k * R + r), rV)
            for e in range(RF):
                o = e // 4 * 4 * DN + 4 * c + e % 4
                rO[o] += unit * (rT[e] + rL[e])
        rest(rO, rA, sV, at, unit)

    return add_from


# --- backward ----------------------------------------------------------------------------------


# Indices of the factors for dQ, dK and dV in ``units_of_tile``.
OF_DQ, OF_DK, OF_DV = range(UNITS)


@part
def _make_units_of_tile(spec):
    """Make ``units_of_tile()``, which returns an array of floats in shared memory for the scaling
    of a tile.

    The first UNITS elements are the factors for dQ, dK and dV. The following elements contain the
    largest |dS| of each warp.
    """
    WORDS, AT = spec.unit_words, spec.shared_bytes // 4 - spec.unit_words

    def units_of_tile():
        return shared_tile(AT, WORDS)

    return units_of_tile


@part
def _make_unit(spec, of):
    """Make ``unit()``, which returns the factor by which a product of planes is multiplied before
    the product is added to a gradient.

    ``of`` names the gradient: OF_DQ, OF_DK or OF_DV. With scaled planes, both matrices of the
    product were multiplied by powers of two before they were split into float16 planes. The factor
    is the inverse of the product of these powers. ``make_scale_ds`` stores it in shared memory.
    Without scaled planes the factor is 1.
    """
    scaled, units_of_tile = spec.features.scaled, _make_units_of_tile(spec)

    def unit():
        return units_of_tile()[of] if scaled else ONE

    return unit


@part
def make_scale_ds(spec):
    """Make ``scale_ds(rdS, tile)``, which multiplies dS by a power of two if planes are scaled.
    Otherwise it does nothing.

    All elements of the tile get the same power of two, which depends on the largest finite |dS| of
    the tile. The function stores the factors for dQ, dK and dV that undo the scaling in shared
    memory. Other threads can read these factors after the next barrier. With scaled planes, the
    function contains a ``syncthreads``.
    """
    RS, WARPS, packed = spec.TM * spec.TN, spec.warps, spec.features.packed
    units_of_tile, P = _make_units_of_tile(spec), float32(1.0 / P_SCALE_BACKWARD)
    scaled = spec.features.scaled

    def scale_ds(rdS, tile):
        if scaled:
            head, options, found = tile.head, tile.head.options, float32(0.0)
            b = uint32(0) if packed else head.b
            q, k = options.q_power[b, head.h], options.k_power[b, head.hk]
            dout = options.dout_power[b, head.h]
            for e in range(RS):
                size = maximum(rdS[e], -rdS[e])
                if size <= FINITE:
                    found = maximum(found, size)
            found = max_of_lanes(found, 32, 1)
            words, thread = units_of_tile(), uint32(cuda.threadIdx.x)
            if thread % uint32(32) == uint32(0):
                words[UNITS + thread // uint32(32)] = found
            cuda.syncthreads()
            for w in range(WARPS):
                found = maximum(found, words[UNITS + w])
            factor = power_of_two(found)
            for e in range(RS):
                rdS[e] *= factor
            if thread == uint32(0):
                inverse = inverse_power(factor)
                words[OF_DQ] = inverse * k
                words[OF_DK] = inverse * q
                words[OF_DV] = P * dout

    return scale_ds


@part
def make_add_transposed_of_planes(spec, of, whole):
    """Make ``add(rdV, rP, sP, sT, row0, col0, options)``, which adds PT dO to dV, or dST Q to dK,
    for planes.

    ``products.make_add_dv`` explains the arguments of ``add``. The arguments of the factory are:

    - ``of``: OF_DV for dV, or OF_DK for dK.
    - ``whole``: the spec of the kernel.
    - ``spec``: equal to ``whole`` for dK. For dV, it has the head dimension of V.
    """
    own, PLANES, PLANE = spec.row_warps == 1, spec.planes, spec.plane_of_scores
    R, K, rows = spec.TN // 2, spec.Br // 16, spec.rows
    STEP, RA, pitch = 4 * R * K, PLANES * 4 * R * K, spec.rows_ds.pitch
    drops, times = spec.features.dropout and of == OF_DV, P_SCALE_BACKWARD if of == OF_DV else ONE
    unit_of, from_registers = _make_unit(whole, of), _nothing
    if own:
        from_registers = add_fragment_product_of_planes(spec.gradients, drops, times)
    sums = Sums(R, K, spec.gradients.DN, PLANES, spec.dtype, rows, rows.group > 2)
    place_p, further_p = make_place(spec.rows_ds), make_further(spec.rows_ds)
    place, add_from = make_place(rows, sums.carries), _make_add_columns_from(sums, 0)

    def add(rdV, rP, sP, sT, row0, col0, options):
        unit = unit_of()
        if drops:
            unit *= options.inverse_keep
        if own:
            from_registers(rdV, rP, sT, unit, options)
        else:
            rA = cuda.local.array(RA, uint32)
            first = uint32(row0 * pitch + place_p(True, 0))
            for k in range(K):
                for r in range(R):
                    for p in range(PLANES):
                        a = ldmatrix(sP, further_p(first, 16 * r, 16 * k) + p * PLANE)
                        for n in range(4):
                            rA[p * STEP + 4 * (k * R + r) + n] = a[n]
            add_from(rdV, rA, sT, place(True, col0), unit)

    return add


@part
def make_dq_of_planes(spec):
    """Make ``dq(rdQ, sdS, sK, turn)``, which computes this warp's part of dSij Kj in rdQ, for
    planes.

    ``products.make_dq`` explains the arguments. The elements of rdQ must be 0 before the call.
    """
    R, C, ALONG, DN = spec.query_fragments, spec.query_chunks, spec.chunk_warps, spec.DN
    K, PLANES, PLANE, COLUMNS = spec.Bc // 16, spec.planes, spec.plane_of_scores, spec.columns
    RA, RV, STEP, RQ = 4 * R * PLANES, 4 * PLANES, 4 * R, 8 * R * C
    CHUNKS = spec.chunk_step
    carries = spec.rows.group > 2
    place, further = make_place(spec.rows, carries), make_further(spec.rows, carries)
    place_ds, further_ds = make_place(spec.rows_ds), make_further(spec.rows_ds)
    multiply = _make_multiply(spec.dtype, PLANES, STEP, 4)
    unit_of = _make_unit(spec, OF_DQ)

    def dq(rdQ, sdS, sK, turn):
        rA, rV = cuda.local.array(RA, uint32), cuda.local.array(RV, uint32)
        rT = cuda.local.array(RQ, float32)
        for e in range(RQ):
            rT[e] = float32(0.0)
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        chunk = uint32(warp % uint32(ALONG) + turn * ALONG)
        at_ds = place_ds(False, warp // uint32(ALONG) * (16 * R))
        at_k = place(True, chunk * 16)
        for k in range(K):
            for r in range(R):
                for p in range(PLANES):
                    a = ldmatrix_transposed(sdS, further_ds(at_ds, 16 * k, 16 * r) + p * PLANE)
                    for n in range(4):
                        rA[p * STEP + 4 * r + n] = a[n]
            for c in range(C):
                if uint32(chunk + c * CHUNKS) < uint32(DN):
                    for p in range(PLANES):
                        right = 16 * c * CHUNKS + COLUMNS * p
                        b = ldmatrix_transposed(sK, further(at_k, 16 * k, right))
                        rV[4 * p] = b[0]
                        rV[4 * p + 1] = b[1]
                        rV[4 * p + 2] = b[2]
                        rV[4 * p + 3] = b[3]
                    for r in range(R):
                        low = 8 * (r * C + c)
                        multiply(rdQ, rT, low, low + 2, rA, 4 * r, rV)
        unit = unit_of()
        for e in range(RQ):
            rdQ[e] = unit * (rdQ[e] + rT[e])

    return dq


@part
def make_store_of_planes(spec, of):
    """Make ``store(sT, rT, tile)``, which stores the planes of PT or dST in shared memory sT, one
    plane after the other.

    - If ``of`` is OF_DV, the matrix is PT. Some kernels do not need PT in shared memory, because
      the registers of each warp contain all elements of PT that the warp multiplies. In these
      kernels, nothing is stored.
    - If ``of`` is OF_DQ, the matrix is dST. The function first scales dS in the registers rT
      (``make_scale_ds``).
    """
    TM, TN, pitch, PLANES = spec.TM, spec.TN, spec.rows_ds.pitch, spec.planes
    row_of, column_of, PLANE = make_row(spec), make_column(spec), spec.plane_of_scores
    of_p, wanted = of == OF_DV, of == OF_DQ or spec.row_warps > 1
    drops, scaled = of_p and spec.features.dropout, of_p and spec.features.scaled
    scale_ds, split, P = make_scale_ds(spec), make_split(spec.dtype, PLANES), P_SCALE_BACKWARD

    def store(sT, rT, tile):
        if not of_p:
            scale_ds(rT, tile)
        if wanted:
            words, thread = cuda.local.array(PLANES, uint32), tile.thread
            first = uint32(column_of(thread.tx, 0) * pitch + row_of(thread.ty, 0))
            for j in range(TN):
                for i in range(0, TM, 2):
                    e = j * TM + i
                    further = uint32(column_of(uint32(0), j) * pitch + row_of(uint32(0), i))
                    at = int64(first) + int64(further)
                    low, high = rT[e], rT[e + 1]
                    if drops:
                        low = float32(0.0) if low < float32(0.0) else low
                        high = float32(0.0) if high < float32(0.0) else high
                    if scaled:
                        low, high = P * low, P * high
                    split(words, 0, 1, low, high)
                    for p in range(PLANES):
                        store2(sT, at + p * PLANE, words[p])

    return store
