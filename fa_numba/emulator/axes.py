"""Arrays of several axes in shared and in local memory.

`Axes` maps an index with several axes to an index of a SharedArray or LocalArray, which has one
axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Unconverted, two_arrays
from .lanes import merge

if TYPE_CHECKING:
    from .context import Context


def shape_of(function: str, shape: Any) -> tuple[int, ...]:
    """Return the `shape` argument of a call of ``cuda.shared.array`` or ``cuda.local.array``.

    The result is a tuple. `function` is the name of the called function, for the message. Raise
    TypeError if `shape` is neither an integer nor a tuple of integers.
    """
    axes = shape if isinstance(shape, (tuple, list)) else (shape,)
    whole = (int, np.integer)
    if not axes or any(not isinstance(n, whole) or isinstance(n, bool) or n < 0 for n in axes):
        raise TypeError(
            f"the shape of {function} must be an integer or a tuple of integers that are equal in "
            f"all threads and at least 0, got {shape!r}. Numba needs a constant: use a number or a "
            "global variable"
        )
    return tuple(map(int, axes))


class Axes(Unconverted):
    """An array of several axes in shared or local memory, or a part of such an array.

    A part is what ``a[i]`` selects from an array of two axes: indices for the first axes only.

    Parameters
    ----------
    ctx : Context
        The launch.
    flat : SharedArray or LocalArray
        All elements in row-major order.
    shape : tuple of int
        Shape of the complete array.
    place : tuple, default ()
        Indices along the first axes that select the part, each a number or an array over the lanes.
    """

    __slots__ = ("ctx", "flat", "whole", "place")

    def __init__(
        self, ctx: Context, flat: Any, shape: tuple[int, ...], place: tuple[Any, ...] = ()
    ) -> None:
        self.ctx, self.flat, self.whole, self.place = ctx, flat, shape, place

    @property
    def name(self) -> str:
        """Return the name of the variable in the kernel."""
        return self.flat.name

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the elements."""
        return self.flat.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part."""
        return self.whole[len(self.place) :]

    @property
    def ndim(self) -> int:
        """Return the number of axes of the part."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Return the number of elements of the part."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        place = self.place + (index if index.__class__ is tuple else (index,))
        if len(place) < len(self.whole):
            self._check(place)
            return Axes(self.ctx, self.flat, self.whole, place)
        return self.flat[self.position(place)]

    def __setitem__(self, index: Any, value: Any) -> None:
        place = self.place + (index if index.__class__ is tuple else (index,))
        self.flat[self.position(place)] = value

    def position(self, place: tuple[Any, ...]) -> Any:
        """Return the position of an element in row-major order.

        Parameters
        ----------
        place : tuple
            One index per axis of the complete array: a number, or an array over the lanes.

        Returns
        -------
        int or ndarray of int
            The position. It is an array over the lanes if lanes have different positions.

        Raises
        ------
        TypeError
            If there is not one index per axis, or an index is a slice.
        OutOfBounds
            If an index is outside of the array.
        """
        if len(place) != len(self.whole):
            raise TypeError(
                f"the index of {self.name} must have one number for each axis (axes: "
                f"{len(self.whole)}), got {len(place)}"
            )
        return self._check(place)

    def _check(self, place: tuple[Any, ...]) -> Any:
        """Check the bounds of an index, and return the index as one row-major number.

        `place` has one index for each of the first axes, or for all axes. For an array of shape
        (4, 8, 16), `place` (i, j) gives i * 8 + j. `place` (i, j, k) gives (i * 8 + j) * 16 + k.
        """
        e: Any = 0
        for i, n in zip(place, self.whole, strict=False):
            if i.__class__ is slice:
                raise TypeError(
                    f"an index of {self.name} must be a number, got a slice. The emulator supports "
                    "slices of arrays in global memory only: use a loop over the elements"
                )
            lane = self.ctx.first_outside(i, n)
            if lane >= 0:
                i = self.ctx.from_start(i, n)
                lane = self.ctx.first_outside(i, n)
            if lane >= 0:
                raise self.ctx.outside(self.name, self.whole, place, lane)
            e = e * n + i
        return e

    def merged(self, mask: np.ndarray, other: Any) -> Axes:
        """Return the array that a variable has in all lanes after a branch.

        Parameters
        ----------
        mask : ndarray of bool
            Lanes in which the variable is this array.
        other : object
            Value of the variable in the other lanes.

        Returns
        -------
        Axes
            The array of all lanes.

        Raises
        ------
        TypeError
            If `other` is another array.
        """
        same = other.__class__ is Axes and self.whole == other.whole
        if not same or len(self.place) != len(other.place):
            raise TypeError(two_arrays(self, other))
        flat = merge(mask, other.flat, self.flat)
        return Axes(self.ctx, flat, self.whole, merge(mask, other.place, self.place))
