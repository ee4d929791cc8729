"""Each intrinsic against NumPy: its emulation, and on a GPU the instruction itself."""

import math

import numpy as np
import pytest
from numba import types

from fa_numba import device as devices
from fa_numba import emulator
from fa_numba.device import DeviceArray, Kernel, array_type, cuda, float32, int32, uint32
from fa_numba.emulator import Misaligned, OutOfBounds, SharedHazard, UninitialisedRead
from fa_numba.intrinsics.arithmetic import exp2, log2, maximum
from fa_numba.intrinsics.async_copy import commit_async, copy1_async, copy4_async, wait_async
from fa_numba.intrinsics.global_memory import read4, write4
from fa_numba.intrinsics.shared import load4, shared_tile, store4

THREADS = 32
EPS = float(np.finfo(np.float32).eps)
INF, NAN = math.inf, math.nan


def run(device, kernel, *arrays, threads=THREADS, shared=4096, scalars=()):
    """`kernel` over one block; returns the arrays as it left them."""
    kinds = [array_type(a.ndim) for a in arrays] + [types.int32] * len(scalars)
    prepared = Kernel(kernel, tuple(kinds), threads, shared)
    with devices.using(device):
        if device == "emulator":
            copies = [a.copy() for a in arrays]
            devices.launch(prepared, (1, 1, 1), (*copies, *scalars))
            return copies
        remote = [devices.to_gpu(a) for a in arrays]
        views = [
            DeviceArray(r.__cuda_array_interface__["data"][0], a.shape, a.strides, r)
            for r, a in zip(remote, arrays, strict=True)
        ]
        devices.launch(prepared, (1, 1, 1), (*views, *scalars))
        devices.synchronize()
        return [r.copy_to_host() for r in remote]


def ramp(*shape):
    return np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)


# --- arithmetic ------------------------------------------------------------------------------


def _exp2_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    Y[t] = exp2(X[t])


def _log2_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    Y[t] = log2(X[t])


def _maximum_kernel(X, Y, Z):
    t = uint32(cuda.threadIdx.x)
    Z[t] = maximum(X[t], Y[t])


def padded(values, filler=1.0):
    return np.array(list(values) + [filler] * (THREADS - len(values)), np.float32)


def test_exp2(device):
    points = [0.0, -0.0, 1.0, -1.0, 0.5, 10.25, -20.125, 100.0, -100.0, 127.0, -125.0, 126.9]
    special = [INF, -INF, NAN, 200.0, -300.0, 1e30, -1e30]
    x = padded(points + special)
    _, y = run(device, _exp2_kernel, x, np.zeros_like(x))
    n = len(points)
    want = np.exp2(x[:n].astype(np.float64))
    assert np.all(np.abs(y[:n] / want - 1) <= 2**-22)  # PTX ISA: 2**-22.5, and the store's rounding
    assert y[0] == y[1] == 1.0
    assert y[n : n + 7].tolist()[:2] == [INF, 0.0] and np.isnan(y[n + 2])
    assert y[n + 3 : n + 7].tolist() == [INF, 0.0, INF, 0.0]


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
    _, _, z = run(device, _maximum_kernel, x, y, np.zeros_like(x))
    n = len(pairs)
    assert np.array_equal(z[:n], np.maximum(x[:n], y[:n]))
    assert z[n : n + 2].tolist() == [3.0, 3.0] and np.isnan(z[n + 2])
    assert z[n + 3 : n + 5].tolist() == [-INF, -INF]


# --- 16-byte accesses ------------------------------------------------------------------------


def _shared_kernel(X, Y):
    """Each thread stores 4 floats in reverse and loads those of its neighbour."""
    tile = shared_tile(8, 128)
    t = uint32(cuda.threadIdx.x)
    store4(tile, uint32(4 * t), X[4 * t + 3], X[4 * t + 2], X[4 * t + 1], X[4 * t])
    cuda.syncthreads()
    a = load4(tile, uint32(4 * ((t + 1) % uint32(32))))
    Y[4 * t], Y[4 * t + 1], Y[4 * t + 2], Y[4 * t + 3] = a[0], a[1], a[2], a[3]


def test_shared_load4_and_store4(device):
    x = ramp(128)
    _, y = run(device, _shared_kernel, x, np.zeros_like(x))
    want = np.roll(x.reshape(32, 4)[:, ::-1], -1, axis=0)
    assert np.array_equal(y.reshape(32, 4), want)


def _global_kernel(X, Y):
    t = uint32(cuda.threadIdx.x)
    row, col = uint32(t // uint32(4)), uint32(4 * (t % uint32(4)))
    a = read4(X, row, col)
    write4(Y, uint32(7 - row), col, a[3], a[2], a[1], a[0])


@pytest.mark.parametrize("pad", [0, 4])
def test_global_read4_and_write4(device, pad):
    x = ramp(8, 16 + pad)
    _, y = run(device, _global_kernel, x, np.full_like(x, -1))
    want = x[::-1, :16].reshape(8, 4, 4)[:, :, ::-1].reshape(8, 16)
    assert np.array_equal(y[:, :16], want) and (y[:, 16:] == -1).all()


def test_wide_accesses_are_counted_and_checked():
    x = ramp(8, 16)
    with devices.using("emulator"):
        counts = emulator.launch(_global_kernel, 1, 32, (x, np.zeros_like(x)))
    assert (counts.loads["X"], counts.stores["Y"]) == (128, 128)
    with pytest.raises(Misaligned):
        emulator.launch(_global_kernel, 1, 32, (ramp(8, 17)[:, 1:], np.zeros_like(x)))
    with pytest.raises(OutOfBounds):
        emulator.launch(_global_kernel, 1, 32, (ramp(7, 16), np.zeros_like(x)))


# --- asynchronous copies ---------------------------------------------------------------------


def _copy4_kernel(X, Y, count):
    tile = shared_tile(0, 128)
    t = uint32(cuda.threadIdx.x)
    copy4_async(tile, uint32(4 * t), X, t, uint32(4), count)
    commit_async()
    wait_async()
    cuda.syncthreads()
    for n in range(4):
        Y[t, n] = tile[uint32(4 * (uint32(31) - t) + n)]


@pytest.mark.parametrize("count", range(5))
def test_copy4_async(device, count):
    x = ramp(32, 8)
    _, y = run(device, _copy4_kernel, x, np.full((32, 4), -1, np.float32), scalars=(count,))
    want = np.zeros((32, 4), np.float32)
    want[:, :count] = x[::-1, 4 : 4 + count]
    assert np.array_equal(y, want)


def _copy1_kernel(X, Y, count):
    tile = shared_tile(4, 32)
    t = uint32(cuda.threadIdx.x)
    copy1_async(tile, t, X, t, uint32(1), int32(count))
    commit_async()
    wait_async()
    cuda.syncthreads()
    Y[t] = tile[uint32(31) - t] + float32(0.0)


@pytest.mark.parametrize("count", range(2))
def test_copy1_async_from_unaligned_rows(device, count):
    x = ramp(32, 3)
    _, y = run(device, _copy1_kernel, x, np.full(32, -1, np.float32), scalars=(count,))
    assert np.array_equal(y, x[::-1, 1] if count else np.zeros(32))


@pytest.mark.parametrize("count", range(5))
def test_a_copy_counts_what_it_reads(count):
    counts = emulator.launch(
        _copy4_kernel, 1, 32, (ramp(32, 8), ramp(32, 4), count), shared_bytes=512
    )
    assert counts.loads["X"] == 32 * count


def _copy_not_waited_for(X, Y):
    tile = shared_tile(0, 128)
    t = uint32(cuda.threadIdx.x)
    copy4_async(tile, uint32(4 * t), X, t, uint32(0), int32(4))
    commit_async()
    Y[t] = tile[4 * t]
    wait_async()


def _copy_not_committed(X, Y):
    tile = shared_tile(0, 128)
    t = uint32(cuda.threadIdx.x)
    copy4_async(tile, uint32(4 * t), X, t, uint32(0), int32(4))
    wait_async()
    Y[t] = tile[4 * t]
    commit_async()


def _copy_without_a_barrier(X, Y):
    tile = shared_tile(0, 128)
    t = uint32(cuda.threadIdx.x)
    copy4_async(tile, uint32(4 * t), X, t, uint32(0), int32(4))
    commit_async()
    wait_async()
    Y[t] = tile[4 * (uint32(31) - t)]


@pytest.mark.parametrize(
    "kernel", [_copy_not_waited_for, _copy_not_committed, _copy_without_a_barrier]
)
def test_a_copy_used_too_early_is_a_hazard(kernel):
    with pytest.raises((SharedHazard, UninitialisedRead)) as caught:
        emulator.launch(kernel, 1, 32, (ramp(32, 4), np.zeros(32, np.float32)), shared_bytes=512)
    assert caught.value.array == "tile"


def test_misaligned_copies_are_refused():
    y = np.zeros((32, 4), np.float32)
    with pytest.raises(Misaligned):
        emulator.launch(_copy4_kernel, 1, 32, (ramp(32, 9), y, 4), shared_bytes=512)
