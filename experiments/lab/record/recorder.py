"""Stores the rows of a run: first in a file of their own, then in the recording.

The first file is `<root>/partial/<experiment>.json`. It is written after each item of a loop
(`options.Bench.each`). If the run is interrupted, the next run of the same commit, files and
versions takes over these rows.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from . import ran
from .store import (
    EMULATOR,
    Row,
    Store,
    dump,
    impossible,
    naming,
    replace_files,
    setting,
    write_if_changed,
)

# What two runs of the same thing differ in.
_OWN = ("id", "date", "clocks", "seconds")

T = TypeVar("T")


@dataclass
class Outcome:
    """What one run did to a machine's file.

    Parameters
    ----------
    measured, failed : int, default 0
        Number of rows that were measured, and number of these rows that failed.
    changed : bool, default False
        Whether the file changed.
    made : list of dict
        What the rows were made with, one entry for each run that they are from.
    """

    measured: int = 0
    failed: int = 0
    changed: bool = False
    made: list[ran.Ran] = field(default_factory=list)

    def __str__(self) -> str:
        failed = f"{self.failed} failed, " if self.failed else ""
        return f"{self.measured} rows, {failed}{'new' if self.changed else 'unchanged'}"


class Recorder:
    """Takes the rows of one run, and the rows of an interrupted run with the same options.

    `finish` puts them into the recording. They replace the rows of older runs with the same series,
    source and problem. If the run is complete, they replace all stored rows. Numbers that no
    measurement can give, such as NaN, are stored as failures.

    Parameters
    ----------
    store : Store
        The recordings.
    experiment : str
        Name of the experiment.
    provenance : callable
        Takes a machine and describes the run, with an "id". It is called whenever rows are written.
    of : mapping, optional
        Values that identify the run. Rows are taken over from an interrupted run if it has the same
        values.
    made_with : callable, optional
        Takes a machine and returns what its rows were made with so far.
    """

    def __init__(
        self, store: Store, experiment: str, provenance: Callable[[str], Mapping[str, Any]],
        of: Mapping[str, Any] | None = None,
        made_with: Callable[[str], ran.Ran] = lambda machine: {},
    ) -> None:  # fmt: skip
        self._made_with = made_with
        self.store, self.experiment, self._provenance = store, experiment, provenance
        self._of = json.loads(json.dumps({n: x for n, x in (of or {}).items() if n not in _OWN}))
        self._path = store.root / "partial" / f"{experiment}.json"
        with naming(self._path):
            before = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        before = before if before.get("of") == self._of else {}
        # All by machine, key and place; those of items that are done; those of the one at work.
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._whole: list[dict[str, Any]] = before.get("rows", [])
        self._at_work: list[Row] = []
        self._runs: dict[str, dict[str, Mapping[str, Any]]] = before.get("runs", {})
        self._done: list[str] = before.get("done", [])
        self._loops: Counter[str] = Counter()
        for row in self._whole:
            self._take(Row(**row))

    def add(self, *rows: Row) -> None:
        """Take rows of the item that the loop is at."""
        run = {m: str(self._provenance(m).get("id", "")) for m in {row.machine for row in rows}}
        for row in rows:
            self._at_work.append(self._take(replace(row, run=run[row.machine])))

    def left(self, items: Sequence[T], label: str) -> list[tuple[str, T]]:
        """Return name and item of the items that the interrupted run has not finished."""
        self._loops[label] += 1
        loop = f"{label} {self._loops[label]}"
        named = ((f"{loop}: {at} of {len(items)}", item) for at, item in enumerate(items))
        return [(name, item) for name, item in named if name not in self._done]

    def each(self, items: Iterable[tuple[str, T]]) -> Iterator[T]:
        """Yield the items of `left`. Rows that are added meanwhile belong to the item."""
        for name, item in items:
            self._at_work = []
            yield item
            self._whole += map(asdict, self._at_work)
            self._done.append(name)
            self.keep()

    def keep(self) -> None:
        """Write the rows of the finished items, so that another run can go on with them."""
        self._describe()
        found = {"of": self._of, "done": self._done, "runs": self._runs, "rows": self._whole}
        text = json.dumps(found, default=lambda number: number.item())
        write_if_changed(self._path, f"{text}\n")

    def finish(self, *, complete: bool) -> dict[str, Outcome]:
        """Put the rows into the recording; return each machine's outcome."""
        self._describe()
        outcomes = {}
        for machine in self._runs:
            new = [row for row in self._rows.values() if row.machine == machine]
            measured = set(map(setting, new))
            stored = self.store.read(self.experiment, machine)
            kept = [] if complete else [row for row in stored if setting(row) not in measured]
            changed = self._write(machine, stored, [*kept, *new])
            made = [run["ran"] for run in self._runs[machine].values() if run.get("ran")]
            outcomes[machine] = Outcome(len(new), sum(row.failed for row in new), changed, made)
        with naming(self._path):
            self._path.unlink(missing_ok=True)
        return outcomes

    def _write(self, machine: str, stored: Sequence[Row], rows: Sequence[Row]) -> bool:
        """Write both files, unless the recording has the same numbers, made with the same code."""
        described = self.store.path(self.experiment, machine, ".json")
        earlier = self.store.runs(self.experiment, machine)
        made = self._made_with(machine)
        same = machine == EMULATOR or all(run.get("ran", {}) == made for run in earlier)
        same &= described.exists()
        if same and dump(rows, runs=False) == dump(stored, runs=False):
            return False
        known = {run.get("id", ""): run for run in reversed(earlier)} | self._runs[machine]
        named = {row.run for row in rows}
        last_first = [run for name, run in reversed(known.items()) if name in named]
        if machine == EMULATOR:  # `kept.keep` says it of all rows together
            last_first = [{n: x for n, x in run.items() if n != "ran"} for run in last_first]
        about = {"machine": machine, "runs": last_first}
        text = json.dumps(about, indent=2, sort_keys=True) + "\n"
        replace_files({described: text, self.store.path(self.experiment, machine): dump(rows)})
        return True

    def _describe(self) -> None:
        """Update the description of this run, for each machine that it has rows of."""
        for machine in dict.fromkeys(row.machine for row in self._rows.values()):
            made = self._made_with(machine)
            run = {**self._provenance(machine), **({"ran": made} if made else {})}
            self._runs.setdefault(machine, {})[run.get("id", "")] = run

    def _take(self, row: Row) -> Row:
        if why := impossible(row):
            note = "; ".join(part for part in (row.place, f"failed: {why}") if part)
            row = replace(row, value=None, p20=None, p80=None, note=note)
        self._rows[row.machine, row.key, row.place] = row
        return row
