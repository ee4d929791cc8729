"""The walk over a caller's function: each expression becomes a statement, each value gets a type.

Python evaluates only one side of a conditional expression, and stops evaluating ``and``, ``or`` and
a chain of comparisons as soon as the result is known. An expression that Python may skip is written
under an ``if`` if it reads an array, because the index may be outside of the array.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from .allowed import (
    CALLS,
    CONSTANTS,
    LARGEST_POWER,
    PARAMETERS,
    STEPS,
    SYMBOLS,
    TRUTHS,
    Refused,
    undefined,
    what,
)
from .chain import ONE
from .kinds import Term
from .positions import Position, position_of
from .slopes import OF_MATH, Slopes
from .source import LEAST, Source

# Functions of parts/division.py that divide by an integer that is equal for all scores.
_BY_A_PRODUCT = {"//": "floor_divide", "%": "modulo"}


class Reader(Slopes):
    """Walks over one function, and writes the statements that compute its value and its slope.

    ``kinds`` maps the names of captured values to their kinds (``source.kind_of_capture``).
    ``captured`` maps names of captured values to fields of a kernel's ``options``. Methods whose
    names begin with a capital letter, such as ``BinOp``, write a node of that class of ``ast``.
    """

    def __init__(
        self, option: str, source: Source, kinds: dict[str, str], captured: dict[str, str]
    ) -> None:
        super().__init__(option, captured)
        self.source, self.kinds = source, kinds
        self.known: dict[str, Term] = {}
        # Slopes are derivatives with respect to: the score ("score"), or the element of a float32
        # array that is read as number n (an int). "" means that there are no slopes.
        self.by: str | int = ""
        self.reads = 0  # number of elements of float32 arrays that were read so far
        self.position: Position | None = None  # of the element ``by``
        for name, kind in kinds.items():
            if kind.partition("[")[0] in ("int32", "float32", "bool"):
                self.field(name)

    def result(self, by: str | int) -> Term:
        """Write the function and return its result.

        ``by`` says whether the slope (derivative) of each value is written, and with respect to
        what:

        by           what is written
        "score"      slopes with respect to the score
        an integer   slopes with respect to one element of a float32 array: the function may read
                     several elements, and ``by`` is the number of the element in their order
        ""           no slopes
        """
        self.by, self.reads, self.position = by, 0, None
        for theirs, ours in zip(self.source.parameters, PARAMETERS[self.option], strict=True):
            kind, of = "float" if ours == "score" else "int", ours if ours in ("i", "j") else ""
            self.known[theirs] = Term(kind, ours, ONE if ours == by else None, of)
        *before, last = self.source.body
        for statement in before:
            self.statement(statement)
        if not isinstance(last, ast.Return) or last.value is None:
            raise Refused(f"no return at its end, but {what(last)}", last)
        return self.visit(last.value)

    # --- statements --------------------------------------------------------------------------

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            whole = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
            self.assign(node.target, whole)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self.assign(node.targets[0], node.value)
        else:
            raise Refused(what(node), node)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = self.visit(value)
            return
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if not both or len(target.elts) != len(value.elts):  # type: ignore[attr-defined]
            raise Refused(f"an assignment to {ast.unparse(target)}", target)
        values = [self.visit(each) for each in value.elts]  # type: ignore[attr-defined]
        for each, term in zip(target.elts, values, strict=True):  # type: ignore[attr-defined]
            if not isinstance(each, ast.Name):
                raise Refused(f"an assignment to {ast.unparse(each)}", each)
            self.known[each.id] = term

    # --- names, constants and elements -------------------------------------------------------

    def visit(self, node: ast.expr) -> Term:
        """Write the statements of an expression, and return the value of the expression.

        The method with the name of the node's class does this. Raises ``Refused`` if there is no
        such method.
        """
        method: Callable[[Any], Term] | None = getattr(self, type(node).__name__, None)
        if method is None:
            raise Refused(what(node), node)
        return method(node)

    def Constant(self, node: ast.Constant) -> Term:
        value = node.value
        if isinstance(value, bool):
            return Term("bool", repr(value))
        if isinstance(value, int) and LEAST <= value < -LEAST:
            return Term("int", f"int32({value})", of="")
        if isinstance(value, float):
            return self.constant(value)
        raise Refused(f"the constant {value!r}", node)

    def constant(self, value: float) -> Term:
        known = {"inf": "math.inf", "nan": "math.nan"}.get(repr(value), repr(value))
        return Term("float", f"float32({known})")

    def Name(self, node: ast.Name) -> Term:
        if node.id in self.known:
            return self.known[node.id]
        kind = self.kind(node)
        if kind in ("int32", "float32"):
            return Term(kind.removesuffix("32"), self.captured[node.id], of="")
        if kind == "bool":
            return Term("bool", self.put(f"{self.captured[node.id]} != int32(0)"))
        raise Refused(f"{node.id} {'without an index' if '[' in kind else 'as a value'}", node)

    def kind(self, node: ast.Name) -> str:
        """Return the kind of a captured value. Raises ``Refused`` if kernels do not support it."""
        kind = self.kinds.get(node.id)
        if kind is None:
            raise undefined(node.id, node)
        if kind.startswith("?"):
            raise Refused(f"{node.id} ({kind[1:]})", node)
        return kind

    def of_outside(self, node: ast.Name) -> str:
        """Return the kind of a captured value, or "" if the name is assigned in the function."""
        return "" if node.id in self.known else self.kinds.get(node.id, "")

    def Attribute(self, node: ast.Attribute) -> Term:
        owner = node.value
        of_math = isinstance(owner, ast.Name) and self.of_outside(owner) == "math"
        if of_math and node.attr in CONSTANTS:
            return self.constant(getattr(math, node.attr))
        raise Refused(ast.unparse(node), node)

    def Subscript(self, node: ast.Subscript) -> Term:
        indices: list[ast.expr] = []
        array: ast.expr = node
        while isinstance(array, ast.Subscript):
            own = array.slice
            indices = [*(own.elts if isinstance(own, ast.Tuple) else [own]), *indices]
            array = array.value
        shape = isinstance(array, ast.Attribute) and array.attr == "shape"
        owner = array.value if shape else array  # type: ignore[attr-defined]
        if not isinstance(owner, ast.Name) or owner.id in self.known:
            raise Refused(f"an index of {ast.unparse(array)}", node)
        kind, _, axes = self.kind(owner).rstrip("]").partition("[")
        if not axes:
            raise Refused(f"an index of {owner.id} (not an array)", node)
        if shape:
            (axis,) = indices if len(indices) == 1 else (None,)
            number = getattr(axis, "value", None)
            if not isinstance(number, int) or not 0 <= number < int(axes):
                raise Refused(f"{ast.unparse(node)} (not an axis of {owner.id})", node)
            return self.length(owner.id, number)
        if len(indices) != int(axes):
            has = f"{axes} ax{'i' if axes == '1' else 'e'}s"
            raise Refused(f"{ast.unparse(node)} (where {owner.id} has {has})", node)
        return self.element(kind, owner.id, indices, node)

    def element(self, kind: str, name: str, indices: list[ast.expr], node: ast.expr) -> Term:
        """Write the statement that reads an element of a captured array, and return the element.

        ``kind`` is the array's dtype: "float32", "int32" or "bool". ``name`` is the caller's name
        of the array, ``indices`` are the expressions of the indices, and ``node`` is the complete
        expression, for error messages.
        """
        texts, near, apart = [], True, False
        for index in indices:
            term = self.visit(index)
            if term.kind != "int":
                raise Refused(f"the index {ast.unparse(index)} (not an integer)", node)
            last = index.operand if isinstance(index, ast.UnaryOp) else None
            if isinstance(last, ast.Constant) and ast.unparse(index)[0] == "-":
                raise Refused(f"the negative index {ast.unparse(index)}", node)
            near, apart = near and term.of == "", apart or term.apart
            texts.append(f"uint32({term.text})")
        self.inside = self.inside or not near
        element = self.put(f"{self.captured[name]}[{', '.join(texts)}]")
        if kind == "bool":
            return Term("bool", self.put(f"{element} != 0"))
        slope = None
        if kind == "float32":
            if self.reads == self.by:
                slope = ONE
                self.position = position_of(self, self.captured[name], texts, near, apart)
            self.reads += 1
        return Term(kind.removesuffix("32"), element, slope)

    def length(self, name: str, axis: int) -> Term:
        return Term("int", self.put(f"int32({self.captured[name]}.shape[{axis}])"))

    # --- operators ---------------------------------------------------------------------------

    def UnaryOp(self, node: ast.UnaryOp) -> Term:
        term = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return Term("bool", self.put(f"not {self.truth(term)}"))
        if isinstance(node.op, ast.Invert):
            if term.kind != "int":
                raise Refused(f"~ of {ast.unparse(node.operand)} (not an integer)", node)
            return Term("int", self.put(f"int32(~{term.text})"))
        if isinstance(node.op, ast.UAdd):
            kind = self.number_kind(term)
            return Term(kind, self.of_kind(kind, term), term.slope)
        return self.negative(term)

    def BinOp(self, node: ast.BinOp) -> Term:
        a, b = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Div):
            return self.quotient(a, b)
        if isinstance(node.op, ast.Pow):
            return self.raised(a, b, node)
        symbol = SYMBOLS.get(type(node.op))
        if symbol is None:
            raise Refused(f"the operator in {ast.unparse(node)}", node)
        if isinstance(node.op, (*TRUTHS, ast.LShift, ast.RShift)):
            if "float" in (a.kind, b.kind):
                raise Refused(f"{symbol} of a float in {ast.unparse(node)}", node)
            if isinstance(node.op, TRUTHS) and a.kind == b.kind == "bool":
                return Term("bool", self.put(f"{a.text} {symbol} {b.text}"))
        if "float" not in (a.kind, b.kind):
            return self.of_integers(a, symbol, b)
        left, right = self.as_float(a), self.as_float(b)
        if symbol in ("//", "%"):
            return self.remainder(left, right, symbol)
        return self.product(left, right) if symbol == "*" else self.sum_of(left, right, symbol)

    def of_integers(self, a: Term, symbol: str, b: Term) -> Term:
        """Write the statements of an operation with two integers, and return the result.

        ``symbol`` is the operator, such as "+".
        """
        left, right = self.integer(a), self.integer(b)
        if symbol in _BY_A_PRODUCT and self.is_shared(right):
            inverse = self.divisor(right)
            value = self.put(f"{_BY_A_PRODUCT[symbol]}({left}, {right}, {inverse})")
        else:
            value = self.put(f"int32({left} {symbol} {right})")
        of = a.of if a.of == b.of or not b.of else b.of if not a.of else "?"
        real = ""
        self.inside = self.inside or (symbol in ("//", "%") and b.of != "")
        if symbol == "-" and {a.of, b.of} == {"i", "j"}:
            # Relative to ``origin``, either the rows or the columns of a thread are constants.
            near = (f"float32(int32({side} - origin))" for side in (left, right))
            real = " - ".join(near)
        apart = symbol in "+-" and (
            {a.of, b.of} == {"i", "j"} or any(x.apart and y.of == "" for x, y in ((a, b), (b, a)))
        )
        return Term("int", value, None, of, real, apart)

    def raised(self, a: Term, b: Term, node: ast.expr) -> Term:
        """Write the statements of a to the power of b, and return the result.

        ``node`` is the expression in the source.
        """
        exponent = getattr(node, "right", None)
        times = exponent.value if isinstance(exponent, ast.Constant) else None
        if isinstance(times, int) and 1 <= times <= LARGEST_POWER:
            return self.repeated(a, times)
        if a.kind != "float" and b.kind != "float":
            raise Refused(f"{ast.unparse(node)} (integers with an exponent not 1 to 4)", node)
        return self.power(a, b)

    # --- conditions --------------------------------------------------------------------------

    def Compare(self, node: ast.Compare) -> Term:
        for op in node.ops:
            if type(op) not in SYMBOLS:
                raise Refused(f"the comparison in {ast.unparse(node)}", node)
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        result = self.put(self.compared(left, node.ops[0], right))
        self.chain(result, right, list(zip(node.ops, node.comparators, strict=True))[1:])
        return Term("bool", result)

    def chain(self, result: str, left: Term, rest: list[tuple[ast.cmpop, ast.expr]]) -> None:
        """Write the statements of the remaining comparisons of a chain such as ``a < b < c``.

        ``rest`` contains the remaining comparisons: the operator and the right side of each.
        ``result`` is the name of the result so far, and ``left`` is the left side of the next
        comparison. Each comparison is written under the condition that the previous one is true.
        """
        if not rest:
            return
        (op, other), *rest = rest
        outer, self.lines = self.lines, []
        right = self.visit(other)
        text = self.compared(left, op, right)
        self.further(result, True, text, outer, lambda: self.chain(result, right, rest))

    def further(
        self, result: str, conjunction: bool, text: str, outer: list[str], then: Callable[[], None]
    ) -> None:
        """Write the statement ``result = result and text``, or ``result = result or text``.

        Before the call, ``self.lines`` contains only the statements that compute the operands of
        ``text``.

        argument      meaning
        result        name of the result so far
        conjunction   True for "and", False for "or"
        text          the condition that is combined with the result
        outer         the statements that were written earlier
        then          function that is called afterwards. It writes the next comparisons of a chain
                      such as ``a < b < c``, or nothing

        Normally the statements are written without ``if``. If the condition reads an array, they
        are written under ``if result:``, or under ``if not result:`` for "or". The kernel then
        reads the array only where Python would evaluate the condition.
        """
        inner, self.lines = self.lines, outer
        self.names[result].shared = False
        if not any("[" in line for line in (*inner, text)):
            symbol = "&" if conjunction else "|"
            self.lines += [*inner, f"{result} = {result} {symbol} ({text})"]
            then()
            return
        with self.under(f"if {result}:" if conjunction else f"if not {result}:"):
            self.lines += [*inner, f"{result} = {text}"]
            then()

    def compared(self, a: Term, op: ast.cmpop, b: Term) -> str:
        kind = self.number_kind(a, b)
        if {a.text, b.text} == {"i", "j"}:  # relative to ``origin``, one of the two is a constant
            return f"int32({a.text} - origin) {SYMBOLS[type(op)]} int32({b.text} - origin)"
        return f"{self.of_kind(kind, a)} {SYMBOLS[type(op)]} {self.of_kind(kind, b)}"

    def BoolOp(self, node: ast.BoolOp) -> Term:
        conjunction = isinstance(node.op, ast.And)
        first, *rest = node.values
        result = self.put(self.condition(first, node))
        for value in rest:
            outer, self.lines = self.lines, []
            text = self.condition(value, node)
            self.further(result, conjunction, text, outer, lambda: None)
        return Term("bool", result)

    def condition(self, value: ast.expr, node: ast.expr) -> str:
        term = self.visit(value)
        if term.kind != "bool":
            raise Refused(f"{ast.unparse(value)} (not a bool) in {ast.unparse(node)}", node)
        return term.text

    def IfExp(self, node: ast.IfExp) -> Term:
        test = self.truth(self.visit(node.test))
        outer, sides = self.lines, []
        for side in (node.body, node.orelse):
            self.lines = []
            term = self.visit(side)
            sides.append((self.lines, term))
        self.lines = outer
        return self.choice(test, sides)

    # --- calls -------------------------------------------------------------------------------

    def Call(self, node: ast.Call) -> Term:
        name, of_math = self.called(node.func)
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise Refused(f"{ast.unparse(node)} (keyword arguments or *)", node)
        one = len(node.args) == 1
        if of_math and name == "pow" and len(node.args) == 2:
            left, right = map(self.visit, node.args)
            return self.raised(self.as_float(left), right, node)
        if of_math and one and name in STEPS:
            x = self.real(self.visit(node.args[0]))
            return Term("int", self.put(f"int32(math.{name}({x}))"))
        if of_math and one and name in OF_MATH:
            return self.of_math(name, self.visit(node.args[0]))
        if name == "len" and one and isinstance(node.args[0], ast.Name):
            array = node.args[0]
            if "[" in self.of_outside(array):
                return self.length(array.id, 0)
        if not of_math and name in ("min", "max") and len(node.args) > 1:
            return self.extreme(name, [self.visit(arg) for arg in node.args])
        if not of_math and one and name in ("abs", "int", "float", "bool"):
            return self.converted(name, self.visit(node.args[0]))
        raise Refused(f"the call {ast.unparse(node)}", node)

    def called(self, function: ast.expr) -> tuple[str, bool]:
        """Return the name of the called function, and whether it is a function of ``math``.

        Raise Refused if the function's name is not defined, or if device code cannot call the
        function.
        """
        if isinstance(function, ast.Name):
            kind = self.of_outside(function)
            if kind.startswith("call "):
                name = kind.removeprefix("call ")
                return name, name not in CALLS
        owner = function.value if isinstance(function, ast.Attribute) else None
        if isinstance(owner, ast.Name) and self.of_outside(owner) == "math":
            return function.attr, True  # type: ignore[attr-defined]
        named = owner or function
        if isinstance(named, ast.Name) and not {named.id} & {*self.known, *self.kinds}:
            raise undefined(named.id, function)
        raise Refused(f"a call of {ast.unparse(function)}", function)

    def converted(self, name: str, term: Term) -> Term:
        """Write the statements of the call ``name(term)``, and return the result.

        ``name`` is "abs", "int", "float" or "bool".
        """
        if name == "bool":
            return Term("bool", self.truth(term))
        if name == "float":
            return self.as_float(term)
        if name == "int":
            return Term("int", self.put(f"int32({term.text})"))
        return self.absolute(term)
