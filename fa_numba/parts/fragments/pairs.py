"""Two neighbours of a row in global memory: what a lane has of a fragment's row.

Of 16-bit arrays they are rounded; of float32 sums (``A``) rows start at 8-byte addresses.
"""

from fa_numba.device import float32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.global_memory import read2, read_pair, write2, write_pair
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.reduction import add_global, add_pair, add_pair_vector
from fa_numba.parts.namespace import part


def conversions(dtype):
    """Return (pack, unpack): two floats to a word of two 16-bit elements, and back."""
    return CONVERSIONS[DTYPES[dtype].matrix]


def _row(spec):
    """Elements of a row: of O where V has a head dimension of its own."""
    return getattr(spec, "d_v", spec.head_dim)


@part
def make_read_two(spec):
    """``read_two(T, row, col)``: two neighbours of a row in float32, 0 past its end."""
    d, aligned = _row(spec), spec.aligned
    _, unpack = conversions(spec.dtype)

    def read_two(T, row, col):
        if aligned:
            return unpack(read2(T, row, col))
        word = uint32(T[row, col])
        if uint32(col + 1) < uint32(d):
            word = uint32(word | uint32(T[row, uint32(col + 1)]) << uint32(16))
        return unpack(word)

    return read_two


@part
def make_write_two(spec, cols_end=None):
    """``write_two(T, row, col, low, high)``: two neighbours of a row, rounded.

    ``cols_end`` is the length of T's rows, where that is not what ``spec`` says.
    """
    if spec.features.planes > 1:  # O of float32 matrices
        return _make_write_two_floats(spec, cols_end or _row(spec))
    d, aligned = _row(spec) if cols_end is None else cols_end, spec.aligned
    pack, _ = conversions(spec.dtype)

    def write_two(T, row, col, low, high):
        pair = pack(low, high)
        if aligned:
            if col < uint32(d):
                write2(T, row, col, pair)
        else:
            if col < uint32(d):
                T[row, col] = pair & uint32(0xFFFF)
            if uint32(col + 1) < uint32(d):
                T[row, uint32(col + 1)] = pair >> uint32(16)

    return write_two


@part
def _make_write_two_floats(spec, d):
    """``write_two(T, row, col, low, high)``: two neighbours of a row of float32."""
    aligned = spec.aligned

    def write_two(T, row, col, low, high):
        if aligned:
            write_pair(T, int64(row), int64(col), low, high, col < uint32(d))
        else:
            if col < uint32(d):
                T[row, col] = low
            if uint32(col + 1) < uint32(d):
                T[row, uint32(col + 1)] = high

    return write_two


@part
def make_read_floats(spec):
    """``read_floats(A, row, col, inside)``: two neighbours of a float32 row, zeros past its end and
    where not ``inside``. Rows start at 8-byte addresses; nothing past the end is touched.
    """
    head_dim = _row(spec)
    odd = head_dim % 2 == 1

    def read_floats(A, row, col, inside):
        pair = read_pair(A, row, col, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            pair = A[row, col], float32(0.0)
        return pair

    return read_floats


@part
def make_read_sums(spec):
    """``read_sums(O, row, col, inside)``: two neighbours of a float32 row that starts anywhere."""
    head_dim = _row(spec)
    if spec.features.planes == 1 or spec.aligned:
        return make_read_floats(spec)

    def read_sums(O, row, col, inside):
        low, high = float32(0.0), float32(0.0)
        if inside and col < head_dim:
            low = O[row, col]
        if inside and col + 1 < head_dim:
            high = O[row, col + 1]
        return low, high

    return read_sums


@part
def make_write_floats(spec):
    """``write_floats(A, row, col, inside, low, high)``: two neighbours of a float32 row to it."""
    head_dim = _row(spec)
    odd = head_dim % 2 == 1

    def write_floats(A, row, col, inside, low, high):
        write_pair(A, row, col, low, high, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            A[row, col] = low

    return write_floats


@part
def write_pairs_of(spec, pairs, place):
    """``write_sums(rT, A, row0, rows_end, own)``: the ``pairs`` of a thread's part of a tile to
    memory, in float32: so many rows and columns from its first element, which ``place`` finds.
    """
    write_floats = make_write_floats(spec)

    def write_sums(rT, A, row0, rows_end, own):
        row, col, left = place(row0, rows_end, own)
        for e in range(len(pairs)):
            down, along = pairs[e]
            write_floats(A, row + down, col + along, left > down, rT[2 * e], rT[2 * e + 1])

    return write_sums


@part
def write_rounded_of(spec, pairs, place):
    """``write_rounded(rT, T, factor, row0, rows_end, own)``: factor times these pairs, rounded."""
    write_two = make_write_two(spec)

    def write_rounded(rT, T, factor, row0, rows_end, own):
        row, col, left = place(row0, rows_end, own)
        for e in range(len(pairs)):
            down, along = pairs[e]
            if left > down:
                low, high = factor * rT[2 * e], factor * rT[2 * e + 1]
                write_two(T, row + down, uint32(col + along), low, high)

    return write_rounded


@part
def make_add_two(spec):
    """``add_two(T, row, col, inside, low, high)``: atomic adds to two neighbours of a row."""
    head_dim = _row(spec)
    odd = head_dim % 2 == 1
    add = add_pair_vector if spec.vector_adds else add_pair

    def add_two(T, row, col, inside, low, high):
        add(T, row, col, low, high, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            add_global(T, row, col, low)

    return add_two
