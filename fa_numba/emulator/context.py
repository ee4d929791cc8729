"""A running launch as kernels and intrinsics meet it: lanes, arrays, asynchronous copies.

What waits for other threads stands in waiting.py, which lanes take part in flow.py.
"""

from __future__ import annotations

import sys
import threading
from math import prod
from types import CodeType, FrameType
from typing import Any

import numpy as np

from .active import Active
from .checks import PITCH, SEVERAL, STAMP, ordered
from .counts import Access
from .errors import EmulatorError, Index3, OutOfBounds
from .global_memory import GlobalArray
from .groups import WARP, Copy, OneByOne, Site, alike, warps_of
from .lanes import Mask
from .local_memory import LocalArray
from .namespace import Namespace, element_type
from .shared_memory import SharedArray, SharedBuffer
from .source_lines import assigned_name, source_line
from .trace import Trace

UNBOUNDED = 1 << 62
# Blocks that run at once may not make more: one of them may wait for another to come after it.
MOST_ACCESSES = 1 << 17


class Context(Active):
    """A running launch, as `current()` gives it to the emulation of an intrinsic.

    `group` are the lanes that run, `mask` those of them that take part (flow.py). They are of one
    block, number `block_number` of the launch from 1 on, or of `several` that run at once, the
    first of which that is (batches.py).
    """

    __slots__ = (
        "grid", "block_shape", "shared_bytes", "kernel", "block", "block_number", "clock", "base",
        "starts", "seen", "warps", "journal", "additions", "trace", "sites",
        "_cuda", "_codes", "_statics", "_dynamics", "_pool", "_tiles", "_clocks", "_accesses_left",
        "_rows", "_row_of", "_numbered", "_instructions", "_warps_active",
    )  # fmt: skip

    def __init__(
        self, grid: Index3, block: Index3, shared_bytes: int, kernel: str, at_once: int = 1
    ) -> None:
        super().__init__(prod(block), at_once)
        self.grid, self.block_shape, self.shared_bytes = grid, block, shared_bytes
        self.kernel = kernel
        self.warps = -(-self.threads // WARP)
        self.block: Index3 = (0, 0, 0)
        self.block_number = 1
        self.clock = 0
        # By block: the stamp of its last barrier. By warp, PITCH // WARP a block: of its present,
        # and of what happened before it in each warp of its block.
        self._clocks = (
            np.zeros(at_once, np.int64),
            np.zeros(at_once * PITCH // WARP, np.int64),
            np.zeros((at_once * PITCH // WARP, self.warps), np.int64),
        )
        self.base, self.starts, self.seen = self._clocks
        self.journal: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.additions: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.trace: Trace | None = None
        self.sites: list[Site] = []
        self._cuda = Namespace(self)
        self._codes: dict[int, CodeType] = {}
        self._statics: dict[Site, SharedArray] = {}
        self._dynamics: dict[Any, SharedArray] = {}
        self._pool: dict[Any, SharedBuffer] = {}
        self._tiles: list[tuple[int, int, np.dtype, str]] = []
        self._rows = np.zeros((64, 4), np.int64)  # statistics, see checks.py
        self._row_of: dict[tuple[str, str, str, Site], int] = {}
        self._numbered: dict[Site, int] = {}
        self._instructions: dict[str, int] = {}
        self._warps_active: tuple[Any, int] = (self, 0)
        self._accesses_left = UNBOUNDED

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

    def numbered_site(self) -> int:
        """The index into `sites` of this instruction."""
        site = self.site()
        number = self._numbered.get(site)
        if number is None:
            number = self._numbered[site] = len(self.sites)
            self.sites.append(site)
        return number

    def line_of(self, site: Site) -> str:
        code = self._codes.get(site[0])
        return "outside the kernel" if code is None else source_line(code, site[1])

    def place_of(self, tid: int) -> Index3:
        """A thread's place in its block."""
        x, y, _ = self.block_shape
        return tid % x, tid // x % y, tid // (x * y)

    def thread_name(self, tid: int) -> str:
        return f"({', '.join(map(str, self.place_of(tid)))})"

    def block_of(self, number: int) -> Index3:
        x, y, _ = self.grid
        n = number - 1
        return n % x, n // x % y, n // (x * y)

    def fault(
        self,
        kind: type[EmulatorError],
        text: str,
        array: str | None = None,
        lane: int | None = None,
    ) -> EmulatorError:
        """An error of `kind` at the current line, in the first lane or another, to be raised."""
        lane = self.first_lane() if lane is None else lane
        return self.fault_at(kind, text, int(self.group.tids[lane]), self.site(), array)

    def fault_at(
        self, kind: type[EmulatorError], text: str, tid: int, site: Site, array: str | None = None
    ) -> EmulatorError:
        """An error of `kind` of a thread, at the line of an instruction, to be raised."""
        place = {"block": self.block, "thread": self.place_of(tid)}
        return kind(text, **place, array=array, line=self.line_of(site))

    def outside(self, name: str, shape: tuple[int, ...], index: Any, lane: int) -> EmulatorError:
        """The error for an index past an array's shape, to be raised by the caller."""
        place = ", ".join(map(str, self.of_lane(index, lane, whole=True)))
        extent = " x ".join(map(str, shape))
        text = f"{name}[{place}] is outside of {extent} elements"
        return self.fault(OutOfBounds, text, name, lane)

    def refuse_zero(self, zero: np.ndarray | None, text: str) -> None:
        """Raise for a division by zero, if a lane that takes part makes it."""
        here = self.active() if zero is None else self.active() & zero
        if here.any():
            error: Any = ZeroDivisionError(text)
            error.lane = int(np.flatnonzero(here)[0])
            raise error

    # ---- what happened before what: see shared_memory.py

    def stamp(self, lane: int) -> int:
        """The stamp of what a lane does now."""
        group = self.group
        return int(self.starts[group.warp_of[lane]] + group.tids[lane])

    def ordered(self, stamp: int, lane: int) -> bool:
        """Whether an access happened before the present of a lane."""
        tid = int(self.group.tids[lane])
        return bool(ordered(stamp, tid, tid // WARP, self.seen))

    def joined(self, stamp: int, lane: int) -> int:
        """The stamp of accesses of a lane's warp with its own added."""
        warp = int(self.group.warp_of[lane])
        before = stamp < self.seen[warp, warp] or stamp % STAMP == self.group.tids[lane]
        return self.stamp(lane) if before else int(self.starts[warp]) + SEVERAL + warp

    def who(self, stamp: int) -> str:
        code = stamp % STAMP
        if code >= SEVERAL:
            return f"several threads of warp {code - SEVERAL}"
        return f"thread {self.thread_name(code)}"

    def synced(self, warps: np.ndarray) -> None:
        """All lanes of these warps have met: see mbarriers.py."""

    # ---- shared and local arrays

    def static_array(self, shape: Any, dtype: Any) -> SharedArray:
        """`cuda.shared.array` of so many elements: one a block and call site; 0: all dynamic."""
        element = element_type(dtype)
        if shape == 0:
            return self.shared_tile(0, self.shared_bytes // element.itemsize, dtype)
        site = self.site()
        known = self._statics.get(site)
        if known is None:
            name = self.target(site, f"shared{len(self._statics)}")
            buffer = self._buffer(site, shape, element)
            known = self._statics[site] = SharedArray(self, name, shape, element, buffer)
        return known

    def shared_tile(self, offset: Any, length: int, dtype: Any = float) -> Any:
        """The 1-D array of `length` elements at element `offset` of the dynamic shared memory.

        Tiles of one dtype may overlap and then share values and hazards; tiles of different dtypes
        may not. Raises EmulatorError past the `shared_bytes` of the launch.
        """
        offset = self.uniform_in_block(offset)
        if offset.__class__ is np.ndarray:
            taken = np.unique(offset[self.active()]).tolist()
            *_, one = (self.shared_tile(each, length, dtype) for each in taken)
            return SharedArray(self, one.name, length, one.dtype, one.buffer, offset)
        site = self.site()
        key = (site, offset, length, dtype)
        known = self._dynamics.get(key)
        if known is not None:
            return known
        element = element_type(dtype)
        size = element.itemsize
        name = self.target(site, "shared")
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
        buffer = self._buffer(element, self.shared_bytes // size, element)
        tile = SharedArray(self, name, length, element, buffer, offset)
        self._dynamics[key] = tile
        return tile

    def _buffer(self, key: Any, length: int, element: np.dtype) -> SharedBuffer:
        if key not in self._pool:
            self._pool[key] = SharedBuffer(self.at_once, length, self.warps, element)
        return self._pool[key]

    def begin_blocks(self, first: int, count: int) -> None:
        """Shared memory and clocks as `count` new blocks, from number `first` on, find them."""
        self.block_number, self.several = first, count > 1
        self.block = self.block_of(first)
        warps = count * PITCH // WARP
        base, starts, seen = self._clocks
        self.base, self.starts, self.seen = base[:count], starts[:warps], seen[:warps]
        self._statics, self._dynamics, self._tiles = {}, {}, []
        for buffer in self._pool.values():
            buffer.clear(count)
        self._accesses_left = MOST_ACCESSES if self.several else UNBOUNDED
        self.additions = []
        at, place = self.group.blocks + (first - 1), self._cuda.blockIdx
        x, y, _ = self.grid
        place.x, place.y, place.z = alike(at % x), alike(at // x % y), alike(at // (x * y))

    def local_array(self, shape: Any, dtype: Any) -> LocalArray:
        return LocalArray(self, self.site(), shape, element_type(dtype))

    def target(self, site: Site, otherwise: str) -> str:
        """The variable that the result of the call at `site` goes to."""
        code = self._codes.get(site[0])
        return (code and assigned_name(code, site[1])) or otherwise

    # ---- counts

    def statistics(self, array: str, space: str, kind: str) -> np.ndarray:
        """Where the requests, sectors, wavefronts and conflicts of this line's access add up."""
        self._accesses_left -= 1
        if self._accesses_left < 0:
            raise OneByOne
        key = (array, space, kind, self.site())
        row = self._row_of.get(key)
        if row is None:
            row = self._row_of[key] = len(self._row_of)
            if row == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        return self._rows[row]

    def instruction(self, kind: str, times: int = 1) -> None:
        """Count an instruction of every warp with a lane that takes part."""
        self.instruction_of(self.mask, kind, times)

    def instruction_of(self, mask: Mask, kind: str, times: int) -> None:
        """Count an instruction of every warp with a lane of a mask."""
        if self._warps_active[0] is not mask or mask is None:
            warps = (self.group.warps if mask is None else warps_of(self.group.tids[mask])).size
            self._warps_active = (mask, warps)
        self._instructions[kind] = self._instructions.get(kind, 0) + times * self._warps_active[1]

    def access_of(self, key: tuple[str, str, str, Site]) -> Access:
        array, space, kind, site = key
        return Access(self.kernel, array, space, kind, self.line_of(site))

    # ---- asynchronous copies

    def async_copy(
        self, dst: SharedArray, e: Any, src: GlobalArray, index: tuple[Any, ...], n: int, valid: Any
    ) -> None:
        """cp.async: `valid` elements of `src` from `index` on into dst[e:e+n], the rest zero.

        Counts `valid` loads. Lands, reading `src` then, when these threads wait for its group.
        """
        bad = self.first_outside(valid, n + 1)
        if bad >= 0:
            valid = self.of_lane(valid, bad)
            raise ValueError(f"valid = {valid} of a copy of n = {n} elements, allowed: 0 to n")
        group = self.group
        pieces = group.full(0)
        if n * dst.itemsize == 16:
            pieces = (dst.first + group.lanes(e)) * dst.itemsize >> 5
        read = src.source(index, n, valid, pieces)
        places = dst.depart(e, n)
        pending = self.active()
        group.copies.append(Copy(dst, places, n, read, pending, group.committed))
        self.instruction("copy")

    def async_commit(self) -> None:
        """cp.async.commit_group: closes each thread's group of copies, which may be empty."""
        self.group.committed = self.group.committed + self.active()

    def async_wait(self, n: int) -> None:
        """cp.async.wait_group: until at most n groups of each thread are in flight."""
        group = self.group
        if not group.copies:
            return
        left = []
        done = group.committed - n
        for copy in group.copies:
            landing = copy.pending & (copy.number < done)
            if self.mask is not None:
                landing &= self.mask
            if landing.any():
                copy.dst.land(copy, landing)
                copy.pending = copy.pending & ~landing
                if not copy.pending.any():
                    continue
            left.append(copy)
        group.copies = left


class Running(threading.local):
    """The contexts of this Python thread's launches, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


running = Running()


def current() -> Any:
    """The running launch. RuntimeError outside of one."""
    if not running.contexts:
        raise RuntimeError("no kernel is running on the emulator")
    return running.contexts[-1]
