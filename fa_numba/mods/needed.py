"""Removes assignments that the result of a written function does not need.

The class ``Reader`` writes every value and every slope of a function. The functions of this module
remove assignments to names that no later statement reads. The text of a value then contains no
slopes, and the text of a slope contains only the values that it needs.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

# A name that a text reads: a parameter, or a name that an earlier statement assigned.
READ = re.compile(
    r"(?<![\w.])(?!(?:u?int32|float32|math|options|divisor|floor_divide|modulo)\b)[a-z]\w*"
)


def alone(name: str, lines: list[str]) -> tuple[str, str]:
    """Return the target and the value of the only assignment that reads ``name``.

    For the assignment ``t2 = t1 * score``, the result is ("t2", "t1 * score"). ``lines`` are the
    statements of a function. Assignments that the function does not need are ignored. The result is
    ("", "") if several statements or no statement reads the name, or if the statement is under an
    ``if``.
    """
    parted = (line.strip().partition(" = ") for line in _needed_lines(tuple(lines)))
    found = [(own, value) for own, _, value in parted if name in READ.findall(value or own)]
    own, value = found[0] if len(found) == 1 else ("", "")
    return (own, value) if f"{own} = {value}" in lines else ("", "")


@functools.lru_cache(maxsize=4)  # because ``alone`` is called for several names with equal lines
def _needed_lines(lines: tuple[str, ...]) -> list[str]:
    return needed("def mod():", list(lines))[0].splitlines()


def replaced(new: str, name: str, value: str, lines: list[str]) -> list[str]:
    """Return ``lines`` with the line ``name = value`` replaced by ``name = new``."""
    return [f"{name} = {new}" if line == f"{name} = {value}" else line for line in lines]


def needed(head: str, lines: list[str], flat: bool = False) -> tuple[str, set[str]]:
    """Return the text of a function without unneeded assignments, and the names that it reads.

    ``head`` is the line with ``def``, and ``lines`` are the statements.

    If ``flat`` is True, an ``if`` that assigns positions of array elements is replaced by the
    statements of both its branches, without the condition.
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

    ``read`` contains the names that code after ``statements`` reads. This function adds the names
    that the returned statements read.
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
    """Yield the statements, but replace an ``if`` that assigns positions by both of its branches.

    Names of positions begin with "p" (``positions.position_of``).
    """
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
    while left:  # like ast.walk, but three times as fast
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
