"""Rewrites the expressions of a kernel so that one evaluation computes all lanes.

`rewrite.py` rewrites the statements.
"""

from __future__ import annotations

import ast
import copy

from .syntax import (
    BITWISE,
    OPERATORS,
    PURE,
    TRUTHS,
    call,
    class_is,
    is_negative,
    is_pure,
    method,
    runtime,
    statements_within,
)


class Expressions(ast.NodeTransformer):
    """The visitor that rewrites expressions. The visitor of `rewrite.py` is a subclass of it."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.count = 0
        self.doubles: dict[str, ast.Constant] = {}  # float literals, by the name that replaces them
        self.truths: set[str] = set()  # variables that may hold truth values
        for each in statements_within(function):
            if isinstance(each, ast.Assign) and self.may_be_truth(each.value):
                self.truths |= {x.id for x in each.targets if isinstance(x, ast.Name)}

    def temporary(self, kind: str) -> str:
        """Return a new name, which begins with `kind`, for a temporary variable."""
        self.count += 1
        return f"{kind}{self.count}"

    def operation(self, left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
        """Return a binary operation of a rewritten function.

        If Python could raise an error for a divisor of 0, the operation is a call of the emulator.
        Otherwise it is Python's operator.
        """
        name = OPERATORS.get(type(op))
        if not isinstance(op, BITWISE):
            left, right = self.number(left), self.number(right)
        if name is None or (isinstance(right, ast.Constant) and right.value):
            return ast.BinOp(left, op, right)
        return call(name, left, right)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, float):
            return node
        name = next((n for n, c in self.doubles.items() if repr(c.value) == repr(node.value)), "")
        name = name or self.temporary("f")
        self.doubles[name] = node
        return runtime(name)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        cast = isinstance(node.func, ast.Name) and node.func.id in PURE
        if cast and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            return node
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Mark literal negative indices: they count from the end of the axis, as in Python."""
        for each in ast.walk(node.slice):
            if isinstance(each, ast.Tuple):
                each.elts = [call("from_end", x) if is_negative(x) else x for x in each.elts]
        if is_negative(node.slice):
            node.slice = call("from_end", node.slice)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self.operation(self.visit(node.left), node.op, self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return call("negation", value)
        return ast.UnaryOp(node.op, self.number(value))

    def number(self, value: ast.expr) -> ast.expr:
        """Return an operand of an arithmetic operation, in which truth values become 0 or 1."""
        return call("number", value) if self.may_be_truth(value) else value

    def may_be_truth(self, value: ast.AST | None) -> bool:
        """Return whether the value of an expression may be a truth value."""
        if isinstance(value, ast.Name):
            return value.id in self.truths
        if isinstance(value, ast.IfExp):
            return self.may_be_truth(value.body) or self.may_be_truth(value.orelse)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return value.func.id in TRUTHS
        return (
            isinstance(value, (ast.Compare, ast.BoolOp))
            or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not))
            or (
                isinstance(value, ast.BinOp)
                and isinstance(value.op, BITWISE)
                and self.may_be_truth(value.left)
                and self.may_be_truth(value.right)
            )
        )

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) > 1:
            pairs: list[ast.expr] = []
            left = node.left
            for op, right in zip(node.ops, node.comparators, strict=True):
                pairs.append(ast.Compare(left, [op], [right]))
                left = copy.deepcopy(right)
            return self.visit(ast.BoolOp(ast.And(), pairs))
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        (op,) = node.ops
        return ast.Compare(left, [op], [right])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        conjunction = isinstance(node.op, ast.And)
        joined = "both" if conjunction else "any"
        made = self.visit(node.values[0])
        for value in node.values[1:]:
            pure, right = is_pure(value), self.visit(value)
            name = self.temporary("x")
            first = ast.NamedExpr(runtime(name, True), made)
            plain = ast.BoolOp(node.op, [runtime(name), right])
            if pure:
                lanes: ast.expr = call(joined, runtime(name), right)
            else:
                lanes = ast.IfExp(
                    method(runtime("C"), "only" if conjunction else "unless", runtime(name)),
                    method(runtime("C"), "then", runtime(joined), runtime(name), right),
                    method(runtime("C"), "then_none", runtime(name)),
                )
            made = ast.IfExp(class_is(first, "array", True), plain, lanes)
        return made

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        pure = is_pure(node.body) and is_pure(node.orelse)
        name = self.temporary("x")
        test = ast.NamedExpr(runtime(name, True), self.visit(node.test))
        body, otherwise = self.visit(node.body), self.visit(node.orelse)
        plain = ast.IfExp(runtime(name), body, otherwise)
        if pure:
            lanes = call("where", runtime(name), body, otherwise)
        else:
            one = ast.IfExp(method(runtime("C"), "only", runtime(name)), body, runtime("undefined"))
            other = ast.IfExp(
                method(runtime("C"), "others", runtime(name)), otherwise, runtime("undefined")
            )
            lanes = method(runtime("C"), "chosen", runtime(name), one, other)
        return ast.IfExp(class_is(test, "array", True), plain, lanes)
