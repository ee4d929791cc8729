"""Helpers for syntax trees, used by rewrite.py and expressions.py.

Some helpers make the syntax tree of a part of a rewritten function, such as a call of a function of
the emulator. Other helpers find out which names statements assign, and whether statements return,
break or continue.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

PREFIX = "_fa_"  # of the emulator's names in a rewritten function
# Functions that neither access memory nor wait for other threads. Lanes that do not need their
# results may therefore call them too.
PURE = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "int", "float", "bool", "min", "max", "abs", "len"]
)
OPERATORS = {ast.Div: "divide", ast.FloorDiv: "floor_divide", ast.Mod: "modulo"}
BITWISE = (ast.BitAnd, ast.BitOr, ast.BitXor)
# Functions that return truth values.
TRUTHS = ("bool", *(PREFIX + name for name in ("negation", "both", "any")))
MOST_ADDS = 8  # multiply-adds of a chain
LEAVING = (ast.Break, ast.Continue, ast.Return)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def runtime(name: str, store: bool = False) -> ast.Name:
    """Return the syntax tree of a name that refers to an object of the emulator.

    `name` is the name of the object in the emulator. A rewritten function uses it with a prefix.
    `store` says whether the function assigns to the name.
    """
    return ast.Name(PREFIX + name, ast.Store() if store else ast.Load())


def call(name: str, *args: ast.expr) -> ast.Call:
    """Return the syntax tree of a call of the emulator's function `name`."""
    return ast.Call(runtime(name), list(args), [])


def context(name: str) -> ast.Attribute:
    """Return the syntax tree that reads the attribute `name` of the running launch."""
    return ast.Attribute(runtime("C"), name, ast.Load())


def method(owner: ast.expr, name: str, *args: ast.expr) -> ast.Call:
    """Return the syntax tree of a call of the method `name` of the object `owner`."""
    return ast.Call(ast.Attribute(owner, name, ast.Load()), list(args), [])


def exits(name: str, *args: ast.expr) -> ast.Call:
    """Return the syntax tree of a call of a method of the function's `Exits` object."""
    return method(runtime("exits"), name, *args)


def assign(target: ast.expr, value: ast.expr) -> ast.Assign:
    """Return the syntax tree of the statement `target = value`."""
    return ast.Assign([target], value)


def set_mask(value: ast.expr) -> ast.Assign:
    """Return the syntax tree of a statement that assigns `value` to the mask of the launch."""
    return assign(ast.Attribute(runtime("C"), "mask", ast.Store()), value)


def is_same(value: ast.expr, other: ast.expr, negated: bool = False) -> ast.Compare:
    """Return the syntax tree of `value is other`, or of `value is not other` if `negated`."""
    return ast.Compare(value, [ast.IsNot() if negated else ast.Is()], [other])


def class_is(value: ast.expr, name: str, negated: bool = False) -> ast.Compare:
    """Return the syntax tree of an expression that tests the class of a value.

    `name` is the emulator's name of a class. The expression is true if `value` is of this class
    itself. If `negated` is set, the expression is true if `value` is of any other class.
    """
    return is_same(ast.Attribute(value, "__class__", ast.Load()), runtime(name), negated)


def is_atomic(function: ast.expr) -> bool:
    """Return whether a called function may be a function of ``cuda.atomic``, by its name."""
    owner = function.value if isinstance(function, ast.Attribute) else None
    return "atomic" in (getattr(owner, "attr", ""), getattr(owner, "id", ""))


def is_negative(node: ast.expr) -> bool:
    """Return whether an expression is a literal negative integer, such as -1."""
    if not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)):
        return False
    return isinstance(node.operand, ast.Constant) and type(node.operand.value) is int


def negated(value: ast.expr) -> ast.UnaryOp:
    """Return the syntax tree of the expression `not value`."""
    return ast.UnaryOp(ast.Not(), value)


def when(test: ast.expr, body: list[ast.stmt]) -> ast.If:
    """Return the syntax tree of an `if` statement without `else`."""
    return ast.If(test, body, [])


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the lists of statements inside a statement, such as the body of a loop."""
    found = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return [] if isinstance(node, DEFINITIONS) else found


def statements_within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements inside a node, in the order of `ast.walk`.

    Statements of functions inside the node are included.
    """
    level = [node]
    while level:
        inner: list[ast.AST] = []
        for each in level:
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                part = getattr(each, name, None)
                inner += part if isinstance(part, list) else ()
        yield from inner
        level = inner


def leaves(statements: Iterable[ast.stmt], kinds: tuple[type, ...] = LEAVING) -> bool:
    """Return whether statements can leave the code around them.

    They can if they contain a `return`, or a `break` or `continue` of a loop that is not among the
    statements. `kinds` are the classes of nodes that count as leaving.
    """
    return any(
        isinstance(node, kinds)
        or any(
            leaves(block, (ast.Return,) if isinstance(node, (ast.While, ast.For)) else kinds)
            for block in blocks(node)
        )
        for node in statements
    )


def returns(statements: Iterable[ast.stmt]) -> bool:
    """Return whether statements contain a `return`."""
    return leaves(statements, (ast.Return,))


def assigned_within(statements: Iterable[ast.stmt], within: bool = False) -> set[str]:
    """Return the names that are assigned inside the `if` and loop statements of a list.

    `statements` is the list. Targets of its `for` loops are in the result too. If `within` is set,
    the result also contains the names that are assigned outside of `if` and loop statements.
    """
    names: set[str] = set()
    for node in statements:
        if isinstance(node, DEFINITIONS):
            continue
        inner = blocks(node)
        for block in inner:
            names |= assigned_within(block, True)
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


def multiply_add_chain(statements: list[ast.stmt]) -> list[ast.AugAssign]:
    """Return the chain of multiply-adds with which a list of statements begins.

    The chain consists of at most 8 statements `array[index] += a * b` with one array. From the
    second statement on, a and b contain no function calls and do not read the array, and `is_pure`
    is true for the index.
    """
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
            or not is_pure(each.target.slice)
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


def is_pure(node: ast.expr) -> bool:
    """Return whether an expression can be evaluated for all lanes, even if only some lanes need it.

    This is not possible if the evaluation could raise an error or have a side effect. The result is
    therefore False if the expression reads an array element, calls a function that is not in
    `PURE`, assigns a name, or contains one of the operators ``/``, ``//`` and ``%``.
    """
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
