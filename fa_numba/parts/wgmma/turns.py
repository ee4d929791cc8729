"""Consumer warpgroups take turns: one begins its products while the others compute a softmax."""

from functools import cache

from fa_numba.device import device_function, uint32
from fa_numba.intrinsics.barriers import arrive_named, sync_named
from fa_numba.tiling.wgmma import GROUP

# Named barriers: one a warpgroup for its turn, and one for its part of O.
TURN_0, TURN_1, TURN_2 = 1, 2, 3
MEET_0, MEET_1, MEET_2 = 4, 5, 6


@cache
def make_begin_turns(spec):
    """``begin_turns(w)``: warpgroup 0 has the first turn, then 1, ..."""
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    @device_function
    def begin_turns(w):
        # Constant barriers: one in a register takes all sixteen.
        if turns and w > uint32(0):
            arrive_named(TURN_0, threads)
        if turns and groups == 3 and w == uint32(2):
            arrive_named(TURN_1, threads)

    return begin_turns


@cache
def make_take_turn(spec):
    """``take_turn(w)``: wait until all others have begun their products."""
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    @device_function
    def take_turn(w):
        if turns:
            if w == uint32(0):
                sync_named(TURN_0, threads)
            elif w == uint32(1):
                sync_named(TURN_1, threads)
            elif groups == 3:
                sync_named(TURN_2, threads)

    return take_turn


@cache
def make_end_turn(spec):
    """``end_turn(w)``: this warpgroup's products have begun."""
    groups, threads, turns = spec.consumers, GROUP * spec.consumers, spec.takes_turns

    @device_function
    def end_turn(w):
        if turns and w != uint32(0):
            arrive_named(TURN_0, threads)
        if turns and w != uint32(1):
            arrive_named(TURN_1, threads)
        if turns and groups == 3 and w != uint32(2):
            arrive_named(TURN_2, threads)

    return end_turn


@cache
def make_meet(spec):
    """``meet(w)``: the threads of a warpgroup wait for each other."""
    groups = spec.consumers

    @device_function
    def meet(w):
        if w == uint32(0):
            sync_named(MEET_0, GROUP)
        elif groups > 1 and w == uint32(1):
            sync_named(MEET_1, GROUP)
        elif groups == 3:
            sync_named(MEET_2, GROUP)

    return meet
