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
    """Return the text of an expression that calls ``divisor`` with a captured integer.

    ``field`` is the text of the integer. For the field ``options.score_mod_0``, the result is
    ``int32(divisor(int32(options.score_mod_0)))``. Kernels multiply by the value of this expression
    instead of dividing by the integer.
    """
    return f"int32(divisor(int32({field})))"


def made_of(text: str, option: str, values: list[Any]) -> int | float:
    """Return the value of the expression ``text``, computed with NumPy in float32 as on a GPU.

    ``text`` is an expression such as ``float32(1.0) / options.score_mod_0``. ``option`` is
    "score_mod", "mask_mod" or "score_mod_grad". ``values`` are the values of the fields
    ``<option>_0``, ``<option>_1`` and so on, which ``text`` may use.
    """
    numbers = (np.float32(x) if isinstance(x, float) else x for x in values)
    options = SimpleNamespace(**{f"{option}_{n}": x for n, x in enumerate(numbers)})
    known = {"float32": np.float32, "int32": np.int32, "math": math, "divisor": divisor}
    with np.errstate(all="ignore"):
        return eval(_compiled(text), known | {"options": options}).item()


@functools.cache
def _compiled(text: str) -> CodeType:
    """Return the code object of an expression.

    The result is cached, because the expression is evaluated again for each call of attention.
    """
    return compile(text, "<made of captured numbers>", "eval")
