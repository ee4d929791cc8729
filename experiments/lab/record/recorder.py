"""A run on its way to its recording: its rows are kept in a file of their own until all are there.

`<root>/partial/<experiment>.jsonl`, one JSON object a line, written as it comes. The next run of
the same commit, sources and versions takes over what is whole: the rows of the items that were done
(`options.Bench.each`). The recording under `<root>/data` is as it was all the while.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .store import Row, Store, dump, impossible, naming, replace_files, setting, write_if_changed

# What two runs of the same thing differ in.
_OWN = ("id", "date", "clocks", "seconds")

T = TypeVar("T")


@dataclass
class Outcome:
    """What one run did to a machine's file: rows measured, those failed, whether it changed."""

    measured: int = 0
    failed: int = 0
    changed: bool = False

    def __str__(self) -> str:
        failed = f"{self.failed} failed, " if self.failed else ""
        return f"{self.measured} rows, {failed}{'new' if self.changed else 'same as recorded'}"


class Recorder:
    """Takes the rows of one run of what `of` describes, and those that one before has left.

    `finish` puts them in the place of what older runs stored of the same series, source and
    problem or, where the run is `complete`, of all that is stored. What no measurement gives, such
    as NaN, is kept as a failure. `provenance(machine)` describes the run, which has an "id"; it is
    asked at the first row and again at the end.
    """

    def __init__(
        self, store: Store, experiment: str, provenance: Callable[[str], Mapping[str, Any]],
        of: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.store, self.experiment, self._provenance = store, experiment, provenance
        self.outcomes: dict[str, Outcome] = {}
        # By machine: rows by key and place, descriptions of the runs that they are of by id.
        self._rows: dict[str, dict[tuple[Any, ...], Row]] = {}
        self._runs: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._done: set[str] = set()
        self._item: str | None = None
        self._loops: Counter[str] = Counter()
        self._path = partial(store, experiment)
        self._take_over(_comparable(of or {}))

    def add(self, *rows: Row) -> None:
        run = {machine: self._run_of(machine) for machine in {row.machine for row in rows}}
        named = [replace(row, run=run[row.machine]) for row in rows]
        self._append(rows=[asdict(self._take(row)) for row in named], item=self._item)

    def left(self, items: Sequence[T], label: str) -> list[tuple[str, T]]:
        """(name, item) of those whose rows are not taken over."""
        self._loops[label] += 1
        loop = f"{label} {self._loops[label]}"
        named = ((f"{loop}: {at} of {len(items)}", item) for at, item in enumerate(items))
        return [(name, item) for name, item in named if name not in self._done]

    def each(self, items: Iterable[tuple[str, T]]) -> Iterator[T]:
        """The items of `left`; what is added while one is looked at belongs to it."""
        for name, item in items:
            self._item = name
            yield item
            self._item = None
            self._done.add(name)
            self._append(done=name)

    def stop(self) -> None:
        """Describe the run, which has not come to its end; another may go on with it."""
        for machine in self._rows:
            self._describe(machine)

    def finish(self, *, complete: bool) -> dict[str, Outcome]:
        """Put the rows into the recording, as the class says. Gives each machine's outcome."""
        for machine, rows in self._rows.items():
            new = list(rows.values())
            measured = set(map(setting, new))
            stored = self.store.read(self.experiment, machine)
            kept = [] if complete else [row for row in stored if setting(row) not in measured]
            self.outcomes[machine].changed = self._write(machine, stored, [*kept, *new])
        with naming(self._path):
            self._path.unlink(missing_ok=True)
        return self.outcomes

    def _write(self, machine: str, stored: Sequence[Row], rows: Sequence[Row]) -> bool:
        """Write both files, unless the recording has these numbers from these sources."""
        described = self.store.path(self.experiment, machine, ".json")
        earlier = self.store.runs(self.experiment, machine)
        sources = self._provenance(machine).get("sources")
        same = described.exists() and all(run.get("sources") == sources for run in earlier)
        if same and dump(rows, runs=False) == dump(stored, runs=False):
            return False
        self._describe(machine)
        known = {run.get("id", ""): run for run in reversed(earlier)} | self._runs[machine]
        named = {row.run for row in rows}
        last_first = [run for name, run in reversed(known.items()) if name in named]
        about = {"machine": machine, "runs": last_first}
        text = json.dumps(about, indent=2, sort_keys=True) + "\n"
        replace_files({described: text, self.store.path(self.experiment, machine): dump(rows)})
        return True

    def _run_of(self, machine: str) -> str:
        """The id of this run, described once it has rows of the machine."""
        own = str(self._provenance(machine).get("id", ""))
        if own not in self._runs.get(machine, {}):
            self._describe(machine)
        return own

    def _describe(self, machine: str) -> None:
        run = dict(self._provenance(machine))
        self._runs.setdefault(machine, {})[run.get("id", "")] = run
        self._append(machine=machine, run=run)

    def _take(self, row: Row) -> Row:
        if why := impossible(row):
            note = "; ".join(part for part in (row.place, f"failed: {why}") if part)
            row = replace(row, value=None, p20=None, p80=None, note=note)
        self._rows.setdefault(row.machine, {})[row.key, row.place] = row
        outcome = self.outcomes.setdefault(row.machine, Outcome())
        outcome.measured += 1
        outcome.failed += row.failed
        return row

    def _append(self, **entry: Any) -> None:
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=lambda number: number.item()) + "\n")

    def _take_over(self, of: Any) -> None:
        entries = _of(self._path, of) or [{"of": of}]
        self._done = {entry["done"] for entry in entries if "done" in entry}
        taken = [e for e in entries if "rows" not in e or e["item"] in self._done]
        for entry in taken:
            if "run" in entry:
                run = entry["run"]
                self._runs.setdefault(entry["machine"], {})[run.get("id", "")] = run
            for row in entry.get("rows", ()):
                self._take(Row(**row))
        # Without what is measured again, and without the half line of a killed run.
        write_if_changed(self._path, "".join(f"{json.dumps(entry)}\n" for entry in taken))


def partial(store: Store, experiment: str) -> Path:
    return store.root / "partial" / f"{experiment}.jsonl"


def _comparable(of: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps({name: of[name] for name in of if name not in _OWN}))


def _of(path: Path, of: Any) -> list[dict[str, Any]] | None:
    """The file's lines, up to one that is cut off, if they are of the same run; else None."""
    entries = []
    with naming(path):
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
    return entries if entries and entries[0].get("of") == of else None
