"""A running launch as kernels and intrinsics meet it: arrays, asynchronous copies, barriers.

A thread that waits hands control back to `run.py`, which lets the next one go on.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable
from math import prod
from types import CodeType, FrameType
from typing import Any

import numpy as np
from greenlet import greenlet

from .errors import BarrierDivergence, BarrierMisuse, Deadlock, EmulatorError, Index3, OutOfBounds
from .global_memory import GlobalArray
from .local_memory import LocalArray, LocalTensor
from .namespace import Namespace, element_type
from .shared_memory import (
    NOBODY,
    SEVERAL,
    STAMP,
    SharedArray,
    SharedBuffer,
    SharedMatrix,
    SharedTensor,
)
from .source_lines import assigned_name, source_line
from .threads import (
    AT_BARRIER,
    AT_NAMED,
    AT_WARP,
    DONE,
    FULL,
    READY,
    WARP,
    NamedBarrier,
    Site,
    Thread,
    Warp,
)

MAX_YIELDS = 1000  # rounds in which every thread only yields before that counts as a deadlock


class Context:
    """A running launch, as `current()` gives it to the emulation of an intrinsic."""

    __slots__ = (
        "grid", "block_shape", "shared_bytes", "tid", "thread", "block", "cell",
        "clock", "base", "me", "several",
        "_cuda", "_codes", "_hub", "_threads", "_ready", "_statics", "_dynamics", "_buffers",
        "_tiles", "_stale", "_named_barriers", "_opened",
    )  # fmt: skip

    def __init__(self, grid: Index3, block: Index3, shared_bytes: int) -> None:
        self.grid, self.block_shape, self.shared_bytes = grid, block, shared_bytes
        self.cell = array("f", [0.0])
        self.tid = 0
        self.block: Index3 = (0, 0, 0)
        self.thread: Thread
        self.clock = self.base = self.me = self.several = 0
        self._cuda = Namespace(self)
        self._codes: dict[int, CodeType] = {}
        self._hub: greenlet
        self._threads: list[Thread] = []
        self._ready: deque[Thread] = deque()
        self._statics: dict[Site, SharedArray] = {}
        self._dynamics: dict[Any, SharedArray] = {}
        self._buffers: dict[np.dtype, SharedBuffer] = {}
        self._tiles: list[tuple[int, int, np.dtype, str]] = []
        self._stale = 0
        self._named_barriers: dict[int, NamedBarrier] = {}  # by number, until they open
        self._opened: dict[int, list[int]] = {}  # by number, what the last one had seen

    # ---- where the kernel is

    def site(self) -> Site:
        """The instruction of the innermost kernel or device-function frame."""
        frame: FrameType | None = sys._getframe(1)
        codes = self._codes
        while frame is not None:
            key = id(frame.f_code)
            if key in codes:
                return key, frame.f_lasti
            frame = frame.f_back
        return 0, 0

    def line_of(self, site: Site) -> str:
        code = self._codes.get(site[0])
        return "outside the kernel" if code is None else source_line(code, site[1])

    def thread_name(self, tid: int) -> str:
        t = self._threads[tid]
        return f"({t.x}, {t.y}, {t.z})"

    def fault(
        self, kind: type[EmulatorError], text: str, array: str | None = None
    ) -> EmulatorError:
        """An error of `kind` at the current thread's line, to be raised by the caller."""
        t = self.thread
        return kind(
            text,
            block=self.block,
            thread=(t.x, t.y, t.z),
            array=array,
            line=self.line_of(self.site()),
        )

    def outside(self, name: str, shape: tuple[int, ...], index: Any) -> EmulatorError:
        """The error for an index past an array's shape, to be raised by the caller."""
        axes = index if isinstance(index, tuple) else (index,)
        place, extent = ", ".join(map(str, axes)), " x ".join(map(str, shape))
        return self.fault(OutOfBounds, f"{name}[{place}] is outside of {extent} elements", name)

    # ---- what happened before what: see shared_memory.py

    def ordered(self, stamp: int) -> bool:
        """Whether an access happened before the present."""
        code = stamp % STAMP
        if code == self.tid:
            return True
        if code == NOBODY:  # UNWRITTEN and IN_FLIGHT
            return False
        return stamp < self.thread.warp.seen[_warp(code)]

    def joined(self, stamp: int) -> int:
        """The stamp of accesses of this thread's warp with its own added."""
        warp = self.thread.warp
        before = stamp < warp.seen[warp.index] or stamp % STAMP == self.tid
        return self.me if before else self.several

    def who(self, stamp: int) -> str:
        code = stamp % STAMP
        if code >= SEVERAL:
            return f"several threads of warp {code - SEVERAL}"
        return f"thread {self.thread_name(code)}"

    # ---- shared and local arrays

    def static_array(self, shape: Any, dtype: Any) -> SharedArray:
        """`cuda.shared.array` with a shape: one array a block and call site; 0: all dynamic."""
        element = element_type(dtype)
        if shape == 0:
            return self.shared_tile(0, self.shared_bytes // element.itemsize, dtype)
        site = self.site()
        known = self._statics.get(site)
        if known is None:
            axes = shape if isinstance(shape, tuple) else (shape,)
            name = self.target(site, f"shared{len(self._statics)}")
            kind = {1: SharedArray, 2: SharedMatrix}.get(len(axes), SharedTensor)
            buffer = self._new_buffer(prod(axes))
            known = self._statics[site] = kind(self, name, axes, element, buffer)
        return known

    def shared_tile(self, offset: int, length: int, dtype: Any = float) -> SharedArray:
        """The 1-D array of `length` elements at element `offset` of the dynamic shared memory.

        Tiles of one dtype may overlap and then share values and hazards; tiles of different dtypes
        may not. Raises EmulatorError past the `shared_bytes` of the launch.
        """
        site = self.site()
        key = (site, offset, length, dtype)
        known = self._dynamics.get(key)
        if known is not None:
            return known
        element = element_type(dtype)
        size = element.itemsize
        name = self.target(site, f"shared[{offset}:{offset + length}]")
        if offset < 0 or length < 0 or (offset + length) * size > self.shared_bytes:
            raise self.fault(
                EmulatorError,
                f"{name} takes bytes {offset * size} to {(offset + length) * size} of the dynamic "
                f"shared memory, and the launch has {self.shared_bytes}",
                name,
            )
        first, last = offset * size, (offset + length) * size
        for start, end, other, neighbour in self._tiles:
            if other != element and first < end and start < last:
                text = f"{name} ({element}) overlaps {neighbour} ({other}): not emulated"
                raise self.fault(EmulatorError, text, name)
        self._tiles.append((first, last, element, name))
        if element not in self._buffers:
            self._buffers[element] = self._new_buffer(self.shared_bytes // size)
        tile = SharedArray(self, name, (length,), element, self._buffers[element], offset)
        self._dynamics[key] = tile
        return tile

    def _new_buffer(self, length: int) -> SharedBuffer:
        return SharedBuffer(length, -(-len(self._threads) // WARP))

    def local_array(self, shape: Any, dtype: Any) -> LocalArray:
        axes = shape if isinstance(shape, tuple) else (shape,)
        kind = LocalArray if len(axes) == 1 else LocalTensor
        return kind(self, self.site(), axes, element_type(dtype))

    def target(self, site: Site, otherwise: str) -> str:
        """The variable that the result of the call at `site` goes to."""
        code = self._codes.get(site[0])
        return (code and assigned_name(code, site[1])) or otherwise

    # ---- asynchronous copies

    def async_copy(
        self,
        dst: SharedArray,
        e: int,
        src: GlobalArray,
        index: tuple[int, ...],
        n: int,
        valid: int,
    ) -> None:
        """cp.async: `valid` elements of `src` from `index` on into dst[e:e+n], the rest zero.

        Counts `valid` loads. Lands, reading `src` then, when this thread waits for its group.
        """
        if not 0 <= valid <= n:
            raise ValueError(f"valid = {valid} of a copy of n = {n} elements, allowed: 0 to n")
        read = src.source(index, n, valid)
        self.thread.open.append((dst, dst.depart(e, n), n, read))

    def async_commit(self) -> None:
        """cp.async.commit_group: closes this thread's group of copies, which may be empty."""
        t = self.thread
        t.groups.append(t.open)
        t.open = []

    def async_wait(self, n: int) -> None:
        """cp.async.wait_group: until at most n groups of this thread are in flight."""
        groups = self.thread.groups
        while len(groups) > n:
            for dst, first, length, read in groups.popleft():
                values = read()
                dst.land(first, values + [0] * (length - len(values)))

    # ---- waiting

    def barrier(self, operation: str, value: Any = None) -> Any:
        """Wait for the whole block; returns what the barrier hands to this thread."""
        t = self.thread
        t.state, t.site, t.operation, t.value = AT_BARRIER, self.site(), operation, value
        self._hub.switch()
        return t.value

    def collective(
        self,
        operation: str,
        mask: int,
        value: Any,
        resolve: Callable[[dict[int, Any], int], dict[int, Any]],
    ) -> Any:
        """Wait for the lanes in `mask`; returns what `resolve(values by lane, mask)` gives."""
        t = self.thread
        warp = t.warp
        mask &= 0xFFFFFFFF
        site = self.site()
        if not mask >> t.lane & 1:
            text = f"lane {t.lane} calls {operation} with mask {mask:#010x}, which leaves it out"
            raise self.fault(BarrierDivergence, text)
        mask &= warp.mask
        key = (operation, mask, site)
        group = warp.groups.setdefault(key, {})
        group[t.lane] = value
        if len(group) < mask.bit_count():
            t.state, t.site, t.operation, t.value = AT_WARP, site, operation, mask
            self._hub.switch()
            return t.value
        del warp.groups[key]
        results = resolve(group, mask)
        if operation == "syncwarp" and mask == warp.mask:
            self._tick(warp)
            warp.seen[warp.index] = warp.start
            self.me, self.several = warp.start + t.tid, warp.several
        self._stale = 0
        for lane in group:
            other = warp.lanes[lane]
            if other is not t:
                other.state, other.value = READY, results[lane]
                self._ready.append(other)
        return results[t.lane]

    def named_barrier(self, operation: str, barrier: int, threads: int, waits: bool) -> None:
        """Come to a barrier of `threads` threads: bar.sync or, unless it `waits`, bar.arrive.

        All lanes of a warp come together. The barrier opens, and is as new, when warps of as many
        threads have: what they did before then happened before what the waiting ones do next.
        Arriving orders nothing for the warp that arrives, not even among its lanes.

        Raises BarrierMisuse where lanes of a warp or warps at a barrier disagree, where a warp that
        arrived comes again before the barrier has opened, and where nothing orders its coming after
        the barrier's last use: another time it could be taken for a part of that.
        """
        t = self.thread

        def arrive(operands: dict[int, tuple[int, int]], mask: int) -> dict[int, NamedBarrier]:
            if len(set(operands.values())) > 1:
                text = f"the lanes of a warp call {operation} for different barriers or threads"
                raise self.fault(BarrierMisuse, text)
            return dict.fromkeys(operands, self._arrive(barrier, threads, waits))

        named = self.collective(operation, FULL, (barrier, threads), arrive)
        if waits and not named.opened:
            t.state, t.site = AT_NAMED, self.site()
            t.operation = f"{operation} of barrier {barrier}"
            named.waiting.append(t)
            self._hub.switch()
        else:
            self.me, self.several = t.warp.start + t.tid, t.warp.several

    def _arrive(self, barrier: int, threads: int, waits: bool) -> NamedBarrier:
        """The current warp comes to a barrier; the last one opens it."""
        warp = self.thread.warp
        self._tick(warp)
        past = list(warp.seen)
        past[warp.index] = warp.start
        if any(a < b for a, b in zip(past, self._opened.get(barrier, past), strict=True)):
            text = f"warp {warp.index} comes to barrier {barrier}, not ordered after its last use"
            raise self.fault(BarrierMisuse, text)
        named = self._named_barriers.get(barrier)
        if named is None:
            named = self._named_barriers[barrier] = NamedBarrier(threads, self.site(), past)
        if named.threads != threads:
            text = f"warp {warp.index} comes to a barrier of {threads} threads"
            raise self.fault(BarrierMisuse, f"{text}, but {self._missing(barrier)}")
        if warp in named.arrived:
            text = f"warp {warp.index} comes again to a barrier that has not opened"
            raise self.fault(BarrierMisuse, f"{text}: {self._missing(barrier)}")
        named.seen = list(map(max, named.seen, past))
        named.arrived.append(warp)
        if waits:
            named.synced.append(warp)
        if len(named.arrived) * WARP == threads:
            self._opened[barrier] = self._named_barriers.pop(barrier).seen
            named.opened = True
            for other in named.synced:
                other.seen = list(named.seen)
            for t in named.waiting:
                t.state = READY
            self._ready.extend(named.waiting)
        return named

    def _missing(self, barrier: int) -> str:
        named = self._named_barriers[barrier]
        count, first = len(named.arrived) * WARP, self.line_of(named.site)
        return (
            f"barrier {barrier} is of {named.threads} threads, of which {count} have arrived, "
            f"the first at {first}"
        )

    def give_way(self) -> None:
        """Let the other threads run first: a spinning thread must, none is preempted."""
        self._stale += 1
        if self._stale > MAX_YIELDS * len(self._threads):
            raise self.fault(Deadlock, f"spins without end: {self._waiters()}")
        self._ready.append(self.thread)
        self._hub.switch()

    def alive(self) -> int:
        """The lanes of the current warp that have not returned."""
        return sum(1 << t.lane for t in self.thread.warp.lanes if t.state != DONE)

    def _tick(self, warp: Warp) -> None:
        self.clock += 1
        warp.start = self.clock * STAMP
        warp.several = warp.start + SEVERAL + warp.index

    def _open_barrier(self, warps: list[Warp]) -> None:
        self.clock += 1
        self.base = self.clock * STAMP
        for warp in warps:
            warp.start, warp.several = self.base, self.base + SEVERAL + warp.index
            warp.seen = [self.base] * len(warps)

    def _waiters(self) -> str:
        groups: dict[str, list[Thread]] = {}
        for t in self._threads:
            where = {READY: "can run", DONE: "returned"}.get(t.state)
            if where is None:
                where = f"wait in {t.operation} at {self.line_of(t.site)}"
            groups.setdefault(where, []).append(t)
        return "; ".join(f"{self._names(ts)} {where}" for where, ts in groups.items())

    def _names(self, threads: list[Thread]) -> str:
        names = [self.thread_name(t.tid) for t in threads[:4]]
        more = f", ... ({len(threads)} threads)" if len(threads) > 4 else ""
        return f"thread{'s' if len(threads) > 1 else ''} {', '.join(names)}{more}"


def _warp(code: int) -> int:
    """The warp of a stamp's code."""
    return code - SEVERAL if code >= SEVERAL else code // WARP


class Running(threading.local):
    """The contexts of this Python thread's launches, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []


running = Running()


def current() -> Context:
    """The running launch. RuntimeError outside of one."""
    if not running.contexts:
        raise RuntimeError("no kernel is running on the emulator")
    return running.contexts[-1]
