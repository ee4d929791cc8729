"""Reading the source of a caller's function."""

import linecache
import math

import pytest
import random_functions

from fa_numba import mods
from fa_numba.mods import source
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


def test_a_constant_lambda_without_positions_is_found_by_its_constant(tmp_path):
    """Python 3.12 gives its instructions no positions."""
    file = tmp_path / "lambdas.py"
    file.write_text("one, two = lambda s: 1.0, lambda s: 2.0\n")
    namespace = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)

    class Code:
        co_filename, co_firstlineno, co_name = str(file), 1, "<lambda>"

        def __init__(self, function):
            self.co_consts = function.__code__.co_consts

        def co_positions(self):
            return []

    for name, value in (("one", 1.0), ("two", 2.0)):
        found = source._found.__wrapped__(Code(namespace[name]), str(file))
        assert found.node.body.value == value


def test_a_lambda_in_the_line_of_a_function_is_found():
    text = "def made(): return lambda b, h, i, j: i > j\n"
    function = random_functions.function_of(text, {}, "made")()
    mod, _ = mods.captured("mask_mod", function)
    assert "> int32(j - origin)" in mod.value.text
