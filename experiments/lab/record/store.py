"""The data store: one tidy CSV for each experiment and machine, its provenance in a JSON beside it.

`<root>/data/<experiment>/<machine>.csv`. Files are sorted and are rewritten only when a row
differs, so that a repeated count leaves a checkout as it was. A row names its run, which the JSON
describes; recordings from before rows did have one run, without a name.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
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
    """One number: the CSV's columns, and `machine`, its file. `value` is None for what failed,
    `note` says why; `p20`, `p80` and `n` belong to timings. What no column has stands at the start
    of `note`, up to a semicolon: `place`. `run` is the id of the run, put in by the recorder.
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
    run: str = field(default="", compare=False)

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
_SETTING = tuple(name for name in _KEY if name not in ("metric", "Br", "Bc"))
# What a cell is read as, if not as text; of these, some may be empty.
_READ: dict[str, Callable[[str], Any]] = {
    "causal": {"true": True, "false": False}.__getitem__,
    **dict.fromkeys(("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim"), int),
    **dict.fromkeys(("Br", "Bc", "n"), lambda text: int(text) if text else None),
    **dict.fromkeys(("value", "p20", "p80"), lambda text: _number(text) if text else None),
}


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


def impossible(row: Row) -> str:
    """What of the row no measurement or count gives; empty for nothing."""
    least, allowed = 0.0, "a finite number of at least 0"
    if row.metric.endswith("difference"):
        least, allowed = -math.inf, "a finite number"
    for n in (row.value, row.p20, row.p80):
        if n is not None and not (math.isfinite(n) and n >= least):
            return f"{row.metric} is {n}: allowed is {allowed}"
    return ""


def select(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """The rows that did not fail with these fields, of which a tuple allows several values."""
    wanted = [(n, want if isinstance(want, tuple) else (want,)) for n, want in fields.items()]
    return [r for r in rows if not r.failed and all(getattr(r, n) in want for n, want in wanted)]


def values(rows: Iterable[Row], *names: str, **fields: Any) -> dict[Any, Any]:
    """The numbers of the rows with these fields by these columns, of several by a tuple."""
    key = attrgetter(*names)
    return {key(row): row.number for row in select(rows, **fields)}


def nested(rows: Iterable[Row], *names: Any, **fields: Any) -> dict[Any, Any]:
    """The same one in the other: by the first column, or function of a row, then by the next."""
    found: dict[Any, Any] = {}
    for row in select(rows, **fields):
        *outer, last = (getattr(row, n) if isinstance(n, str) else n(row) for n in names)
        at = found
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = row.number
    return found


def setting(row: Row) -> tuple[Any, ...]:
    """What a run measures anew as a whole: series, source and problem."""
    return tuple(getattr(row, name) for name in _SETTING)


def dump(rows: Iterable[Row], *, runs: bool = True) -> str:
    """The rows as CSV text, sorted by key; without the column of their runs unless `runs`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    last = None if runs else -1
    writer.writerow(COLUMNS[:last])
    for row in sorted(rows, key=lambda row: row._order):
        writer.writerow([_text(getattr(row, name)) for name in _FIELDS[:last]])
    return text.getvalue()


@lru_cache(128)  # a page of tables asks for each file some twelve times
def parse(text: str, machine: str) -> tuple[Row, ...]:
    """The rows of CSV text, their runs or not. Raises ValueError, which names the line, where
    columns or a value are not ours.
    """
    lines = csv.reader(io.StringIO(text))
    header = tuple(next(lines, ()))
    if header not in (COLUMNS, COLUMNS[:-1]):
        raise ValueError(f"columns are {', '.join(header)}: expected {', '.join(COLUMNS)}")
    rows: list[Row] = []
    for line in lines:
        try:
            if len(line) != len(header):
                raise ValueError(f"it has {len(line)} columns: expected {len(header)}")
            named = zip(_FIELDS[: len(header)], line, strict=True)
            read = {name: _READ.get(name, str)(cell) for name, cell in named}
            rows.append(Row(machine=machine, **read))
        except (KeyError, ValueError) as error:
            raise ValueError(f"line {lines.line_num}: {error}") from error
    return tuple(rows)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise a StoreError that names the path, or the folder in its way, for what goes wrong."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise StoreError(f"{path}: {error}") from error


def replace_files(contents: Mapping[Path, str | bytes]) -> list[Path]:
    """Replace each file in one step unless it holds just that; gives those changed. All are written
    before the first is replaced: where one cannot be, each is as it was. Raises StoreError.
    """
    beside: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            data = content.encode("utf-8") if isinstance(content, str) else content
            with naming(path):
                if not path.exists() or path.read_bytes() != data:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    beside[path] = path.with_name(f".{path.name}.{os.getpid()}")
                    beside[path].write_bytes(data)
        for path, new in beside.items():
            with naming(path):
                new.replace(path)
    finally:
        for new in beside.values():
            new.unlink(missing_ok=True)
    return list(beside)


def write_if_changed(path: Path, content: str | bytes) -> bool:
    """`replace_files` of one; gives whether it changed."""
    return bool(replace_files({path: content}))


class Store:
    """Stored rows and provenance under `<root>/data`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, experiment: str, machine: str, suffix: str = ".csv") -> Path:
        return self.root / "data" / experiment / f"{machine}{suffix}"

    def machines(self, experiment: str) -> list[str]:
        """Machines with stored rows of the experiment: GPUs, `emulator` and `model`."""
        return sorted(path.stem for path in (self.root / "data" / experiment).glob("*.csv"))

    def read(self, experiment: str, machine: str) -> list[Row]:
        """The stored rows, none without a file. Raises StoreError, with path and line."""
        path = self.path(experiment, machine)
        with naming(path):
            return list(parse(path.read_text("utf-8"), machine)) if path.exists() else []

    def provenance(self, experiment: str, machine: str) -> dict[str, Any]:
        """The JSON beside the rows; empty when there is none. Raises StoreError."""
        path = self.path(experiment, machine, ".json")
        with naming(path):
            return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def runs(self, experiment: str, machine: str) -> list[dict[str, Any]]:
        """The runs that the JSON lists, the last one first. Raises StoreError."""
        about = self.provenance(experiment, machine)
        one = {name: value for name, value in about.items() if name != "counted"}
        return list(about.get("runs", [one] if about else []))

    def recorded(self, experiment: str, machine: str) -> tuple[list[Row], list[dict[str, Any]]]:
        """The stored rows and their runs. Raises StoreError, also where the JSON lacks one."""
        rows = self.read(experiment, machine)
        known = {run.get("id", ""): run for run in self.runs(experiment, machine)}
        named = {row.run for row in rows}
        for name in named - set(known):
            path = self.path(experiment, machine, ".json")
            raise StoreError(f"{path}: it does not describe run {name!r} of {machine}.csv")
        return rows, [run for name, run in known.items() if name in named]
