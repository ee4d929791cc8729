"""Two speeds that no kernel on Hopper's tensor cores can exceed, measured by one kernel each.

They are the speed of matrix products whose operands stay in shared memory, and the speed of
exponentials.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from fa_numba import device
from fa_numba.device import Kernel, array_type, cuda, float32, types, uint32
from fa_numba.intrinsics.arithmetic import exp2
from fa_numba.intrinsics.bulk_copy import fence_async_proxy
from fa_numba.intrinsics.shared import half_tile
from fa_numba.intrinsics.warpgroup import multiply_f16, wait_products

from ..lab.measure.bandwidth import speed_of
from ..lab.measure.check import WrongResult
from ..lab.measure.timing import Timing

# Sizes of a product: rows of a warpgroup, columns, and summed elements. An instruction sums 16.
ROWS, COLUMNS, SUMMED = 64, 128, 64
STEPS = SUMMED // 16
GROUPS = 4  # warpgroups of a thread block: while one waits for its products, others multiply
MULTIPLIERS = 128 * GROUPS
TILE_A, TILE_B = ROWS * SUMMED, COLUMNS * SUMMED
RESULTS = ROWS * COLUMNS // 128  # registers of a thread
ONE = 0x3C00  # in float16
PRODUCTS = 32768
# Independent chains of exponentials per thread, threads of a thread block, and thread blocks per
# multiprocessor.
CHAINS, EXP_THREADS, EXP_BLOCKS = 8, 256, 8
EXPONENTIALS = 16384
# The solution of x = 2^-x
FIXED_POINT = 0.6411857445


@cache
def make_multiply() -> Kernel:
    """Return the kernel that multiplies two tiles in shared memory repeatedly by wgmma.

    The kernel takes the arguments Y and `steps`. Each warpgroup adds up `steps` matrix products.
    All elements of the tiles are 1. Each thread stores one element of the sum in Y: (threads of
    the grid,).
    """

    def multiply(Y, steps):
        sA, sB = half_tile(0, TILE_A), half_tile(TILE_A, TILE_B)
        rC = cuda.local.array(RESULTS, float32)
        thread = uint32(cuda.threadIdx.x)
        at = thread
        while at < uint32(TILE_B):
            sB[at] = ONE
            if at < uint32(TILE_A):
                sA[at] = ONE
            at = uint32(at + MULTIPLIERS)
        for e in range(RESULTS):
            rC[e] = float32(0.0)
        fence_async_proxy()
        cuda.syncthreads()
        step = uint32(0)
        while step < uint32(steps):
            multiply_f16(rC, COLUMNS, sA, 0, ROWS, 0, sB, 0, COLUMNS, 0, STEPS, 1)
            wait_products(rC, RESULTS, 0)
            step = uint32(step + 1)
        Y[uint32(cuda.blockIdx.x * MULTIPLIERS) + thread] = rC[0]

    arguments = (array_type(1), types.int32)
    return Kernel(multiply, arguments, MULTIPLIERS, 2 * (TILE_A + TILE_B), 1)


@cache
def make_exponentials() -> Kernel:
    """Return the kernel that computes x = 2^-x repeatedly.

    The kernel takes the arguments Y and `steps`. Each thread has CHAINS independent values of x.
    The thread computes 2^-x for all of them `steps` times. Then the thread stores the sum of its
    values in Y: (threads of the grid,).
    """

    def exponentials(Y, steps):
        r = cuda.local.array(CHAINS, float32)
        for e in range(CHAINS):
            r[e] = float32(0.0)
        step = uint32(0)
        while step < uint32(steps):
            for e in range(CHAINS):
                r[e] = exp2(-r[e])
            step = uint32(step + 1)
        total = float32(0.0)
        for e in range(CHAINS):
            total += r[e]
        Y[uint32(cuda.blockIdx.x * EXP_THREADS) + uint32(cuda.threadIdx.x)] = total

    arguments = (array_type(1), types.int32)
    return Kernel(exponentials, arguments, EXP_THREADS, 0, EXP_BLOCKS)


def measure_products(multiprocessors: int, repeats: int) -> Timing:
    """Measure the speed of matrix products whose operands stay in shared memory, in TFLOP/s.

    The kernel is launched with one thread block per multiprocessor. `multiprocessors` is the number
    of multiprocessors of the GPU. `repeats` is the number of timed launches.
    """
    kernel = partial(_measured, make_multiply(), multiprocessors, PRODUCTS, repeats)
    work = 2 * GROUPS * ROWS * COLUMNS * SUMMED * multiprocessors * PRODUCTS
    return kernel(float(SUMMED * PRODUCTS), work)


def measure_exponentials(multiprocessors: int, repeats: int) -> Timing:
    """Measure the speed of exponentials, in 10^12 exponentials per second.

    `multiprocessors` is the number of multiprocessors of the GPU. `repeats` is the number of timed
    launches.
    """
    blocks = EXP_BLOCKS * multiprocessors
    kernel = partial(_measured, make_exponentials(), blocks, EXPONENTIALS, repeats)
    return kernel(CHAINS * FIXED_POINT, CHAINS * EXP_THREADS * blocks * EXPONENTIALS)


MEASURES: dict[str, Callable[[int, int], Timing]] = {
    "wgmma-resident": measure_products,
    "exponentials": measure_exponentials,
}


def _measured(
    kernel: Kernel, blocks: int, steps: int, repeats: int, wanted: float, work: float
) -> Timing:
    """Check the results of a kernel, time it, and return its speed in 10^12 operations per second.

    The kernel is launched with `blocks` thread blocks and with the argument `steps`. `repeats` is
    the number of timed launches. `work` is the number of operations of a launch. Raise WrongResult
    if a thread stores another number than `wanted`.
    """
    Y = device.empty((blocks * kernel.threads,))
    argument = device.argument(Y)

    def run() -> None:
        device.launch(kernel, (blocks, 1, 1), (argument, steps))

    run()
    check(device.copied_to_host(Y), wanted)
    return speed_of(work, device.time_ms(run, repeats=repeats, warmup=2, flush_l2=False))


def check(found: np.ndarray, wanted: float) -> None:
    """Raise WrongResult if a number in `found` differs from `wanted` by more than a tolerance.

    The relative tolerance is 1e-5, because the instruction for exp2 is not exact.
    """
    wrong = np.flatnonzero(~(np.abs(found - wanted) <= 1e-5 * wanted))
    if wrong.size:
        at = int(wrong[0])
        raise WrongResult(f"thread {at} must compute {wanted}, got {found[at]}")
