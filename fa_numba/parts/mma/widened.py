"""Products of 16-bit Q and P with K and V in e4m3 (a float of 8 bits), on tensor cores.

K and V are in pages of a cache, with a float32 scale for each page and head. The instruction
``ldmatrix`` loads elements of 16 bits from shared memory. Each of these contains two neighbouring
columns of e4m3. In registers, e4m3 are converted to 16-bit floats, which is exact. Because of the
pairs, the columns are in another order in fragments than in ``products``. Four lanes share a row of
16 columns:

- K: lane t of the four holds the columns 4 t to 4 t + 3, instead of 2 t, 2 t + 1, 8 + 2 t and 8 + 2
  t + 1. ``order_queries`` gives the fragments of Q the same order once, before the loop.
- V: lane t of the four holds the columns 4 t, 4 t + 2, 4 t + 1 and 4 t + 3 of O. ``finish_output``
  restores the order once, after the loop.

S is multiplied by the scale of K. P is multiplied by the scale of V. This scale can be so small
that the product would be below the range of float16. P is therefore also multiplied by ``unit``,
the inverse of a power of two near the largest scale so far. If a larger scale comes, O is
multiplied by the ratio of the new and the old ``unit``, as the online softmax does for a new
maximum.
"""

from fa_numba.device import cuda, device_function, float32, int32, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.arithmetic import as_float, inverse_power
from fa_numba.intrinsics.float8 import widen_e4m3
from fa_numba.intrinsics.halfwords import permute_bytes
from fa_numba.intrinsics.matrix import MMA, ldmatrix, ldmatrix_transposed, unpack_f16
from fa_numba.intrinsics.shared import load2
from fa_numba.parts.dropout import kept_if
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.mma.fragments import make_place
from fa_numba.parts.mma.swizzle import make_further
from fa_numba.parts.namespace import part


@part
def _make_widen(dtype):
    """Make ``widen(word)``, which converts the four e4m3 numbers of a 32-bit word to 16-bit floats.

    The result is two words, and each word contains two 16-bit floats. The floats have the type
    ``dtype``, float16 or bfloat16. Both types contain all numbers of e4m3, so that no number is
    rounded.
    """
    pack, _ = conversions(dtype)
    if dtype == "float16":

        def widen(word):
            return widen_e4m3(word)

    else:

        def widen(word):
            low, high = widen_e4m3(word)
            a, b = unpack_f16(low), unpack_f16(high)
            return pack(a[0], a[1]), pack(b[0], b[1])

    return widen


@part
def _make_scale(spec, rows):
    """Make ``scale(sT, n)``, which returns the scale of the rows 16 n to 16 n + 15 of a tile in
    e4m3.

    The scales are stored in shared memory sT directly after the tile. ``rows`` is the layout of the
    tile.
    """
    SCALES = spec.Bc * rows.pitch

    def scale(sT, n):
        return as_float(load2(sT, uint32(SCALES + 2 * n)))

    return scale


@device_function
def across(word):
    """Return a word with the two middle bytes of ``word`` exchanged.

    The four bytes of ``word`` are four elements of a matrix: two columns of row 0, then the same
    two columns of row 1. The four bytes of the result are two rows of column 0, then the same two
    rows of column 1.
    """
    return permute_bytes(word, word, uint32(0x3120))


@part
def make_order_queries(spec):
    """Make ``order_queries(rQ)``, which changes the order of columns in the fragments of Q.

    Four lanes share a row of 16 columns. Before the call, lane t of the four holds the columns 2 t,
    2 t + 1, 8 + 2 t and 8 + 2 t + 1. After the call, it holds the columns 4 t to 4 t + 3, as the
    fragments of K do. The registers have the shape ``rQ: (TM / 2, DK, 4)``.
    """
    FRAGMENTS = spec.TM // 2 * spec.DK

    def order_queries(rQ):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        t, four = uint32(lane % uint32(4)), uint32(lane & uint32(28))
        low, high = uint32(four + 2 * t % uint32(4)), uint32(four + (2 * t + 1) % uint32(4))
        for n in range(FRAGMENTS):
            for row in range(2):
                left, right = rQ[4 * n + row], rQ[4 * n + 2 + row]
                rQ[4 * n + row] = _from_halves(left, right, low, t)
                rQ[4 * n + 2 + row] = _from_halves(left, right, high, t)

    return order_queries


@device_function
def _from_halves(left, right, lane, t):
    """Return the value that another lane passes as ``left`` or as ``right``.

    ``lane`` is the number of the other lane in the warp. ``t`` is the number of this lane among the
    four lanes that share a row. The result is the other lane's ``left`` if t is 0 or 1, and the
    other lane's ``right`` if t is 2 or 3. All lanes of the warp must call the function together.
    """
    x = cuda.shfl_sync(FULL_WARP, int32(left), lane)
    y = cuda.shfl_sync(FULL_WARP, int32(right), lane)
    return uint32(x if t < uint32(2) else y)


@part
def make_scores_of_e4m3(spec):
    """Make ``scores(rS, rQ, sQ, sK, row0, col0)``, which computes S = Qi KjT for K in e4m3.

    ``products.make_scores`` explains the arguments. rQ must have the order of columns that
    ``order_queries`` makes. The function does not read sQ.
    """
    R, TM, TN, K, COLUMNS = spec.TM // 2, spec.TM, spec.TN, spec.DK, spec.TN // 4
    rows, RS, mma = spec.key_rows, spec.TM * spec.TN, MMA[DTYPES[spec.dtype].matrix]
    pitch, place, further = rows.pitch, make_place(rows), make_further(rows)
    widen, scale = _make_widen(spec.dtype), _make_scale(spec, rows)

    def scores(rS, rQ, sQ, sK, row0, col0):
        at = uint32(col0 * pitch + place(False, 0))
        for e in range(RS):
            rS[e] = float32(0.0)
        for k in range(K // 2):  # 32 columns
            for c in range(COLUMNS):
                b = ldmatrix(sK, further(at, 16 * c, 16 * k))
                for n in range(2):
                    x, y = widen(b[n]), widen(b[n + 2])
                    for r in range(R):
                        low = 2 * r * TN + 4 * c
                        high = low + TN
                        e = 4 * (r * K + 2 * k + n)
                        mma(rS, low, high, rQ[e], rQ[e + 1], rQ[e + 2], rQ[e + 3], x[0], x[1])
                        low += 2
                        high += 2
                        mma(rS, low, high, rQ[e], rQ[e + 1], rQ[e + 2], rQ[e + 3], y[0], y[1])
        for c in range(COLUMNS):
            factor = scale(sK, uint32(col0 // uint32(16) + c))
            for i in range(TM):
                for n in range(4):
                    rS[i * TN + 4 * c + n] *= factor

    return scores


@part
def make_add_output_of_e4m3(spec):
    """Make ``add_output(rO, rP, sV, unit, options)``, which adds P V to O for V in e4m3.

    The registers rO hold O multiplied by the factor ``unit``. If a scale in this tile of V requires
    a smaller factor, the function multiplies rO by the ratio of the two factors first. The function
    returns the factor that holds after the call. ``products.make_add_output`` explains the
    arguments.
    """
    R, TN, DN, rows = spec.TM // 2, spec.TN, spec.DN, spec.value_rows
    K, RA, RO = spec.TN // 4, 4 * (spec.TM // 2), spec.TM * spec.DN * 4
    mma, (pack, _) = MMA[DTYPES[spec.dtype].matrix], conversions(spec.dtype)
    place, further = make_place(rows), make_further(rows)
    widen, scale = _make_widen(spec.dtype), _make_scale(spec, rows)
    kept = kept_if(spec.features.dropout)

    def add_output(rO, rP, sV, unit, options):
        rA = cuda.local.array(RA, uint32)
        at = place(True, 0)
        for k in range(K):
            of_v = scale(sV, uint32(k))
            own = inverse_power(of_v)
            if own < unit:
                ratio = float32(own * inverse_power(unit))
                for e in range(RO):
                    rO[e] *= ratio
                unit = own
            factor = float32(of_v * unit)
            for r in range(R):
                for n in range(4):
                    e = (2 * r + n % 2) * TN + 4 * k + n // 2 * 2
                    p, q = kept(rP[e], options), kept(rP[e + 1], options)
                    rA[4 * r + n] = pack(float32(p * factor), float32(q * factor))
            for c in range(DN // 2):  # 32 columns
                b = ldmatrix_transposed(sV, further(at, 16 * k, 16 * c))
                for n in range(2):
                    x, y = widen(across(b[2 * n])), widen(across(b[2 * n + 1]))
                    for r in range(R):
                        low = 8 * r * DN + 8 * c + 4 * n
                        high = low + 4 * DN
                        e = 4 * r
                        mma(rO, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], x[0], y[0])
                        low += 2
                        high += 2
                        mma(rO, low, high, rA[e], rA[e + 1], rA[e + 2], rA[e + 3], x[1], y[1])
        return unit

    return add_output


@part
def make_finish_output_of_e4m3(spec):
    """Make ``finish_output(rO, unit)``, which divides O by ``unit`` and restores the order of its
    columns.

    Four lanes share a row of 16 columns. After the call, lane t of the four holds the columns 2 t,
    2 t + 1, 8 + 2 t and 8 + 2 t + 1, as the other parts of the kernel expect.
    """
    GROUPS = spec.TM * spec.DN

    def finish_output(rO, unit):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        odd = lane & uint32(1)
        first = uint32(uint32(lane & uint32(28)) + lane % uint32(4) // uint32(2))
        factor = inverse_power(unit)
        rX = cuda.local.array(4, float32)
        for n in range(GROUPS):
            for e in range(4):
                rX[e] = rO[4 * n + e] * factor
            for half in range(2):
                source = uint32(first + 2 * half)
                for e in range(2):
                    x = cuda.shfl_sync(FULL_WARP, rX[2 * e], source)
                    y = cuda.shfl_sync(FULL_WARP, rX[2 * e + 1], source)
                    rO[4 * n + 2 * half + e] = y if odd else x

    return finish_output
