"""What the backward kernel on Hopper's tensor cores does otherwise beyond d = 128: one consumer
makes S, P and dV, the other dP, dS and dK, and S passes between them through shared memory.
"""

from functools import cache

from fa_numba.device import cuda, device_function, float32, uint32
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, fence_mbarrier_init, init_mbarrier
from fa_numba.intrinsics.shared import load4, store4
from fa_numba.intrinsics.warpgroup import wait_products
from fa_numba.parts.wgmma import backward
from fa_numba.tiling.wgmma import GROUP
from fa_numba.tiling.wgmma_backward import STAGES


@cache
def make_begin_barriers(spec):
    """``begin_barriers(bars)``: and a place of S is full when each thread has stored its part. It
    is empty when that of Q is.
    """
    begin_others, full_s = backward.make_begin_barriers(spec), spec.barrier_of_scores

    @device_function
    def begin_barriers(bars):
        if cuda.threadIdx.x == 0:
            for s in range(STAGES):
                init_mbarrier(bars, full_s + s, GROUP)
            fence_mbarrier_init()
        begin_others(bars)

    return begin_barriers


@cache
def make_start_column(spec):
    """``start_column(rT)``: dK = 0, or dV = 0."""
    RK = spec.column_registers

    @device_function
    def start_column(rT):
        for e in range(RK):
            rT[e] = float32(0.0)

    return start_column


@cache
def make_wait_column(spec):
    """``wait_column(rT)``: dK, or dV, is there; one product more may be on its way."""
    RK = spec.column_registers

    @device_function
    def wait_column(rT):
        wait_products(rT, RK, 1)

    return wait_column


@cache
def make_probabilities(spec):
    """``probabilities(rS, scale, sL, at, ty)``: ST to PT = exp(ST - L), with a cap too."""
    return backward.softmax_of(spec)


@cache
def make_give_scores(spec):
    """``give_scores(sS, at, rS, bars, barrier)``: this thread's part of ST, for the one that has
    the same part in the other consumer.
    """
    RS = spec.TM * spec.TN

    @device_function
    def give_scores(sS, at, rS, bars, barrier):
        thread = uint32(uint32(cuda.threadIdx.x) % uint32(GROUP))
        for e in range(0, RS, 4):
            place = uint32(at + 4 * thread + GROUP * e)
            store4(sS, place, rS[e], rS[e + 1], rS[e + 2], rS[e + 3])
        arrive_mbarrier(bars, barrier)

    return give_scores


@cache
def make_take_scores(spec):
    """``take_scores(rS, sS, at)``: what ``give_scores`` gave."""
    RS = spec.TM * spec.TN

    @device_function
    def take_scores(rS, sS, at):
        thread = uint32(uint32(cuda.threadIdx.x) % uint32(GROUP))
        for e in range(0, RS, 4):
            four = load4(sS, uint32(at + 4 * thread + GROUP * e))
            for n in range(4):
                rS[e + n] = four[n]

    return take_scores
