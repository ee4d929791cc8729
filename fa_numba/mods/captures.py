"""Numbers that are computed from captured numbers once per call, instead of once per score.

A kernel gets such a number as one more field of its last argument, ``options``. The dictionary
``captured`` of the class ``Statements`` maps the text that computes the number, such as
``float32(1.0) / options.score_mod_0``, to the field.
"""

from __future__ import annotations

import functools
import math
import re
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
from numba import int32, uint32

# A text that contains only captured numbers, constants, products, quotients, sums and differences.
OF_NUMBERS = re.compile(r"(?=.*options\.)(?:options\.\w+|float32\(-?[\w.+-]+\)|[ +*/-])+")


def divisor(d: Any) -> Any:
    """Return floor((2^32 - 1) / max(1, abs(d))) as uint32, for divisions by the int32 ``d``.

    ``floor_divide`` and ``modulo`` of parts/division.py multiply by this number instead of dividing
    by ``d``. Kernels call this function too.
    """
    return uint32(uint32(0xFFFFFFFF) // uint32(max(int32(1), int32(abs(d)))))


def inverse_of(field: str) -> str:
    """Return the text that computes ``divisor`` of the integer in this field."""
    return f"int32(divisor(int32({field})))"


def made_of(text: str, option: str, values: list[Any]) -> int | float:
    """Compute the number that ``text`` describes, with NumPy in float32, as a GPU would.

    ``text`` is an expression such as ``float32(1.0) / options.score_mod_0``. ``values`` are the
    values of the fields before the computed field, in their order.
    """
    numbers = (np.float32(x) if isinstance(x, float) else x for x in values)
    options = SimpleNamespace(**{f"{option}_{n}": x for n, x in enumerate(numbers)})
    known = {"float32": np.float32, "int32": np.int32, "math": math, "divisor": divisor}
    with np.errstate(all="ignore"):
        return eval(_compiled(text), known | {"options": options}).item()


@functools.cache
def _compiled(text: str) -> CodeType:
    """Return the compiled text. It is cached because each call of a kernel computes its numbers."""
    return compile(text, "<made of captured numbers>", "eval")
