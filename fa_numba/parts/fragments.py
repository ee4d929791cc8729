"""Tiles, products and rows on tensor cores: 16-bit operands in shared memory, float32 in registers.

Warp w takes rows 16 R w and on of a row tile, R fragments of 16 rows each, and every column.
Registers of S and O run along rows, as in the other parts: element i TN + j of S is row ty + 8 i
and column j of the thread's, so that rows 2 r and 2 r + 1 share the fragments of r.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.intrinsics.async_copy import copy8_async
from fa_numba.intrinsics.global_memory import read_pair, write2, write8, write_pair
from fa_numba.intrinsics.matrix import (
    ldmatrix,
    ldmatrix_transposed,
    mma_bf16,
    mma_f16,
    pack_bf16,
    pack_f16,
)
from fa_numba.intrinsics.shared import load8, store2
from fa_numba.parts.chunks import conversions
from fa_numba.parts.dropout import make_kept
from fa_numba.parts.layout import make_column


def _instructions(spec):
    return (mma_f16, pack_f16) if spec.dtype == "float16" else (mma_bf16, pack_bf16)


@cache
def make_load_halves(rows, spec):
    """``load_halves(sT, T, row0, rows_end, cols_end)`` starts copying a tile of T to sT.

    Elements at or past ``rows_end`` or ``cols_end`` become 0 and are not read. Unaligned rows are
    copied one element after the other, there at the next barrier.
    """
    load = make_load_half_tile(rows, spec.columns, spec.pitch, spec.threads, spec.aligned)

    @device_function
    def load_halves(sT, T, row0, rows_end, cols_end):
        load(sT, 0, T, row0, rows_end, 0, cols_end)

    return load_halves


@cache
def make_load_half_tile(rows, columns, pitch, threads, aligned):
    """``load_half_tile(sT, place, T, row0, rows_end, col0, cols_end)``: the same from column
    ``col0`` on, ``columns`` wide, to a tile that starts at element ``place`` of sT.
    """
    chunks = columns // 8
    copies = rows * chunks
    per_thread = -(-copies // threads)
    even = copies % threads == 0

    @device_function
    def load_half_tile(sT, place, T, row0, rows_end, col0, cols_end):
        for n in range(per_thread):
            copy = uint32(cuda.threadIdx.x + n * threads)
            r = uint32(copy // uint32(chunks))
            c = uint32(uint32(copy % uint32(chunks)) * 8)
            row = uint32(row0 + r)
            col = uint32(col0 + c)
            if even or copy < uint32(copies):
                count = int32(0)
                if row < uint32(rows_end) and col < uint32(cols_end):
                    count = int32(min(int32(8), int32(cols_end - col)))
                at = uint32(place + r * pitch + c)
                if aligned:
                    copy8_async(sT, at, T, row, col, count)
                else:
                    for e in range(8):
                        half = uint32(0)
                        if e < count:
                            half = uint32(T[row, uint32(col + e)])
                        sT[uint32(at + e)] = half

    return load_half_tile


@cache
def make_place(pitch):
    """``place(rows, columns)``: where this lane's row of four 8 x 8 tiles starts, for ``ldmatrix``.

    The tiles run down the rows first, then along the columns, or the other way round.
    """

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
    place = make_place(pitch)

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
    COLUMNS, RS, RA = spec.Bc // 16, spec.TM * spec.TN, 4 * (spec.TM // 2)
    mma, _ = _instructions(spec)
    place = make_place(pitch)

    @device_function
    def scores(rS, rQ, sQ, sK, row0):
        rA = cuda.local.array(RA, uint32)
        at_q = uint32(row0 * pitch + place(True))
        at_k = place(False)
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
    K, RA = spec.Bc // 16, 4 * (spec.TM // 2)
    mma, pack = _instructions(spec)
    place = make_place(pitch)
    kept = make_kept(spec.features)

    @device_function
    def add_product(rO, rP, sV, options):
        rA = cuda.local.array(RA, uint32)
        at = place(True)
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


def _make_add_stage_product(spec, pitch_p, transposed):
    """rO += A B of one stage, A from sP and B from sV, which start at their places there.

    A is the ``step`` columns of P's rows from ``row0`` on or, ``transposed``, the ``step`` rows of
    its columns from ``row0`` on.
    """
    R, DN, K, pitch = spec.TM // 2, spec.DN, spec.step // 16, spec.pitch
    RA = 4 * R
    # From one fragment of A to the next: down this warp's rows, and along the sum.
    DOWN, ALONG = (16, 16 * pitch_p) if transposed else (16 * pitch_p, 16)
    ROW = 1 if transposed else pitch_p
    mma, _ = _instructions(spec)
    load_a = ldmatrix_transposed if transposed else ldmatrix
    place_p, place = make_place(pitch_p), make_place(pitch)

    @device_function
    def add_stage_product(rO, sP, at_p, sV, at_v, row0):
        rA = cuda.local.array(RA, uint32)
        first = uint32(at_p + row0 * ROW + place_p(not transposed))
        at = uint32(at_v + place(True))
        for k in range(K):
            for r in range(R):
                a = load_a(sP, uint32(first + (r * DOWN + k * ALONG)))
                rA[4 * r] = a[0]
                rA[4 * r + 1] = a[1]
                rA[4 * r + 2] = a[2]
                rA[4 * r + 3] = a[3]
            for c in range(DN):
                b = ldmatrix_transposed(sV, uint32(at + (16 * k * pitch + 16 * c)))
                for r in range(R):
                    low = 8 * r * DN + 4 * c
                    high = low + 4 * DN
                    e = 4 * r
                    mma(rO, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                    mma(rO, low + 2, high + 2, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return add_stage_product


@cache
def make_add_stage_product(spec):
    """``add_stage_product(rO, sP, at_p, sV, at_v, row0)``: rO += P V of this warp's rows, both in
    shared memory from elements ``at_p`` and ``at_v`` on.
    """
    return _make_add_stage_product(spec, spec.pitch_p, False)


@cache
def make_add_stage_transposed_product(spec):
    """The same of PT dO: ``row0`` and the rows of rO are columns of P."""
    return _make_add_stage_product(spec, spec.pitch_t, True)


@cache
def make_store_scores(spec):
    """``store_scores(sS, rS, ty, tx)``: this thread's part of a tile of S, rounded."""
    TM, TN, STEP, pitch = spec.TM, spec.TN, spec.row_step, spec.pitch_s
    _, pack = _instructions(spec)

    @device_function
    def store_scores(sS, rS, ty, tx):
        for i in range(TM):
            for n in range(TN // 2):
                at = uint32((ty + i * STEP) * pitch + 2 * tx + 8 * n)
                store2(sS, at, pack(rS[i * TN + 2 * n], rS[i * TN + 2 * n + 1]))

    return store_scores


@cache
def make_times_scores(spec):
    """``times_scores(rS, S, row0, rows_end, col0, cols_end, ty, tx)``: rS times a tile of S."""
    TM, TN, STEP = spec.TM, spec.TN, spec.row_step
    _, unpack = conversions(spec.dtype)
    column = make_column(spec)

    @device_function
    def times_scores(rS, S, row0, rows_end, col0, cols_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            for j in range(TN):
                col = uint32(col0 + column(tx, j))
                if row < rows_end and col < cols_end:
                    rS[i * TN + j] *= unpack(uint32(S[row, col]))[0]

    return times_scores


@cache
def make_write_scores(spec):
    """``write_scores(sS, S, warp_row, row0, rows_end, col0, cols_end)``: this warp's rows of it.

    Neighbouring lanes write neighbouring 16 bytes; rows of S start at 16-byte addresses.
    """
    chunks, pitch = spec.Bc // 8, spec.pitch_s
    per_lane = 8 * spec.TM * chunks // 32

    @device_function
    def write_scores(sS, S, warp_row, row0, rows_end, col0, cols_end):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        for n in range(per_lane):
            copy = uint32(lane + 32 * n)
            r = uint32(warp_row + copy // uint32(chunks))
            c = uint32(uint32(copy % uint32(chunks)) * 8)
            row, col = uint32(row0 + r), uint32(col0 + c)
            at = uint32(r * pitch + c)
            if row < rows_end and uint32(col + 7) < cols_end:
                w = load8(sS, at)
                write8(S, row, col, w[0], w[1], w[2], w[3])
            elif row < rows_end:
                for e in range(7):
                    if uint32(col + e) < cols_end:
                        S[row, uint32(col + e)] = sS[uint32(at + e)]

    return write_scores


@cache
def make_write_halves(spec):
    """``write_halves(rO, O, row0, rows_end, ty, tx)``: this thread's part of an O tile, rounded."""
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    d, aligned = spec.head_dim, spec.aligned
    _, pack = _instructions(spec)

    @device_function
    def write_halves(rO, O, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            for n in range(DN4 // 2):
                col = uint32(8 * n + 2 * tx)
                pair = pack(rO[i * DN4 + 2 * n], rO[i * DN4 + 2 * n + 1])
                if aligned:
                    if row < rows_end and col < uint32(d):
                        write2(O, row, col, pair)
                else:
                    if row < rows_end and col < uint32(d):
                        O[row, col] = pair & uint32(0xFFFF)
                    if row < rows_end and uint32(col + 1) < uint32(d):
                        O[row, uint32(col + 1)] = pair >> uint32(16)

    return write_halves


@cache
def make_read_fragments(spec):
    """``read_fragments(rO, A, row0, rows_end, ty, tx)``: its part of a float32 tile, or zeros.

    Rows of A start at 8-byte addresses; columns beyond the head dimension are not touched.
    """
    TM, DN4, STEP, d = spec.TM, 4 * spec.DN, spec.row_step, spec.head_dim

    @device_function
    def read_fragments(rO, A, row0, rows_end, ty, tx):
        for e in range(TM * DN4):
            rO[e] = float32(0.0)
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            for n in range(0, DN4, 2):
                col = uint32(4 * n + 2 * tx)
                if row < rows_end and uint32(col + 1) < uint32(d):
                    pair = read_pair(A, row, col)
                    rO[i * DN4 + n] = pair[0]
                    rO[i * DN4 + n + 1] = pair[1]
                elif row < rows_end and col < uint32(d):
                    rO[i * DN4 + n] = A[row, col]

    return read_fragments


@cache
def make_write_fragments(spec):
    """``write_fragments(rO, A, row0, rows_end, ty, tx)``: its part of a float32 tile to memory."""
    TM, DN4, STEP, d = spec.TM, 4 * spec.DN, spec.row_step, spec.head_dim

    @device_function
    def write_fragments(rO, A, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            for n in range(0, DN4, 2):
                col = uint32(4 * n + 2 * tx)
                e = i * DN4 + n
                if row < rows_end and uint32(col + 1) < uint32(d):
                    write_pair(A, row, col, rO[e], rO[e + 1])
                elif row < rows_end and col < uint32(d):
                    A[row, col] = rO[e]

    return write_fragments
