"""Tiles, products and rows on tensor cores: 16-bit operands in shared memory, float32 in registers.

Warp w takes rows 16 R w and on of a row tile, R fragments of 16 rows each, and every column; or,
where the warps split the keys, all rows and the columns from ``warp_column`` on.
Registers of S and O run along rows, as in the other parts: element i TN + j of S is row ty + 8 i
and column j of the thread's, so that rows 2 r and 2 r + 1 share the fragments of r.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, int32, int64, uint32
from fa_numba.intrinsics.arithmetic import NEG_INF, exp2, maximum
from fa_numba.intrinsics.async_copy import (
    commit_async,
    copy8_async,
    copy_value_async,
    wait_async,
)
from fa_numba.intrinsics.global_memory import (
    read2,
    read_pair,
    write2,
    write8,
    write_pair,
)
from fa_numba.intrinsics.matrix import (
    ldmatrix,
    ldmatrix_transposed,
    mma_bf16,
    mma_f16,
)
from fa_numba.intrinsics.reduction import add_global, add_pair, add_pair_vector
from fa_numba.intrinsics.shared import load2, load4, load8, store2, store4
from fa_numba.options import PLAIN
from fa_numba.parts.chunks import ChunkMap, conversions, make_first_chunk, make_turn
from fa_numba.parts.dropout import make_kept
from fa_numba.parts.layout import make_column, make_owns, make_row, make_warp_column
from fa_numba.parts.rows import make_scale_rows
from fa_numba.parts.softmax import FULL_WARP


def _instructions(dtype):
    pack, _ = conversions(dtype)
    return (mma_f16 if dtype == "float16" else mma_bf16), pack


@cache
def make_read_two(dtype, aligned):
    """``read_two(T, row, col, cols_end)``: two neighbours of a row in float32, 0 past its end."""
    _, unpack = conversions(dtype)

    @device_function
    def read_two(T, row, col, cols_end):
        if aligned:
            return unpack(read2(T, row, col))
        word = uint32(T[row, col])
        if uint32(col + 1) < uint32(cols_end):
            word = uint32(word | uint32(T[row, uint32(col + 1)]) << uint32(16))
        return unpack(word)

    return read_two


@cache
def make_write_two(dtype, aligned):
    """``write_two(T, row, col, cols_end, low, high)``: two neighbours of a row, rounded."""
    pack, _ = conversions(dtype)

    @device_function
    def write_two(T, row, col, cols_end, low, high):
        pair = pack(low, high)
        if aligned:
            if col < uint32(cols_end):
                write2(T, row, col, pair)
        else:
            if col < uint32(cols_end):
                T[row, col] = pair & uint32(0xFFFF)
            if uint32(col + 1) < uint32(cols_end):
                T[row, uint32(col + 1)] = pair >> uint32(16)

    return write_two


@cache
def make_load_halves(rows, spec):
    """``load_halves(sT, T, row0, rows_end, cols_end)`` starts copying a tile of T to sT.

    Elements at or past ``rows_end`` or ``cols_end`` become 0 and are not read. Unaligned rows are
    copied one element after the other, there at the next barrier.
    """
    load = make_load_half_tile(rows, spec.columns, spec.pitch, spec.threads, spec.aligned)
    prefetches = spec.prefetches

    @device_function
    def load_halves(sT, T, row0, rows_end, cols_end):
        load(sT, 0, T, row0, rows_end, 0, cols_end)
        if not prefetches:
            commit_async()
            wait_async()

    return load_halves


@cache
def make_load_half_tile(rows, columns, pitch, threads, aligned):
    """``load_half_tile(sT, place, T, row0, rows_end, col0, cols_end)``: the same from column
    ``col0`` on, ``columns`` wide, to a tile that starts at element ``place`` of sT.
    """
    deal = ChunkMap(rows, columns // 8, threads)
    copies, whole = deal.turns, deal.whole
    first_chunk, turn = make_first_chunk(deal), make_turn(deal)

    @device_function
    def load_half_tile(sT, place, T, row0, rows_end, col0, cols_end):
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(cuda.threadIdx.x)
            at = uint32(place + r * pitch + c + down * pitch + right)
            row = uint32(row0 + r)
            left = int32(int32(rows_end) - int32(row))
            row, col = int64(row) + down, uint32(col0 + c + right)
            if whole or r < uint32(rows - down):
                count = int32(0)
                if left > int32(down) and col < uint32(cols_end):
                    count = int32(min(int32(8), int32(cols_end - col)))
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
def _make_load_fragment(spec):
    """``load_fragment(rQ, sQ, at, r, k)``: rows 16 r, columns 16 k on of Q from ``at``."""
    K, pitch = spec.DN, spec.pitch

    @device_function
    def load_fragment(rQ, sQ, at, r, k):
        a = ldmatrix(sQ, uint32(at + (16 * r * pitch + 16 * k)))
        e = 4 * (r * K + k)
        rQ[e] = a[0]
        rQ[e + 1] = a[1]
        rQ[e + 2] = a[2]
        rQ[e + 3] = a[3]

    return load_fragment


@cache
def make_load_q(spec):
    """``load_fragments(rQ, sQ, row0)``: Q's fragments to registers, where they stay there."""
    R, K, pitch, keeps = spec.TM // 2, spec.DN, spec.pitch, spec.keeps_q
    place, load_fragment = make_place(pitch), _make_load_fragment(spec)

    @device_function
    def load_fragments(rQ, sQ, row0):
        if keeps:
            at = uint32(row0 * pitch + place(True))
            for r in range(R):
                for k in range(K):
                    load_fragment(rQ, sQ, at, r, k)

    return load_fragments


@cache
def make_fragment_scores(spec):
    """``scores(rS, rQ, sQ, sK, row0, col0)``: rS = Qi KjT for this warp's rows from ``row0`` and
    columns from ``col0`` on.

    Where Q's fragments do not stay in rQ each passes through it: a loop that indexes registers is
    unrolled.
    """
    R, TN, K, pitch, keeps = spec.TM // 2, spec.TN, spec.DN, spec.pitch, spec.keeps_q
    COLUMNS, RS = spec.TN // 4, spec.TM * spec.TN
    mma, _ = _instructions(spec.dtype)
    place, load_fragment = make_place(pitch), _make_load_fragment(spec)

    @device_function
    def scores(rS, rQ, sQ, sK, row0, col0):
        at_q = uint32(row0 * pitch + place(True))
        at_k = uint32(col0 * pitch + place(False))
        for e in range(RS):
            rS[e] = float32(0.0)
        for k in range(K):
            for r in range(R):
                if not keeps:
                    load_fragment(rQ, sQ, at_q, r, k)
            for c in range(COLUMNS):
                b = ldmatrix(sK, uint32(at_k + (16 * c * pitch + 16 * k)))
                for r in range(R):
                    low = 2 * r * TN + 4 * c
                    high = low + TN
                    e = 4 * (r * K + k)
                    mma(rS, low, high, rQ[e], rQ[e + 1], rQ[e + 2], rQ[e + 3], b[0], b[1])
                    mma(rS, low + 2, high + 2, rQ[e], rQ[e + 1], rQ[e + 2], rQ[e + 3], b[2], b[3])

    return scores


@cache
def make_add_fragment_product(spec, drops=True):
    """``add_product(rO, rP, sV, options)``: rO += Pij Vj, P rounded to 16 bits as it goes in.

    ``drops`` is for a P that ``drop`` has marked.
    """
    R, TN, DN, pitch = spec.TM // 2, spec.TN, spec.DN, spec.pitch
    K, RA = spec.TN // 4, 4 * (spec.TM // 2)
    mma, pack = _instructions(spec.dtype)
    place, warp_column = make_place(pitch), make_warp_column(spec)
    kept = make_kept(spec.features if drops else PLAIN)

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
def _make_add_shared_product(R, DN, K, pitch_p, pitch, dtype, transposed):
    """rO += A B of 16 R rows, 16 DN columns and a sum over 16 K, A from sP and B from sV, which
    start at their places there.

    A is rows of P from ``row0`` on or, ``transposed``, its columns from ``row0`` on.
    """
    RA = 4 * R
    # From one fragment of A to the next: down this warp's rows, and along the sum.
    DOWN, ALONG = (16, 16 * pitch_p) if transposed else (16 * pitch_p, 16)
    ROW = 1 if transposed else pitch_p
    mma, _ = _instructions(dtype)
    load_a = ldmatrix_transposed if transposed else ldmatrix
    place_p, place = make_place(pitch_p), make_place(pitch)

    @device_function
    def add_shared_product(rO, sP, at_p, sV, at_v, row0):
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

    return add_shared_product


@cache
def make_add_stage_product(spec):
    """``add_stage_product(rO, sP, at_p, sV, at_v, row0)``: rO += P V of this warp's rows, both in
    shared memory from elements ``at_p`` and ``at_v`` on.
    """
    sizes = spec.TM // 2, spec.DN, spec.step // 16
    return _make_add_shared_product(*sizes, spec.pitch_p, spec.pitch, spec.dtype, False)


@cache
def make_add_stage_transposed_product(spec):
    """The same of PT dO: ``row0`` and the rows of rO are columns of P."""
    sizes = spec.TM // 2, spec.DN, spec.step // 16
    return _make_add_shared_product(*sizes, spec.pitch_t, spec.pitch, spec.dtype, True)


@cache
def _make_store_rows(TM, columns, pitch, STEP, dtype):
    """A thread's part of rows of ``columns``, rounded, to shared memory."""
    _, pack = _instructions(dtype)

    @device_function
    def store_rows(sT, rT, ty, tx):
        first = int64(uint32(ty * pitch + 2 * tx))
        for i in range(TM):
            for n in range(columns // 8):
                e = i * (columns // 4) + 2 * n
                at = first + (i * STEP * pitch + 8 * n)
                store2(sT, at, pack(rT[e], rT[e + 1]))

    return store_rows


@cache
def _make_write_rows(rows, columns, pitch, uneven):
    """A warp's ``rows`` of shared memory to T; neighbouring lanes write neighbouring 16 bytes.

    Rows of T start at 16-byte addresses. ``uneven`` is for rows that end within 16 bytes.
    """
    deal = ChunkMap(rows, columns // 8, 32)
    assert deal.whole, "the next warp's rows begin where these end"
    copies, RW = deal.turns, 4 * deal.turns
    first_chunk, turn = make_first_chunk(deal), make_turn(deal)

    @device_function
    def lane():
        return uint32(cuda.threadIdx.x) % uint32(32)

    @device_function
    def write_rows(sT, T, warp_row, row0, rows_end, col0, cols_end):
        rW = cuda.local.array(RW, uint32)
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(lane())
            at = int64(uint32(uint32(warp_row + r) * pitch + c))
            w = load8(sT, at + (down * pitch + right))
            for e in range(4):
                rW[4 * n + e] = w[e]
        for n in range(copies):
            down, right = turn(n)
            r, c = first_chunk(lane())
            first = uint32(row0 + warp_row + r)
            left = int32(int32(rows_end) - int32(first))
            row, col = int64(first) + down, uint32(col0 + c + right)
            mine = left > int32(down)
            full = mine and uint32(col + 7) < cols_end
            e = 4 * n
            write8(T, row, col, rW[e], rW[e + 1], rW[e + 2], rW[e + 3], full)
            if uneven and mine and not full:
                for e in range(7):
                    if uint32(col + e) < cols_end:
                        T[row, uint32(col + e)] = rW[4 * n + e // 2] >> uint32(16 * (e % 2))

    return write_rows


@cache
def make_store_scores(spec):
    """``store_scores(sS, rS, ty, tx)``: this thread's part of a tile of S, rounded."""
    return _make_store_rows(spec.TM, spec.Bc, spec.pitch_s, spec.row_step, spec.dtype)


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
    """``write_scores(sS, S, warp_row, row0, rows_end, col0, cols_end)``: this warp's rows of it."""
    return _make_write_rows(8 * spec.TM, spec.Bc, spec.pitch_s, True)


@cache
def make_write_tile(spec):
    """``write_tile(rO, sO, O, warp_row, row0, rows_end, ty, tx)``: this warp's rows of an O tile,
    rounded, by way of the same rows of sO; unaligned ones element by element.
    """
    d, wide = spec.head_dim, spec.stores_wide
    store_rows = _make_store_rows(spec.TM, spec.columns, spec.pitch, spec.row_step, spec.dtype)
    write_rows = _make_write_rows(8 * spec.TM, spec.columns, spec.pitch, False)
    write_halves = make_write_halves(spec)

    @device_function
    def write_tile(rO, sO, O, warp_row, row0, rows_end, ty, tx):
        if wide:
            cuda.syncwarp()  # nobody reads these rows any more
            store_rows(sO, rO, ty, tx)
            cuda.syncwarp()  # this warp's rows are there
            write_rows(sO, O, warp_row, row0, rows_end, uint32(0), uint32(d))
        else:
            write_halves(rO, O, row0, rows_end, ty, tx)

    return write_tile


@cache
def make_write_halves(spec, cols_end=None):
    """``write_halves(rO, O, row0, rows_end, ty, tx)``: this thread's part of an O tile, rounded.

    ``cols_end`` is the length of O's rows, where that is not the head dimension of ``spec``.
    """
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    d = spec.head_dim if cols_end is None else cols_end
    write_two, owns = make_write_two(spec.dtype, spec.aligned), make_owns(spec)

    @device_function
    def write_halves(rO, O, row0, rows_end, ty, tx):
        for i in range(TM):
            row = uint32(row0 + ty + i * STEP)
            if row < rows_end and owns(i):
                for n in range(DN4 // 2):
                    e = i * DN4 + 2 * n
                    write_two(O, row, uint32(8 * n + 2 * tx), d, rO[e], rO[e + 1])

    return write_halves


@cache
def make_read_floats(head_dim):
    """``read_floats(A, row, col, inside)``: two neighbours of a float32 row, zeros past its end
    and where not ``inside``. Rows start at 8-byte addresses; nothing past the end is touched.
    """
    odd = head_dim % 2 == 1

    @device_function
    def read_floats(A, row, col, inside):
        pair = read_pair(A, row, col, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            pair = A[row, col], float32(0.0)
        return pair

    return read_floats


@cache
def make_write_floats(head_dim):
    """``write_floats(A, row, col, inside, low, high)``: the same to memory."""
    odd = head_dim % 2 == 1

    @device_function
    def write_floats(A, row, col, inside, low, high):
        write_pair(A, row, col, low, high, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            A[row, col] = low

    return write_floats


@cache
def make_read_fragments(spec):
    """``read_fragments(rO, A, row0, rows_end, ty, tx)``: its part of a float32 tile, or zeros.

    Zeros too in another warp's rows.
    """
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    owns, read_floats = make_owns(spec), make_read_floats(spec.head_dim)

    @device_function
    def read_fragments(rO, A, row0, rows_end, ty, tx):
        first = uint32(row0 + ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, mine = int64(first) + i * STEP, left > i * STEP and owns(i)
            for n in range(0, DN4, 2):
                e = i * DN4 + n
                pair = read_floats(A, row, int64(2 * tx) + 4 * n, mine)
                rO[e] = pair[0]
                rO[e + 1] = pair[1]

    return read_fragments


@cache
def make_write_fragments(spec):
    """``write_fragments(rO, A, row0, rows_end, ty, tx)``: its part of a float32 tile to memory."""
    TM, DN4, STEP = spec.TM, 4 * spec.DN, spec.row_step
    owns, write_floats = make_owns(spec), make_write_floats(spec.head_dim)

    @device_function
    def write_fragments(rO, A, row0, rows_end, ty, tx):
        first = uint32(row0 + ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, mine = int64(first) + i * STEP, left > i * STEP and owns(i)
            for n in range(0, DN4, 2):
                e = i * DN4 + n
                write_floats(A, row, int64(2 * tx) + 4 * n, mine, rO[e], rO[e + 1])

    return write_fragments


@cache
def make_load_row_values(spec):
    """``load_values(sT, T, row0, rows_end)`` starts copying one float a row; 0 past the end."""
    Br, threads = spec.Br, spec.threads

    @device_function
    def load_values(sT, T, row0, rows_end):
        for first in range(0, Br, threads):
            n = uint32(cuda.threadIdx.x + first)
            row = uint32(row0 + n)
            if n < uint32(Br):
                copy_value_async(sT, n, T, row, int32(row < uint32(rows_end)))

    return load_values


@cache
def make_take_row_values(spec):
    """``take_values(rv, sT, ty)``: of these floats the ones of a thread's rows."""
    TM, row_of = spec.TM, make_row(spec)

    @device_function
    def take_values(rv, sT, ty):
        for i in range(TM):
            rv[i] = sT[row_of(ty, i)]

    return take_values


@cache
def make_store_fragments(spec, drops=False):
    """``store(sT, rT, options, ty, tx)``: PT or dST, rounded, to shared memory, a row for a column
    of S. ``drops`` is for a P that ``drop`` has marked.
    """
    TM, TN, pitch = spec.TM, spec.TN, spec.pitch_ds
    row_of, column_of = make_row(spec), make_column(spec)
    kept = make_kept(spec.features if drops else PLAIN)
    _, pack = _instructions(spec.dtype)

    @device_function
    def store(sT, rT, options, ty, tx):
        first = uint32(column_of(tx, 0) * pitch + row_of(ty, 0))
        for j in range(TN):
            for i in range(0, TM, 2):
                e = j * TM + i
                further = uint32(column_of(uint32(0), j) * pitch + row_of(uint32(0), i))
                at = int64(first) + int64(further)
                store2(sT, at, pack(kept(rT[e], options), kept(rT[e + 1], options)))

    return store


@cache
def make_add_transposed_fragments(spec, drops=False):
    """``add(rdV, rP, sP, sT, row0, col0, options)``: rdV += PT T for this warp's rows of PT from
    ``row0`` and columns of T from ``col0`` on.

    PT is the warp's own registers where it has all of those rows, else from shared memory.
    """
    sizes = spec.TN // 2, spec.gradients.DN, spec.Br // 16
    from_registers = make_add_fragment_product(spec.gradients, drops)
    from_shared = _make_add_shared_product(*sizes, spec.pitch_ds, spec.pitch, spec.dtype, False)
    own = spec.row_warps == 1

    @device_function
    def add(rdV, rP, sP, sT, row0, col0, options):
        if own:
            from_registers(rdV, rP, sT, options)
        else:
            from_shared(rdV, sP, 0, sT, col0, row0)

    return add


@cache
def make_fragment_product(spec):
    """``add_product(rdQ, sdS, sK)``: this warp's part of dQ += dSij Kj, dST in shared memory."""
    R, C, ALONG, DN = spec.query_fragments, spec.query_chunks, spec.chunk_warps, spec.DN
    K, pitch, pitch_ds, RA = spec.Bc // 16, spec.pitch, spec.pitch_ds, 4 * spec.query_fragments
    mma, _ = _instructions(spec.dtype)
    place, place_ds = make_place(pitch), make_place(pitch_ds)

    @device_function
    def add_product(rdQ, sdS, sK):
        rA = cuda.local.array(RA, uint32)
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        chunk = uint32(warp % uint32(ALONG))
        at_ds = uint32(place_ds(False) + warp // uint32(ALONG) * (16 * R))
        at_k = uint32(place(True) + chunk * 16)
        for k in range(K):
            for r in range(R):
                a = ldmatrix_transposed(sdS, uint32(at_ds + (16 * k * pitch_ds + 16 * r)))
                rA[4 * r] = a[0]
                rA[4 * r + 1] = a[1]
                rA[4 * r + 2] = a[2]
                rA[4 * r + 3] = a[3]
            for c in range(C):
                if uint32(chunk + c * ALONG) < uint32(DN):
                    b = ldmatrix_transposed(sK, uint32(at_k + (16 * k * pitch + 16 * c * ALONG)))
                    for r in range(R):
                        low = 8 * (r * C + c)
                        high = low + 2
                        e = 4 * r
                        mma(rdQ, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[0], b[1])
                        low += 4
                        high += 4
                        mma(rdQ, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], b[2], b[3])

    return add_product


@cache
def make_query_place(spec):
    """``place(row0, rows_end)``: row and column of this thread's first element of dQ, in the whole
    matrix, and the rows from there to the end.

    Its pair e, of registers 2 e and 2 e + 1, stands PAIRS[e] rows and columns further.
    """
    R, ALONG = spec.query_fragments, spec.chunk_warps

    @device_function
    def place(row0, rows_end):
        warp = uint32(cuda.threadIdx.x) // uint32(32)
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(row0 + warp // uint32(ALONG) * (16 * R) + lane // uint32(4))
        col = uint32(warp % uint32(ALONG) * 16 + lane % uint32(4) * 2)
        return int64(row), int64(col), int32(int32(rows_end) - int32(row))

    return place


def _query_pairs(spec):
    R, C, ALONG = spec.query_fragments, spec.query_chunks, spec.chunk_warps
    return tuple(
        (16 * r + 8 * half, 16 * c * ALONG + 8 * n)
        for r in range(R)
        for c in range(C)
        for n in range(2)
        for half in range(2)
    )


@cache
def make_add_two(head_dim, vector):
    """``add_two(T, row, col, inside, low, high)``: atomic adds to two neighbours of a row."""
    add, odd = add_pair_vector if vector else add_pair, head_dim % 2 == 1

    @device_function
    def add_two(T, row, col, inside, low, high):
        add(T, row, col, low, high, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            add_global(T, row, col, low)

    return add_two


@cache
def make_add_query_fragments(spec):
    """``add_rows(rdQ, A, row0, rows_end)``: A += this warp's part of dQ, by atomic adds."""
    pairs, place = _query_pairs(spec), make_query_place(spec)
    add_two = make_add_two(spec.head_dim, spec.vector_adds)

    @device_function
    def add_rows(rdQ, A, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            add_two(A, row + down, col + along, left > down, rdQ[2 * e], rdQ[2 * e + 1])

    return add_rows


@cache
def make_read_query_fragments(spec):
    """``read_rows(rdQ, A, row0, rows_end)``: this warp's part of dQ so far, zeros past the end."""
    pairs, place = _query_pairs(spec), make_query_place(spec)
    read_floats = make_read_floats(spec.head_dim)

    @device_function
    def read_rows(rdQ, A, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            pair = read_floats(A, row + down, col + along, left > down)
            rdQ[2 * e] = pair[0]
            rdQ[2 * e + 1] = pair[1]

    return read_rows


@cache
def make_write_query_fragments(spec):
    """``write_rows(rdQ, A, row0, rows_end)``: this warp's part of dQ to memory, in float32."""
    pairs, place = _query_pairs(spec), make_query_place(spec)
    write_floats = make_write_floats(spec.head_dim)

    @device_function
    def write_rows(rdQ, A, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            write_floats(A, row + down, col + along, left > down, rdQ[2 * e], rdQ[2 * e + 1])

    return write_rows


@cache
def make_write_query_halves(spec):
    """``write_rows(rdQ, dQ, factor, row0, rows_end)``: factor times the same, rounded."""
    pairs, place, d = _query_pairs(spec), make_query_place(spec), spec.head_dim
    write_two = make_write_two(spec.dtype, spec.aligned)

    @device_function
    def write_rows(rdQ, dQ, factor, row0, rows_end):
        row, col, left = place(row0, rows_end)
        for e in range(len(pairs)):
            down, along = pairs[e]
            if left > down:
                low, high = factor * rdQ[2 * e], factor * rdQ[2 * e + 1]
                write_two(dQ, row + down, uint32(col + along), d, low, high)

    return write_rows


@cache
def make_add_columns(spec):
    """``add_columns(rdK, A, row0, rows_end, ty, tx)``: A += this warp's part of dK, atomically."""
    TM, DN4, STEP = spec.TN, 4 * spec.gradients.DN, spec.row_step
    add_two = make_add_two(spec.head_dim, spec.vector_adds)

    @device_function
    def add_columns(rdK, A, row0, rows_end, ty, tx):
        first = uint32(row0 + ty)
        left = int32(int32(rows_end) - int32(first))
        for i in range(TM):
            row, inside = int64(first) + i * STEP, left > i * STEP
            for n in range(DN4 // 2):
                e = i * DN4 + 2 * n
                add_two(A, row, int64(2 * tx) + 8 * n, inside, rdK[e], rdK[e + 1])

    return add_columns


@cache
def make_row_dots(spec):
    """``row_dots(sD, sdO, sO)``: D = rowsum(dO o O), there at the next barrier; a warp a row."""
    Br, pitch, columns, warps = spec.Br, spec.pitch, spec.columns, spec.warps
    _, unpack = conversions(spec.dtype)

    @device_function
    def row_dots(sD, sdO, sO):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row = uint32(cuda.threadIdx.x) // uint32(32)
        while row < uint32(Br):
            dot = float32(0.0)
            for first in range(0, columns, 64):
                col = uint32(first + 2 * lane)
                if col < uint32(columns):
                    at = uint32(row * pitch + col)
                    o, g = unpack(load2(sO, at)), unpack(load2(sdO, at))
                    dot += o[0] * g[0] + o[1] * g[1]
            step = 16
            while step > 0:
                dot += cuda.shfl_xor_sync(FULL_WARP, dot, step)
                step //= 2
            if lane == uint32(0):
                sD[row] = dot
            row = uint32(row + warps)

    return row_dots


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
