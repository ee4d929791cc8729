"""Counts that need not be repeated: the same sources give the same counts, on every machine.

Beside the emulator's rows stands a digest of the sources they were counted from and of the rows
themselves. A complete run takes the stored rows while that digest is what it finds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fa_numba

from .store import EMULATOR, Row, Store, dump, write_if_changed

# What the JSON beside the rows calls the digest and the commit that it was counted at.
ENTRY = "counted"
PACKAGE, LAB = Path(fa_numba.__file__).parent, Path(__file__).parent
# What no count depends on; another file that is missing here is counted anew for nothing.
_NO_PART = {
    *(PACKAGE / name for name in ("torch.py", "algorithms.py", "reference.py", "__main__.py")),
    *PACKAGE.glob("commands/*"),
    *PACKAGE.glob("bounds/*"),
    *(LAB / f"{name}.py" for name in ("drawing", "film", "speed_figures", "style", "tables")),
    *(LAB / f"{name}.py" for name in ("published", "report", "peers", "speeds", "tune")),
    *(LAB / f"{name}.py" for name in ("kept", "provenance", "runner", "counter_target")),
}


def sources(module: Any) -> dict[str, Path]:
    """Name -> file of what the experiment's counts come from.

    These are fa_numba with its tables of block sizes, the lab, the experiment's module, and the
    other experiments that it imports from.
    """
    found = {
        f"{root.name}/{path.relative_to(root).as_posix()}": path
        for root, kinds in ((PACKAGE, ("*.py", "*.csv")), (LAB, ("*.py",)))
        for kind in kinds
        for path in root.rglob(kind)
        if path not in _NO_PART
    }
    used = {getattr(module, "__name__", "")}
    for value in vars(module).values():
        used |= {getattr(value, "__module__", None), getattr(value, "__name__", None)}
    for name in used:
        file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
        if file and name.startswith("experiments.") and not name.startswith("experiments.lab"):
            found[name] = Path(file)
    return found


def digest(files: Mapping[str, Path], rows: Sequence[Row]) -> str:
    """Of the files' names and text, whatever their line endings, and of the rows."""
    found = hashlib.sha256()
    for name, path in sorted(files.items()):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        found.update(name.encode() + b"\0" + text + b"\0")
    found.update(dump(rows).encode())
    return found.hexdigest()


def stored(store: Store, experiment: str, files: Mapping[str, Path]) -> list[Row] | None:
    """The emulator's rows, if they were counted from these sources; None otherwise.

    Raises StoreError where the rows or the JSON beside them cannot be read.
    """
    rows = store.read(experiment, EMULATOR)
    entry = _entry(store.provenance(experiment, EMULATOR))
    if rows and entry.get("digest") == digest(files, rows):
        return rows
    return None


def keep(
    store: Store, experiment: str, files: Mapping[str, Path], about: Mapping[str, Any]
) -> None:
    """Write down that the stored rows, all of them, were counted from these sources.

    `about` is the provenance of the run that counted them. The rest of the JSON stays: it is of the
    run that first had these numbers.
    """
    now = digest(files, store.read(experiment, EMULATOR))
    recorded = store.provenance(experiment, EMULATOR) or about
    if _entry(recorded).get("digest") == now:
        return
    run = {name: about.get(name) for name in ("commit", "date", "dirty")}
    text = json.dumps({**recorded, ENTRY: {**run, "digest": now}}, indent=2, sort_keys=True)
    write_if_changed(store.path(experiment, EMULATOR, ".json"), text + "\n")


def _entry(about: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = about.get(ENTRY)
    return entry if isinstance(entry, dict) else {}
