"""The syntax tree of a caller's function, and the values that it takes from outside."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import math
import os
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from fa_numba.checks import kind_of
from fa_numba.emulator.typed import lines_of

NUMBERS = "captured numbers and captured arrays of float32, int32 or bool"
ARRAYS = ("float32", "int32", "bool")
LEAST = -(2**31)  # of the integers of 32 bits


@dataclass(frozen=True)
class Source:
    """A function as it stands in a file: its parameters, and its statements, of which the last one
    returns. Two are equal that have equal code on the same line.
    """

    code: CodeType
    shown: str  # its name and where it stands, for messages
    node: ast.FunctionDef | ast.Lambda = field(compare=False)

    @property
    def parameters(self) -> list[str]:
        return [each.arg for each in self.node.args.args]

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements, without what documents them."""
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        first, *rest = self.node.body
        constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return rest if constant else self.node.body

    @functools.cached_property
    def names(self) -> list[str]:
        """The names that are not its own, in an order that they have no part in."""
        nodes = (node for statement in self.body for node in ast.walk(statement))
        taken = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
        own = set(self.code.co_varnames)
        return [name for name in taken if name not in own]

    def reads(self, number: int) -> bool:
        """Return whether the body uses the parameter with this number, which counts from 0."""
        name = self.parameters[number]
        nodes = (node for statement in self.body for node in ast.walk(statement))
        return any(isinstance(node, ast.Name) and node.id == name for node in nodes)

    def outside(self, function: FunctionType) -> dict[str, Any]:
        """What the names stand for that it takes from outside, but those without a value."""
        cells = dict(zip(self.code.co_freevars, function.__closure__ or (), strict=True))
        found = {}
        for name in self.names:
            if name in cells:
                with contextlib.suppress(ValueError):  # not assigned yet
                    found[name] = cells[name].cell_contents
                continue
            for known in (function.__globals__, vars(builtins)):
                if name in known:
                    found[name] = known[name]
                    break
        return found


def source_of(option: str, function: Any, parameters: int) -> Source:
    """The source of a function given as ``option``; raises as ``mods.captured`` does."""
    wanted = "(score, b, h, i, j)" if parameters == 5 else "(b, h, i, j)"
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"{option} must be a Python function (def or lambda) of {wanted}, got "
            f"{kind_of(function)}"
        )
    code = function.__code__
    if code.co_argcount != parameters or code.co_kwonlyargcount or code.co_flags & 0x2AC:
        raise TypeError(
            f"{option} must have the {parameters} parameters {wanted}, and must not be a "
            f"generator or a coroutine, got {_shown(code)} with {inspect.signature(function)}"
        )
    found = _found(code, code.co_filename)
    if found is None:
        instead = ""
        if code.co_filename.startswith("<"):  # typed, piped or made of text
            instead = "; put the function into a file or a notebook's cell"
        raise ValueError(
            f"{option} must be a function whose source can be read, from a file or a notebook's "
            f"cell that has not changed since it ran, got {_shown(code)}{instead}"
        )
    return found


def _shown(code: CodeType) -> str:
    name = "a lambda" if code.co_name == "<lambda>" else code.co_name
    return f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


@functools.lru_cache(maxsize=256)
def _found(code: CodeType, filename: str) -> Source | None:
    """Return the source of code in this file; equal code may be in another file too."""
    found = None
    lines = tuple(lines_of(code))
    # Of every instruction where it begins and ends; what the compiler adds has no length.
    places = [((a, c), (b, d)) for a, b, c, d in code.co_positions() if None not in (a, b, c, d)]
    own = [(begin, end) for begin, end in places if begin < end]
    for node in _functions(filename, lines).get(code.co_firstlineno, ()):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            # What holds other lambdas on this line is walked before them.
            body = node.body
            start, stop = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
            within = all(start <= begin and end <= stop for begin, end in own)
            if not own:  # a constant, in Python 3.12
                within = repr(getattr(body, "value", body)) in map(repr, code.co_consts)
            if within:
                found = Source(code, _shown(code), node)
        elif isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            names = tuple(each.arg for each in node.args.args)
            if names == code.co_varnames[: len(names)]:
                return Source(code, _shown(code), node)
    return found


@functools.lru_cache(maxsize=16)
def _functions(
    filename: str, lines: tuple[str, ...]
) -> dict[int, list[ast.Lambda | ast.FunctionDef]]:
    """Those of a file by their first line, which is a decorator's where there is one."""
    found: dict[int, list[ast.Lambda | ast.FunctionDef]] = {}
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a notebook's cell with commands beside Python
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.Lambda, ast.FunctionDef)):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(each.lineno for each in decorators)])
            found.setdefault(first, []).append(node)
    return found


def is_array(value: Any) -> bool:
    """Whether an array of some library, which may be one without an axis."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def kind_of_capture(value: Any) -> str:
    """What a function is compiled for of a value that it takes from outside: "int32", "float32" or
    "bool"; with axes, as "int32[2]", for an array; "math" and "call exp", by its name, for that
    module and what may be called. Of others it says what they are, behind a "?".
    """
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, np.integer)):
        return "int32" if LEAST <= value < -LEAST else f"?{value}, which does not fit 32 bits"
    if isinstance(value, (float, np.floating)):
        return "float32"
    if value is math:
        return "math"
    if callable(value) and getattr(value, "__module__", "") in ("math", "builtins"):
        return f"call {value.__name__}"
    if is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")
        axes = len(value.shape)
        if dtype not in ARRAYS:
            return f"?an array of {dtype}"
        return f"{dtype}[{axes}]" if axes else "?an array without axes; capture a number instead"
    return f"?{kind_of(value)}"
