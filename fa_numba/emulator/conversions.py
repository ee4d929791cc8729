"""Conversions of values by casts and by stores, for one number or an array over the lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .lanes import FLOATS, INT64, to_bool


def wrapped(bits: int, signed: bool) -> Callable[[Any], Any]:
    """Return the function that casts to an integer type of `bits` bits.

    An integer wraps around modulo 2**bits. With 32 bits or fewer, a float is rounded towards 0 and
    limited to the range of the type, and NaN becomes 0.
    """
    mask, half = (1 << bits) - 1, 1 << (bits - 1)
    low, high = (-half, half - 1) if signed else (0, mask)
    narrow = np.dtype(f"i{bits // 8}")
    ones = np.array(mask) if bits < 64 else None  # faster than a number

    def of_lanes(values: np.ndarray) -> np.ndarray:
        if values.dtype.kind == "f" and bits <= 32:
            values = np.nan_to_num(values.astype(np.float64), nan=0.0)
            return np.clip(values, low, high).astype(np.int64)
        if values.dtype != np.int64:
            if values.dtype == np.uint64 and bits == 64 and not signed:
                return values
            values = values.astype(np.int64)  # a uint64 wraps around, which changes no result
        if bits == 64:
            return values if signed else values.astype(np.uint64)
        if signed:
            return values.astype(narrow).astype(np.int64)  # the cast to `narrow` wraps around
        return values & mask

    def cast(value: Any) -> Any:
        if value.__class__ is int and low <= value <= high:
            return value
        if value.__class__ is np.ndarray:
            if value.dtype is INT64 and ones is not None:
                return value.astype(narrow).astype(INT64) if signed else value & ones
            return of_lanes(value)
        if isinstance(value, FLOATS) and bits <= 32:
            return int(min(max(value, low), high)) if value == value else 0
        value = int(value) & mask
        return value - (1 << bits) if signed and value >= half else value

    cast.__name__ = cast.__qualname__ = f"{'' if signed else 'u'}int{bits}"
    return cast


def rounding(to: type[np.inexact]) -> Callable[[Any], Any]:
    """Return the function that casts to the float or complex type `to`."""

    dtype = np.dtype(to)

    def cast(value: Any) -> Any:
        if value.__class__ is to:
            return value
        if value.__class__ is np.ndarray:
            return value if value.dtype is dtype else value.astype(dtype, copy=False)
        return to(value)

    return cast


def converter(dtype: np.dtype) -> Callable[[Any], Any]:
    """Return the function that converts a value before a store to an array of `dtype`.

    Raise TypeError if arrays of this dtype are not supported.
    """
    if dtype.kind in "iu":
        return wrapped(dtype.itemsize * 8, dtype.kind == "i")
    if dtype.kind in "fbc":
        return to_bool if dtype.kind == "b" else rounding(dtype.type)
    raise TypeError(f"an array must have an integer, float, complex or bool dtype, got {dtype}")
