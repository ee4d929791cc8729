"""A thread's part of O, P, dQ, dK and dV on CUDA cores: between registers and memory.

Thread (thread) owns rows ty + i TY of a row tile and the columns 4 (tx + c TX) .. + 3 of each;
register 4 (i DN + c) + n holds column n of group c of row i. Of dK and dV it owns the rows
4 (ty + g TY) .. + 3: neighbouring columns of P, which one 16-byte read takes.
"""

from functools import cache

from fa_numba.device import float32, uint32
from fa_numba.intrinsics.global_memory import read4, write4
from fa_numba.intrinsics.reduction import add_global
from fa_numba.parts.namespace import part
from fa_numba.parts.split_epilogue import writes_split


@part
def make_read_rows(spec):
    """``read_rows(rO, O, row0, rows_end, thread)``: this thread's part of an O tile, or zeros."""
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    d, aligned = spec.d_v, spec.aligned

    def read_rows(rO, O, row0, rows_end, thread):
        for e in range(TM * DN * 4):
            rO[e] = float32(0.0)
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            for c in range(DN):
                col = uint32(4 * (thread.tx + c * TX))
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


@part
def _make_write_four(spec):
    """``write_four(rT, e, T, row, col, rows_end)``: registers e .. e + 3, neighbours of a row."""
    d, aligned = spec.d_v, spec.aligned

    def write_four(rT, e, T, row, col, rows_end):
        if aligned:
            if row < rows_end and col < uint32(d):
                write4(T, row, col, rT[e], rT[e + 1], rT[e + 2], rT[e + 3])
        else:
            for n in range(4):
                if row < rows_end and uint32(col + n) < uint32(d):
                    T[row, uint32(col + n)] = rT[e + n]

    return write_four


@part
def make_write_rows(spec):
    """``write_rows(rO, O, row0, rows_end, thread)``: this thread's part of an O tile to memory."""
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    write_four = _make_write_four(spec)

    def write_rows(rO, O, row0, rows_end, thread):
        for i in range(TM):
            row = uint32(row0 + thread.ty + i * TY)
            for c in range(DN):
                col = uint32(4 * (thread.tx + c * TX))
                e = 4 * (i * DN + c)
                write_four(rO, e, O, row, col, rows_end)

    return write_rows


@cache
def make_write_split(spec):
    """``write_split``: see ``splits.writes_split``."""
    return writes_split(spec, make_write_rows(spec))


@part
def make_write_two(spec):
    """``write_two(T, row, col, low, high)``: two neighbours of a row, no further than its end."""
    d = spec.d_v

    def write_two(T, row, col, low, high):
        if col < uint32(d):
            T[row, col] = low
        if uint32(col + 1) < uint32(d):
            T[row, uint32(col + 1)] = high

    return write_two


@part
def make_write_columns(spec):
    """``write_columns(rT, T, row0, rows_end, thread)``: this thread's dK or dV to memory; or, where
    blocks share it, added to it atomically.
    """
    if spec.splits_queries:
        return _make_add_columns(spec)
    CM, DN, TX, TY = spec.CM, spec.DN, spec.tx_count, spec.ty_count
    write_four = _make_write_four(spec)

    def write_columns(rT, T, row0, rows_end, thread):
        for r in range(CM):
            row = uint32(row0 + 4 * (thread.ty + (r // 4) * TY) + r % 4)
            for c in range(DN):
                col = uint32(4 * (thread.tx + c * TX))
                e = 4 * (r * DN + c)
                write_four(rT, e, T, row, col, rows_end)

    return write_columns


@cache
def make_write_dv(spec):
    """``write_dv(rdV, dV, row0, rows_end, thread)``: this thread's part of dV, as of dK."""
    return make_write_columns(spec.of_values)


@part
def _make_add_columns(spec):
    CM, DN, TX, TY, d = spec.CM, spec.DN, spec.tx_count, spec.ty_count, spec.d_v

    def add_columns(rT, T, row0, rows_end, thread):
        for r in range(CM):
            row = uint32(row0 + 4 * (thread.ty + (r // 4) * TY) + r % 4)
            for c in range(DN):
                for n in range(4):
                    col = uint32(4 * (thread.tx + c * TX) + n)
                    if row < rows_end and col < uint32(d):
                        add_global(T, row, col, rT[4 * (r * DN + c) + n])

    return add_columns
