"""The data store: for each experiment and machine a CSV file, and a JSON file about its runs.

The files are `<root>/data/<experiment>/<machine>.csv` and `.json`. Rows are sorted. A file is
written only if its content changes. Therefore counting the same numbers again does not change a
checkout. Each row contains the id of its run, and the JSON file describes the run. Old recordings
have a single run without an id.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
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
    """Raised if a file or folder is damaged, or cannot be read or written. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of data: one number, with the columns that identify it. A line of a CSV file.

    Parameters
    ----------
    machine : str
        Name of the CSV file: a GPU, "emulator" or "model".
    experiment : str
        Name of the experiment.
    series : str
        The kernel or library that was run, such as "fa2-mma" or "torch-cudnn".
    source : str
        How the number was obtained: "measured" (by a run), "counted" (by the emulator), "model" (by
        a closed form), "l2" or "dram" (by hardware counters), or "published" (by a paper).
    pass_ : str, default "fwd"
        "fwd", "bwd" or "fwd+bwd". The CSV's column is "pass".
    dtype : str, default "float32"
        Dtype of Q, K and V.
    batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim : int
        Sizes of the problem.
    causal : bool
        Whether the mask is causal.
    Br, Bc : int, optional
        Tile sizes. None if they are not known.
    metric : str
        The quantity, such as "time", "speed", "loads", "traffic", "memory" or "error".
    unit : str
        Unit of the number, such as "ms", "TFLOP/s", "elements", "bytes", "MiB"; "1" for a ratio.
    value : int, float or None
        The number; for timings the median. None if the measurement failed.
    p20, p80 : int or float, optional
        20th and 80th percentile of a timing.
    n : int, optional
        Number of timed calls.
    note : str, default ""
        Text up to the first semicolon: facts for which there is no column, such as "10 % of
        blocks". Text after the semicolon: the reason why the measurement failed.
    run : str, default ""
        Id of the run. The recorder sets it. Comparisons of rows ignore it.

    Raises
    ------
    ValueError
        If `source` is not one of these names.

    Examples
    --------
    >>> row = Row(machine="model", experiment="demo", series="fa2-simt", source="model", batch=1,
    ...     heads_q=1, heads_k=1, seqlen_q=512, seqlen_k=512, head_dim=64, causal=False,
    ...     metric="loads", unit="elements", value=1000, note="10 % of blocks")
    >>> row.number, row.failed, row.place
    (1000, False, '10 % of blocks')

    A measurement that failed has no value:

    >>> from dataclasses import replace
    >>> failed = replace(row, value=None, note="10 % of blocks; failed: no memory")
    >>> failed.failed, failed.place
    (True, '10 % of blocks')
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
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")

    @property
    def number(self) -> Number:
        """Return the value of the row, which must not have failed.

        Raises
        ------
        ValueError
            If the row failed.
        """
        if self.value is None:
            raise ValueError(
                f"the row of series {self.series} and metric {self.metric} must have a value, got "
                f"none: {self.note}"
            )
        return self.value

    @property
    def failed(self) -> bool:
        """Return whether the measurement failed, so that there is no value."""
        return self.value is None

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the values that identify the measured quantity: CSV columns up to the metric.

        The machine is not in the key. Two rows of one machine with equal keys and equal `place` are
        two readings of one quantity.
        """
        return tuple(getattr(self, name) for name in _KEY)

    @property
    def place(self) -> str:
        """Return the note up to the first semicolon.

        For the note "10 % of blocks; failed: why" it is "10 % of blocks".
        """
        return self.note.partition(";")[0]

    @property
    def _order(self) -> tuple[Any, ...]:
        return (*(-1 if part is None else part for part in self.key), self.note)


_FIELDS = tuple(f.name for f in fields(Row) if f.name != "machine")
_KEY = _FIELDS[: _FIELDS.index("metric") + 1]
COLUMNS = tuple(name.rstrip("_") for name in _FIELDS)
_SETTING = tuple(name for name in _KEY if name not in ("metric", "Br", "Bc"))
# Columns that are not text -> function that reads a cell.
_READ: dict[str, Callable[[str], Any]] = {
    "causal": {"true": True, "false": False}.__getitem__,
    **dict.fromkeys(("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim"), int),
    **dict.fromkeys(("Br", "Bc", "n"), lambda text: int(text) if text else None),
    **dict.fromkeys(("value", "p20", "p80"), lambda text: _number(text) if text else None),
}


def _cell(name: str, text: str) -> Any:
    """Return the value of a cell. If the text is wrong, raise ValueError with the column's name."""
    try:
        return _READ.get(name, str)(text)
    except (KeyError, ValueError):
        wanted = "true or false" if name == "causal" else "a number"
        raise ValueError(f"{name} must be {wanted}, got {text!r}") from None


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
    """Return why the numbers of a row are impossible; an empty text if they are possible.

    Parameters
    ----------
    row : Row
        A row.

    Returns
    -------
    str
        A sentence about the first number that is negative or not finite. Numbers of metrics that
        end in "difference" may be negative.
    """
    least, allowed = 0.0, "a finite number of at least 0"
    if row.metric.endswith("difference"):
        least, allowed = -math.inf, "a finite number"
    for n in (row.value, row.p20, row.p80):
        if n is not None and not (math.isfinite(n) and n >= least):
            return f"{row.metric} must be {allowed}, got {n}"
    return ""


def select(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """Return the rows that did not fail and have the given fields.

    Parameters
    ----------
    rows : iterable of Row
        Rows.
    **fields : Any
        Attributes of a row and the wanted values, such as ``series="fa2-mma"``. A tuple allows
        several values.

    Returns
    -------
    list of Row
        The selected rows.

    Examples
    --------
    >>> common = dict(machine="model", experiment="demo", source="model", batch=1, heads_q=1,
    ...     heads_k=1, head_dim=64, causal=False, metric="loads", unit="elements")
    >>> numbers = ("fa1-simt", 64, 10), ("fa2-simt", 64, 20), ("fa2-simt", 128, 40)
    >>> rows = [Row(series=s, seqlen_q=N, seqlen_k=N, value=x, **common) for s, N, x in numbers]
    >>> [row.value for row in select(rows, series=("fa1-simt", "fa2-simt"), seqlen_q=64)]
    [10, 20]
    """
    found = list(rows)
    for name, want in fields.items():  # column by column, as the first leaves only few rows
        of_row, allowed = attrgetter(name), want if isinstance(want, tuple) else (want,)
        found = [row for row in found if of_row(row) in allowed]
    return [row for row in found if not row.failed]


def values(rows: Iterable[Row], *names: str, **fields: Any) -> dict[Any, Any]:
    """Return a dictionary from the named columns to the numbers of the rows with the given fields.

    Parameters
    ----------
    rows : iterable of Row
        Rows.
    *names : str
        One or more attributes of a row. Their values become the key.
    **fields : Any
        Attributes of a row and the wanted values, as for `select`.

    Returns
    -------
    dict
        Maps a key to a number. The key is a tuple if there are several names. If several rows have
        the same key, the last of them gives the number.

    Examples
    --------
    >>> common = dict(machine="model", experiment="demo", source="model", batch=1, heads_q=1,
    ...     heads_k=1, head_dim=64, causal=False, metric="loads", unit="elements")
    >>> numbers = ("fa1-simt", 64, 10), ("fa2-simt", 64, 20), ("fa2-simt", 128, 40)
    >>> rows = [Row(series=s, seqlen_q=N, seqlen_k=N, value=x, **common) for s, N, x in numbers]
    >>> values(rows, "series", seqlen_q=64)
    {'fa1-simt': 10, 'fa2-simt': 20}
    """
    key = attrgetter(*names)
    return {key(row): row.number for row in select(rows, **fields)}


def nested(rows: Iterable[Row], *names: Any, **fields: Any) -> dict[Any, Any]:
    """Return the numbers of the rows with the given fields as nested dictionaries.

    Parameters
    ----------
    rows : iterable of Row
        Rows.
    *names : str or callable
        For each level of dictionaries, an attribute of a row, or a function that takes a row and
        returns the key.
    **fields : Any
        Attributes of a row and the wanted values, as for `select`.

    Returns
    -------
    dict
        Nested dictionaries, with one level per name.

    Examples
    --------
    >>> common = dict(machine="model", experiment="demo", source="model", batch=1, heads_q=1,
    ...     heads_k=1, head_dim=64, causal=False, metric="loads", unit="elements")
    >>> numbers = ("fa1-simt", 64, 10), ("fa2-simt", 64, 20), ("fa2-simt", 128, 40)
    >>> rows = [Row(series=s, seqlen_q=N, seqlen_k=N, value=x, **common) for s, N, x in numbers]
    >>> nested(rows, "series", "seqlen_q")
    {'fa1-simt': {64: 10}, 'fa2-simt': {64: 20, 128: 40}}
    """
    found: dict[Any, Any] = {}
    for row in select(rows, **fields):
        *outer, last = (getattr(row, n) if isinstance(n, str) else n(row) for n in names)
        at = found
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = row.number
    return found


def setting(row: Row) -> tuple[Any, ...]:
    """Return the setting of a row: which call was measured, without the quantity and the tiles.

    A run measures all rows of one setting together, such as the time and the memory of a call.

    Parameters
    ----------
    row : Row
        A row.

    Returns
    -------
    tuple
        Experiment, series, source, pass and problem: the key without metric and tile sizes.
    """
    return tuple(getattr(row, name) for name in _SETTING)


def dump(rows: Iterable[Row], *, runs: bool = True) -> str:
    """Return the rows as CSV text, sorted by key.

    Parameters
    ----------
    rows : iterable of Row
        Rows.
    runs : bool, default True
        Whether the text contains the column "run" with the ids of runs.

    Returns
    -------
    str
        The text. Its first line contains the names of the columns.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    last = None if runs else -1
    writer.writerow(COLUMNS[:last])
    for row in sorted(rows, key=lambda row: row._order):
        writer.writerow([_text(getattr(row, name)) for name in _FIELDS[:last]])
    return text.getvalue()


@lru_cache(128)  # the tables of a page read each file about twelve times
def parse(text: str, machine: str) -> tuple[Row, ...]:
    """Return the rows that CSV text contains, with or without the column "run".

    Parameters
    ----------
    text : str
        The text. Its first line must contain the names of the columns.
    machine : str
        Value of `machine` for all rows.

    Returns
    -------
    tuple of Row
        The rows in the order of the text.

    Raises
    ------
    ValueError
        If the names of the columns are wrong, or a cell cannot be read. For a cell, the message
        names the line.
    """
    lines = csv.reader(io.StringIO(text))
    header = tuple(next(lines, ()))
    if header not in (COLUMNS, COLUMNS[:-1]):
        raise ValueError(f"the columns must be {', '.join(COLUMNS)}, got {', '.join(header)}")
    rows: list[Row] = []
    for line in lines:
        try:
            if len(line) != len(header):
                raise ValueError(f"the number of columns must be {len(header)}, got {len(line)}")
            named = zip(_FIELDS[: len(header)], line, strict=True)
            rows.append(Row(machine=machine, **{name: _cell(name, cell) for name, cell in named}))
        except ValueError as error:
            raise ValueError(f"line {lines.line_num}: {error}") from error
    return tuple(rows)


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """Return the text of the error for a name that does not exist, with the nearest name.

    Parameters
    ----------
    kind : str
        The kind of thing that has such names, such as "table".
    name : str
        The name that does not exist.
    names : iterable of str
        The names that exist.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> unknown("table", "sped", ["speed", "cache"])
    "no table is named 'sped'; did you mean 'speed'? All tables: cache, speed"
    """
    names = sorted(names)
    close = difflib.get_close_matches(str(name), names, 1)
    meant = f"; did you mean {close[0]!r}? All {kind}s: " if close else f"; the {kind}s are "
    return f"no {kind} is named {name!r}{meant}{', '.join(names)}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context manager that turns errors inside into a StoreError with the path in its message.

    Parameters
    ----------
    path : Path
        The file that is read or written inside the context.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    StoreError
        If an OSError, ValueError or csv.Error occurs inside.
    """
    try:
        yield
    except OSError as error:
        file = Path(error.filename or path)
        inside = next((p for p in file.parents if os.path.exists(p)), file)
        if isinstance(error, NotADirectoryError) and inside.is_file():
            reason = f"{inside} is a file, but must be a folder; move it away"
        else:
            reason = str(error.strerror or error)
        raise StoreError(f"cannot read or write {file}: {reason}") from error
    except (ValueError, csv.Error) as error:
        raise StoreError(f"{path}: {error}") from error


def replace_files(contents: Mapping[Path, str | bytes]) -> list[Path]:
    """Write several files, each in one step, and only files whose content changes.

    All new contents are first written to temporary files in the same folders. If one of them cannot
    be written, no file is changed.

    Parameters
    ----------
    contents : mapping of Path to str or bytes
        The content of each file.

    Returns
    -------
    list of Path
        The files that changed.

    Raises
    ------
    StoreError
        If a file cannot be read or written.
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
    """Write one file in one step, and only if its content changes.

    Parameters
    ----------
    path : Path
        The file.
    content : str or bytes
        The new content of the file.

    Returns
    -------
    bool
        Whether the file changed.

    Raises
    ------
    StoreError
        If the file cannot be read or written.
    """
    return bool(replace_files({path: content}))


class Store:
    """The recordings in the folder `<root>/data`: stored rows, and descriptions of their runs.

    Parameters
    ----------
    root : Path
        The folder that contains "data".
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, experiment: str, machine: str, suffix: str = ".csv") -> Path:
        """Return the path of a recording's CSV or JSON file.

        Parameters
        ----------
        experiment : str
            Name of the experiment.
        machine : str
            A GPU, "emulator" or "model".
        suffix : str, default ".csv"
            ".csv" or ".json".

        Returns
        -------
        Path
            The path. The file need not exist.
        """
        return self.root / "data" / experiment / f"{machine}{suffix}"

    def machines(self, experiment: str) -> list[str]:
        """Return the names of the machines that have stored rows of an experiment.

        Parameters
        ----------
        experiment : str
            Name of the experiment.

        Returns
        -------
        list of str
            Names of GPUs, "emulator" or "model", sorted.
        """
        return sorted(path.stem for path in (self.root / "data" / experiment).glob("*.csv"))

    def read(self, experiment: str, machine: str) -> list[Row]:
        """Return the stored rows of an experiment on a machine.

        Parameters
        ----------
        experiment : str
            Name of the experiment.
        machine : str
            A GPU, "emulator" or "model".

        Returns
        -------
        list of Row
            The rows. Empty if there is no file.

        Raises
        ------
        StoreError
            If the file is damaged or cannot be read. The message names the file, and the line if it
            is known.
        """
        path = self.path(experiment, machine)
        with naming(path):
            return list(parse(path.read_text("utf-8"), machine)) if path.exists() else []

    def provenance(self, experiment: str, machine: str) -> dict[str, Any]:
        """Return the content of a recording's JSON file.

        Parameters
        ----------
        experiment : str
            Name of the experiment.
        machine : str
            A GPU, "emulator" or "model".

        Returns
        -------
        dict
            The content. Empty if there is no file.

        Raises
        ------
        StoreError
            If the file is damaged or cannot be read.
        """
        path = self.path(experiment, machine, ".json")
        with naming(path):
            return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def runs(self, experiment: str, machine: str) -> list[dict[str, Any]]:
        """Return the descriptions of runs in a recording's JSON file, the last run first.

        Parameters
        ----------
        experiment : str
            Name of the experiment.
        machine : str
            A GPU, "emulator" or "model".

        Returns
        -------
        list of dict
            A description of each run: commit, date, command, device and more.

        Raises
        ------
        StoreError
            If the file is damaged or cannot be read.
        """
        about = self.provenance(experiment, machine)
        one = {name: value for name, value in about.items() if name != "counted"}
        return list(about.get("runs", [one] if about else []))

    def recorded(self, experiment: str, machine: str) -> tuple[list[Row], list[dict[str, Any]]]:
        """Return the stored rows of a recording, and the runs that produced these rows.

        Parameters
        ----------
        experiment : str
            Name of the experiment.
        machine : str
            A GPU, "emulator" or "model".

        Returns
        -------
        rows : list of Row
            The rows.
        runs : list of dict
            Descriptions of the runs, the last run first.

        Raises
        ------
        StoreError
            If a file is damaged or cannot be read, or a row's run is not in the JSON file.
        """
        rows = self.read(experiment, machine)
        known = {run.get("id", ""): run for run in self.runs(experiment, machine)}
        named = {row.run for row in rows}
        for name in named - set(known):
            path = self.path(experiment, machine, ".json")
            raise StoreError(
                f"{path}: must describe run {name!r}, because {machine}.csv has rows of this run"
            )
        return rows, [run for name, run in known.items() if name in named]
