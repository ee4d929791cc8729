"""Atomic operations of `numba.cuda` on arrays in global and in shared memory.

Atomic operations of different threads never race with each other. They race with other accesses to
the same element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .axes import Axes
from .errors import NotEmulated
from .global_memory import GlobalArray
from .in_turn import Update
from .shared_memory import SharedArray


def _increased(old: Any, most: Any) -> Any:
    """Return `old` + 1, or 0 where `old` >= `most` (``cuda.atomic.inc``)."""
    return np.where(old >= most, old.dtype.type(0), old + old.dtype.type(1))


def _decreased(old: Any, most: Any) -> Any:
    """Return `old` - 1, or `most` where `old` is 0 or greater than `most` (``cuda.atomic.dec``)."""
    return np.where((old == 0) | (old > most), most, old - old.dtype.type(1))


UPDATES: dict[str, Update] = {
    "add": np.add,
    "sub": np.subtract,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
    "nanmax": np.fmax,
    "nanmin": np.fmin,
    "inc": _increased,
    "dec": _decreased,
    "exch": lambda old, new: np.broadcast_to(new, np.shape(old)),
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}
_OF_FLOATS = frozenset(("add", "sub", "max", "min", "nanmax", "nanmin"))
# Operations whose final result does not depend on the order of the threads.
_IN_ANY_ORDER = _OF_FLOATS | {"and_", "or_", "xor"}


class Atomics:
    """The emulator's `cuda.atomic`.

    Each function returns the old value of the element for each lane, or None if the kernel does not
    use the result.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        raise self._context.fault(
            NotEmulated,
            f"cuda.atomic.{name} is not emulated. The emulator has "
            f"{', '.join(sorted(UPDATES))} and compare_and_swap",
        )

    def compare_and_swap(self, array: Any, old: Any, value: Any) -> Any:
        """Store `value` to the first element of an array if this element is equal to `old`."""
        return self.update("cas", array, (0,) * array.ndim, old, value)

    def update(self, name: str, array: Any, index: Any, *operands: Any) -> Any:
        """Update an element of an array atomically in every lane that takes part, lane after lane.

        `name` is the name of the function of `cuda.atomic`. `operands` are its arguments after
        array and index.
        """
        context = self._context
        if array.__class__ is Axes:
            index = array.position(array.place + (index if index.__class__ is tuple else (index,)))
            array = array.flat
        if isinstance(array, SharedArray) and index.__class__ is tuple:
            (index,) = index
        if not isinstance(array, (GlobalArray, SharedArray)):
            raise TypeError(
                f"the array of cuda.atomic.{name} must be in global or shared memory, got "
                f"{getattr(array, 'name', array)!r}"
            )
        dtype = array.dtype
        if dtype.itemsize < 4 or dtype.kind not in ("iuf" if name in _OF_FLOATS else "iu"):
            allowed = "integers or floats" if name in _OF_FLOATS else "integers"
            raise TypeError(
                f"the array of cuda.atomic.{name} must have {allowed} of 32 or 64 bits, got "
                f"{array.name} of {dtype}"
            )
        lanes = context.group.everyone if context.mask is None else context.mask
        given = [_converted(x, dtype, context.group.count)[lanes] for x in operands]
        old: Any
        if isinstance(array, SharedArray):
            old = array.atomic(index, UPDATES[name], given)
        else:
            in_any_order = context.discards and name in _IN_ANY_ORDER
            if context.several and in_any_order and name in ("add", "sub") and dtype.kind == "f":
                value = _converted(operands[0], dtype, context.group.count)
                array.add(index, value if name == "add" else -value)
                return None
            old = array.atomic(index, UPDATES[name], given, in_any_order)
        if context.discards:
            return None
        found = np.zeros(context.group.count, old.dtype)
        found[lanes] = old
        kept = dtype.kind == "f" or dtype == np.uint64
        return found if kept else found.astype(np.int64)


def _operation(name: str) -> Any:
    """Return the method of `Atomics` for the function `name` of `cuda.atomic`."""

    def update(self: Atomics, array: Any, index: Any, *operands: Any) -> Any:
        return self.update(name, array, index, *operands)

    update.__name__ = name
    update.__doc__ = f"Do ``cuda.atomic.{name}``."
    return update


for _name in UPDATES:
    setattr(Atomics, _name, _operation(_name))


def _converted(value: Any, dtype: np.dtype, count: int) -> np.ndarray:
    """Return an operand as an array over `count` lanes, with the dtype of the updated array."""
    values = np.broadcast_to(np.asarray(value), count)
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu" and values.dtype.kind in "iub":
        return values.astype(np.int64 if values.dtype.kind == "i" else np.uint64).astype(dtype)
    return values.astype(dtype)
