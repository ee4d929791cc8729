"""Shared memory that finds races, uninitialised reads and accesses out of bounds.

Each element has an integer stamp of its last write, and one of its last reads for each warp. A
stamp is clock * STAMP + code, with the clock of the accessing thread's warp and a code
for who: a thread (0..1023) or several threads of one warp (1024 + warp). The clock moves on at
every barrier, of the block or named, and at every full `syncwarp`. Each warp has a vector clock
`seen`: for each warp the stamp below which its accesses happened before the present, at least that
of the block's last barrier (`ctx.base`). So did a thread's own. Later readers of a warp supersede
earlier ones: the summary loses nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .conversions import converter
from .errors import Misaligned, SharedHazard, UninitialisedRead

if TYPE_CHECKING:
    from .context import Context

STAMP = 2048
SEVERAL = 1024
NOBODY = STAMP - 1
# Above every stamp, so that one comparison finds them, and by nobody: no access comes before.
UNWRITTEN = (1 << 60) + NOBODY
IN_FLIGHT = (1 << 61) + NOBODY
NO_ATOMICS: tuple[int, int, dict[int, int]] = (-1, 0, {})


class SharedBuffer:
    """A piece of shared memory: values and stamps that the arrays laid over it share."""

    __slots__ = ("data", "written", "reads", "touched", "atomics", "flights")

    def __init__(self, length: int, warps: int) -> None:
        self.data: list[Any] = [0] * length
        self.written = [UNWRITTEN] * length
        self.reads = [[0] * length for _ in range(warps)]
        self.touched = [0] * length  # at or above `ctx.base` where a warp has read since
        # element -> stamps of its last atomics, of the write before them, and of those by warp
        self.atomics: dict[int, tuple[int, int, dict[int, int]]] = {}
        self.flights: dict[int, tuple[int, tuple[int, int]]] = {}  # element -> thread, call site


class SharedArray:
    """A 1-D array in shared memory: `length` elements of a buffer from element `base` on."""

    __slots__ = (
        "name", "shape", "dtype", "length", "base", "buffer", "data", "written", "read", "touched",
        "cell", "convert", "ctx",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        buffer: SharedBuffer,
        base: int = 0,
    ) -> None:
        self.ctx, self.name, self.shape, self.dtype = ctx, name, shape, dtype
        self.length, self.base, self.buffer = prod(shape), base, buffer
        self.data, self.written, self.touched = buffer.data, buffer.written, buffer.touched
        self.turn_to(ctx.thread.warp.index)
        self.cell = array("f", [0.0]) if dtype == np.float32 else None
        self.convert = converter(dtype)

    def turn_to(self, warp: int) -> None:
        """Note reads as those of this warp."""
        self.read = self.buffer.reads[warp]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return self.length

    @property
    def ndim(self) -> int:
        return len(self.shape)

    # The three element accessors repeat the same few lines: a call more would double their time.

    def __getitem__(self, e: Any) -> Any:
        if 0 <= e < self.length:
            e += self.base
            ctx = self.ctx
            r = self.read[e]
            # A read by this thread or several of its warp is recorded already, and was checked
            # against the last write then.
            if r is not ctx.several and r is not ctx.me:
                if r < ctx.base and self.written[e] < ctx.base:
                    self.read[e] = self.touched[e] = ctx.me
                else:
                    self._reads(e)
            return self.data[e]
        raise self._outside(e)

    def __setitem__(self, e: Any, value: Any) -> None:
        if 0 <= e < self.length:
            e += self.base
            ctx = self.ctx
            if self.written[e] >= ctx.base or self.touched[e] >= ctx.base:
                self._writes(e)
            self.written[e] = ctx.me
            cell = self.cell
            if cell is not None:
                cell[0] = value
                self.data[e] = cell[0]
            else:
                self.data[e] = self.convert(value)
            return
        raise self._outside(e)

    def load(self, e: int, n: int) -> tuple[Any, ...]:
        """Elements e..e+n-1 (flat index) in one access of n elements, e a multiple of n."""
        first = self.base + e
        end = first + n
        if e < 0 or e + n > self.length or first % n:
            self._vector(e, n)
        ctx = self.ctx
        several, me = ctx.several, ctx.me
        # As above, and of most vectors all elements have been read together before.
        stamps = self.read[first:end]
        for r in stamps:
            if r is not several and r is not me:
                if stamps.count(r) == n and max(self.written[first:end]) < ctx.base:
                    self.read[first:end] = self.touched[first:end] = [ctx.joined(r)] * n
                else:
                    for k in range(first, end):
                        self._reads(k)
                break
        return tuple(self.data[first:end])

    def store(self, e: int, values: Sequence[Any]) -> None:
        """Write n `values` from element e on (flat index) in one access, e a multiple of n."""
        first = self._vector(e, len(values))
        ctx = self.ctx
        base, me, written, touched = ctx.base, ctx.me, self.written, self.touched
        convert = self.convert
        for k, value in enumerate(values, first):
            if written[k] >= base or touched[k] >= base:
                self._writes(k)
            written[k] = me
            self.data[k] = convert(value)

    def _vector(self, e: int, n: int) -> int:
        if e < 0 or e + n > self.length:
            raise self._outside(e if e < 0 else e + n - 1)
        first = self.base + e
        if first % n:
            size = self.dtype.itemsize
            raise self.ctx.fault(
                Misaligned,
                f"{self._element(first)} lies at byte {first * size}: "
                f"an access of {n * size} bytes needs a multiple of {n * size}",
                self.name,
            )
        return first

    def _reads(self, e: int) -> None:
        ctx = self.ctx
        if self.written[e] >= ctx.base:
            self._check(e, "reads", "wrote", self._writers(e))
        self.read[e] = self.touched[e] = ctx.joined(self.read[e])

    def _writes(self, e: int) -> None:
        base = self.ctx.base
        if self.written[e] >= base and self.written[e] != UNWRITTEN:
            self._check(e, "overwrites", "wrote", self._writers(e))
        if self.touched[e] >= base:
            self._check(e, "overwrites", "reads", [read[e] for read in self.buffer.reads])
        self.buffer.atomics.pop(e, None)

    def _check(self, e: int, does: str, did: str, stamps: Iterable[int]) -> None:
        base = self.ctx.base
        for stamp in stamps:
            if stamp >= base and not self.ctx.ordered(stamp):
                raise self._hazard(e, stamp, does, did)

    def _writers(self, e: int) -> Iterable[int]:
        w = self.written[e]
        last, _, updates = self.buffer.atomics.get(e, NO_ATOMICS)
        return updates.values() if w == last else (w,)

    def atomic(self, e: Any, operation: Callable[[Any], Any]) -> Any:
        """Replace element `e` by `operation` of it; returns the old value."""
        e = self._flat(e)
        ctx, buffer = self.ctx, self.buffer
        w = self.written[e]
        if w == UNWRITTEN:
            raise self._hazard(e, w, "reads", "wrote")
        # Atomics do not conflict with each other, so the write before them is kept beside.
        last, plain, updates = buffer.atomics.get(e, NO_ATOMICS)
        if w != last:
            plain, updates = w, {}
        self._check(e, "atomically updates", "wrote", (plain,))
        self._check(e, "atomically updates", "reads", [read[e] for read in buffer.reads])
        warp = ctx.thread.warp.index
        self.written[e] = updates[warp] = ctx.joined(updates.get(warp, 0))
        buffer.atomics[e] = (self.written[e], plain, updates)
        old = self.data[e]
        self.data[e] = self.convert(operation(old))
        return old

    # Copies in flight: between issue and landing the elements belong to nobody.

    def depart(self, e: int, n: int) -> int:
        """Hand elements e..e+n-1 to an asynchronous copy of this thread; returns their start."""
        first = self._vector(e, n)
        ctx = self.ctx
        site = ctx.site()
        for k in range(first, first + n):
            if self.written[k] >= ctx.base or self.touched[k] >= ctx.base:
                self._writes(k)
        for k in range(first, first + n):
            self.written[k], self.read[k] = IN_FLIGHT, 0
            self.buffer.flights[k] = (ctx.tid, site)
        return first

    def land(self, first: int, values: Sequence[Any]) -> None:
        for k, value in enumerate(values, first):
            self.written[k] = self.ctx.me
            self.data[k] = self.convert(value)
            del self.buffer.flights[k]

    def _flat(self, index: Any) -> int:
        axes = index if isinstance(index, tuple) else (index,)
        if len(axes) != len(self.shape):
            raise TypeError(f"{self.name} has {len(self.shape)} dimensions, indexed with {index!r}")
        e = 0
        for i, n in zip(axes, self.shape, strict=True):
            if not 0 <= i < n:
                raise self._outside(index)
            e = e * n + i
        return self.base + e

    def _element(self, e: int) -> str:
        index = np.unravel_index(e - self.base, self.shape)
        return f"{self.name}[{', '.join(str(int(i)) for i in index)}]"

    def _outside(self, index: Any) -> Exception:
        return self.ctx.outside(self.name, self.shape, index)

    def _hazard(self, e: int, stamp: int, does: str, did: str) -> Exception:
        ctx = self.ctx
        element = self._element(e)
        if stamp == UNWRITTEN:
            text = f"{element} is read, but was never written"
            return ctx.fault(UninitialisedRead, text, self.name)
        if stamp == IN_FLIGHT:
            tid, site = self.buffer.flights[e]
            text = (
                f"{element} is touched with a copy in flight, issued by thread "
                f"{ctx.thread_name(tid)} at {ctx.line_of(site)} and not waited for"
            )
        else:
            text = f"this thread {does} {element}, which {ctx.who(stamp)} {did}, no barrier between"
        return ctx.fault(SharedHazard, text, self.name)


class SharedMatrix(SharedArray):
    """A 2-D array in shared memory."""

    __slots__ = ("rows", "columns")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows, self.columns = self.shape

    def __getitem__(self, index: Any) -> Any:
        i, j = index
        if 0 <= i < self.rows and 0 <= j < self.columns:
            e = self.base + i * self.columns + j
            ctx = self.ctx
            r = self.read[e]
            if r is not ctx.several and r is not ctx.me:
                if r < ctx.base and self.written[e] < ctx.base:
                    self.read[e] = self.touched[e] = ctx.me
                else:
                    self._reads(e)
            return self.data[e]
        raise self._outside(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        i, j = index
        if 0 <= i < self.rows and 0 <= j < self.columns:
            SharedArray.__setitem__(self, i * self.columns + j, value)
        else:
            raise self._outside(index)


class SharedTensor(SharedArray):
    """A shared array of three or more dimensions."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return SharedArray.__getitem__(self, self._flat(index) - self.base)

    def __setitem__(self, index: Any, value: Any) -> None:
        SharedArray.__setitem__(self, self._flat(index) - self.base, value)
