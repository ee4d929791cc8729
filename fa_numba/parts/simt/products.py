"""The two matrix products of attention on register tiles, operands in shared memory.

Thread (ty, tx) owns rows ty + i TY and, of S, columns tx + j TX: neighbouring threads read
neighbouring rows, which the pitch of each tile puts in different banks.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.shared import load4

# Columns of Q and K that one running sum takes: beyond that its rounding shows in the gradients.
LONGEST_SUM = 128


@cache
def make_scores(spec):
    """``scores(rS, sQ, sK, ty, tx)``: rS = Qi KjT, contraction over the head dimension."""
    RS = spec.TM * spec.TN
    if spec.d4 <= LONGEST_SUM:
        return _make_partial_scores(spec, 0, spec.d4)
    middle = spec.d4 // 8 * 4
    lower = _make_partial_scores(spec, 0, middle)
    upper = _make_partial_scores(spec, middle, spec.d4)

    @device_function
    def scores(rS, sQ, sK, ty, tx):
        rH = cuda.local.array(RS, float32)
        lower(rH, sQ, sK, ty, tx)
        upper(rS, sQ, sK, ty, tx)
        for e in range(RS):
            rS[e] += rH[e]

    return scores


def _make_partial_scores(spec, first, last):
    """The same over columns ``first`` to ``last`` of Q and K."""
    TM, TN, TX, TY = spec.TM, spec.TN, spec.tx_count, spec.ty_count
    pitch = spec.pitch_qk
    RK = 4 * TN

    @device_function
    def partial_scores(rS, sQ, sK, ty, tx):
        rK = cuda.local.array(RK, float32)
        for e in range(TM * TN):
            rS[e] = float32(0.0)
        for k in range(first, last, 4):
            for j in range(TN):
                b = load4(sK, uint32((tx + j * TX) * pitch + k))
                rK[4 * j] = b[0]
                rK[4 * j + 1] = b[1]
                rK[4 * j + 2] = b[2]
                rK[4 * j + 3] = b[3]
            for i in range(TM):
                a = load4(sQ, uint32((ty + i * TY) * pitch + k))
                for j in range(TN):
                    e = i * TN + j
                    rS[e] += a[0] * rK[4 * j]
                    rS[e] += a[1] * rK[4 * j + 1]
                    rS[e] += a[2] * rK[4 * j + 2]
                    rS[e] += a[3] * rK[4 * j + 3]

    return partial_scores


@cache
def make_product(spec):
    """``product(rT, sP, sV, ty, tx)``: rT = Pij Vj, contraction over the tile's columns.

    A sum of its own for each tile: one running sum over all columns would lose accuracy as N grows.
    """
    TM, DN, TX, TY, Bc = spec.TM, spec.DN, spec.tx_count, spec.ty_count, spec.Bc
    pitch_p, pitch_v = spec.pitch_p, spec.pitch_v
    RP = 4 * TM

    @device_function
    def product(rT, sP, sV, ty, tx):
        rP = cuda.local.array(RP, float32)
        for e in range(TM * DN * 4):
            rT[e] = float32(0.0)
        for k in range(0, Bc, 4):
            for i in range(TM):
                a = load4(sP, uint32((ty + i * TY) * pitch_p + k))
                rP[4 * i] = a[0]
                rP[4 * i + 1] = a[1]
                rP[4 * i + 2] = a[2]
                rP[4 * i + 3] = a[3]
            for n in range(4):
                for c in range(DN):
                    b = load4(sV, uint32((k + n) * pitch_v + 4 * (tx + c * TX)))
                    for i in range(TM):
                        e = 4 * (i * DN + c)
                        p = rP[4 * i + n]
                        rT[e] += p * b[0]
                        rT[e + 1] += p * b[1]
                        rT[e + 2] += p * b[2]
                        rT[e + 3] += p * b[3]

    return product


@cache
def make_add_transposed_product(spec):
    """``add_transposed_product(rdV, sP, sB, ty, tx)``: rdV += PT B, contraction over the rows.

    Each tile has a sum of its own, as in ``products.make_product``.
    """
    CG, DN, TX, TY, Br = spec.CM // 4, spec.DN, spec.tx_count, spec.ty_count, spec.Br
    pitch_p, pitch = spec.pitch_p, spec.pitch_qk

    RP, RT = 16 * CG, 16 * CG * DN

    @device_function
    def add_transposed_product(rdV, sP, sB, ty, tx):
        rP = cuda.local.array(RP, float32)
        rT = cuda.local.array(RT, float32)
        for e in range(RT):
            rT[e] = float32(0.0)
        for i in range(0, Br, 4):
            for n in range(4):
                for g in range(CG):
                    a = load4(sP, uint32((i + n) * pitch_p + 4 * (ty + g * TY)))
                    rP[4 * (n * CG + g)] = a[0]
                    rP[4 * (n * CG + g) + 1] = a[1]
                    rP[4 * (n * CG + g) + 2] = a[2]
                    rP[4 * (n * CG + g) + 3] = a[3]
            for n in range(4):
                for c in range(DN):
                    b = load4(sB, uint32((i + n) * pitch + 4 * (tx + c * TX)))
                    for r in range(4 * CG):
                        p = rP[4 * n * CG + r]
                        e = 4 * (r * DN + c)
                        rT[e] += p * b[0]
                        rT[e + 1] += p * b[1]
                        rT[e + 2] += p * b[2]
                        rT[e + 3] += p * b[3]
        for e in range(RT):
            rdV[e] += rT[e]

    return add_transposed_product
