"""The kernels' language: few names and arguments, and each part has one name in a unit."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from fa_numba import kernels, parts

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


def assigned(node):
    """Yield (target, value) of an assignment, for a tuple each of its elements."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield name, node.value


def is_of_compile_time(node):
    """Return whether an expression has integers and capitalised names only, such as ``2 * Bc``."""
    return all(
        isinstance(x, (ast.BinOp, ast.operator, ast.expr_context))
        or (isinstance(x, ast.Constant) and isinstance(x.value, int))
        or (isinstance(x, ast.Name) and x.id[:1].isupper())
        for x in ast.walk(node)
    )


def step_of(name, value):
    """Return what an assignment adds to the name or subtracts from it, None if it does neither."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        sides = (value.left, value.right)
        for own, other in zip(sides, sides[::-1], strict=True):
            if isinstance(own, ast.Name) and own.id == name:
                return other
    return None


def is_int64(value):
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "int64"


def widened(tree):
    """Yield (line, name) of steps such as ``j0 = j0 + Bc``, without ``uint32(...)``.

    A number of compile time is an int64, so that Numba would make the variable an int64 in the
    whole kernel. Variables that are int64 from the beginning, or floats, may have such steps.
    """
    for function in functions(tree):
        steps, wide = [], set()
        for node in ast.walk(function):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                if isinstance(node.op, (ast.Add, ast.Sub)) and is_of_compile_time(node.value):
                    steps.append((node.lineno, node.target.id))
            elif isinstance(node, ast.Assign):
                for target, value in assigned(node):
                    name = ast.unparse(target)
                    step = step_of(name, value)
                    if step is not None and is_of_compile_time(step):
                        steps.append((node.lineno, name))
                    elif isinstance(value, (ast.BinOp, ast.Constant)) or is_int64(value):
                        wide.add(name)
        yield from (step for step in steps if step[1] not in wide)


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
    """Yield (line, text) of float literals in functions that are not inside ``float32(...)``.

    Python's floats are float64 on the GPU. A product with one makes the whole sum a float64, which
    the emulator computes in float32 nonetheless.
    """
    for function in functions(tree):
        typed = {
            inner
            for call in ast.walk(function)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "float32"
            for inner in ast.walk(call)
        }
        for node in ast.walk(function):
            bare = isinstance(node, ast.Constant) and node not in typed
            if bare and isinstance(node.value, float):
                yield node.lineno, ast.unparse(node)


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
    assert list(untyped_floats(ast.parse("def f(x):\n    return x * 1.0"))) == [(2, "1.0")]
