"""Global memory: the caller's NumPy arrays, whose every access is checked and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .conversions import converter
from .counts import Tally
from .errors import Misaligned, ReadOnlyStore

if TYPE_CHECKING:
    from .context import Context


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
        return self.ctx.outside(self.name, self.shape, index)
