"""The data store: one tidy CSV for each experiment and machine, its provenance in a JSON beside it.

`<root>/data/<experiment>/<machine>.csv`. Files are sorted and are rewritten only when a row
differs, so that a repeated count leaves a checkout as it was.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

EMULATOR = "emulator"
MODEL = "model"
PUBLISHED = "published"
SOURCES = ("measured", "counted", "model", "l2", "dram", PUBLISHED)

Number = int | float


class StoreError(ValueError):
    """A file or folder that is damaged, or cannot be read or written: which one, and why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number. `machine` names the file it stands in; the other fields are the CSV's columns.

    `value` is None for a configuration that failed; `note` then says why. `p20`, `p80` and `n`
    belong to timings: percentiles and how many runs. An experiment that varies what no column has
    says where a row stands at the start of `note`, up to a semicolon: `place`.
    """

    machine: str
    experiment: str
    series: str
    source: str
    pass_: str = "fwd"
    dtype: str = "float32"
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool
    Br: int | None = None
    Bc: int | None = None
    metric: str
    unit: str
    value: Number | None
    p20: Number | None = None
    p80: Number | None = None
    n: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}: allowed is {', '.join(SOURCES)}")

    @property
    def number(self) -> Number:
        """The value of a row that did not fail. Raises ValueError for one that did."""
        if self.value is None:
            raise ValueError(f"the row of {self.series}, {self.metric}, has no value: {self.note}")
        return self.value

    @property
    def failed(self) -> bool:
        return self.value is None

    @property
    def key(self) -> tuple[Any, ...]:
        """What the number is of; two rows with one key are two readings of the same thing."""
        return tuple(getattr(self, name) for name in _KEY)

    @property
    def place(self) -> str:
        """The note up to a semicolon: "10 % of blocks" of "10 % of blocks; failed: why"."""
        return self.note.partition(";")[0]

    @property
    def _order(self) -> tuple[Any, ...]:
        return (*(-1 if part is None else part for part in self.key), self.note)


_FIELDS = tuple(f.name for f in fields(Row) if f.name != "machine")
_KEY = _FIELDS[: _FIELDS.index("metric") + 1]
COLUMNS = tuple(name.rstrip("_") for name in _FIELDS)
_INTS = {"batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "Br", "Bc", "n"}
_NEEDED = _INTS - {"Br", "Bc", "n"}
_NUMBERS = {"value", "p20", "p80"}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _number(text: str) -> Number:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _field(name: str, text: str) -> Any:
    """A cell as its column has it. Raises ValueError that names the column and what is allowed."""
    allowed = "true or false"
    try:
        if name == "causal":
            return {"true": True, "false": False}[text]
        if name in _INTS:
            allowed = "an integer"
            return int(text) if text or name in _NEEDED else None
        if name in _NUMBERS:
            allowed = "a number"
            return _number(text) if text else None
    except (KeyError, ValueError):
        raise ValueError(f"{name.rstrip('_')} is {text!r}: allowed is {allowed}") from None
    return text


def dump(rows: Iterable[Row]) -> str:
    """The rows as CSV text, sorted by key."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=lambda row: row._order):
        writer.writerow([_text(getattr(row, name)) for name in _FIELDS])
    return text.getvalue()


def parse(text: str, machine: str) -> list[Row]:
    """The rows of CSV text.

    Raises ValueError, which names the line, when the columns or a value are not ours.
    """
    lines = csv.reader(io.StringIO(text))
    header = tuple(next(lines, ()))
    if header != COLUMNS:
        raise ValueError(f"columns are {', '.join(header)}: expected {', '.join(COLUMNS)}")
    rows = []
    for line in lines:
        try:
            if len(line) != len(COLUMNS):
                raise ValueError(f"it has {len(line)} columns: expected {len(COLUMNS)}")
            named = zip(_FIELDS, line, strict=True)
            rows.append(Row(machine=machine, **{name: _field(name, cell) for name, cell in named}))
        except ValueError as error:
            raise ValueError(f"line {lines.line_num}: {error}") from error
    return rows


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise a StoreError that names the path, or the folder in its way, for what goes wrong."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise StoreError(f"{path}: {error}") from error


def write_if_changed(path: Path, content: str | bytes) -> bool:
    """Replace the file in one step unless it holds just that; gives whether it changed.

    Folders are made. Raises StoreError where a folder or the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with _naming(path):
        if path.exists() and path.read_bytes() == data:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    return True


class Store:
    """Stored rows and provenance under `<root>/data`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, experiment: str, machine: str, suffix: str = ".csv") -> Path:
        return self.root / "data" / experiment / f"{machine}{suffix}"

    def make(self, experiment: str) -> None:
        """Make the experiment's folder. Raises StoreError where nothing can be written there."""
        folder = self.root / "data" / experiment
        with _naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()

    def machines(self, experiment: str) -> list[str]:
        """Machines with stored rows of the experiment: GPUs, `emulator` and `model`."""
        return sorted(path.stem for path in (self.root / "data" / experiment).glob("*.csv"))

    def read(self, experiment: str, machine: str) -> list[Row]:
        """The stored rows, none without a file. Raises StoreError, with path and line."""
        path = self.path(experiment, machine)
        with _naming(path):
            return parse(path.read_text(), machine) if path.exists() else []

    def provenance(self, experiment: str, machine: str) -> dict[str, Any]:
        """The JSON beside the rows; empty when there is none. Raises StoreError."""
        path = self.path(experiment, machine, ".json")
        with _naming(path):
            return json.loads(path.read_text()) if path.exists() else {}


@dataclass
class Outcome:
    """What one run did to a machine's file: rows measured, those failed, whether it changed."""

    measured: int = 0
    failed: int = 0
    changed: bool = False


class Recorder:
    """Takes one run's rows as they come and keeps each at once: an interrupted run loses none.

    A row replaces the stored row of the same key, and with it goes what older runs stored of the
    same series, source and problem: at once where a row of other tiles or a failure contradicts
    it, else when `finish` ends the run. Other rows stay, unless `finish(complete=True)` says that
    the run measured all there is: then no older row of its series and sources is left.

    `swept` names the columns that an experiment varies, such as Br and Bc; rows that differ in
    them do not contradict each other. "note" among them: rows differ by their `place`.
    """

    def __init__(
        self,
        store: Store,
        experiment: str,
        provenance: Callable[[str], dict[str, Any]],
        swept: Sequence[str] = (),
    ) -> None:
        self.store, self.experiment = store, experiment
        self._provenance = provenance
        chosen = {"metric", "Br", "Bc"} - set(swept)
        self._setting = tuple(name for name in _KEY if name not in chosen)
        self._placed = "note" in swept
        self._rows: dict[str, dict[tuple[Any, ...], Row]] = {}
        self._fresh: dict[str, set[tuple[Any, ...]]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def add(self, row: Row) -> None:
        """Store a row as soon as it is measured."""
        self._take(row)
        self._write(row.machine)

    def add_all(self, rows: Sequence[Row]) -> None:
        """Store rows that make one whole: older rows of the same series, source and problem go."""
        for row in rows:
            self._take(row)
        for machine in dict.fromkeys(row.machine for row in rows):
            self._drop_redone(machine, self._whole_of)
            self._write(machine)

    def _take(self, row: Row) -> None:
        machine = row.machine
        if machine not in self._rows:
            stored = self.store.read(self.experiment, machine)
            self._rows[machine] = {self._key_of(old): old for old in stored}
            self._fresh[machine] = set()
            self._before[machine] = self.store.provenance(self.experiment, machine)
            self.outcomes[machine] = Outcome()
        self._rows[machine][self._key_of(row)] = row
        self._fresh[machine].add(self._key_of(row))
        setting = self._setting_of(row)
        self._drop(
            machine,
            lambda old: (
                self._setting_of(old) == setting
                and (row.failed or (old.Br, old.Bc) != (row.Br, row.Bc))
            ),
        )
        outcome = self.outcomes[machine]
        outcome.measured += 1
        outcome.failed += row.failed

    def finish(self, *, complete: bool) -> dict[str, Outcome]:
        """End the run: drop older rows as the class says. Gives each machine's outcome."""
        for machine in self._rows:
            self._drop_redone(machine, _series if complete else self._setting_of)
            self._write(machine)
        return self.outcomes

    def _drop_redone(self, machine: str, same: Callable[[Row], tuple[Any, ...]]) -> None:
        rows = self._rows[machine]
        redone = {same(rows[key]) for key in self._fresh[machine]}
        self._drop(machine, lambda old: same(old) in redone)

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return (*row.key, row.place) if self._placed else row.key

    def _setting_of(self, row: Row) -> tuple[Any, ...]:
        setting = self._whole_of(row)
        return (*setting, row.place) if self._placed else setting

    def _whole_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self._setting)

    def _drop(self, machine: str, stale: Callable[[Row], bool]) -> None:
        rows, fresh = self._rows[machine], self._fresh[machine]
        if len(rows) == len(fresh):
            return
        for key in [key for key, old in rows.items() if key not in fresh and stale(old)]:
            del rows[key]

    def _write(self, machine: str) -> None:
        rows, outcome = self._rows[machine], self.outcomes[machine]
        path = self.store.path(self.experiment, machine)
        outcome.changed |= write_if_changed(path, dump(rows.values()))
        if outcome.changed:
            about = dict(self._provenance(machine))
            kept = len(rows) - len(self._fresh[machine])
            if kept:
                before = self._before[machine]
                run = {name: before.get(name) for name in ("commit", "dirty", "command", "date")}
                about["rows_of_earlier_runs"] = kept
                about["earlier_runs"] = [run, *before.get("earlier_runs", [])]
            text = json.dumps(about, indent=2, sort_keys=True) + "\n"
            write_if_changed(self.store.path(self.experiment, machine, ".json"), text)


def _series(row: Row) -> tuple[str, ...]:
    return row.series, row.source, row.pass_, row.dtype
