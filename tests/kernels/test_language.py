"""The kernels' language: few names and arguments, and each part has one name in a unit."""

import ast
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


@pytest.mark.parametrize(
    "file", [*KERNELS, *sorted(PARTS.rglob("*.py"))], ids=lambda f: f"{f.parent.name}/{f.stem}"
)
def test_calls_have_few_arguments(file):
    tree = ast.parse(file.read_text())
    for function in functions(tree):
        if not is_kernel(function):
            assert len(function.args.args) <= MOST_ARGUMENTS, function.name
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        if name not in INSTRUCTIONS:
            assert len(call.args) <= MOST_ARGUMENTS, f"line {call.lineno}: {ast.unparse(call)}"


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
