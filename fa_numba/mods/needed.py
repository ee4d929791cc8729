"""Which assignments of a written function its result needs.

A writer writes every value and every slope. Here a text loses the assignments that nothing reads,
so that the text of a value has no slopes, and the text of a slope has only the values it needs.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

# A name that a text reads: of a parameter, or of a value that an earlier statement assigned.
READ = re.compile(
    r"(?<![\w.])(?!(?:u?int32|float32|math|options|divisor|floor_divide|modulo)\b)[a-z]\w*"
)


def alone(name: str, lines: list[str]) -> tuple[str, str]:
    """Return the target and the value of the one assignment that reads ``name``.

    Both are empty if several assignments read the name, or if one does under an ``if``.
    """
    parted = (line.strip().partition(" = ") for line in _needed_lines(tuple(lines)))
    found = [(own, value) for own, _, value in parted if name in READ.findall(value or own)]
    own, value = found[0] if len(found) == 1 else ("", "")
    return (own, value) if f"{own} = {value}" in lines else ("", "")


@functools.lru_cache(maxsize=4)  # the same lines are asked about the score, and what is made of it
def _needed_lines(lines: tuple[str, ...]) -> list[str]:
    return needed("def mod():", list(lines))[0].splitlines()


def replaced(new: str, name: str, value: str, lines: list[str]) -> list[str]:
    """Return ``lines`` where ``name = value`` has become ``name = new``."""
    return [f"{name} = {new}" if line == f"{name} = {value}" else line for line in lines]


def needed(head: str, lines: list[str], flat: bool = False) -> tuple[str, set[str]]:
    """Return the text of the function with this head, without assignments that nothing reads; and
    the names that the text reads.

    With ``flat``, what is under an ``if`` around positions of elements loses its ``if``.
    """
    whole = ast.parse("\n".join([head, *(f"    {line}" for line in (*lines, "pass"))]))
    (function,) = whole.body
    assert isinstance(function, ast.FunctionDef)
    read: set[str] = set()
    statements = _without_tests(function.body) if flat else function.body
    function.body = _read_later(list(statements), read) or [ast.Pass()]
    return f"{ast.unparse(whole)}\n", read


def _read_later(statements: list[ast.stmt], read: set[str]) -> list[ast.stmt]:
    """Return ``statements`` without assignments to names that no later statement reads.

    ``read`` holds the names that later code reads. The names that ``statements`` read are added.
    """
    kept: list[ast.stmt] = []
    for node in reversed(statements):
        if isinstance(node, ast.Pass):
            continue
        if isinstance(node, ast.If):
            node.orelse = _read_later(node.orelse, read)
            node.body = _read_later(node.body, read)
            if not (node.body or node.orelse):
                continue
            node.body = node.body or [ast.Pass()]
            read |= _names(node.test)[1]
        else:
            assigned, own = _names(node)
            if isinstance(node, ast.Assign) and assigned and not assigned & read:
                continue
            read |= own
        kept.append(node)
    return kept[::-1]


def _without_tests(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements; in the place of an ``if`` around positions, what is under it."""
    for node in statements:
        if isinstance(node, ast.If) and any(name.startswith("p") for name in _names(node)[0]):
            yield from _without_tests([*node.body, *node.orelse])
        else:
            yield node


def _names(node: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that ``node`` assigns, and the names that it reads."""
    assigned: set[str] = set()
    read: set[str] = set()
    left = [node]
    while left:  # as ast.walk, which takes three times as long
        each = left.pop()
        if isinstance(each, ast.Name):
            (read if isinstance(each.ctx, ast.Load) else assigned).add(each.id)
            continue
        for value in vars(each).values():
            if isinstance(value, (ast.expr, ast.stmt)):
                left.append(value)
            elif isinstance(value, list):
                left += value
    return assigned, read
