"""A thread's rows: its part of an O tile in registers, and one value (m, l, L) a row.

Thread (ty, tx) owns rows ty + i TY and the columns 4 (tx + c TX) .. + 3 of each; register
4 (i DN + c) + n holds column n of group c of row i.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF
from fa_numba.intrinsics.global_memory import read4, write4
from fa_numba.intrinsics.reduction import add_global
from fa_numba.parts.layout import make_owns
from fa_numba.parts.softmax import FULL_WARP

_ZERO = float32(0.0)
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
def make_read_rows(spec):
    """``read_rows(rO, O, row0, rows_end, ty, tx)``: this thread's part of an O tile, or zeros."""
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    d, aligned = spec.head_dim, spec.aligned

    @device_function
    def read_rows(rO, O, row0, rows_end, ty, tx):
        for e in range(TM * DN * 4):
            rO[e] = float32(0.0)
        for i in range(TM):
            row = uint32(row0 + ty + i * TY)
            for c in range(DN):
                col = uint32(4 * (tx + c * TX))
                e = 4 * (i * DN + c)
                if aligned:
                    if row < rows_end and col < uint32(d):
                        o = read4(O, row, col)
                        rO[e] = o[0]
                        rO[e + 1] = o[1]
                        rO[e + 2] = o[2]
                        rO[e + 3] = o[3]
                else:
                    for n in range(4):
                        if row < rows_end and uint32(col + n) < uint32(d):
                            rO[e + n] = O[row, uint32(col + n)]

    return read_rows


@cache
def make_write_rows(spec):
    """``write_rows(rO, O, row0, rows_end, ty, tx)``: this thread's part of an O tile to memory."""
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    d, aligned = spec.head_dim, spec.aligned

    @device_function
    def write_rows(rO, O, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * TY)
            for c in range(DN):
                col = uint32(4 * (tx + c * TX))
                e = 4 * (i * DN + c)
                if aligned:
                    if row < rows_end and col < uint32(d):
                        write4(O, row, col, rO[e], rO[e + 1], rO[e + 2], rO[e + 3])
                else:
                    for n in range(4):
                        if row < rows_end and uint32(col + n) < uint32(d):
                            O[row, uint32(col + n)] = rO[e + n]

    return write_rows


@cache
def make_add_rows(spec):
    """``add_rows(rT, T, factor, row0, rows_end, ty, tx)``: T += factor rT by atomic adds."""
    TM, DN, TX, TY, d = spec.TM, spec.DN, spec.tx_count, spec.ty_count, spec.head_dim

    @device_function
    def add_rows(rT, T, factor, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * TY)
            for c in range(DN):
                for n in range(4):
                    col = uint32(4 * (tx + c * TX) + n)
                    if row < rows_end and col < uint32(d):
                        add_global(T, row, col, factor * rT[4 * (i * DN + c) + n])

    return add_rows


@cache
def make_update_rows(spec):
    """``update_rows(rT, T, factor, seen, row0, rows_end, ty, tx)``: T = factor rT + T, in memory.

    Where T was not ``seen`` before it counts as 0 and is not read, unless the kernel starts it.
    """
    TM, DN4, initialises = spec.TM, 4 * spec.DN, spec.features.initialises
    RT = TM * DN4
    read_rows = make_read_rows(spec)
    write_rows = make_write_rows(spec)

    @device_function
    def update_rows(rT, T, factor, seen, row0, rows_end, ty, tx):
        old = cuda.local.array(RT, float32)
        read_end = uint32(0)
        if initialises or seen:
            read_end = rows_end
        read_rows(old, T, row0, read_end, ty, tx)
        for e in range(RT):
            rT[e] = factor * rT[e] + old[e]
        write_rows(rT, T, row0, rows_end, ty, tx)

    return update_rows


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
def make_scale_and_add(spec):
    """``scale_and_add(rO, rf, rT)``: diag(f) O + T."""
    TM, DN4 = spec.TM, 4 * spec.DN

    @device_function
    def scale_and_add(rO, rf, rT):
        for i in range(TM):
            for c in range(DN4):
                e = i * DN4 + c
                rO[e] = rf[i] * rO[e] + rT[e]

    return scale_and_add


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
def make_read_values(spec, unread=_ZERO):
    """``read_values(rv, V, row0, rows_end, ty, tx)``: one value a row, read by one lane of each.

    Rows at or past ``rows_end`` and another warp's get ``unread``.
    """
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
