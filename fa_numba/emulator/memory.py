"""Shared, local and global arrays that check and count every access.

Shared memory keeps an integer stamp of each element's last write, and one of its last reads for
each warp. A stamp is clock * STAMP + code, with the clock of the accessing thread's warp and a code
for who: a thread (0..1023) or several threads of one warp (1024 + warp). The clock moves on at
every barrier, of the block or named, and at every full `syncwarp`. Each warp has a vector clock
`seen`: for each warp the stamp below which its accesses happened before the present, at least that
of the block's last barrier (`ctx.base`). So did a thread's own. Later readers of a warp supersede
earlier ones: the summary loses nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    EmulatorError,
    Misaligned,
    OutOfBounds,
    ReadOnlyStore,
    SharedHazard,
    UninitialisedRead,
)

if TYPE_CHECKING:
    from .scheduler import Context

STAMP = 2048
SEVERAL = 1024
NOBODY = STAMP - 1
# Above every stamp, so that one comparison finds them, and by nobody: no access comes before.
UNWRITTEN = (1 << 60) + NOBODY
IN_FLIGHT = (1 << 61) + NOBODY
NO_ATOMICS: tuple[int, int, dict[int, int]] = (-1, 0, {})


@dataclass
class Counts:
    """Global-memory accesses of one or more launches, by kernel parameter.

    `loads` and `stores` count elements, `load_bytes` and `store_bytes` bytes; an array that was not
    touched counts 0. An atomic is one load and one store.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    load_bytes: Counter[str] = field(default_factory=Counter)
    store_bytes: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Counts) -> Counts:
        """Add `other` to this one, in place; returns self."""
        self.loads.update(other.loads)
        self.stores.update(other.stores)
        self.load_bytes.update(other.load_bytes)
        self.store_bytes.update(other.store_bytes)
        return self

    def __add__(self, other: Counts) -> Counts:
        return Counts().merge(self).merge(other)


def wrapped(bits: int, signed: bool) -> Callable[[Any], int]:
    """The cast to an integer type: truncates, and wraps around modulo 2**bits."""
    mask, half = (1 << bits) - 1, 1 << (bits - 1)
    low, high = (-half, half - 1) if signed else (0, mask)

    def cast(value: Any) -> int:
        if value.__class__ is int and low <= value <= high:
            return value
        value = int(value) & mask
        return value - (1 << bits) if signed and value >= half else value

    cast.__name__ = cast.__qualname__ = f"{'' if signed else 'u'}int{bits}"
    return cast


def _half(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float16(value))


def converter(dtype: np.dtype) -> Callable[[Any], Any]:
    """The conversion that a store to an array of `dtype` makes."""
    if dtype.kind in "iu":
        return wrapped(dtype.itemsize * 8, dtype.kind == "i")
    if dtype == np.float16:
        return _half
    if dtype == np.float32:
        cell = array("f", [0.0])

        def single(value: float) -> float:
            cell[0] = value
            return cell[0]

        return single
    if dtype.kind in "fb":
        return float if dtype.kind == "f" else bool
    raise TypeError(f"arrays of dtype {dtype} are not emulated")


def _outside(ctx: Context, name: str, shape: tuple[int, ...], index: Any) -> EmulatorError:
    axes = index if isinstance(index, tuple) else (index,)
    place, extent = ", ".join(map(str, axes)), " x ".join(map(str, shape))
    return ctx.fault(OutOfBounds, f"{name}[{place}] is outside of {extent} elements", name)


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
    """A 1-D array in shared memory: `length` elements of a bank from element `base` on."""

    __slots__ = (
        "name", "shape", "dtype", "length", "base", "bank", "data", "written", "read", "touched",
        "cell", "convert", "ctx",
    )  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        bank: SharedBuffer,
        base: int = 0,
    ) -> None:
        self.ctx, self.name, self.shape, self.dtype = ctx, name, shape, dtype
        self.length, self.base, self.bank = prod(shape), base, bank
        self.data, self.written, self.touched = bank.data, bank.written, bank.touched
        self.turn_to(ctx.thread.warp.index)
        self.cell = array("f", [0.0]) if dtype == np.float32 else None
        self.convert = converter(dtype)

    def turn_to(self, warp: int) -> None:
        """Note reads as those of this warp."""
        self.read = self.bank.reads[warp]

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
            self._check(e, "overwrites", "reads", [read[e] for read in self.bank.reads])
        self.bank.atomics.pop(e, None)

    def _check(self, e: int, does: str, did: str, stamps: Iterable[int]) -> None:
        base = self.ctx.base
        for stamp in stamps:
            if stamp >= base and not self.ctx.ordered(stamp):
                raise self._hazard(e, stamp, does, did)

    def _writers(self, e: int) -> Iterable[int]:
        w = self.written[e]
        last, _, updates = self.bank.atomics.get(e, NO_ATOMICS)
        return updates.values() if w == last else (w,)

    def atomic(self, e: Any, operation: Callable[[Any], Any]) -> Any:
        """Replace element `e` by `operation` of it; returns the old value."""
        e = self._flat(e)
        ctx, bank = self.ctx, self.bank
        w = self.written[e]
        if w == UNWRITTEN:
            raise self._hazard(e, w, "reads", "wrote")
        # Atomics do not conflict with each other, so the write before them is kept beside.
        last, plain, updates = bank.atomics.get(e, NO_ATOMICS)
        if w != last:
            plain, updates = w, {}
        self._check(e, "atomically updates", "wrote", (plain,))
        self._check(e, "atomically updates", "reads", [read[e] for read in bank.reads])
        warp = ctx.thread.warp.index
        self.written[e] = updates[warp] = ctx.joined(updates.get(warp, 0))
        bank.atomics[e] = (self.written[e], plain, updates)
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
            self.bank.flights[k] = (ctx.tid, site)
        return first

    def land(self, first: int, values: Sequence[Any]) -> None:
        for k, value in enumerate(values, first):
            self.written[k] = self.ctx.me
            self.data[k] = self.convert(value)
            del self.bank.flights[k]

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
        return _outside(self.ctx, self.name, self.shape, index)

    def _hazard(self, e: int, stamp: int, does: str, did: str) -> Exception:
        ctx = self.ctx
        element = self._element(e)
        if stamp == UNWRITTEN:
            text = f"{element} is read, but was never written"
            return ctx.fault(UninitialisedRead, text, self.name)
        if stamp == IN_FLIGHT:
            tid, site = self.bank.flights[e]
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


class LocalArray:
    """A thread's own array, 1-D or n-D; None marks an element that was never written."""

    __slots__ = ("shape", "dtype", "data", "cell", "convert", "ctx", "site")

    def __init__(
        self, ctx: Context, site: tuple[int, int], shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self.ctx, self.site, self.shape, self.dtype = ctx, site, shape, dtype
        self.data: list[Any] = [None] * prod(shape)
        self.cell = ctx.cell if dtype == np.float32 else None
        self.convert = converter(dtype) if self.cell is None else None

    @property
    def name(self) -> str:
        return self.ctx.target(self.site, "local array")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, i: Any) -> Any:
        try:
            if i >= 0:
                value = self.data[i]
                if value is not None:
                    return value
        except IndexError:
            pass
        raise self._missing(i)

    def __setitem__(self, i: Any, value: Any) -> None:
        cell = self.cell
        if cell is not None:
            cell[0] = value
            value = cell[0]
        else:
            value = self.convert(value)  # type: ignore[misc]
        try:
            if i >= 0:
                self.data[i] = value
                return
        except IndexError:
            pass
        raise self._outside(i)

    def _outside(self, index: Any) -> Exception:
        return _outside(self.ctx, self.name, self.shape, index)

    def _missing(self, index: Any) -> Exception:
        inside = isinstance(index, tuple) or 0 <= index < len(self.data)
        if not inside:
            return self._outside(index)
        text = f"{self.name}[{index}] is read, but was never written"
        return self.ctx.fault(UninitialisedRead, text, self.name)


class LocalTensor(LocalArray):
    """A local array of two or more dimensions."""

    __slots__ = ()

    def _flat(self, index: Any) -> int:
        if len(index) != len(self.shape):
            raise TypeError(f"{self.name} has {len(self.shape)} dimensions, indexed with {index!r}")
        e = 0
        for i, n in zip(index, self.shape, strict=True):
            if not 0 <= i < n:
                raise self._outside(index)
            e = e * n + i
        return e

    def __getitem__(self, index: Any) -> Any:
        value = self.data[self._flat(index)]
        if value is None:
            raise self._missing(index)
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        LocalArray.__setitem__(self, self._flat(index), value)


class Tally:
    """The accesses of one kernel parameter, in elements."""

    __slots__ = ("loads", "stores")

    def __init__(self) -> None:
        self.loads = self.stores = 0


class GlobalArray:
    """A NumPy array as a kernel sees global memory: stores go to the caller's memory.

    A full integer index is one counted access, a partial one an uncounted view on the same memory;
    so is a slice start:stop of the first axis.
    """

    __slots__ = (
        "name", "shape", "strides", "dtype", "ndim", "size", "itemsize", "tally", "ctx",
        "_memory", "_get", "_set", "_convert", "_steps", "_offset", "_views", "_address",
    )  # fmt: skip

    def __init__(self, ctx: Context, name: str, values: np.ndarray) -> None:
        itemsize = values.itemsize
        if not values.dtype.isnative or values.dtype.kind not in "biuf":
            raise TypeError(f"{name}: arrays of dtype {values.dtype} are not emulated")
        if any(s % itemsize for s in values.strides):
            raise ValueError(f"{name}: strides {values.strides} are no multiples of {itemsize}")
        self.ctx, self.name, self.tally = ctx, name, Tally()
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype
        self.ndim, self.size, self.itemsize = values.ndim, values.size, itemsize
        # The memory between the lowest and the highest element, as one flat array.
        upward = values[tuple(slice(None, None, -1 if s < 0 else 1) for s in values.strides)]
        pairs = list(zip(values.shape, values.strides, strict=True))
        span = sum((n - 1) * abs(s) for n, s in pairs) // itemsize + 1 if values.size else 0
        flat = np.lib.stride_tricks.as_strided(
            upward, (span,), (itemsize,), writeable=values.flags.writeable
        )
        self._steps = tuple(s // itemsize for s in values.strides)
        self._offset = sum((n - 1) * -s for n, s in pairs if s < 0) // itemsize if span else 0
        self._address = flat.__array_interface__["data"][0]
        self._convert = converter(values.dtype) if values.dtype.kind in "iub" else None
        self._views: dict[tuple[int, ...], GlobalArray] = {}
        self._memory: Any = flat
        # A memoryview gives Python numbers, but before Python 3.12 none of half precision.
        half = values.dtype == np.float16
        view: Any = flat if half else flat.data
        self._get: Callable[[int], Any] = view.item if half else view.__getitem__
        self._set: Callable[[int, Any], None] = view.__setitem__

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is not tuple:
            index = (index,)
        if len(index) == self.ndim and index[0].__class__ is not slice:
            e = self._at(index)
            self.tally.loads += 1
            return self._get(e)
        if index[0].__class__ is slice:
            return self._slice(*index)
        if index in self._views:
            return self._views[index]
        return self._view(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if index.__class__ is not tuple:
            index = (index,)
        if len(index) != self.ndim:
            raise TypeError(f"{self.name} has {self.ndim} dimensions, stored to with {index!r}")
        e = self._at(index)
        self._put(e, value)
        self.tally.stores += 1

    def load(self, index: tuple[int, ...], n: int) -> tuple[Any, ...]:
        """n elements along the last axis from `index` on, in one access; counts n loads."""
        e = self._vector(index, n, n)
        self.tally.loads += n
        return tuple(self._memory[e : e + n].tolist())

    def store(self, index: tuple[int, ...], values: Sequence[Any]) -> None:
        """Write `values` along the last axis from `index` on, in one access."""
        e = self._vector(index, len(values), len(values))
        for k, value in enumerate(values, e):
            self._put(k, value)
        self.tally.stores += len(values)

    def atomic(self, index: Any, operation: Callable[[Any], Any]) -> Any:
        """Replace an element by `operation` of it; returns the old value. One load, one store."""
        e = self._at(index if isinstance(index, tuple) else (index,))
        old = self._get(e)
        self._put(e, operation(old))
        self.tally.loads += 1
        self.tally.stores += 1
        return old

    def source(self, index: tuple[int, ...], n: int, valid: int) -> Callable[[], list[Any]]:
        """For an asynchronous copy of n elements, `valid` of them real: reads them when called."""
        if not valid:
            return list
        e = self._vector(index, n, valid)
        self.tally.loads += valid
        memory = self._memory
        return lambda: memory[e : e + valid].tolist()

    def _put(self, e: int, value: Any) -> None:
        try:
            if self._convert is not None:
                value = self._convert(value)
            self._set(e, value)
        except (TypeError, ValueError) as error:
            if self._memory.flags.writeable:
                raise
            text = f"a store to {self.name}, which is read-only"
            raise self.ctx.fault(ReadOnlyStore, text, self.name) from error

    def _at(self, index: tuple[int, ...]) -> int:
        if self.ndim == 2:  # the same as below, for speed
            i, j = index
            rows, columns = self.shape
            if 0 <= i < rows and 0 <= j < columns:
                down, right = self._steps
                return self._offset + i * down + j * right
        e = self._offset
        for i, n, step in zip(index, self.shape, self._steps, strict=True):
            if not 0 <= i < n:
                raise self._outside(index)
            e += i * step
        return e

    def _vector(self, index: Any, n: int, valid: int) -> int:
        if index.__class__ is not tuple:
            index = (index,)
        if len(index) != self.ndim:
            raise TypeError(f"{self.name} has {self.ndim} dimensions, indexed with {index!r}")
        e = self._at(index)
        if index[-1] + valid > self.shape[-1]:
            raise self._outside((*index[:-1], index[-1] + valid - 1))
        size = n * self.itemsize
        if self._steps[-1] != 1 and n > 1:
            text = f"a vector access along the last axis, whose stride is {self.strides[-1]} bytes"
            raise self.ctx.fault(Misaligned, text, self.name)
        if (self._address + e * self.itemsize) % size:
            text = f"{self.name}{list(index)} is not aligned to {size} bytes"
            raise self.ctx.fault(Misaligned, text, self.name)
        return e

    def _view(self, index: tuple[int, ...]) -> GlobalArray:
        rank = len(index)
        if rank > self.ndim:
            raise TypeError(f"{self.name} has {self.ndim} dimensions, indexed with {index!r}")
        e = self._offset
        for i, n, step in zip(index, self.shape, self._steps, strict=False):
            if not 0 <= i < n:
                raise self._outside(index)
            e += i * step
        view = self._part(self.shape[rank:], self.strides[rank:], self._steps[rank:], e)
        self._views[index] = view
        return view

    def _slice(self, rows: slice) -> GlobalArray:
        start, stop = int(rows.start), int(rows.stop)
        if rows.step is not None or not 0 <= start <= stop <= self.shape[0]:
            raise self._outside((rows,))
        shape = (stop - start, *self.shape[1:])
        return self._part(shape, self.strides, self._steps, self._offset + start * self._steps[0])

    def _part(
        self, shape: tuple[int, ...], strides: tuple[int, ...], steps: tuple[int, ...], offset: int
    ) -> GlobalArray:
        part = object.__new__(GlobalArray)
        for slot in GlobalArray.__slots__:
            setattr(part, slot, getattr(self, slot))
        part.shape, part.strides, part._steps, part._offset = shape, strides, steps, offset
        part._views, part.ndim, part.size = {}, len(shape), prod(shape)
        return part

    def _outside(self, index: tuple[Any, ...]) -> Exception:
        return _outside(self.ctx, self.name, self.shape, index)
