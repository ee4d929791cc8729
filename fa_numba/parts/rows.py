"""Rows that a thread has a part of: O in registers, and one value (m, l, L, D) a row.

Registers of O run along rows: a thread's row i is registers i DN4 .. (i + 1) DN4 - 1, DN4 = 4 DN.
Which rows and columns these are is said in ``layout.py``.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.parts.heads import make_query_rows
from fa_numba.parts.layout import make_owns
from fa_numba.parts.softmax import FULL_WARP, make_logsumexp

# Registers of O that are scaled without asking.
LARGEST_SCALED = 64


@cache
def make_start(spec):
    """``start(rO, rl, rm)``: O = 0, l = 0, m = -inf, before any column has been seen."""
    TM, RO = spec.TM, spec.TM * spec.DN * 4

    @device_function
    def start(rO, rl, rm):
        for e in range(RO):
            rO[e] = float32(0.0)
        for i in range(TM):
            rl[i] = float32(0.0)
            rm[i] = NEG_INF

    return start


@cache
def make_scale_rows(spec):
    """``scale_rows(rO, rf)``: diag(f) O."""
    TM, DN4 = spec.TM, 4 * spec.DN

    @device_function
    def scale_rows(rO, rf):
        for i in range(TM):
            for c in range(DN4):
                rO[i * DN4 + c] *= rf[i]

    return scale_rows


@cache
def make_rescale_rows(spec):
    """``rescale_rows(rO, rf)``: diag(f) O, where f = exp(m_old - m_new).

    A long row seldom has a new maximum: f is 1 then and O stays as it is. Where O is small the
    products are made in any case, for the sake of what they can be interleaved with.
    """
    TM, tests = spec.TM, spec.TM * 4 * spec.DN > LARGEST_SCALED
    scale_rows = make_scale_rows(spec)

    @device_function
    def rescale_rows(rO, rf):
        changes = not tests
        if tests:
            for i in range(TM):
                if rf[i] != float32(1.0):
                    changes = True
        if changes:
            scale_rows(rO, rf)

    return rescale_rows


@cache
def make_normalise_rows(spec):
    """``normalise_rows(rO, rl)``: diag(l)^-1 O, and 0 in a row without a visible column (l = 0)."""
    TM, DN4 = spec.TM, 4 * spec.DN

    @device_function
    def normalise_rows(rO, rl):
        for i in range(TM):
            factor = float32(0.0)
            if rl[i] != float32(0.0):
                factor = float32(1.0) / rl[i]
            for c in range(DN4):
                # V may hold NaN or inf, and 0 times those is no 0.
                rO[i * DN4 + c] = rO[i * DN4 + c] * factor if factor != float32(0.0) else factor

    return normalise_rows


@cache
def make_read_values(spec):
    """``read_values(rv, V, row0, rows_end, ty, tx)``: one value a row, read by one lane of each.

    Rows at or past ``rows_end`` and another warp's get 0.
    """
    return _make_read_values(spec, float32(0.0))


@cache
def make_read_maxima(spec):
    """The same of m: other rows get -inf."""
    return _make_read_values(spec, NEG_INF)


def _make_read_values(spec, unread):
    TM, TY, owns = spec.TM, spec.row_step, make_owns(spec)

    @device_function
    def read_values(rv, V, row0, rows_end, ty, tx):
        first = uint32(uint32(cuda.threadIdx.x) % uint32(32) - tx)
        for i in range(TM):
            row = uint32(row0 + ty + i * TY)
            value = unread
            if tx == uint32(0) and row < rows_end and owns(i):
                value = V[row]
            rv[i] = cuda.shfl_sync(FULL_WARP, value, first)

    return read_values


@cache
def make_write_values(spec):
    """``write_values(rv, V, row0, rows_end, ty, tx)``: one value a row, written by one lane."""
    TM, TY, owns = spec.TM, spec.row_step, make_owns(spec)

    @device_function
    def write_values(rv, V, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * TY)
            if tx == uint32(0) and row < rows_end and owns(i):
                V[row] = rv[i]

    return write_values


@cache
def make_write_logsumexp(spec):
    """``write_logsumexp(rl, rm, L, lh, mh, b, h, options, row0, rows_end, ty, tx)``: L of a head's
    rows from their l and m in global memory, where the caller wants it.
    """
    query_rows = make_query_rows(spec)
    Br, logsumexp, return_lse = spec.Br, make_logsumexp(spec), spec.return_lse
    read_values, write_values = make_read_values(spec), make_write_values(spec)

    @device_function
    def write_logsumexp(rl, rm, L, lh, mh, b, h, options, row0, rows_end, ty, tx):
        if return_lse:
            Lh = query_rows(L, b, h, options)
            i0 = row0
            while i0 < rows_end:
                read_values(rl, lh, i0, rows_end, ty, tx)
                read_values(rm, mh, i0, rows_end, ty, tx)
                logsumexp(rl, rm, rl)
                write_values(rl, Lh, i0, rows_end, ty, tx)
                i0 = uint32(i0 + Br)

    return write_logsumexp
