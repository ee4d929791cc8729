"""Kernels that combine two partial attention results over different columns into one result.

Attention of the same rows of Q over two sets of columns gives O_x, L_x and O_y, L_y. Each O is
divided by its own softmax sum, and L is the logarithm of this sum. The result over both sets is
computed in float32. The formulas are lines 11 and 12 of Algorithm 1 of arXiv 2205.14135, with L
instead of m and l:

    m = max(L_x, L_y)
    l = e^(L_x - m) + e^(L_y - m)
    O = (e^(L_x - m) O_x + e^(L_y - m) O_y) / l
    L = m + log l

A row that has seen no column has L = -inf, and its O is ignored. Gradients of q are sums over sets
of columns, and gradients of k and v are sums over sets of rows. They are added without weights
(``make_add``).

The result may overwrite O_x. Each array can be in 16 bits or float32. A thread computes w = 8
neighbouring elements of a row. If d is not a multiple of 8, or rows do not start at 16-byte
addresses, w is 1.

The gradients of a loss with respect to a part's O_y and L_y are (``make_merge_backward``):

    P = e^(L_y - L)
    dO_y = P dO
    dL_y = P (rowsum(dO o (O_y - O)) + dL)

Accesses, elements per head, with t threads per row in the backward pass:

    merging              loads 2 N d + 2 N d / w, stores N d + N
    adding               loads 2 N d, stores N d
    backward, each part  loads 3 N d + 2 N t, stores N d + N
"""

from functools import cache

from numba import types

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.device.signature import array_type
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.intrinsics.arithmetic import LN2, LOG2E, NEG_INF, exp2, log2, maximum
from fa_numba.intrinsics.global_memory import read4, read8, write4, write8
from fa_numba.options import PLAIN
from fa_numba.parts.fragments.pairs import conversions
from fa_numba.parts.lanes import sum_of_lanes

THREADS = 128
WIDE = 8


@cache
def make_merge(head_dim, x_dtype, y_dtype, out_dtype, aligned, features=PLAIN):
    """Return the kernel that merges two parts into O and L. The grid is (``blocks``, H, B).

    The kernel's arguments are X and LX (O_x and L_x), Y and LY (O_y and L_y), and the results O and
    L. ``x_dtype``, ``y_dtype`` and ``out_dtype`` are the dtypes of X, Y and O. ``head_dim`` is the
    number of columns of X, Y and O. ``aligned`` says whether rows start at 16-byte addresses. If
    ``features`` include ``q_lens``, Y is ignored in rows past the valid length of a batch entry.
    """
    width = width_of(head_dim, aligned)
    pieces, add = head_dim // width, _add_weighted(x_dtype, y_dtype, out_dtype, width)

    rows = array_type(3)
    arguments = (_matrix(x_dtype), rows, _matrix(y_dtype), rows, _matrix(out_dtype), rows)
    q_lens = features.q_lens

    @cuda.jit((*arguments, features.argument_type), THREADS, 0)
    def merge_parts(X, LX, Y, LY, O, L, options):
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        piece = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = uint32(piece // uint32(pieces))
        col = uint32(uint32(piece % uint32(pieces)) * width)
        if row < uint32(X.shape[2]):
            L_x, L_y = LX[b, h, row], LY[b, h, row]
            if q_lens and row >= uint32(options.q_lens[b]):
                L_y = NEG_INF
            # m = max(L_x, L_y)
            m = maximum(L_x, L_y)
            shift = m
            if m == NEG_INF:  # -inf - -inf would be NaN
                shift = float32(0.0)
            # l = e^(L_x - m) + e^(L_y - m)
            f_x, f_y = exp2(LOG2E * (L_x - shift)), exp2(LOG2E * (L_y - shift))
            l = f_x + f_y
            factor = float32(0.0)
            if l != float32(0.0):
                factor = float32(1.0) / l
            add(O[b, h], X[b, h], Y[b, h], row, col, factor * f_x, factor * f_y)
            if col == uint32(0):
                # L = m + log l
                L[b, h, row] = m + LN2 * log2(l)

    return merge_parts


@cache
def make_add(head_dim, x_dtype, y_dtype, aligned):
    """Return the kernel that adds gradients, X += Y. The grid is (``blocks``, H, B).

    ``x_dtype`` and ``y_dtype`` are the dtypes of X and Y.
    """
    width = width_of(head_dim, aligned)
    pieces, add = head_dim // width, _add_weighted(x_dtype, y_dtype, x_dtype, width)

    @cuda.jit((_matrix(x_dtype), _matrix(y_dtype)), THREADS, 0)
    def add_parts(X, Y):
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        piece = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = uint32(piece // uint32(pieces))
        col = uint32(uint32(piece % uint32(pieces)) * width)
        if row < uint32(X.shape[2]):
            add(X[b, h], X[b, h], Y[b, h], row, col, float32(1.0), float32(1.0))

    return add_parts


@cache
def make_merge_backward(head_dim, dtype, dlse, aligned):
    """Return the kernel that computes the gradients of a merge with respect to one part.

    The grid is (``row_blocks``, H, B). The part is called Y. Its output is the array Y (O_y in the
    formulas of this module), and its logsumexp is the array LY (L_y). The kernel writes two arrays:
    dY, the gradient of the loss with respect to O_y, and dLY, the gradient with respect to L_y.
    ``dlse`` says whether the loss depends on the merged L. If so, the kernel reads dL, the gradient
    with respect to L.
    """
    width, T = width_of(head_dim, aligned), row_threads(head_dim, aligned)
    ROWS, weight = THREADS // T, _weight_gradient(dtype, width)
    matrix, rows = _matrix(dtype), array_type(3)
    arguments = (matrix, matrix, rows, rows, matrix, rows, matrix, rows)

    @cuda.jit(arguments, THREADS, 0)
    def merge_backward(dO, O, L, dL, Y, LY, dY, dLY):
        b, h = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        row = uint32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // T)
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(T))
        P, dot = float32(0.0), float32(0.0)
        if row < uint32(O.shape[2]):
            # P = e^(L_y - L), and 0 of a part that has seen no column
            L_y = LY[b, h, row]
            if L_y != NEG_INF:
                P = exp2(LOG2E * (L_y - L[b, h, row]))
                if dlse and lane == uint32(0):
                    dot = dL[b, h, row]
            # dO_y = P dO; rowsum(dO o (O_y - O)) + dL
            col = uint32(lane * width)
            while col < uint32(head_dim):
                dot += weight(dY[b, h], dO[b, h], O[b, h], Y[b, h], row, col, P)
                col = uint32(col + T * width)
        dot = sum_of_lanes(dot, T, 1)
        if lane == uint32(0) and row < uint32(O.shape[2]):
            dLY[b, h, row] = _share(P, dot)

    return merge_backward


def row_threads(head_dim, aligned):
    """Return the number of threads that share a row in the kernel of ``make_merge_backward``.

    The number is a power of two.
    """
    pieces = ceil_div(head_dim, width_of(head_dim, aligned))
    return min(32, 1 << (pieces - 1).bit_length())


def row_blocks(rows, head_dim, aligned):
    """Return the first number of the grid of the kernel of ``make_merge_backward``.

    It is the number of thread blocks for the ``rows`` rows of one head.
    """
    return ceil_div(rows * row_threads(head_dim, aligned), THREADS)


def width_of(head_dim, aligned):
    """Return the number of neighbouring elements that a thread computes: 8 or 1.

    The number is 8 if the head dimension is a multiple of 8 and rows are ``aligned`` (start at
    16-byte addresses).
    """
    return WIDE if aligned and head_dim % WIDE == 0 else 1


def blocks(rows, head_dim, aligned):
    """Return the first number of the grid of the kernels of ``make_merge`` and ``make_add``.

    It is the number of thread blocks for the ``rows`` rows of one head.
    """
    return ceil_div(rows * (head_dim // width_of(head_dim, aligned)), THREADS)


def _matrix(dtype):
    """Return the Numba type of a 4-D array of this dtype. Elements of 16-bit dtypes are uint16."""
    return array_type(4, types.uint16 if DTYPES[dtype].matrix else types.float32)


@device_function
def _share(f, x):
    """Return f x, or 0 if f is 0, even if x is NaN."""
    share = f * x
    if f == float32(0.0):
        share = float32(0.0)
    return share


def _add_weighted(x_dtype, y_dtype, out_dtype, width):
    """Make ``add(O, X, Y, row, col, f, g)``, which computes O = f X + g Y in one row.

    The function computes ``width`` neighbouring elements from column ``col`` on. A term whose
    factor is 0 is 0, even if the element is NaN.
    """
    if width == 1:
        read_x, read_y, write = _read_one(x_dtype), _read_one(y_dtype), _write_one(out_dtype)

        @device_function
        def add_one(O, X, Y, row, col, f, g):
            write(O, row, col, _share(f, read_x(X, row, col)) + _share(g, read_y(Y, row, col)))

        return add_one
    read_x, read_y, write = _read_wide(x_dtype), _read_wide(y_dtype), _write_wide(out_dtype)

    @device_function
    def add_wide(O, X, Y, row, col, f, g):
        x, y = read_x(X, row, col), read_y(Y, row, col)
        sums = (
            _share(f, x[0]) + _share(g, y[0]),
            _share(f, x[1]) + _share(g, y[1]),
            _share(f, x[2]) + _share(g, y[2]),
            _share(f, x[3]) + _share(g, y[3]),
            _share(f, x[4]) + _share(g, y[4]),
            _share(f, x[5]) + _share(g, y[5]),
            _share(f, x[6]) + _share(g, y[6]),
            _share(f, x[7]) + _share(g, y[7]),
        )
        write(O, row, col, sums)

    return add_wide


def _weight_gradient(dtype, width):
    """Make ``weight(dY, dO, O, Y, row, col, P)``, which writes dY = P dO in one row.

    The function writes ``width`` neighbouring elements from column ``col`` on. It returns a float:
    the sum of dO o (Y - O) over these elements.
    """
    if width == 1:
        read, write = _read_one(dtype), _write_one(dtype)

        @device_function
        def weight_one(dY, dO, O, Y, row, col, P):
            g = read(dO, row, col)
            write(dY, row, col, P * g)
            return g * (read(Y, row, col) - read(O, row, col))

        return weight_one
    read, write = _read_wide(dtype), _write_wide(dtype)

    @device_function
    def weight_wide(dY, dO, O, Y, row, col, P):
        g, o, y = read(dO, row, col), read(O, row, col), read(Y, row, col)
        write(
            dY, row, col,
            (P * g[0], P * g[1], P * g[2], P * g[3], P * g[4], P * g[5], P * g[6], P * g[7]),
        )  # fmt: skip
        low = g[0] * (y[0] - o[0]) + g[1] * (y[1] - o[1])
        low += g[2] * (y[2] - o[2]) + g[3] * (y[3] - o[3])
        high = g[4] * (y[4] - o[4]) + g[5] * (y[5] - o[5])
        high += g[6] * (y[6] - o[6]) + g[7] * (y[7] - o[7])
        return low + high

    return weight_wide


@cache
def _read_one(dtype):
    """Make ``read(X, row, col)``, which reads one element of a row as float32."""
    if not DTYPES[dtype].matrix:

        @device_function
        def read_float(X, row, col):
            return X[row, col]

        return read_float
    _, unpack = conversions(dtype)

    @device_function
    def read_half(X, row, col):
        return unpack(uint32(X[row, col]))[0]

    return read_half


@cache
def _write_one(dtype):
    """Make ``write(X, row, col, x)``, which rounds one float32 number and stores it in X."""
    if not DTYPES[dtype].matrix:

        @device_function
        def write_float(X, row, col, x):
            X[row, col] = x

        return write_float
    pack, _ = conversions(dtype)

    @device_function
    def write_half(X, row, col, x):
        X[row, col] = pack(x, float32(0.0)) & uint32(0xFFFF)

    return write_half


@cache
def _read_wide(dtype):
    """Make ``read(X, row, col)``, which reads eight neighbouring elements of a row as float32."""
    if not DTYPES[dtype].matrix:

        @device_function
        def read_floats(X, row, col):
            a, b = read4(X, row, col), read4(X, row, uint32(col + 4))
            return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]

        return read_floats
    _, unpack = conversions(dtype)

    @device_function
    def read_halves(X, row, col):
        w = read8(X, row, col)
        a, b, c, d = unpack(w[0]), unpack(w[1]), unpack(w[2]), unpack(w[3])
        return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]

    return read_halves


@cache
def _write_wide(dtype):
    """Make ``write(X, row, col, x)``, which rounds eight float32 numbers and stores them in X."""
    if not DTYPES[dtype].matrix:

        @device_function
        def write_floats(X, row, col, x):
            write4(X, row, col, x[0], x[1], x[2], x[3])
            write4(X, row, uint32(col + 4), x[4], x[5], x[6], x[7])

        return write_floats
    pack, _ = conversions(dtype)

    @device_function
    def write_halves(X, row, col, x):
        w0, w1 = pack(x[0], x[1]), pack(x[2], x[3])
        write8(X, row, col, w0, w1, pack(x[4], x[5]), pack(x[6], x[7]), True)

    return write_halves
