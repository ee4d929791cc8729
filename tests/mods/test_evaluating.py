"""A caller's function as the emulator calls it, on Python's and NumPy's numbers."""

import math
import operator

import numpy as np
import pytest

from fa_numba import mods

FUNCTIONS = {
    "//": lambda score, b, h, i, j: i // j,
    "%": lambda score, b, h, i, j: i % j,
    "**": lambda score, b, h, i, j: i**j,
    "<<": lambda score, b, h, i, j: i << j,
    "/": lambda score, b, h, i, j: i / j,
    "*": lambda score, b, h, i, j: i * j,
}
PYTHONS = {
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "<<": operator.lshift,
    "/": operator.truediv, "*": operator.mul,
}  # fmt: skip


@pytest.mark.parametrize("symbol", FUNCTIONS)
def test_operators_compute_pythons_values(symbol):
    function = mods.evaluated("score_mod", FUNCTIONS[symbol], {})
    pairs = [(7, 2), (9, 3), (5, 7), (np.int32(7), 2), (7, np.int32(2)), (1, 1)]
    if symbol != "<<":
        pairs += [(7.5, 2), (7, 2.0), (-7.5, 2.0)]
    if symbol not in ("<<", "**"):
        pairs += [(-7, 2), (7, -2), (np.int32(-7), np.int32(2))]
    for i, j in pairs:
        wanted, found = PYTHONS[symbol](i, j), function(0.0, 0, 0, i, j)
        assert found == wanted and isinstance(found, float) == isinstance(wanted, float)


def test_integers_have_32_bits_and_divisions_by_zero_have_a_value():
    def of(symbol, i, j):
        return mods.evaluated("score_mod", FUNCTIONS[symbol], {})(0.0, 0, 0, i, j)

    assert of("*", 2**30, 2) == of("<<", 1, 31) == -(2**31)
    assert of("*", 2**30, -2) == -(2**31) and of("*", 2**30, 1) == 2**30
    with np.errstate(all="ignore"):
        assert of("/", 1.0, 0.0) == math.inf and math.isnan(of("%", 1.0, 0.0))
        assert math.isnan(of("%", math.inf, 2.0)) and math.isnan(of("%", 1.0, math.inf))
