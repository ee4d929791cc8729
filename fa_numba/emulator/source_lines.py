"""Where in a kernel's source an instruction stands, and which variable takes its result."""

from __future__ import annotations

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
    """The variable that the result of the call at `instruction` is stored to; None without one."""
    for following in dis.get_instructions(code):
        if following.offset > instruction:
            if not following.opname.startswith("STORE_"):
                return None
            name = following.argval  # Python 3.13 fuses it with the next instruction
            name = name[0] if isinstance(name, tuple) else name
            return name.removeprefix("_fa_new_")
    return None
