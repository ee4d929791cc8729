"""Waiting lanes: barriers of the thread block, named barriers, and collectives of a warp.

A group whose lanes all wait returns control to run.py, which lets the next group run. If some lanes
of a group would wait for other lanes of the same group, the thread block begins again with two
groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from greenlet import greenlet

from .checks import AFTER_ALL, PITCH, STAMP
from .context import Context
from .errors import BarrierDivergence, BarrierMisuse, Deadlock, EmulatorError
from .groups import (
    AT_BARRIER,
    AT_NAMED,
    AT_WARP,
    DONE,
    FULL,
    READY,
    WARP,
    Group,
    Meeting,
    NamedBarrier,
    OneByOne,
    Parting,
    Site,
)

BITS = 1 << np.arange(WARP, dtype=np.int64)
Resolve = Callable[[list[np.ndarray], np.ndarray, int], tuple[np.ndarray, ...]]


class Waiting(Context):
    """Methods of a running launch with which groups of lanes wait for each other.

    The class `Launch` inherits these methods.
    """

    __slots__ = (
        "_hub", "_groups", "_ready", "_meetings", "_named_barriers", "_opened", "_opened_at",
        "_as_warps",
    )  # fmt: skip

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._hub: greenlet
        self._groups: list[Group] = []
        self._ready: deque[Group] = deque()
        self._meetings: dict[Any, Meeting] = {}
        self._named_barriers: dict[int, NamedBarrier] = {}  # by number, until they open
        # By number of a named barrier that has opened: `NamedBarrier.seen` of its last use, and
        # the instruction of the first arrival.
        self._opened: dict[int, np.ndarray] = {}
        self._opened_at: dict[int, Site] = {}

    # ---- groups

    def _wait(self, state: int, site: Site, operation: str, value: Any = None) -> None:
        """Let other groups run until this group can continue.

        `state` says what kind of event the group waits for. `site` is the instruction at which the
        group waits. `operation` is the name of the called function, for messages. `value` depends
        on the state: the number of true predicates at a barrier, the mask of a warp collective, or
        an mbarrier.
        """
        group = self.group
        group.state, group.site, group.operation, group.value = state, site, operation, value
        self._switch()

    def _switch(self) -> None:
        """Return control to run.py until this group is the running group again.

        If the thread block has only this group, no other group can run. In this case the barrier of
        the thread block opens if all threads wait at it, and the group continues. Raise an error if
        they wait for something else.
        """
        group = self.group
        group.mask, group.outer = self.mask, self._outer
        if group.run is None:
            # This is the thread block's only group: no other group can end its waiting.
            self._open_if_all_wait()
            if group.state != READY:
                raise self._stalled()
        else:
            self._hub.switch()
        self.group, self.mask, self._outer = group, group.mask, group.outer

    def _all_here(self) -> bool:
        """Return whether all lanes of the group take part."""
        return self.mask is None or bool(self.mask.all())

    def _open_if_all_wait(self) -> bool:
        """Open the thread block's barrier if all its threads wait there.

        Return whether the barrier opened.
        """
        groups = self._groups
        first = groups[0].site
        if any(g.state != AT_BARRIER or g.site != first for g in groups):
            return False
        votes = sum(g.value for g in groups)
        for g in groups:
            g.value = votes
        self._release()
        self._open_barrier()
        return True

    def _release(self) -> None:
        """Let all groups of the thread block continue."""
        for g in self._groups:
            g.state = READY

    def _tick(self, warps: Any) -> None:
        """Advance the clock, and record that these warps have synchronised at this time."""
        self.clock += 1
        self.starts[warps] = self.clock * STAMP

    def _open_barrier(self, blocks: Any = slice(None)) -> None:
        """Record that the barrier of some thread blocks opens.

        Every earlier access of one of these thread blocks then happened before all later accesses
        of the same thread block. `blocks` selects the thread blocks among the thread blocks that
        run at the same time.
        """
        self.clock += 1
        now = self.clock * STAMP
        self.base[blocks] = now if self.races != "ignore" else AFTER_ALL
        self.starts.reshape(self.base.size, -1)[blocks] = now
        self.seen.reshape(self.base.size, -1)[blocks] = now

    # ---- waiting

    def barrier(self, operation: str = "syncthreads", predicate: Any = False) -> Any:
        """Wait for all threads of the thread block.

        Return the number of threads whose predicate is true. If several thread blocks run at the
        same time, the result is an array over the lanes.
        """
        group = self.group
        if len(self._groups) == 1:  # with several groups, `_release` counts the instruction
            self.instruction("barrier")
        if self.several:  # all threads of a thread block are in this group and arrive together
            here = self.by_block(self.whole_blocks(self.active()))
            self._open_barrier(here[: self.base.size] > 0)
            if predicate is False:
                return 0
            return self.by_block(self.active() & (predicate != 0))[group.blocks]
        if not self._all_here():
            raise Parting(self.active())
        votes = 0
        if predicate is not False:
            votes = int(np.count_nonzero(np.broadcast_to(predicate, group.count)))
        self._wait(AT_BARRIER, self.site(), operation, votes)
        return group.value

    def collective(
        self, operation: str, mask: Any, values: tuple[Any, ...], resolve: Resolve
    ) -> tuple[np.ndarray, ...]:
        """Wait for the lanes in `mask`; return the results of `resolve` as arrays over the lanes.

        `operation` is the name of the called function, for messages. `values` are the operands,
        each a number or an array over the lanes. ``resolve(values, present, mask)`` computes the
        results of complete warps. It takes and returns arrays of shape (warps, 32). `present` says
        which lanes take part; other lanes have no value.
        """
        group = self.group
        mask = self.uniform(mask) & FULL
        if mask == FULL and self.whole_warps():
            present = (group.present if self.mask is None else self.mask).reshape(-1, WARP)
            results = resolve([group.in_warps(v) for v in values], present, mask)
            return self._to_lanes(results)
        active = self.active()
        bits = mask >> group.tids % WARP & 1 != 0
        left_out = active & ~bits
        if left_out.any():
            lane = int(np.flatnonzero(left_out)[0])
            number = int(group.tids[lane] % WARP)
            text = (
                f"lane {number} calls {operation} with mask {mask:#010x}, which does not include "
                "this lane. A mask must include every lane that makes the call"
            )
            raise self.fault(BarrierDivergence, text, None, lane)
        missing = ~active & bits & np.isin(group.warp_of, group.warp_of[active])
        if missing.any():
            raise Parting(active)
        here = group.in_warps(active, False)
        wanted = self._lanes_of(group.warps) & ((mask & BITS) != 0)
        complete = ~(wanted & ~here).any(axis=1) | ~here.any(axis=1)
        arrays = [group.in_warps(v) for v in values]
        if complete.all():
            results = resolve(arrays, here, mask)
            return self._to_lanes(results)
        if self.several:
            raise OneByOne
        return self._meet(operation, mask, arrays, here, wanted, resolve)

    def _lanes_of(self, warps: np.ndarray) -> np.ndarray:
        """Return a bool array of shape (warps, 32) that says which lanes of each warp exist.

        Only the last warp of a thread block can have fewer than 32 lanes.
        """
        return warps[:, None] * WARP % PITCH + np.arange(WARP) < self.threads

    def _meet(
        self, operation: str, mask: int, arrays: list[np.ndarray], here: np.ndarray,
        wanted: np.ndarray, resolve: Resolve,
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        """Complete a warp collective whose lanes are in several groups.

        The result contains the results of the collective as arrays over the lanes. The arrays in
        the arguments have the shape (warps, 32).

            operation   name of the called function
            mask        mask argument of the call
            arrays      operands of the lanes of this group
            here        which lanes of this group take part
            wanted      which lanes the collective waits for
            resolve     function that computes the results; see `collective`
        """
        group, site = self.group, self.site()
        found: list[Meeting | None] = []
        for n, warp in enumerate(group.warps.tolist()):
            if not here[n].any():
                found.append(None)
                continue
            key = (operation, mask, site, warp)
            meeting = self._meetings.setdefault(key, Meeting())
            if not meeting.values:
                meeting.values = [np.zeros(WARP, a.dtype) for a in arrays]
            meeting.lanes |= here[n]
            for whole, part in zip(meeting.values, arrays, strict=True):
                whole[here[n]] = part[n][here[n]]
            meeting.groups.append(group)
            found.append(meeting)
            if not (wanted[n] & ~meeting.lanes).any():
                del self._meetings[key]
                self._as_warps = np.array([warp])
                values = [v[None] for v in meeting.values]
                meeting.results = resolve(values, meeting.lanes[None], mask)
                for other in meeting.groups:
                    if other is not group and other.state == AT_WARP:
                        other.state = READY
                        self._ready.append(other)
        while any(m is not None and m.results is None for m in found):
            self._wait(AT_WARP, site, operation, mask)
        first = next(m.results for m in found if m is not None)
        return self._to_lanes(
            np.stack([np.zeros_like(one[0]) if m is None else m.results[k][0] for m in found])
            for k, one in enumerate(first)
        )

    def _to_lanes(self, results: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(map(self.group.of_warps, results))

    def sync_warp(self, mask: Any) -> None:
        """Wait for the lanes in `mask` (`syncwarp`).

        If all lanes of the warp take part, the call orders their accesses.
        """
        self.instruction("barrier")
        group = self.group

        def order(values: list[np.ndarray], present: np.ndarray, mask: int) -> tuple[()]:
            warps = self._as_warps
            every = self._lanes_of(warps)
            warps = warps[present.any(axis=1) & ~(every & ~present).any(axis=1)]
            if warps.size:
                self._tick(warps)
                self.seen[warps, warps % (PITCH // WARP)] = self.starts[warps]
                self.synced(warps)
            return ()

        self._as_warps = group.warps
        self.collective("syncwarp", mask, (), order)

    def named_barrier(self, operation: str, barrier: Any, threads: Any, waits: bool) -> None:
        """Arrive at a named barrier of `threads` threads, and wait there if `waits` is set.

        The instruction is bar.sync if `waits` is set, else bar.arrive. All lanes of a warp arrive
        together. The barrier opens when `threads` threads have arrived, and can then be used again.
        All earlier accesses of the arrived warps happened before the later accesses of the waiting
        warps. If a warp arrives without waiting, its later accesses are not ordered after any
        access of another lane, not even of the same warp. A barrier at which no warp waits need not
        open before the thread block ends.

        Raises BarrierMisuse in three cases:

        - the lanes of a warp, or the warps at a barrier, pass different arguments;
        - a warp arrives again before the barrier has opened;
        - nothing orders the arrival after the barrier's previous use. The arrival could then count
          for the previous use.
        """
        if self.several:
            raise OneByOne
        self.instruction("barrier")
        group = self.group
        if waits:
            if barrier.__class__ is np.ndarray and self._warps_agree(barrier):
                barrier = self.uniform(barrier)  # warps with another barrier form another group
            if not self._all_here():
                raise Parting(self.active())
        named: dict[int, NamedBarrier] = {}

        def arrive(values: list[np.ndarray], present: np.ndarray, mask: int) -> tuple[()]:
            given = np.stack(values, -1)
            for n, warp in enumerate(self._as_warps.tolist()):
                if not present[n].any():
                    continue
                operands = set(map(tuple, given[n][present[n]].tolist()))
                if len(operands) > 1:
                    each = ", ".join(f"({a}, {b})" for a, b in sorted(operands))
                    text = (
                        f"the lanes of warp {warp} call {operation} with different arguments "
                        f"(barrier, threads): {each}. All lanes of a warp must pass the same values"
                    )
                    raise self.fault(BarrierMisuse, text)
                ((number, count),) = operands
                named[warp] = self._arrive(warp, number, count, waits)
            return ()

        self._as_warps = group.warps
        self.collective(operation, FULL, (barrier, threads), arrive)
        if waits:
            self._wait_named(operation, barrier, named)

    def _warps_agree(self, value: np.ndarray) -> bool:
        """Return whether the lanes of each warp have the same value."""
        active = self.active()
        warps, values = self.group.warp_of[active].tolist(), value[active].tolist()
        return len(set(zip(warps, values, strict=True))) == len(set(warps))

    def _wait_named(self, operation: str, barrier: Any, named: dict[int, NamedBarrier]) -> None:
        """Wait until the named barriers open at which the warps of this group have arrived.

        `named` maps the number of each warp to the barrier at which the warp has arrived.
        `operation` is the name of the called function, and `barrier` its argument. Both are for
        messages.

        Normally all lanes of a warp are in one group. If they are in two groups, the arrival of the
        warp is recorded by the group that calls the function last. The other group then has an
        empty `named`. It searches all named barriers for the arrivals of its warps instead.
        """
        group = self.group
        which = named.values() or [
            n for n in self._named_barriers.values() if set(group.warps.tolist()) & set(n.arrived)
        ]
        for one in which:
            if not one.opened:
                one.waiting.append(group)
                number = self.of_lane(barrier, self.first_lane())
                self._wait(AT_NAMED, self.site(), f"{operation} of barrier {number}")

    def _arrive(self, warp: int, barrier: int, threads: int, waits: bool) -> NamedBarrier:
        """Record that a warp arrives at a named barrier. The last arrival opens the barrier.

        `barrier` is the number of the barrier. `waits` says whether the warp waits there.
        """
        self._tick(warp)
        past = self.seen[warp].copy()
        past[warp] = self.starts[warp]
        if (past < self._opened.get(barrier, past)).any():
            text = (
                f"warp {warp} arrives at barrier {barrier}, but nothing orders this after the "
                f"barrier's previous use, which began at {self.line_of(self._opened_at[barrier])}. "
                "A GPU could count the arrival toward the previous use: synchronise between the "
                "two uses, or use another barrier number"
            )
            raise self.fault(BarrierMisuse, text, None, self._lane_of(warp))
        named = self._named_barriers.get(barrier)
        if named is None:
            named = self._named_barriers[barrier] = NamedBarrier(threads, self.site(), past)
        if named.threads != threads:
            text = (
                f"warp {warp} arrives at barrier {barrier} with threads={threads}, but "
                f"{self._missing(barrier)}. All warps must pass the same number of threads"
            )
            raise self.fault(BarrierMisuse, text, None, self._lane_of(warp))
        if warp in named.arrived:
            text = (
                f"warp {warp} arrives again at barrier {barrier} before the barrier has opened: "
                f"{self._missing(barrier)}. Let each warp arrive once per use of the barrier"
            )
            raise self.fault(BarrierMisuse, text, None, self._lane_of(warp))
        named.seen = np.maximum(named.seen, past)
        named.arrived.append(warp)
        if waits:
            named.synced.append(warp)
        if len(named.arrived) * WARP == threads:
            self._opened[barrier] = self._named_barriers.pop(barrier).seen
            self._opened_at[barrier] = named.site
            named.opened = True
            for other in named.synced:
                self.seen[other] = named.seen
            for g in named.waiting:
                g.state = READY
            self._ready.extend(named.waiting)
        return named

    def _lane_of(self, warp: int) -> int:
        """Return the first lane of a warp that takes part."""
        lanes = np.flatnonzero(self.active() & (self.group.warp_of == warp))
        return int(lanes[0]) if lanes.size else self.first_lane()

    def _missing(self, barrier: int) -> str:
        """Return a text that says how many threads a named barrier needs and how many arrived."""
        named = self._named_barriers[barrier]
        count, first = len(named.arrived) * WARP, self.line_of(named.site)
        return (
            f"barrier {barrier} waits for {named.threads} threads, of which {count} have arrived "
            f"(the first at {first})"
        )

    # ---- who waits for whom

    def _stalled(self) -> EmulatorError:
        """Return the error for a thread block in which no group can go on.

        The text says which threads wait in which call at which line.
        """
        kind: type[EmulatorError] = BarrierDivergence
        groups = self._groups
        in_warp = [g for g in groups if g.state == AT_WARP]
        at_barrier = [g for g in groups if g.state == AT_BARRIER]
        at_named = [g for g in groups if g.state == AT_NAMED]
        deserted = [g for g in in_warp if self._deserted(g)]
        if deserted:
            g = deserted[0]
            warp = self._deserted(g)[0]
            named = "" if g.value == FULL else f" that its mask {g.value:#010x} names"
            text = (
                f"{g.operation} is reached by only some of the lanes{named} in warp {warp}. All "
                "these lanes must make the call together: move it out of the branch or loop that "
                f"only some lanes take{self._waiters()}"
            )
            tid = int(g.tids[g.warp_of == warp][0])
            return self.fault_at(kind, text, tid, g.site)
        elif at_named:
            g, kind = at_named[0], Deadlock
            text = "no thread can go on: " + "; ".join(map(self._missing, self._named_barriers))
        elif at_barrier:
            g = at_barrier[0]
            text = (
                f"{g.operation} is not reached by all threads of the block. Move it out of the "
                "branch or loop that only some threads take"
            )
        else:
            g, kind = in_warp[0], Deadlock
            masks = ", ".join(f"{m:#010x}" for m in sorted({int(x.value) for x in in_warp}))
            text = (
                f"lanes wait for one another in {g.operation} with different masks: {masks}. Every "
                "lane that a mask names must make the call with the same mask"
            )
        return self.fault_at(kind, f"{text}{self._waiters()}", int(g.tids[0]), g.site)

    def _deserted(self, group: Group) -> list[int]:
        """Return the warps of `group` whose missing lanes cannot come.

        `group` waits for other lanes in a warp collective, such as a shuffle. The other lanes
        cannot come if their group has returned, or waits for something else.
        """
        for other in self._groups:
            shared = np.isin(other.warp_of, group.warps)
            named = shared & (group.value >> other.tids % WARP & 1 != 0)
            elsewhere = other.state != AT_WARP or other.site != group.site
            if elsewhere and named.any():
                return np.unique(other.warp_of[named]).tolist()
        return []

    def _waiters(self) -> str:
        """Return a text that says what each thread waits for, and at which source line."""
        where: dict[str, list[int]] = {}
        states: list[tuple[int, str]] = []
        for g in self._groups:
            text = {READY: "not waiting", DONE: "returned"}.get(g.state)
            if text is None:
                text = f"waiting in {g.operation} at {self.line_of(g.site)}"
            states += [(tid, text) for tid in g.tids.tolist()]
        for tid, text in sorted(states):
            where.setdefault(text, []).append(tid)
        return "".join(f"\n  {self._names(tids)}: {text}" for text, tids in where.items())

    def _names(self, tids: list[int]) -> str:
        """Return the indices of some threads as text: at most four indices.

        If there are more than four threads, the text also contains the number of threads.
        """
        names = [self.thread_name(tid) for tid in tids[:4]]
        more = f", ... ({len(tids)} threads)" if len(tids) > 4 else ""
        return f"thread{'s' if len(tids) > 1 else ''} {', '.join(names)}{more}"
