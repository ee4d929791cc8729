"""Measures the latency of a GPU's memories by pointer chasing.

One warp reads the number of the next element from each element that it reads. A read can therefore
begin only when the read before it has ended, and the time of many reads / their number is the
latency of one read. The elements are LINE bytes apart, and are visited in a random order. The
memory that answers depends on the footprint, which is the size of the array: L1, L2 or DRAM. A
second kernel follows elements of shared memory.
"""

from functools import cache, partial

import numpy as np

from fa_numba import device
from fa_numba.device import Kernel, cuda, types, uint32
from fa_numba.intrinsics.shared import index_tile

from .check import WrongResult
from .timing import Timing

LINE = 128  # bytes from one element to the next, in the order of addresses
WORDS = LINE // 4
THREADS, UNROLL = 32, 16
SHARED_WORDS = 4096  # 16 KiB, which is the footprint in shared memory
SHARED_BYTES = 4 * SHARED_WORDS
SEED = 0
# Steps of the longer of two runs, in addition to the steps of the shorter run.
STEPS = 1 << 14
# Most steps of the shorter run. They bring the lines of a small footprint into L1.
MOST_FIRST = 2048


def cycle(lines: int) -> np.ndarray:
    """Return a random order of lines. Each line occurs once, and line 0 is the first line.

    Parameters
    ----------
    lines : int
        Number of lines of LINE bytes.

    Returns
    -------
    ndarray of uint32, shape (lines,)
        Numbers of lines.
    """
    order = np.arange(lines, dtype=np.uint32)
    np.random.default_rng(SEED).shuffle(order[1:])
    return order


def chain(order: np.ndarray) -> np.ndarray:
    """Return the array that a kernel follows, as a cycle through the lines in the given order.

    Parameters
    ----------
    order : ndarray of uint32, shape (lines,)
        Numbers of lines, as `cycle` returns them.

    Returns
    -------
    ndarray of uint32, shape (lines * WORDS,)
        The first element of a line contains the index of the first element of the next line. All
        other elements are 0.
    """
    X = np.zeros((len(order), WORDS), np.uint32)
    X[order, 0] = np.roll(order, -1) * WORDS
    return X.ravel()


@cache
def make_chase_global() -> Kernel:
    """Return the kernel that follows a chain in global memory, launched with one thread block.

    The kernel starts at element Y[0] of the chain X, makes `steps` steps, and stores the index of
    the element that it has reached in Y[0]. `steps` must be a multiple of UNROLL.

    Returns
    -------
    Kernel
        The kernel, with the arguments X, Y and steps.
    """

    def chase_global(X, Y, steps):
        at = Y[0]
        step = uint32(0)
        while step < uint32(steps):
            for _ in range(UNROLL):
                at = X[at]
            step = uint32(step + UNROLL)
        cuda.syncthreads()  # all lanes have read Y[0]
        if cuda.threadIdx.x == 0:
            Y[0] = at

    return Kernel(chase_global, _ARGUMENTS, THREADS, 0, 1)


@cache
def make_chase_shared() -> Kernel:
    """Return the kernel that copies a chain of SHARED_WORDS elements, and follows the copy.

    The copy is in shared memory. The kernel is launched with one thread block, and has the
    arguments of the kernel that `make_chase_global` returns.

    Returns
    -------
    Kernel
        The kernel, with the arguments X, Y and steps.
    """

    def chase_shared(X, Y, steps):
        s = index_tile(0, SHARED_WORDS)
        n = uint32(cuda.threadIdx.x)
        while n < uint32(SHARED_WORDS):
            s[n] = X[n]
            n = uint32(n + THREADS)
        at = Y[0]
        cuda.syncthreads()
        step = uint32(0)
        while step < uint32(steps):
            for _ in range(UNROLL):
                at = s[at]
            step = uint32(step + UNROLL)
        if cuda.threadIdx.x == 0:
            Y[0] = at

    return Kernel(chase_shared, _ARGUMENTS, THREADS, SHARED_BYTES, 1)


# Contiguous arrays, so that an address is the base address + 4 x the index.
_ARGUMENTS = (types.Array(types.uint32, 1, "C"), types.Array(types.uint32, 1, "C"), types.int32)


def first_steps(lines: int) -> int:
    """Return the number of steps of the shorter run: one cycle, or MOST_FIRST for long cycles.

    Parameters
    ----------
    lines : int
        Number of lines of the cycle.

    Returns
    -------
    int
        A multiple of UNROLL.

    Examples
    --------
    >>> first_steps(10), first_steps(10**6)
    (16, 2048)
    """
    return -(-min(lines, MOST_FIRST) // UNROLL) * UNROLL


def measure_global(footprint: int, repeats: int, l2_bytes: int) -> Timing:
    """Measure the latency of reads of global memory.

    Parameters
    ----------
    footprint : int
        Size of the array in bytes.
    repeats : int
        Number of timed pairs of runs.
    l2_bytes : int
        Size of the L2 cache. If the footprint is larger, L2 is flushed before each run. Otherwise
        one run through the complete cycle brings the array into L2 before the timed runs.

    Returns
    -------
    Timing
        Nanoseconds per read.

    Raises
    ------
    WrongResult
        If the kernel reached another element than the last element of the steps.
    """
    return _measure(make_chase_global(), footprint, repeats, footprint > l2_bytes)


def measure_shared(repeats: int) -> Timing:
    """Measure the latency of reads of shared memory, in an array of SHARED_BYTES.

    Parameters
    ----------
    repeats : int
        Number of timed pairs of runs.

    Returns
    -------
    Timing
        Nanoseconds per read.

    Raises
    ------
    WrongResult
        If the kernel reached another element than the last element of the steps.
    """
    return _measure(make_chase_shared(), SHARED_BYTES, repeats, False)


def _measure(kernel: Kernel, footprint: int, repeats: int, flush: bool) -> Timing:
    """Check and time a kernel that follows a chain of `footprint` bytes, and return ns per step.

    Each reading is the difference of two runs: one with `first_steps` steps, and one with STEPS
    more. The difference contains neither the launch nor the reads that bring lines into L1. Every
    run continues where the run before it ended. With `flush`, L2 is flushed before each run.
    """
    order = cycle(footprint // LINE)
    X, Y = device.to_gpu(chain(order)), device.to_gpu(np.zeros(1, np.uint32))
    arrays = device.argument(X), device.argument(Y)
    made = 0

    def run(steps: int) -> None:
        nonlocal made
        made += steps
        device.launch(kernel, (1, 1, 1), (*arrays, steps))

    first = first_steps(len(order))
    run(first if flush else -(-len(order) // UNROLL) * UNROLL)
    short, long = (
        device.time_ms(partial(run, steps), repeats=repeats, warmup=1, flush_l2=flush)
        for steps in (first, first + STEPS)
    )
    reached, expected = int(device.copied_to_host(Y)[0]), int(order[made % len(order)]) * WORDS
    if reached != expected:
        raise WrongResult(f"{made} steps must reach element {expected}, got {reached}")
    device.release_memory()
    return Timing.of([1e6 * (b - a) / STEPS for a, b in zip(short, long, strict=True)])
