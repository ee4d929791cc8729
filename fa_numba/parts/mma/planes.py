"""Products of float32 matrices on tensor cores: an element is a sum of two or three 16-bit ones,
its planes, x = x0 + x1 + ..., each the nearest to what those before it leave of x.

    A B = A0 B0 + (A0 B1 + A1 B0) + (A0 B2 + A1 B1 + A2 B0) + ...

Of n planes those products are made whose numbers add up to less than n: plane i is 2^-8 i of x in
bfloat16, 2^-11 i in float16. A tensor core cuts off what a sum in its registers is too large for,
so that errors grow with the number of additions: A0 B0 has sums of its own, which small products do
not disturb, and so has every tile of P V; they meet in float32 additions.

In a row of a tile in shared memory, and in registers, plane p begins ``planes`` p-th parts on.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import ONE
from fa_numba.intrinsics.matrix import MMA, ldmatrix, ldmatrix_transposed
from fa_numba.parts.layout import make_warp_column
from fa_numba.parts.mma.chunks import conversions
from fa_numba.parts.mma.fragments import make_load_fragment, make_place
from fa_numba.parts.mma.swizzle import make_further
from fa_numba.parts.namespace import part

# What a scaled plane of P, at most 1, is multiplied by: float16 has 2^-24 at the least.
P_SCALE = float32(2.0**15)
# Turns of a loop over registers that is unrolled.
UNROLLED = 2


@part
def make_units(spec):
    """``units(scale, head)``: what Q KT is to be multiplied by for ``scale`` times the scores, and
    P V for the output: planes of float16 are times powers of two.
    """
    scaled, packed = spec.features.scaled, spec.features.packed
    drops = spec.features.dropout and spec.planes > 1
    inverse = float32(1.0 / P_SCALE)

    def units(scale, head):
        unit = ONE
        if drops:
            unit = head.options.inverse_keep
        if scaled:
            options, b = head.options, uint32(0) if packed else head.b
            scale *= options.q_power[b, head.h] * options.k_power[b, head.hk]
            unit *= inverse * options.v_power[b, head.hk]
        return scale, unit

    return units


@cache
def make_split(dtype, planes):
    """``split(words, at, step, low, high)``: the planes of two numbers to words[at], [at + step],
    ..., two 16-bit elements each.
    """
    return _make_split(dtype, planes)


@part
def _make_split(dtype, planes):
    pack, unpack = conversions(dtype)
    rest = _make_split(dtype, planes - 1) if planes > 1 else _nothing

    def split(words, at, step, low, high):
        word = pack(low, high)
        words[at] = word
        near = unpack(word)
        rest(words, at + step, step, low - near[0], high - near[1])

    return split


@device_function
def _nothing(a, b, c, d, e):
    pass


@device_function
def _no_product(a, b, c, d, e, f, g):
    pass


@part
def _make_multiply(dtype, planes, step, count=None):
    """``multiply(rL, rT, low, high, rA, a, rB)``: the products of the planes of a fragment of A,
    from rA[a] on and ``step`` registers apart, with those of B, added to 16 x 16 elements at
    ``low`` and ``high``: A0 B0 to rL, the others to rT, from the smallest on. The first ``count``.
    """
    order = [(i, n - i) for n in range(planes - 1, -1, -1) for i in range(n + 1)]
    count = len(order) if count is None else count
    i, j = order[count - 1]
    A, B, largest = step * i, 4 * j, count == len(order)
    mma = MMA[DTYPES[dtype].matrix]
    before = _make_multiply(dtype, planes, step, count - 1) if count > 1 else _no_product

    def multiply(rL, rT, low, high, rA, a, rB):
        before(rL, rT, low, high, rA, a, rB)
        rC = rL if largest else rT
        e = a + A
        mma(rC, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], rB[B], rB[B + 1])
        mma(rC, low + 2, high + 2, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], rB[B + 2], rB[B + 3])

    return multiply


@part
def make_scores_of_planes(spec):
    """``scores(rS, rQ, sQ, sK, row0, col0)``: as ``products.make_scores``, of planes."""
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
    """``add_from(rS, rT, rQ, sQ, sK, at_q, at_k)``: the products of 16 columns of Q and K each,
    from number ``first`` on; some of them, whose loop is unrolled, and the rest.
    """
    R, TN, K, keeps, PLANES = spec.TM // 2, spec.TN, spec.DN, spec.keeps_q, spec.planes
    COLUMNS, RK, LAST = TN // 4, 4 * spec.planes, min(spec.DN, first + UNROLLED)
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


@part
def make_add_output_of_planes(spec):
    """``add_output(rO, rP, sV, unit, options)``: as ``products.make_add_output``, of planes."""
    R, TN, K, pitch, PLANES = spec.TM // 2, spec.TN, spec.TN // 4, spec.rows.pitch, spec.planes
    STEP, P, scaled = spec.TM * spec.TN // 2, P_SCALE, spec.features.scaled
    RA, drops, place = PLANES * STEP, spec.features.dropout, make_place(spec.rows)
    warp_column, split = make_warp_column(spec), make_split(spec.dtype, PLANES)
    add_from = _make_add_columns_from(spec, 0)

    def add_output(rO, rP, sV, unit, options):
        rA = cuda.local.array(RA, uint32)
        for k in range(K):
            for r in range(R):
                for n in range(4):
                    e = (2 * r + n % 2) * TN + 4 * k + n // 2 * 2
                    low, high = rP[e], rP[e + 1]
                    if drops:  # by ``drop``; ``units`` has the factor of the others
                        low = float32(0.0) if low < float32(0.0) else low
                        high = float32(0.0) if high < float32(0.0) else high
                    if scaled:
                        low, high = P * low, P * high
                    split(rA, 4 * (k * R + r) + n, STEP, low, high)
        add_from(rO, rA, sV, uint32(warp_column() * pitch + place(True, 0)), unit)

    return add_output


@part
def _make_add_columns_from(spec, first):
    """``add_from(rO, rA, sV, at, unit)``: P V of 16 columns at a time, from number ``first`` on, in
    sums of this tile alone, and ``unit`` times these to rO; some, and the rest, as above.
    """
    R, K, DN, PLANES = spec.TM // 2, spec.TN // 4, spec.DN, spec.planes
    STEP, RF, RV = spec.TM * spec.TN // 2, 8 * (spec.TM // 2), 4 * spec.planes
    LAST, further = min(DN, first + UNROLLED), make_further(spec.rows)
    multiply = _make_multiply(spec.dtype, PLANES, STEP)
    rest = _make_add_columns_from(spec, LAST) if LAST < DN else _nothing

    def add_from(rO, rA, sV, at, unit):
        rV = cuda.local.array(RV, uint32)
        rL, rT = cuda.local.array(RF, float32), cuda.local.array(RF, float32)
        for c in range(first, LAST):
            for e in range(RF):
                rL[e] = float32(0.0)
                rT[e] = float32(0.0)
            for k in range(K):
                for p in range(PLANES):
                    b = ldmatrix_transposed(sV, further(at, 16 * k, 16 * (p * DN + c)))
                    for n in range(4):
                        rV[4 * p + n] = b[n]
                for r in range(R):
                    multiply(rL, rT, 8 * r, 8 * r + 4, rA, 4 * (k * R + r), rV)
            for e in range(RF):
                o = e // 4 * 4 * DN + 4 * c + e % 4
                rO[o] += unit * (rT[e] + rL[e])
        rest(rO, rA, sV, at, unit)

    return add_from
