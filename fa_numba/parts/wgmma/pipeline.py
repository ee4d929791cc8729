"""Pipelines: producers fill slots in shared memory, and consumers read and release the slots, one
slot after the other.

Each slot has two barriers: one says that the slot is full, and the other that it is empty.
``facts`` is one of ``spec.pipelines``, a ``tiling.wgmma.Pipeline``. It contains the number of
slots, and the numbers of the two barriers of slot 0. Producers begin with phase 1. Their first wait
with this phase finds every slot empty.
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
    """Make ``wait(bars, slot)``, by which a consumer waits until the slot is full."""
    return _make_wait_at(facts.full)


@cache
def make_acquire(facts):
    """Make ``acquire(bars, slot)``, by which a producer waits until the slot is empty."""
    return _make_wait_at(facts.empty)


@part
def _make_wait_at(first):
    """Make ``wait(bars, slot)``, which waits at one of the two barriers of the slot.

    ``first`` is the number of this barrier in slot 0.
    """

    def wait(bars, slot):
        wait_mbarrier(bars, uint32(first + slot.stage), slot.phase)

    return wait


@cache
def make_commit(facts):
    """Make ``commit(bars, slot)``, by which a thread says that it has filled the slot."""
    return _make_arrive_at(facts.full)


@cache
def make_release_alone(facts):
    """Make ``release_alone(bars, slot)``, by which a single thread says that it has read the slot.

    Use it if one thread reads the slot without the other threads of its warp.
    """
    return _make_arrive_at(facts.empty)


@part
def _make_arrive_at(first):
    """Make ``arrive(bars, slot)``, which arrives at one of the two barriers of the slot.

    ``first`` is the number of this barrier in slot 0.
    """

    def arrive(bars, slot):
        arrive_mbarrier(bars, uint32(first + slot.stage))

    return arrive


@part
def make_commit_warp(facts):
    """Make ``commit_warp(bars, slot)``, by which a warp says that it has filled its part of the
    slot.

    All lanes must call it. They wait for each other, and the first lane arrives at the barrier.
    """
    full = facts.full

    def commit_warp(bars, slot):
        cuda.syncwarp()
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            arrive_mbarrier(bars, uint32(full + slot.stage))

    return commit_warp


@part
def make_release(facts):
    """Make ``release(bars, slot)``, by which a warp says that it has read the slot.

    The first lane arrives at the barrier. The lanes do not wait for each other here.
    """
    empty = facts.empty

    def release(bars, slot):
        if uint32(cuda.threadIdx.x) % uint32(32) == uint32(0):
            arrive_mbarrier(bars, uint32(empty + slot.stage))

    return release


@part
def make_release_by(facts):
    """Make ``release_by(bars, slot, thread)``, by which a warpgroup says that it has read the slot.

    The first thread of the warpgroup arrives at the barrier. This thread must have waited for the
    other threads of the warpgroup before.
    """
    empty = facts.empty

    def release_by(bars, slot, thread):
        if thread.ty == uint32(0) and thread.tx == uint32(0):
            arrive_mbarrier(bars, uint32(empty + slot.stage))

    return release_by


@part
def make_next(facts):
    """Make ``next(slot)``, which returns the slot after this one.

    After the last slot comes slot 0, with the other phase.
    """
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
    """Make ``own(slot, w)``, which returns the part of a slot that belongs to consumer warpgroup w.

    Each part has barriers of its own. The result is a ``Slot`` record. The field ``stage`` of the
    result is the number of the part, counted over all slots.
    """
    groups = facts.groups

    def own(slot, w):
        return Slot(uint32(slot.stage * groups + w), slot.phase)

    return own


@part
def make_begin(spec):
    """Make ``begin(bars)``, by which thread 0 initialises the barriers of all pipelines of a
    kernel.

    The kernel must call ``syncthreads`` before other threads use the barriers.
    """
    init = _init_all(spec.arrivals)

    def begin(bars):
        if cuda.threadIdx.x == 0:
            init(bars)
            fence_mbarrier_init()

    return begin


@part
def _init_all(arrivals):
    """Make ``init(bars)``, which initialises all barriers.

    ``arrivals`` contains pairs. The first element of a pair is a number of slots. The second
    element describes the barriers that each of these slots has, as ``_init_slot`` takes them.
    """
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
    """Make ``init(bars, s)``, which initialises the barriers of slot number s.

    ``barriers`` contains one pair for each barrier of a slot: the number of this barrier in slot 0,
    and the number of arrivals that complete it.
    """
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
