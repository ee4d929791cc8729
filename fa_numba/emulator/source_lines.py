"""Where in a kernel's source an instruction stands, and which variable takes its result."""

from __future__ import annotations

import ast
import dis
import linecache
import os
from functools import cache
from types import CodeType


@cache
def source_line(code: CodeType, instruction: int) -> str:
    """ "file.py:123: source text" of the instruction at an offset in `code`."""
    positions = list(code.co_positions())
    number = positions[instruction // 2][0] if 0 <= instruction // 2 < len(positions) else None
    number = number or code.co_firstlineno
    source = linecache.getline(code.co_filename, number).strip()
    return f"{os.path.basename(code.co_filename)}:{number}: {source}"


@cache
def assigned_name(code: CodeType, instruction: int) -> str | None:
    """The variable that the result of the call at `instruction` is stored to, alone or as one of a
    tuple; None without one.
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
                return names[above].removeprefix("_fa_new_")
            above -= len(names)
        elif operation == "BUILD_TUPLE" and above < n:
            above = n - 1 - above  # what follows unpacks it
        elif operation.startswith("LOAD_") or operation == "PUSH_NULL":
            above += dis.stack_effect(following.opcode, following.arg)
        elif operation == "CALL" and above >= n + 2:
            above -= n + 1
        elif operation != "UNPACK_SEQUENCE":
            return None
    return None


def block_at(lines: list[str], first: int) -> str:
    """The lines of the function that begins at line `first`, by their indentation."""
    taken: list[str] = []
    indent, inside = _indent(lines[first - 1]), False
    for line in lines[first - 1 :]:
        text = line.strip()
        if inside and text and text[0] not in "#)" and _indent(line) <= indent:
            break
        inside = inside or text.startswith("def ")
        taken.append(line)
    return "".join(taken)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def definition(block: str, name: str, first: int) -> ast.FunctionDef | None:
    """The function of these lines; None if they are not it and all of it."""
    try:
        tree = ast.parse("if 1:\n" + block if block[:1].isspace() else "\n" + block)
    except SyntaxError:
        return None
    ast.increment_lineno(tree, first - 2)
    body = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
    whole = len(body) == 1 and isinstance(body[0], ast.FunctionDef) and body[0].name == name
    return body[0] if whole else None  # type: ignore[return-value]


def definition_among(lines: list[str], name: str, first: int) -> ast.FunctionDef | None:
    """The function of a file by its name and first line, that of the first decorator."""
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            begins = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if begins == first:
                return node
    return None


def moved(code: CodeType, file: str, lines: int) -> CodeType:
    """Code with the places in another file, `lines` further down, for its own."""
    constants = (moved(c, file, lines) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(
        co_filename=file,
        co_firstlineno=code.co_firstlineno + lines,
        co_consts=tuple(constants),
    )
