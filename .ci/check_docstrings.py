"""Validate the public docstrings with numpydoc: python .ci/check_docstrings.py

Prints one line for each error and exits with 1 if there is one.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate
from public_names import everything, value_of

# Codes of numpydoc: order of sections, summary, parameters and returns. Not checked are the first
# and last line of a docstring (GL01 to GL03), and optional sections (EX01, SA01, ES01).
CHECKS = {
    *("GL05", "GL06", "GL07", "GL08", "GL09", "GL10"),
    *("SS01", "SS02", "SS03", "SS04", "SS05", "SS06"),
    *("PR01", "PR02", "PR03", "PR04", "PR05", "PR07", "PR08", "PR09", "PR10"),
    *("RT01", "RT02", "RT03", "RT04", "RT05", "YD01"),
}


def errors() -> list[str]:
    """Return one line for each error of a public docstring."""
    found = []
    for module, name in everything():
        value = value_of(module, name)
        for code, message in validate(f"{module}.{name}")["errors"]:
            if code in CHECKS and not _excused(value, code, message):
                found.append(f"{module}.{name}: {code} {message}")
    return found


def _excused(value: Any, code: str, message: str) -> bool:
    """Return whether numpydoc reports an error that is none, for a reason that it cannot know."""
    named = set(re.findall(r"'([^']+)'", message))
    if code == "PR02":  # unknown parameters: options that a function accepts as keywords
        from fa_numba import AttentionOptions, ops

        functions = [f for f in vars(ops).values() if inspect.isfunction(f)]
        known = {name for f in functions for name in inspect.signature(f).parameters}
        # The docstring explains **options, while the signature lists the options one by one.
        return named <= known | set(AttentionOptions.__annotations__) | {"**options"}
    if code == "PR01" and inspect.isclass(value):
        if "__init__" not in vars(value):  # the parameters are documented in the base class
            return True
        return named <= {entry.name for entry in NumpyDocString(value.__doc__)["Attributes"]}
    return False


def main() -> int:
    """Print the errors; return the exit status."""
    found = errors()
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
