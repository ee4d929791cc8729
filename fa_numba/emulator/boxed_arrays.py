"""Arrays of which a kernel takes boxes, and where the elements of a box lie."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import async_checks
from .checks import ATOMIC, LOAD, STORE
from .errors import EmulatorError, MissingFence, OutOfBounds
from .global_memory import DOES, GlobalArray

if TYPE_CHECKING:
    from .boxes import Boxes

ROW_BYTES = 128  # of a box, and of a panel of an operand
CHUNK = 16  # bytes, which the swizzle moves
MOST_ROWS = 256
WRAPS = 1 << 30  # this place of an axis whose stride is 2^34 less n is this many times n back
ADDRESSES = 1 << 64


class BoxLayout(NamedTuple):
    """The axes of an array's map, from the outermost on: how many places each has, the bytes from
    one to the next, and how many of them a box has; and what a kernel is told of them. Chunks of a
    row change places within ``swizzle`` bytes; ``fill`` stands for what the array has not.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = ROW_BYTES
    fill: float = 0


class Boxed:
    """A 4-D array of which a kernel takes boxes of so many rows, as a launch's argument.

    Its map has the array's axes, or those of a ``layout``. Raises ValueError for an array that the
    driver makes no tensor map of.
    """

    __slots__ = ("array", "layout")

    def __init__(self, array: np.ndarray, rows: int, layout: BoxLayout | None = None) -> None:
        address = array.__array_interface__["data"][0]
        if array.ndim != 4 or array.strides[-1] != array.itemsize:
            raise ValueError(
                f"an array of shape {array.shape} and strides {array.strides}, allowed: four axes, "
                "of which the last has no gaps"
            )
        if address % CHUNK or any(s % CHUNK or s < 0 for s in array.strides[:-1]):
            raise ValueError(
                f"an array at address {address} with strides {array.strides}, allowed: multiples "
                f"of {CHUNK} bytes"
            )
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows = {rows}, allowed: 1 to {MOST_ROWS}")
        box = (1, 1, rows, ROW_BYTES // array.itemsize)
        self.array, self.layout = array, layout or BoxLayout(array.shape, array.strides, box)


class BoxedArray:
    """An array of which a kernel takes boxes, as the kernel sees it."""

    __slots__ = ("array", "layout", "rows", "columns", "shape", "steps")

    def __init__(self, array: GlobalArray, layout: BoxLayout) -> None:
        self.array, self.layout, self.shape = array, layout, array.shape
        *outer, self.columns = layout.box
        self.rows = prod(outer)
        self.steps = layout.steps

    def inside(
        self, ctx: Boxes, place: tuple[int, ...], lane: int
    ) -> tuple[np.ndarray, slice, np.ndarray]:
        """The rows and columns of a box that are the map's, and where these rows begin."""
        layout = self.layout
        if len(place) != len(layout.shape):
            text = f"a box at {place} of a map with {len(layout.shape)} axes"
            raise ctx.fault(EmulatorError, text, self.array.name, lane)
        itemsize = self.array.itemsize
        rows = first = np.zeros(1, np.int64)
        columns, begin = slice(0, 0), self.array._offset * itemsize
        axes = zip(place, layout.box, layout.shape, layout.strides, strict=True)
        for axis, (at, size, count, stride) in enumerate(axes, 1 - len(place)):
            part = slice(max(0, -at), max(0, -at, min(size, count - at)))
            if part.stop <= part.start:
                return rows[:0], slice(0, 0), rows[:0]
            begin += (at + part.start) * stride
            if axis == 0:
                columns = part
            elif size > 1:
                along = np.arange(part.start, part.stop)
                rows = (rows[:, None] * size + along).reshape(-1)
                along = (along - part.start) * (stride // itemsize)
                first = (first[:, None] + along).reshape(-1)
        begin = (begin + ADDRESSES // 2) % ADDRESSES - ADDRESSES // 2
        first = first + begin // itemsize
        last = first + (columns.stop - columns.start - 1)
        if first.min() < 0 or last.max() >= self.array.span:
            text = f"a box at {place} of the map of {self.array.name} leaves the array's memory"
            raise ctx.fault(OutOfBounds, text, self.array.name, lane)
        return rows, columns, first

    def access(
        self, ctx: Boxes, kind: int, place: tuple[int, ...], lane: int
    ) -> tuple[np.ndarray, slice, np.ndarray]:
        """Count a box; gives its rows and columns inside, and their places, (rows, columns)."""
        rows, columns, starts = self.inside(ctx, place, lane)
        array = self.array
        height, width = rows.size, columns.stop - columns.start
        if not height:
            return rows, columns, np.zeros((0, 0), np.int64)
        if kind != STORE:
            array.tally.loads += height * width
        if kind != LOAD:
            array.tally.stores += height * width
        named = {LOAD: "box load", STORE: "box store", ATOMIC: "box add"}[kind]
        owners = array.owners
        bad = async_checks.box_access(
            kind, starts, width, array.itemsize, array.start, ctx.block_number,
            *owners.blocks, ctx.statistics(array.name, "global", named),
        )  # fmt: skip
        if bad >= 0:
            where = tuple(int(i[bad]) for i in self.index(starts))
            raise array._conflict(kind, lane, int(starts[bad]), width, where)
        if owners.stamps.size:
            self._require_fence(ctx, kind, starts, width, lane)
        if ctx.trace is not None:
            whole = np.full(height, width), np.ones(height, bool)
            ctx.trace.note(array, kind, self.index(starts), *whole)
        return rows, columns, starts[:, None] + np.arange(width)

    def _require_fence(
        self, ctx: Boxes, kind: int, starts: np.ndarray, width: int, lane: int
    ) -> None:
        """Raise for what a thread stored since the block began: only a launch's end fences it."""
        array, places = self.array, (starts[:, None] + np.arange(width)).reshape(-1)
        stamps = array.owners.stamps[STORE, places]
        stored = np.flatnonzero(stamps >= ctx.begun)
        if stored.size:
            first = int(stored[0])
            (index,) = zip(*self.index(places[first : first + 1]), strict=True)
            text = f"the engine {DOES[kind]} {array.name}[{', '.join(map(str, index))}], which "
            text = f"{text}{ctx.who(int(stamps[first]))} wrote without a fence for global memory"
            raise ctx.fault(MissingFence, text, array.name, lane)

    def index(self, starts: np.ndarray) -> tuple[np.ndarray, ...]:
        """The (batch, head, row, column) of elements of the array."""
        array = self.array
        rest, found = starts - array._offset, {}
        for axis in sorted(range(array.ndim), key=lambda n: -array._steps[n]):
            step = array._steps[axis]
            found[axis] = rest // step if step and array.shape[axis] > 1 else np.zeros_like(rest)
            rest = rest - found[axis] * step
        return tuple(found[axis] for axis in range(array.ndim))

    def merged(self, mask: Any, other: Any) -> BoxedArray:
        if other is not self:
            raise TypeError(f"lanes hold {self.array.name} and another array: not emulated")
        return self
