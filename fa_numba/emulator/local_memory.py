"""Local arrays, of which each thread has its own copy.

Reads of elements that were never written are found. Accesses out of bounds are found, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import checks
from .conversions import converter
from .errors import UNNAMED, Unconverted, UninitialisedRead, two_arrays
from .lanes import Mask, distinct, every, fma, select, some

if TYPE_CHECKING:
    from .context import Context
    from .products import Product

MOST_WAITING = 2048  # multiply-adds that are collected
# Values of `waiting` and `waiting_for` while a matrix product uses the array. FLIGHT is not empty
# and FLYING equals no mask, so that every access calls `_compute`, which checks the products.
FLIGHT: list[Any] = [None]
FLYING: Any = object()


class LocalArray(Unconverted):
    """An array in local memory, of which each lane has its own copy.

    Kernels index the array, as in ``x[i]``. The emulator and the functions that emulate intrinsics
    call the methods of this class. Kernels do not.

    The list `data` contains element i of all lanes together: an ndarray with one value per lane, or
    one number if all lanes have the same value. If no lane has written the element, it is None. If
    only some lanes have written the element, `partial` maps its index to these lanes.

    Parameters
    ----------
    ctx : Context
        The launch.
    site : tuple of int
        Instruction that makes the array.
    length : int
        Number of elements.
    dtype : dtype
        Type of the elements.
    axes : tuple of int, optional
        Shape under which the kernel knows the array, for messages. Default: `length`.
    """

    __slots__ = (
        "dtype", "data", "single", "convert", "ctx", "site", "partial", "waiting",
        "waiting_for", "summed", "flying", "axes",
    )  # fmt: skip

    def __init__(
        self, ctx: Context, site: tuple[int, int], length: int, dtype: np.dtype,
        axes: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.axes = (length,) if axes is None else axes
        self.ctx, self.site, self.dtype = ctx, site, dtype
        self.data: list[Any] = [None] * length
        self.single = dtype == np.float32
        self.convert = converter(dtype)
        self.partial: dict[int, np.ndarray] = {}
        # Collected multiply-adds: element, left factor and right factor of the first one, then of
        # the second one, and so on. Then: the mask of their lanes.
        self.waiting: list[Any] = []
        self.waiting_for: Mask = None
        self.summed: set[int] = set()  # elements that have values in all lanes of this mask
        self.flying: list[Product] = []  # matrix products that use the array until a wait

    @property
    def name(self) -> str:
        """Return the name of the variable in the kernel."""
        return self.ctx.target(self.site, UNNAMED)

    @property
    def made_at(self) -> str:
        """Return the file and line that makes the array, for messages."""
        return self.ctx.line_of(self.site).partition(": ")[0]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return len(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, which has one axis."""
        return (len(self.data),)

    @property
    def ndim(self) -> int:
        """Return the number of axes, 1."""
        return 1

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self.data)))

    def __getitem__(self, index: Any) -> Any:
        if self.waiting:
            self._compute()
        if index.__class__ is int:
            try:
                if index >= 0:
                    value = self.data[index]
                    if value is not None:
                        written = self.partial.get(index)
                        if written is None or written is self.ctx.mask:
                            return value
            except IndexError:
                pass
        return self._get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.put(index, self.convert(value))

    def put(self, index: Any, value: Any) -> None:
        """Store a value that already has the array's dtype.

        Parameters
        ----------
        index : int or ndarray of int
            Element; by lane if lanes differ.
        value : number or ndarray
            The value of each lane that takes part.

        Raises
        ------
        OutOfBounds
            If the index is outside of the array.
        """
        if self.waiting:
            self._compute(writes=True)
        if index.__class__ is int and 0 <= index < len(self.data):
            mask, partial = self.ctx.mask, self.partial
            if mask is None:
                self.data[index] = value
                if partial:
                    partial.pop(index, None)
                return
            old = self.data[index]
            if old is None:
                self.data[index], partial[index] = value, mask
                return
            written = partial.get(index)
            if written is mask:
                self.data[index] = value
                return
            if written is None or self.ctx.covers(written, mask):
                self.data[index] = select(mask, value, old)
                return
        self._put(index, value)

    def multiply_add(self, terms: tuple[Any, ...]) -> None:
        """Compute ``array[index] += a * b`` for several elements. Each sum is rounded once.

        Multiply-adds of the same lanes are collected until the array is used in another way,
        because computing many multiply-adds in one step is faster.

        Parameters
        ----------
        terms : tuple
            Index, a and b of the first multiply-add, then of the second, and so on.
        """
        mask = self.ctx.mask
        if not self.flying:
            if mask is not self.waiting_for:
                if self.waiting:
                    self._compute()
                self.waiting_for = mask
                self.summed.clear()
            places = terms[::3]
            try:
                sound = self.summed.issuperset(places) or self._may_sum(places)
            except TypeError:  # indices that are arrays
                sound = False
            if sound:
                self.waiting += terms
                if len(self.waiting) > 3 * MOST_WAITING:
                    self._compute()
                return
        self.ctx.instruction("fma", len(terms) // 3)
        for n in range(0, len(terms), 3):
            self[terms[n]] = fma(terms[n + 1], terms[n + 2], self[terms[n]])

    def _may_sum(self, places: tuple[Any, ...]) -> bool:
        """Return whether multiply-adds to these elements may be collected.

        Two conditions must hold: the array is float32, and the elements already have values in all
        lanes that take part.
        """
        data, ctx = self.data, self.ctx
        sound = self.single and all(
            e.__class__ is int and 0 <= e < len(data) and data[e] is not None for e in places
        )
        if sound and self.partial:
            some = [self.partial[e] for e in places if e in self.partial]
            sound = all(ctx.covers(written, ctx.mask) for written in some)
        if sound:
            self.summed.update(places)
        return sound

    def depart(self, product: Product) -> None:
        """Mark the array as in use by a matrix product of a warpgroup, until `arrive` is called.

        Parameters
        ----------
        product : Product
            The product, which reads or writes the array.
        """
        if not self.flying and self.waiting:
            self._compute()
        self.flying.append(product)
        self.waiting, self.waiting_for = FLIGHT, FLYING

    def arrive(self, product: Product) -> None:
        """Mark the array as free again, after the threads have waited for a matrix product.

        Parameters
        ----------
        product : Product
            The product, for which `depart` was called before.
        """
        self.flying.remove(product)
        if not self.flying:
            self.waiting, self.waiting_for = [], None
            self.summed.clear()

    def _compute(self, writes: bool = False) -> None:
        """Compute the multiply-adds that `multiply_add` has collected, before another access.

        The access then sees their results. While asynchronous matrix products of a warpgroup use
        the array, nothing is collected. In this case, the method checks whether the access is
        allowed during these matrix products. It raises RegisterHazard if the access is not allowed.
        `writes` says whether the access is a write.
        """
        if self.flying:
            for product in self.flying:
                product.require_free(self, writes)
            return
        waiting, mask, data = self.waiting, self.waiting_for, self.data
        elements, left, right = waiting[::3], waiting[1::3], waiting[2::3]
        half = len(elements)
        self.ctx.instruction_of(mask, "fma", half)
        self.waiting = []
        count = self.ctx.group.count
        places = dict.fromkeys(elements)
        old = [data[e] for e in places]
        sums = _as_rows(old, count, np.float32)
        which = _numbered(elements, places)
        both = left + right
        keys = list(map(id, both))
        values = dict(zip(keys, both, strict=True))
        factors = _as_rows(list(values.values()), count, np.float64)
        taken = _numbered(keys, values)
        checks.multiply_adds(sums, which, taken[:half], taken[half:], factors)
        for e, before, after in zip(places, old, sums, strict=True):
            if mask is None or self.partial.get(e) is mask:
                data[e] = after
            else:
                data[e] = select(mask, after, before)

    def merged(self, mask: np.ndarray, other: Any) -> LocalArray:
        """Merge the local arrays that one line of the kernel has made for different lanes.

        In a loop or a branch, a call of ``cuda.local.array`` may run again for some lanes only.
        These lanes have the new array `self`, and the other lanes still have the older array
        `other`. This method returns `other` for all lanes. In the lanes of `mask`, its elements
        become unwritten, as in a new array.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes that have run the line again.
        other : LocalArray
            The older array, which the same line made before.

        Returns
        -------
        LocalArray
            The older array, `other`.

        Raises
        ------
        TypeError
            If `other` was made at another line.
        """
        if other.__class__ is not LocalArray or other.site != self.site:
            raise TypeError(two_arrays(self, other))
        if other.waiting:
            other._compute()
        other.summed.clear()
        for e, value in enumerate(other.data):
            if value is not None:
                left = other.partial.get(e, self.ctx.group.everyone) & ~mask
                other.partial[e] = left
        return other

    # ---- less common cases

    def _position(self, index: Any) -> Any:
        """Check the bounds of an index, and return the index.

        The result is an int if the index is equal in all lanes. Otherwise it is an array over the
        lanes.
        """
        if index.__class__ in (tuple, slice):
            if index.__class__ is tuple and len(index) == 1:
                return self._position(index[0])
            raise TypeError(
                f"the index of {self.name} must be one number for each axis (axes: 1), got {index}"
            )
        lane = self.ctx.first_outside(index, len(self.data))
        if lane >= 0:
            index = self.ctx.from_start(index, len(self.data))
            lane = self.ctx.first_outside(index, len(self.data))
        if lane >= 0:
            raise self.ctx.outside(self.name, (len(self.data),), index, lane)
        if index.__class__ is np.ndarray and every(index == index[0]):
            return int(index[0])
        return index

    def _get(self, index: Any) -> Any:
        """Return an element whose index may differ by lane."""
        e = self._position(index)
        if e.__class__ is not np.ndarray:
            value, written = self.data[e], self.partial.get(e)
            if value is None or (
                written is not None and not self.ctx.covers(written, self.ctx.mask)
            ):
                self._require(written, index)
            return value
        group = self.ctx.group
        taken = self.ctx.active_lanes()
        found = None
        for one in distinct(e[taken]):
            here = e == one
            value, written = self.data[one], self.partial.get(one)
            if value is None or written is not None:
                self._require(written, index, here)
            found = value if found is None else select(here, value, found)
        return np.zeros(group.count, self.dtype) if found is None else found

    def _require(self, written: np.ndarray | None, index: Any, here: Any = True) -> None:
        """Raise UninitialisedRead if a lane reads an element that it has not written.

        `written` are the lanes that have written the element; None means no lane. `here` are the
        lanes that read the element. Only lanes that take part are checked.
        """
        active = self.ctx.active() & here
        missing = active if written is None else active & ~written
        if some(missing):
            lane = int(missing.argmax())
            place = np.unravel_index(int(self.ctx.of_lane(index, lane)), self.axes)
            text = (
                f"{self.name}[{', '.join(map(str, place))}] is read, but was never written. "
                "Set every element of the array before it is read"
            )
            raise self.ctx.fault(UninitialisedRead, text, self.name, lane)

    def _put(self, index: Any, value: Any) -> None:
        """Store to an element whose index may differ by lane."""
        e = self._position(index)
        ctx = self.ctx
        places = [e] if e.__class__ is not np.ndarray else distinct(e[ctx.active_lanes()])
        for one in places:
            here = ctx.active() if e.__class__ is not np.ndarray else ctx.active() & (e == one)
            old, written = self.data[one], self.partial.pop(one, None)
            if every(here):
                self.data[one] = value
                continue
            self.data[one] = select(here, value, 0 if old is None else old)
            if old is None:
                self.partial[one] = here
            elif written is not None and not every(written | here):
                self.partial[one] = written | here


def _as_rows(values: list[Any], count: int, dtype: type) -> np.ndarray:
    """Return values over `count` lanes as an array (values, lanes). A value may be a number."""
    rows: np.ndarray = np.empty((len(values), count), dtype)
    try:
        np.concatenate(values, out=rows.reshape(-1))
    except (TypeError, ValueError):  # some values are numbers
        for row, value in zip(rows, values, strict=True):
            row[:] = value
    return rows


def _numbered(keys: Sequence[Any], among: dict[Any, Any]) -> np.ndarray:
    """Return for each of `keys` its index among the keys of a dictionary."""
    numbers = dict(zip(among, range(len(among)), strict=True))
    return np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))
