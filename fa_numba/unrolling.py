"""Loops written out before Numba sees them: ``for k in unrolled(K)``.

LLVM unrolls a loop only up to a size, and a loop that it leaves rolled puts register tiles in local
memory or keeps the loads of one step from running ahead of the products of the one before.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

# What a loop over ``unrolled(n)`` is where it is not written out.
unrolled = range


def with_loops_unrolled(function: Callable) -> Callable:
    """``function`` with every loop over ``unrolled(n)`` written out n times.

    n is known where the function is made: from literals, globals, variables of the enclosing
    function, and indices of unrolled loops around. Raises SyntaxError where it is not, and for a
    loop with ``break``, ``continue`` or ``else``.
    """
    if "unrolled" not in function.__code__.co_names:
        return function
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    free = inspect.getclosurevars(function).nonlocals
    free = {name: free[name] for name in function.__code__.co_freevars}
    definition = _Unroll(function.__globals__ | free).visit(definition)
    # The free variables become parameters of a function around.
    around = ast.parse(f"def around({', '.join(free)}): return {definition.name}")
    around.body[0].body.insert(0, definition)  # type: ignore[attr-defined]
    ast.increment_lineno(around, first - 1)
    namespace: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(around), function.__code__.co_filename, "exec")
    exec(code, function.__globals__, namespace)
    made = namespace["around"](**free)
    made.__qualname__ = function.__qualname__
    return made


class _Unroll(ast.NodeTransformer):
    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "unrolled"):
            return self.generic_visit(node)
        inside = [n for statement in node.body for n in ast.walk(statement)]
        if node.orelse or any(isinstance(n, ast.Break | ast.Continue) for n in inside):
            raise SyntaxError("an unrolled loop has no break, continue or else")
        assert isinstance(node.target, ast.Name)
        bounds = []
        for argument in call.args:
            expression = ast.fix_missing_locations(ast.Expression(copy.deepcopy(argument)))
            try:
                bounds.append(eval(compile(expression, "<bounds>", "eval"), dict(self.known)))
            except NameError as error:
                raise SyntaxError(
                    f"the bounds of an unrolled loop are not known: {error}"
                ) from None
        written: list[ast.stmt] = []
        for value in range(*bounds):
            put = _Put(node.target.id, value)
            for statement in node.body:
                made = self.visit(put.visit(copy.deepcopy(statement)))
                written += made if isinstance(made, list) else [made]
        return written


class _Put(ast.NodeTransformer):
    """A value in the place of a name."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Constant(self.value), node) if node.id == self.name else node
