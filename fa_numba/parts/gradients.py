"""The step from dP to dS in registers, and operations on dK and dV, for all units.

The step includes the softmax, the bias, and the derivatives of a cap and of the user's
``score_mod``.
"""

from fa_numba.device import float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.intrinsics.reduction import add_global
from fa_numba.parts.grid import make_query_rows
from fa_numba.parts.layout import make_column, make_row
from fa_numba.parts.mods import make_add_captured, make_times_slope
from fa_numba.parts.namespace import part


@part
def make_of_scores(spec):
    """Make ``of_scores(rdP, rP, rD, rG, tile)``, which computes dS from dP in the registers rdP.

    - ``rdP`` holds dP before the call, and dS after the call. If dP is a product of scaled planes,
      the function first undoes the scaling.
    - ``rP`` holds P. Elements that ``drop`` has marked as dropped are negative.
    - ``rD: (TM,)`` holds D of each row.
    - ``rG`` holds the derivatives of the cap and of ``score_mod``, which ``slopes`` has stored.

    First dS = P o (dP - D) is computed. This dS is added to the gradient of the bias, if the call
    computes that gradient. It also gives the gradients of the arrays that ``score_mod`` captures,
    if the call computes them. At the end, dS is multiplied by the derivatives in rG.
    """
    TM, TN, (EI, EJ), features = spec.TM, spec.TN, spec.element_steps, spec.features
    row_of, column_of = make_row(spec), make_column(spec)
    dropout, dbias, slopes = features.dropout, features.dbias, features.slopes
    add_captured, times_slope = make_add_captured(spec), make_times_slope(features)
    scaled, packed = features.scaled, features.packed

    def of_scores(rdP, rP, rD, rG, tile):
        head, options, thread = tile.head, tile.head.options, tile.thread
        if scaled:
            b = uint32(0) if packed else head.b
            unit = options.dout_power[b, head.h] * options.v_power[b, head.hk]
            for e in range(TM * TN):
                rdP[e] *= unit
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
            dBh = options.dbias[head.b, head.h]
            for i in range(TM):
                row = uint32(tile.i0 + row_of(thread.ty, i))
                for j in range(TN):
                    col = uint32(tile.j0 + column_of(thread.tx, j))
                    if row < head.Nq and col < head.Nk:
                        add_global(dBh, row, col, rdP[i * EI + j * EJ])
        add_captured(rdP, rG, tile)
        if slopes:
            for e in range(TM * TN):
                rdP[e] = times_slope(rdP[e], rG[e])

    return of_scores


@part
def make_less_dlse(spec):
    """Make ``less_dlse(D, l, head, row)``, which returns D - dL, where dL is the gradient of the
    row's logsumexp.

    With dL, the gradient of the scores is dS = P o (dP - D + dL). Kernels compute P o (dP - D), and
    use the result of this function as D. ``l`` is the logsumexp of the row. The result is D without
    dL in two cases: the call has no dL, or l is -inf.
    """
    dlse, query_rows = spec.features.dlse, make_query_rows(spec)

    def less_dlse(D, l, head, row):
        less = D
        if dlse:
            dL = query_rows(head.options.dL, head)[row]
            if l != NEG_INF:
                less = D - dL
        return less

    return less_dlse


@part
def make_row_less_dlse(spec):
    """Make ``row_less_dlse(D, head, row)``, which returns D - dL, where dL is the gradient of the
    row's logsumexp.

    The function reads the row's logsumexp from ``options.L``, and then calls ``less_dlse``.
    """
    dlse, query_rows, less_dlse = spec.features.dlse, make_query_rows(spec), make_less_dlse(spec)

    def row_less_dlse(D, head, row):
        less = D
        if dlse:
            less = less_dlse(D, query_rows(head.options.L, head)[row], head, row)
        return less

    return row_less_dlse


@part
def make_start_columns(spec):
    """Make ``start_columns(rdK, rdV)``, which sets dK = 0 and dV = 0 in registers."""
    RK, RV = spec.column_registers, getattr(spec, "of_values", spec).column_registers

    def start_columns(rdK, rdV):
        for e in range(RK):
            rdK[e] = float32(0.0)
            rdV[e] = float32(0.0)

    def start_both(rdK, rdV):
        for e in range(RK):
            rdK[e] = float32(0.0)
        for e in range(RV):
            rdV[e] = float32(0.0)

    return start_columns if RK == RV else start_both


@part
def make_scale_columns(spec):
    """Make ``scale_columns(rT, factor)``, which multiplies dK (or dV) in registers by
    ``factor``.
    """
    RK = spec.column_registers

    def scale_columns(rT, factor):
        for e in range(RK):
            rT[e] *= factor

    return scale_columns
