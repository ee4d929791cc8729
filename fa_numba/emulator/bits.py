"""Functions of `numba.cuda` on the bits of integers, and selection and arithmetic by lane.

The emulator does not know how many bits the variable of an integer has. It assumes 32 bits if the
value fits into 32 bits, and otherwise 64 bits. The number of bits changes the results of functions
that count leading zeros or reverse bits, and the results for negative numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .lanes import each, truth, where

WORD, LONG = 32, 64


def _unsigned(value: int) -> tuple[int, int]:
    """Return the bits of an integer as a number of at least 0, and the number of bits, 32 or 64."""
    width = WORD if -(1 << WORD - 1) <= value < 1 << WORD else LONG
    return value & (1 << width) - 1, width


def _of_bits(function: Callable[[int, int], int], name: str) -> Callable[[Any], Any]:
    """Return the function `name` of `numba.cuda`, for a number or an array over the lanes.

    `function` takes the bits of an integer and the number of bits.
    """

    def of_number(value: Any) -> int:
        return function(*_unsigned(int(value)))

    of_number.__name__ = name
    return each(of_number)


popc = _of_bits(lambda bits, width: bits.bit_count(), "popc")
clz = _of_bits(lambda bits, width: width - bits.bit_length(), "clz")
ffs = _of_bits(lambda bits, width: (bits & -bits).bit_length(), "ffs")
brev = _of_bits(lambda bits, width: int(f"{bits:0{width}b}"[::-1], 2), "brev")
cbrt = each(lambda x: float(np.cbrt(x)))


def selp(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return `if_true` or `if_false` for each lane. Both operands are computed in all lanes."""
    if condition.__class__ is np.ndarray:
        return where(truth(condition), if_true, if_false)
    return if_true if condition else if_false
