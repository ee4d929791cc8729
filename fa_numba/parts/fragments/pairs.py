"""Reads and writes of two neighbouring elements of a row in global memory.

A lane holds pairs of neighbouring elements of a matrix in a fragment. In arrays of 16-bit elements,
the elements are converted to float32 when they are read, and rounded when they are written. In
float32 arrays, both elements are read or written by one instruction, so that rows must start at
8-byte addresses. An example is ``A``, the array in which FA-1 stores O between its passes.
"""

from fa_numba.device import float32, int64, uint32
from fa_numba.dtypes import DTYPES
from fa_numba.intrinsics.global_memory import read2, read_pair, write2, write_pair
from fa_numba.intrinsics.matrix import CONVERSIONS
from fa_numba.intrinsics.reduction import add_global, add_pair, add_pair_vector
from fa_numba.parts.namespace import part


def conversions(dtype):
    """Return two device functions, pack and unpack, for a 16-bit dtype.

    ``pack`` rounds two floats to a word of two 16-bit elements. ``unpack`` converts such a word to
    two floats.
    """
    return CONVERSIONS[DTYPES[dtype].matrix]


def _row_length(spec):
    """Return the number of elements in a row of the output.

    This is ``spec.d_v``, or ``spec.head_dim`` if the spec has no field d_v.
    """
    return getattr(spec, "d_v", spec.head_dim)


@part
def make_read_two(spec):
    """Make ``read_two(T, row, col)``, which reads two elements of a 16-bit row as floats.

    The elements are at the columns col and col + 1. If the row ends after column ``col``, the
    second result is 0.
    """
    d, aligned = _row_length(spec), spec.aligned
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
    """Make ``write_two(T, row, col, low, high)``, which writes two elements of a row.

    ``low`` and ``high`` are written to the columns col and col + 1. They are rounded to 16 bits. If
    the kernel works with planes, they are written as float32. Elements past the end of the row are
    not written. ``cols_end`` is the number of columns of T. None means the number of columns of the
    output.
    """
    if spec.features.planes > 1:  # O of float32 matrices
        return _make_write_two_floats(spec, cols_end or _row_length(spec))
    d, aligned = _row_length(spec) if cols_end is None else cols_end, spec.aligned
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
    """Make ``write_two(T, row, col, low, high)``, which writes two elements of a float32 row.

    ``low`` and ``high`` are written to the columns col and col + 1. A row has ``d`` elements, and
    nothing is written past its end.
    """
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
    """Make ``read_floats(A, row, col, inside)``, which reads two elements of a float32 row.

    The elements are at the columns col and col + 1. Rows must start at 8-byte addresses, so that
    one load reads both elements. If ``inside`` is false, both results are 0. Elements past the end
    of the row are not read, and the results are 0.
    """
    head_dim = _row_length(spec)
    odd = head_dim % 2 == 1

    def read_floats(A, row, col, inside):
        pair = read_pair(A, row, col, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            pair = A[row, col], float32(0.0)
        return pair

    return read_floats


@part
def make_read_sums(spec):
    """Make ``read_sums(O, row, col, inside)``, which reads two elements of a float32 row of O.

    The elements are at the columns col and col + 1. If ``inside`` is false, both results are 0.
    Results past the end of the row are 0, too.

    Normally the function is ``read_floats``, which needs rows that start at 8-byte addresses.
    Kernels that work with planes read the user's own array O, whose rows can start at any address.
    If the rows are not ``aligned`` (``spec.aligned``), the function reads the two elements one by
    one.
    """
    head_dim = _row_length(spec)
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
    """Make ``write_floats(A, row, col, inside, low, high)``, which writes two elements of a row.

    ``low`` and ``high`` are written to the columns col and col + 1 of a float32 row. If ``inside``
    is false, nothing is written. Elements past the end of the row are not written.
    """
    head_dim = _row_length(spec)
    odd = head_dim % 2 == 1

    def write_floats(A, row, col, inside, low, high):
        write_pair(A, row, col, low, high, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            A[row, col] = low

    return write_floats


@part
def write_pairs_of(spec, pairs, place):
    """Make ``write_sums(rT, A, row0, rows_end, own)``, which writes a thread's part of a tile from
    the registers rT to the float32 array A.

    The part consists of pairs of neighbouring elements. The arguments of the factory say where the
    pairs are:

    - ``place(row0, rows_end, own)`` is a device function that returns three numbers: the row and
      the column of the thread's first element, and the number of rows from this row to
      ``rows_end``. ``row0`` is the first row of the tile.
    - ``pairs[e]`` is the position of pair number e relative to the first element, as (rows,
      columns). The pair is in the registers 2 e and 2 e + 1 of rT.

    ``own`` identifies the thread. It is passed to ``place``.
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
    """Make ``write_rounded(rT, T, factor, row0, rows_end, own)``, which writes a part of a tile to
    T.

    The part is the thread's part, in the registers rT. Its elements are multiplied by ``factor``
    and rounded to the dtype of T. ``write_pairs_of`` explains ``pairs``, ``place`` and ``own``.
    """
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
    """Make ``add_two(T, row, col, inside, low, high)``, which adds to two elements of a row
    atomically.

    ``low`` and ``high`` are added to the columns col and col + 1. If ``inside`` is false, nothing
    is added. Nothing is added past the end of the row.
    """
    head_dim = _row_length(spec)
    odd = head_dim % 2 == 1
    add = add_pair_vector if spec.vector_adds else add_pair

    def add_two(T, row, col, inside, low, high):
        add(T, row, col, low, high, inside and col + 1 < head_dim)
        if odd and inside and col + 1 == head_dim:
            add_global(T, row, col, low)

    return add_two
