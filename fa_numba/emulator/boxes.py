"""Asynchronous copies of boxes between global and shared memory by the copy engine (TMA).

A load to shared memory is in flight until a thread waits for the phase of the load's mbarrier. From
then on the threads that waited may use the elements. Threads that a barrier orders after these
threads may use the elements too.

A store from shared memory reads its elements until the storing thread has waited for the read. The
elements are in global memory when the storing thread has waited for the write, or has ended.
Threads that a barrier orders after the wait for the write may then access these elements of global
memory. They may also copy other boxes from or to these elements.
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

REPEAT = 1024  # bytes after which the swizzle pattern repeats
HALF_WAY = 1 << 31  # half of the number of 32-bit integers
ENGINE = "this TMA copy or wgmma product"  # how messages call the accessing hardware


def swizzled(byte: Any, span: int = ROW_BYTES) -> Any:
    """Return the address of a byte after swizzling: chunk c of row r moves to chunk c ^ (r % n).

    A row has 128 bytes, and a chunk 16 bytes. n is the number of chunks in `span` bytes.
    """
    return byte ^ (byte >> 7 & span // CHUNK - 1) << 4


@lru_cache(maxsize=64)
def box_places(rows: int, itemsize: int, swizzle: int) -> np.ndarray:
    """Return the positions of a box's elements in shared memory, as an array (rows, columns).

    A position is the number of elements after the first element of the box. A row has 128 bytes.
    `swizzle` is the number of bytes within which the chunks of a row are permuted.
    """
    byte = np.arange(rows * ROW_BYTES, dtype=np.int64).reshape(rows, -1)[:, ::itemsize]
    return swizzled(byte, swizzle) // itemsize


@dataclass(slots=True, eq=False)
class BoxLoad:
    """A box that is being copied from global memory to shared memory.

    buffer   buffer of the shared array to which the box is copied
    first    element of the buffer at which the box begins
    places   positions of the box's elements in the buffer, counted from `first`
    values   the values that the elements will get
    stamp    stamp of the time of arrival, which is the end of a phase of the mbarrier that counts
             the box. It is 0 until the phase ends
    """

    buffer: SharedBuffer
    first: int
    places: np.ndarray
    values: np.ndarray
    stamp: int = 0

    def land(self) -> None:
        """Write the values of the box to shared memory."""
        buffer = self.buffer
        async_checks.land_box(
            buffer.data, buffer.written, self.first, self.places, self.values, self.stamp
        )


@dataclass(slots=True, eq=False)
class Lent:
    """An asynchronous read of shared memory that no thread has waited for yet.

    `places` are the positions of the elements in `buffer`, counted from the element `first`. Row
    `row` of ``buffer.reads`` records the read as a stamp. A stamp consists of a time and a code,
    and `code` says who reads. If `parts` is above 1, the read is divided among `parts` readers.
    Each reader reads an equal part of `places`, and reader n has the code ``code + n``.
    """

    buffer: SharedBuffer
    row: int
    first: int
    places: np.ndarray
    code: int
    parts: int

    def mark(self, stamp: int) -> None:
        """Mark the elements as read at the time of a stamp, or as still being read (`READING`)."""
        buffer = self.buffer
        async_checks.give_back(
            buffer.reads, buffer.touched, self.row, self.parts, self.first, self.places, stamp
        )


@dataclass(slots=True, eq=False)
class BoxStore:
    """A box that is being copied from shared memory to global memory.

    lent      the asynchronous read of the elements in shared memory
    array     the array in global memory
    at        positions in the memory of `array` of the elements to which the box is copied
    values    the values that will be stored there
    adds      whether the values are added to the elements instead of stored
    tid       number of the thread that started the copy
    site      instruction that started the copy
    number    number of the bulk group of this thread to which the copy belongs
    element   name of the first element in shared memory, for messages
    read      whether the thread has waited until shared memory was read
    """

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
    """Methods of a running launch that copy boxes (TMA).

    The class `Launch` inherits these methods.
    """

    __slots__ = ("begun", "_stores", "_groups_of_boxes", "_marked", "lends")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun = 0  # the first stamp of the running thread block
        self._stores: list[BoxStore] = []
        self._marked = False  # whether the last thread block may have left marks of reads
        self.lends = False  # whether new buffers get the rows of `rows_for_marks` at once
        # By thread: the number of groups of box stores that the thread has closed.
        self._groups_of_boxes: dict[int, int] = {}

    def begin_blocks(self, first: int, count: int) -> None:
        """Forget the box stores and marks of earlier thread blocks; see `Context.begin_blocks`."""
        super().begin_blocks(first, count)
        for box in self._stores:  # of a thread block that was interrupted
            box.array.owners.stamps[BOX, box.at] = 0
        self._stores, self._groups_of_boxes = [], {}
        self.begun = (self.clock + 1) * STAMP
        marked, self._marked = self._marked, True
        for buffer in self._pool.values() if marked else ():
            if buffer.reads.shape[1] > self.warps:  # it has rows for marks
                buffer.touched[0] = 0
                buffer.reads[0, self.warps :] = 0

    @property
    def row_of_boxes(self) -> int:
        """Return the index of the row of ``buffer.reads`` that marks reads by box stores.

        It is the last row. The earlier rows are one row per warp, and then two rows per warpgroup
        for the operands of products.
        """
        return self.warps + 2 * self.warpgroups

    @property
    def readers(self) -> int:
        """Return the number of rows of ``reads`` in a new buffer, see `rows_for_marks`."""
        return self.row_of_boxes + 1 if self.lends else super().readers

    def rows_for_marks(self, buffer: SharedBuffer) -> None:
        """Make room in ``buffer.reads`` for marks of asynchronous reads, if there is none.

        A mark says that a product or a box store still reads an element of shared memory. Each row
        of ``buffer.reads`` has one number for each element. The added rows are two rows for each
        warpgroup, one for each operand of its products, and one row for box stores.
        """
        missing = self.row_of_boxes + 1 - buffer.reads.shape[1]
        if missing > 0:
            _, rows, length = buffer.reads.shape
            before, at = buffer.reads, np.flatnonzero(buffer.touched[0] >= self.base[0])
            buffer.reads = np.zeros((1, rows + missing, length), np.int64)  # blocks run one by one
            buffer.reads[0, :rows, at] = before[0, :, at]

    def untouchable(
        self, array: SharedArray, p: int, known: np.ndarray, does: str
    ) -> EmulatorError:
        """Return the error for an element that a TMA copy or a product may not access yet.

        `p` is the index of the element in the buffer of `array`. `known` is what the threads that
        start the copy or product know; see knowledge.py. `does` is "reads" or "overwrites", for the
        message.
        """
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
        self, boxed: BoxedArray, array: SharedArray, index: int, lane: int, loads: bool = False
    ) -> tuple[int, np.ndarray]:
        """Return where the elements of a box are in shared memory.

        The box begins at element `index` of the shared array `array`. The first result is the
        number of this element in the buffer of `array`. The second result contains the positions of
        all elements of the box, counted from the first element.

        Raise an error if the box does not fit into the array, or does not begin at a multiple of
        1024 bytes. Also raise an error if the elements of `boxed` and of `array` have different
        sizes. There is one exception: a box of 8-bit elements may be loaded (`loads`) to an array
        of 16-bit elements. Each element of the array then receives two elements of the box.
        """
        size = boxed.rows * ROW_BYTES // array.itemsize
        bytes_to_halves = loads and (boxed.array.itemsize, array.itemsize) == (1, 2)
        if array.itemsize != boxed.array.itemsize and not bytes_to_halves:
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
        """Return the values that numbers or arrays over the lanes have in one lane, as integers."""
        return [int(self.of_lane(value, lane)) for value in values]

    def load_box(
        self, dst: SharedArray, index: Any, src: BoxedArray, place: tuple[Any, ...],
        tile: MbarrierTile, which: Any,
    ) -> None:  # fmt: skip
        """Start a copy of a box to dst[index], in each lane that takes part.

        `place` is the index of the box's first element along each axis of the tensor map of `src`.
        The mbarrier with index `which` of `tile` counts the bytes of the copy.
        """
        self.alone()
        self.instruction("tma")
        for lane in self.active_lanes().tolist():
            at, number, *coordinates = self._of_lane(lane, index, which, *place)
            where = tuple(map(_signed, coordinates))
            barrier = self.mbarrier(tile, number)
            tid = self.group.tids[lane : lane + 1]
            self.usable(barrier, np.array([lane]), by_copies=True)
            self.in_phase(barrier, tid, "this thread starts a TMA load with")
            first, places = self._box(src, dst, at, lane, loads=True)
            values = np.full((src.rows, src.columns), src.layout.fill, src.array.dtype)
            rows, columns, found = src.access(self, LOAD, where, lane)
            if found.size:
                self._behind_stores(src.array, found.reshape(-1), lane, "reads")
                values[rows, columns] = src.array._memory[found]
            flat = values.reshape(-1)
            if src.array.itemsize != dst.itemsize:
                flat = flat.view(dst.dtype)
            flat = flat.astype(dst.buffer.data.dtype)
            self._depart(dst, first, places.reshape(-1), flat, tid, barrier)
            barrier.bytes -= places.size * dst.itemsize
            self.advance(barrier)

    def _depart(
        self, dst: SharedArray, first: int, places: np.ndarray, values: np.ndarray,
        tid: np.ndarray, barrier: Mbarrier,
    ) -> None:  # fmt: skip
        """Mark the elements of a box as in flight, and add the box to the copies of an mbarrier.

        Raise if a thread may still access one of the elements. `first`, `places` and `values` are
        described in `BoxLoad`. `tid` has one entry: the thread that starts the copy.
        """
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
        """Start a copy of src[index] to a box of an array, in each lane that takes part.

        `place` is the index of the box's first element along each axis of the tensor map of `dst`.
        If `adds`, the elements are added to the box atomically.
        """
        self.alone()
        self.instruction("tma")
        for lane in self.active_lanes().tolist():
            at, *coordinates = self._of_lane(lane, index, *place)
            where = tuple(map(_signed, coordinates))
            first, places = self._box(dst, src, at, lane)
            rows, columns, found = dst.access(self, ATOMIC if adds else STORE, where, lane)
            taken, to = places[rows, columns].reshape(-1), found.reshape(-1)
            dst.array._keep(to[:0])  # refuses an array that is read-only
            if not adds:  # additions may happen in any order
                self._behind_stores(dst.array, to, lane, "overwrites")
            self._send(dst.array, to, src, first, taken, lane, adds)

    def add_bulk(
        self, dst: GlobalArray, row: Any, col: Any, src: SharedArray, index: Any, count: Any
    ) -> None:
        """Start adding src[index .. index + count - 1] to dst[row, col .. col + count - 1].

        Each lane that takes part starts such an addition of `count` floats.
        """
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
        """Start an asynchronous copy from shared to global memory by the thread of one lane.

        The copy reads the elements of `src` at the positions `taken`, counted from `first`. When
        the thread has waited for the copy or has ended, the values are stored to the positions `to`
        in the memory of `array`. If `adds` is set, they are added instead.
        """
        array.owners.stamps[BOX, to] = IN_FLIGHT
        tid = int(self.group.tids[lane])
        values = np.zeros(taken.size, src.buffer.data.dtype)
        tids = self.group.tids[lane : lane + 1]
        lent = self.lend(src, self.row_of_boxes, first, taken, tids, values)
        number = self._groups_of_boxes.get(tid, 0)
        element, site = src._element(first), self.site()
        self._stores.append(BoxStore(lent, array, to, values, tid, number, element, site, adds))

    def _behind_stores(self, array: GlobalArray, places: np.ndarray, lane: int, does: str) -> None:
        """Raise GlobalHazard if an earlier box store to some elements is not visible to a lane yet.

        `places` are the positions of the elements in the memory of `array`. `does` is "reads" or
        "overwrites", for the message.
        """
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
        """Start an asynchronous read of shared memory for some threads, and return its record.

        Raise if an element may not be read yet. `values` receives the values. `row`, `first`,
        `places`, `code` and `parts` are described in `Lent`. `tids` are the threads that start the
        read.
        """
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
        """Close the current group of box stores of each lane that takes part."""
        self.alone()
        for tid in self.group.tids[self.active()].tolist():
            self._groups_of_boxes[tid] = self._groups_of_boxes.get(tid, 0) + 1

    def wait_boxes(self, written: bool) -> None:
        """Wait until the closed groups of box stores of each lane have read shared memory.

        If `written`, also wait until their elements are in global memory.
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
        """Store the values of a box to global memory, or add them."""
        box.array._keep(box.at)
        values = box.values
        if box.adds:
            values = (box.array._memory[box.at].astype(np.float64) + values).astype(np.float32)
        box.array._memory[box.at] = values

    def _exit(self) -> None:
        """Store the boxes of lanes that exit. Raise if a box may still read shared memory."""
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
        """Raise SharedHazard if a thread block ends with a loaded box that no thread waited for."""
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
        self._marked = False  # every thread has exited, so all asynchronous reads have ended


def _signed(value: int) -> int:
    """Return a coordinate as the 32-bit signed integer that the instruction takes."""
    return (value + HALF_WAY) % (2 * HALF_WAY) - HALF_WAY
