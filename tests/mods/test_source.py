"""Reading the source of a caller's function."""

import linecache
import math

import pytest
import random_functions

from fa_numba import mods
from fa_numba.mods.source import kind_of_capture


def test_a_function_whose_file_has_changed_is_refused():
    """Its line now has a function with other parameters, and a lambda."""
    function = random_functions.function_of("def mod(b, h, i, j):\n    return i > j\n", {})
    text = "def mod(b, turn=lambda: 1):\n    return b\n"
    file = function.__code__.co_filename
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    with pytest.raises(ValueError, match="has not changed since it ran, got mod "):
        mods.captured("mask_mod", function)


def test_only_what_can_be_called_is_a_function_of_math():
    """The object's class says that it is defined in the module math."""
    assert kind_of_capture(math.exp) == "call exp"
    assert kind_of_capture(type("Odd", (), {"__module__": "math"})()).startswith("?")
