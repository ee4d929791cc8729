"""Tiles, products and rows on tensor cores: 16-bit operands in shared memory, float32 in registers.

Warp w takes rows 16 R w and on of a row tile, R fragments of 16 rows each, and every column; or,
where the warps split the keys, all rows and the columns from ``warp_column`` on.
Registers of S and O run along rows, as in the other parts: element i TN + j of S is row ty + 8 i
and column j of the thread's, so that rows 2 r and 2 r + 1 share the fragments of r.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF, exp2, maximum
from fa_numba.intrinsics.async_copy import copy8_async
from fa_numba.intrinsics.global_memory import read_pair, write2, write_pair
from fa_numba.intrinsics.matrix import (
    ldmatrix,
    ldmatrix_transposed,
    mma_bf16,
    mma_f16,
    pack_bf16,
    pack_f16,
)
from fa_numba.intrinsics.shared import load4, store4
from fa_numba.parts.dropout import make_kept
from fa_numba.parts.layout import make_owns, make_warp_column
from fa_numba.parts.rows import make_scale_rows


def _instructions(spec):
    return (mma_f16, pack_f16) if spec.dtype == "float16" else (mma_bf16, pack_bf16)


@cache
def make_load_halves(rows, spec):
    """``load_halves(sT, T, row0, rows_end, cols_end)`` starts copying a tile of T to sT.

    Elements at or past ``rows_end`` or ``cols_end`` become 0 and are not read. Unaligned rows are
    copied one element after the other, there at the next barrier.
    """
    chunks, pitch, threads, aligned = spec.columns // 8, spec.pitch, spec.threads, spec.aligned
    copies = rows * chunks
    per_thread = -(-copies // threads)
    even = copies % threads == 0

    @device_function
    def load_halves(sT, T, row0, rows_end, cols_end):
        for n in range(per_thread):
            copy = uint32(cuda.threadIdx.x + n * threads)
            r = uint32(copy // uint32(chunks))
            col = uint32(uint32(copy % uint32(chunks)) * 8)
            row = uint32(row0 + r)
            if even or copy < uint32(copies):
                count = int32(0)
                if row < uint32(rows_end) and col < uint32(cols_end):
                    count = int32(min(int32(8), int32(cols_end - col)))
                at = uint32(r * pitch + col)
                if aligned:
                    copy8_async(sT, at, T, row, col, count)
                else:
                    for e in range(8):
                        half = uint32(0)
                        if e < count:
                            half = uint32(T[row, uint32(col + e)])
                        sT[uint32(at + e)] = half

    return load_halves


@cache
def make_place(spec):
    """``place(rows, columns)``: where this lane's row of four 8 x 8 tiles starts, for ``ldmatrix``.

    The tiles run down the rows first, then along the columns, or the other way round.
    """
    pitch = spec.pitch

    @device_function
    def place(rows_first):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        second = uint32((lane // uint32(8)) % uint32(2))
        third = uint32(lane // uint32(16))
        if rows_first:
            return uint32((lane % uint32(8) + second * 8) * pitch + third * 8)
        return uint32((lane % uint32(8) + third * 8) * pitch + second * 8)

    return place


@cache
def make_load_q(spec):
    """``load_fragments(rQ, sQ, row0)``: Q's fragments to registers, where they stay there."""
    R, K, pitch, keeps = spec.TM // 2, spec.DN, spec.pitch, spec.keeps_q
    place = make_place(spec)

    @device_function
    def load_fragments(rQ, sQ, row0):
        if keeps:
            at = uint32(row0 * pitch + place(True))
            for r in range(R):
                for k in range(K):
                    a = ldmatrix(sQ, uint32(at + (16 * r * pitch + 16 * k)))
                    e = 4 * (r * K + k)
                    rQ[e] = a[0]
                    rQ[e + 1] = a[1]
                    rQ[e + 2] = a[2]
                    rQ[e + 3] = a[3]

    return load_fragments


@cache
def make_fragment_scores(spec):
    """``scores(rS, rQ, sQ, sK, row0)``: rS = Qi KjT for this warp's rows from ``row0`` on."""
    R, TN, K, pitch, keeps = spec.TM // 2, spec.TN, spec.DN, spec.pitch, spec.keeps_q
    COLUMNS, RS, RA = spec.TN // 4, spec.TM * spec.TN, 4 * (spec.TM // 2)
    mma, _ = _instructions(spec)
    place, warp_column = make_place(spec), make_warp_column(spec)

    @device_function
    def scores(rS, rQ, sQ, sK, row0):
        rA = cuda.local.array(RA, uint32)
        at_q = uint32(row0 * pitch + place(True))
        at_k = uint32(warp_column() * pitch + place(False))
        for e in range(RS):
            rS[e] = float32(0.0)
        for k in range(K):
            for r in range(R):
                if keeps:
                    for n in range(4):
                        rA[4 * r + n] = rQ[4 * (r * K + k) + n]
                else:
                    a = ldmatrix(sQ, uint32(at_q + (16 * r * pitch + 16 * k)))
                    rA[4 * r] = a[0]
                    rA[4 * r + 1] = a[1]
                    rA[4 * r + 2] = a[2]
                    rA[4 * r + 3] = a[3]
            for c in range(COLUMNS):
                b = ldmatrix(sK, uint32(at_k + (16 * c * pitch + 16 * k)))
                for r in range(R):
                    low = 2 * r * TN + 4 * c
                    high = low + TN
                    e = 4 * r
                    mma(rS, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                    mma(rS, low + 2, high + 2, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return scores


@cache
def make_add_fragment_product(spec):
    """``add_product(rO, rP, sV, options)``: rO += Pij Vj, P rounded to 16 bits as it goes in."""
    R, TN, DN, pitch = spec.TM // 2, spec.TN, spec.DN, spec.pitch
    K, RA = spec.TN // 4, 4 * (spec.TM // 2)
    mma, pack = _instructions(spec)
    place, warp_column = make_place(spec), make_warp_column(spec)
    kept = make_kept(spec.features)

    @device_function
    def add_product(rO, rP, sV, options):
        rA = cuda.local.array(RA, uint32)
        at = uint32(warp_column() * pitch + place(True))
        for k in range(K):
            for r in range(R):
                for n in range(4):
                    e = (2 * r + n % 2) * TN + 4 * k + n // 2 * 2
                    rA[4 * r + n] = pack(kept(rP[e], options), kept(rP[e + 1], options))
            for c in range(DN):
                b = ldmatrix_transposed(sV, uint32(at + (16 * k * pitch + 16 * c)))
                for r in range(R):
                    low = 8 * r * DN + 4 * c
                    high = low + 4 * DN
                    e = 4 * r
                    mma(rO, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                    mma(rO, low + 2, high + 2, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return add_product


@cache
def make_write_halves(spec):
    """``write_halves(rO, O, row0, rows_end, ty, tx)``: this thread's part of an O tile, rounded."""
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    d, aligned, owns = spec.head_dim, spec.aligned, make_owns(spec)
    _, pack = _instructions(spec)

    @device_function
    def write_halves(rO, O, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            mine = row < rows_end and owns(i)
            for n in range(DN4 // 2):
                col = uint32(8 * n + 2 * tx)
                pair = pack(rO[i * DN4 + 2 * n], rO[i * DN4 + 2 * n + 1])
                if aligned:
                    if mine and col < uint32(d):
                        write2(O, row, col, pair)
                else:
                    if mine and col < uint32(d):
                        O[row, col] = pair & uint32(0xFFFF)
                    if mine and uint32(col + 1) < uint32(d):
                        O[row, uint32(col + 1)] = pair >> uint32(16)

    return write_halves


@cache
def make_read_fragments(spec):
    """``read_fragments(rO, A, row0, rows_end, ty, tx)``: its part of a float32 tile, or zeros.

    Zeros too in another warp's rows. Rows of A start at 8-byte addresses; columns beyond the head
    dimension are not touched.
    """
    TM, DN4, STEP, d = spec.TM, 4 * spec.DN, spec.row_step, spec.head_dim
    owns = make_owns(spec)

    @device_function
    def read_fragments(rO, A, row0, rows_end, ty, tx):
        for e in range(TM * DN4):
            rO[e] = float32(0.0)
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            mine = row < rows_end and owns(i)
            for n in range(0, DN4, 2):
                col = uint32(4 * n + 2 * tx)
                if mine and uint32(col + 1) < uint32(d):
                    pair = read_pair(A, row, col)
                    rO[i * DN4 + n] = pair[0]
                    rO[i * DN4 + n + 1] = pair[1]
                elif mine and col < uint32(d):
                    rO[i * DN4 + n] = A[row, col]

    return read_fragments


@cache
def make_write_fragments(spec):
    """``write_fragments(rO, A, row0, rows_end, ty, tx)``: its part of a float32 tile to memory."""
    TM, DN4, STEP, d = spec.TM, 4 * spec.DN, spec.row_step, spec.head_dim
    owns = make_owns(spec)

    @device_function
    def write_fragments(rO, A, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            mine = row < rows_end and owns(i)
            for n in range(0, DN4, 2):
                col = uint32(4 * n + 2 * tx)
                e = i * DN4 + n
                if mine and uint32(col + 1) < uint32(d):
                    write_pair(A, row, col, rO[e], rO[e + 1])
                elif mine and col < uint32(d):
                    A[row, col] = rO[e]

    return write_fragments


@cache
def make_combine(spec):
    """``combine(rO, rm, rl, sO, ty, tx)``: O, l and m of all columns, of those that each warp has.

    A warp gives away the rows that it does not own, and adds to its own what the others have of
    them: O = sum f O and l = sum f l with f = exp(m - m_new), m_new = max m. Nothing where a warp
    has all columns.
    """
    TM, DN4, STEP, Br, W = spec.TM, 4 * spec.DN, spec.row_step, spec.Br, spec.threads // 32
    owns, splits, VALUES = make_owns(spec), spec.splits_keys, (W - 1) * spec.Br * spec.columns
    scale_rows = make_scale_rows(spec)

    @device_function
    def part_at(n, i):
        """Where in sO the n-th of the other warps puts this lane's registers of row i."""
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        return uint32(uint32(n * TM + i) * (32 * DN4) + lane * 4)

    @device_function
    def values_at(n, i, ty):
        """The same of the row's m, and l behind it."""
        return uint32(VALUES + 2 * (n * Br + ty + i * STEP))

    @device_function
    def combine(rO, rm, rl, sO, ty, tx):
        if splits:
            rs = cuda.local.array(TM, float32)
            rf = cuda.local.array(TM, float32)
            warp = uint32(cuda.threadIdx.x) // uint32(32)
            for i in range(TM):
                # Counted from the warp after the owner
                n = uint32(uint32(warp + (W - 1 - i % W)) % uint32(W))
                if not owns(i):
                    at, values = part_at(n, i), values_at(n, i, ty)
                    for c in range(0, DN4, 4):
                        e = i * DN4 + c
                        store4(sO, uint32(at + 32 * c), rO[e], rO[e + 1], rO[e + 2], rO[e + 3])
                    if tx == uint32(0):
                        sO[values] = rm[i]
                        sO[uint32(values + 1)] = rl[i]
            cuda.syncthreads()  # the other warps' parts are there
            for i in range(TM):
                m_new = rm[i]
                if owns(i):
                    for n in range(W - 1):
                        m_new = maximum(m_new, sO[values_at(n, i, ty)])
                rs[i] = m_new
                if m_new == NEG_INF:  # -inf - -inf would be NaN
                    rs[i] = float32(0.0)
                rf[i] = exp2(rm[i] - rs[i])
                rl[i] *= rf[i]
                rm[i] = m_new
            scale_rows(rO, rf)
            for n in range(W - 1):
                for i in range(TM):
                    if owns(i):
                        at, values = part_at(n, i), values_at(n, i, ty)
                        f = exp2(sO[values] - rs[i])
                        rl[i] += f * sO[uint32(values + 1)]
                        for c in range(0, DN4, 4):
                            e = i * DN4 + c
                            o = load4(sO, uint32(at + 32 * c))
                            rO[e] += f * o[0]
                            rO[e + 1] += f * o[1]
                            rO[e + 2] += f * o[2]
                            rO[e + 3] += f * o[3]

    return combine
