"""Shared memory that finds races, uninitialised reads and accesses out of bounds.

Each element has an integer stamp of its last write, and one of its last reads for each warp. A
stamp is clock * STAMP + code, with the clock of the accessing thread's warp and a code
for who: a thread (0..1023) or several threads of one warp (1024 + warp). The clock moves on at
every barrier, of the block or named, and at every full `syncwarp`. Each warp has a vector clock
`seen`: for each warp the stamp below which its accesses happened before the present, at least that
of the block's last barrier (`ctx.base`). So did a thread's own. Later readers of a warp supersede
earlier ones: the summary loses nothing. Nor does the order of lanes within a step matter: who
conflicts with whom is decided by stamps alone.

The loops over lanes are compiled (checks.py); what they cannot decide is gone through here, a block
at a time. Of blocks that run at once each has a row of a buffer's arrays, and a `base`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import checks
from .checks import IN_FLIGHT, READING, SEVERAL, UNWRITTEN
from .conversions import converter
from .errors import EmulatorError, Misaligned, SharedHazard, UninitialisedRead
from .groups import Copy, OneByOne

if TYPE_CHECKING:
    from .context import Context


def bits_of(values: np.ndarray) -> np.ndarray:
    """Values as integers: the compiled loops, which only move them, know few types."""
    if values.dtype.kind == "f":
        return values.view(f"i{values.itemsize}")
    return values.view(np.int64) if values.itemsize == 8 else values.astype(np.int64)


class SharedBuffer:
    """Shared memory of each block that runs: values and stamps, of the arrays laid over it."""

    __slots__ = ("data", "bits", "written", "reads", "touched", "copiers", "sites")

    def __init__(self, blocks: int, length: int, warps: int, dtype: np.dtype) -> None:
        shape = (blocks, length)
        self.data = np.zeros(shape, dtype if dtype.kind == "f" else np.int64)
        self.bits = bits_of(self.data)
        self.written = np.full(shape, UNWRITTEN)
        self.reads = np.zeros((blocks, warps, length), np.int64)
        self.touched = np.zeros(shape, np.int64)  # at or above `ctx.base`: read since
        # who copies to an element in flight, and where
        self.copiers = np.zeros(shape, np.int64)
        self.sites = np.zeros(shape, np.int64)

    def clear(self, blocks: int) -> None:
        """Nothing is written, for new blocks; stamps of others are older than any of their own."""
        self.written[:blocks] = UNWRITTEN


class SharedArray:
    """An array in shared memory: elements of a buffer from element `first` on."""

    __slots__ = (
        "name", "shape", "dtype", "itemsize", "length", "first", "buffer", "convert", "ctx",
    )  # fmt: skip

    def __init__(
        self, ctx: Context, name: str, shape: tuple[int, ...], dtype: np.dtype,
        buffer: SharedBuffer, first: int = 0,
    ) -> None:  # fmt: skip
        self.ctx, self.name, self.shape, self.dtype = ctx, name, shape, dtype
        self.itemsize, self.length, self.first = dtype.itemsize, prod(shape), first
        self.buffer = buffer
        self.convert = converter(dtype)

    def __getitem__(self, index: Any) -> Any:
        e = self._flat(index)
        if e.__class__ is not np.ndarray:
            out = self._read(self.ctx.group.full(int(e)), 1)
            if self.ctx.several:
                return out[0]
            value = self.buffer.data[0, self.first + e]
            return value if self.dtype.kind == "f" else value.item()
        return self._read(e, 1)[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        e = self._flat(index)
        if value.__class__ is not np.ndarray:
            value = np.full(self.ctx.group.count, self.convert(value))
        self._write(e, value.reshape(1, -1))

    def load(self, e: Any, n: int, pairs: bool = True) -> tuple[Any, ...]:
        """Elements e..e+n-1 (flat index) in one access of n elements, e a multiple of n.

        Lanes that share them in `pairs` may be served together: not so by ldmatrix.
        """
        return tuple(self._read(self.ctx.group.lanes(e), n, pairs))

    def store(self, e: Any, values: Sequence[Any]) -> None:
        """Write n `values` from element e on (flat index) in one access, e a multiple of n."""
        rows = np.empty((len(values), self.ctx.group.count), self.buffer.data.dtype)
        for row, value in zip(rows, values, strict=True):
            row[:] = value
        self._write(e, rows)

    def _read(self, e: np.ndarray, n: int, pairs: bool = True) -> np.ndarray:
        ctx, buffer = self.ctx, self.buffer
        group = ctx.group
        mask = group.everyone if ctx.mask is None else ctx.mask
        out = np.empty((n, group.count), buffer.data.dtype)
        stats = ctx.statistics(self.name, "shared", "load")
        lane = checks.shared_load(
            buffer.bits, buffer.written, buffer.reads, buffer.touched, self.first, self.length,
            self.itemsize, e, n, mask, group.tids, ctx.starts, ctx.seen, ctx.base, bits_of(out),
            pairs, stats,
        )  # fmt: skip
        if lane >= 0:
            for k in self._lanes_from(lane, mask):
                first = self._vector(k, int(e[k]), n)
                for p in range(first, first + n):
                    self._reads(p, k)
                out[:, k] = buffer.data[0, first : first + n]
        return out

    def _lanes_from(self, lane: int, mask: np.ndarray) -> list[int]:
        """The lanes that take part from this one on, which are of one block."""
        if self.ctx.several:
            raise OneByOne
        return (np.flatnonzero(mask[lane:]) + lane).tolist()

    def _write(self, e: Any, values: np.ndarray) -> None:
        ctx, buffer = self.ctx, self.buffer
        group = ctx.group
        mask = group.everyone if ctx.mask is None else ctx.mask
        e = self.ctx.group.lanes(e)
        values = self.convert(values)
        stats = ctx.statistics(self.name, "shared", "store")
        n = len(values)
        lane = checks.shared_store(
            buffer.bits, buffer.written, buffer.reads, buffer.touched, self.first, self.length,
            self.itemsize, e, n, mask, group.tids, ctx.starts, ctx.seen, ctx.base, bits_of(values),
            stats,
        )  # fmt: skip
        if lane >= 0:
            for k in self._lanes_from(lane, mask):
                first = self._vector(k, int(e[k]), n)
                for j, p in enumerate(range(first, first + n)):
                    self._writes(p, k)
                    buffer.written[0, p] = ctx.stamp(k)
                    buffer.data[0, p] = values[j, k]

    def _vector(self, lane: int, e: int, n: int) -> int:
        if e < 0 or e + n > self.length:
            raise self._outside(lane, e if e < 0 else e + n - 1)
        first = self.first + e
        if first % n:
            size = self.itemsize
            raise self.ctx.fault(
                Misaligned,
                f"{self._element(first)} lies at byte {first * size}: "
                f"an access of {n * size} bytes needs a multiple of {n * size}",
                self.name,
                lane,
            )
        return first

    # ---- one lane after the other

    def _reads(self, p: int, lane: int) -> None:
        ctx, buffer = self.ctx, self.buffer
        me, warp = ctx.stamp(lane), ctx.group.warp_of[lane]
        several = ctx.starts[warp] + SEVERAL + warp
        if buffer.reads[0, warp, p] in (several, me):
            return
        self._check(p, lane, "reads", "wrote", [int(buffer.written[0, p])])
        joined = ctx.joined(int(buffer.reads[0, warp, p]), lane)
        buffer.reads[0, warp, p] = buffer.touched[0, p] = joined

    def _writes(self, p: int, lane: int) -> None:
        base, buffer = self.ctx.base[0], self.buffer
        if buffer.written[0, p] != UNWRITTEN:
            self._check(p, lane, "overwrites", "wrote", [int(buffer.written[0, p])])
        if buffer.touched[0, p] >= base:
            self._check(p, lane, "overwrites", "reads", buffer.reads[0, :, p].tolist())

    def _check(self, p: int, lane: int, does: str, did: str, stamps: Iterable[int]) -> None:
        base = self.ctx.base[0]
        for stamp in stamps:
            if stamp >= base and not self.ctx.ordered(stamp, lane):
                raise self._hazard(p, lane, stamp, does, did)

    # ---- copies in flight: between issue and landing the elements belong to nobody

    def depart(self, e: Any, n: int) -> np.ndarray:
        """Hand elements e..e+n-1 to an asynchronous copy of each lane; returns e by lane."""
        ctx, buffer = self.ctx, self.buffer
        group = ctx.group
        mask = group.everyone if ctx.mask is None else ctx.mask
        e = self.ctx.group.lanes(e)
        site = ctx.numbered_site()
        stats = ctx.statistics(self.name, "shared", "copy")
        lane = checks.depart(
            buffer.written, buffer.reads, buffer.touched, buffer.copiers, buffer.sites, self.first,
            self.length, self.itemsize, e, n, mask, group.tids, ctx.seen, ctx.base, site, stats,
        )  # fmt: skip
        if lane >= 0:
            for k in self._lanes_from(lane, mask):
                first = self._vector(k, int(e[k]), n)
                for p in range(first, first + n):
                    self._writes(p, k)
                for p in range(first, first + n):
                    buffer.written[0, p], buffer.reads[0, group.warp_of[k], p] = IN_FLIGHT, 0
                    buffer.copiers[0, p], buffer.sites[0, p] = group.tids[k], site
        return e

    def land(self, copy: Copy, lanes: np.ndarray) -> None:
        """The copies of `lanes` arrive."""
        ctx, buffer = self.ctx, self.buffer
        values = copy.read(lanes).astype(buffer.data.dtype)
        checks.land(
            buffer.bits, buffer.written, self.first, copy.e, copy.n, bits_of(values), lanes,
            ctx.group.tids, ctx.starts,
        )  # fmt: skip

    def merged(self, mask: Any, other: Any) -> SharedArray | SharedArrays:
        """This array, where the lanes that are not in `mask` hold the same by another name."""
        if self.ctx.several:
            return SharedArrays(self.ctx, [(self, self.ctx.whole_blocks(mask))]).over(other)
        mine = (self.buffer, self.first, self.shape)
        if other.__class__ is not SharedArray or mine != (other.buffer, other.first, other.shape):
            raise TypeError(f"lanes hold {self.name} and another array: not emulated")
        return self

    # ---- places and words

    def _flat(self, index: Any) -> Any:
        """The element of an index a dimension, within the array."""
        if len(self.shape) == 1:
            return index[0] if index.__class__ is tuple else index
        axes = index if index.__class__ is tuple else (index,)
        if len(axes) != len(self.shape):
            raise TypeError(f"{self.name} has {len(self.shape)} dimensions, indexed with {index!r}")
        ctx = self.ctx
        e: Any = None
        for i, n in zip(axes, self.shape, strict=True):
            lane = ctx.first_outside(i, n)
            if lane >= 0:
                raise self._outside(lane, index)
            e = i if e is None else e * n + i
        return e

    def _element(self, p: int) -> str:
        index = np.unravel_index(p - self.first, self.shape)
        return f"{self.name}[{', '.join(str(int(i)) for i in index)}]"

    def _outside(self, lane: int, index: Any) -> EmulatorError:
        return self.ctx.outside(self.name, self.shape, index, lane)

    def _hazard(self, p: int, lane: int, stamp: int, does: str, did: str) -> EmulatorError:
        ctx = self.ctx
        element = self._element(p)
        if stamp == UNWRITTEN:
            text = f"{element} is read, but was never written"
            return ctx.fault(UninitialisedRead, text, self.name, lane)
        if stamp == READING:
            text = (
                f"this thread {does} {element}, which a product or a bulk copy reads that was not "
                "waited for"
            )
        elif stamp == IN_FLIGHT:
            site = ctx.sites[self.buffer.sites[0, p]]
            text = (
                f"{element} is touched with a copy in flight, issued by thread "
                f"{ctx.thread_name(int(self.buffer.copiers[0, p]))} at {ctx.line_of(site)} "
                "and not waited for"
            )
        else:
            text = f"this thread {does} {element}, which {ctx.who(stamp)} {did}, no barrier between"
        return ctx.fault(SharedHazard, text, self.name, lane)


class SharedArrays:
    """Of blocks that run at once: each has one of several arrays, of all its lanes."""

    __slots__ = ("ctx", "parts", "itemsize", "shape", "dtype")

    def __init__(self, ctx: Context, parts: list[tuple[SharedArray, np.ndarray]]) -> None:
        self.ctx, self.parts = ctx, parts
        one = parts[0][0]
        self.itemsize, self.shape, self.dtype = one.itemsize, one.shape, one.dtype
        if any((one.shape, one.dtype) != (other.shape, other.dtype) for other, _ in parts):
            raise OneByOne

    @property
    def first(self) -> np.ndarray:
        """The element of the buffer that each lane's begins at."""
        found = np.zeros(self.ctx.group.count, np.int64)
        for part, lanes in self.parts:
            found[lanes] = part.first
        return found

    def _each(self) -> Iterator[tuple[SharedArray, np.ndarray]]:
        """Each array with its lanes, under their mask."""
        ctx = self.ctx
        outer = ctx.mask
        for part, lanes in self.parts:
            here = lanes if outer is None else lanes & outer
            if here.any():
                ctx.mask = here
                yield part, here
                ctx.mask = outer

    def __getitem__(self, index: Any) -> np.ndarray:
        found = np.zeros(self.ctx.group.count, self.parts[0][0].buffer.data.dtype)
        for part, here in self._each():
            found[here] = np.broadcast_to(part[index], here.shape)[here]
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        for part, _ in self._each():
            part[index] = value

    def load(self, e: Any, n: int, pairs: bool = True) -> tuple[np.ndarray, ...]:
        found = np.zeros((n, self.ctx.group.count), self.parts[0][0].buffer.data.dtype)
        for part, here in self._each():
            found[:, here] = np.array(part.load(e, n, pairs))[:, here]
        return tuple(found)

    def store(self, e: Any, values: Sequence[Any]) -> None:
        for part, _ in self._each():
            part.store(e, values)

    def depart(self, e: Any, n: int) -> np.ndarray:
        for part, _ in self._each():
            part.depart(e, n)
        return self.ctx.group.lanes(e)

    def land(self, copy: Copy, lanes: np.ndarray) -> None:
        for part, of in self.parts:
            if (of & lanes).any():
                part.land(copy, of & lanes)

    def merged(self, mask: Any, other: Any) -> SharedArray | SharedArrays:
        whole = self.ctx.whole_blocks(mask)
        return SharedArrays(self.ctx, [(a, lanes & whole) for a, lanes in self.parts]).over(other)

    def over(self, other: Any) -> SharedArray | SharedArrays:
        """These, and for the lanes that have none of them others."""
        ctx = self.ctx
        others = [(other, ctx.group.everyone)] if other.__class__ is SharedArray else other.parts
        found: dict[tuple[str, int], tuple[SharedArray, np.ndarray]] = {}
        left = ctx.group.everyone
        for _, lanes in self.parts:
            left = left & ~lanes
        for part, lanes in (*self.parts, *((a, lanes & left) for a, lanes in others)):
            if lanes.any():
                key = (part.name, part.first)
                known = found.get(key)
                found[key] = (part, lanes if known is None else lanes | known[1])
        parts = list(found.values())
        return parts[0][0] if len(parts) == 1 else SharedArrays(ctx, parts)
