"""Global memory: the caller's NumPy arrays. Every access is checked and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import checks
from .checks import ATOMIC, BOX, IN_FLIGHT, LOAD, MANY, STORE
from .conversions import converter
from .counts import Tally
from .errors import (
    NO_BARRIER,
    EmulatorError,
    GlobalHazard,
    Misaligned,
    ReadOnlyStore,
    Unconverted,
    not_a_number,
    two_arrays,
)
from .groups import OneByOne
from .in_turn import Update, in_turn
from .lanes import Mask, every, merge, some, to_int
from .trace import KINDS

if TYPE_CHECKING:
    from .context import Context

DOES = ("reads", "overwrites", "atomically updates")  # by kind of access, for messages
BOX_ON_ITS_WAY = (
    "to which a TMA copy is still storing. The thread that started the copy must call wait_boxes() "
    "first. wait_boxes_read() is not enough: it waits only until shared memory has been read"
)


class Owners:
    """A record of the last accesses to each element of an array.

        writers, readers, atomics    for each element, the number of the thread block that wrote,
                                     read or atomically updated the element. 0 means no thread
                                     block, and MANY means several thread blocks.
        stamps    rows LOAD, STORE and ATOMIC: for each element, the stamp of the thread that last
                  made such an access. Row BOX: the stamp of the thread that waited for a box which
                  was stored to the element. Stamps are explained in shared_memory.py.

    Parameters
    ----------
    length : int
        Number of elements.
    blocks : int, default 1
        Thread blocks of the launch. If 1, the numbers of thread blocks are not recorded.
    writeable : bool, default False
        Whether the array can be written. If not, stamps are not recorded.
    """

    __slots__ = ("writers", "readers", "atomics", "stamps")

    def __init__(self, length: int, blocks: int = 1, writeable: bool = False) -> None:
        self.writers, self.readers, self.atomics = np.zeros((3, length * (blocks > 1)), np.int32)
        self.stamps = np.zeros((BOX + 1, length * writeable), np.int64)

    def part(self, start: int, stop: int) -> Owners:
        """Return the record of some of the elements, without a copy.

        Parameters
        ----------
        start, stop : int
            First element, and one past the last.

        Returns
        -------
        Owners
            The record of these elements.
        """
        part = object.__new__(Owners)
        for name in Owners.__slots__:
            setattr(part, name, getattr(self, name)[..., start:stop])
        return part

    @property
    def blocks(self) -> tuple[np.ndarray, ...]:
        """Return the three arrays of thread-block numbers: writers, readers, atomics."""
        return self.writers, self.readers, self.atomics


class GlobalArray(Unconverted):
    """A NumPy array as a kernel sees it in global memory. Stores change the caller's memory.

    Kernels index the array. A full index, such as ``x[b, h, i, j]``, is one counted access of every
    lane that takes part. An index of the first axes, such as ``x[b, h]``, returns a view on the
    same memory. A slice ``x[start:stop]`` of the first axis returns a view, too. Views are not
    counted as accesses.

    The emulator and the functions that emulate intrinsics call the methods of this class. Kernels
    do not.

    Parameters
    ----------
    ctx : Context
        The launch.
    name : str
        Name of the kernel's parameter.
    values : ndarray
        The caller's array: bool, integer, float or complex, in native byte order.

    Raises
    ------
    TypeError
        If the dtype is not emulated.
    ValueError
        If the stride of an axis of length 2 or more is not a multiple of the itemsize.
    """

    __slots__ = (
        "name", "shape", "strides", "dtype", "ndim", "size", "itemsize", "tally", "ctx", "span",
        "address", "start", "owners", "_memory", "_convert", "_steps", "_offset", "_views", "_root",
    )  # fmt: skip

    def __init__(self, ctx: Context, name: str, values: np.ndarray) -> None:
        itemsize = values.itemsize
        if not values.dtype.isnative or values.dtype.kind not in "biufc":
            raise TypeError(
                f"{name} must have an integer, float, complex or bool dtype in native byte order, "
                f"got {values.dtype}; pass a copy with such a dtype"
            )
        values = without_unused_strides(values)
        if any(s % itemsize for s in values.strides):
            raise ValueError(
                f"the strides of {name} must be multiples of its element size, {itemsize} bytes, "
                f"got {values.strides}"
            )
        self.ctx, self.name, self.tally = ctx, name, Tally()
        self.shape, self.strides, self.dtype = values.shape, values.strides, values.dtype
        self.ndim, self.size, self.itemsize = values.ndim, values.size, itemsize
        # The memory between the lowest and the highest element, as one flat array.
        upward = values[tuple(slice(None, None, -1 if s < 0 else 1) for s in values.strides)]
        pairs = list(zip(values.shape, values.strides, strict=True))
        self.span = sum((n - 1) * abs(s) for n, s in pairs) // itemsize + 1 if values.size else 0
        flat = np.lib.stride_tricks.as_strided(
            upward, (self.span,), (itemsize,), writeable=values.flags.writeable
        )
        self._steps = tuple(s // itemsize for s in values.strides)
        self._offset: Any = (
            sum((n - 1) * -s for n, s in pairs if s < 0) // itemsize if self.span else 0
        )
        self.address = flat.__array_interface__["data"][0]
        # Bytes from the beginning of the allocation to the array: sectors are counted as if the
        # allocation began at an aligned address, as on a GPU.
        self.start = self.address - _owner(values).__array_interface__["data"][0]
        self._convert = converter(values.dtype) if values.dtype.kind in "iub" else None
        self._views: dict[tuple[int, ...], GlobalArray] = {}
        self._memory = flat
        self._root = self
        self.owners = Owners(0)

    def release(self) -> None:
        """Forget the array's views, so that the array and its views no longer refer to each other.

        A launch calls this method at its end. The array cannot be used afterwards.
        """
        self._views.clear()
        del self._root

    @property
    def first_byte(self) -> Any:
        """Return the distance in bytes from the beginning of the allocation to the first element.

        If the array is a part of a larger NumPy array, the distance counts from the beginning of
        the larger array.
        """
        return self.start + self._offset * self.itemsize

    def __len__(self) -> int:
        return to_int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is not tuple:
            index = (index,)
        if len(index) == self.ndim and index[0].__class__ is not slice:
            e = self._at(index)
            return self._values(self._access(LOAD, e, 1, 1, index), e)
        if index[0].__class__ is slice:
            return self._slice(*index)
        if all(i.__class__ is int for i in index):
            if index not in self._views:
                self._views[index] = self._view(index)
            return self._views[index]
        return self._view(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if index.__class__ is not tuple:
            index = (index,)
        places = self._access(STORE, self._at(index), 1, 1, index)
        self._put(places, (value,))

    def load(self, index: tuple[Any, ...], n: int) -> tuple[Any, ...]:
        """Load n neighbouring elements along the last axis in one access; counts n loads per lane.

        Parameters
        ----------
        index : tuple
            Index of the first element, one int or array over the lanes per axis.
        n : int
            Number of elements. Their bytes must be aligned to the size of the access.

        Returns
        -------
        tuple
            The n values, each a number or an array over the lanes.

        Raises
        ------
        OutOfBounds
            If an element is outside of the array.
        Misaligned
            If the address is not a multiple of the size of the access, or the last axis has gaps.
        GlobalHazard
            If the access races with another access.
        """
        e = self._vector(index, n, n)
        places = self._access(LOAD, e, n, n, index)
        if e.__class__ is not np.ndarray:
            return tuple(self._values(places, e + k) for k in range(n))
        return tuple(self._values(places + k if k else places, e) for k in range(n))

    def store(self, index: tuple[Any, ...], values: Sequence[Any]) -> None:
        """Store neighbouring elements along the last axis in one access.

        Every lane that takes part counts one store per value.

        Parameters
        ----------
        index : tuple
            Index of the first element, one int or array over the lanes per axis.
        values : sequence
            The values.

        Raises
        ------
        OutOfBounds
            If an element is outside of the array.
        Misaligned
            If the address is not a multiple of the size of the access, or the last axis has gaps.
        ReadOnlyStore
            If the array is read-only.
        GlobalHazard
            If the access races with another access.
        """
        n = len(values)
        places = self._access(STORE, self._vector(index, n, n), n, n, index)
        self._put(places, values)

    def atomic_add(self, index: Any, *values: Any) -> Any:
        """Add values atomically to neighbouring elements, lane after lane.

        An atomic addition counts as one load and one store.

        Parameters
        ----------
        index : int or tuple
            Index of the first element.
        *values : number or ndarray
            One value for each of the neighbouring elements.

        Returns
        -------
        ndarray
            For each lane, the old value of the last of these elements.
        """
        ctx, n = self.ctx, len(values)
        if ctx.several:
            raise OneByOne
        index = index if index.__class__ is tuple else (index,)
        e = self._at(index) if n == 1 else self._vector(index, n, n)
        places = self._access(ATOMIC, e, n, n, index)
        lanes = ctx.active_lanes()
        old = np.zeros(ctx.group.count, self._values(places[:0], places).dtype)
        first = places[lanes]
        differ = len(set(first.tolist())) == first.size
        for k, value in enumerate(values):
            each = _of_lanes(value, ctx.group.count)[lanes]
            at = first + k
            self._keep(at)
            if self._convert is None and differ:
                # All elements differ: adding all at once gives the same values.
                old[lanes] = was = self._memory[at].astype(np.float64)
                self._memory[at] = was + each
                continue
            for lane, p, more in zip(lanes.tolist(), at.tolist(), each.tolist(), strict=True):
                old[lane] = was = self._memory[p].item()
                self._memory[p] = was + more if self._convert is None else self._convert(was + more)
        ctx.instruction("atomic")
        return old

    def atomic(
        self, index: Any, update: Update, operands: list[np.ndarray], in_any_order: bool = False
    ) -> np.ndarray:
        """Update an element atomically in every lane that takes part, lane after lane.

        The update counts as one load and one store.

        Parameters
        ----------
        index : int or tuple
            Index of the element.
        update : callable
            Takes old values and operands of the array's dtype, and returns new values.
        operands : list of ndarray
            Operands of the lanes that take part.
        in_any_order : bool, default False
            Whether the old values are not needed, and the final value is the same in any order.

        Returns
        -------
        ndarray
            Old values of the lanes that take part. If `in_any_order`, any values.
        """
        ctx = self.ctx
        if ctx.several and not in_any_order:
            raise OneByOne
        index = index if index.__class__ is tuple else (index,)
        at = self._access(ATOMIC, self._at(index), 1, 1, index)[ctx.active()]
        self._keep(at)
        ctx.instruction("atomic")
        return in_turn(self._memory, at, update, operands, not in_any_order)

    def add(self, index: tuple[Any, ...], *values: Any) -> None:
        """Add values atomically, without returning the old values.

        If several thread blocks run at once, their additions are made when these thread blocks have
        ended, one thread block after the other.

        Parameters
        ----------
        index : tuple
            Index of the first element.
        *values : number or ndarray
            One value for each of the neighbouring elements.
        """
        ctx, n = self.ctx, len(values)
        if not ctx.several:
            self.atomic_add(index, *values)
            return
        if self.dtype.kind != "f" or not self._memory.flags.writeable:
            raise OneByOne
        e = self._at(index) if n == 1 else self._vector(index, n, n)
        at = self._access(ATOMIC, e, n, n, index)
        lanes = ctx.active_lanes()
        for k, value in enumerate(values):
            each = _of_lanes(np.asarray(value, np.float64), ctx.group.count)[lanes]
            ctx.additions.append((self._memory, ctx.group.blocks[lanes], at[lanes] + k, each))
        ctx.instruction("atomic")

    def source(
        self, index: tuple[Any, ...], n: int, valid: Any, pieces: Any = None
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that reads the source of an asynchronous copy.

        This call counts the loads.

        Parameters
        ----------
        index : tuple
            Index of the first element.
        n : int
            Elements of the copy of each lane.
        valid : int or ndarray of int
            Number of elements that are read. The other elements of the copy are zero.
        pieces : ndarray of int, optional
            For each lane, the number of the 32-byte piece of shared memory to which the lane
            copies. It is used to count sectors. Copies of 16 bytes bypass L1. They fetch a sector
            of global memory once for each piece of shared memory that receives a part of the
            sector.

        Returns
        -------
        callable
            Takes the lanes as a bool array and returns their values, shape (lanes, n).
        """
        ctx = self.ctx
        outer, active = ctx.mask, ctx.active()
        whole = valid == n
        if valid.__class__ is np.ndarray:
            active = valid > 0 if outer is None else (valid > 0) & outer
            whole = every(whole)
        memory = self._memory
        if not some(active) or (valid.__class__ is not np.ndarray and valid <= 0):
            return lambda lanes: np.zeros((lanes.size, n), memory.dtype)
        ctx.mask = outer if active is ctx.group.everyone else active
        try:
            e = self._access(LOAD, self._vector(index, n, valid), n, valid, index, pieces)
        finally:
            ctx.mask = outer

        def read(lanes: np.ndarray) -> np.ndarray:
            numbers = np.arange(n)
            each = e[:, None] + numbers
            if whole and every(lanes):
                return memory[each]
            lengths = valid[:, None] if valid.__class__ is np.ndarray else valid
            real = (numbers < lengths) & active[:, None]
            return np.where(real, memory[np.where(real, each, 0)], 0)

        return read

    # ---- values

    def _values(self, places: np.ndarray, e: Any) -> Any:
        """Return the element that each lane loads, with the type that a kernel computes with.

        `e` is the position of the element in memory. If all lanes load the same element, `e` is one
        number, and the result is one number. Otherwise `e` is an array, and the result is an array
        over the lanes. In this case, the positions are taken from `places`.
        """
        if e.__class__ is not np.ndarray:  # one element for all lanes
            return self._memory[e] if self._convert is None else self._memory[e].item()
        found = self._memory[places]
        if self._convert is None:
            return found
        return found if found.dtype in (np.uint64, np.bool_) else found.astype(np.int64)

    def _put(self, places: np.ndarray, values: Sequence[Any]) -> None:
        """Store values to neighbouring elements of memory, in each lane that takes part.

        `places` contains for each lane the position in memory of its first element. Entry k of
        `values` is stored to the k-th element from there. The entry is a number, or an array over
        the lanes.
        """
        mask = self.ctx.mask
        at = places if mask is None else places[mask]
        for k, value in enumerate(values):
            here = at + k if k else at
            self._keep(here)
            try:
                if self._convert is not None:
                    value = self._convert(value)
                if mask is not None and value.__class__ is np.ndarray:
                    value = value[mask]
                self._memory[here] = value
            except (TypeError, ValueError):
                raise not_a_number(self.name, value) from None

    def _keep(self, at: np.ndarray) -> None:
        """Record the old values of elements before a store, so that the store can be undone.

        The store is undone if the thread block begins again. `at` are positions in memory. Raise
        ReadOnlyStore if the array is read-only.
        """
        if not self._memory.flags.writeable:
            text = f"the kernel stores to {self.name}, which is read-only. Pass a writable array"
            raise self.ctx.fault(ReadOnlyStore, text, self.name, self.ctx.first_lane())
        self.ctx.journal.append((self._memory, at, self._memory[at]))

    # ---- positions in memory

    def _at(self, index: tuple[Any, ...], whole: bool = True) -> Any:
        """Return the position in memory of an element, or of the first element of a view.

        The position is a number, or an array over the lanes. If `whole` is set, the index must have
        one number for each axis of the array. Otherwise the index may have fewer numbers, and
        selects a view.
        """
        e = self._offset
        if len(index) > self.ndim or (whole and len(index) < self.ndim):
            raise TypeError(
                f"the index of {self.name} must have one number for each axis (axes: {self.ndim}), "
                f"got {len(index)}"
            )
        for i, n, step in zip(index, self.shape, self._steps, strict=False):
            lane = self.ctx.first_outside(i, n)
            if lane >= 0:
                i = self.ctx.from_start(i, n)
                lane = self.ctx.first_outside(i, n)
                if lane >= 0:
                    raise self._outside(index, lane)
            e = e + i * step
        return e

    def _access(
        self, kind: int, e: Any, n: int, valid: Any, index: tuple[Any, ...], pieces: Any = None
    ) -> np.ndarray:
        """Count and check an access of the lanes that take part.

        Return the position in memory of the first accessed element, for each lane.

        `kind` is LOAD, STORE or ATOMIC of `checks`. `e` is the position of the first element, a
        number or an array over the lanes. `n` is the number of elements that the instruction can
        access in a lane. `valid` is the number of elements that a lane really accesses, at most
        `n`, as a number or an array over the lanes. `index` is the index in the kernel, for
        messages. `pieces` is described in `source`.
        """
        ctx = self.ctx
        group, mask = ctx.group, ctx.mask
        places = e if e.__class__ is np.ndarray else group.full(e)
        if mask is None:
            active = group.everyone
        else:
            active = mask
            places = np.where(mask, places, 0)
        if valid.__class__ is np.ndarray:
            lengths = valid
            elements = int(valid.sum() if mask is None else valid[mask].sum())
        else:
            lengths = group.full(valid)
            elements = valid * (group.count if mask is None else int(np.count_nonzero(mask)))
        if kind != STORE:
            self.tally.loads += elements
        if kind != LOAD:
            self.tally.stores += elements
        named = KINDS[kind] if pieces is None else "copy"
        if pieces is None:
            pieces = group.full(0)
        owners, statistics = self.owners, ctx.statistics(self.name, "global", named)

        def check(lanes: np.ndarray, statistics: np.ndarray) -> int:
            return checks.global_access(
                kind, places, n, lengths, self.itemsize, self.start, pieces, lanes, group.tids,
                ctx.block_number, ctx.several, *owners.blocks, owners.stamps, ctx.starts, ctx.seen,
                ctx.base, statistics, checks.SCRATCH,
            )  # fmt: skip

        lane = check(active, statistics)
        if lane != -1:
            if ctx.several:
                raise OneByOne
            left = active
            while lane >= 0:  # `race` returns if races are only reported
                ctx.race(self._conflict(kind, lane, int(places[lane]), int(lengths[lane]), index))
                left = left & (np.arange(left.size) != lane)
                lane = check(left, np.zeros_like(statistics))
            for k in np.flatnonzero(left[-2 - lane :]) - 2 - lane if lane < -1 else ():
                self._touch(kind, int(k), int(places[k]), int(lengths[k]), index)
        if ctx.trace is not None:
            ctx.trace.note(self, kind, index, lengths, active)
        return places

    def _touch(self, kind: int, lane: int, e: int, n: int, index: tuple[Any, ...]) -> None:
        """Raise or report a race of a lane's access with another thread of the same thread block.

        The lane accesses `n` elements from position `e` on. `kind` and `index` are described in
        `_access`.
        """
        ctx, stamps, base = self.ctx, self.owners.stamps, self.ctx.base[0]
        for k, p in enumerate(range(e, e + n)):
            for other, did in enumerate(("read", "wrote", "updated", "stored by a TMA copy")):
                last = int(stamps[other, p])
                raced = last >= base and not ctx.ordered(last, lane)
                if raced and (other != kind or kind == STORE):
                    text = f"this thread {DOES[kind]} {self._element(index, lane, k)}, "
                    if last == IN_FLIGHT:
                        text = f"{text}{BOX_ON_ITS_WAY}"
                    else:
                        text = f"{text}which {ctx.who(last)} {did}, {NO_BARRIER}"
                    error = ctx.fault(GlobalHazard, text, self.name, lane)
                    if last == IN_FLIGHT:
                        raise error
                    ctx.race(error)
            stamps[kind, p] = ctx.stamp(lane)

    def _element(self, index: tuple[Any, ...], lane: int, k: int) -> str:
        """Return the name of the k-th element of a lane's access, such as "Q[0, 3]"."""
        *place, last = self.ctx.of_lane(index, lane, as_tuple=True)
        return f"{self.name}[{', '.join(map(str, (*place, last + k)))}]"

    def _conflict(
        self, kind: int, lane: int, e: int, n: int, index: tuple[Any, ...]
    ) -> EmulatorError:
        """Return the error for a lane's access that conflicts with another thread block.

        The lane accesses `n` elements from position `e` on. `kind` and `index` are described in
        `_access`.
        """
        ctx, owners, mine = self.ctx, self.owners, self.ctx.block_number
        for k in range(n):
            pairs = [(owners.writers, "wrote")]
            pairs += [(owners.atomics, "atomically updated")] if kind != ATOMIC else []
            pairs += [(owners.readers, "read")] if kind != LOAD else []
            for owner, did in pairs:
                other = int(owner[e + k])
                if other not in (0, mine):
                    element = self._element(index, lane, k)
                    who = "several blocks" if other == MANY else f"block {ctx.block_of(other)}"
                    remedy = (
                        "give each block its own elements, use atomic additions, or split the "
                        "kernel into two launches"
                    )
                    if ATOMIC == kind or owner is owners.atomics:
                        remedy = (
                            "use atomic operations for every access to this element, or split the "
                            "kernel into two launches"
                        )
                    text = (
                        f"this thread {DOES[kind]} {element}, which {who} {did}. The "
                        f"thread blocks of a launch run in any order: {remedy}"
                    )
                    return ctx.fault(GlobalHazard, text, self.name, lane)
        raise AssertionError("no block has touched this")

    def _vector(self, index: Any, n: int, valid: Any) -> Any:
        """Check the bounds and alignment of a vector access; return its first element's position.

        `n` is the number of elements that the instruction can access. `valid` is the number of
        elements that a lane really accesses. Raise OutOfBounds or Misaligned if the access is not
        allowed.
        """
        if index.__class__ is not tuple:
            index = (index,)
        e = self._at(index)
        ctx = self.ctx
        lane = ctx.first_outside(index[-1] + (valid - 1), self.shape[-1])
        if lane >= 0:
            last = (*index[:-1], index[-1] + valid - 1)
            raise self._outside(last, lane)
        size = n * self.itemsize
        if self._steps[-1] != 1 and n > 1:
            text = (
                f"the last axis of {self.name} must be contiguous for a vector access (a stride of "
                f"{self.itemsize} bytes), got a stride of {self.strides[-1]} bytes. Pass a "
                "contiguous copy of the array, or access its elements one by one"
            )
            raise ctx.fault(Misaligned, text, self.name, ctx.first_lane())
        lane = -1 if n == 1 else ctx.first_lane_where((self.address + e * self.itemsize) % size)
        if lane >= 0:
            text = (
                f"{self.name}{[*ctx.of_lane(index, lane, as_tuple=True)]} is not at a multiple of "
                f"{size} bytes, which an access to {n} elements at once needs. Start the access at "
                f"such an element, or access the elements one by one"
            )
            raise ctx.fault(Misaligned, text, self.name, lane)
        return e

    # ---- views

    def _view(self, index: tuple[Any, ...]) -> GlobalArray:
        """Return the view that indices of the first axes select."""
        e, rank = self._at(index, whole=False), len(index)
        return self._part(self.shape[rank:], self.strides[rank:], self._steps[rank:], e)

    def _slice(self, rows: slice) -> GlobalArray:
        """Return the view of the rows ``start:stop`` along the first axis."""
        ctx = self.ctx
        start, stop = (to_int(ctx.uniform_in_block(end)) for end in (rows.start, rows.stop))
        sound = (0 <= start) & (start <= stop) & (stop <= self.shape[0])
        if rows.step is not None or ctx.first_lane_where(sound == 0) >= 0:
            raise self._outside((rows,), ctx.first_lane())
        shape = (stop - start, *self.shape[1:])
        return self._part(shape, self.strides, self._steps, self._offset + start * self._steps[0])

    def _part(
        self, shape: tuple[int, ...], strides: tuple[int, ...], steps: tuple[int, ...], offset: Any
    ) -> GlobalArray:
        """Return a view on the same memory.

        `shape`, `strides` (in bytes) and `steps` (strides in elements) describe the view. `offset`
        is the position in memory of the view's first element.
        """
        part = object.__new__(GlobalArray)
        for slot in GlobalArray.__slots__:
            setattr(part, slot, getattr(self, slot))
        part.shape, part.strides, part._steps, part._offset = shape, strides, steps, offset
        part._views, part.ndim, part.size = {}, len(shape), prod(shape)
        return part

    def merged(self, mask: Mask, other: Any) -> GlobalArray:
        """Return the view to which a variable refers in each lane after a branch.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes in which the variable is this view.
        other : GlobalArray
            View of the same array that the variable is in the other lanes.

        Returns
        -------
        GlobalArray
            A view with a position for each lane.

        Raises
        ------
        TypeError
            If `other` is not a view of the same array with the same shape.
        """
        if other.__class__ is GlobalArray and other._root is self._root:
            shape = self.shape
            if self.ctx.several and len(shape) == len(other.shape):
                shape = tuple(merge(mask, b, a) for a, b in zip(shape, other.shape, strict=True))
            if self.ctx.several or shape == other.shape:
                offset = merge(mask, other._offset, self._offset)
                return self._part(shape, self.strides, self._steps, offset)
        raise TypeError(two_arrays(self, other))

    def _outside(self, index: tuple[Any, ...], lane: int) -> EmulatorError:
        return self.ctx.outside(self.name, self.shape, index, lane)


def _of_lanes(value: Any, count: int) -> np.ndarray:
    """Return a value as an array with `count` elements, which may share memory."""
    if value.__class__ is np.ndarray and value.ndim:
        return value
    return np.broadcast_to(value, count)


def used_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array without the values that no index uses.

    An axis of length 0 or 1 can have any stride, because only the index 0 is used. Its stride
    becomes 0. If it is the last axis, its stride becomes the itemsize: the axis is contiguous.

    Parameters
    ----------
    shape : sequence of int
        Length of each axis.
    strides : sequence of int
        Bytes from one index of an axis to the next.
    itemsize : int
        Bytes of an element.

    Returns
    -------
    tuple of int
        The strides in bytes.

    Examples
    --------
    >>> used_strides((1, 8, 64), (774, 128, 2), itemsize=2)
    (0, 128, 2)
    """
    last = len(shape) - 1
    axes = enumerate(zip(shape, strides, strict=True))
    return tuple(s if n > 1 else itemsize if axis == last else 0 for axis, (n, s) in axes)


def without_unused_strides(values: np.ndarray) -> np.ndarray:
    """Return an array on the same memory whose strides are those of `used_strides`.

    Parameters
    ----------
    values : ndarray
        An array with any strides.

    Returns
    -------
    ndarray
        `values` itself if no stride differs, else a view.
    """
    strides = used_strides(values.shape, values.strides, values.itemsize)
    if strides == values.strides:
        return values
    writeable = values.flags.writeable
    return np.lib.stride_tricks.as_strided(values, values.shape, strides, writeable=writeable)


def _owner(values: np.ndarray) -> np.ndarray:
    """Return the largest NumPy array of which this array is a part."""
    base = values.base
    while base is not None:
        if isinstance(base, np.ndarray):
            values = base
        base = getattr(base, "base", None)  # as_strided puts an object between the two arrays
    return values


def track_owners(arrays: Sequence[GlobalArray], blocks: int) -> None:
    """Give each array of a launch a record of its last accesses.

    Arrays that share memory share the record of the shared elements.

    Parameters
    ----------
    arrays : sequence of GlobalArray
        All arrays of the launch.
    blocks : int
        Thread blocks of the launch.
    """
    spans = sorted((a for a in arrays if a.span), key=lambda a: (a.itemsize, a.address))
    group: list[GlobalArray] = []
    end = 0

    def close() -> None:
        """Give the arrays in the list `group` a common record of accesses, and empty the list.

        The arrays in the list share memory. A record (`Owners`) contains the last accesses to each
        element. Each array gets the part of the record that belongs to its elements.
        """
        if group:
            first, size = group[0].address, group[0].itemsize
            writeable = any(a._memory.flags.writeable for a in group)
            owners = Owners((end - first) // size, blocks, writeable)
            for a in group:
                start = (a.address - first) // size
                a.owners = owners.part(start, start + a.span)
            group.clear()

    for a in spans:
        meets = group and a.itemsize == group[0].itemsize and a.address < end
        if not meets or (a.address - group[0].address) % a.itemsize:
            close()
            end = 0
        group.append(a)
        end = max(end, a.address + a.span * a.itemsize)
    close()
