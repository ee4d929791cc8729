"""Counts of the emulator that need not be repeated, as they would be the same on every machine.

The JSON file of the emulator's rows says what the rows were counted with (`ran`), and has a digest
of the rows. A complete run takes the stored rows on two conditions: it would launch the same
kernels by the same code, and the rows are as they were counted.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import ran
from .store import EMULATOR, Row, Store, dump, write_if_changed

# What the JSON calls the digests, and the commit that the rows were counted at.
ENTRY = "counted"


def sources() -> str:
    """Return the digest of all files of programs and choices, byte by byte.

    A run continues an interrupted run only if all these files are equal.
    """
    found = hashlib.sha256()
    for folder in (ran.PACKAGE, ran.PACKAGE.parent / "experiments"):
        for path in sorted(p for kind in ("*.py", "*.csv") for p in folder.rglob(kind)):
            found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def digest(rows: Sequence[Row]) -> str:
    """Return the digest of rows, without the ids of their runs."""
    return hashlib.sha256(dump(rows, runs=False).encode()).hexdigest()[:16]


def stored(store: Store, experiment: str) -> list[Row] | None:
    """Return the emulator's stored rows; None if a run could give others. Raises StoreError."""
    rows = store.read(experiment, EMULATOR)
    entry = store.provenance(experiment, EMULATOR).get(ENTRY)
    if not rows or not isinstance(entry, dict) or entry.get("rows") != digest(rows):
        return None
    if ran.changed(entry.get("ran"), experiment, EMULATOR) != []:
        return None
    return [replace(row, run="") for row in rows]


def keep(store: Store, experiment: str, about: Mapping[str, Any], made: ran.Ran) -> None:
    """Write that all stored rows were counted with `made`, by the run that `about` describes."""
    if stored(store, experiment) is None:
        run = {name: about.get(name) for name in ("commit", "date", "dirty")}
        run |= {"ran": made, "rows": digest(store.read(experiment, EMULATOR))}
        recorded = store.provenance(experiment, EMULATOR) | {ENTRY: run}
        text = json.dumps(recorded, indent=2, sort_keys=True) + "\n"
        write_if_changed(store.path(experiment, EMULATOR, ".json"), text)
