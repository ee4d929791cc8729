"""A kernel's source rewritten so that one run of it stands for all lanes that agree.

In the rewritten function a value is a Python number where all lanes have the same, and a NumPy
array over the lanes where they may not. What Python decides by one value, `if`, `while`, `and`, a
conditional expression, is handed to `flow.py` where that value is an array: each side then runs for
the lanes that take it, under a mask, and what it assigns is merged into what the others keep.
Operators, calls and subscripts stay as they are: arrays and the emulator's memory understand them.

Names that begin with `_fa_` are the emulator's; line numbers stay those of the source.
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

PREFIX = "_fa_"
# Calls that neither touch memory nor meet other threads: they may be made for lanes that go unused.
PURE = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "int", "float", "bool", "min", "max", "abs", "len"]
)
OPERATORS = {ast.Div: "divide", ast.FloorDiv: "floor_divide", ast.Mod: "modulo", ast.Pow: "power"}
BITWISE = (ast.BitAnd, ast.BitOr, ast.BitXor)
# Calls that give truth values.
TRUTHS = ("bool", *(PREFIX + name for name in ("negation", "contained", "equal", "both", "any")))
MOST_ADDS = 8
BLOCKS = (ast.If, ast.While, ast.For, ast.With, ast.Try)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_rewritten: dict[int, tuple[CodeType, CodeType, frozenset[str]]] = {}


def rewritten(code: CodeType) -> tuple[CodeType, frozenset[str]]:
    """The rewritten code of a function, and the names that it takes from outside.

    Raises ValueError for a function whose source is not at hand or that has what a kernel has not:
    generators, `try`, `with`, `else` of a loop.
    """
    known = _rewritten.get(id(code))
    if known is None or known[0] is not code:
        known = _rewritten[id(code)] = (code, *_rewrite(code))
    return known[1], known[2]


@lru_cache(maxsize=256)
def _definitions(filename: str, text: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Functions of a file by name and first line, that of the first decorator.

    Whoever takes one takes it out: rewriting changes it.
    """
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name, first] = node
    return found


def _rewrite(code: CodeType) -> tuple[CodeType, frozenset[str]]:
    lines = linecache.getlines(code.co_filename)
    place = f"{code.co_name}, {code.co_filename}:{code.co_firstlineno}"
    file, key = (code.co_filename, "".join(lines)), (code.co_name, code.co_firstlineno)
    if lines and key not in _definitions(*file):
        _definitions.cache_clear()  # taken out before, for another code object of this source
    found = _definitions(*file).pop(key, None) if lines else None
    if found is None:
        raise ValueError(f"the source of {place} is not at hand: the emulator runs from source")
    try:
        node = _Function(found).rewritten()
    except _Unsupported as error:
        raise ValueError(f"{error} in {place}: the emulator has no such thing") from None
    module = ast.Module(body=[node], type_ignores=[])
    ast.fix_missing_locations(module)
    whole = compile(module, code.co_filename, "exec", dont_inherit=True)
    (function,) = [
        c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == code.co_name
    ]
    return function, frozenset(_names(function))


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


class _Unsupported(Exception):
    pass


def _name(name: str, store: bool = False) -> ast.Name:
    return ast.Name(PREFIX + name, ast.Store() if store else ast.Load())


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(_name(name), list(args), [])


def _context(name: str) -> ast.Attribute:
    return ast.Attribute(_name("C"), name, ast.Load())


def _method(owner: ast.expr, name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(owner, name, ast.Load()), list(args), [])


def _assign(target: ast.expr, value: ast.expr) -> ast.Assign:
    return ast.Assign([target], value)


def _set_mask(value: ast.expr) -> ast.Assign:
    return _assign(ast.Attribute(_name("C"), "mask", ast.Store()), value)


def _is(value: ast.expr, other: ast.expr, negated: bool = False) -> ast.Compare:
    return ast.Compare(value, [ast.IsNot() if negated else ast.Is()], [other])


def _class_is(value: ast.expr, name: str, negated: bool = False) -> ast.Compare:
    return _is(ast.Attribute(value, "__class__", ast.Load()), _name(name), negated)


def _not(value: ast.expr) -> ast.UnaryOp:
    return ast.UnaryOp(ast.Not(), value)


def _if(test: ast.expr, body: list[ast.stmt]) -> ast.If:
    return ast.If(test, body, [])


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements within a statement."""
    found = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return [] if isinstance(node, DEFINITIONS) else found


def _jumps(statements: Iterable[ast.stmt], *kinds: type[ast.stmt]) -> bool:
    """Whether there is a `break` or `continue` of the loop that these are the body of."""
    for node in statements:
        if isinstance(node, kinds):
            return True
        if isinstance(node, (ast.While, ast.For)):
            continue
        if any(_jumps(block, *kinds) for block in _blocks(node)):
            return True
    return False


def _returns(statements: Iterable[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Return) or any(map(_returns, _blocks(node))) for node in statements
    )


def _assigned(statements: Iterable[ast.stmt], within: bool = False) -> set[str]:
    """The names that statements within others assign."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, DEFINITIONS):
            continue
        inner = _blocks(node)
        for block in inner:
            names |= _assigned(block, True)
        targets = getattr(node, "targets", []) + [getattr(node, "target", None)]
        if within or isinstance(node, ast.For):
            names |= {
                each.id
                for target in targets
                if target is not None
                for each in ast.walk(target)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return names


class _Function(ast.NodeTransformer):
    """Rewrites one function."""

    def __init__(self, node: ast.FunctionDef) -> None:
        self.node = node
        self.depth = 0
        self.count = 0
        self.truths: set[str] = set()  # variables that may hold truth values
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and self.may_be_truth(each.value):
                self.truths |= {x.id for x in each.targets if isinstance(x, ast.Name)}
        body = node.body
        last = body[-1]
        self.returns_early = _returns(body[:-1] if isinstance(last, ast.Return) else body)

    def rewritten(self) -> ast.FunctionDef:
        node = self.node
        parameters = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        assigned = sorted(_assigned(node.body) - parameters)
        start: list[ast.stmt] = [_assign(_name("entry", True), _context("mask"))]
        if assigned:
            targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in assigned]
            start.append(ast.Assign(targets, _name("undefined")))
        end: list[ast.stmt] = []
        if self.returns_early:
            start.append(_assign(_name("returned", True), _name("nobody")))
            start.append(_assign(_name("result", True), ast.Constant(None)))
            end.append(_set_mask(_name("entry")))
            end.append(ast.Return(_name("result")))
        body = self.block(node.body)
        for line in (*start, *end):
            self.at(node.body[0], line)
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
        node.decorator_list, node.returns = [], None
        node.body = [*start, *body, *end]
        return node

    def at(self, place: ast.AST, node: ast.AST) -> ast.AST:
        """`node` on the line of `place`, if it has none; what is in it follows in the end."""
        return node if hasattr(node, "lineno") else ast.copy_location(node, place)

    def temporary(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    # ---- statements

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Rewritten statements; those after one that lanes may leave by are guarded."""
        made: list[ast.stmt] = []
        taken = 0
        for n, statement in enumerate(statements):
            if n < taken:
                continue
            chain = _chain(statements[n:])
            if chain:
                taken = n + len(chain)
                new: Any = self.in_turn(chain)
            else:
                new = self.visit(statement)
            new = new if isinstance(new, list) else [new]
            for each in new:
                self.at(statement, each)
            made += new
            rest = statements[n + 1 :]
            if rest and isinstance(statement, BLOCKS) and self.leaves(statement):
                guard = _if(_is(_context("mask"), _name("nobody"), True), self.block(rest))
                made.append(self.at(rest[0], guard))  # type: ignore[arg-type]
                break
            if isinstance(statement, (ast.Break, ast.Continue, ast.Return)):
                break
        return made

    def leaves(self, statement: ast.stmt) -> bool:
        """Whether lanes may leave the block that `statement` stands in from within it."""
        if _returns([statement]):
            return True
        if isinstance(statement, (ast.While, ast.For)):
            return False
        return _jumps([statement], ast.Break, ast.Continue)

    def inner(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        self.depth += 1
        made = self.block(statements) or [ast.Pass()]
        self.depth -= 1
        return made

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        raise _Unsupported("a function within")

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        raise _Unsupported("a try statement")

    def visit_With(self, node: ast.With) -> ast.AST:
        raise _Unsupported("a with statement")

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        raise _Unsupported("an assignment within an expression")

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        raise _Unsupported("a generator")

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        value = self.visit(node.value)
        if len(node.targets) == 1:
            return self.store(node.targets[0], value)
        one = self.temporary("t")
        made: list[ast.stmt] = [_assign(_name(one, True), value)]
        for target in node.targets:
            made += self.store(target, _name(one))
        return made

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        return [] if node.value is None else self.store(node.target, self.visit(node.value))

    def store(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        """`target = value`, for the lanes of the mask."""
        if isinstance(target, ast.Subscript):
            return [_assign(self.visit(target), value)]
        if isinstance(target, ast.Name) and self.depth:
            # The name tells `source_lines.assigned_name` what a new array is called.
            new = f"new_{target.id}"
            merged = _call("merge", _context("mask"), ast.Name(target.id, ast.Load()), _name(new))
            kept = ast.IfExp(_is(_context("mask"), _name("entry")), _name(new), merged)
            return [_assign(_name(new, True), value), _assign(target, kept)]
        if isinstance(target, (ast.Tuple, ast.List)) and (
            self.depth or not all(isinstance(each, ast.Name) for each in target.elts)
        ):
            places = [self.temporary("t") for _ in target.elts]
            whole = ast.Tuple([_name(each, True) for each in places], ast.Store())
            made: list[ast.stmt] = [_assign(whole, value)]
            for each, place in zip(target.elts, places, strict=True):
                made += self.store(each, _name(place))
            return made
        return [_assign(target, value)]

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        target, value = node.target, self.visit(node.value)
        if isinstance(target, ast.Name):
            old: ast.expr = ast.Name(target.id, ast.Load())
            return self.store(target, self.operation(old, node.op, value))
        if not isinstance(target, ast.Subscript):
            raise _Unsupported("an assignment to an attribute")
        array, index = self.visit(target.value), self.visit(target.slice)
        place, key = self.temporary("t"), self.temporary("t")
        one = ast.Subscript(_name(place), _name(key), ast.Load())
        return [
            _assign(_name(place, True), array),
            _assign(_name(key, True), index),
            _assign(
                ast.Subscript(_name(place), _name(key), ast.Store()),
                self.operation(one, node.op, value),
            ),
        ]

    def in_turn(self, chain: list[ast.AugAssign]) -> list[ast.stmt]:
        """Multiply-adds together; of memory that may have other names one by one."""
        if not any(isinstance(x, ast.Subscript) for c in chain[1:] for x in ast.walk(c.value)):
            return self.multiply_adds(chain)
        array = copy.deepcopy(chain[0].target.value)  # type: ignore[union-attr]
        single = [one for each in copy.deepcopy(chain) for one in self.multiply_adds([each])]
        return [ast.If(_class_is(array, "LocalArray"), self.multiply_adds(chain), single)]

    def multiply_adds(self, chain: list[ast.AugAssign]) -> list[ast.stmt]:
        """`array[index] += a * b` once or several times: one after the other, in one call."""
        terms: list[ast.expr] = []
        for each in chain:
            assert isinstance(each.target, ast.Subscript) and isinstance(each.value, ast.BinOp)
            terms += map(self.visit, (each.target.slice, each.value.left, each.value.right))
        assert isinstance(chain[0].target, ast.Subscript)
        return [ast.Expr(_call("multiply_add", self.visit(chain[0].target.value), *terms))]

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        name = self.temporary("b")
        test = self.visit(node.test)
        made: list[ast.stmt] = [_assign(_name(name, True), test)]
        divide = _assign(_name(name, True), _method(_name("C"), "split", _name(name)))
        made.append(_if(_class_is(_name(name), "array"), [divide]))
        joins = _if(_class_is(_name(name), "Split"), [ast.Expr(_method(_name(name), "join"))])
        body = self.inner(node.body)
        if not node.orelse:
            return [*made, _if(_name(name), [*body, joins])]
        otherwise = self.inner(node.orelse)
        made.append(_if(_name(name), body))
        turn = _if(_class_is(_name(name), "Split"), [ast.Expr(_method(_name(name), "turn"))])
        made.append(turn)
        either = ast.BoolOp(ast.Or(), [_not(_name(name)), _class_is(_name(name), "Split")])
        return [*made, _if(either, otherwise), joins]

    def loop(self, node: ast.While | ast.For) -> tuple[list, list, list, str]:
        """What stands before a loop, at the head of its body and after it, and who continues."""
        if node.orelse:
            raise _Unsupported("the else of a loop")
        whole, again = self.temporary("w"), self.temporary("k")
        before: list[ast.stmt] = [_assign(_name(whole, True), _context("mask"))]
        head: list[ast.stmt] = []
        restored: ast.expr = _name(whole)
        continues = _jumps(node.body, ast.Continue)
        if continues:
            before.append(_assign(_name(again, True), _call("Jump")))
            head.append(ast.Expr(_method(_name("C"), "resume", _name(again))))
        if continues or _jumps(node.body, ast.Break) or _returns(node.body):
            head.append(_if(_is(_context("mask"), _name("nobody")), [ast.Break()]))
        if _returns(node.body):
            restored = _call("without", _name(whole), _name("returned"))
        return before, head, [_set_mask(restored)], again if continues else ""

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        before, head, after, again = self.loop(node)
        name = self.temporary("b")
        test: list[ast.stmt] = [
            _assign(_name(name, True), self.visit(node.test)),
            _if(
                _class_is(_name(name), "array"),
                [_assign(_name(name, True), _method(_name("C"), "narrow", _name(name)))],
            ),
            _if(_not(_name(name)), [ast.Break()]),
        ]
        outer, self.again = getattr(self, "again", ""), again
        body = self.inner(node.body)
        self.again = outer
        whole = ast.While(ast.Constant(True), [*head, *test, *body], [])
        return [*before, whole, *after]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        before, head, after, again = self.loop(node)
        source = node.iter
        if (
            isinstance(source, ast.Call)
            and isinstance(source.func, ast.Name)
            and source.func.id == "range"
        ):
            jump = _name(again) if again else ast.Constant(None)
            places = [self.visit(arg) for arg in source.args]
            iterated: ast.expr = _method(_name("C"), "range", jump, *places)
        else:
            iterated = self.visit(source)
        one = self.temporary("t")
        outer, self.again = getattr(self, "again", ""), again
        self.depth += 1
        taken = self.store(node.target, _name(one))
        self.depth -= 1
        body = self.inner(node.body)
        self.again = outer
        whole = ast.For(_name(one, True), iterated, [*head, *taken, *body], [])
        return [*before, whole, *after]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        what = ast.Constant("") if node.msg is None else self.visit(node.msg)
        return ast.Expr(_method(_name("C"), "require", self.visit(node.test), what))

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        return [_set_mask(_name("nobody"))]

    def visit_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        return [
            ast.Expr(_method(_name(self.again), "add", _context("mask"))),
            _set_mask(_name("nobody")),
        ]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        value = ast.Constant(None) if node.value is None else self.visit(node.value)
        if not self.returns_early:
            return [ast.Return(value)]
        new = self.temporary("t")
        merged = _call("merge", _context("mask"), _name("result"), _name(new))
        whole = _is(_context("mask"), _name("entry"))
        joined = _call("either", _name("returned"), _context("mask"))
        return [
            _assign(_name(new, True), value),
            _assign(_name("result", True), ast.IfExp(whole, _name(new), merged)),
            _assign(_name("returned", True), joined),
            _if(_name("kernel"), [ast.Expr(_method(_name("C"), "leave"))]),
            _set_mask(_name("nobody")),
        ]

    # ---- expressions

    def operation(self, left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
        name = OPERATORS.get(type(op))
        if not isinstance(op, BITWISE):
            left, right = self.number(left), self.number(right)
        sure = isinstance(right, ast.Constant) and bool(right.value)
        if name is None or (sure and not isinstance(op, ast.Pow)):
            return ast.BinOp(left, op, right)
        return _call(name, left, right)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self.operation(self.visit(node.left), node.op, self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return _call("negation", value)
        return ast.UnaryOp(node.op, self.number(value))

    def number(self, value: ast.expr) -> ast.expr:
        """An operand of arithmetic, which truth values are 0 or 1 to."""
        return _call("number", value) if self.may_be_truth(value) else value

    def may_be_truth(self, value: ast.AST | None) -> bool:
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
        if isinstance(op, ast.In):
            return _call("contained", left, right)
        if isinstance(op, ast.NotIn):
            return _call("negation", _call("contained", left, right))
        if isinstance(op, (ast.Eq, ast.NotEq)) and ast.Tuple in (type(left), type(right)):
            equal = _call("equal", left, right)
            return equal if isinstance(op, ast.Eq) else _call("negation", equal)
        return ast.Compare(left, [op], [right])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        conjunction = isinstance(node.op, ast.And)
        made = self.visit(node.values[0])
        for value in node.values[1:]:
            pure, right = _is_pure(value), self.visit(value)
            name = self.temporary("x")
            first = ast.NamedExpr(_name(name, True), made)
            plain = ast.BoolOp(node.op, [_name(name), right])
            if pure:
                lanes: ast.expr = _call("both" if conjunction else "any", _name(name), right)
            else:
                open_, shut = ("only", "both") if conjunction else ("unless", "any")
                lanes = ast.IfExp(
                    _method(_name("C"), open_, _name(name)),
                    _method(_name("C"), f"then_{shut}", _name(name), right),
                    _method(_name("C"), "then_none", _name(name)),
                )
            made = ast.IfExp(_class_is(first, "array", True), plain, lanes)
        return made

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        pure = _is_pure(node.body) and _is_pure(node.orelse)
        name = self.temporary("x")
        test = ast.NamedExpr(_name(name, True), self.visit(node.test))
        body, otherwise = self.visit(node.body), self.visit(node.orelse)
        plain = ast.IfExp(_name(name), body, otherwise)
        if pure:
            lanes = _call("where", _name(name), body, otherwise)
        else:
            one = ast.IfExp(_method(_name("C"), "only", _name(name)), body, _name("undefined"))
            other = ast.IfExp(
                _method(_name("C"), "others", _name(name)), otherwise, _name("undefined")
            )
            lanes = _method(_name("C"), "chosen", _name(name), one, other)
        return ast.IfExp(_class_is(test, "array", True), plain, lanes)


def _chain(statements: list[ast.stmt]) -> list[ast.AugAssign]:
    """The multiply-adds that these begin with, to one array that none of them reads."""
    found: list[ast.AugAssign] = []
    array = ""
    for each in statements:
        if not (
            isinstance(each, ast.AugAssign)
            and isinstance(each.op, ast.Add)
            and isinstance(each.target, ast.Subscript)
            and isinstance(each.target.value, ast.Name)
            and isinstance(each.value, ast.BinOp)
            and isinstance(each.value.op, ast.Mult)
        ):
            break
        if found and (
            each.target.value.id != array
            or len(found) == MOST_ADDS
            or not _is_pure(each.target.slice)
            or any(
                isinstance(name, ast.Name) and name.id == each.target.value.id
                for name in ast.walk(each.value)
            )
            or any(isinstance(name, ast.Call) for name in ast.walk(each.value))
        ):
            break
        found.append(each)
        array = each.target.value.id
    return found


def _is_pure(node: ast.expr) -> bool:
    """Whether a lane may evaluate this though it has no use for it."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and not (
            isinstance(each.func, ast.Name) and each.func.id in PURE
        ):
            return False
        if isinstance(each, (ast.Subscript, ast.NamedExpr, ast.Lambda)):
            return False
        if isinstance(each, ast.BinOp) and type(each.op) in OPERATORS:
            return False
    return True
