"""Finds variables that Numba would make wider than a kernel of this package means them to be.

On a GPU, a number that is known at compile time is an int64 to Numba, and a float literal is a
float64. One such operand makes a variable 64 bits wide in the whole kernel. The emulator computes
with Python's numbers, and its results would not show the difference. It therefore reports these
expressions before the first run of a kernel or a part of this package. Kernels of users may be 64
bits wide on purpose, and are not checked.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("kernels", "parts"))

Found = tuple[int, str, str]  # line, name of the variable, and the reason with the remedy


def is_checked(file: str) -> bool:
    """Return whether functions of a file are checked: files of the package's kernels and parts."""
    return file.startswith(FOLDERS)


def message(function: ast.FunctionDef, file: str) -> str:
    """Return the text of an error about the first variable that becomes too wide; "" if none does.

    `file` is the name of the file that contains the function.
    """
    for line, name, why in sorted((*widened(function), *untyped_floats(function))):
        return f"Numba would make {name} 64 bits wide: {why} ({os.path.basename(file)}:{line})"
    return ""


def widened(function: ast.FunctionDef) -> Iterator[Found]:
    """Yield steps of integers such as ``j0 = j0 + Bc``, without ``uint32(...)``.

    Variables that are int64 from the beginning, or floats, may have such steps.
    """
    steps: list[tuple[int, str]] = []
    wide: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            if isinstance(node.op, (ast.Add, ast.Sub)) and _is_of_compile_time(node.value):
                steps.append((node.lineno, node.target.id))
        elif isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                name = ast.unparse(target)
                step = _step_of(name, value)
                if step is not None and _is_of_compile_time(step):
                    steps.append((node.lineno, name))
                elif isinstance(value, (ast.BinOp, ast.Constant)) or _is_int64(value):
                    wide.add(name)
    for line, name in steps:
        if name not in wide:
            why = f"a number of compile time is added. Write {name} = uint32({name} + ...)"
            yield line, name, why


def untyped_floats(function: ast.FunctionDef) -> Iterator[Found]:
    """Yield float literals that are not inside ``float32(...)``.

    A product with such a literal makes the whole sum a float64.
    """
    typed = {
        inner
        for each in ast.walk(function)
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "float32"
        for inner in ast.walk(each)
    }
    left: list[tuple[ast.AST, str]] = [(function, f"the result of {function.name}")]
    while left:
        node, name = left.pop()
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = ast.unparse(target)
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node not in typed:
            text = ast.unparse(node)
            yield node.lineno, name, f"{text} is a float64. Write float32({text})"
        left += [(each, name) for each in ast.iter_child_nodes(node)]


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of an assignment; for a tuple, yield them for each element."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield name, node.value


def _is_of_compile_time(node: ast.expr) -> bool:
    """Return whether an expression has integers and capitalised names only, such as ``2 * Bc``."""
    return all(
        isinstance(x, (ast.BinOp, ast.operator, ast.expr_context))
        or (isinstance(x, ast.Constant) and isinstance(x.value, int))
        or (isinstance(x, ast.Name) and x.id[:1].isupper())
        for x in ast.walk(node)
    )


def _step_of(name: str, value: ast.expr) -> ast.expr | None:
    """Return what an assignment adds to the name or subtracts from it, None if it does neither."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        sides = (value.left, value.right)
        for own, other in zip(sides, sides[::-1], strict=True):
            if isinstance(own, ast.Name) and own.id == name:
                return other
    return None


def _is_int64(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "int64"
