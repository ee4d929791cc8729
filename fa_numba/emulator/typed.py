"""The source lines of a code object, even if they were typed at a prompt.

Python keeps the lines of files and of notebooks' cells. From Python 3.13 on, it also keeps lines
that are typed at its prompt or follow ``-c``. In older versions, this module searches the command
line and the history of the prompt for a text that compiles to an equal code object.
"""

from __future__ import annotations
import __future__

import codeop
import functools
import inspect
import linecache
import sys
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FunctionType

_MOST_TYPED = 2000  # number of last lines of the history that are searched
_MOST_LINES = 100  # of a statement
_PROMPTS = ("<stdin>", "<console>", "<python-input")  # file names of code typed at a prompt
_CONTINUED = ("else:", "elif ", "except", "finally:")  # lines that continue a statement
_FLAGS = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def lines_of(code: CodeType) -> Sequence[str]:
    """Return all lines of the file or typed text that contains the code; none if not available."""
    return linecache.getlines(code.co_filename) or _typed(code, code.co_filename)


@functools.lru_cache(maxsize=256)
def _typed(code: CodeType, name: str) -> tuple[str, ...]:
    """Return the lines of a text that was typed at a prompt, and that contains the code.

    `name` is the code's file name. It is an argument because equal code objects may have different
    file names, and the result is cached.
    """
    if not name.startswith("<"):
        return ()
    cells = tuple(CellType() for _ in code.co_freevars)
    try:  # Python 3.13 keeps the lines that were typed
        lines, _ = inspect.findsource(FunctionType(code, {"__name__": "__main__"}, closure=cells))
        return tuple(lines)
    except (OSError, TypeError):
        pass
    texts: Iterator[str] = iter(())
    if name == "<string>":
        texts = _after_c()
    elif name.startswith(_PROMPTS):
        word = "lambda" if code.co_name == "<lambda>" else code.co_name
        texts = (text for text in reversed([*_statements(_history())]) if word in text)
    mode = "exec" if name == "<string>" else "single"
    for text in texts:
        whole = _compiled(text, mode, code.co_flags & _FLAGS)
        if whole is not None and code in _inside(whole):
            return tuple(text.splitlines(keepends=True))
    return ()


def _after_c() -> Iterator[str]:
    """Yield the program of ``python -c program`` if Python was started in this way."""
    if sys.argv[:1] == ["-c"] and len(sys.argv) < len(sys.orig_argv):
        program = sys.orig_argv[-len(sys.argv)]  # before its own arguments
        yield f"{program.removeprefix('-c')}\n"


def _history() -> list[str]:
    """Return the last lines that were typed at Python's prompt, without empty lines."""
    readline = sys.modules.get("readline")
    if readline is None:
        return []
    last = readline.get_current_history_length()
    numbers = range(max(1, last - _MOST_TYPED + 1), last + 1)
    return [line for n in numbers if (line := readline.get_history_item(n))]


def _statements(lines: Sequence[str]) -> Iterator[str]:
    """Yield the complete statements among typed lines.

    Statements with syntax errors are left out.
    """
    # First line of a possible statement, and its last line without indentation.
    first = begin = 0
    for stop, following in enumerate([*lines[1:], ""], 1):
        if following[:1].isspace() or following.startswith(_CONTINUED):
            continue
        for start in dict.fromkeys((first, begin)):
            text = "\n".join(lines[start:stop]) + "\n"
            found = _complete(text)
            if found:
                yield text
            if found is not None:
                break
        open_bracket = found is False and stop - start < _MOST_LINES
        first, begin = start if open_bracket else stop, stop


def _complete(text: str) -> bool | None:
    """Return whether a text is a complete statement; None if it has a syntax error."""
    try:
        return codeop.compile_command(text) is not None
    except (SyntaxError, ValueError, OverflowError):
        return None


def _compiled(text: str, mode: str, flags: int) -> CodeType | None:
    """Return the code object of a text, or None if the text has a syntax error.

    `mode` and `flags` are the arguments of Python's `compile`.
    """
    try:
        return compile(text, "<typed>", mode, flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _inside(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of all functions inside a code object."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)
