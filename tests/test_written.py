"""Tests that the text that kernels contain for a caller's function is unchanged.

The expected texts are in `data/written.csv`. If a text changes, the digests of the kernels with
this text change. These kernels are then compiled again, and their recordings count as outdated.
After an intended change, `python tests/test_written.py` writes the file again.
"""

import ast
import csv
import io
from pathlib import Path

import pytest
import random_functions
import rooms  # noqa: F401
import test_mods

from fa_numba import mods
from fa_numba.device.program_digest import digest_of

WRITTEN = Path(__file__).with_name("data") / "written.csv"
VALUES = random_functions.captured_values()


def stored():
    with WRITTEN.open(newline="") as file:
        return list(csv.DictReader(file))


def digest(option, function):
    """Return a digest of all that kernels have of a function.

    ``function`` is the name of a function of `test_mods`, or the source of a function that captures
    values of `random_functions`.
    """
    made = test_mods.FUNCTIONS.get(function) or random_functions.function_of(function, VALUES)
    mod, values = mods.captured(option, made)
    texts = mod.value, mod.slope, mod.both, mod.gradient
    facts = mod.captures, mod.inside, mod.steady
    numbers = [(name, repr(value)) for name, value in values if name.isidentifier() is False]
    return digest_of(repr((_normal(texts), facts, numbers)))


def _normal(value):
    """Return a text as its syntax tree, which does not depend on the version of Python."""
    if isinstance(value, str) and value.startswith("def "):
        return _normal(ast.parse(value))
    if isinstance(value, ast.AST):
        fields = ((name, x) for name, x in ast.iter_fields(value) if x not in (None, []))
        return type(value).__name__, [(name, _normal(x)) for name, x in fields if name != "ctx"]
    if isinstance(value, (tuple, list)):
        return [_normal(x) for x in value]
    return repr(value)


@pytest.mark.parametrize("option", ["score_mod", "mask_mod"])
def test_what_is_written_is_what_it_was(option):
    rows = [row for row in stored() if row["option"] == option]
    changed = [row for row in rows if digest(option, row["function"]) != row["digest"]]
    assert rows and not changed, "\n".join(row["function"] for row in changed)


def test_each_function_of_the_tests_is_stored():
    assert {row["function"] for row in stored()} >= test_mods.FUNCTIONS.keys()


def main():
    rows = [row | {"digest": digest(row["option"], row["function"])} for row in stored()]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["option", "digest", "function"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    WRITTEN.write_text(text.getvalue())


if __name__ == "__main__":
    main()
