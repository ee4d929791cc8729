"""The syntax tree of a caller's function, and the values that the function captures."""

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
LEAST = -(2**31)  # the least 32-bit integer


@dataclass(frozen=True)
class Source:
    """The source of a caller's function: its code object, its name for messages, its syntax tree.

    Two sources compare equal if their ``code`` and ``shown`` are equal.
    """

    code: CodeType
    shown: str  # name, file and line of the function, for messages
    node: ast.FunctionDef | ast.Lambda = field(compare=False)

    @property
    def parameters(self) -> list[str]:
        return [each.arg for each in self.node.args.args]

    @property
    def body(self) -> list[ast.stmt]:
        """The statements of the function without its docstring. For a lambda: one ``return``."""
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        first, *rest = self.node.body
        constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return rest if constant else self.node.body

    @functools.cached_property
    def names(self) -> list[str]:
        """The names that the body uses and that are not local variables of the function.

        The order of the names is their order in the syntax tree. It does not depend on how the
        names are spelled.
        """
        nodes = (node for statement in self.body for node in ast.walk(statement))
        taken = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
        own = set(self.code.co_varnames)
        return [name for name in taken if name not in own]

    def reads(self, number: int) -> bool:
        """Return whether the body uses parameter number ``number``, counted from 0."""
        name = self.parameters[number]
        nodes = (node for statement in self.body for node in ast.walk(statement))
        return any(isinstance(node, ast.Name) and node.id == name for node in nodes)

    def outside(self, function: FunctionType) -> dict[str, Any]:
        """Map each name that ``function`` uses and does not assign to the value of the name.

        The values are closure variables, globals and builtins. Names without a value are left out.
        """
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
    """Return the source of a function that the caller passes as ``option``.

    ``parameters`` is the number of parameters that the function must have. Raises TypeError for a
    wrong object or wrong parameters, and ValueError if the source cannot be read.
    """
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
    """Return the source of a code object, or None if it is not found in its file.

    ``filename`` is the file of the code object. It is an argument only for the cache of this
    function: two files may contain equal code objects.
    """
    found = None
    lines = tuple(lines_of(code))
    # Begin and end of each instruction. Instructions that the compiler adds have no length.
    places = [((a, c), (b, d)) for a, b, c, d in code.co_positions() if None not in (a, b, c, d)]
    own = [(begin, end) for begin, end in places if begin < end]
    for node in _functions(filename, lines).get(code.co_firstlineno, ()):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            # An outer lambda on this line comes before the lambdas that it contains.
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
    """Map each first line to the functions and lambdas of a file that begin on this line.

    The first line of a decorated function is the line of its first decorator.
    """
    found: dict[int, list[ast.Lambda | ast.FunctionDef]] = {}
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a notebook's cell that contains commands which are not Python
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.Lambda, ast.FunctionDef)):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(each.lineno for each in decorators)])
            found.setdefault(first, []).append(node)
    return found


def is_array(value: Any) -> bool:
    """Return whether the value is an array of any library. An array may have zero axes.

    NumPy scalars such as ``np.float32(0.5)`` have the attributes of arrays. They count as numbers.
    """
    if isinstance(value, np.generic):
        return False
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def kind_of_capture(value: Any) -> str:
    """Return the kind of a captured value, for which the function is compiled.

    =============================  ===============================================
    value                          kind
    =============================  ===============================================
    a number                       "int32", "float32" or "bool"
    an array with 2 axes           "int32[2]", "float32[2]" or "bool[2]"
    the module math                "math"
    a function such as math.exp    "call exp"
    anything else                  "?" and a description, such as "?a list"
    =============================  ===============================================
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
