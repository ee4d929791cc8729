"""Pipelines: slots in shared memory that producers fill and consumers empty in turn, each with a
barrier for full and one for empty.

``facts`` is one of ``spec.pipelines``: the numbers of a pipeline's first barriers, and its slots
(``tiling.wgmma.Pipeline``). A producer begins in phase 1: its first wait finds the slot empty.
"""

from functools import cache

from fa_numba.device import cuda, uint32
from fa_numba.intrinsics.mbarrier import (
    arrive_mbarrier,
    fence_mbarrier_init,
    init_mbarrier,
    wait_mbarrier,
)
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Slot


@cache
def make_wait(facts):
    """``wait(bars, slot)``: until the slot is full."""
    return _make_wait_at(facts.full)


@cache
def make_acquire(facts):
    """``acquire(bars, slot)``: until the slot is empty."""
    return _make_wait_at(facts.empty)


@part
def _make_wait_at(first):
    def wait(bars, slot):
        wait_mbarrier(bars, uint32(first + slot.stage), slot.phase)

    return wait


@cache
def make_commit(facts):
    """``commit(bars, slot)``: this thread has filled the slot."""
    return _make_arrive_at(facts.full)


@cache
def make_release_alone(facts):
    """``release_alone(bars, slot)``: this thread, the only one, reads the slot no more."""
    return _make_arrive_at(facts.empty)


@part
def _make_arrive_at(first):
    def arrive(bars, slot):
        arrive_mbarrier(bars, uint32(first + slot.stage))

    return arrive


@part
def make_commit_warp(facts):
    """``commit_warp(bars, slot)``: this warp has filled its part of the slot."""
    full = facts.full

    def commit_warp(bars, slot):
        cuda.syncwarp()
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            arrive_mbarrier(bars, uint32(full + slot.stage))

    return commit_warp


@part
def make_release(facts):
    """``release(bars, slot)``: this warp reads the slot no more."""
    empty = facts.empty

    def release(bars, slot):
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            arrive_mbarrier(bars, uint32(empty + slot.stage))

    return release


@part
def make_release_by(facts):
    """``release_by(bars, slot, thread)``: this warpgroup reads the slot no more, says its first
    thread, which has waited for the others.
    """
    empty = facts.empty

    def release_by(bars, slot, thread):
        if thread.ty == uint32(0) and thread.tx == uint32(0):
            arrive_mbarrier(bars, uint32(empty + slot.stage))

    return release_by


@part
def make_next(facts):
    """``next(slot)``: the slot after this one; the phase changes where the slots begin anew."""
    slots = facts.slots

    def following(slot):
        after = uint32(slot.stage + 1)
        flipped = slot.phase
        if after == uint32(slots):
            after = uint32(0)
            flipped = uint32(slot.phase ^ 1)
        return Slot(after, flipped)

    return following


@part
def make_own(facts):
    """``own(slot, w)``: the part of the slot that warpgroup w has, with barriers of its own."""
    groups = facts.groups

    def own(slot, w):
        return Slot(uint32(slot.stage * groups + w), slot.phase)

    return own


@part
def make_begin(spec):
    """``begin(bars)``: the first thread initialises the barriers of all of a kernel's pipelines."""
    init = _init_all(spec.arrivals)

    def begin(bars):
        if cuda.threadIdx.x == 0:
            init(bars)
            fence_mbarrier_init()

    return begin


@part
def _init_all(arrivals):
    """``init(bars)``: for each (slots, barriers), slot after slot, ``barriers`` of the slot."""
    if not arrivals:
        return _nothing
    (slots, barriers), rest = arrivals[0], _init_all(arrivals[1:])
    of_slot = _init_slot(barriers)

    def init(bars):
        for s in range(slots):
            of_slot(bars, s)
        rest(bars)

    return init


@part
def _init_slot(barriers):
    """``init(bars, s)``: of each (first barrier, arrivals) the barrier of slot s."""
    if not barriers:
        return _nothing_of_slot
    (first, arrivals), rest = barriers[0], _init_slot(barriers[1:])

    def init(bars, s):
        init_mbarrier(bars, first + s, arrivals)
        rest(bars, s)

    return init


def _nothing(bars):
    pass


def _nothing_of_slot(bars, s):
    pass
