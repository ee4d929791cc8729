"""What need not be repeated: the same sources give the same counts, on every machine.

Beside the emulator's rows stands a digest of fa_numba's sources, which they were counted from, and
of the rows themselves. A complete run takes the stored rows while that digest is what it finds. A
run on a GPU has the digest of the sources too, by which `experiments all` tells what changed.
"""

import functools
import hashlib
import io
import json
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tokenize import NEWLINE, NL
from typing import Any

import fa_numba

from .store import EMULATOR, Row, Store, dump, write_if_changed

# What the JSON beside the rows calls the digest and the commit that it was counted at.
ENTRY = "counted"
PACKAGE = Path(fa_numba.__file__).parent
# The package's files that no number comes from.
_NO_PART = ("algorithms.py", "__main__.py", "commands/", "bounds/", "torch.py", "reference.py")


@functools.cache
def sources() -> str:
    """The digest of fa_numba's files, of Python's without words."""
    found = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.csv") for path in PACKAGE.rglob(kind)):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(_NO_PART):
            text = path.read_bytes().decode().replace("\r\n", "\n")
            text = without_words(text) if path.suffix == ".py" else text
            found.update(f"{name}\0{text}\0".encode())
    return found.hexdigest()


def without_words(text: str) -> str:
    """A program without its docstrings, comments and empty lines."""
    lines = text.split("\n")
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type != NL]
    for token in tokens:
        if token.type == tokenize.COMMENT:
            first, column = token.start
            lines[first - 1] = lines[first - 1][:column]
    code = [token for token in tokens if token.type != tokenize.COMMENT]
    for before, token, behind in zip([None, *code], code, code[1:], strict=False):
        begins = before is None or before.type in (NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.STRING and begins and behind.type == NEWLINE:
            first, end = token.start[0], token.end[0]
            lines[first - 1 : end] = [""] * (end - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _digest(rows: Sequence[Row]) -> str:
    return hashlib.sha256(f"{sources()}\0{dump(rows, runs=False)}".encode()).hexdigest()


def stored(store: Store, experiment: str) -> list[Row] | None:
    """The emulator's rows, if counted from these sources, or None. Raises StoreError."""
    rows = store.read(experiment, EMULATOR)
    entry = store.provenance(experiment, EMULATOR).get(ENTRY)
    if rows and isinstance(entry, dict) and entry.get("digest") == _digest(rows):
        return [replace(row, run="") for row in rows]
    return None


def keep(store: Store, experiment: str, about: Mapping[str, Any]) -> None:
    """Write the digest of the sources that all stored rows were counted from by run `about`."""
    if stored(store, experiment) is None:
        run = {name: about.get(name) for name in ("commit", "date", "dirty")}
        run["digest"] = _digest(store.read(experiment, EMULATOR))
        recorded = store.provenance(experiment, EMULATOR) | {ENTRY: run}
        text = json.dumps(recorded, indent=2, sort_keys=True) + "\n"
        write_if_changed(store.path(experiment, EMULATOR, ".json"), text)
