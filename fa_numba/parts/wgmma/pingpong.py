"""Consumer warpgroups in ping-pong: one begins its products while the others compute a softmax."""

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
    """Numbers of barriers: a warpgroup's turn, a warpgroup's threads, those of all consumers."""

    TURN_0, TURN_1, TURN_2 = 1, 2, 3
    GROUP_0, GROUP_1, GROUP_2 = 4, 5, 6
    CONSUMERS = 7


TURN_0, TURN_1, TURN_2, GROUP_0, GROUP_1, GROUP_2, CONSUMERS = map(int, NamedBarrier)


@part
def make_first_turn(spec):
    """``first_turn(w)``: warpgroup 0 has the first turn, then 1, ..."""
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    def first_turn(w):
        # Constant barriers: one in a register takes all sixteen.
        if turns and w > uint32(0):
            arrive_named(TURN_0, threads)
        if turns and groups == 3 and w == uint32(2):
            arrive_named(TURN_1, threads)

    return first_turn


@part
def make_take_turn(spec):
    """``take_turn(w)``: until all others have begun their products."""
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    def take_turn(w):
        if turns:
            if w == uint32(0):
                sync_named(TURN_0, threads)
            elif w == uint32(1):
                sync_named(TURN_1, threads)
            elif groups == 3:
                sync_named(TURN_2, threads)

    return take_turn


@part
def make_give_turn(spec):
    """``give_turn(w)``: this warpgroup's products have begun."""
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    def give_turn(w):
        if turns and w != uint32(0):
            arrive_named(TURN_0, threads)
        if turns and w != uint32(1):
            arrive_named(TURN_1, threads)
        if turns and groups == 3 and w != uint32(2):
            arrive_named(TURN_2, threads)

    return give_turn


@part
def make_begin_products(spec):
    """``begin_products(rS, rO, rP, shared, q_stage, kv, after, w)``: Sij, of Kj in slot ``after``,
    and Pij-1 Vj-1, of Vj-1 in slot ``kv``, on their way together; or, without ``overlaps``,
    Pij-1 Vj-1 first, which ends before Sij begins.
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
    """``begin_last(rS, rO, rP, shared, q_stage, kv, after, w)``: Pij Vj, the last of a row tile, on
    its way with the first S of the next.
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
    """``sync_group(w)``: the threads of warpgroup w wait for each other."""
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
    """``sync_consumers()``: all consumers wait for each other."""
    threads = GROUP * spec.consumers

    def sync_consumers():
        sync_named(CONSUMERS, threads)

    return sync_consumers


@part
def make_give_other(spec):
    """``give_other()``: what the other of two consumers waits for is there."""
    threads = GROUP * spec.consumers

    def give_other():
        arrive_named(TURN_0, threads)

    return give_other


@part
def make_take_other(spec):
    """``take_other()``: until the other consumer has come to ``give_other``."""
    threads = GROUP * spec.consumers

    def take_other():
        sync_named(TURN_0, threads)

    return take_other
