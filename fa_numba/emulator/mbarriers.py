"""Mbarriers: barriers in shared memory that count arrivals and bytes (Hopper)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np

from .async_checks import add_known
from .checks import NOBODY, PRODUCT, SEVERAL, STAMP
from .errors import BarrierMisuse, Deadlock, EmulatorError, MissingFence, two_arrays
from .groups import AT_MBARRIER, READY, WARP, Group, Parting, Site, warps_of
from .knowledge import ALWAYS, WARPGROUP, Knowledge
from .lanes import distinct, every, some
from .shared_memory import SharedArray

Use = tuple[int, list[Site]]  # a thread, and its instruction with all callers: `Mbarriers.calls`
MOST_ARRIVALS = MOST_BYTES = (1 << 20) - 1


class Mbarrier:
    """A barrier that `count` arrivals complete in each phase. Attributes:

    name       name of the barrier's element in the kernel, for messages
    column     number of the barrier's further column, which knowledge.py explains
    made       stamp of the initialisation
    maker      number of the thread that initialised the barrier
    fenced     stamp of the fence after the initialisation; None before the fence
    phase      number of the current phase, from 0
    pending    number of arrivals that are still missing in the current phase
    bytes      number of bytes that copies must still deliver in the current phase
    past       what the threads that have arrived in the current phase know (knowledge.py)
    ends       for each phase that has ended, the stamp of its end
    ended      what was known at the end of the phase that ended last
    waiting    groups that wait for the end of the current phase
    flying     copies that deliver bytes for the current phase
    arrived    copies of ended phases, until a thread waits for such a phase
    awaited    number of the last phase that a thread has waited for; -2 if there is none
    acquired   whether a thread has waited with the parity of the phase before phase 0. Such a
               wait returns at once. Producers wait in this way for empty slots of a pipeline
    uses       dictionary with the thread and the calls of the last "wait" and of the last
               "arrival", for messages
    """

    __slots__ = (
        "name", "count", "column", "made", "maker", "fenced", "phase", "pending", "bytes", "past",
        "ends", "ended", "waiting", "flying", "arrived", "awaited", "acquired", "uses",
    )  # fmt: skip

    def __init__(self, name: str, count: int, column: int, made: int, maker: int) -> None:
        self.name, self.count, self.column = name, count, column
        self.made, self.maker = made, maker
        self.fenced: int | None = None
        self.phase, self.pending, self.bytes = 0, count, 0
        self.past = self.ended = np.zeros(0, np.int64)
        self.ends: list[int] = []
        self.waiting: list[Group] = []
        self.flying: list[Any] = []
        self.arrived: list[Any] = []
        self.awaited, self.acquired = -2, False
        self.uses: dict[str, Use] = {}

    def __str__(self) -> str:
        """Return a text with the current phase of the barrier, and what the phase waits for."""
        text = f"{self.name} is in phase {self.phase}, which still waits for {self.pending} of "
        text += f"{self.count} arrivals"
        if self.bytes < 0:
            return f"{text} and has received {-self.bytes} bytes too many"
        return f"{text} and for {self.bytes} bytes"


class MbarrierTile:
    """A shared array of mbarriers, which only the instructions for mbarriers may access.

    `array` is the shared array of uint64 elements.
    """

    __slots__ = ("array",)

    def __init__(self, array: SharedArray) -> None:
        self.array = array

    def merged(self, mask: Any, other: Any) -> MbarrierTile:
        """Return this array, which must be the value of a variable in all lanes after a branch.

        `other` is the value in the lanes outside of `mask`. Raise TypeError if it is another array.
        """
        if other.__class__ is not MbarrierTile:
            raise TypeError(two_arrays(self, other))
        self.array.merged(mask, other.array)
        return self


class Mbarriers(Knowledge):
    """Methods of a running launch that emulate mbarriers.

    The class `Launch` inherits these methods.
    """

    __slots__ = ("_mbarriers", "_acquired")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._mbarriers: dict[int, Mbarrier] = {}  # by the element's position in shared memory
        # By warp: the mbarrier of the slot that the warp acquired last. A warp that has started a
        # box load since then has no entry.
        self._acquired: dict[int, Mbarrier] = {}

    def begin_blocks(self, first: int, count: int) -> None:
        """Forget all mbarriers, for new thread blocks; see `Context.begin_blocks`."""
        super().begin_blocks(first, count)
        self._mbarriers, self._acquired = {}, {}

    def who(self, stamp: int) -> str:
        """Return a text that names the thread, copy or product that made an access.

        `stamp` is the stamp of the access.
        """
        code = stamp % STAMP
        column = code - SEVERAL - self.warps
        if column < 0 or code == NOBODY:
            return super().who(stamp)
        if code >= PRODUCT:
            return f"a wgmma product of warpgroup {(code - PRODUCT - self.warps) // WARPGROUP}"
        if column < WARPGROUP * self.warpgroups:
            return f"warp {column}, in a wgmma product,"
        owner = next(b for b in self._mbarriers.values() if b.column == column)
        return f"a TMA load with mbarrier {owner.name}"

    def calls(self) -> list[Site]:
        """Return the current instruction of the kernel, and the calls that led to it.

        The innermost function comes first.
        """
        frame: FrameType | None = sys._getframe(1)
        found = []
        while frame is not None:
            if id(frame.f_code) in self._codes:
                found.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return found

    def mbarrier_tile(self, offset: Any, length: int) -> MbarrierTile:
        """Return an array of `length` mbarriers from element `offset` of dynamic shared memory on.

        Offsets are in elements of 8 bytes.
        """
        self.alone()
        return MbarrierTile(self.shared_tile(offset, length, "uint64"))

    def widen(self, more: int) -> None:
        """Append columns to all rows of known stamps, also to the rows of mbarriers.

        `Knowledge.widen` explains the columns and `more`.
        """
        columns = self.seen.shape[1]
        super().widen(more)
        gap = np.zeros(self.seen.shape[1] - columns, np.int64)
        for barrier in self._mbarriers.values() if gap.size else ():
            barrier.past = np.concatenate([barrier.past, gap])
            barrier.ended = np.concatenate([barrier.ended, gap])

    def _element_of(self, tile: MbarrierTile, index: Any) -> tuple[int, str]:
        """Return the position of an mbarrier in shared memory, and its name. Check its index."""
        array, lane = tile.array, self.first_lane()
        if not 0 <= index < array.length:
            raise self.outside(array.name, (array.length,), index, lane)
        return array.first + index, f"{array.name}[{index}]"

    def mbarrier(self, tile: MbarrierTile, index: Any) -> Mbarrier:
        """Return the mbarrier tile[index]. Raise BarrierMisuse if it was not initialised."""
        place, name = self._element_of(tile, index)
        found = self._mbarriers.get(place)
        if found is None:
            text = f"{name} was not initialised. Call init_mbarrier for it first"
            raise self.fault(BarrierMisuse, text, tile.array.name)
        return found

    def init_mbarrier(self, tile: MbarrierTile, index: Any, count: Any) -> None:
        """Initialise the mbarrier tile[index], which `count` arrivals complete in each phase."""
        self.alone()
        self.instruction("barrier")
        for lane in self.active_lanes().tolist():
            arrivals = self.of_lane(count, lane)
            place, name = self._element_of(tile, self.of_lane(index, lane))
            if not 1 <= arrivals <= MOST_ARRIVALS:
                text = f"init_mbarrier: count must be from 1 to {MOST_ARRIVALS}, got {arrivals}"
                raise self.fault(BarrierMisuse, text, tile.array.name, lane)
            if place in self._mbarriers:
                text = f"{name} was initialised before. Call init_mbarrier once for each mbarrier"
                raise self.fault(BarrierMisuse, text, tile.array.name, lane)
            self.widen(1)
            column = WARPGROUP * self.warpgroups + self._columns
            self._columns += 1
            if self.warps + column >= PRODUCT - SEVERAL:
                most = self._columns - 1
                text = f"the emulator supports at most {most} mbarriers in a thread block"
                raise self.fault(EmulatorError, text)
            tid = int(self.group.tids[lane])
            made = Mbarrier(name, arrivals, column, self.stamp(lane), tid)
            made.past = np.zeros(self.warps * (WARP - 1) + self.seen.shape[1], np.int64)
            self._mbarriers[place] = made

    def fence_mbarriers(self) -> None:
        """Record a fence for the mbarriers that the lanes that take part have initialised.

        Other threads and copies may use these mbarriers after the fence.
        """
        self.alone()
        active = self.group.tids[self.active()].tolist()
        made = [b for b in self._mbarriers.values() if b.fenced is None and b.maker in active]
        for barrier in made:
            self._tick(barrier.maker // WARP)
            barrier.fenced = self.clock * STAMP + barrier.maker
            self._tick(barrier.maker // WARP)

    def usable(self, barrier: Mbarrier, lanes: np.ndarray, by_copies: bool = False) -> None:
        """Raise an error if the lanes `lanes` may not use an mbarrier yet.

        One thread initialises the mbarrier. This thread can then arrive and wait. Other threads
        need a fence by the first thread (`fence_mbarrier_init`), and after it a barrier. If
        `by_copies` is set, the mbarrier is used to count the bytes of copies. In this case, the
        first thread needs a fence too.
        """
        base, stamp = self.base[0], barrier.fenced
        if stamp is not None and stamp < base:
            return
        maker = self.thread_name(barrier.maker)
        for lane in lanes.tolist():
            mine = barrier.maker == self.group.tids[lane]
            if not (mine or barrier.made < base or self.ordered(barrier.made, lane)):
                text = (
                    f"{barrier.name} was initialised by thread {maker}, with no barrier between "
                    "the initialisation and this use. Add syncthreads() after init_mbarrier"
                )
                raise self.fault(BarrierMisuse, text, None, lane)
            if mine and not by_copies:
                continue
            if stamp is None or not (mine or self.ordered(stamp, lane)):
                text = (
                    f"{barrier.name} was initialised by thread {maker}, which did not call "
                    "fence_mbarrier_init() afterwards. Call it after init_mbarrier, before the "
                    "barrier that lets other threads go on"
                )
                raise self.fault(MissingFence, text, None, lane)

    def in_phase(self, barrier: Mbarrier, tids: np.ndarray, does: str) -> None:
        """Raise BarrierMisuse if a thread does not know that the previous phase has ended.

        `tids` are the numbers of the threads that are checked. `does` is the beginning of the
        message, such as "this thread arrives at".
        """
        if not barrier.phase:
            return
        ignorant = self._column_known(tids, barrier.column) <= barrier.ends[-1]
        if some(ignorant):
            lane = int(np.flatnonzero(self.group.tids == tids[ignorant][0])[0])
            text = (
                f"{does} {barrier.name} in phase {barrier.phase}, but the thread has not waited "
                f"for the end of phase {barrier.phase - 1}. A GPU could count this for "
                f"phase {barrier.phase - 1}: call wait_mbarrier for that phase first"
            )
            raise self.fault(BarrierMisuse, text, None, lane)

    def arrive_mbarrier(self, tile: MbarrierTile, index: Any, size: Any = None) -> None:
        """Let the lanes that take part arrive at the mbarrier tile[index].

        Each lane announces `size` bytes, which copies must deliver before the phase ends. None
        means 0 bytes. Raise BarrierMisuse if more lanes arrive than the phase waits for.
        """
        self.alone()
        self.instruction("barrier")
        group, here = self.group, self.active_lanes()
        single = index.__class__ is not np.ndarray
        for one in [index] if single else distinct(index[here]):
            lanes = here if single else here[index[here] == one]
            barrier = self.mbarrier(tile, one)
            self.usable(barrier, lanes)
            announced = 0 if size is None else size
            if announced.__class__ is np.ndarray or not 0 <= announced <= MOST_BYTES:
                sizes = np.broadcast_to(announced, group.count)
                wrong = lanes[(sizes[lanes] < 0) | (sizes[lanes] > MOST_BYTES)]
                if wrong.size:
                    got = sizes[wrong[0]]
                    text = f"expect_bytes: size must be from 0 to {MOST_BYTES}, got {got}"
                    raise self.fault(BarrierMisuse, text, None, int(wrong[0]))
                announced = sizes[lanes].sum()
            else:
                announced = announced * lanes.size
            tids = group.tids[lanes]
            barrier.uses["arrival"] = int(tids[0]), self.calls()
            self.in_phase(barrier, tids, "this thread arrives at")
            if tids.size > barrier.pending:
                text = (
                    f"{tids.size} threads arrive at {barrier.name}, but its phase {barrier.phase} "
                    f"waits for only {barrier.pending} more arrivals (init_mbarrier was called "
                    f"with count {barrier.count}). Let fewer threads arrive, or initialise the "
                    "mbarrier with a larger count"
                )
                raise self.fault(BarrierMisuse, text, None, int(lanes[0]))
            warps = warps_of(tids)
            self._tick(warps)
            add_known(self.seen, self.heard, self.starts, tids, self.warps, barrier.past)
            barrier.pending -= tids.size
            barrier.bytes += int(announced)
            self.advance(barrier)

    def advance(self, barrier: Mbarrier) -> None:
        """End the current phase of an mbarrier if no arrival and no byte is missing."""
        if barrier.pending or barrier.bytes:
            return
        self.clock += 2
        barrier.ends.append((self.clock - 1) * STAMP + SEVERAL + self.warps + barrier.column)
        barrier.past[self.warps * WARP + barrier.column] = self.clock * STAMP
        barrier.past[self.threads : self.warps * WARP] = ALWAYS  # lanes without a thread
        for copy in barrier.flying:
            copy.stamp = barrier.ends[-1]
        barrier.arrived += barrier.flying
        barrier.flying = []
        barrier.ended, barrier.past = barrier.past, np.zeros_like(barrier.past)
        barrier.phase += 1
        barrier.pending = barrier.count
        for group in barrier.waiting:
            group.state = READY
            self._ready.append(group)
        barrier.waiting = []

    def wait_mbarrier(self, tile: MbarrierTile, index: Any, parity: Any) -> None:
        """Wait for the end of a phase of tile[index]. The parity, 0 or 1, selects the phase.

        Phases are numbered from 0. Let phase n be the first phase of which the thread does not know
        yet that it has ended. A thread knows this from an earlier wait, or from a synchronisation
        with a thread that knew.

        parity            what the call does
        n % 2             it waits until phase n has ended
        (n + 1) % 2       it returns at once, because phase n - 1 has ended

        Raise BarrierMisuse if the phase after the selected phase has ended too. A GPU would then
        see the same parity as before the selected phase ended, and would wait for a later phase.
        """
        self.alone()
        self.instruction("barrier")
        if np.ndarray not in (index.__class__, parity.__class__):
            self._wait_mbarrier(self.mbarrier(tile, index), parity)
            return
        outer, active, count = self.mask, self.active(), self.group.count
        pairs = np.stack([np.broadcast_to(x, count) for x in (index, parity)])
        each = sorted(set(zip(*pairs[:, active].tolist(), strict=True)))
        for one, which in each:
            if len(each) > 1:
                self.mask = active & (pairs == [[one], [which]]).all(axis=0)
            self._wait_mbarrier(self.mbarrier(tile, one), which)
        self.mask = outer

    def _wait_mbarrier(self, barrier: Mbarrier, parity: int) -> None:
        """Wait until the phase of `barrier` that `parity` selects has ended (`wait_mbarrier`)."""
        if parity not in (0, 1):
            raise self.fault(BarrierMisuse, f"wait_mbarrier: parity must be 0 or 1, got {parity}")
        lanes = self.active_lanes()
        self.usable(barrier, lanes)
        known = self._column_known(self.group.tids[lanes], barrier.column)
        known = known[:1] if every(known == known[0]) else np.unique(known)
        ended = np.searchsorted(barrier.ends, known)
        meant = int((ended - ((ended - 1) % 2 == parity)).min())
        barrier.uses["wait"] = int(self.group.tids[lanes[0]]), self.calls()
        barrier.awaited = max(barrier.awaited, meant)
        barrier.acquired |= meant < 0
        if barrier.acquired:
            self._acquired |= dict.fromkeys(warps_of(self.group.tids[lanes]).tolist(), barrier)
        while barrier.phase == meant:  # other lanes of the group wait too, see `_stalled`
            barrier.waiting.append(self.group)
            self._wait(AT_MBARRIER, self.site(), f"wait_mbarrier of {barrier.name}", barrier)
        if barrier.phase != meant + 1:
            which = f"the end of phase {meant}" if meant >= 0 else "the start of phase 0"
            text = (
                f"this thread waits for {which} of {barrier.name}, but {barrier.name} is already "
                f"in phase {barrier.phase}. Check the parity of this wait. If the parity is right, "
                "other threads have arrived too early: they must arrive after this wait"
            )
            raise self.fault(BarrierMisuse, text)
        if barrier.arrived:
            for copy in barrier.arrived:
                copy.land()
            barrier.arrived = []
        if meant >= 0:
            self._learn(barrier.ended)

    def left_over(self) -> None:
        """Raise BarrierMisuse if arrivals at an mbarrier are missing when a thread block ends.

        Two rules must hold for each mbarrier:

        - A phase that has begun must end. A phase has begun if threads have arrived, or have
          announced bytes.
        - A pipeline slot that was acquired must be released. A producer acquires a slot when it
          waits for the mbarrier "the slot is empty". Consumers release the slot when they arrive at
          this mbarrier. After each wait, one more phase of the mbarrier must therefore end.

        The second rule holds for mbarriers of the kind "the slot is empty". The emulator recognises
        this kind by the first wait: it returns at once, although no phase has ended.

        The second rule has one exception: the last slot that a warp acquires, if the warp starts no
        box load afterwards. A producer uses such a slot to tell consumers that no data follow.
        """
        last = set(map(id, self._acquired.values()))
        for barrier in self._mbarriers.values():
            begun = barrier.pending != barrier.count or barrier.bytes
            kept = barrier.acquired and barrier.phase < barrier.awaited + 2
            if begun or kept and id(barrier) not in last:
                raise self._unreleased(barrier)

    def _unreleased(self, barrier: Mbarrier) -> EmulatorError:
        """Return the error for an mbarrier at which arrivals or bytes are missing.

        The text names the last wait and the last arrival.
        """
        missing = f"{barrier.pending} of {barrier.count} arrivals"
        if barrier.bytes:
            missing += f" and {barrier.bytes} bytes"
        text = (
            f"the thread block ends, but phase {barrier.phase} of {barrier.name} still waits for "
            f"{missing}. Release each slot of a pipeline after its last use too: let as many "
            "threads call arrive_mbarrier as init_mbarrier was given"
        )
        for does, of in (("wait", "for"), ("arrival", "at")):
            text += f"\n  last {does} {of} {barrier.name}: "
            if does in barrier.uses:
                tid, sites = barrier.uses[does]
                lines = ", called at ".join(map(self.line_of, sites))
                text += f"thread {self.thread_name(tid)}, {lines}"
            else:
                text += "none"
        tid, sites = barrier.uses.get("wait") or barrier.uses["arrival"]
        return self.fault_at(BarrierMisuse, text, tid, sites[0], barrier.name.partition("[")[0])

    def _stalled(self) -> EmulatorError:
        """Return the error for a thread block in which no group can continue.

        Some lanes of a group may have waited for an mbarrier although the other lanes of the group
        need not wait. In this case raise Parting instead. The waiting lanes then become a group of
        their own, and the thread block begins again.
        """
        waiting = [g for g in self._groups if g.state == AT_MBARRIER]
        for g in waiting:
            if g.mask is not None and not g.mask.all():
                self.group = g
                raise Parting(g.mask)
        if not waiting:
            return super()._stalled()
        text = "; ".join(dict.fromkeys(str(g.value) for g in waiting))
        text = f"no thread can go on: {text}{self._waiters()}"
        g = waiting[0]
        return self.fault_at(Deadlock, text, int(g.tids[0]), g.site)
