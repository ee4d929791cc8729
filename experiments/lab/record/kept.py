"""What need not be repeated: the same sources give the same counts, on every machine.

Beside the emulator's rows stands a digest of the sources they were counted from and of the rows
themselves. A complete run takes the stored rows while that digest is what it finds. A run on a GPU
has the digest of its sources too, by which `schedule` tells what changed.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fa_numba

from .slices import plain, reached
from .store import EMULATOR, Row, Store, dump, write_if_changed

# What the JSON beside the rows calls the digest and the commit that it was counted at.
ENTRY = "counted"
PACKAGE, EXPERIMENTS = Path(fa_numba.__file__).parent, Path(__file__).resolve().parents[2]
# Rooms that no number depends on: how rows are asked for, kept and shown.
_NO_PART = ("experiments.lab.record", "experiments.lab.show")
_NO_PART_OF_COUNTS = tuple(
    f"experiments.lab.measure.{name}" for name in ("counter_target", "peers", "speeds")
)
# The package's files that what the emulator counts does not come from.
_NOT_COUNTED = ("algorithms.py", "__main__.py", "commands/", "bounds/", "torch.py", "reference.py")
# Those that a GPU's times and bytes do come from: what makes the kernels' PTX, which of them is
# launched, and how a launch is timed. The way of a call on the host has a part where an experiment
# says so, see `registry.Experiment`.
_ON_GPU = (
    *("kernels/", "parts/", "intrinsics/", "tiling/", "choices/", "masks.py", "dropout.py"),
    *("dtypes.py", "integers.py", "options.py"),
    *("device/kernel.py", "device/front_end.py", "device/signature.py", "device/timing.py"),
)
_COUNTERS, _TARGET = (f"experiments.lab.measure.{x}" for x in ("counters", "counter_target"))


def sources(module: Any, *, counts: bool) -> dict[str, str]:
    """Name -> text, without words, of what the experiment's numbers come from, `counts` or what a
    GPU measures: fa_numba's files, and the statements of experiments that `measure` reaches.
    """
    more = () if counts else tuple(getattr(module, "MEASURES", ()))
    found = {
        f"fa_numba/{name}": _text(path)
        for name, path in _package(PACKAGE)
        if (not name.startswith(_NOT_COUNTED) if counts else name.startswith(_ON_GPU + more))
    }
    without = _NO_PART + (_NO_PART_OF_COUNTS if counts else ())
    return found | _reached(getattr(module, "__name__", ""), "measure", without)


def trained(module: str, name: str) -> str:
    """The digest of what a function of an experiment reaches, for what it gives and is kept."""
    return digest(_reached(module, name, _NO_PART), ())


def _reached(module: str, name: str, without: tuple[str, ...]) -> dict[str, str]:
    """Module -> the text of its statements that are reached, all of them where it is used whole."""
    wanted: dict[str, set[str | None]] = {}
    found: dict[str, str] = {}
    todo: list[tuple[str, str | None]] = [(module, name)]
    while todo:
        at, asked = todo.pop()
        path = _file(at)
        if path is None or at.startswith(without) or asked in wanted.setdefault(at, set()):
            continue
        wanted[at].add(asked)
        found[at], imported = reached(at, path, wanted[at])
        for base, x in imported:
            inner = f"{base}.{x}"
            todo.append((inner, None) if _file(inner) else (base, x))
        # Run by others under Nsight Compute, not imported.
        todo += [(_TARGET, None)] if at == _COUNTERS else []
    return found


@functools.cache
def _package(folder: Path) -> tuple[tuple[str, Path], ...]:
    files = (path for kind in ("*.py", "*.csv") for path in folder.rglob(kind))
    return tuple((path.relative_to(folder).as_posix(), path) for path in files)


def _file(name: str) -> Path | None:
    """The file of a module of experiments; None of any other, and of a name in a module."""
    top, *rest = name.split(".")
    if top != "experiments" or not all(rest):
        return None
    path = EXPERIMENTS.joinpath(*rest)
    found = (path.with_suffix(".py") if rest else path / "__init__.py", path / "__init__.py")
    return next((each for each in found if each.is_file()), None)


def digest(texts: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Of the texts and their names, and of the rows."""
    found = hashlib.sha256()
    for name, text in sorted(texts.items()):
        found.update(f"{name}\0{text}\0".encode())
    found.update(dump(rows, runs=False).encode())
    return found.hexdigest()


def _text(path: Path) -> str:
    """The file's text; Python's without words."""
    if path.suffix == ".py":
        return "".join(plain(path, path.stat().st_mtime_ns)[0].values())
    return path.read_bytes().decode().replace("\r\n", "\n")


def stored(store: Store, experiment: str, texts: Mapping[str, str]) -> list[Row] | None:
    """The emulator's rows, if counted from these sources, or None. Raises StoreError."""
    rows = store.read(experiment, EMULATOR)
    entry = _entry(store.provenance(experiment, EMULATOR))
    if rows and entry.get("digest") == digest(texts, rows):
        return [replace(row, run="") for row in rows]
    return None


def keep(store: Store, experiment: str, texts: Mapping[str, str], about: Mapping[str, Any]) -> None:
    """Write the digest of the sources that all stored rows were counted from by run `about`."""
    now = digest(texts, store.read(experiment, EMULATOR))
    recorded = store.provenance(experiment, EMULATOR)
    if _entry(recorded).get("digest") == now:
        return
    run = {name: about.get(name) for name in ("commit", "date", "dirty")}
    text = json.dumps({**recorded, ENTRY: {**run, "digest": now}}, indent=2, sort_keys=True)
    write_if_changed(store.path(experiment, EMULATOR, ".json"), text + "\n")


def _entry(about: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = about.get(ENTRY)
    return entry if isinstance(entry, dict) else {}
