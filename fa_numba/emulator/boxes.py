"""Asynchronous copies of boxes between global and shared memory by the copy engine (TMA).

A load to shared memory is in flight until a thread waits for the phase of the load's mbarrier. From
then on the elements may be used by the threads that waited, and by threads that a barrier orders
after them.

A store from shared memory reads its elements until the storing thread has waited for the read. The
elements are in global memory when the thread has waited for the write, or has ended. From then on
threads that a barrier orders after that wait may touch these elements of global memory, and may
copy other boxes from or to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import async_checks
from .boxed_arrays import CHUNK, ROW_BYTES, BoxedArray, index_of, note_copy
from .checks import ATOMIC, BOX, IN_FLIGHT, LOAD, READING, STAMP, STORE, UNWRITTEN
from .errors import (
    NO_BARRIER,
    EmulatorError,
    GlobalHazard,
    Misaligned,
    MissingFence,
    SharedHazard,
    UninitialisedRead,
    never_written,
)
from .global_memory import BOX_ON_ITS_WAY, GlobalArray
from .groups import WARP, Site
from .mbarriers import Mbarrier, Mbarriers, MbarrierTile
from .shared_memory import SharedArray, SharedBuffer

REPEAT = 1024  # bytes: it begins anew at multiples of these
HALF_WAY = 1 << 31
ENGINE = "this TMA copy or wgmma product"


def swizzled(byte: Any, span: int = ROW_BYTES) -> Any:
    """Return the address of a byte after swizzling: chunk c of row r moves to c ^ r % n.

    n is the number of chunks in `span`.
    """
    return byte ^ (byte >> 7 & span // CHUNK - 1) << 4


@lru_cache(maxsize=64)
def box_places(rows: int, itemsize: int, swizzle: int) -> np.ndarray:
    """Return the elements of a box's rows, counted from its first element, as (rows, columns)."""
    byte = np.arange(rows * ROW_BYTES, dtype=np.int64).reshape(rows, -1)[:, ::itemsize]
    return swizzled(byte, swizzle) // itemsize


@dataclass(slots=True, eq=False)
class BoxLoad:
    """A box that is being loaded to shared memory. `stamp` says when its mbarrier's phase ended."""

    buffer: SharedBuffer
    first: int
    places: np.ndarray
    values: np.ndarray
    stamp: int = 0

    def land(self) -> None:
        """Write the box's values to shared memory."""
        buffer = self.buffer
        async_checks.land_box(
            buffer.data, buffer.written, self.first, self.places, self.values, self.stamp
        )


@dataclass(slots=True, eq=False)
class Lent:
    """Elements of shared memory that are read asynchronously, until a thread has waited for it.

    `row` of `buffer.reads` marks them. `code`, in a stamp, says who reads; of several readers it is
    the first, and each reads one of `parts` parts of the elements.
    """

    buffer: SharedBuffer
    row: int
    first: int
    places: np.ndarray
    code: int
    parts: int

    def mark(self, stamp: int) -> None:
        """Mark the elements as read with a stamp."""
        buffer = self.buffer
        async_checks.give_back(
            buffer.reads, buffer.touched, self.row, self.parts, self.first, self.places, stamp
        )


@dataclass(slots=True, eq=False)
class BoxStore:
    """A box that is being stored to global memory, in group `number` of its thread."""

    lent: Lent
    array: GlobalArray
    at: np.ndarray
    values: np.ndarray
    tid: int
    number: int
    element: str
    site: Site
    adds: bool
    read: bool = False


class Boxes(Mbarriers):
    """A context with copies of boxes."""

    __slots__ = ("begun", "_stores", "_groups_of_boxes", "_marked")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun = 0
        self._stores: list[BoxStore] = []
        self._marked = False  # whether the last thread block may have left marks of reads
        self._groups_of_boxes: dict[int, int] = {}  # by thread, how many it has closed

    def begin_blocks(self, first: int, count: int) -> None:
        """Reset boxes and marks for new thread blocks; see `Context.begin_blocks`."""
        super().begin_blocks(first, count)
        for box in self._stores:  # that a block has left
            box.array.owners.stamps[BOX, box.at] = 0
        self._stores, self._groups_of_boxes = [], {}
        self.begun = (self.clock + 1) * STAMP  # the block's first stamp
        marked, self._marked = self._marked, True
        for buffer in self._pool.values() if marked else ():
            if buffer.reads.shape[1] > self.warps:  # marks that a block has left
                buffer.touched[0] = 0
                buffer.reads[0, self.warps :] = 0

    @property
    def rows_of_boxes(self) -> int:
        """Return the row of `buffer.reads` that marks boxes.

        It is behind the rows of the warps and two rows per warpgroup, for the operands of products.
        """
        return self.warps + 2 * self.warpgroups

    def rows_for_marks(self, buffer: SharedBuffer) -> None:
        """Give a buffer rows that mark the reads of products, and a last row for stored boxes."""
        missing = self.rows_of_boxes + 1 - buffer.reads.shape[1]
        if missing > 0:
            _, rows, length = buffer.reads.shape
            before, at = buffer.reads, np.flatnonzero(buffer.touched[0] >= self.base[0])
            buffer.reads = np.zeros((1, rows + missing, length), np.int64)  # blocks run one by one
            buffer.reads[0, :rows, at] = before[0, :, at]

    def untouchable(
        self, array: SharedArray, p: int, known: np.ndarray, does: str
    ) -> EmulatorError:
        """Return the error for an element that a copy or a product may not access yet."""
        buffer, base = array.buffer, self.base[0]
        last, element = int(buffer.written[0, p]), array._element(p)

        def before(stamp: int) -> bool:
            return bool(async_checks.before(stamp, known, self.warps))

        if last == UNWRITTEN and does == "reads":
            return self.fault(UninitialisedRead, never_written(element), array.name)
        if last == IN_FLIGHT:
            return array._hazard(p, self.first_lane(), last, does, "wrote")
        if last != UNWRITTEN and last >= base and not before(last):
            text = f"{does} {element}, which {self.who(last)} wrote, {NO_BARRIER}"
            return self.fault(SharedHazard, f"{ENGINE} {text}", array.name)
        if does != "reads":
            for row in buffer.reads[0, :, p].tolist():
                if row == READING:
                    return array._hazard(p, self.first_lane(), row, does, "reads")
                if row >= base and not before(row):
                    text = f"{does} {element}, which {self.who(row)} read, {NO_BARRIER}"
                    return self.fault(SharedHazard, f"{ENGINE} {text}", array.name)
        text = (
            f"{ENGINE} {does} {element}, which {self.who(last)} wrote without calling "
            "fence_async_proxy() afterwards. Call this fence after the write and before the barrier"
        )
        return self.fault(MissingFence, text, array.name)

    def _box(
        self, boxed: BoxedArray, array: SharedArray, index: int, lane: int
    ) -> tuple[int, np.ndarray]:
        """Return where a box is in shared memory: first element, all elements from there."""
        size = boxed.rows * boxed.columns
        if array.itemsize != boxed.array.itemsize:
            text = (
                f"a TMA copy needs elements of equal size, got {boxed.array.name} of dtype "
                f"{boxed.array.dtype} and {array.name} of dtype {array.dtype}"
            )
            raise self.fault(EmulatorError, text, array.name, lane)
        if index < 0 or index + size > array.length:
            end = index if index < 0 else index + size - 1
            raise self.outside(array.name, (array.length,), end, lane)
        first = array.first + index
        if first * array.itemsize % REPEAT:
            text = f"{array._element(first)} is at byte {first * array.itemsize} of shared memory"
            text = f"{text}, but a TMA box must start at a multiple of {REPEAT} bytes"
            raise self.fault(Misaligned, text, array.name, lane)
        return first, box_places(boxed.rows, array.itemsize, boxed.layout.swizzle)

    def _of_lane(self, lane: int, *values: Any) -> list[int]:
        return [int(self.of_lane(value, lane)) for value in values]

    def load_box(
        self, dst: SharedArray, index: Any, src: BoxedArray, place: tuple[Any, ...],
        tile: MbarrierTile, which: Any,
    ) -> None:  # fmt: skip
        """Start a copy of the box at `place` to dst[index], in each lane that takes part."""
        self.alone()
        self.instruction("tma")
        for lane in self.active_lanes().tolist():
            at, number, *coordinates = self._of_lane(lane, index, which, *place)
            where = tuple(map(_signed, coordinates))
            barrier = self.mbarrier(tile, number)
            tid = self.group.tids[lane : lane + 1]
            self.usable(barrier, np.array([lane]), by_copies=True)
            self.in_phase(barrier, tid, "this thread starts a TMA load with")
            first, places = self._box(src, dst, at, lane)
            values = np.full(places.shape, src.layout.fill, dst.buffer.data.dtype)
            rows, columns, found = src.access(self, LOAD, where, lane)
            if found.size:
                self._behind_stores(src.array, found.reshape(-1), lane, "reads")
                values[rows, columns] = src.array._memory[found]
            self._depart(dst, first, places.reshape(-1), values.reshape(-1), tid, barrier)
            barrier.bytes -= places.size * dst.itemsize
            self.advance(barrier)

    def _depart(
        self, dst: SharedArray, first: int, places: np.ndarray, values: np.ndarray,
        tid: np.ndarray, barrier: Mbarrier,
    ) -> None:  # fmt: skip
        buffer = dst.buffer
        self.rows_for_marks(buffer)
        bad, known = self.checked(
            async_checks.depart_box, buffer.written, buffer.reads, buffer.touched, buffer.copiers,
            buffer.sites, first, places, tids=tid, last=(int(tid[0]), self.numbered_site()),
        )  # fmt: skip
        if bad >= 0:
            raise self.untouchable(dst, int(first + places[bad]), known, "overwrites")
        barrier.flying.append(BoxLoad(buffer, first, places, values))
        self._acquired.pop(int(tid[0]) // WARP, None)

    def store_box(
        self, dst: BoxedArray, place: tuple[Any, ...], src: SharedArray, index: Any,
        adds: bool = False,
    ) -> None:  # fmt: skip
        """Start a copy of src[index] to the box at `place`, or its addition to it, in each lane."""
        self.alone()
        self.instruction("tma")
        for lane in self.active_lanes().tolist():
            at, *coordinates = self._of_lane(lane, index, *place)
            where = tuple(map(_signed, coordinates))
            first, places = self._box(dst, src, at, lane)
            rows, columns, found = dst.access(self, ATOMIC if adds else STORE, where, lane)
            taken, to = places[rows, columns].reshape(-1), found.reshape(-1)
            dst.array._keep(to[:0])  # refuses an array that is read-only
            if not adds:  # which come behind each other in any order
                self._behind_stores(dst.array, to, lane, "overwrites")
            self._send(dst.array, to, src, first, taken, lane, adds)

    def add_bulk(
        self, dst: GlobalArray, row: Any, col: Any, src: SharedArray, index: Any, count: Any
    ) -> None:
        """Start adding `count` floats from src[index] on to dst[row, col] and its neighbours."""
        self.alone()
        self.instruction("tma")
        for lane in self.active_lanes().tolist():
            i, j, at, size = self._of_lane(lane, row, col, index, count)
            if at < 0 or at + size > src.length:
                raise self.outside(src.name, (src.length,), max(at + size - 1, at), lane)
            if not (0 <= i < dst.shape[0] and 0 <= j and j + size <= dst.shape[1]):
                raise dst._outside((i, j + size - 1), lane)
            to = int(dst._offset) + i * dst._steps[0] + j * dst._steps[1]
            first = src.first + at
            bytes_of = {
                "address in global memory": dst.address + to * dst.itemsize,
                "address in shared memory": first * src.itemsize,
                "size": size * src.itemsize,
            }
            for name, value in bytes_of.items():
                if value % CHUNK:
                    text = f"the {name} of a bulk copy must be a multiple of {CHUNK} bytes, got"
                    raise self.fault(Misaligned, f"{text} {value}", dst.name, lane)
            note_copy(self, dst, ATOMIC, np.array([to]), size, lane)
            along = np.arange(size)
            dst._keep(along[:0])
            self._send(dst, to + along, src, first, along, lane, True)

    def _send(
        self, array: GlobalArray, to: np.ndarray, src: SharedArray, first: int, taken: np.ndarray,
        lane: int, adds: bool,
    ) -> None:  # fmt: skip
        """Read elements of shared memory asynchronously, and store or add them to an array."""
        array.owners.stamps[BOX, to] = IN_FLIGHT
        tid = int(self.group.tids[lane])
        values = np.zeros(taken.size, src.buffer.data.dtype)
        tids = self.group.tids[lane : lane + 1]
        lent = self.lend(src, self.rows_of_boxes, first, taken, tids, values)
        number = self._groups_of_boxes.get(tid, 0)
        element, site = src._element(first), self.site()
        self._stores.append(BoxStore(lent, array, to, values, tid, number, element, site, adds))

    def _behind_stores(self, array: GlobalArray, places: np.ndarray, lane: int, does: str) -> None:
        """Raise unless the boxes that were stored at these positions are visible to this lane."""
        if not array.owners.stamps.size:
            return
        stamps = array.owners.stamps[BOX, places]
        if stamps.max(initial=0) < self.base[0]:
            return
        for stamp in np.unique(stamps).tolist():
            if stamp < self.base[0] or self.ordered(stamp, lane):
                continue
            first = index_of(array, places[stamps == stamp][:1])
            element = ", ".join(str(int(i[0])) for i in first)
            text = f"this thread {does} {array.name}[{element}]"
            if stamp == IN_FLIGHT:
                text = f"{text}, {BOX_ON_ITS_WAY}"
            else:
                text = f"{text}, which {self.who(stamp)} stored by a TMA copy and waited for, "
                text = f"{text}{NO_BARRIER}"
            raise self.fault(GlobalHazard, text, array.name, lane)

    def lend(
        self, array: SharedArray, row: int, first: int, places: np.ndarray, tids: np.ndarray,
        values: np.ndarray, code: int = 0, parts: int = 1,
    ) -> Lent:  # fmt: skip
        """Read elements asynchronously, for these threads."""
        buffer = array.buffer
        self.rows_for_marks(buffer)
        bad, known = self.checked(
            async_checks.lend, buffer.data, buffer.written, buffer.reads, buffer.touched, row,
            parts, first, places, tids=tids, last=(values,),
        )  # fmt: skip
        if bad >= 0:
            raise self.untouchable(array, int(first + places[bad]), known, "reads")
        return Lent(buffer, row, first, places, code, parts)

    def commit_boxes(self) -> None:
        """Close each thread's group of stored boxes."""
        self.alone()
        for tid in self.group.tids[self.active()].tolist():
            self._groups_of_boxes[tid] = self._groups_of_boxes.get(tid, 0) + 1

    def wait_boxes(self, written: bool) -> None:
        """Wait until each thread's closed groups have been read.

        If `written`, until they are stored.
        """
        self.alone()
        lane_of = {int(t): k for k, t in enumerate(self.group.tids) if self.active()[k]}
        left = []
        for box in self._stores:
            lane = lane_of.get(box.tid)
            if lane is None or box.number >= self._groups_of_boxes.get(box.tid, 0):
                left.append(box)
                continue
            if not box.read:
                box.read = True
                box.lent.mark(self.stamp(lane))
            if written:
                self._write_box(box)
                box.array.owners.stamps[BOX, box.at] = self.stamp(lane)
            else:
                left.append(box)
        self._stores = left
        for box in left:
            if not box.read:
                box.lent.mark(READING)

    def _write_box(self, box: BoxStore) -> None:
        box.array._keep(box.at)
        values = box.values
        if box.adds:
            values = (box.array._memory[box.at].astype(np.float64) + values).astype(np.float32)
        box.array._memory[box.at] = values

    def _exit(self) -> None:
        if not self._stores:
            return
        tids = set(self.group.tids[self.active()].tolist())
        for box in [b for b in self._stores if b.tid in tids]:
            if not box.read:
                text = (
                    f"the thread exits while its TMA store may still read {box.element}. Call "
                    "commit_boxes() and wait_boxes_read() before the thread ends"
                )
                raise self.fault_at(SharedHazard, text, box.tid, box.site, box.array.name)
            self._write_box(box)
            box.array.owners.stamps[BOX, box.at] = 0
            self._stores.remove(box)

    def left_over(self) -> None:
        """Raise if a thread block ends with a loaded box that no thread has waited for."""
        for barrier in self._mbarriers.values():
            for copy in (*barrier.arrived, *barrier.flying):
                p = int(copy.first + copy.places[0])
                tid, site = copy.buffer.copiers[0, p], self.sites[copy.buffer.sites[0, p]]
                text = (
                    "the thread block ends before any thread has waited for this TMA load. Let a "
                    f"thread call wait_mbarrier for {barrier.name}, the mbarrier of this load"
                )
                raise self.fault_at(SharedHazard, text, int(tid), site)
        super().left_over()
        self._marked = False  # all reads have ended, or a thread would not have exited


def _signed(value: int) -> int:
    """Return a coordinate as the 32-bit signed integer that the instruction takes."""
    return (value + HALF_WAY) % (2 * HALF_WAY) - HALF_WAY
