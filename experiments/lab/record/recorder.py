"""Stores the rows of a run: first in a separate file, and at the end in the recording.

The separate file is `<root>/partial/<experiment>.json`. It is written after each item of a loop
over `options.Bench.each`. If the run is interrupted, the next run takes over these rows if it has
the same commit, files and versions.

A run with a time limit has no separate file. It adds its rows to the recording after each item.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from . import ran
from .store import (
    EMULATOR,
    MODEL,
    Row,
    Store,
    dump,
    impossible,
    naming,
    replace_files,
    setting,
    write_if_changed,
)

# Values that differ even between two equal runs.
_OWN = ("id", "date", "clocks", "seconds")

T = TypeVar("T")


@dataclass
class Outcome:
    """The result of storing the rows of one run in one machine's file.

    Parameters
    ----------
    measured, failed : int, default 0
        Number of rows that were measured, and number of these rows that failed.
    changed : bool, default False
        Whether the file changed.
    made : list of dict
        Digests of the code and kernels of the rows, with one entry for each run that produced them.
    """

    measured: int = 0
    failed: int = 0
    changed: bool = False
    made: list[ran.Ran] = field(default_factory=list)

    def __str__(self) -> str:
        failed = f"{self.failed} failed, " if self.failed else ""
        return f"{self.measured} rows, {failed}{'new' if self.changed else 'unchanged'}"


class Recorder:
    """Collects the rows of one run, and takes over the rows of an equal interrupted run.

    `finish` puts the rows into the recording. They replace the stored rows with the same setting
    (series, source, pass and problem). The rows of a complete run replace all stored rows. A row
    with an impossible number, such as NaN, is stored as a failed measurement.

    Parameters
    ----------
    store : Store
        The recordings.
    experiment : str
        Name of the experiment.
    provenance : callable
        Takes a machine and returns the description of the run, with an "id". It is called whenever
        rows are added or written.
    of : mapping, optional
        Values that identify the run. Rows of an interrupted run are taken over only if its values
        are equal.
    made_with : callable, optional
        Takes a machine and returns digests of the code and kernels used so far.
    adds : bool, default False
        Whether rows are added to the recording after each item. A row then replaces only a stored
        row with the same key and the same `place` (the beginning of its note).
    """

    def __init__(
        self, store: Store, experiment: str, provenance: Callable[[str], Mapping[str, Any]],
        of: Mapping[str, Any] | None = None,
        made_with: Callable[[str], ran.Ran] = lambda machine: {},
        adds: bool = False,
    ) -> None:  # fmt: skip
        self._made_with, self._adds = made_with, adds
        self.store, self.experiment, self._provenance = store, experiment, provenance
        self._of = json.loads(json.dumps({n: x for n, x in (of or {}).items() if n not in _OWN}))
        self._path = store.root / "partial" / f"{experiment}.json"
        with naming(self._path):
            found = self._path.exists() and not adds
            before = json.loads(self._path.read_text("utf-8")) if found else {}
        before = before if before.get("of") == self._of else {}
        # _rows: all rows by machine, key and place. _whole: the rows of finished items, as
        # dictionaries. _at_work: the rows of the item that is being measured.
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._whole: list[dict[str, Any]] = before.get("rows", [])
        self._at_work: list[Row] = []
        self._runs: dict[str, dict[str, Mapping[str, Any]]] = before.get("runs", {})
        self._done: list[str] = before.get("done", [])
        self._loops: Counter[str] = Counter()
        for row in self._whole:
            self._take(Row(**row))

    def add(self, *rows: Row) -> None:
        """Add rows of the item that is being measured."""
        run = {m: str(self._provenance(m).get("id", "")) for m in {row.machine for row in rows}}
        for row in rows:
            self._at_work.append(self._take(replace(row, run=run[row.machine])))

    def left(self, items: Sequence[T], label: str) -> list[tuple[str, T]]:
        """Return the items that the interrupted run has not finished, as pairs (name, item).

        `label` names the loop over the items. The name of an item contains the label and the number
        of the item.
        """
        self._loops[label] += 1
        loop = f"{label} {self._loops[label]}"
        named = ((f"{loop}: {at} of {len(items)}", item) for at, item in enumerate(items))
        return [(name, item) for name, item in named if name not in self._done]

    def each(self, items: Iterable[tuple[str, T]]) -> Iterator[T]:
        """Yield each item, and write the rows of the item after the body of the loop.

        `items` are the pairs (name, item) that the method `left` returned. The body of the loop
        passes its rows to `add`. They belong to the item that was yielded last. When the loop asks
        for the next item, these rows are written to disk, and the item counts as finished.
        """
        for name, item in items:
            self._at_work = []
            yield item
            self._whole += map(asdict, self._at_work)
            self._done.append(name)
            self.keep()

    def keep(self) -> None:
        """Write the rows of the finished items, so that a later run can continue."""
        if self._adds:
            self.finish(complete=False)
            return
        self._describe()
        found = {"of": self._of, "done": self._done, "runs": self._runs, "rows": self._whole}
        text = json.dumps(found, default=lambda number: number.item())
        write_if_changed(self._path, f"{text}\n")

    def finish(self, *, complete: bool) -> dict[str, Outcome]:
        """Put the rows into the recording. Return the outcome for each machine.

        `complete` says whether the run measured the complete experiment.
        """
        self._describe()
        outcomes = {}
        for machine in self._runs:
            new = [row for row in self._rows.values() if row.machine == machine]
            stored = self.store.read(self.experiment, machine)
            replaces = _exactly if self._adds else setting
            measured = set(map(replaces, new))
            every = complete and not self._adds or machine == MODEL and self._adds
            kept = [] if every else [row for row in stored if replaces(row) not in measured]
            changed = self._write(machine, stored, [*kept, *new])
            made = [run["ran"] for run in self._runs[machine].values() if run.get("ran")]
            outcomes[machine] = Outcome(len(new), sum(row.failed for row in new), changed, made)
        if not self._adds:
            with naming(self._path):
                self._path.unlink(missing_ok=True)
        return outcomes

    def _write(self, machine: str, stored: Sequence[Row], rows: Sequence[Row]) -> bool:
        """Write the CSV and the JSON file of a machine. Return whether anything was written.

        `stored` are the rows in the files, and `rows` are the rows that replace them. The files are
        not written if nothing would change:

        - The files of the emulator are not written if the JSON file exists and all rows are equal.
          The comparison ignores the ids of runs.
        - For other machines, one more condition must hold: all stored runs have the same digests of
          code and kernels as this run.
        """
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
        if machine == EMULATOR:  # `kept.keep` stores this for all rows together
            last_first = [{n: x for n, x in run.items() if n != "ran"} for run in last_first]
        about = {"machine": machine, "runs": last_first}
        text = json.dumps(about, indent=2, sort_keys=True) + "\n"
        replace_files({described: text, self.store.path(self.experiment, machine): dump(rows)})
        return True

    def _describe(self) -> None:
        """Update the description of this run, for each machine that has rows."""
        for machine in dict.fromkeys(row.machine for row in self._rows.values()):
            made = self._made_with(machine)
            run = {**self._provenance(machine), **({"ran": made} if made else {})}
            self._runs.setdefault(machine, {})[run.get("id", "")] = run

    def _take(self, row: Row) -> Row:
        """Store a row, and return it. If its numbers are impossible, the row becomes a failure."""
        if why := impossible(row):
            note = "; ".join(part for part in (row.place, f"failed: {why}") if part)
            row = replace(row, value=None, p20=None, p80=None, note=note)
        self._rows[row.machine, row.key, row.place] = row
        return row


def _exactly(row: Row) -> tuple[Any, ...]:
    """Return the values that identify the quantity of a row: its key, and its `place`.

    The place is the beginning of the row's note.
    """
    return *row.key, row.place
