"""Rewrites a kernel's source so that one run computes all lanes of a group.

This module's visitor rewrites the statements. The visitor of `expressions.py` rewrites expressions.

In the rewritten function a value is a Python number if it is equal in all lanes, else a NumPy array
over the lanes. In Python, one value decides in `if`, `while`, `and`, `or` and conditional
expressions. If this value is an array, the rewritten function calls `flow.py`. Each branch then
runs under a mask, for the lanes that take it. Its assignments are merged with the other lanes'
values. Most operators, calls and subscripts stay unchanged, since NumPy arrays and the emulator's
arrays define them. A few expressions become calls of the emulator, such as divisions, `not`, and
literal negative indices.

Lanes may disagree on a `break`, `continue` or `return`. In functions outside of this package, they
then use a second version of the function (`masked`), in which the lanes that have left are masked
out. In functions of this package, and in kernels with mbarriers, such lanes form separate groups
instead.

Names that begin with `_fa_` are the emulator's. The rewritten code keeps the line numbers of the
source.
"""

from __future__ import annotations

import ast
import copy
from types import CodeType
from typing import Any

from .errors import WrongType
from .expressions import Expressions
from .source_lines import definition
from .syntax import (
    LEAVING,
    assign,
    assigned_within,
    call,
    class_is,
    context,
    exits,
    is_atomic,
    is_same,
    leaves,
    method,
    multiply_add_chain,
    negated,
    returns,
    runtime,
    set_mask,
    when,
)
from .widths import is_checked, message

# Cache: maps (id of the code, masked) to the code, the rewritten code and the names it takes.
_rewritten: dict[tuple[int, bool], tuple[CodeType, CodeType, frozenset[str]]] = {}


def rewritten(code: CodeType, masked: bool = False) -> tuple[CodeType, frozenset[str]]:
    """Return the rewritten code of a function, and the global and closure names that it reads.

    If `masked`, lanes may disagree on a `break`, `continue` or `return`.

    Raises ValueError if the source is not available, or has statements that are not supported, such
    as `try`, `with`, `yield`, `else` of a loop, or a function inside the function. Raises WrongType
    if a kernel of this package has a variable that Numba would make 64 bits wide.
    """
    known = _rewritten.get((id(code), masked))
    if known is None or known[0] is not code:
        known = _rewritten[id(code), masked] = (code, *_rewrite(code, masked))
    return known[1], known[2]


def _rewrite(code: CodeType, masked: bool) -> tuple[CodeType, frozenset[str]]:
    """Return the rewritten code of a function, and the global and closure names that it reads.

    If `masked`, lanes may disagree on a `break`, `continue` or `return`. `rewritten` describes the
    errors, and stores the result.
    """
    name = code.co_name
    place = f"function {name} ({code.co_filename}, line {code.co_firstlineno})"
    found = definition(code)
    if found is None:
        raise ValueError(
            "the emulator runs a kernel from its source text, which must be in a file or a "
            f"notebook's cell, got {place}, whose source is not available"
        )
    if is_checked(code.co_filename) and (wide := message(found, code.co_filename)):
        raise WrongType(wide)
    try:
        node = _Function(found, masked).rewritten()
    except _Unsupported as error:
        raise ValueError(
            f"the emulator does not support {error} in a kernel, got {place}"
        ) from None
    mentioned = _place(node)
    module = ast.Module(body=[node], type_ignores=[])
    whole = compile(module, code.co_filename, "exec", dont_inherit=True)
    (function,) = [c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == name]
    return function, frozenset(_names(function, mentioned))


def _place(function: ast.FunctionDef) -> set[str]:
    """Add missing line numbers to a syntax tree, and return all names that the tree contains.

    A node without a line number gets the line number of the node that contains it. The resulting
    line numbers equal the numbers of `ast.fix_missing_locations`.
    """
    mentioned: set[str] = set()
    left: list[tuple[Any, tuple[int, int, int, int]]] = [(function, (1, 0, 1, 0))]
    while left:
        node, place = left.pop()
        known = vars(node)
        if node.__class__ is ast.Name:
            mentioned.add(node.id)
        if "lineno" in known:
            if known.get("end_lineno") is None:
                node.end_lineno = place[2]
            if known.get("end_col_offset") is None:
                node.end_col_offset = place[3]
            place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
        elif node._attributes:
            node.lineno, node.col_offset, node.end_lineno, node.end_col_offset = place
        inside: list[Any] = []
        for name in node._fields:
            part = known.get(name)
            if part.__class__ is list:
                inside += part
            elif isinstance(part, ast.AST):
                inside.append(part)
        # In the order of the fields: of a node at two places, the first one counts.
        left += [(each, place) for each in reversed(inside) if isinstance(each, ast.AST)]
    return mentioned


def _names(code: CodeType, mentioned: set[str]) -> set[str]:
    """Return which of the mentioned names the code reads from outside of the function."""
    names = mentioned.intersection(code.co_names).difference(code.co_varnames, code.co_cellvars)
    names = names.difference(code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant, mentioned)
    return names


class _Unsupported(Exception):
    """Raised for a statement that the emulator does not support. The argument names it."""

    pass


def _refused(what: str) -> Any:
    """Return a method for the visitor that raises `_Unsupported` with the text `what`."""

    def visit(self: Any, node: ast.AST) -> ast.AST:
        raise _Unsupported(what)

    return visit


class _Function(Expressions):
    """The visitor that rewrites one function.

    `depth` is the number of branches and loops around the current statement. `masked` says whether
    lanes may disagree on a `break`, `continue` or `return`.
    """

    def __init__(self, node: ast.FunctionDef, masked: bool) -> None:
        super().__init__(node)
        self.node = node
        self.depth = 0
        self.masked = masked and any(isinstance(each, LEAVING) for each in ast.walk(node))

    def rewritten(self) -> ast.FunctionDef:
        """Return the syntax tree of the rewritten function."""
        node = self.node
        parameters = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        assigned = sorted(assigned_within(node.body) - parameters)
        start: list[ast.stmt] = [assign(runtime("entry", True), context("mask"))]
        if assigned:
            targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in assigned]
            start.append(ast.Assign(targets, runtime("undefined")))
        if self.masked:
            start.append(assign(runtime("exits", True), method(runtime("C"), "exits")))
        body = self.block(node.body)
        if self.masked:
            body.append(self.at(node.body[-1], ast.Return(exits("done"))))  # type: ignore[arg-type]
        for name, constant in self.doubles.items():
            start.append(assign(runtime(name, True), call("double", constant)))
        for line in start:
            self.at(node.body[0], line)
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
        node.decorator_list, node.returns = [], None
        node.body = [*start, *body]
        return node

    def at(self, place: ast.AST, node: ast.AST) -> ast.AST:
        """Give `node` the line number of `place` if it has none, and return `node`."""
        return node if hasattr(node, "lineno") else ast.copy_location(node, place)

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return the rewritten statements of a list of statements."""
        made: list[ast.stmt] = []
        taken = 0
        for n, statement in enumerate(statements):
            if n < taken:
                continue
            chain = multiply_add_chain(statements[n:])
            if chain:
                taken = n + len(chain)
                new: Any = self.in_turn(chain)
            else:
                new = self.visit(statement)
            new = new if isinstance(new, list) else [new]
            rest = statements[n + 1 :]
            if self.masked and rest and leaves([statement]):
                # Lanes may have left: continue with the others, if there are any.
                mask = self.temporary("m")
                left = exits("settle", runtime(mask))
                new = [assign(runtime(mask, True), context("mask")), *new]
                if not isinstance(statement, LEAVING):
                    new.append(when(left, self.block(rest)))
                taken = len(statements)
            for each in new:
                self.at(statement, each)
            made += new
        return made

    def inner(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return the rewritten statements of the body of a branch or loop."""
        self.depth += 1
        made = self.block(statements) or [ast.Pass()]
        self.depth -= 1
        return made

    visit_FunctionDef = _refused("a function within")
    visit_Try, visit_With = _refused("a try statement"), _refused("a with statement")
    visit_NamedExpr = _refused("an assignment within an expression")
    visit_Yield, visit_Lambda = (
        _refused("a yield statement or generator expression"),
        _refused("a function within"),
    )
    visit_AnnAssign = _refused("an annotation")

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        value = self.visit(node.value)
        if len(node.targets) == 1:
            return self.store(node.targets[0], value)
        named = [target.id for target in node.targets if isinstance(target, ast.Name)]
        one = f"{self.temporary('t')}_{named[0] if named else ''}"
        made: list[ast.stmt] = [assign(runtime(one, True), value)]
        for target in node.targets:
            made += self.store(target, runtime(one))
        return made

    def store(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        """Return statements for `target = value`, which assign in the lanes of the mask only."""
        if isinstance(target, ast.Subscript):
            return [assign(self.visit(target), value)]
        if isinstance(target, ast.Name) and self.depth:
            # `source_lines.assigned_name` finds the name of a new array in this name.
            new = f"new_{target.id}"
            merged = call("merge", context("mask"), ast.Name(target.id, ast.Load()), runtime(new))
            every: ast.expr = is_same(context("mask"), runtime("entry"))
            if self.masked:
                every = exits("everyone")
            kept = ast.IfExp(every, runtime(new), merged)
            return [assign(runtime(new, True), value), assign(target, kept)]
        if isinstance(target, (ast.Tuple, ast.List)) and (
            self.depth or not all(isinstance(each, ast.Name) for each in target.elts)
        ):
            # `source_lines.assigned_name` finds the target's name in the temporary variable's name.
            names = [f"{self.temporary('t')}_{getattr(x, 'id', '')}" for x in target.elts]
            whole = ast.Tuple([runtime(each, True) for each in names], ast.Store())
            made: list[ast.stmt] = [assign(whole, value)]
            for each, name in zip(target.elts, names, strict=True):
                made += self.store(each, runtime(name))
            return made
        return [assign(target, value)]

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        made = self.visit(node.value)
        if isinstance(made, ast.Call) and not made.keywords and is_atomic(made.func):
            made = method(runtime("C"), "unused", made.func, *made.args)
        return [ast.Expr(made)]

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        target, value = node.target, self.visit(node.value)
        if isinstance(target, ast.Name):
            old: ast.expr = ast.Name(target.id, ast.Load())
            return self.store(target, self.operation(old, node.op, value))
        if not isinstance(target, ast.Subscript):
            raise _Unsupported("an assignment to an attribute")
        array, index = self.visit(target.value), self.visit(target.slice)
        owner, key = self.temporary("t"), self.temporary("t")
        one = ast.Subscript(runtime(owner), runtime(key), ast.Load())
        return [
            assign(runtime(owner, True), array),
            assign(runtime(key, True), index),
            assign(
                ast.Subscript(runtime(owner), runtime(key), ast.Store()),
                self.operation(one, node.op, value),
            ),
        ]

    def in_turn(self, chain: list[ast.AugAssign]) -> list[ast.stmt]:
        """Return statements that compute a chain of multiply-adds, such as ``x[0] += a * b``.

        If possible, one call of the emulator computes all multiply-adds of the chain, because this
        is faster. It is not possible if a later multiply-add reads an element that an earlier
        multiply-add updates:

        - If the factors of the later multiply-adds contain no array elements, the chain is one
          call.
        - If they contain elements of other arrays, these arrays may share memory with the updated
          array. The statements test this at run time. A LocalArray shares no memory with other
          arrays, and the chain is one call. For any other class, each multiply-add is one call.
        """
        if not any(isinstance(x, ast.Subscript) for c in chain[1:] for x in ast.walk(c.value)):
            return self.multiply_adds(chain)
        array = copy.deepcopy(chain[0].target.value)  # type: ignore[union-attr]
        single = [one for each in copy.deepcopy(chain) for one in self.multiply_adds([each])]
        return [ast.If(class_is(array, "LocalArray"), self.multiply_adds(chain), single)]

    def multiply_adds(self, chain: list[ast.AugAssign]) -> list[ast.stmt]:
        """Return one call for a chain of `array[index] += a * b`, which adds in the same order."""
        terms: list[ast.expr] = []
        for each in chain:
            assert isinstance(each.target, ast.Subscript) and isinstance(each.value, ast.BinOp)
            terms += map(self.visit, (each.target.slice, each.value.left, each.value.right))
        assert isinstance(chain[0].target, ast.Subscript)
        return [ast.Expr(call("multiply_add", self.visit(chain[0].target.value), *terms))]

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        name = self.temporary("b")
        test = self.visit(node.test)
        made: list[ast.stmt] = [assign(runtime(name, True), test)]
        if leaves([node]) and not self.masked:
            made.append(self.agreed(name))
            return [*made, ast.If(runtime(name), self.inner(node.body), self.inner(node.orelse))]
        divide = assign(runtime(name, True), method(runtime("C"), "split", runtime(name)))
        made.append(when(class_is(runtime(name), "array"), [divide]))
        joins = when(class_is(runtime(name), "Split"), [ast.Expr(method(runtime(name), "join"))])
        body = self.inner(node.body)
        if not node.orelse:
            return [*made, when(runtime(name), [*body, joins])]
        otherwise = self.inner(node.orelse)
        made.append(when(runtime(name), body))
        turn = when(class_is(runtime(name), "Split"), [ast.Expr(method(runtime(name), "turn"))])
        made.append(turn)
        either = ast.BoolOp(ast.Or(), [negated(runtime(name)), class_is(runtime(name), "Split")])
        return [*made, when(either, otherwise), joins]

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        error = ast.Call(ast.Name("AssertionError", ast.Load()), [node.msg] if node.msg else [], [])
        failed: ast.stmt = ast.If(negated(node.test), [ast.Raise(error)], [])
        for each in ast.walk(failed):
            self.at(node, each)
        return self.visit_If(failed)  # type: ignore[arg-type]

    def visit_Return(self, node: ast.Return) -> Any:
        value = [self.visit(node.value)] if node.value else []
        if self.masked:
            return [ast.Expr(exits("returns", *value))]
        return ast.Return(value[0] if value else None)

    def visit_Break(self, node: ast.Break) -> Any:
        return [ast.Expr(exits("breaks"))] if self.masked else node

    def visit_Continue(self, node: ast.Continue) -> Any:
        return [ast.Expr(exits("continues"))] if self.masked else node

    def agreed(self, name: str, how: str = "agree") -> ast.stmt:
        """Return a statement that replaces an array over the lanes by a single value.

        The statement tests whether the value of the variable `name` is such an array. If so, it
        calls the launch's method `how` with the array, and assigns the result to the variable. The
        method `agree`, for example, returns the value on which all lanes agree.
        """
        one = assign(runtime(name, True), method(runtime("C"), how, runtime(name)))
        return when(class_is(runtime(name), "array"), [one])

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        name = self.temporary("b")
        test = [
            ast.Expr(method(runtime("C"), "tick")),
            assign(runtime(name, True), self.visit(node.test)),
            self.agreed(name, "agree" if returns(node.body) and not self.masked else "narrow"),
            when(negated(runtime(name)), [ast.Break()]),
        ]
        body = self.body(node)
        return self.loop(node, ast.While(ast.Constant(True), [*test, *body], node.orelse))

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        if returns(node.body) and isinstance(node.iter, ast.Call) and not self.masked:
            node.iter.args = [method(runtime("C"), "agree", x) for x in node.iter.args]
        iterated = self.visit(node.iter)
        one = self.temporary("t")
        self.depth += 1
        taken = self.store(node.target, runtime(one))
        self.depth -= 1
        body = [*taken, *self.body(node)]
        return self.loop(node, ast.For(runtime(one, True), iterated, body, node.orelse))

    def body(self, node: ast.While | ast.For) -> list[ast.stmt]:
        """Return the rewritten body of a loop. The loop ends when all its lanes have left it."""
        if not (self.masked and leaves(node.body)):
            return self.inner(node.body)
        last = when(negated(exits("again")), [ast.Break()])
        return [ast.Expr(exits("enter")), *self.inner(node.body), last]

    def loop(self, node: ast.While | ast.For, made: ast.While | ast.For) -> list[ast.stmt]:
        """Return statements for a loop and for its end.

        `node` is the loop before rewriting, and `made` is the rewritten loop. After the loop, all
        lanes that entered the loop take part again, apart from lanes that have returned from the
        function.
        """
        if made.orelse:
            raise _Unsupported("the else of a loop")
        whole = self.temporary("w")
        start = assign(runtime(whole, True), context("mask"))
        if self.masked and leaves(node.body):
            end = ast.Expr(exits("ended", runtime(whole)))
            return [start, ast.Expr(exits("loop")), made, end]
        return [start, made, set_mask(runtime(whole))]
