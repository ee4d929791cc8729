"""Ping-pong: one consumer warpgroup begins its products while the other warpgroups compute a
softmax.
"""

from enum import IntEnum

from fa_numba.device import uint32
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.parts.namespace import part
from fa_numba.parts.wgmma.pipeline import make_wait
from fa_numba.parts.wgmma.products import (
    make_begin_output,
    make_begin_scores,
    make_wait_output,
)
from fa_numba.tiling.wgmma import GROUP


class NamedBarrier(IntEnum):
    """The numbers of the named barriers of a block.

    TURN_w is the barrier at which consumer warpgroup w waits for its turn. GROUP_w synchronises the
    threads of warpgroup w. CONSUMERS synchronises the threads of all consumers.
    """

    TURN_0, TURN_1, TURN_2 = 1, 2, 3
    GROUP_0, GROUP_1, GROUP_2 = 4, 5, 6
    CONSUMERS = 7


TURN_0, TURN_1, TURN_2, GROUP_0, GROUP_1, GROUP_2, CONSUMERS = map(int, NamedBarrier)


@part
def make_first_turn(spec):
    """Make ``first_turn(w)``, which sets the order of turns at the start: warpgroup 0 is the first,
    then warpgroup 1, and so on.
    """
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    def first_turn(w):
        if turns and w > uint32(0):
            arrive_named(TURN_0, threads)
        if turns and groups == 3 and w == uint32(2):
            arrive_named(TURN_1, threads)

    return first_turn


@part
def make_take_turn(spec):
    """Make ``take_turn(w)``, which waits until all other warpgroups have begun their products.

    The function waits at named barrier TURN_w. Its number is not a compile-time constant, so that
    the compiler reserves all named barriers of the block. This costs nothing, because a
    multiprocessor holds only one block. Kernels with a branch for each constant number took up to
    1.01 times as long (tests/data/h200_trials.csv).
    """
    threads, turns = GROUP * spec.consumers, spec.takes_turns

    def take_turn(w):
        if turns:
            sync_named(uint32(TURN_0 + w), threads)

    return take_turn


@part
def make_give_turn(spec):
    """Make ``give_turn(w)``, by which warpgroup w tells the others that it has begun its
    products.
    """
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    def give_turn(w):
        if turns and groups == 2:
            arrive_named(uint32(TURN_1 - w), threads)
        if turns and groups == 3:
            following = uint32(w + 1) if w < uint32(2) else uint32(0)
            last = uint32(w - 1) if w > uint32(0) else uint32(2)
            arrive_named(uint32(TURN_0 + following), threads)
            arrive_named(uint32(TURN_0 + last), threads)

    return give_turn


@part
def make_begin_products(spec):
    """Make ``begin_products(rS, rO, rP, shared, q_stage, kv, after, w)``, which begins two matrix
    products of warpgroup w.

    One product is S of the next column tile in the registers rS, with Q in slot number ``q_stage``
    and K in slot ``after``. The other product is P V of the current column tile in the registers
    rO, with V in slot ``kv``. Both run at the same time. If the measure "overlap" is switched off,
    P V ends before S begins.
    """
    overlaps, wait_output = spec.overlaps, make_wait_output(spec)
    wait_k, wait_v = make_wait(spec.pipelines.k), make_wait(spec.pipelines.v)
    begin_scores, begin_output = make_begin_scores(spec), make_begin_output(spec)
    take_turn, give_turn = make_take_turn(spec), make_give_turn(spec)

    def begin_products(rS, rO, rP, shared, q_stage, kv, after, w):
        bars = shared.bars
        if overlaps:
            wait_k(bars, after)
            take_turn(w)
        else:
            wait_v(bars, kv)
            take_turn(w)
            begin_output(rO, rP, shared.sV, kv.stage)
            wait_output(rO, False)
            wait_k(bars, after)
        begin_scores(rS, shared.sQ, q_stage, w, shared.sK, after.stage)
        if overlaps:
            wait_v(bars, kv)
            begin_output(rO, rP, shared.sV, kv.stage)
        give_turn(w)

    return begin_products


@part
def make_begin_last(spec):
    """Make ``begin_last(rS, rO, rP, shared, q_stage, kv, after, w)``, which begins two matrix
    products of warpgroup w at the end of a work tile.

    One product is the last P V of this work tile, with V in slot ``kv``. The other product is the
    first S of the next work tile, with Q in slot number ``q_stage`` and K in slot ``after``. Both
    run at the same time.
    """
    wait_k, begin_scores = make_wait(spec.pipelines.k), make_begin_scores(spec)
    begin_output, take_turn = make_begin_output(spec), make_take_turn(spec)
    give_turn = make_give_turn(spec)

    def begin_last(rS, rO, rP, shared, q_stage, kv, after, w):
        wait_k(shared.bars, after)
        take_turn(w)
        begin_output(rO, rP, shared.sV, kv.stage)
        begin_scores(rS, shared.sQ, q_stage, w, shared.sK, after.stage)
        give_turn(w)

    return begin_last


@part
def make_sync_group(spec):
    """Make ``sync_group(w)``, by which the threads of consumer warpgroup w wait for each other."""
    groups = spec.consumers

    def sync_group(w):
        if w == uint32(0):
            sync_named(GROUP_0, GROUP)
        elif groups > 1 and w == uint32(1):
            sync_named(GROUP_1, GROUP)
        elif groups == 3:
            sync_named(GROUP_2, GROUP)

    return sync_group


@part
def make_sync_consumers(spec):
    """Make ``sync_consumers()``, by which the threads of all consumer warpgroups wait for each
    other.
    """
    threads = GROUP * spec.consumers

    def sync_consumers():
        sync_named(CONSUMERS, threads)

    return sync_consumers


@part
def make_give_other(spec):
    """Make ``give_other()``, by which one of two consumer warpgroups signals the other without
    waiting.
    """
    threads = GROUP * spec.consumers

    def give_other():
        arrive_named(TURN_0, threads)

    return give_other


@part
def make_take_other(spec):
    """Make ``take_other()``, by which one of two consumer warpgroups waits for the other's
    ``give_other``.
    """
    threads = GROUP * spec.consumers

    def take_other():
        sync_named(TURN_0, threads)

    return take_other
