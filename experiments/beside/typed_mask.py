"""A mask that a reader types on the page explore.html: a Python expression of b, h, i and j."""

import ast
import linecache
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import fa_numba
from fa_numba import device

CALLS = {"abs": abs, "min": min, "max": max, "int": int, "float": float, "bool": bool}
NAMES = ("b", "h", "i", "j", "math", *CALLS)
_NODES = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call)
_WORDS = (*_NODES, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)
ALLOWED = "comparisons and arithmetic of b, h, i and j, and, or, not, if and else, "
ALLOWED += f"{', '.join(CALLS)} and the functions of math"


def _is_known(node: ast.AST) -> bool:
    """Return whether a node of the typed expression is allowed."""
    match node:
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return not name.startswith("_")
        case ast.Name(id=name):
            return name in NAMES
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float))
        case ast.Pow():  # a power of constants may have any number of digits
            return False
    return isinstance(node, _WORDS)


@lru_cache(maxsize=32)
def function_of(text: str) -> Callable[..., Any]:
    """Return the typed expression as a function of (b, h, i, j).

    Raise ValueError if the expression has a syntax error or contains something that is not allowed.
    """

    def refused(what: str) -> ValueError:
        return ValueError(f"the mask {text!r} contains {what}. It may contain {ALLOWED}")

    name = f"<mask {text}>"
    try:
        body = ast.parse(text.strip(), mode="eval").body
        source = f"lambda b, h, i, j: {ast.unparse(body)}\n"
        code = compile(source, name, "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused(f"a syntax error ({getattr(error, 'msg', error)})") from None
    for node in ast.walk(body):
        if not _is_known(node):
            raise refused(ast.unparse(node) if isinstance(node, ast.expr) else "a power")
    linecache.cache[name] = (len(source), None, [source], name)  # inspect finds the source here
    return eval(code, {"math": math, "__builtins__": CALLS})


@lru_cache(maxsize=4)
def blocks_of(text: str, N: int, tiles: fa_numba.Tiles) -> Any:
    """Return the block mask of a typed expression for N x N scores; None for an empty text.

    Raise ValueError if the expression is not allowed.
    """
    if not text.strip():
        return None
    mask = function_of(text)
    with device.using("emulator"):
        try:
            return fa_numba.create_block_mask(mask, 1, 1, N, N, tiles=tiles)
        except TypeError as error:
            raise ValueError(str(error)) from None
