"""What a caller's function may contain, and the error for anything else."""

from __future__ import annotations

import ast

from .slopes import OF_MATH
from .source import NUMBERS

PARAMETERS = {
    "score_mod": ("score", "b", "h", "i", "j"),
    "mask_mod": ("b", "h", "i", "j"),
    "score_mod_grad": ("score", "b", "h", "i", "j"),
}
STEPS = ("floor", "ceil", "trunc")  # functions of math that return an integer
CONSTANTS = ("pi", "e", "tau", "inf", "nan")
CALLS = ("min", "max", "abs", "int", "float", "bool", "len")
LARGEST_POWER = 4  # up to this constant exponent a power is written as products
TRUTHS = (ast.BitAnd, ast.BitOr, ast.BitXor)
SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
ALLOWED = (
    "A kernel supports assignments to names, followed by one return; arithmetic, comparisons, and, "
    f"or, not and conditional expressions (x if c else y); the functions {', '.join(CALLS)}; from "
    f"math {', '.join((*OF_MATH, *STEPS, 'pow', *CONSTANTS))}; {NUMBERS}, with one index for "
    "each axis of an array"
)
_NAMED = {
    ast.For: "a loop", ast.While: "a loop", ast.If: "an if statement", ast.With: "a with statement",
    ast.FunctionDef: "a function within", ast.Lambda: "a lambda within", ast.Slice: "a slice",
    ast.ListComp: "a loop", ast.GeneratorExp: "a loop", ast.Raise: "a raise",
}  # fmt: skip


class Refused(Exception):
    """The caller's function contains something that kernels do not support.

    The exception's text says what it is. ``line`` is the line in the caller's file. ``writing``
    turns this exception into a ValueError.
    """

    def __init__(self, what: str, node: ast.AST) -> None:
        super().__init__(what)
        self.line = getattr(node, "lineno", 0)


def undefined(name: str, node: ast.AST) -> Refused:
    """Return the ``Refused`` exception for a name that is not defined."""
    return Refused(f"{name} (a name that is not defined; import or define it)", node)


def what(node: ast.AST) -> str:
    """Return the words by which an error message names a syntax node.

    The words are a description such as "a loop", or the source of the node.
    """
    named = next((words for kind, words in _NAMED.items() if isinstance(node, kind)), "")
    return named or f"`{ast.unparse(node)}`"
