"""The source of functions that were typed at a prompt, or follow ``python -c``."""

import code
import inspect
import sys
from types import ModuleType

import pytest

from fa_numba import mods
from fa_numba.emulator.typed import lines_of


@pytest.fixture
def prompt(monkeypatch):
    """Types statements at Python's prompt, and gives the names that they define."""
    lines, known = [], {"__name__": "__main__"}
    history = ModuleType("readline")
    history.get_current_history_length = lambda: len(lines)
    history.get_history_item = lambda n: lines[n - 1]
    monkeypatch.setitem(sys.modules, "readline", history)
    interpreter = code.InteractiveInterpreter(known)

    def typing(*statements, kept=True):
        for statement in statements:
            if kept:
                lines.extend(filter(str.strip, statement.splitlines()))
            assert not interpreter.runsource(f"{statement}\n", "<stdin>", "single")
        return known

    typing.lines = lines
    return typing


def source_of(function):
    return "".join(lines_of(function.__code__))


NEAR = "def near(b, h, i, j):\n    # the diagonal\n    return i == j\n"
MAKER = "def make(slope):\n    def relative(s, b, h, i, j):\n        return s + slope * j\n"
MAKER += "    return relative\n"
TWO = "two = [lambda b, h, i, j: i == j,\n    lambda b, h, i, j: i < j]"


def test_what_is_typed_is_found(prompt):
    prompt("x = 3", NEAR, MAKER, "made = make(0.5)", TWO, "if x:\n    f = 1\nelse:\n    f = 2\n")
    known = prompt('text = """\nx ==\n"""')
    assert mods.captured("mask_mod", known["near"]).mod.shown == "near (<stdin>, line 1)"
    assert dict(mods.captured("score_mod", known["made"]).values) == {"slope": 0.5}
    for function, is_seen in zip(known["two"], ("i == j", "i < j"), strict=True):
        mod = mods.captured("mask_mod", function).mod
        assert is_seen.split()[1] in mod.value.text
        assert source_of(function).startswith("two = [lambda")


def test_the_statement_that_defined_a_function_is_found_also_after_others(prompt):
    first = prompt("f = lambda b, h, i, j: i == j")["f"]
    prompt.lines.extend(
        ["x = = 3", "  f(", "def f(b, h, i, j):", "rest", "f(", "x = 3"]
    )  # which are wrong
    second = prompt("def f(b, h, i, j):\n    return i > j\n", "f")["f"]
    third = prompt("def f(b, h, i, j): return i < j\n", "g = (\n1,\n)")["f"]
    found = [source_of(f) for f in (first, second, third)]
    assert found[0] == "f = lambda b, h, i, j: i == j\n"
    assert found[1].splitlines()[1].strip() == "return i > j"
    assert found[2] == "def f(b, h, i, j): return i < j\n"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python keeps what is typed")
def test_what_python_does_not_keep_is_refused_with_what_to_do(prompt):
    known = prompt("def near(b, h, i, j): return i > j\n", "near = 1")
    known = prompt("def near(b, h, i, j): return i == j\n", kept=False)
    wrong = r"^mask_mod must .* got near \(<stdin>, line 1\); put the function into a file or a"
    with pytest.raises(ValueError, match=wrong):
        mods.captured("mask_mod", known["near"])


def test_a_program_after_c_is_found(monkeypatch):
    text, known = f"import math\n{NEAR}", {}
    monkeypatch.setattr(sys, "argv", ["-c", "x"])
    for program in (["-c", text], [f"-c\n{text}"]):
        text = "".join(program)[2:]
        monkeypatch.setattr(sys, "orig_argv", ["python", "-B", "-Wc", *program, "x"])
        exec(compile(text, "<string>", "exec"), known)
        assert source_of(known["near"]).strip() == text.strip()
    # Of another text, on the same line, nothing is taken for it.
    exec(f"\n{NEAR.replace('==', '<')}", known)
    assert source_of(known["near"]) == ""


def test_what_python_keeps_itself_is_taken(monkeypatch):
    known = {}
    exec(compile(NEAR, "<python-input-3>", "exec"), known)
    assert source_of(known["near"]) == ""
    exec(compile(f"\n{NEAR}", "<python-input-4>", "exec"), known)
    monkeypatch.setattr(inspect, "findsource", lambda function: ([function.__name__], 0))
    assert source_of(known["near"]) == "near"
