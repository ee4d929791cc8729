"""Values of many lanes: operations that Python's operators cannot do on arrays of lanes.

A value is one number if it is equal in all lanes, else an array with one element per lane. The
dtype of the array is a float or complex dtype, int64, bool, or uint64 for values of `uint64`.
Arrays are never changed once they are made. NumPy's type rules equal Numba's, except for Python's
integers: in an operation with a float, they take the float's type.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

Mask = np.ndarray | None  # one bool per lane; None if all lanes take part


class Undefined:
    """The value of a variable that no lane has assigned yet."""

    def __repr__(self) -> str:
        return "a variable that was not assigned"


undefined = Undefined()
array = np.ndarray
FLOATS = (float, np.floating)
MAX_INT64 = (1 << 63) - 1
INT64, FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)
# `np.where` for NumPy's own arrays. The search for other types of arrays takes as long as the work.
select: Callable[..., np.ndarray] = getattr(np.where, "_implementation", np.where)


class FromEnd(int):
    """A literal negative index, which counts from the end of its axis."""

    __slots__ = ()


def truth(value: Any) -> np.ndarray:
    """Return an array over the lanes as bool: False where the value is 0."""
    return value if value.dtype == np.bool_ else value != 0


def some(lanes: np.ndarray) -> bool:
    """Return whether an array of bool is True in any lane. Faster than ``lanes.any()``."""
    return 1 in lanes.tobytes()


def every(lanes: np.ndarray) -> bool:
    """Return whether an array of bool is True in all lanes. Faster than ``lanes.all()``."""
    return 0 not in lanes.tobytes()


def distinct(values: np.ndarray) -> list[Any]:
    """Return the distinct values of an array, in ascending order. Faster than `np.unique`."""
    return sorted(set(values.tolist()))


def merge(mask: Mask, old: Any, new: Any) -> Any:
    """Return the value of a variable after a branch: `new` in the lanes of `mask`, else `old`.

    `mask` is None if all lanes take part. Tuples are merged element by element, and arrays of the
    kernel by their method `merged`.
    """
    if old is new or old is undefined or old is None or mask is None:
        return new
    if isinstance(new, tuple) and new.__class__ is old.__class__ and len(old) == len(new):
        merged_fields = [merge(mask, a, b) for a, b in zip(old, new, strict=True)]
        return tuple(merged_fields) if new.__class__ is tuple else new.__class__(*merged_fields)
    merged = getattr(new, "merged", None)
    if merged is not None:
        return merged(mask, old)
    if new is undefined:
        return old
    if new.__class__ is array or old.__class__ is array or old != new:
        if new.__class__ is int and old.__class__ is int and max(new, old) > MAX_INT64:
            return select(mask, np.uint64(new), np.uint64(old))
        return select(mask, new, old)
    if not new and isinstance(new, FLOATS):  # 0.0 and -0.0 are equal but differ
        return select(mask, new, old)
    return new


def where(condition: np.ndarray, a: Any, b: Any) -> Any:
    """Return `a` for the lanes whose condition is true, and `b` for the other lanes."""
    return merge(truth(condition), b, a)


def both(a: np.ndarray, b: Any) -> Any:
    """Return `a and b` for each lane; `a` is an array over the lanes."""
    if a.dtype != np.bool_ or (b.__class__ is not bool and getattr(b, "dtype", None) != np.bool_):
        return merge(truth(a), a, b)
    return a & b


def any_(a: np.ndarray, b: Any) -> Any:
    """Return `a or b` for each lane; `a` is an array over the lanes."""
    if a.dtype != np.bool_ or (b.__class__ is not bool and getattr(b, "dtype", None) != np.bool_):
        return merge(truth(a), b, a)
    return a | b


def negation(value: Any) -> Any:
    """Return `not value` for each lane."""
    if value.__class__ is array:
        return ~truth(value)
    return not value


def typed(made: Any, *given: Any) -> Any:
    """Return `made` rounded to the float type of the operands from which it was computed.

    `given` are the operands. `made` is returned unchanged if it is not a float, or if no operand
    has a float dtype of NumPy.
    """
    types = [x.dtype for x in given if hasattr(x, "dtype") and x.dtype.kind == "f"]
    if not types or np.asarray(made).dtype.kind != "f":
        return made
    return np.asarray(made).astype(np.result_type(*types))[()]


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c. The result of float32 operands is rounded only once."""
    if any(getattr(x, "dtype", None) == np.float32 for x in (a, b, c)):
        return typed(np.multiply(a, b, dtype=np.float64) + c, a, b, c)
    return a * b + c


def each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` that takes arrays over the lanes.

    `function` takes numbers and returns a number. The result is rounded to the float type of the
    arguments.
    """

    def of_lanes(*values: Any) -> Any:
        if not any(x.__class__ is array for x in values):
            return typed(function(*values), *values)
        lists = [x.tolist() for x in np.broadcast_arrays(*values)]
        return typed(np.array(list(map(function, *lists))), *values)

    of_lanes.__name__ = of_lanes.__qualname__ = getattr(function, "__name__", "function")
    return of_lanes


def _extreme(beyond: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the function `min` or `max` for values of many lanes.

    `beyond(x, y)` says whether x replaces y as the result. As on a GPU, the result is NaN only if
    all numbers are NaN.
    """

    def of_lanes(*values: Any) -> Any:
        if len(values) == 1:
            values = tuple(values[0])
        best = values[0]
        for value in values[1:]:
            further = beyond(value, best) | (best != best)
            if further.__class__ is array:
                best = select(further, value, best)
            elif further:
                best = value
        return best

    return of_lanes


minimum, maximum = _extreme(operator.lt), _extreme(operator.gt)


def to_int(value: Any) -> Any:
    """Return `int(value)` for each lane."""
    return value.astype(np.int64) if value.__class__ is array else int(value)


def to_float(value: Any) -> Any:
    """Return `value` as float64 for each lane."""
    if value.__class__ is array:
        return value if value.dtype == np.float64 else value.astype(np.float64)
    return np.float64(value)


def to_complex(real: Any, imag: Any = 0) -> Any:
    """Return `complex(real, imag)` for each lane."""
    if real.__class__ is array or imag.__class__ is array:
        return np.asarray(real) + 1j * np.asarray(imag)
    return np.complex128(complex(real, imag))


def number(value: Any) -> Any:
    """Return truth values as 0 or 1, as Python uses them in arithmetic.

    Arrays of bool become arrays of int64. Every other value is returned unchanged.
    """
    if value.__class__ is array and value.dtype == np.bool_:
        return value.astype(np.int64)
    return value


def to_bool(value: Any) -> Any:
    """Return `bool(value)` for each lane."""
    return truth(value) if value.__class__ is array else bool(value)


to_round = each(round)


def divides(
    operation: Callable[[Any, Any], Any], by_power: Callable[[Any, int], Any], message: str
) -> Callable[..., Any]:
    """Return a function (context, a, b) that computes `operation(a, b)` and checks the divisor.

    The function raises ZeroDivisionError with the text `message` if b is 0 in a lane that takes
    part. `by_power` computes the same for an array `a` of int64 and a divisor 2**n, from a and n.
    """

    def of_lanes(context: Any, a: Any, b: Any) -> Any:
        of_numbers = b.__class__ is int and a.__class__ is array and a.dtype is INT64
        if of_numbers and 0 < b <= MAX_INT64 and not b & (b - 1):
            return by_power(a, b.bit_length() - 1)
        if b.__class__ is array:
            zero = b == 0
            if some(zero):
                context.refuse_zero(zero, message)
        elif b == 0:
            context.refuse_zero(None, message)
        return operation(a, b)

    return of_lanes


def divide(a: Any, b: Any) -> Any:
    """Return a / b as a GPU computes it: inf or NaN where Python raises for b = 0."""
    return a / b if b.__class__ is array or b else np.divide(a, b)


# The exponents of powers of two and the bits below them, as arrays, which are faster than numbers.
_EXPONENTS = [np.array(n) for n in range(63)]
_BITS_BELOW = [np.array((1 << n) - 1) for n in range(63)]
floor_divide = divides(
    operator.floordiv,
    lambda a, n: a >> _EXPONENTS[n],
    "the divisor of a // b is 0. Check the divisor before the division",
)
modulo = divides(
    operator.mod,
    lambda a, n: a & _BITS_BELOW[n],
    "the divisor of a % b is 0. Check the divisor before the division",
)
