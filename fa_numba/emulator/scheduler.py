"""Runs a kernel's Python function on the CPU: a greenlet a thread, one block after the other.

A thread runs until it waits, at a barrier of the block, at a named one or in a collective of its
warp, or returns. When nothing can run, either all threads of the block stand at one barrier and it
opens, or the kernel is at fault and the error says who waits where.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from itertools import product
from math import prod
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from .errors import (
    BarrierDivergence,
    BarrierMisuse,
    Deadlock,
    EmulatorError,
    Index3,
    SharedHazard,
)
from .memory import (
    NOBODY,
    SEVERAL,
    STAMP,
    Counts,
    GlobalArray,
    LocalArray,
    LocalTensor,
    SharedArray,
    SharedBuffer,
    SharedMatrix,
    SharedTensor,
)
from .namespace import FULL, WARP, Namespace, element_type
from .rebind import Rebinder

MAX_THREADS = 1024
MAX_YIELDS = 1000  # rounds in which every thread only yields before that counts as a deadlock

READY, AT_BARRIER, AT_NAMED, AT_WARP, DONE = range(5)
Site = tuple[int, int]  # a call in kernel code: id of the code object, offset of the instruction


class Warp:
    """32 threads of a block, their clock and the collectives that some of them wait in.

    What warp w did at stamps below `seen[w]` happened before the present of this one.
    """

    __slots__ = ("index", "lanes", "mask", "start", "several", "seen", "groups")

    def __init__(self, index: int) -> None:
        self.index = index
        self.lanes: list[Thread] = []
        self.mask = 0
        self.start = self.several = 0
        self.seen: list[int] = []
        self.groups: dict[tuple[str, int, Site], dict[int, Any]] = {}


class Thread:
    """One CUDA thread: its place, what it waits for, and its copies in flight."""

    __slots__ = (
        "x", "y", "z", "tid", "lane", "warp", "state", "site", "operation", "value", "run",
        "open", "groups",
    )  # fmt: skip

    def __init__(self, tid: int, block: Index3, warp: Warp) -> None:
        self.x = tid % block[0]
        self.y = tid // block[0] % block[1]
        self.z = tid // (block[0] * block[1])
        self.tid, self.lane, self.warp = tid, tid % WARP, warp
        self.state = READY
        self.site: Site = (0, 0)
        self.operation = ""
        self.value: Any = None
        self.run: greenlet
        self.open: list[tuple[SharedArray, int, int, Callable[[], list[Any]]]] = []
        self.groups: deque[list[tuple[SharedArray, int, int, Callable[[], list[Any]]]]] = deque()


class NamedBarrier:
    """A named barrier of `threads` threads from its first arrival until it opens.

    What warp w did at stamps below `seen[w]` happened before an arrival.
    """

    __slots__ = ("threads", "site", "arrived", "synced", "waiting", "seen", "opened")

    def __init__(self, threads: int, site: Site, seen: list[int]) -> None:
        self.threads, self.site, self.seen = threads, site, seen
        self.arrived: list[Warp] = []
        self.synced: list[Warp] = []  # those of them that wait
        self.waiting: list[Thread] = []
        self.opened = False


class Context:
    """A running launch, as `current()` gives it to the emulation of an intrinsic."""

    __slots__ = (
        "grid", "block_shape", "shared_bytes", "tid", "thread", "block", "cell",
        "clock", "base", "me", "several",
        "_cuda", "_codes", "_hub", "_threads", "_ready", "_statics", "_dynamics", "_banks",
        "_tiles", "_stale", "_meetings", "_opened",
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
        self._banks: dict[np.dtype, SharedBuffer] = {}
        self._tiles: list[tuple[int, int, np.dtype, str]] = []
        self._stale = 0
        self._meetings: dict[int, NamedBarrier] = {}  # by barrier
        self._opened: dict[int, list[int]] = {}  # what the last one had seen

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
        return "outside the kernel" if code is None else _line(code, site[1])

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

    # ---- what happened before what: see memory.py

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
            known = self._statics[site] = kind(self, name, axes, element, self._bank(prod(axes)))
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
        if element not in self._banks:
            self._banks[element] = self._bank(self.shared_bytes // size)
        tile = SharedArray(self, name, (length,), element, self._banks[element], offset)
        self._dynamics[key] = tile
        return tile

    def _bank(self, length: int) -> SharedBuffer:
        return SharedBuffer(length, -(-len(self._threads) // WARP))

    def local_array(self, shape: Any, dtype: Any) -> LocalArray:
        axes = shape if isinstance(shape, tuple) else (shape,)
        kind = LocalArray if len(axes) == 1 else LocalTensor
        return kind(self, self.site(), axes, element_type(dtype))

    def target(self, site: Site, otherwise: str) -> str:
        """The variable that the result of the call at `site` goes to."""
        code = self._codes.get(site[0])
        return (code and _assigned(code, site[1])) or otherwise

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

        meeting = self.collective(operation, FULL, (barrier, threads), arrive)
        if waits and not meeting.opened:
            t.state, t.site = AT_NAMED, self.site()
            t.operation = f"{operation} of barrier {barrier}"
            meeting.waiting.append(t)
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
        meeting = self._meetings.get(barrier)
        if meeting is None:
            meeting = self._meetings[barrier] = NamedBarrier(threads, self.site(), past)
        if meeting.threads != threads:
            text = f"warp {warp.index} comes to a barrier of {threads} threads"
            raise self.fault(BarrierMisuse, f"{text}, but {self._missing(barrier)}")
        if warp in meeting.arrived:
            text = f"warp {warp.index} comes again to a barrier that has not opened"
            raise self.fault(BarrierMisuse, f"{text}: {self._missing(barrier)}")
        meeting.seen = list(map(max, meeting.seen, past))
        meeting.arrived.append(warp)
        if waits:
            meeting.synced.append(warp)
        if len(meeting.arrived) * WARP == threads:
            self._opened[barrier] = self._meetings.pop(barrier).seen
            meeting.opened = True
            for other in meeting.synced:
                other.seen = list(meeting.seen)
            for t in meeting.waiting:
                t.state = READY
            self._ready.extend(meeting.waiting)
        return meeting

    def _missing(self, barrier: int) -> str:
        meeting = self._meetings[barrier]
        count, first = len(meeting.arrived) * WARP, self.line_of(meeting.site)
        return (
            f"barrier {barrier} is of {meeting.threads} threads, of which {count} have arrived, "
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

    # ---- running

    def run_block(self, function: Callable[..., None], args: Sequence[Any], block: Index3) -> None:
        self.block = block
        shape = self.block_shape
        count = prod(shape)
        warps = [Warp(w) for w in range(-(-count // WARP))]
        threads = self._threads = [Thread(t, shape, warps[t // WARP]) for t in range(count)]
        for t in threads:
            t.warp.lanes.append(t)
            t.warp.mask |= 1 << t.lane
            t.run = greenlet(partial(self._thread, t, function, args))
        self._statics, self._dynamics, self._banks, self._tiles = {}, {}, {}, []
        self._opened = {}
        self.clock = self._stale = 0
        self._open_barrier(warps)
        ready = self._ready = deque(threads)
        self.thread = threads[0]
        self._hub = getcurrent()
        cuda = self._cuda
        place, cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z = cuda.threadIdx, *block
        while True:
            while ready:
                t = ready.popleft()
                if t.warp is not self.thread.warp:
                    for array in (*self._statics.values(), *self._dynamics.values()):
                        array.turn_to(t.warp.index)
                self.thread, self.tid = t, t.tid
                place.x, place.y, place.z, cuda.laneid = t.x, t.y, t.z, t.lane
                self.me, self.several = t.warp.start + t.tid, t.warp.several
                t.run.switch()
            first = threads[0].site
            if all(t.state == AT_BARRIER and t.site == first for t in threads):
                self._meet(threads)
                self._open_barrier(warps)
                self._stale = 0
                ready.extend(threads)
            elif all(t.state == DONE for t in threads) and not self._meetings:
                return
            else:
                raise self._stalled()

    def end(self) -> None:
        """Unwind the threads that an error left waiting."""
        for t in self._threads:
            if not t.run.dead:
                t.run.throw()

    def _thread(self, t: Thread, function: Callable[..., None], args: Sequence[Any]) -> None:
        try:
            function(*args)
        except EmulatorError:
            raise
        except Exception as error:
            place = f"in block {self.block}, thread ({t.x}, {t.y}, {t.z})"
            error.add_note(f"{place}, at {self._failed_line(error.__traceback__)}")
            raise
        t.state = DONE
        self._stale = 0
        for dst, first, _, _ in [copy for group in (*t.groups, t.open) for copy in group]:
            line = self.line_of(dst.bank.flights[first][1])
            raise SharedHazard(
                f"the thread exits with a copy into {dst._element(first)} in flight",
                block=self.block,
                thread=(t.x, t.y, t.z),
                array=dst.name,
                line=line,
            )

    def _failed_line(self, trace: TracebackType | None) -> str:
        line = "outside the kernel"
        while trace is not None:
            if id(trace.tb_frame.f_code) in self._codes:
                line = _line(trace.tb_frame.f_code, trace.tb_lasti)
            trace = trace.tb_next
        return line

    def _meet(self, threads: list[Thread]) -> None:
        operation = threads[0].operation
        values = [t.value for t in threads]
        result: Any = None
        if operation == "syncthreads_count":
            result = sum(1 for v in values if v)
        elif operation == "syncthreads_and":
            result = int(all(values))
        elif operation == "syncthreads_or":
            result = int(any(values))
        for t in threads:
            t.state, t.value = READY, result

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

    def _stalled(self) -> EmulatorError:
        """The error for a block in which nothing runs: who waits for whom, and where.

        Also for one that ends with a named barrier that some came to and that never opened.
        """
        kind: type[EmulatorError] = BarrierDivergence
        site: Site | None = None
        in_warp = [t for t in self._threads if t.state == AT_WARP]
        at_barrier = [t for t in self._threads if t.state == AT_BARRIER]
        at_named = [t for t in self._threads if t.state == AT_NAMED]
        deserted = [t for t in in_warp if self._deserted(t)]
        if deserted:
            t = deserted[0]
            text = f"{t.operation} with mask {t.value:#010x} is not reached by all its lanes"
        elif at_named:
            t, kind = at_named[0], Deadlock
            text = "; ".join(map(self._missing, self._meetings))
        elif at_barrier:
            t = at_barrier[0]
            text = f"{t.operation} is not reached by all threads of the block"
        elif in_warp:
            t, kind = in_warp[0], Deadlock
            text = f"lanes wait for one another in {t.operation} with different masks"
        else:
            barrier, meeting = next(iter(self._meetings.items()))
            t, site, text = meeting.arrived[0].lanes[0], meeting.site, self._missing(barrier)
        return kind(
            f"{text}: {self._waiters()}",
            block=self.block,
            thread=(t.x, t.y, t.z),
            line=self.line_of(site or t.site),
        )

    def _deserted(self, t: Thread) -> bool:
        """Whether a lane that `t` waits for in a warp collective is somewhere else."""
        named = [u for u in t.warp.lanes if t.value >> u.lane & 1]
        return any(u.state != AT_WARP or u.site != t.site for u in named)


def _warp(code: int) -> int:
    """The warp of a stamp's code."""
    return code - SEVERAL if code >= SEVERAL else code // WARP


@cache
def _line(code: CodeType, instruction: int) -> str:
    positions = list(code.co_positions())
    number = positions[instruction // 2][0] if 0 <= instruction // 2 < len(positions) else None
    number = number or code.co_firstlineno
    source = linecache.getline(code.co_filename, number).strip()
    return f"{os.path.basename(code.co_filename)}:{number}: {source}"


@cache
def _assigned(code: CodeType, instruction: int) -> str | None:
    """The variable that the result of the call at `instruction` is stored to."""
    for following in dis.get_instructions(code):
        if following.offset > instruction:
            if not following.opname.startswith("STORE_"):
                return None
            name = following.argval  # Python 3.13 fuses it with the next instruction
            return name[0] if isinstance(name, tuple) else name
    return None


class _Running(threading.local):
    """The contexts of this Python thread's launches, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []


_running = _Running()


def current() -> Context:
    """The running launch. RuntimeError outside of one."""
    if not _running.contexts:
        raise RuntimeError("no kernel is running on the emulator")
    return _running.contexts[-1]


def _extent(name: str, value: Any) -> Index3:
    axes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(axes) <= 3 or any(not isinstance(n, (int, np.integer)) or n < 1 for n in axes):
        raise ValueError(f"{name} = {value!r}, allowed: one to three positive integers")
    x, y, z = (*(int(n) for n in axes), 1, 1)[:3]
    return x, y, z


def launch(
    py_func: Callable[..., None],
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    *,
    shared_bytes: int = 0,
    uncounted: Collection[str] = (),
) -> Counts:
    """Run a kernel on the CPU and count its global accesses.

    Parameters
    ----------
    py_func : a kernel, jitted or plain; its source runs unchanged.
    grid, block : extents, one to three integers.
    args : NumPy arrays, any strides and any real dtype, become `GlobalArray`s named after the
        kernel's parameters and are written in place; NumPy scalars become Python numbers; so do
        the fields of a named tuple, under their own names; anything else passes through.
    shared_bytes : dynamic shared memory.
    uncounted : names of arrays that the counts leave out.

    Raises
    ------
    EmulatorError : a subclass for each fault of the kernel, see errors.py.
    ValueError, TypeError : bad extents or arguments.
    Errors of Python in the kernel's code pass, with a note that names block, thread and line.

    Arithmetic between stores is that of Python floats, in double precision; stores round.
    """
    function = getattr(py_func, "py_func", py_func)
    extent, shape = _extent("grid", grid), _extent("block", block)
    if prod(shape) > MAX_THREADS:
        raise ValueError(f"block = {block!r}, allowed: at most {MAX_THREADS} threads")
    context = Context(extent, shape, shared_bytes)
    rebinder = Rebinder(context._cuda)
    names = list(inspect.signature(function).parameters)
    if len(names) != len(args):
        raise TypeError(f"{function.__name__} takes {len(names)} arguments, got {len(args)}")
    arrays: list[GlobalArray] = []

    def passed(name: str, value: Any) -> Any:
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            return value.item()
        if isinstance(value, np.ndarray):
            arrays.append(GlobalArray(context, name, value))
            return arrays[-1]
        if hasattr(value, "_fields"):
            return type(value)(*map(passed, value._fields, value))
        return value

    values = [passed(name, value) for name, value in zip(names, args, strict=True)]
    rebound = rebinder.function(function)
    context._codes = rebinder.codes
    _running.contexts.append(context)
    try:
        for z, y, x in product(range(extent[2]), range(extent[1]), range(extent[0])):
            context.run_block(rebound, values, (x, y, z))
    finally:
        context.end()
        _running.contexts.pop()
    counts = Counts()
    for a in arrays:
        if a.name in uncounted:
            continue
        for number, elements, size in (
            (a.tally.loads, counts.loads, counts.load_bytes),
            (a.tally.stores, counts.stores, counts.store_bytes),
        ):
            if number:
                elements[a.name] += number
                size[a.name] += number * a.itemsize
    return counts
