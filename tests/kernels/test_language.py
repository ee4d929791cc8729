"""The kernels' language: few names and arguments, and each part has one name in a unit."""

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from fa_numba import emulator, kernels, parts
from fa_numba.emulator import rewrite, widths

KERNELS = sorted(Path(kernels.__path__[0]).rglob("*.py"))
PARTS = Path(parts.__path__[0])
MOST_ARGUMENTS, MOST_NAMES = 8, 20
# A copy engine's and a matrix unit's instruction name all their operands, in intrinsics; these take
# an instruction's operands from there, or are arguments of a kernel.
INSTRUCTIONS = {"mma", "multiply", "load_box", "load_box_5d", "store_box", "store_box_5d", "write8"}


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def is_kernel(function):
    return any(ast.unparse(d).startswith("cuda.jit(") for d in function.decorator_list)


def names_closed_over(function, factory):
    """Names of the factory's own that a function within it, or one within that, takes."""
    own = {a.arg for a in factory.args.args}
    for node in ast.walk(factory):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    inside = {a.arg for f in functions(function) for a in f.args.args}
    stored = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    taken = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    return (taken & own) - inside - stored


@pytest.mark.parametrize("file", KERNELS, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_kernels_close_over_few_names(file):
    for factory in ast.parse(file.read_text()).body:
        if isinstance(factory, ast.FunctionDef):
            for function in [n for n in factory.body if isinstance(n, ast.FunctionDef)]:
                found = names_closed_over(function, factory)
                assert len(found) <= MOST_NAMES, (function.name, sorted(found))


def test_calls_have_few_arguments():
    many = []
    for file in (*KERNELS, *sorted(PARTS.rglob("*.py"))):
        tree = ast.parse(file.read_text())
        for function in functions(tree):
            if not is_kernel(function) and len(function.args.args) > MOST_ARGUMENTS:
                many.append(f"{file}: {function.name}")
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if len(call.args) > MOST_ARGUMENTS and name not in INSTRUCTIONS:
                many.append(f"{file}, line {call.lineno}: {ast.unparse(call)}")
    assert not many, "\n".join(many)


@pytest.mark.parametrize("unit", ["simt", "mma", "wgmma"])
def test_a_part_has_one_name_within_a_unit(unit):
    """Where a kernel of the unit finds it: in the unit's modules, and in what all units share."""
    where = defaultdict(set)
    for file in [*PARTS.glob("*.py"), *(PARTS / unit).glob("*.py")]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("make_"):
                where[node.name].add(f"{file.parent.name}/{file.stem}")
    assert len(where) > 50
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


# --- integers stay 32 bits wide ------------------------------------------------------------------


def widened(tree):
    """(line, name) of steps of integers that Numba would make 64 bits wide."""
    return [found[:2] for function in functions(tree) for found in widths.widened(function)]


def test_steps_of_integers_have_a_type():
    """Also where the step's type is removed, which the emulator does not notice."""
    typed, found = re.compile(r"\b(\w+) = uint32\(\1 ([+-]) (\w+)\)\n"), 0
    for file in (*KERNELS, *sorted(PARTS.rglob("*.py"))):
        text = file.read_text("utf-8")
        assert list(widened(ast.parse(text))) == [], file
        if file.match("kernels/wgmma/fa*_forward.py"):
            for step in typed.finditer(text):
                bare = f"{step[1]} = {step[1]} {step[2]} {step[3]}\n"
                tree = ast.parse(text[: step.start()] + bare + text[step.end() :])
                line = text.count("\n", 0, step.start()) + 1
                assert (line, step[1]) in widened(tree), (file, step[0])
                found += 1
    assert found


def untyped_floats(tree):
    """(line, name, reason) of float literals that Numba would make float64."""
    return [found for function in functions(tree) for found in widths.untyped_floats(function)]


def test_floats_have_a_type():
    """Also where a planted literal has none: the first float32 of each file becomes bare."""
    planted = 0
    for file in (*KERNELS, *sorted(PARTS.rglob("*.py"))):
        text = file.read_text("utf-8")
        assert list(untyped_floats(ast.parse(text))) == [], file
        bare = re.sub(r"\bfloat32\((-?\d[\d.e]*)\)", r"\1", text, count=1)
        if bare != text and "." in re.search(r"\bfloat32\((-?\d[\d.e]*)\)", text)[1]:
            planted += bool(list(untyped_floats(ast.parse(bare))))
    assert planted > 10
    literal = "1.0 is a float64. Write float32(1.0)"
    assert untyped_floats(ast.parse("def f(x):\n    return x * 1.0")) == [
        (2, "the result of f", literal)
    ]


def faulty_step(x):
    i = cuda.threadIdx.x
    while i < 4:
        x[i] = i
        i = i + LANES


def faulty_product(x):
    y = x[cuda.threadIdx.x] * 1.0
    x[cuda.threadIdx.x] = y


LANES = 2


@pytest.mark.parametrize(
    ("kernel", "name", "why"),
    [
        (faulty_step, "i", r"a number of compile time is added\. Write i = uint32\(i \+ \.\.\.\)"),
        (faulty_product, "y", r"1\.0 is a float64\. Write float32\(1\.0\)"),
    ],
)
def test_the_emulator_reports_a_type_that_numba_would_give_differently(
    monkeypatch, kernel, name, why
):
    """In kernels of this package, with variable and line. Kernels of users are not checked."""
    x, launched = np.zeros(4, np.float32), cuda.jit(kernel)
    emulator.launch(launched, 1, 2, x)
    lines, first = inspect.getsourcelines(kernel)
    line = first + next(n for n, text in enumerate(lines) if "i + LANES" in text or "1.0" in text)
    monkeypatch.setattr(widths, "FOLDERS", (str(Path(__file__).parent),))
    monkeypatch.setattr(rewrite, "_rewritten", {})
    said = rf"Numba would make {name} 64 bits wide: {why} \(test_language\.py:{line}\)"
    with pytest.raises(emulator.WrongType, match=said):
        emulator.launch(launched, 1, 2, x)
