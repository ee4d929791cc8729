"""Measures the bandwidth of a GPU's memories, and torch's speed of multiplying matrices.

The kernel `read_global` reads `footprint` bytes of global memory repeatedly. These bytes come from
L2 if they fit into L2, otherwise from DRAM. L1 serves no reads, because a multiprocessor never
reads a chunk that it has read recently. The kernel `read_shared` reads shared memory without bank
conflicts. Every access reads a chunk of 16 bytes.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.device import Kernel, array_type, cuda, float32, types, uint32
from fa_numba.intrinsics.global_memory import read4
from fa_numba.intrinsics.shared import load4, shared_tile
from fa_numba.problem import Problem

from ..record import Row
from . import peers
from .check import WrongResult
from .series import columns
from .timing import REPEATS, Timing, attempt, number

CHUNK = 16  # bytes of an access
UNROLL = 4  # loads that a thread issues before it uses their results
AT_A_TIME = 4 * UNROLL
THREADS, BLOCKS = 256, 1024
# AT_ONCE: the neighbouring chunks that all threads read in one step. STRIDE: chunks from one step
# to the next. 37 thread blocks' chunks are skipped, so that a multiprocessor reads a chunk again
# only after about a hundred steps, which is after megabytes.
AT_ONCE = THREADS * BLOCKS
STRIDE = AT_ONCE + 37 * THREADS
LEAST_BYTES = STRIDE * CHUNK
SHARED_THREADS, SHARED_FLOATS = 1024, 8192
SHARED_STRIDE = 4 * SHARED_THREADS
# Bytes and steps of one run. They take long compared with the launch.
BYTES, SHARED_STEPS = 32 * 2**30, 65536
MATMUL_SIZE = 8192


@cache
def make_read_global() -> Kernel:
    """Return the kernel that reads global memory. It is launched with BLOCKS thread blocks.

    Each thread reads `steps` chunks of 16 bytes, which are rows of X: (chunks, 4). It stores the
    sum of their numbers in Y: (threads of the grid,). If a thread reaches the end of X, it
    continues at the start.

    Returns
    -------
    Kernel
        The kernel, with the arguments X, Y and steps.
    """

    def read_global(X, Y, steps):
        r = cuda.local.array(AT_A_TIME, float32)
        rsum = cuda.local.array(4, float32)
        for e in range(4):
            rsum[e] = float32(0.0)
        thread = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        chunks = uint32(X.shape[0])
        at = thread
        step = uint32(0)
        while step < uint32(steps):
            for u in range(UNROLL):
                r[4 * u], r[4 * u + 1], r[4 * u + 2], r[4 * u + 3] = read4(X, at, 0)
                at = uint32(at + STRIDE)
                if at >= chunks:
                    at = uint32(at - chunks)
            for e in range(4 * UNROLL):
                rsum[e % 4] += r[e]
            step = uint32(step + UNROLL)
        Y[thread] = (rsum[0] + rsum[1]) + (rsum[2] + rsum[3])

    arguments = (array_type(2), array_type(1), types.int32)
    return Kernel(read_global, arguments, THREADS, 0, 2048 // THREADS)


@cache
def make_read_shared() -> Kernel:
    """Return the kernel that reads shared memory repeatedly.

    Each thread reads `steps` chunks of 16 bytes and stores the sum of their numbers in Y: (threads
    of the grid,). All numbers are 1. Two successive chunks of a thread are `stride` floats apart.
    `stride` is an argument of the kernel, and not a constant. Otherwise the compiler could omit
    reads of chunks that a thread has already read.

    Returns
    -------
    Kernel
        The kernel, with the arguments Y, steps and stride.
    """

    def read_shared(Y, steps, stride):
        s = shared_tile(0, SHARED_FLOATS)
        r = cuda.local.array(AT_A_TIME, float32)
        rsum = cuda.local.array(4, float32)
        for e in range(4):
            rsum[e] = float32(0.0)
        thread = uint32(cuda.threadIdx.x)
        at = thread
        while at < uint32(SHARED_FLOATS):
            s[at] = float32(1.0)
            at = uint32(at + SHARED_THREADS)
        cuda.syncthreads()
        at = uint32(thread * 4)
        step = uint32(0)
        while step < uint32(steps):
            for u in range(UNROLL):
                r[4 * u], r[4 * u + 1], r[4 * u + 2], r[4 * u + 3] = load4(s, at)
                at = uint32(uint32(at + stride) % SHARED_FLOATS)
            for e in range(4 * UNROLL):
                rsum[e % 4] += r[e]
            step = uint32(step + UNROLL)
        Y[uint32(cuda.blockIdx.x * SHARED_THREADS) + thread] = (rsum[0] + rsum[1]) + (
            rsum[2] + rsum[3]
        )

    arguments = (array_type(1), types.int32, types.uint32)
    return Kernel(read_shared, arguments, SHARED_THREADS, 4 * SHARED_FLOATS, 2)


def speed_of(work: float, milliseconds: Sequence[float]) -> Timing:
    """Return the work per second of several runs.

    Parameters
    ----------
    work : float
        Bytes or FLOPs of one run.
    milliseconds : sequence of float
        Time of each run.

    Returns
    -------
    Timing
        Percentiles of the speed: TB/s if `work` is in bytes, TFLOP/s if it is in FLOPs.

    Examples
    --------
    >>> speed_of(2e9, [1.0]).median
    2.0
    """
    return Timing.of([work / t / 1e9 for t in milliseconds])


def global_steps(footprint: int, total: int = BYTES) -> int:
    """Return the number of chunks that each thread reads in a run of about `total` bytes.

    Parameters
    ----------
    footprint : int
        Bytes that are read repeatedly.
    total : int
        Bytes of a run. If the footprint is larger than half of `total`, the run reads about twice
        the footprint.

    Returns
    -------
    int
        The number of chunks per thread, a multiple of UNROLL.

    Raises
    ------
    ValueError
        If the footprint is below LEAST_BYTES.
    """
    if footprint < LEAST_BYTES:
        raise ValueError(f"footprint must be at least {LEAST_BYTES} bytes, got {footprint}")
    steps = max(total, 2 * footprint) // (AT_ONCE * CHUNK)
    return -(-steps // UNROLL) * UNROLL


def measure_global(X: Any, footprint: int, repeats: int) -> Timing:
    """Measure the bandwidth of reading `footprint` bytes of global memory repeatedly.

    Parameters
    ----------
    X : array of float32, shape (chunks, 4)
        Ones on the GPU. The array must contain at least `footprint` bytes.
    footprint : int
        Bytes that are read repeatedly.
    repeats : int
        Number of timed runs.

    Returns
    -------
    Timing
        TB/s, summed over all threads.

    Raises
    ------
    WrongResult
        If a thread's sum of the numbers that it read is wrong.
    """
    steps = global_steps(footprint)
    part = device.argument(X[: footprint // CHUNK])
    return _timed(make_read_global(), BLOCKS, AT_ONCE, steps, repeats, part)


def measure_shared(multiprocessors: int, repeats: int) -> Timing:
    """Measure the bandwidth with which all multiprocessors together read shared memory.

    Parameters
    ----------
    multiprocessors : int
        Number of multiprocessors of the GPU.
    repeats : int
        Number of timed runs.

    Returns
    -------
    Timing
        TB/s, summed over all threads.

    Raises
    ------
    WrongResult
        If a thread's sum of the numbers that it read is wrong.
    """
    blocks = 2 * multiprocessors
    threads = blocks * SHARED_THREADS
    return _timed(make_read_shared(), blocks, threads, SHARED_STEPS, repeats, then=(SHARED_STRIDE,))


def _timed(
    kernel: Kernel, blocks: int, threads: int, steps: int, repeats: int, *first: Any,
    then: tuple[int, ...] = (),
) -> Timing:  # fmt: skip
    """Check and time a kernel, and return TB/s. Each of its threads reads `steps` chunks of ones.

    The kernel is launched with `blocks` thread blocks, which have `threads` threads in total. Its
    arguments are `first`, the array of sums, `steps`, and `then`.
    """
    Y = device.empty((threads,))
    arguments = (*first, device.argument(Y), steps, *then)

    def run() -> None:
        device.launch(kernel, (blocks, 1, 1), arguments)

    run()
    _check(device.copied_to_host(Y), 4 * steps)
    times = device.time_ms(run, repeats=repeats, warmup=2, flush_l2=False)
    return speed_of(threads * CHUNK * steps, times)


def _check(sums: np.ndarray, expected: float) -> None:
    wrong = np.flatnonzero(sums != expected)
    if wrong.size:
        at = int(wrong[0])
        raise WrongResult(f"the sum of what thread {at} reads must be {expected}, got {sums[at]}")


def measure_matmul(dtype: str, repeats: int) -> Timing:
    """Measure the speed at which torch multiplies two square matrices (float32 without TF32).

    Parameters
    ----------
    dtype : str
        Dtype of the matrices.
    repeats : int
        Timed runs.

    Returns
    -------
    Timing
        TFLOP/s.
    """
    run = peers.matmul(MATMUL_SIZE, dtype)
    times = device.time_ms(run, repeats=repeats, warmup=3, flush_l2=False)
    return speed_of(2 * MATMUL_SIZE**3, times)


def matmul_peak(experiment: str, dtype: str, machine: str) -> Iterator[Row]:
    """Yield one row with the speed at which torch multiplies two square matrices.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    dtype : str
        Dtype of the matrices.
    machine : str
        Name of the GPU.

    Yields
    ------
    Row
        The row. Its columns seqlen_q, seqlen_k and head_dim contain the size of the matrices.
    """
    speed, failure = attempt(measure_matmul, dtype, REPEATS)
    size, one = MATMUL_SIZE, Problem(1, 1, 1, 1, 1, 1, dtype=dtype)
    sizes = {"seqlen_q": size, "seqlen_k": size, "head_dim": size}
    common = columns(experiment, peers.MATMUL, one, machine, note=failure, **sizes)
    yield Row(metric="speed", unit="TFLOP/s", **number(speed), **common)
    peers.release()


def ones(nbytes: int) -> Any:
    """Return an array of ones on the GPU, with one row per chunk of 16 bytes.

    Parameters
    ----------
    nbytes : int
        Size in bytes.

    Returns
    -------
    array of float32, shape (nbytes // 16, 4)
        The array.
    """
    X = device.empty((nbytes // CHUNK, 4))
    small = np.ones((2**20, 4), np.float32)
    for first in range(0, X.shape[0], len(small)):
        part = X[first : first + len(small)]
        part.copy_to_device(small[: part.shape[0]])
    return X
