"""Shared memory: arrays that find races, uninitialised reads and accesses out of bounds.

For each element, the emulator keeps the stamp of the last write, and for each warp the stamp of the
warp's last read. A stamp is the integer clock * STAMP + code. The clock says when the accessing
thread's warp last synchronised. The code says who accessed: a thread (0 to 1023), or several
threads of one warp (1024 + warp). Greater codes are for copies of boxes and matrix products. The
clock advances at every barrier of the thread block, at every named barrier, at every arrival at an
mbarrier, at every fence, and at every `syncwarp` of a complete warp.

Each warp v has a vector clock: a row of the array `seen`, with one stamp for each warp w of the
thread block. Accesses of warp w with a lower stamp happened before the next access of warp v. The
stamp is never lower than the stamp of the thread block's last barrier (`ctx.base`). A thread's own
earlier accesses also happened before its next access. One stamp per warp is enough for the reads of
an element: if several threads of the warp read the element, the code of the stamp says so. The
order of lanes within a statement does not matter, because stamps alone decide which accesses
conflict.

The loops over lanes are compiled (checks.py). If a loop cannot decide a case, this module goes
through the lanes one by one, with one thread block at a time. If several thread blocks run at the
same time, each has its own row in a buffer's arrays and its own `base`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import checks
from .checks import IN_FLIGHT, READING, SEVERAL, UNWRITTEN
from .conversions import converter
from .errors import (
    NO_BARRIER,
    EmulatorError,
    Misaligned,
    SharedHazard,
    Unconverted,
    UninitialisedRead,
    never_written,
    not_a_number,
    two_arrays,
)
from .groups import Copy, OneByOne
from .in_turn import Update, in_turn
from .lanes import INT64, FromEnd, merge, to_int

if TYPE_CHECKING:
    from .context import Context


MOST_SPARE = 1 << 26  # most bytes of the spare buffers of a Python thread
_INTEGERS = {size: np.dtype(f"i{size}") for size in (2, 4, 8)}  # by bytes


def bits_of(values: np.ndarray) -> np.ndarray:
    """Return the bits of values as integers, because the compiled loops know few dtypes.

    Parameters
    ----------
    values : ndarray
        The values.

    Returns
    -------
    ndarray of int
        The bits of floats, or the integers as int64. Numbers of 16 bytes (complex128) stay as they
        are.
    """
    dtype = values.dtype
    if dtype is INT64 or dtype.itemsize == 16:
        return values
    if dtype.kind in "fc":
        return values.view(_INTEGERS[dtype.itemsize])
    return values.view(INT64) if dtype.itemsize == 8 else values.astype(INT64)


class SharedBuffer:
    """Values and stamps of shared memory, for all elements of one dtype.

    Several shared arrays may be parts of one buffer. Arrays have one row per thread block that
    runs:

        data      values, shape (blocks, length); `bits` is a view of `data` as integers
        written   stamp of the last write of each element
        reads     stamp of each warp's last read of each element, shape (blocks, warps, length).
                  `Boxes` adds rows for asynchronous reads.
        touched   stamp of the last read of each element by any warp
        copiers, sites    for an element in flight: the thread that copies it, and the instruction
        atomics, plain    see `checks.shared_atomic`; None without atomic operations

    Parameters
    ----------
    blocks : int
        Thread blocks that run at the same time.
    length : int
        Number of elements.
    warps : int
        Warps of a thread block.
    dtype : dtype
        Type of the elements.
    """

    __slots__ = (
        "data", "bits", "written", "reads", "touched", "copiers", "sites", "atomics", "plain",
    )  # fmt: skip

    def __init__(self, blocks: int, length: int, warps: int, dtype: np.dtype) -> None:
        shape = (blocks, length)
        self.data = np.zeros(shape, dtype if dtype.kind in "fc" else np.int64)
        self.bits = bits_of(self.data)
        self.written = np.full(shape, UNWRITTEN)
        self.reads = np.zeros((blocks, warps, length), np.int64)
        self.touched = np.zeros(shape, np.int64)
        self.copiers = np.zeros(shape, np.int64)
        self.sites = np.zeros(shape, np.int64)
        self.atomics: np.ndarray | None = None
        self.plain: np.ndarray | None = None

    def clear(self, blocks: int) -> None:
        """Mark all elements as unwritten, for `blocks` new thread blocks.

        The stamps of reads may stay: they are older than any stamp of the new thread blocks.

        Parameters
        ----------
        blocks : int
            Number of thread blocks that run at the same time.
        """
        self.written[:blocks] = UNWRITTEN

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what two buffers have in common if one can take the place of the other."""
        return *self.reads.shape, self.data.dtype

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all arrays, without those of atomic operations."""
        arrays = self.data, self.written, self.reads, self.touched, self.copiers, self.sites
        return sum(array.nbytes for array in arrays)


class Spares(threading.local):
    """The buffers of ended launches, which later launches of the same Python thread use again.

    New memory takes time, because the system fills it with zeros. A used buffer contains the stamps
    of the reads of its last launch. A launch therefore begins with the clock at which the last
    launch ended, so that these stamps are older than any stamp of the launch.

    buffers   the buffers by `SharedBuffer.kind`; the one that was kept last is the last
    clock     the clock at which the last launch ended that has left buffers
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[Any, ...], SharedBuffer] = {}
        self.clock = 0

    def take(
        self, began: int, blocks: int, length: int, warps: int, dtype: np.dtype
    ) -> SharedBuffer:
        """Return a buffer without written elements for a launch that began at the clock `began`.

        If another launch has left buffers since then, a new buffer is returned. The other
        parameters are those of `SharedBuffer`.
        """
        kind = blocks, warps, length, dtype if dtype.kind in "fc" else INT64
        if began == self.clock and kind in self.buffers:
            spare = self.buffers.pop(kind)
            spare.clear(blocks)
            return spare
        return SharedBuffer(blocks, length, warps, dtype)

    def keep(self, buffers: Iterable[SharedBuffer], warps: int, clock: int) -> None:
        """Keep the buffers of a launch that has ended without an error at the time `clock`.

        `warps` is the number of warps of a thread block. The oldest buffers are dropped if there
        are too many bytes.
        """
        for buffer in buffers:
            buffer.atomics = buffer.plain = None
            if buffer.reads.shape[1] > warps:  # it has rows for marks of asynchronous reads
                buffer.touched[:] = 0
                buffer.reads[:, warps:] = 0
            self.buffers.pop(buffer.kind, None)
            self.buffers[buffer.kind] = buffer
        self.clock = max(self.clock, clock)
        size = sum(buffer.nbytes for buffer in self.buffers.values())
        while size > MOST_SPARE:
            size -= self.buffers.pop(next(iter(self.buffers))).nbytes


spares = Spares()


class SharedArray(Unconverted):
    """A one-dimensional array in shared memory, which is a part of a buffer.

    In a kernel, ``s[e]`` is one access of every lane that takes part. The emulator and the
    functions that emulate intrinsics call the methods of this class. Kernels do not.

    Parameters
    ----------
    ctx : Context
        The launch.
    name : str
        Name of the variable in the kernel.
    length : int
        Number of elements.
    dtype : dtype
        Type of the elements.
    buffer : SharedBuffer
        Values of the elements. For each element the buffer also records which threads accessed the
        element last, and when. Races are found from these records.
    first : int or ndarray of int, default 0
        Element of the buffer at which the array begins. If thread blocks that run at the same time
        have different parts of the buffer, it is an array over the lanes.
    axes : tuple of int, optional
        Shape under which the kernel knows the array, for messages. Default: `length`.
    """

    __slots__ = (
        "name", "dtype", "itemsize", "length", "first", "buffer", "convert", "ctx", "axes",
    )  # fmt: skip

    def __init__(
        self, ctx: Context, name: str, length: int, dtype: np.dtype,
        buffer: SharedBuffer, first: Any = 0, axes: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.ctx, self.name, self.length, self.dtype = ctx, name, length, dtype
        self.itemsize, self.first = dtype.itemsize, first
        self.buffer = buffer
        self.convert = converter(dtype)
        self.axes = (length,) if axes is None else axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, which has one axis."""
        return (self.length,)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.length

    @property
    def ndim(self) -> int:
        """Return the number of axes, 1."""
        return 1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(self.length))

    def __getitem__(self, e: Any) -> Any:
        if e.__class__ is slice:
            return self._slice(e)
        e = self._only(e)
        if e.__class__ is not np.ndarray:
            out = self._read(self.ctx.group.full(int(e)), 1)
            if self.ctx.several:
                return out[0]
            value = self.buffer.data[0, self.first + e]
            return value if self.dtype.kind in "fc" else value.item()
        return self._read(e, 1)[0]

    def _only(self, index: Any) -> Any:
        """Return the index along the only axis of the array.

        A negative number that counts from the end is replaced by the number that counts from the
        start.
        """
        if index.__class__ is not tuple:
            index = (index,)
        elif len(index) != 1:
            raise TypeError(
                f"the index of {self.name} must have one number for each axis (axes: 1), got "
                f"{len(index)}"
            )
        (e,) = index
        if self.ctx.wraparound or e.__class__ is FromEnd:
            return self.ctx.from_start(e, self.length)
        return e

    def _slice(self, part: slice) -> SharedArray:
        """Return the part ``start:stop`` of the array, on the same memory."""
        ctx, ends = self.ctx, (part.start, part.stop, part.step)
        start, stop, step = (x if x is None else to_int(ctx.uniform_in_block(x)) for x in ends)
        start, stop = start or 0, self.length if stop is None else stop
        numbers = start.__class__ is int and stop.__class__ is int
        if step not in (None, 1) or not numbers or not 0 <= start <= stop <= self.length:
            raise ctx.outside(self.name, self.axes, (part,), ctx.first_lane())
        length = stop - start
        return SharedArray(ctx, self.name, length, self.dtype, self.buffer, self.first + start)

    def __setitem__(self, e: Any, value: Any) -> None:
        e = self._only(e)
        try:
            if value.__class__ is not np.ndarray:
                value = np.full(self.ctx.group.count, self.convert(value))
            value = value.reshape(1, self.ctx.group.count)
        except (TypeError, ValueError):
            raise not_a_number(self.name, value) from None
        self._write(e, value)

    def load(self, e: Any, n: int, pairs: bool = True) -> tuple[Any, ...]:
        """Load n neighbouring elements in one access.

        Parameters
        ----------
        e : int or ndarray of int
            First element, a multiple of n; by lane if lanes differ.
        n : int
            Number of elements.
        pairs : bool, default True
            How the wavefronts of loads of 8 and 16 bytes are counted. If True, pairs of lanes
            that load the same elements can share a wavefront: half the wavefronts are needed if
            every lane l loads the same elements as lane l ^ 1, or every lane l the same elements
            as lane l ^ 2. If False, as for ldmatrix, pairs of lanes do not matter.

        Returns
        -------
        tuple of ndarray
            The n values, each an array over the lanes.

        Raises
        ------
        SharedHazard
            If the access races with a write of another thread.
        UninitialisedRead
            If an element was never written.
        OutOfBounds
            If an element is outside of the array.
        Misaligned
            If the first element's position is not a multiple of n.
        """
        return tuple(self._read(self.ctx.group.lanes(e), n, pairs))

    def store(self, e: Any, values: Sequence[Any]) -> None:
        """Store neighbouring elements in one access.

        Parameters
        ----------
        e : int or ndarray of int
            First element, a multiple of the number of values; by lane if lanes differ.
        values : sequence
            The values: numbers, or arrays over the lanes.

        Raises
        ------
        SharedHazard
            If the access races with an access of another thread.
        OutOfBounds
            If an element is outside of the array.
        Misaligned
            If the first element's position is not a multiple of the number of values.
        """
        rows = np.empty((len(values), self.ctx.group.count), self.buffer.data.dtype)
        for row, value in zip(rows, values, strict=True):
            row[:] = value
        self._write(e, rows)

    def _read(self, e: np.ndarray, n: int, pairs: bool = True) -> np.ndarray:
        """Return the values of n neighbouring elements for each lane, as an array (n, lanes).

        `e` is the first element of each lane. `pairs` is described in `load`.
        """
        buffer = self.buffer
        out = bits = np.empty((n, self.ctx.group.count), buffer.bits.dtype)
        if buffer.data.dtype is not bits.dtype:
            out = bits.view(buffer.data.dtype)
        for k, places in self._left(checks.shared_load, "load", e, n, bits, pairs):
            for p in places:
                self._reads(p, k)
            out[:, k] = buffer.data[0, places.start : places.stop]
        return out

    def _left(
        self, check: Callable[..., int], kind: str, e: np.ndarray, n: int, *last: Any
    ) -> Iterable[tuple[int, range]]:
        """Run a compiled check of an access, and return the lanes that the caller must check.

        `check` is a function of checks.py, such as `shared_load`. It stops at the first lane for
        which it cannot decide whether the access is allowed. The result contains a pair for this
        lane and for each later lane that takes part: the lane, and the range of its elements in the
        buffer. The result is empty if all accesses are allowed.

        Every lane accesses `n` elements from `e` on. `kind` is the name of the access for the
        counts, such as "load". `last` are the arguments of `check` after `scratch`.
        """
        ctx, buffer, group = self.ctx, self.buffer, self.ctx.group
        mask = group.everyone if ctx.mask is None else ctx.mask
        stats = ctx.statistics(self.name, "shared", kind)
        places, first, length = e, self.first, self.length
        if first.__class__ is np.ndarray:
            places, first, length = self._from(e, n)
        lane = check(
            buffer.bits, buffer.written, buffer.reads, buffer.touched, first, length, self.itemsize,
            places, n, mask, group.tids, ctx.starts, ctx.seen, ctx.base, stats, checks.SCRATCH,
            *last,
        )  # fmt: skip
        if lane < 0:
            return ()
        if ctx.several:
            raise OneByOne
        lanes = (np.flatnonzero(mask[lane:]) + lane).tolist()
        begin = ((k, self._vector(k, int(e[k]), n)) for k in lanes)
        return ((k, range(first, first + n)) for k, first in begin)

    def _from(self, e: np.ndarray, n: int) -> tuple[np.ndarray, int, int]:
        """Return the arguments `e`, `first` and `length` for the compiled loops of checks.py.

        Each lane accesses `n` elements of this array, from its position in `e` on. Normally, the
        array begins at the same element of the buffer in all lanes. The positions in `e` are then
        returned unchanged, with this element and the length of the array.

        If thread blocks run at the same time, the array may begin at a different element of the
        buffer in each thread block. Positions in the buffer are then returned instead, with 0 and
        the length of the buffer.
        """
        if self.first.__class__ is not np.ndarray:
            return e, self.first, self.length
        if self.ctx.first_outside(e, self.length - n + 1) >= 0:
            raise OneByOne
        return e + self.first, 0, self.buffer.data.shape[1]

    def _write(self, e: Any, values: np.ndarray) -> None:
        """Store values of shape (n, lanes) to n neighbouring elements from `e` on in every lane."""
        ctx, buffer, values = self.ctx, self.buffer, self.convert(values)
        e, n = ctx.group.lanes(e), len(values)
        for k, places in self._left(checks.shared_store, "store", e, n, bits_of(values)):
            for j, p in enumerate(places):
                self._writes(p, k)
                buffer.written[0, p] = ctx.stamp(k)
                buffer.data[0, p] = values[j, k]
        if buffer.atomics is not None:  # the last write was not atomic
            lanes = ctx.active()
            places = (self.first + e)[lanes] + np.arange(n)[:, None]
            buffer.atomics[ctx.group.blocks[lanes], places] = 0

    def atomic(self, e: Any, update: Update, operands: list[np.ndarray]) -> np.ndarray:
        """Update an element atomically in every lane that takes part, lane after lane.

        Parameters
        ----------
        e : int or ndarray of int
            The element.
        update : callable
            Takes old values and operands of the array's dtype, and returns new values.
        operands : list of ndarray
            Operands of the lanes that take part.

        Returns
        -------
        ndarray
            Old values of the lanes that take part.

        Raises
        ------
        SharedHazard
            If the update races with an access that is not atomic.
        UninitialisedRead
            If the element was never written.
        OutOfBounds
            If the element is outside of the array.
        """
        ctx, buffer, group, e = self.ctx, self.buffer, self.ctx.group, self._only(e)
        if buffer.atomics is None or buffer.plain is None:
            buffer.atomics, buffer.plain = np.zeros((2, *buffer.written.shape), np.int64)
        e, active = group.lanes(e), ctx.active()
        places, first, length = self._from(e, 1)
        left = active
        while True:
            lane = checks.shared_atomic(
                buffer.written, buffer.reads, buffer.touched, buffer.atomics, buffer.plain, first,
                length, places, left, group.tids, ctx.starts, ctx.seen, ctx.base,
            )  # fmt: skip
            if lane < 0:
                break
            if ctx.several:
                raise OneByOne
            self._updates(lane, self._vector(lane, int(e[lane]), 1))
            left = left & (np.arange(left.size) != lane)
        statistics = ctx.statistics(self.name, "shared", "atomic")
        checks.count_wavefronts(
            first, self.itemsize, places, active, group.tids, statistics, checks.SCRATCH
        )
        ctx.instruction("atomic")
        data = buffer.data.reshape(-1)
        at = (group.blocks * buffer.data.shape[1] + first + places)[active]
        elements, number = np.unique(at, return_inverse=True)
        values = data[elements].astype(self.dtype)
        old = in_turn(values, number, update, operands, not ctx.discards)
        data[elements] = values
        return old

    def _vector(self, lane: int, e: int, n: int) -> int:
        """Return the element of the buffer at which a lane's access to n elements begins.

        `e` is the first element in the array. Raise OutOfBounds or Misaligned if the access is not
        allowed.
        """
        if e < 0 or e + n > self.length:
            raise self._outside(lane, e if e < 0 else e + n - 1)
        first = self.first + e
        if first % n:
            size = self.itemsize
            raise self.ctx.fault(
                Misaligned,
                f"{self._element(first)} is at byte {first * size} of shared memory, but an "
                f"access of {n * size} bytes must start at a multiple of {n * size} bytes. Start "
                "the access at such an element, or access the elements one by one",
                self.name,
                lane,
            )
        return first

    # ---- one lane after the other

    def _reads(self, p: int, lane: int) -> None:
        """Check a read of element `p` of the buffer by a lane, and record it."""
        ctx, buffer = self.ctx, self.buffer
        me, warp = ctx.stamp(lane), ctx.group.warp_of[lane]
        several = ctx.starts[warp] + SEVERAL + warp
        if buffer.reads[0, warp, p] in (several, me):
            return
        self._check(p, lane, "reads", self._wrote(p), [int(buffer.written[0, p])])
        joined = ctx.joined(int(buffer.reads[0, warp, p]), lane)
        buffer.reads[0, warp, p] = buffer.touched[0, p] = joined

    def _writes(self, p: int, lane: int) -> None:
        """Check a write of element `p` of the buffer by a lane."""
        base, buffer = self.ctx.base[0], self.buffer
        if buffer.written[0, p] != UNWRITTEN:
            self._check(p, lane, "overwrites", self._wrote(p), [int(buffer.written[0, p])])
        if buffer.touched[0, p] >= base:
            self._check(p, lane, "overwrites", "read", buffer.reads[0, :, p].tolist())

    def _updates(self, lane: int, p: int) -> None:
        """Raise, or report, a race of a lane's atomic update of element `p` of the buffer.

        Nothing happens if there is no race.
        """
        buffer = self.buffer
        assert buffer.atomics is not None and buffer.plain is not None
        last = int(buffer.written[0, p])
        before = int(buffer.plain[0, p]) if int(buffer.atomics[0, p]) == last else last
        self._check(p, lane, "atomically updates", "wrote", [before])
        self._check(p, lane, "atomically updates", "read", buffer.reads[0, :, p].tolist())

    def _wrote(self, p: int) -> str:
        """Return how element `p` was last changed: "wrote" or "atomically updated"."""
        atomics = self.buffer.atomics
        atomic = atomics is not None and atomics[0, p] == self.buffer.written[0, p]
        return "atomically updated" if atomic else "wrote"

    def _check(self, p: int, lane: int, does: str, did: str, stamps: Iterable[int]) -> None:
        """Raise, or report, a race of a lane's access with earlier accesses to the same element.

        The element is `p` of the buffer. `stamps` are the stamps of the earlier accesses. `does`
        and `did` are the verbs for the message, such as "reads" and "wrote". Nothing happens if
        there is no race.
        """
        base = self.ctx.base[0]
        for stamp in stamps:
            if stamp >= base and not self.ctx.ordered(stamp, lane):
                error = self._hazard(p, lane, stamp, does, did)
                if stamp >= READING:
                    raise error
                self.ctx.race(error)

    # ---- copies in flight: until a copy has landed, no thread may access its elements

    def depart(self, e: Any, n: int) -> np.ndarray:
        """Mark the elements that an asynchronous copy of each lane will write.

        Until the copy has been waited for, no thread may access the elements.

        Parameters
        ----------
        e : int or ndarray of int
            First element.
        n : int
            Number of elements.

        Returns
        -------
        ndarray of int
            The first element by lane.

        Raises
        ------
        SharedHazard
            If an element may still be read or written.
        OutOfBounds
            If an element is outside of the array.
        Misaligned
            If the first element's position is not a multiple of n.
        """
        group, buffer, site = self.ctx.group, self.buffer, self.ctx.numbered_site()
        e, who = group.lanes(e), (buffer.copiers, buffer.sites, site)
        for k, places in self._left(checks.depart, "copy", e, n, *who):
            for p in places:
                self._writes(p, k)
            for p in places:
                buffer.written[0, p], buffer.reads[0, group.warp_of[k], p] = IN_FLIGHT, 0
                buffer.copiers[0, p], buffer.sites[0, p] = group.tids[k], site
        return e

    def land(self, copy: Copy, lanes: np.ndarray) -> None:
        """Write the values of asynchronous copies that have been waited for.

        Parameters
        ----------
        copy : Copy
            The copies of all lanes.
        lanes : ndarray of bool
            Lanes whose copies have been waited for.
        """
        ctx, buffer = self.ctx, self.buffer
        values = copy.read(lanes).astype(buffer.data.dtype)
        e, first, _ = self._from(copy.e, copy.n)
        checks.land(
            buffer.bits, buffer.written, first, e, copy.n, bits_of(values), lanes,
            ctx.group.tids, ctx.starts,
        )  # fmt: skip

    def merged(self, mask: Any, other: Any) -> SharedArray:
        """Return the array that a variable has in all lanes after a branch.

        In the lanes of `mask` the variable is this array. In the other lanes the variable is
        `other`, which must be the same array, perhaps under another name. If several thread blocks
        run at the same time, each thread block may have another part of the buffer.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes in which the variable is this array.
        other : object
            Value of the variable in the other lanes.

        Returns
        -------
        SharedArray
            The array of all lanes.

        Raises
        ------
        TypeError
            If `other` is another array.
        """
        same = other.__class__ is SharedArray and self.buffer is other.buffer
        same = same and self.length == other.length
        if self.ctx.several:
            if not same or self.name != other.name:
                raise OneByOne
            first = merge(self.ctx.whole_blocks(mask), other.first, self.first)
            return SharedArray(self.ctx, self.name, self.length, self.dtype, self.buffer, first)
        if not same or self.first != other.first:
            raise TypeError(two_arrays(self, other))
        return self

    # ---- messages

    def _element(self, p: int) -> str:
        """Return the name of element `p` of the buffer, such as "sK[3]"."""
        place = np.unravel_index(p - self.first, self.axes) if len(self.axes) > 1 else None
        return f"{self.name}[{', '.join(map(str, place or (p - self.first,)))}]"

    def _outside(self, lane: int, index: Any) -> EmulatorError:
        return self.ctx.outside(self.name, (self.length,), index, lane)

    def _hazard(self, p: int, lane: int, stamp: int, does: str, did: str) -> EmulatorError:
        """Return the error for a lane's access to element `p` of the buffer after another access.

        `stamp` is the stamp of the other access. The special stamps UNWRITTEN, READING and
        IN_FLIGHT have their own messages. `does` and `did` are the verbs for both accesses, as in
        `_check`.
        """
        ctx = self.ctx
        element = self._element(p)
        if stamp == UNWRITTEN:
            return ctx.fault(UninitialisedRead, never_written(element), self.name, lane)
        if stamp == READING:
            text = (
                f"this thread {does} {element} while a wgmma product or a TMA copy may still read "
                "it. Call wait_products (for a product) or wait_boxes_read (for a TMA copy) first"
            )
        elif stamp == IN_FLIGHT:
            site = ctx.sites[self.buffer.sites[0, p]]
            text = (
                f"{element} is accessed while a copy into it is in flight, issued by thread "
                f"{ctx.thread_name(int(self.buffer.copiers[0, p]))} at {ctx.line_of(site)}. Wait "
                "for the copy first: with wait_mbarrier if it copies a box, else with wait_async() "
                "and a barrier"
            )
        else:
            text = f"this thread {does} {element}, which {ctx.who(stamp)} {did}, {NO_BARRIER}"
        return ctx.fault(SharedHazard, text, self.name, lane)
