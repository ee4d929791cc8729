"""The products and element-wise steps that only the backward pass has.

Thread (ty, tx) owns rows ty + i TY of a row tile, as in the forward pass, and of dK and dV the rows
4 (ty + g TY) .. + 3: neighbouring columns of P, which one 16-byte read takes.
"""

import math
from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.global_memory import write4
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import load4
from fa_numba.parts.layout import make_column, make_row
from fa_numba.parts.rows import make_read_rows
from fa_numba.parts.softmax import FULL_WARP


@cache
def make_start_columns(spec):
    """``start_columns(rdK, rdV)``: dK = 0, dV = 0."""
    RK = spec.CM * spec.DN * 4

    @device_function
    def start_columns(rdK, rdV):
        for e in range(RK):
            rdK[e] = float32(0.0)
            rdV[e] = float32(0.0)

    return start_columns


@cache
def make_row_dots(spec):
    """``row_dots(rD, sdO, O, row0, rows_end, ty, tx)``: D = rowsum(dO o O), dO in shared memory."""
    TM, DN, TX, TY, pitch = spec.TM, spec.DN, spec.tx_count, spec.ty_count, spec.pitch_qk
    RO = TM * DN * 4
    read_rows = make_read_rows(spec)

    @device_function
    def row_dots(rD, sdO, O, row0, rows_end, ty, tx):
        rO = cuda.local.array(RO, float32)
        read_rows(rO, O, row0, rows_end, ty, tx)
        for i in range(TM):
            dot = float32(0.0)
            for c in range(DN):
                g = load4(sdO, uint32((ty + i * TY) * pitch + 4 * (tx + c * TX)))
                e = 4 * (i * DN + c)
                dot += g[0] * rO[e] + g[1] * rO[e + 1] + g[2] * rO[e + 2] + g[3] * rO[e + 3]
            lane = TX // 2
            while lane > 0:
                dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)
                lane //= 2
            rD[i] = dot

    return row_dots


@cache
def make_cap_slopes(spec):
    """``cap_slopes(rG, rS, scale, options)``: rG = 1 - tanh(scale S)^2, where there is a cap."""
    RS, softcap = spec.TM * spec.TN, spec.features.softcap

    @device_function
    def cap_slopes(rG, rS, scale, options):
        if softcap:
            for e in range(RS):
                t = math.tanh(scale * rS[e])
                rG[e] = float32(1.0) - t * t

    return cap_slopes


@cache
def make_score_gradients(spec):
    """``score_gradients(rdP, rP, rD, rG, row0, col0, Nq, Nk, b, h, options, ty, tx)``.

    dS = P o (dP - D), in place of dP: added to dbias where asked for, and times the cap's slope.
    P as ``drop`` has marked it.
    """
    TM, TN, (EI, EJ), features = spec.TM, spec.TN, spec.element_steps, spec.features
    row_of, column_of = make_row(spec), make_column(spec)
    dropout, dbias, softcap = features.dropout, features.dbias, features.softcap

    @device_function
    def score_gradients(rdP, rP, rD, rG, row0, col0, Nq, Nk, b, h, options, ty, tx):
        for i in range(TM):
            for j in range(TN):
                e = i * EI + j * EJ
                p = rP[e]
                if dropout:
                    dp = rdP[e] * options.inverse_keep
                    rdP[e] = float32(0.0) if p < float32(0.0) else dp
                    p = abs(p)
                rdP[e] = p * (rdP[e] - rD[i])
        if dbias:
            dBh = options.dbias[b, h]
            for i in range(TM):
                row = uint32(row0 + row_of(ty, i))
                for j in range(TN):
                    col = uint32(col0 + column_of(tx, j))
                    if row < Nq and col < Nk:
                        add_global(dBh, row, col, rdP[i * EI + j * EJ])
        if softcap:
            for e in range(TM * TN):
                rdP[e] *= rG[e]

    return score_gradients


@cache
def make_store_ds(spec):
    """``store_ds(sdS, rdS, ty, tx)``: dS from registers to shared memory."""
    TM, TN, TX, TY, pitch = spec.TM, spec.TN, spec.tx_count, spec.ty_count, spec.pitch_p

    @device_function
    def store_ds(sdS, rdS, ty, tx):
        for i in range(TM):
            for j in range(TN):
                sdS[uint32((ty + i * TY) * pitch + tx + j * TX)] = rdS[i * TN + j]

    return store_ds


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


@cache
def make_scale_columns(spec):
    """``scale_columns(rT, factor)``: factor T."""
    RK = spec.CM * spec.DN * 4

    @device_function
    def scale_columns(rT, factor):
        for e in range(RK):
            rT[e] *= factor

    return scale_columns


@cache
def make_write_columns(spec):
    """``write_columns(rT, T, row0, rows_end, ty, tx)``: this thread's dK or dV to memory."""
    CM, DN, TX, TY = spec.CM, spec.DN, spec.tx_count, spec.ty_count
    d, aligned = spec.head_dim, spec.aligned

    @device_function
    def write_columns(rT, T, row0, rows_end, ty, tx):
        for r in range(CM):
            row = uint32(row0 + 4 * (ty + (r // 4) * TY) + r % 4)
            for c in range(DN):
                col = uint32(4 * (tx + c * TX))
                e = 4 * (r * DN + c)
                if aligned:
                    if row < rows_end and col < uint32(d):
                        write4(T, row, col, rT[e], rT[e + 1], rT[e + 2], rT[e + 3])
                else:
                    for n in range(4):
                        if row < rows_end and uint32(col + n) < uint32(d):
                            T[row, uint32(col + n)] = rT[e + n]

    return write_columns
