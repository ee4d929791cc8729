"""A thread's part of O, P, dQ, dK and dV on CUDA cores: between registers and memory.

Thread (ty, tx) owns rows ty + i TY of a row tile and the columns 4 (tx + c TX) .. + 3 of each;
register 4 (i DN + c) + n holds column n of group c of row i. Of dK and dV it owns the rows
4 (ty + g TY) .. + 3: neighbouring columns of P, which one 16-byte read takes.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int64, uint32
from fa_numba.intrinsics.global_memory import read4, write4
from fa_numba.intrinsics.reduction import add_global
from fa_numba.intrinsics.shared import load4_at_byte
from fa_numba.parts.dropout import make_kept
from fa_numba.parts.simt.swizzle import flip_of
from fa_numba.parts.softmax import FULL_WARP
from fa_numba.parts.splits import writes_split


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
def make_write_split(spec):
    """``write_split``: see ``splits.writes_split``."""
    return writes_split(spec, make_write_rows(spec))


@cache
def make_write_two(spec):
    """``write_two(T, row, col, low, high)``: two neighbours of a row, no further than its end."""
    d = spec.head_dim

    @device_function
    def write_two(T, row, col, low, high):
        if col < uint32(d):
            T[row, col] = low
        if uint32(col + 1) < uint32(d):
            T[row, uint32(col + 1)] = high

    return write_two


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
def make_store_p(spec):
    """``store_p(sP, rS, options, ty, tx)``: P, without what is dropped, to shared memory."""
    TM, TN, TX, TY = spec.TM, spec.TN, spec.tx_count, spec.ty_count
    pitch, flip, kept = spec.rows_p.pitch, flip_of(spec.rows_p), make_kept(spec)

    @device_function
    def store_p(sP, rS, options, ty, tx):
        row, flipped = int64(uint32(ty * pitch + tx)), flip(ty) // 4
        for j in range(TN):
            at = row + (j * TX ^ flipped)
            for i in range(TM):
                sP[at + i * TY * pitch] = kept(rS[i * TN + j], options)

    return store_p


@cache
def make_store_ds(spec):
    """``store_ds(sdS, rdS, ty, tx)``: dS from registers to shared memory."""
    TM, TN, TX, TY = spec.TM, spec.TN, spec.tx_count, spec.ty_count
    pitch, flip = spec.rows_p.pitch, flip_of(spec.rows_p)

    @device_function
    def store_ds(sdS, rdS, ty, tx):
        row, flipped = int64(uint32(ty * pitch + tx)), flip(ty) // 4
        for j in range(TN):
            at = row + (j * TX ^ flipped)
            for i in range(TM):
                sdS[at + i * TY * pitch] = rdS[i * TN + j]

    return store_ds


@cache
def make_write_columns(spec):
    """``write_columns(rT, T, row0, rows_end, ty, tx)``: this thread's dK or dV to memory; or, where
    blocks share it, added to it atomically.
    """
    if spec.splits_queries:
        return _make_add_columns(spec)
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


def _make_add_columns(spec):
    CM, DN, TX, TY, d = spec.CM, spec.DN, spec.tx_count, spec.ty_count, spec.head_dim

    @device_function
    def add_columns(rT, T, row0, rows_end, ty, tx):
        for r in range(CM):
            row = uint32(row0 + 4 * (ty + (r // 4) * TY) + r % 4)
            for c in range(DN):
                for n in range(4):
                    col = uint32(4 * (tx + c * TX) + n)
                    if row < rows_end and col < uint32(d):
                        add_global(T, row, col, rT[4 * (r * DN + c) + n])

    return add_columns


@cache
def make_row_dots(spec):
    """``row_dots(rD, sdO, O, row0, rows_end, ty, tx)``: D = rowsum(dO o O), dO in shared memory."""
    TM, DN, TX, TY = spec.TM, spec.DN, spec.tx_count, spec.ty_count
    row_bytes, flip = 4 * spec.rows_q.pitch, flip_of(spec.rows_q)
    RO = TM * DN * 4
    read_rows = make_read_rows(spec)

    @device_function
    def row_dots(rD, sdO, O, row0, rows_end, ty, tx):
        rO = cuda.local.array(RO, float32)
        read_rows(rO, O, row0, rows_end, ty, tx)
        at = int64(uint32(ty * row_bytes)) + (int64(uint32(16 * tx)) ^ flip(ty))
        for i in range(TM):
            dot = float32(0.0)
            for c in range(DN):
                g = load4_at_byte(sdO, at + i * TY * row_bytes + 16 * c * TX)
                e = 4 * (i * DN + c)
                dot += g[0] * rO[e] + g[1] * rO[e + 1] + g[2] * rO[e + 2] + g[3] * rO[e + 3]
            lane = TX // 2
            while lane > 0:
                dot += cuda.shfl_xor_sync(FULL_WARP, dot, lane)
                lane //= 2
            rD[i] = dot

    return row_dots
