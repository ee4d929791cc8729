"""What intrinsics check and count as they are emulated; and against NumPy, on a GPU the instruction
itself, those that round or move elements between lanes. `test_ptx` has what each one means.
"""

import math

import numpy as np
import pytest
from numba import config, types
from test_warpgroup import to_bits, to_numbers

from fa_numba import count_accesses, emulator
from fa_numba import device as devices
from fa_numba.device import DeviceArray, Kernel, array_type, cuda, float32, int32, int64, uint32
from fa_numba.emulator import (
    BarrierDivergence,
    BarrierMisuse,
    EmulatorError,
    Misaligned,
    OutOfBounds,
)
from fa_numba.intrinsics.arithmetic import exp2, log2, maximum
from fa_numba.intrinsics.async_copy import (
    commit_async,
    copy4_async,
    copy8_async,
    copy_value_async,
    wait_async,
)
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.intrinsics.global_memory import (
    read2,
    read4,
    read8,
    read_pair,
    write2,
    write4,
    write8,
    write_pair,
)
from fa_numba.intrinsics.matrix import (
    ldmatrix,
    ldmatrix_transposed,
    mma_bf16,
    mma_f16,
    pack_bf16,
    pack_f16,
    pack_positive_bf16,
    pack_positive_f16,
)
from fa_numba.intrinsics.reduction import add_four_vector, add_pair, add_pair_vector
from fa_numba.intrinsics.shared import half_tile, load2, load4_at_byte, load8, shared_tile, store2

THREADS = 32
EPS = float(np.finfo(np.float32).eps)
INF, NAN = math.inf, math.nan


def run(device, kernel, *arrays, threads=THREADS, shared=4096, scalars=()):
    """`kernel` over one block; returns the arrays as it left them."""
    kinds = [array_type(a.ndim, getattr(types, a.dtype.name)) for a in arrays]
    kinds += [types.int32] * len(scalars)
    prepared = Kernel(kernel, tuple(kinds), threads, shared)
    with devices.using(device):
        if device == "emulator":
            copies = [a.copy() for a in arrays]
            devices.launch(prepared, (1, 1, 1), (*copies, *scalars))
            return copies
        remote = [devices.to_gpu(a) for a in arrays]
        views = [
            DeviceArray(r.__cuda_array_interface__["data"][0], a.shape, a.strides, r, a.itemsize)
            for r, a in zip(remote, arrays, strict=True)
        ]
        devices.launch(prepared, (1, 1, 1), (*views, *scalars))
        devices.synchronize()
        return [r.copy_to_host() for r in remote]


def ramp(*shape):
    return np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)


# --- arithmetic ------------------------------------------------------------------------------


def _exp2_kernel(X, Y, Z):
    """Of every lane's own, and of what all lanes have."""
    t = uint32(cuda.threadIdx.x)
    Y[t] = exp2(X[t])
    for n in range(32):
        z = exp2(X[n])
        if t == n:
            Z[t] = z


def _log2_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    Y[t] = log2(X[t])


def _maximum_kernel(X, Y, Z, W):
    t = uint32(cuda.threadIdx.x)
    Z[t] = maximum(X[t], Y[t])
    for n in range(32):
        w = maximum(X[n], Y[n])
        if t == n:
            W[t] = w


def padded(values, filler=1.0):
    return np.array(list(values) + [filler] * (THREADS - len(values)), np.float32)


def test_exp2(device):
    points = [0.0, -0.0, 1.0, -1.0, 0.5, 10.25, -20.125, 100.0, -100.0, 127.0, -126.0, 126.9]
    special = [INF, -INF, NAN, 200.0, -300.0, 1e30, -1e30]
    x = padded(points + special)
    _, y, z = run(device, _exp2_kernel, x, np.zeros_like(x), np.zeros_like(x))
    assert np.array_equal(y, z, equal_nan=True)
    n = len(points)
    want = np.exp2(x[:n].astype(np.float64))
    assert np.all(np.abs(y[:n] / want - 1) <= 2**-22)  # PTX ISA: 2**-22.5, and the store's rounding
    assert y[0] == y[1] == 1.0
    assert y[n : n + 7].tolist()[:2] == [INF, 0.0] and np.isnan(y[n + 2])
    assert y[n + 3 : n + 7].tolist() == [INF, 0.0, INF, 0.0]


@pytest.mark.parametrize("intels", [False, True])
def test_exp2_of_many_lanes_is_pythons_power_bit_for_bit(intels, monkeypatch):
    """Whichever library Numba has."""
    monkeypatch.setattr(config, "USING_SVML", intels)
    x = np.random.default_rng(0).uniform(-126, 128, 4096) * np.tile([1.0, 1e-3, 1e-9, 0.1], 1024)
    want = [INF, *(2.0**each for each in x[1:].tolist())]
    x[0] = 1e30
    x, y = x.reshape(8, 512), np.zeros((8, 512))

    def kernel(X, Y):
        Y[cuda.blockIdx.x, cuda.threadIdx.x] = exp2(X[cuda.blockIdx.x, cuda.threadIdx.x])

    counts = emulator.launch(kernel, 8, 512, x, y)
    assert counts.instructions["exp"] == x.size // 32
    assert y.tobytes() == np.array(want).tobytes()


def test_log2(device):
    points = [1.0, 2.0, 0.5, 3.0, 1e-30, 1e30, 1.5, 0.75, 1000.0, 64.0]
    x = padded([*points, 0.0, INF, NAN, -1.0, -0.0])
    _, y = run(device, _log2_kernel, x, np.zeros_like(x))
    n = len(points)
    want = np.log2(x[:n].astype(np.float64))
    assert np.all(np.abs(y[:n] - want) <= 2**-22 * np.maximum(np.abs(want), 1))
    assert y[0] == 0.0 and y[n] == -INF and y[n + 1] == INF and y[n + 4] == -INF
    assert np.isnan(y[n + 2]) and np.isnan(y[n + 3])


def test_maximum(device):
    values = [0.0, 1.5, -2.0, INF, -INF]
    pairs = [(a, b) for a in values for b in values]
    x = padded([a for a, _ in pairs] + [NAN, 3.0, NAN, -INF, NAN])
    y = padded([b for _, b in pairs] + [3.0, NAN, NAN, NAN, -INF])
    _, _, z, w = run(device, _maximum_kernel, x, y, np.zeros_like(x), np.zeros_like(x))
    assert np.array_equal(z, w, equal_nan=True)
    n = len(pairs)
    assert np.array_equal(z[:n], np.maximum(x[:n], y[:n]))
    assert z[n : n + 2].tolist() == [3.0, 3.0] and np.isnan(z[n + 2])
    assert z[n + 3 : n + 5].tolist() == [-INF, -INF]


# --- 16-byte accesses ------------------------------------------------------------------------


def _global_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    row, col = uint32(t // uint32(4)), uint32(4 * (t % uint32(4)))
    a = read4(X, row, col)
    write4(Y, uint32(7 - row), col, a[3], a[2], a[1], a[0])


def _pair_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    row, col = uint32(t // uint32(4)), uint32(2 * (t % uint32(4)))
    a = read_pair(X, row, col, True)
    write_pair(Y, uint32(7 - row), col, a[1], a[0], True)


# --- asynchronous copies ---------------------------------------------------------------------


def _make_copy(copy, n, make_tile, first, at=0):
    """Rows of n elements, upside down, by way of a tile from its element `at` on."""

    def kernel(X, Y, count):
        tile = make_tile(first, 32 * n)
        t = uint32(cuda.threadIdx.x)
        copy(tile, uint32(n * t + at), X, t, uint32(n), count)
        commit_async()
        wait_async()
        cuda.syncthreads()
        for m in range(n):
            Y[t, m] = tile[uint32(n * (uint32(31) - t) + m)]

    return kernel


_copy4_kernel = _make_copy(copy4_async, 4, shared_tile, 0)
_copy8_kernel = _make_copy(copy8_async, 8, half_tile, 8)


def _copy_value_kernel(X, Y, count):
    tile = shared_tile(4, 32)
    t = uint32(cuda.threadIdx.x)
    copy_value_async(tile, t, X, uint32(t + 1), int32(count))
    commit_async()
    wait_async()
    cuda.syncthreads()
    Y[t] = tile[uint32(31) - t] + float32(0.0)


@pytest.mark.parametrize("count", range(2))
def test_a_copied_value_is_counted_and_checked_if_it_is_read(count):
    y = np.zeros(32, np.float32)
    every_second = ramp(66)[::2]
    counts = emulator.launch(_copy_value_kernel, 1, 32, every_second, y, count, shared_bytes=512)
    assert counts.loads["X"] == 32 * count
    assert np.array_equal(y, every_second[:0:-1] * count)
    if count:
        with pytest.raises(OutOfBounds):
            emulator.launch(_copy_value_kernel, 1, 32, ramp(32), y, 1, shared_bytes=512)
    else:  # what is not read need not be there
        emulator.launch(_copy_value_kernel, 1, 32, ramp(32), y, 0, shared_bytes=512)


@pytest.mark.parametrize("count", range(5))
def test_a_copy_counts_what_it_reads(count):
    counts = emulator.launch(
        _copy4_kernel, 1, 32, ramp(32, 8), ramp(32, 4), count, shared_bytes=512
    )
    assert counts.loads["X"] == 32 * count


def test_misaligned_copies_are_refused():
    y = np.zeros((32, 4), np.float32)
    with pytest.raises(Misaligned):
        emulator.launch(_copy4_kernel, 1, 32, ramp(32, 9), y, 4, shared_bytes=512)


# --- 16-bit elements -------------------------------------------------------------------------


def halves(*shape):
    """1, 2, 3, ... as uint16."""
    return ramp(*shape).astype(np.uint16)


def _overlapping_kernel(X, Y):
    """What one tile has from element 32 on, the other has from its start."""
    whole = half_tile(8, 64)
    part = half_tile(40, 32)
    t = uint32(cuda.threadIdx.x)
    whole[t] = uint32(0)
    whole[uint32(32 + t)] = X[t]
    cuda.syncthreads()
    Y[t] = part[uint32(31) - t]


def test_a_half_tile_stays_within_shared_memory():
    arrays = (halves(32), halves(32))
    with pytest.raises(EmulatorError, match="144 of the dynamic shared memory, but the launch"):
        emulator.launch(_overlapping_kernel, 1, 32, *arrays, shared_bytes=142)


def _two_formats(X):
    floats = shared_tile(0, 32)
    bits = half_tile(56, 8)
    t = uint32(cuda.threadIdx.x)
    floats[t] = X[t]
    bits[t // 4] = uint32(0)


def test_tiles_of_two_formats_do_not_overlap():
    with pytest.raises(EmulatorError, match="bits .uint16. overlaps shared array floats .float32."):
        emulator.launch(_two_formats, 1, 32, ramp(32), shared_bytes=4096)


def _write2_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    pair = uint32(uint32(X[t, 0]) | uint32(X[t, 1]) << uint32(16))
    write2(Y, uint32(7 - t // uint32(4)), uint32(2 * (t % uint32(4))), pair)


def _twos_kernel(X, Y):
    """Pairs through shared memory, upside down."""
    tile = half_tile(8, 64)
    t = uint32(cuda.threadIdx.x)
    store2(tile, uint32(2 * t), read2(X, uint32(t // uint32(4)), uint32(2 * (t % uint32(4)))))
    cuda.syncthreads()
    Y[t] = load2(tile, uint32(2 * (uint32(31) - t)))


def _eights_kernel(X, Y):
    """Rows of eight through shared memory, where pairs change places, upside down."""
    tile = half_tile(8, 256)
    t = uint32(cuda.threadIdx.x)
    a = read8(X, t, uint32(8))
    for n in range(4):
        store2(tile, uint32(8 * t + 2 * n), a[3 - n])
    b = load8(tile, uint32(8 * t))
    write8(Y, uint32(31 - t), uint32(0), b[0], b[1], b[2], b[3], True)


def _whole(count, load, first):
    """A tile of so many elements, and what lies from ``first`` on, read at once."""

    def kernel(X, Y):
        tile = half_tile(0, count) if load is not load4_at_byte else shared_tile(0, count)
        t = uint32(cuda.threadIdx.x)
        if t < uint32(count):
            tile[t] = X[t]
        cuda.syncthreads()
        Y[t] = load(tile, int64(first) if load is load4_at_byte else uint32(first))[0]

    return kernel


def load_pair(tile, first):
    return (load2(tile, first),)


@pytest.mark.parametrize(
    "count, load, right, wrong",
    [
        (32, load4_at_byte, 112, [(Misaligned, 8), (Misaligned, 4), (OutOfBounds, 128)]),
        (16, load_pair, 14, [(Misaligned, 3), (OutOfBounds, 16)]),
        (16, load8, 8, [(Misaligned, 4), (OutOfBounds, 16)]),
    ],
)
def test_what_is_read_at_once_lies_whole_in_its_tile(count, load, right, wrong):
    x, kind = (ramp(32), np.float32) if load is load4_at_byte else (halves(32), np.uint32)
    y = np.zeros(32, kind)
    emulator.launch(_whole(count, load, right), 1, 32, x, y, shared_bytes=128)
    first = right // 4 if load is load4_at_byte else right
    assert (y == (x[first] if load is load4_at_byte else first + 1 | first + 2 << 16)).all()
    for error, first in wrong:
        with pytest.raises(error):
            emulator.launch(_whole(count, load, first), 1, 32, x, y, shared_bytes=128)


Z = np.zeros((8, 16), np.float32)
# Of 16-bit pairs: an odd pitch, an odd start, gaps; a row less, a column less.
PAIRS = [
    (Misaligned, halves(8, 9)[:, 1:]),
    (Misaligned, halves(8, 12)[:, 1:9]),
    (Misaligned, halves(8, 16)[:, ::2]),
    (OutOfBounds, halves(7, 8)),
    (OutOfBounds, halves(8, 8)[:, :7]),
]
ACCESSED = {
    # kernel, its arrays, elements that are loaded from X and stored to Y; faulty arrays
    "fours": (
        (_global_kernel, (ramp(8, 16), Z), 128, 128),
        [(Misaligned, (ramp(8, 17)[:, 1:], Z)), (OutOfBounds, (ramp(7, 16), Z))],
    ),
    "pairs": (
        (_pair_kernel, (ramp(8, 8), Z[:, :8]), 64, 64),
        [
            (error, arrays)
            for error, x in ((Misaligned, ramp(8, 9)), (OutOfBounds, ramp(8, 8)[:, :7]))
            for arrays in ((x, Z[:, :8]), (ramp(8, 8), x))
        ],
    ),
    "write2": (
        (_write2_kernel, (halves(32, 2), halves(8, 8)), 64, 64),
        [(error, (halves(32, 2), y)) for error, y in PAIRS],
    ),
    "read2": (
        (_twos_kernel, (halves(8, 8), np.zeros(32, np.uint32)), 64, 32),
        [(error, (x, np.zeros(32, np.uint32))) for error, x in PAIRS],
    ),
    "eights": (
        (_eights_kernel, (halves(32, 16), halves(32, 8)), 256, 256),
        [
            *(
                (error, (x, halves(32, 8)))
                for error, x in (
                    (Misaligned, halves(32, 20)),
                    (Misaligned, halves(32, 32)[:, 4:20]),
                    (OutOfBounds, halves(31, 16)),
                    (OutOfBounds, halves(32, 16)[:, :15]),
                )
            ),
            (Misaligned, (halves(32, 16), halves(32, 12))),
            (OutOfBounds, (halves(32, 16), halves(31, 8))),
            (OutOfBounds, (halves(32, 16), halves(32, 8)[:, :7])),
        ],
    ),
}


@pytest.mark.parametrize("name", ACCESSED)
def test_accesses_of_several_elements_are_counted_and_checked(name):
    (kernel, arrays, loads, stores), faulty = ACCESSED[name]
    counts = emulator.launch(kernel, 1, 32, *arrays, shared_bytes=528)
    assert (counts.loads["X"], counts.stores["Y"]) == (loads, stores)
    sizes = counts.load_bytes["X"], counts.store_bytes["Y"]
    assert sizes == (loads * arrays[0].itemsize, stores * arrays[1].itemsize)
    for error, wrong in faulty:
        with pytest.raises(error):
            emulator.launch(kernel, 1, 32, *wrong, shared_bytes=528)


@pytest.mark.parametrize("count", range(9))
def test_copy8_async_reads_no_more_than_it_counts(count):
    # The row ends where the copy does.
    x = halves(32, 16)[:, : 8 + count]
    counts = emulator.launch(_copy8_kernel, 1, 32, x, halves(32, 8), count, shared_bytes=528)
    assert counts.loads["X"] == 32 * count and counts.load_bytes["X"] == 64 * count
    if count < 8:
        with pytest.raises(OutOfBounds):
            emulator.launch(_copy8_kernel, 1, 32, x, halves(32, 8), count + 1, shared_bytes=528)


def test_copies_of_eight_are_aligned():
    y = halves(32, 8)
    for x, at in ((halves(32, 20), 0), (halves(32, 24)[:, 4:], 0), (halves(32, 16), 4)):
        with pytest.raises(Misaligned):
            kernel = _make_copy(copy8_async, 8, half_tile, 0, at)
            emulator.launch(kernel, 1, 32, x, y, 8, shared_bytes=1024)


# --- tiles of 8 x 8 --------------------------------------------------------------------------


def _make_ldmatrix(load):
    def kernel(X, I, Y):
        tile = half_tile(16, 1024)
        t = uint32(cuda.threadIdx.x)
        for n in range(32):
            tile[uint32(32 * n + t)] = X[uint32(32 * n + t)]
        cuda.syncthreads()
        w = load(tile, uint32(I[t]))
        Y[t, 0], Y[t, 1], Y[t, 2], Y[t, 3] = w[0], w[1], w[2], w[3]

    return kernel


LDMATRIX = {"rows": _make_ldmatrix(ldmatrix), "transposed": _make_ldmatrix(ldmatrix_transposed)}
LANES = np.arange(32)


@pytest.mark.parametrize("kind", LDMATRIX)
@pytest.mark.parametrize(
    "lane, place, error", [(5, 4, Misaligned), (31, 1024, OutOfBounds), (0, 1, Misaligned)]
)
def test_ldmatrix_checks_every_row(kind, lane, place, error):
    index = (8 * LANES).astype(np.int32)
    index[lane] = place
    arrays = (halves(1024), index, np.zeros((32, 4), np.uint32))
    with pytest.raises(error) as caught:
        emulator.launch(LDMATRIX[kind], 1, 32, *arrays, shared_bytes=4096)
    assert caught.value.array == "tile" and caught.value.thread == (lane, 0, 0)


def _ldmatrix_of_some(X, Y):
    tile = half_tile(0, 256)
    t = uint32(cuda.threadIdx.x)
    for n in range(8):
        tile[uint32(8 * t + n)] = X[t, n]
    cuda.syncthreads()
    if t < uint32(24):
        w = ldmatrix(tile, uint32(8 * t))
        Y[t] = w[0]


def _mma_of_some(X, Y):
    t = uint32(cuda.threadIdx.x)
    rC = cuda.local.array(4, float32)
    for n in range(4):
        rC[n] = float32(0.0)
    a = uint32(X[t, 0])
    if t != uint32(7):
        mma_f16(rC, 0, 2, a, a, a, a, a, a)
    Y[t] = uint32(rC[0])


@pytest.mark.parametrize("kernel", [_ldmatrix_of_some, _mma_of_some])
def test_all_lanes_of_a_warp_take_part(kernel):
    arrays = (halves(32, 8), np.zeros(32, np.uint32))
    with pytest.raises(BarrierDivergence):
        emulator.launch(kernel, 1, 32, *arrays, shared_bytes=512)


# --- products of 16 x 8 x 16 -----------------------------------------------------------------


def fragments(matrix):
    """A 16 x 16 or 16 x 8 matrix of 16-bit elements as words (32, 4 or 2)."""
    m = matrix.astype(np.uint32)
    g, t = LANES // 4, LANES % 4
    if m.shape == (16, 16):
        places = [(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]
        words = [m[row, col] | m[row, col + 1] << 16 for row, col in places]
    else:
        words = [m[2 * t + k, g] | m[2 * t + 1 + k, g] << 16 for k in (0, 8)]
    return np.stack(words, axis=1)


def accumulators(C):
    """A 16 x 8 matrix as (32, 4): c0, c1, c2, c3."""
    g, t = LANES // 4, LANES % 4
    return np.stack([C[g, 2 * t], C[g, 2 * t + 1], C[g + 8, 2 * t], C[g + 8, 2 * t + 1]], axis=1)


def _make_mma(mma, low, high):
    def kernel(W, X, Y):
        t = uint32(cuda.threadIdx.x)
        rC = cuda.local.array(8, float32)
        for n in range(8):
            rC[n] = X[t, n]
        mma(rC, low, high, W[t, 0], W[t, 1], W[t, 2], W[t, 3], W[t, 4], W[t, 5])
        for n in range(8):
            Y[t, n] = rC[n]

    return kernel


FORMATS = {"float16": (mma_f16, "f16"), "bfloat16": (mma_bf16, "bf16")}
every_format = pytest.mark.parametrize("kind", FORMATS)


def multiply(device, kind, A, B, C, low=0, high=2):
    """A B + C by the instruction, and what A and B are once rounded; the rest of rC must stay."""
    mma, short = FORMATS[kind]
    A, B = to_bits(A, short), to_bits(B, short)
    words = np.concatenate([fragments(A), fragments(B)], axis=1)
    registers = np.full((32, 8), 77, np.float32)
    own = [low, low + 1, high, high + 1]
    registers[:, own] = accumulators(C.astype(np.float32))
    _, _, made = run(
        device, _make_mma(mma, low, high), words, registers, np.zeros((32, 8), np.float32)
    )
    others = np.setdiff1d(np.arange(8), own)
    assert (made[:, others] == 77).all()
    D = np.empty((16, 8), np.float32)
    g, t = LANES // 4, LANES % 4
    for n, place in enumerate(own):
        D[g + 8 * (n // 2), 2 * t + n % 2] = made[:, place]
    return D, to_numbers(A, short), to_numbers(B, short)


@every_format
def test_mma_of_random_numbers(device, kind):
    rng = np.random.default_rng(3)
    A, B, C = (rng.standard_normal(shape) for shape in ((16, 16), (16, 8), (16, 8)))
    A, B = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000 for x in (A, B))
    A, B = A.view(np.float32), B.view(np.float32)
    with count_accesses() as counts:
        D, A, B = multiply(device, kind, A, B, C)
    assert device == "gpu" or counts.instructions["mma"] == 1
    exact = A @ B + C.astype(np.float32)
    # Products are exact; of 17 terms the sums are of single precision or somewhat less.
    assert (np.abs(D - exact) <= 2**-19 * (np.abs(A) @ np.abs(B) + np.abs(C))).all()


# name -> (kind, an element of A, one of B, one of C, A B + C)
CORNERS = {
    "subnormals": ("float16", 2.0**-24, 2.0**-24, 0.0, 2.0**-48),
    "subnormals of bfloat16": ("bfloat16", 2.0**-130, 2.0**20, 0.0, 2.0**-110),
    "the largest of float16": ("float16", 65504.0, 65504.0, 1.0, 65504.0**2),
    "beyond float16": ("float16", 60000.0, 2.0, -60000.0, 60000.0),
    "overflow": ("bfloat16", 2.0**100, 2.0**100, 0.0, INF),
    "infinity": ("float16", INF, 2.0, 1.0, INF),
    "minus infinity": ("bfloat16", -INF, 2.0, 1.0, -INF),
    "0 times infinity": ("float16", INF, 0.0, 1.0, NAN),
    "infinities of both signs": ("bfloat16", INF, 1.0, -INF, NAN),
    "NaN in A": ("float16", NAN, 1.0, 0.0, NAN),
    "NaN in B": ("bfloat16", 1.0, NAN, 0.0, NAN),
    "NaN in C": ("float16", 1.0, 1.0, NAN, NAN),
    "infinity in C": ("float16", 1.0, 1.0, -INF, -INF),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_mma_at_the_ends_of_the_formats(device, corner):
    kind, a, b, c, want = CORNERS[corner]
    A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    A[3, 9], B[9, 5], C[3, 5] = a, b, c
    D, _, _ = multiply(device, kind, A, B, C)
    assert D[3, 5] == want or (np.isnan(D[3, 5]) and np.isnan(want))
    if np.isfinite(a):
        others = np.full(D.shape, True)
        others[3, 5] = others[:, 5] = False
        assert (D[others] == 0).all()  # but in B's column, 0 times what is not finite


# --- pairs of 16 bits ------------------------------------------------------------------------


def _make_pack(pack):
    def kernel(X, Y):
        t = uint32(cuda.threadIdx.x)
        Y[t] = pack(X[t, 0], X[t, 1])

    return kernel


PACKS = {"float16": _make_pack(pack_f16), "bfloat16": _make_pack(pack_bf16)}
MAX = float(np.finfo(np.float32).max)
# (float32, the bits of the nearest)
ROUNDED = {
    "float16": [
        (0.0, 0x0000), (-0.0, 0x8000), (1.0, 0x3C00), (-2.0, 0xC000),
        # ties go to even
        (1 + 2**-11, 0x3C00), (1 + 3 * 2**-11, 0x3C02), (-1 - 2**-11, 0xBC00),
        (1 + 2**-11 + 2**-20, 0x3C01), (1 + 3 * 2**-11 - 2**-20, 0x3C01),
        # the largest, and infinity from half a step beyond on
        (65504.0, 0x7BFF), (65519.99, 0x7BFF), (65520.0, 0x7C00), (-65520.0, 0xFC00),
        (1e30, 0x7C00), (INF, 0x7C00), (-INF, 0xFC00),
        # subnormals, and 0 below half of the least
        (2**-14, 0x0400), (2**-14 - 2**-24, 0x03FF), (2**-24, 0x0001), (-(2**-24), 0x8001),
        (1.5 * 2**-24, 0x0002), (2.5 * 2**-24, 0x0002), (2**-25, 0x0000), (2**-25 + 2**-40, 0x0001),
        (2**-14 - 2**-25, 0x0400), (1e-40, 0x0000), (-1e-40, 0x8000),
    ],
    "bfloat16": [
        (0.0, 0x0000), (-0.0, 0x8000), (1.0, 0x3F80), (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (-1 - 2**-8, 0xBF80),
        (1 + 2**-8 + 2**-20, 0x3F81), (1 + 3 * 2**-8 - 2**-20, 0x3F81),
        (65520.0, 0x4780), (255 * 2.0**120, 0x7F7F), (255.25 * 2.0**120, 0x7F7F),
        (255.5 * 2.0**120, 0x7F80), (-255.5 * 2.0**120, 0xFF80), (MAX, 0x7F80), (-MAX, 0xFF80),
        (INF, 0x7F80), (-INF, 0xFF80),
        (2**-126, 0x0080), (2**-127, 0x0040), (2**-133, 0x0001), (-(2**-133), 0x8001),
        (1.5 * 2**-133, 0x0002), (2.5 * 2**-133, 0x0002), (2**-134, 0x0000),
        (2**-134 + 2**-140, 0x0001), (2**-126 - 2**-134, 0x0080),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ROUNDED)
def test_pack_rounds_to_nearest_even(device, kind):
    table = ROUNDED[kind]
    assert len(table) <= THREADS
    x = np.zeros((32, 2), np.float32)
    values, want = zip(*table, strict=True)
    x[: len(table), 0] = values
    x[: len(table), 1] = values[::-1]
    _, y = run(device, PACKS[kind], x, np.zeros(32, np.uint32))
    bits = y[: len(table)]
    assert [hex(n) for n in bits & 0xFFFF] == [hex(n) for n in want]
    assert [hex(n) for n in bits >> 16] == [hex(n) for n in want[::-1]]


@pytest.mark.parametrize("kind", PACKS)
def test_pack_keeps_nan(device, kind):
    x = np.ones((32, 2), np.float32)
    bits = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]
    x[:5, 0] = x[5:10, 1] = np.array(bits, np.uint32).view(np.float32)
    _, y = run(device, PACKS[kind], x, np.zeros(32, np.uint32))
    halves_of = (np.array(half, np.uint16) for half in (y & 0xFFFF, y >> 16))
    low, high = (to_numbers(bits, FORMATS[kind][1]) for bits in halves_of)
    assert np.isnan(low[:5]).all() and np.isnan(high[5:10]).all()
    assert (low[5:] == 1).all() and (high[:5] == 1).all()


@pytest.mark.parametrize(
    "kind, pack", [("float16", pack_positive_f16), ("bfloat16", pack_positive_bf16)]
)
def test_pack_of_what_is_positive(device, kind, pack):
    table = [x for x in ROUNDED[kind] if x[0] or not x[1]]  # of -0 either
    x = np.zeros((32, 2), np.float32)
    x[-1] = np.nan, -1.0
    x[: len(table), 0] = x[: len(table), 1][::-1] = [value for value, _ in table]
    _, y = run(device, _make_pack(pack), x, np.zeros(32, np.uint32))
    bits, want = y[: len(table)], [0 if value < 0 else n for value, n in table]
    assert [hex(n) for n in bits & 0xFFFF] == [hex(n) for n in want]
    assert [hex(n) for n in bits >> 16] == [hex(n) for n in want[::-1]]
    last = to_numbers(y[-1:].astype(np.uint16), FORMATS[kind][1])
    assert np.isnan(last).all() and y[-1] >> 16 == 0


# --- atomic additions ------------------------------------------------------------------------


def _make_add_two(add):
    """Every warp adds to the same 8 x 8 elements; the pairs of one row are left out."""

    def kernel(X, Y, skipped):
        t = uint32(cuda.threadIdx.x)
        lane = uint32(t % uint32(32))
        row, col = uint32(lane // uint32(4)), uint32(2 * (lane % uint32(4)))
        add(Y, row, col, X[t, 0], X[t, 1], row != uint32(skipped))

    return kernel


ADDS = {"pair": _make_add_two(add_pair), "vector": _make_add_two(add_pair_vector)}


@pytest.mark.parametrize("kind", ADDS)
def test_added_pairs_are_counted_and_checked(kind):
    x = ramp(32, 2)
    counts = emulator.launch(ADDS[kind], 1, 32, x, np.zeros((8, 8), np.float32), 3)
    assert (counts.loads["Y"], counts.stores["Y"]) == (56, 56)
    # A row that is left out need not be there.
    emulator.launch(ADDS[kind], 1, 32, x, np.zeros((7, 8), np.float32), 7)
    whole = np.zeros((8, 8), np.float32)
    for target in (whole[:7], whole[:, :7]):
        with pytest.raises(OutOfBounds):
            emulator.launch(ADDS[kind], 1, 32, x, target, 0)


def _add_fours(X, Y):
    """Every warp adds to the same 8 x 16 elements, four at once."""
    t = uint32(cuda.threadIdx.x)
    row, col = uint32(t % uint32(32) // uint32(4)), uint32(4 * (t % uint32(4)))
    add_four_vector(Y, row, col, X[t, 0], X[t, 1], X[t, 2], X[t, 3])


def test_added_fours_are_counted_and_aligned():
    x = ramp(32, 4)
    counts = emulator.launch(_add_fours, 1, 32, x, np.zeros((8, 16), np.float32))
    assert (counts.loads["Y"], counts.stores["Y"]) == (128, 128)
    for target in (np.zeros((8, 18), np.float32), np.zeros((8, 20), np.float32)[:, 2:18]):
        with pytest.raises(Misaligned):
            emulator.launch(_add_fours, 1, 32, x, target)


def test_pairs_added_at_once_are_aligned():
    x = ramp(32, 2)
    for target in (np.zeros((8, 9), np.float32), np.zeros((8, 10), np.float32)[:, 1:9]):
        emulator.launch(ADDS["pair"], 1, 32, x, target, 3)
        with pytest.raises(Misaligned):
            emulator.launch(ADDS["vector"], 1, 32, x, target, 3)


# --- named barriers --------------------------------------------------------------------------


def _meet(X, barrier, threads, waits):
    if waits:
        sync_named(barrier, threads)
    else:
        arrive_named(barrier, threads)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "barrier, threads, message",
    [
        (0, 64, "barrier must be an integer from 1 to 15, got 0"),
        (16, 64, "barrier must be an integer from 1 to 15, got 16"),
        (-1, 64, "barrier must be an integer from 1 to 15, got -1"),
        (1, 0, "threads must be a multiple of 32 from 32 to 1024, got 0"),
        (1, 48, "threads must be a multiple of 32 from 32 to 1024, got 48"),
        (1, 1056, "threads must be a multiple of 32 from 32 to 1024, got 1056"),
    ],
)
def test_named_barriers_check_what_they_are_given(barrier, threads, message, waits):
    with pytest.raises(BarrierMisuse, match=f"_named: {message}\n") as caught:
        emulator.launch(_meet, 1, 64, ramp(1), barrier, threads, waits)
    assert "_named(barrier, threads)" in caught.value.line


@pytest.mark.parametrize("barrier, threads", [(1, 64), (15, 64)])
def test_named_barriers_within_their_limits(barrier, threads):
    emulator.launch(_meet, 1, 64, ramp(1), barrier, threads, False)
    emulator.launch(_meet, 1, 64, ramp(1), barrier, threads, True)
