"""Texts of the errors that the source raises: none has a phrase that the style guide bans."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    str(folder.relative_to(ROOT))
    for top in ("fa_numba", "experiments")
    for folder in (ROOT / top, *(ROOT / top).iterdir())
    if folder.is_dir() and any(folder.glob("*.py"))
)
# Phrases that need a second reading. A message says "X must be Z, got Y" instead.
BANNED = re.compile(
    r"\ballowed (is|are)\b|\ballowed:|\baskew\b|\banew\b|\bbeside\b|\bin one piece\b"
    r"|\bis no (option|integer|parameter)\b|\bso many\b|\b(have|has) it\b"
)
# A word of each phrase: a file without any of them is not parsed.
WORDS = ("allowed", "askew", "anew", "beside", "piece", "is no", "many", "have", "has")


def raised(text):
    """Yield (line, literal text) of each exception that is made in a `raise` of the source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            found = [x.value for x in ast.walk(node.exc) if isinstance(x, ast.Constant)]
            yield node.lineno, "".join(x for x in found if isinstance(x, str))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_message_has_a_banned_phrase(folder):
    directory = ROOT / folder
    # Packages of the two top folders have tests of their own; deeper files belong to their package.
    files = directory.rglob("*.py") if "/" in folder else directory.glob("*.py")
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(files)}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, source in sources.items()
        if "raise " in source and any(word in source for word in WORDS)
        for line, text in raised(source)
        if BANNED.search(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_banned_phrase_is_found():
    source = 'def f(x):\n    if x:\n        raise ValueError(f"x is {x}: allowed is 1")\n'
    ((line, text),) = raised(source)
    assert line == 3 and BANNED.search(text)
    assert not BANNED.search("x must be 1, got 2")
