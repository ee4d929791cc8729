"""The matrix products of attention on CUDA cores: operands in shared memory, results in registers.

The position of a thread is (ty, tx). The thread holds TM rows ty + i TY and TN columns tx + j TX of
S. In each of these rows, it holds DN groups of four columns of O. It holds CM rows of dK and dV.
The thread's registers have these shapes:

- ``rS: (TM, TN)`` for S,
- ``rO: (TM, DN, 4)`` for O, and ``rT: (TM, DN, 4)`` for P V of one tile,
- ``rdV: (CM, DN, 4)`` for dV or dK.

Neighbouring threads read neighbouring rows, which the swizzle of a tile puts into different banks.
All rows of a tile that one thread reads have the same swizzle, because TX and TY are multiples of
the number of rows after which the swizzle repeats.
"""

from functools import cache

from fa_numba.device import cuda, float32, int64, uint32
from fa_numba.intrinsics.shared import load4_at_byte
from fa_numba.parts.dropout import make_kept
from fa_numba.parts.namespace import part
from fa_numba.parts.simt.swizzle import flip_of

# The largest number of columns of Q and K in one sum. The rounding of longer sums would show in the
# gradients.
LONGEST_SUM = 128


@part
def make_scores(spec):
    """Make ``scores(rS, sQ, sK, thread)``, which computes S = Qi KjT in the registers rS.

    The sum is over the head dimension. For head dimensions above LONGEST_SUM, the function computes
    two partial sums, because the rounding of one long sum would be visible in the gradients.
    """
    RS = spec.TM * spec.TN
    if spec.d4 <= LONGEST_SUM:
        return _make_partial_scores(spec, 0, spec.d4)
    middle = spec.d4 // 8 * 4
    lower = _make_partial_scores(spec, 0, middle)
    upper = _make_partial_scores(spec, middle, spec.d4)

    def scores(rS, sQ, sK, thread):
        rH = cuda.local.array(RS, float32)
        lower(rH, sQ, sK, thread)
        upper(rS, sQ, sK, thread)
        for e in range(RS):
            rS[e] += rH[e]

    return scores


@cache
def make_value_scores(spec):
    """Make ``value_scores(rdP, sdO, sV, thread)``, which computes dP = dOi VjT in the registers
    rdP.

    The sum is over V's head dimension.
    """
    return make_scores(spec.of_values)


@part
def _make_partial_scores(spec, first, last):
    """Make ``partial_scores(rS, sQ, sK, thread)``, which computes Qi KjT over the columns ``first``
    to ``last`` - 1.

    One turn of the loop handles eight columns. Four columns of K are read while the four columns
    before them are multiplied.
    """
    TM, TN, TX, TY = spec.TM, spec.TN, spec.tx_count, spec.ty_count
    bytes_q, flip_q = 4 * spec.rows_q.pitch, flip_of(spec.rows_q)
    bytes_k, flip_k = 4 * spec.rows_k.pitch, flip_of(spec.rows_k)
    RK, FIRST, LAST = 4 * TN, 4 * first, 4 * last - 16
    TURNS, ODD = (last - first) // 8, (last - first) % 8 > 0
    read_k, add_scores = _make_read_rows(TN, TX * bytes_k), _make_add_scores(TM, TN, TY * bytes_q)

    def partial_scores(rS, sQ, sK, thread):
        rK, rN = cuda.local.array(RK, float32), cuda.local.array(RK, float32)
        for e in range(TM * TN):
            rS[e] = float32(0.0)
        q_row, q_flip = int64(uint32(thread.ty * bytes_q)), flip_q(thread.ty)
        k_row, k_flip = int64(uint32(thread.tx * bytes_k)), flip_k(thread.tx)
        column, left = int64(FIRST), uint32(TURNS)
        read_k(rK, sK, k_row + (column ^ k_flip))
        while left > uint32(0):
            read_k(rN, sK, k_row + (column + 16 ^ k_flip))
            add_scores(rS, sQ, q_row + (column ^ q_flip), rK)
            after = min(column + 32, int64(LAST))
            read_k(rK, sK, k_row + (after ^ k_flip))
            add_scores(rS, sQ, q_row + (column + 16 ^ q_flip), rN)
            column += 32
            left = uint32(left - uint32(1))
        if ODD:
            add_scores(rS, sQ, q_row + (column ^ q_flip), rK)

    return partial_scores


@part
def _make_read_rows(count, apart):
    """Make ``read_rows(r, s, at)``, which reads four floats of each of ``count`` rows into the
    registers r.

    ``at`` is the byte offset of the first row's floats in shared memory ``s``. The rows are
    ``apart`` bytes apart.
    """

    def read_rows(r, s, at):
        for i in range(count):
            a = load4_at_byte(s, at + i * apart)
            r[4 * i] = a[0]
            r[4 * i + 1] = a[1]
            r[4 * i + 2] = a[2]
            r[4 * i + 3] = a[3]

    return read_rows


@part
def _make_add_scores(TM, TN, apart):
    """Make ``add_scores(rS, sQ, at_q, rK)``, which adds products of Q and K over four columns to S.

    ``at_q`` is the byte offset in sQ of the four columns of the thread's first row. The thread's TM
    rows are ``apart`` bytes apart. ``rK: (TN, 4)`` holds the four columns of the thread's rows of
    K.
    """

    def add_scores(rS, sQ, at_q, rK):
        for i in range(TM):
            a = load4_at_byte(sQ, at_q + i * apart)
            for j in range(TN):
                e = i * TN + j
                rS[e] += a[0] * rK[4 * j]
                rS[e] += a[1] * rK[4 * j + 1]
                rS[e] += a[2] * rK[4 * j + 2]
                rS[e] += a[3] * rK[4 * j + 3]

    return add_scores


@part
def make_output(spec):
    """Make ``output(rT, sP, sV, thread)``, which computes T = Pij Vj in registers.

    The sum is over the columns of the tile. Each tile has a sum of its own: one running sum over
    all tiles would lose accuracy as N grows. One turn of the loop handles eight columns. Four
    columns of P are read while the four columns before them are multiplied.
    """
    TM, DN, TY = spec.TM, spec.DN, spec.ty_count
    bytes_p, flip_p = 4 * spec.rows_p.pitch, flip_of(spec.rows_p)
    RP, TURNS, LAST = 4 * TM, spec.Bc // 8, spec.Bc - 4
    read_p, add_output = _make_read_rows(TM, TY * bytes_p), _make_add_output(spec)

    def output(rT, sP, sV, thread):
        rP, rN = cuda.local.array(RP, float32), cuda.local.array(RP, float32)
        for e in range(TM * DN * 4):
            rT[e] = float32(0.0)
        p_row, p_flip, v_column = (
            int64(uint32(thread.ty * bytes_p)),
            flip_p(thread.ty),
            int64(uint32(16 * thread.tx)),
        )
        k, left = int64(0), uint32(TURNS)
        read_p(rP, sP, p_row + p_flip)
        while left > uint32(0):
            read_p(rN, sP, p_row + (4 * k + 16 ^ p_flip))
            add_output(rT, rP, sV, k, v_column)
            after = min(k + 8, int64(LAST))
            read_p(rP, sP, p_row + (4 * after ^ p_flip))
            add_output(rT, rN, sV, k + 4, v_column)
            k += 8
            left = uint32(left - uint32(1))

    return output


@part
def _make_add_output(spec):
    """Make ``add_output(rT, rP, sV, k, v_column)``, which adds the product of four columns of P and
    four rows of V to the registers rT.

    ``rP: (TM, 4)`` holds the columns k to k + 3 of P. The rows of V are the rows k to k + 3 of sV.
    ``v_column`` is the byte offset of the thread's columns in a row of sV.
    """
    TM, DN, TX = spec.TM, spec.DN, spec.tx_count
    bytes_v, flip_v = 4 * spec.rows_v.pitch, flip_of(spec.rows_v)
    add_to_rows = _make_add_to_rows(TM, DN, 4)

    def add_output(rT, rP, sV, k, v_column):
        for n in range(4):
            at_v = (k + n) * bytes_v + (v_column ^ flip_v(n) ^ flip_v(k))
            for c in range(DN):
                add_to_rows(rT, rP, n, load4_at_byte(sV, at_v + 16 * c * TX), c)

    return add_output


@part
def _make_add_to_rows(rows, DN, apart):
    """Make ``add_to_rows(rT, rP, first, b, c)``, which adds the product of a column vector in rP
    and a row vector ``b`` of four numbers to the registers rT.

    Element i of the column vector is ``rP[first + i apart]``. Its products with the four numbers of
    ``b`` are added to the four columns of group c in row i of rT.

    The function multiplies all rows by one number of ``b`` before it takes the next number.
    Consecutive multiply-adds then share a factor, so that the assembler rarely reads three
    registers for one instruction.
    """

    def add_to_rows(rT, rP, first, b, c):
        for i in range(rows):
            rT[4 * (i * DN + c) + 1] += rP[first + i * apart] * b[1]
        for i in range(rows - 1, -1, -1):
            rT[4 * (i * DN + c)] += rP[first + i * apart] * b[0]
        for i in range(rows - 1, -1, -1):
            rT[4 * (i * DN + c) + 3] += rP[first + i * apart] * b[3]
        for i in range(rows):
            rT[4 * (i * DN + c) + 2] += rP[first + i * apart] * b[2]

    return add_to_rows


@part
def make_add_transposed(spec):
    """Make ``add_transposed(rdV, sP, sB, thread)``, which adds PT B to dV (or dK) in registers.

    ``sB`` is a row tile of dO (or Q). The sum is over the rows of the tile. The sum of each tile is
    computed separately and then added: one running sum over all tiles would lose accuracy as N
    grows.
    """
    CG, DN, TX, TY = spec.CM // 4, spec.DN, spec.tx_count, spec.ty_count
    bytes_p, flip_p = 4 * spec.rows_p.pitch, flip_of(spec.rows_p)
    bytes_b, flip_b = 4 * spec.rows_q.pitch, flip_of(spec.rows_q)
    RP, RT, STEPS = 16 * CG, 16 * CG * DN, spec.Br // 4
    add_to_rows = _make_add_to_rows(4 * CG, DN, 1)

    def add_transposed(rdV, sP, sB, thread):
        rP = cuda.local.array(RP, float32)
        rT = cuda.local.array(RT, float32)
        for e in range(RT):
            rT[e] = float32(0.0)
        p_column, b_column = int64(uint32(16 * thread.ty)), int64(uint32(16 * thread.tx))
        p_row, b_row, left = int64(0), int64(0), uint32(STEPS)
        while left > uint32(0):  # four rows: the swizzles of both tiles repeat after them
            for n in range(4):
                for g in range(CG):
                    at_p = p_row + (p_column + 16 * g * TY ^ flip_p(n)) + n * bytes_p
                    a = load4_at_byte(sP, at_p)
                    rP[4 * (n * CG + g)] = a[0]
                    rP[4 * (n * CG + g) + 1] = a[1]
                    rP[4 * (n * CG + g) + 2] = a[2]
                    rP[4 * (n * CG + g) + 3] = a[3]
            for n in range(4):
                at_b = b_row + (b_column ^ flip_b(n)) + n * bytes_b
                for c in range(DN):
                    add_to_rows(rT, rP, 4 * n * CG, load4_at_byte(sB, at_b + 16 * c * TX), c)
            p_row += 4 * bytes_p
            b_row += 4 * bytes_b
            left = uint32(left - uint32(1))
        for e in range(RT):
            rdV[e] += rT[e]

    return add_transposed


@cache
def make_add_dv(spec):
    """Make ``add_dv(rdV, sP, sdO, thread)``, which adds PT dOi to dV in registers.

    ``make_add_transposed`` explains the arguments. The number of columns is V's head dimension.
    """
    return make_add_transposed(spec.of_values)


@part
def make_scale_and_add(spec):
    """Make ``scale_and_add(rO, rf, rT)``, which multiplies each row of O by its factor in rf and
    adds rT, in registers.

    ``rT`` has the shape of ``rO``.
    """
    TM, DN4 = spec.TM, 4 * spec.DN

    def scale_and_add(rO, rf, rT):
        for i in range(TM):
            for c in range(DN4):
                e = i * DN4 + c
                rO[e] = rf[i] * rO[e] + rT[e]

    return scale_and_add


@part
def make_store_p(spec):
    """Make ``store_p(sP, rS, options, thread)``, which stores P in shared memory ``sP: (Br, Bc)``.

    ``drop`` has made the dropped elements of rS negative. They are stored as 0. With dropout, the
    other elements are multiplied by 1 / (1 - dropout_p).
    """
    TM, TN, TX, TY = spec.TM, spec.TN, spec.tx_count, spec.ty_count
    pitch, flip, kept = spec.rows_p.pitch, flip_of(spec.rows_p), make_kept(spec)

    def store_p(sP, rS, options, thread):
        row, flipped = int64(uint32(thread.ty * pitch + thread.tx)), flip(thread.ty) // 4
        for j in range(TN):
            at = row + (j * TX ^ flipped)
            for i in range(TM):
                sP[at + i * TY * pitch] = kept(rS[i * TN + j], options)

    return store_p


@part
def make_store_ds(spec):
    """Make ``store_ds(sdS, rdS, thread)``, which stores dS from registers in shared memory
    ``sdS: (Br, Bc)``.
    """
    TM, TN, TX, TY = spec.TM, spec.TN, spec.tx_count, spec.ty_count
    pitch, flip = spec.rows_p.pitch, flip_of(spec.rows_p)

    def store_ds(sdS, rdS, thread):
        row, flipped = int64(uint32(thread.ty * pitch + thread.tx)), flip(thread.ty) // 4
        for j in range(TN):
            at = row + (j * TX ^ flipped)
            for i in range(TM):
                sdS[at + i * TY * pitch] = rdS[i * TN + j]

    return store_ds
