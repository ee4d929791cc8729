"""Places of tiles in shared memory, used in turn, and the barriers that say which are full."""

from functools import cache

from fa_numba.device import cuda, device_function, uint32
from fa_numba.intrinsics.mbarrier import arrive_mbarrier, fence_mbarrier_init, init_mbarrier


@cache
def make_begin_barriers(spec):
    """``begin_barriers(bars)``: one arrival fills a place. Every consumer warp empties one of K or
    V, every consumer warpgroup one of Q, and who brings K and V, which is told of it.
    """
    STAGES, Q_STAGES, groups = spec.stages, spec.q_stages, spec.consumers
    told = groups + spec.column_producers
    next_row, full_n, full_q, empty_q, full_k, full_v, empty_k, empty_v = spec.barrier_places

    @device_function
    def begin_barriers(bars):
        if cuda.threadIdx.x == 0:
            init_mbarrier(bars, next_row, 1)
            for s in range(Q_STAGES):
                init_mbarrier(bars, full_n + s, 1)
                init_mbarrier(bars, full_q + s, 1)
                init_mbarrier(bars, empty_q + s, told)
            for s in range(STAGES):
                init_mbarrier(bars, full_k + s, 1)
                init_mbarrier(bars, full_v + s, 1)
                init_mbarrier(bars, empty_k + s, 4 * groups)
                init_mbarrier(bars, empty_v + s, 4 * groups)
            fence_mbarrier_init()

    return begin_barriers


@cache
def make_next_stage(spec):
    """``next_stage(stage, parity)``: the place of K and V after this one, and its phase's parity,
    which changes where the places begin anew.
    """
    return next_of(spec.stages)


@cache
def make_next_q_stage(spec):
    """The same of Q's places."""
    return next_of(spec.q_stages)


@cache
def next_of(count):
    """The same of ``count`` places."""

    @device_function
    def following(stage, parity):
        after = uint32(stage + 1)
        flipped = parity
        if after == uint32(count):
            after = uint32(0)
            flipped = uint32(parity ^ 1)
        return after, flipped

    return following


@cache
def make_empty(spec):
    """``empty(bars, barrier)``: this warp reads the place no more."""

    @device_function
    def empty(bars, barrier):
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            arrive_mbarrier(bars, barrier)

    return empty


@cache
def make_q_is_empty(spec):
    """``q_is_empty(bars, barrier, ty, tx)``: by the thread that ``write_tile`` has waited in."""

    @device_function
    def q_is_empty(bars, barrier, ty, tx):
        if ty == uint32(0) and tx == uint32(0):
            arrive_mbarrier(bars, barrier)

    return q_is_empty
