"""Numbers that are computed from captured numbers once per call, instead of once per score.

A kernel gets such a number as one more field of its last argument, ``options``. The number's name
in a writer's ``captured`` is the text that computes it, such as
``float32(1.0) / options.score_mod_0``.
"""

from __future__ import annotations

import functools
import math
import re
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
from numba import int32, uint32

# A text of captured numbers, constants, products, quotients, sums and differences alone.
OF_NUMBERS = re.compile(r"(?=.*options\.)(?:options\.\w+|float32\(-?[\w.+-]+\)|[ +*/-])+")


def divisor(d: Any) -> Any:
    """Return the factor by which ``floor_divide`` and ``modulo`` of parts/division.py multiply to
    divide by ``d``. Kernels call this function too.
    """
    return uint32(uint32(0xFFFFFFFF) // uint32(max(int32(1), int32(abs(d)))))


def inverse_of(field: str) -> str:
    """Return the text that computes ``divisor`` of the integer in this field."""
    return f"int32(divisor(int32({field})))"


def made_of(text: str, option: str, values: list[Any]) -> int | float:
    """Compute ``text``, a name of a writer's ``captured``, in float32 as a GPU would.

    ``values`` are the values of the fields before the computed field, in their order.
    """
    numbers = (np.float32(x) if isinstance(x, float) else x for x in values)
    options = SimpleNamespace(**{f"{option}_{n}": x for n, x in enumerate(numbers)})
    known = {"float32": np.float32, "int32": np.int32, "math": math, "divisor": divisor}
    with np.errstate(all="ignore"):
        return eval(_compiled(text), known | {"options": options}).item()


@functools.cache
def _compiled(text: str) -> CodeType:
    """Compile the text once, because each call of a kernel computes its numbers."""
    return compile(text, "<made of captured numbers>", "eval")
