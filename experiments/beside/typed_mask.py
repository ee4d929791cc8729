"""A mask that is typed on the page: an expression of i and j in Python's words."""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import fa_numba
from fa_numba import device

CALLS = {"abs": abs, "min": min, "max": max, "int": int, "float": float, "bool": bool}
_NODES = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call, ast.Name)
_WORDS = (*_NODES, ast.Constant, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)
ALLOWED = "an expression of i and j with comparisons, arithmetic, and, or, not, if and else, "
ALLOWED += f"{', '.join(CALLS)} and math's functions"


@lru_cache(maxsize=32)
def function_of(text: str) -> Callable[..., Any]:
    """The function (b, h, i, j) of the text, which is read before any of it runs.

    Raises ValueError for anything but an expression of these words.
    """

    def refused(what: str) -> ValueError:
        return ValueError(f"mask is {text!r}: {what}; allowed is {ALLOWED}")

    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused(f"no Python, {getattr(error, 'msg', error)}") from None
    nodes = [*ast.walk(tree.body)]
    maths = {
        node.value
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "math"
        and not node.attr.startswith("_")
    }
    for node in nodes:
        known = isinstance(node, _WORDS)
        if isinstance(node, ast.Attribute):
            known = node.value in maths
        elif isinstance(node, ast.Name):
            known = node.id in ("b", "h", "i", "j", *CALLS) or node in maths
        elif isinstance(node, ast.Constant):
            known = isinstance(node.value, (bool, int, float))
        elif isinstance(node, ast.Pow):
            known = False  # a number of any length, before anybody asks for its value
        if not known:
            raise refused(f"{ast.unparse(node) if isinstance(node, ast.expr) else 'a power'}")
    source, name = f"lambda b, h, i, j: {ast.unparse(tree.body)}\n", f"<mask {text}>"
    linecache.cache[name] = (len(source), None, [source], name)  # where its source is looked for
    found = eval(compile(source, name, "eval"), {"math": math, "__builtins__": CALLS})
    return found


@lru_cache(maxsize=4)
def blocks_of(text: str, N: int, tiles: fa_numba.Tiles) -> Any:
    """The text's mask of N x N scores in blocks of these tiles; None for an empty text."""
    if not text.strip():
        return None
    mask = function_of(text)
    with device.using("emulator"):
        try:
            return fa_numba.create_block_mask(mask, 1, 1, N, N, tiles=tiles)
        except TypeError as error:
            raise ValueError(str(error)) from None
