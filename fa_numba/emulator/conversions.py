"""What a store to an array of each dtype makes of a Python number."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np


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
    """The conversion that a store to an array of `dtype` makes; TypeError where there is none."""
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
