"""From dP to dS, element by element: softmax, cap on the scores, bias; dK and dV in registers."""

import math
from functools import cache

from fa_numba.device import device_function, float32, uint32
from fa_numba.intrinsics.reduction import add_global
from fa_numba.parts.layout import make_column, make_row


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
def make_start_columns(spec):
    """``start_columns(rdK, rdV)``: dK = 0, dV = 0."""
    RK = spec.column_registers

    @device_function
    def start_columns(rdK, rdV):
        for e in range(RK):
            rdK[e] = float32(0.0)
            rdV[e] = float32(0.0)

    return start_columns


@cache
def make_scale_columns(spec):
    """``scale_columns(rT, factor)``: factor T."""
    RK = spec.column_registers

    @device_function
    def scale_columns(rT, factor):
        for e in range(RK):
            rT[e] *= factor

    return scale_columns
