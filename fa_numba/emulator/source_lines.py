"""The source line of an instruction, and the variable to which its result is assigned.

An instruction is a code object and the offset of the instruction in the bytecode.
"""

from __future__ import annotations

import ast
import dis
import inspect
import os
import re
from functools import cache, lru_cache
from types import CodeType

from .typed import lines_of


@cache
def source_line(code: CodeType, instruction: int) -> str:
    """Return the source line of an instruction as "file.py:123: source text"."""
    positions = list(code.co_positions())
    number = positions[instruction // 2][0] if 0 <= instruction // 2 < len(positions) else None
    number = number or code.co_firstlineno
    source = "".join(lines_of(code)[number - 1 : number]).strip()
    return f"{os.path.basename(code.co_filename)}:{number}: {source}"


@cache
def assigned_name(code: CodeType, instruction: int) -> str | None:
    """Return the name of the variable to which a call's result is assigned, or None.

    `instruction` is the offset of the call. The result may also be assigned as a part of a tuple.
    """
    above = 0  # values on the stack above the result
    for following in dis.get_instructions(code):
        operation, n = following.opname, following.arg or 0
        if following.offset <= instruction or operation == "PRECALL":
            continue
        if operation.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")):
            names = following.argval  # Python 3.13 fuses two instructions
            names = names if isinstance(names, tuple) else (names,)
            names = names if operation.count("STORE") == len(names) else names[:1]
            if above < len(names):
                return re.sub(r"^_fa_(new_|t\d+_?)", "", names[above]) or None
            above -= len(names)
        elif operation == "BUILD_TUPLE" and above < n:
            above = n - 1 - above  # the following instructions unpack the tuple
        elif operation.startswith("LOAD_") or operation == "PUSH_NULL":
            above += dis.stack_effect(following.opcode, following.arg)
        elif operation == "CALL" and above >= n + 2:
            above -= n + 1
        elif operation != "UNPACK_SEQUENCE":
            return None
    return None


def definition(code: CodeType) -> ast.FunctionDef | None:
    """Return the syntax tree of the function with this code; None if there is no source."""
    first = code.co_firstlineno  # the line of the first decorator
    lines = lines_of(code)
    end = _ends(tuple(lines)).get((code.co_name, first))
    block = lines[first - 1 : end] if end else inspect.getblock(lines[first - 1 :]) if lines else []
    # Empty lines before the block, so that its lines have their numbers.
    before = "if 1:\n" if block and block[0][:1].isspace() else "\n"
    text = ("\n" * (first - 2) + before if first > 1 else "") + "".join(block)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.If) else tree.body
    found = body[0] if body else None
    return found if isinstance(found, ast.FunctionDef) and found.name == code.co_name else None


@lru_cache(maxsize=64)
def _ends(lines: tuple[str, ...]) -> dict[tuple[str, int], int]:
    """Return a dictionary with the number of the last line of each function in a file.

    The keys are pairs: the name of the function, and the number of its first line. `lines` are the
    lines of the file. The dictionary is empty if the lines are not Python, such as the lines of
    some cells of a notebook.
    """
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return {}
    found = {}
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name, first] = node.end_lineno
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            part = getattr(node, name, [])
            left += part if isinstance(part, list) else []
    return found
