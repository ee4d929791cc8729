"""Arrays with a tensor map. A kernel copies boxes from and to these arrays (TMA).

This module computes the addresses of a box's elements, and counts and checks the copies in global
memory.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import async_checks
from .checks import ATOMIC, LOAD, STORE
from .errors import EmulatorError, MissingFence, OutOfBounds, two_arrays
from .global_memory import DOES, GlobalArray, without_unused_strides

if TYPE_CHECKING:
    from .boxes import Boxes

ROW_BYTES = 128  # bytes of a row of a box, and of a panel of a product's operand
CHUNK = 16  # bytes that the swizzle moves together
MOST_ROWS = 256  # of a box
# Index at which an axis wraps around the address space of 2^64 bytes. If its stride is 2^34 - n,
# the index WRAPS is WRAPS * n bytes before the array's beginning.
WRAPS = 1 << 30
ADDRESSES = 1 << 64


class BoxLayout(NamedTuple):
    """The axes of an array's tensor map, from the outermost axis to the innermost.

    Parameters
    ----------
    shape : tuple of int
        Length of each axis.
    strides : tuple of int
        Bytes from one index of an axis to the next.
    box : tuple of int
        Length of a box along each axis.
    steps : tuple of int, default ()
        Three distances in the array: from one batch entry, head or row to the next. Each distance
        counts indices of the map's second axis. The kernel reads the tuple as ``array.steps``. It
        computes from it where a sequence ends along the second axis. The tuple is empty if
        ``TiledArray.ends`` is False, because no sequence ends along the second axis then.
    swizzle : int, default 128
        Bytes within which the 16-byte chunks of a row are permuted in shared memory.
    fill : float, default 0
        Value of a box's elements that are outside of the array.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = ROW_BYTES
    fill: float = 0


class Boxed:
    """A 4-D array with a tensor map, as an argument of `launch`.

    The kernel copies boxes of the array with the copy engine.

    Parameters
    ----------
    array : ndarray, four axes
        The array. Its last axis is contiguous; its address and the other strides are multiples of
        16 bytes. An axis of length 1 can have any stride.
    rows : int
        Rows of a box, 1 to 256. A row has 128 bytes.
    layout : BoxLayout, optional
        Axes of the tensor map. Default: the axes of `array`, with a box of `rows` rows of the third
        axis.

    Raises
    ------
    ValueError
        If the driver would make no tensor map of the array, or `rows` is not 1 to 256.

    Examples
    --------
    >>> Boxed(np.zeros((1, 2, 64, 64), np.float16), rows=16).layout.box
    (1, 1, 16, 64)
    """

    __slots__ = ("array", "layout")

    def __init__(self, array: np.ndarray, rows: int, layout: BoxLayout | None = None) -> None:
        array = without_unused_strides(array)
        address = array.__array_interface__["data"][0]
        if array.ndim != 4:
            raise ValueError(
                f"an array that is copied by TMA must have 4 axes, got shape {array.shape}"
            )
        if array.strides[-1] != array.itemsize:
            raise ValueError(
                "an array that is copied by TMA must have a contiguous last axis, with a stride of "
                f"{array.itemsize} bytes for {array.dtype}, got {array.strides[-1]} bytes; pass a "
                "contiguous copy"
            )
        if address % CHUNK:
            raise ValueError(
                f"an array that is copied by TMA must begin at a multiple of {CHUNK} bytes, got "
                f"address {address:#x}; pass an aligned copy"
            )
        for axis, stride in enumerate(array.strides[:-1]):
            if stride % CHUNK or stride < 0:
                raise ValueError(
                    f"an array that is copied by TMA must have strides of 0 or positive multiples "
                    f"of {CHUNK} bytes on all axes except the last, got a stride of {stride} bytes "
                    f"on axis {axis}; pass a copy with aligned rows"
                )
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(
                f"rows, the number of rows of a TMA box, must be from 1 to {MOST_ROWS}, got {rows}"
            )
        box = (1, 1, rows, ROW_BYTES // array.itemsize)
        self.array, self.layout = array, layout or BoxLayout(array.shape, array.strides, box)


class BoxedArray:
    """An array with a tensor map as the kernel sees it.

    `rows` and `columns` are the numbers of rows and columns of a box; a row runs along the last
    axis. `shape` is the shape of the array. `steps` is described in `BoxLayout`.
    """

    __slots__ = ("array", "layout", "rows", "columns", "shape", "steps")

    def __init__(self, array: GlobalArray, layout: BoxLayout) -> None:
        self.array, self.layout, self.shape = array, layout, array.shape
        *outer, self.columns = layout.box
        self.rows = prod(outer)
        self.steps = layout.steps

    def inside(
        self, ctx: Boxes, place: tuple[int, ...], lane: int
    ) -> tuple[np.ndarray, slice, np.ndarray]:
        """Return which part of a box is inside of the array.

        Parameters
        ----------
        ctx : Boxes
            The launch.
        place : tuple of int
            Index of the box's first element along each axis of the map.
        lane : int
            Lane that copies the box, for errors.

        Returns
        -------
        rows : ndarray of int
            Rows of the box that are inside.
        columns : slice
            Columns of the box that are inside.
        first : ndarray of int
            Element of the array's memory at which each of these rows begins.

        Raises
        ------
        EmulatorError
            If `place` has another number of axes than the map.
        OutOfBounds
            If the box is outside of the array's memory.
        """
        layout = self.layout
        if len(place) != len(layout.shape):
            text = (
                f"a TMA copy of {self.array.name} needs {len(layout.shape)} coordinates, one for "
                f"each axis of the tensor map, got {len(place)}: {place}"
            )
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
            text = (
                f"the TMA box of {' x '.join(map(str, layout.box))} elements at {place} is inside "
                f"the tensor map of {self.array.name}, but outside the memory of "
                f"{self.array.name}. The array has shape {self.array.shape}; its tensor map covers "
                f"more memory, with shape {layout.shape} and strides {layout.strides} bytes. "
                "Correct the coordinates of the box, or the shape and strides of the tensor map"
            )
            raise ctx.fault(OutOfBounds, text, self.array.name, lane)
        return rows, columns, first

    def access(
        self, ctx: Boxes, kind: int, place: tuple[int, ...], lane: int
    ) -> tuple[np.ndarray, slice, np.ndarray]:
        """Count the copy of a box and check it for conflicts.

        Parameters
        ----------
        ctx : Boxes
            The launch.
        kind : int
            LOAD, STORE or ATOMIC of `checks`.
        place : tuple of int
            Index of the box's first element along each axis of the map.
        lane : int
            Lane that copies the box, for errors.

        Returns
        -------
        rows : ndarray of int
            Rows of the box that are inside of the array.
        columns : slice
            Columns of the box that are inside.
        places : ndarray of int, shape (rows, columns)
            Elements of the array's memory.

        Raises
        ------
        GlobalHazard
            If another thread block accesses one of the elements and one of the two writes.
        MissingFence
            If a thread of this thread block stored one of the elements.
        """
        rows, columns, starts = self.inside(ctx, place, lane)
        height, width = rows.size, columns.stop - columns.start
        if not height:
            return rows, columns, np.zeros((0, 0), np.int64)
        note_copy(ctx, self.array, kind, starts, width, lane)
        return rows, columns, starts[:, None] + np.arange(width)

    def merged(self, mask: Any, other: Any) -> BoxedArray:
        """Return this array after a branch. The variable must be this array in all lanes.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes in which a variable is this array.
        other : object
            Value of the variable in the other lanes.

        Returns
        -------
        BoxedArray
            This array.

        Raises
        ------
        TypeError
            If `other` is another array.
        """
        if other is not self:
            raise TypeError(two_arrays(self, other))
        return self


def index_of(array: GlobalArray, places: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the indices of some elements of an array, given by their positions in memory.

    Parameters
    ----------
    array : GlobalArray
        The array.
    places : ndarray of int
        Positions of the elements in the array's memory.

    Returns
    -------
    tuple of ndarray of int
        One array of indices per axis.
    """
    rest, found = places - array._offset, {}
    for axis in sorted(range(array.ndim), key=lambda n: -array._steps[n]):
        step = array._steps[axis]
        found[axis] = rest // step if step and array.shape[axis] > 1 else np.zeros_like(rest)
        rest = rest - found[axis] * step
    return tuple(found[axis] for axis in range(array.ndim))


def note_copy(
    ctx: Boxes, array: GlobalArray, kind: int, starts: np.ndarray, width: int, lane: int
) -> None:
    """Count the accesses of a copy by the copy engine, and check them for conflicts.

    Parameters
    ----------
    ctx : Boxes
        The launch.
    array : GlobalArray
        The array in global memory.
    kind : int
        LOAD, STORE or ATOMIC of `checks`.
    starts : ndarray of int
        Element of the array's memory at which each row of the copy begins.
    width : int
        Elements of a row.
    lane : int
        Lane that starts the copy, for errors.

    Raises
    ------
    GlobalHazard
        If another thread block accesses one of the elements and one of the two writes.
    MissingFence
        If a thread of this thread block stored one of the elements.
    """
    height = starts.size
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
        where = tuple(int(i[bad]) for i in index_of(array, starts))
        raise array._conflict(kind, lane, int(starts[bad]), width, where)
    if owners.stamps.size:
        _require_fence(ctx, array, kind, starts, width, lane)
    if ctx.trace is not None:
        whole = np.full(height, width), np.ones(height, bool)
        ctx.trace.note(array, kind, index_of(array, starts), *whole)


def _require_fence(
    ctx: Boxes, array: GlobalArray, kind: int, starts: np.ndarray, width: int, lane: int
) -> None:
    """Raise MissingFence if a thread of this thread block stored an element of the copy.

    Within a launch, nothing orders such a store before an access of the copy engine. The arguments
    are those of `note_copy`.
    """
    places = (starts[:, None] + np.arange(width)).reshape(-1)
    stamps = array.owners.stamps[STORE, places]
    stored = np.flatnonzero(stamps >= ctx.begun)
    if stored.size:
        first = int(stored[0])
        (index,) = zip(*index_of(array, places[first : first + 1]), strict=True)
        text = (
            f"this TMA copy {DOES[kind]} {array.name}[{', '.join(map(str, index))}], which "
            f"{ctx.who(int(stamps[first]))} stored earlier in the same launch. Within a "
            "launch, a TMA copy can run before an earlier store of a thread to global memory: "
            "start the copy in a later launch"
        )
        raise ctx.fault(MissingFence, text, array.name, lane)
