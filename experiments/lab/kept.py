"""What need not be repeated: the same sources give the same counts, on every machine.

Beside the emulator's rows stands a digest of the sources they were counted from and of the rows
themselves. A complete run takes the stored rows while that digest is what it finds. A run on a GPU
has the digest of its sources too, by which `schedule` tells what changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fa_numba

from .store import EMULATOR, Row, Store, dump, write_if_changed

# What the JSON beside the rows calls the digest and the commit that it was counted at.
ENTRY = "counted"
PACKAGE, LAB = Path(fa_numba.__file__).parent, Path(__file__).parent
EXPERIMENTS = LAB.parent
# What experiments import and no number depends on; another file that is missing here is measured
# anew for nothing.
_NO_PART = {
    *(LAB / f"{name}.py" for name in ("__init__", "options", "published", "speed_figures")),
    *(LAB / f"{name}.py" for name in ("store", "tables", "block_figures", "paper_bars")),
    *(PACKAGE / name for name in ("algorithms.py", "__main__.py")),
    *PACKAGE.glob("commands/*.py"),
    *PACKAGE.glob("bounds/*.py"),
    EXPERIMENTS / "__init__.py",
}
_NO_PART_OF_COUNTS = {
    *(LAB / f"{name}.py" for name in ("counter_target", "peers", "precompile", "speeds", "tune")),
    *(PACKAGE / name for name in ("torch.py", "reference.py")),
}
# Run by others under Nsight Compute, not imported.
_TARGET = "experiments.lab.counter_target"
_EMULATOR_ROOM = "fa_numba/emulator/"


def sources(module: Any, *, counts: bool) -> dict[str, Path]:
    """Name -> file of what the experiment's numbers come from: `counts`, or what a GPU measures.

    These are fa_numba with its tables of block sizes, the experiment's module, and the files of the
    lab and of other experiments that these import as modules. What a function imports when it is
    called, as those that draw do, has no part.
    """
    found = {
        name: path for name, path in _package() if counts or not name.startswith(_EMULATOR_ROOM)
    }
    todo = [getattr(module, "__name__", "")]
    while todo:
        name = todo.pop()
        path = _file(name)
        if path is None or name in found:
            continue
        found[name] = path
        todo += [_TARGET] if name == "experiments.lab.counters" else []
        todo += [other for other in _imports(name, path) if path not in _NO_PART]
    left_out = _NO_PART | (_NO_PART_OF_COUNTS if counts else set())
    return {name: path for name, path in found.items() if path not in left_out}


@functools.cache
def _package() -> tuple[tuple[str, Path], ...]:
    files = (path for kind in ("*.py", "*.csv") for path in PACKAGE.rglob(kind))
    return tuple((f"fa_numba/{path.relative_to(PACKAGE).as_posix()}", path) for path in files)


def _file(name: str) -> Path | None:
    """The file of a module of experiments; None of any other, and of a name in a module."""
    top, *rest = name.split(".")
    path = EXPERIMENTS.joinpath(*rest)
    found = (path.with_suffix(".py") if rest else path / "__init__.py", path / "__init__.py")
    return next((each for each in found if top == "experiments" and each.is_file()), None)


@functools.cache
def _imports(name: str, path: Path) -> list[str]:
    """The full names that a file imports, not in functions; a module's and those of its content."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def digest(files: Mapping[str, Path], rows: Sequence[Row]) -> str:
    """Of the files' names and text, whatever their line endings, and of the rows."""
    found = hashlib.sha256()
    for name, path in sorted(files.items()):
        found.update(name.encode() + b"\0" + _text(path, path.stat().st_mtime_ns) + b"\0")
    found.update(dump(rows, runs=False).encode())
    return found.hexdigest()


@functools.cache
def _text(path: Path, written: int) -> bytes:
    """The file's text, read again only when it was written again."""
    return path.read_bytes().replace(b"\r\n", b"\n")


def stored(store: Store, experiment: str, files: Mapping[str, Path]) -> list[Row] | None:
    """The emulator's rows, if they were counted from these sources; None otherwise.

    Raises StoreError where the rows or the JSON beside them cannot be read.
    """
    rows = store.read(experiment, EMULATOR)
    entry = _entry(store.provenance(experiment, EMULATOR))
    if rows and entry.get("digest") == digest(files, rows):
        return [replace(row, run="") for row in rows]
    return None


def keep(
    store: Store, experiment: str, files: Mapping[str, Path], about: Mapping[str, Any]
) -> None:
    """Write down that the stored rows, all of them, were counted from these sources.

    `about` is the run that counted them. The rest of the JSON stays: it is of the run that first
    had these numbers.
    """
    now = digest(files, store.read(experiment, EMULATOR))
    recorded = store.provenance(experiment, EMULATOR)
    if _entry(recorded).get("digest") == now:
        return
    run = {name: about.get(name) for name in ("commit", "date", "dirty")}
    text = json.dumps({**recorded, ENTRY: {**run, "digest": now}}, indent=2, sort_keys=True)
    write_if_changed(store.path(experiment, EMULATOR, ".json"), text + "\n")


def _entry(about: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = about.get(ENTRY)
    return entry if isinstance(entry, dict) else {}
