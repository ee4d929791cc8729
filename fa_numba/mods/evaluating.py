"""A caller's function for evaluation by Python in float64, for the reference implementation.

Kernels evaluate the function in float32. In three respects, the function here behaves like a kernel
and differs from plain Python:

- Operations with floats for which Python raises an error return inf or NaN.
- Integers have 32 bits and wrap around.
- ``min`` and ``max`` ignore NaN.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from fa_numba.emulator.lanes import maximum, minimum
from fa_numba.emulator.namespace import CASTS, SETTLED

from .source import LEAST, Source

_int32 = CASTS["int32"]
_INTEGER = (int, np.integer)  # i, j and elements of captured arrays are NumPy integers


def _settled(made: Any) -> Any:
    if made.__class__ is int and LEAST <= made <= -LEAST - 1:  # the most common case
        return made
    return _int32(made) if isinstance(made, _INTEGER) else made


def _wrapped(operation: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: _settled(operation(a, b))


def _divide(a: Any, b: Any) -> Any:
    return a / b if b else float(np.divide(a, b))


def _floor_divide(a: Any, b: Any) -> Any:
    whole = isinstance(a, _INTEGER) and isinstance(b, _INTEGER)
    return a // b if whole else float(np.floor(_divide(a, b)))


def _modulo(a: Any, b: Any) -> Any:
    if a.__class__ is b.__class__ is int and b:
        return a % b
    return a % b if b and math.isfinite(a) and math.isfinite(b) else a - _floor_divide(a, b) * b


def _power(a: Any, b: Any) -> Any:
    return a**b if isinstance(a, _INTEGER) and isinstance(b, _INTEGER) else _MATH["pow"](a, b)


def _step(of_numpy: Callable[[Any], Any]) -> Callable[[Any], int]:
    return lambda x: _int32(of_numpy(float(x)))


_MATH = SETTLED | {name: _step(getattr(np, name)) for name in ("floor", "ceil", "trunc")}
_INSTEAD: dict[int, Any] = {id(getattr(math, name)): value for name, value in _MATH.items()}
_INSTEAD |= {id(min): minimum, id(max): maximum, id(int): _int32}
_INSTEAD[id(math)] = SimpleNamespace(**vars(math) | _MATH)
_OPERATIONS = {
    ast.Div: _divide, ast.FloorDiv: _wrapped(_floor_divide), ast.Mod: _wrapped(_modulo),
    ast.Pow: _wrapped(_power), ast.LShift: _wrapped(operator.lshift),
}  # fmt: skip
_NAMES = {kind: f"_fa_{kind.__name__}" for kind in _OPERATIONS}
_KNOWN: dict[str, Any] = {_NAMES[kind]: operation for kind, operation in _OPERATIONS.items()}
_KNOWN |= {"_fa_float": float, "_fa_settled": _settled}


class _Operations(ast.NodeTransformer):
    """Replaces operators in a syntax tree by calls of functions such as ``_divide``.

    Sums, differences and products of floats need no call, and are the most frequent operations.
    Therefore ``a + b`` becomes ``made if (made := a + b).__class__ is float else settled(made)``,
    which calls a function only if the result is not a float.
    """

    def __init__(self) -> None:
        self.count = 0

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = _NAMES.get(type(node.op))
        if name:
            return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])
        if not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            return node
        self.count += 1
        made = ast.Name(f"_fa_made{self.count}", ast.Load())
        first = ast.NamedExpr(ast.Name(made.id, ast.Store()), node)
        kind = ast.Attribute(first, "__class__", ast.Load())
        usual = ast.Compare(kind, [ast.Is()], [ast.Name("_fa_float", ast.Load())])
        return ast.IfExp(usual, made, ast.Call(ast.Name("_fa_settled", ast.Load()), [made], []))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        whole = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], self.visit(whole))


def evaluating(source: Source, outside: Mapping[str, Any]) -> FunctionType:
    """Return a Python function for a caller's function, for evaluation in float64.

    ``source`` is the source of the caller's function. ``outside`` maps the names of captured values
    to the values that the result uses.
    """
    module = ast.parse(f"def mod({', '.join(source.parameters)}): pass")
    module.body[0].body = copy.deepcopy(source.body)  # type: ignore[attr-defined]
    whole = ast.fix_missing_locations(_Operations().visit(module))
    known: dict[str, Any] = {name: _INSTEAD.get(id(x), x) for name, x in outside.items()}
    known |= _KNOWN
    exec(compile(whole, source.shown, "exec"), known)
    return known["mod"]
