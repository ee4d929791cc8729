"""Reuse of counts that the emulator made in an earlier run.

The emulator counts the same numbers on every machine. Therefore counting is repeated only if
something changed. The JSON file of the emulator's rows contains two kinds of digests: a digest of
the rows, and digests of the code and kernels with which they were counted (see `ran`). A complete
run uses the stored rows instead of counting again if both kinds of digests still match: the rows
are unchanged, and the run would launch the same kernels by the same code.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import ran
from .store import EMULATOR, Row, Store, dump, write_if_changed

# Entry of the JSON file: digests, and the commit at which the rows were counted.
ENTRY = "counted"


def sources() -> str:
    """Return a digest of all .py and .csv files of the packages `fa_numba` and `experiments`.

    The digest is of the bytes of the files. A run continues an interrupted run only if the digests
    are equal.
    """
    found = hashlib.sha256()
    for folder in (ran.PACKAGE, ran.PACKAGE.parent / "experiments"):
        for path in sorted(p for kind in ("*.py", "*.csv") for p in folder.rglob(kind)):
            found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def digest(rows: Sequence[Row]) -> str:
    """Return a digest of rows. The ids of the rows' runs do not change the digest."""
    return hashlib.sha256(dump(rows, runs=False).encode()).hexdigest()[:16]


def stored(store: Store, experiment: str) -> list[Row] | None:
    """Return the emulator's stored rows if a run would count the same rows again, otherwise None.

    Raise StoreError if a file is damaged.
    """
    rows = store.read(experiment, EMULATOR)
    entry = store.provenance(experiment, EMULATOR).get(ENTRY)
    if not isinstance(entry, dict) or entry.get("rows") != digest(rows):
        return None
    if ran.changed(entry.get("ran"), experiment, EMULATOR) != []:
        return None
    return rows


def keep(store: Store, experiment: str, about: Mapping[str, Any], made: ran.Ran) -> None:
    """Write an entry to the emulator's JSON file, so that a later run can reuse the stored rows.

    The entry says which code and which kernels counted the rows. A later run compares the entry
    with its own code and kernels, and reuses the rows if both are equal. `made` contains the
    digests of code and kernels. `about` describes the run that counted the rows: commit, date and
    whether there were uncommitted changes. Nothing is written if the JSON file already says that
    the rows are current.
    """
    if stored(store, experiment) is None:
        run = {name: about.get(name) for name in ("commit", "date", "dirty")}
        run |= {"ran": made, "rows": digest(store.read(experiment, EMULATOR))}
        recorded = store.provenance(experiment, EMULATOR) | {ENTRY: run}
        text = json.dumps(recorded, indent=2, sort_keys=True) + "\n"
        write_if_changed(store.path(experiment, EMULATOR, ".json"), text)
