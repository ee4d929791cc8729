"""A complete run on its way: its rows are kept in a file of their own until all are there.

`<root>/partial/<experiment>.jsonl`, one JSON object a line, written as it comes. The next run of
the same commit, sources and versions takes over what is whole: the rows of the items that were done
(`options.Bench.each`). The recording under `<root>/data` is as it was all the while.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from .store import Row, naming, write_if_changed

# What two runs of the same thing differ in.
_OWN = ("id", "date", "command", "clocks", "seconds")

T = TypeVar("T")


class Journal:
    """The rows of one unfinished run of what `of` describes; a file of something else is begun
    anew. `rows` are those taken over, `runs` machine -> id -> description.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self.path = path
        self.runs: dict[str, dict[str, dict[str, Any]]] = {}
        self.rows: list[Row] = []
        self._of = _comparable(of)
        self._done: set[str] = set()
        self._item: str | None = None
        self._loops: Counter[str] = Counter()
        self._before, self._start = 0.0, time.monotonic()
        if not self._take_over():
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
            self._append(of=self._of)
        self._append(begun=True)

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    def items(self, items: Sequence[T], label: str) -> Iterator[tuple[str, T]]:
        """(name, item) of those whose rows are not taken over."""
        self._loops[label] += 1
        for at, item in enumerate(items):
            name = f"{label} {self._loops[label]}: {at} of {len(items)}"
            if name not in self._done:
                yield name, item

    def each(self, items: Iterable[tuple[str, T]]) -> Iterator[T]:
        """The items of `items`; what is added while one is looked at belongs to it."""
        for name, item in items:
            self._item = name
            yield item
            self._item = None
            self._done.add(name)
            self._append(done=name, seconds=self.seconds)

    def describe(self, machine: str, run: Mapping[str, Any]) -> None:
        self.runs.setdefault(machine, {})[run.get("id", "")] = dict(run)
        self._append(machine=machine, run=run, seconds=self.seconds)

    def add(self, rows: Sequence[Row]) -> None:
        self._append(rows=[asdict(row) for row in rows], item=self._item)

    def remove(self) -> None:
        with naming(self.path):
            self.path.unlink(missing_ok=True)

    def _append(self, **entry: Any) -> None:
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=lambda number: number.item()) + "\n")

    def _take_over(self) -> bool:
        entries = _of(self.path, self._of)
        if entries is None:
            return False
        self._done = {entry["done"] for entry in entries if "done" in entry}
        taken = [e for e in entries if "rows" not in e or e["item"] in self._done]
        for entry in taken:
            if "run" in entry:
                run = entry["run"]
                self.runs.setdefault(entry["machine"], {})[run.get("id", "")] = run
            self.rows += [Row(**row) for row in entry.get("rows", ())]
            self._before = entry.get("seconds", self._before)
        # Without what is measured again, and without the half line of a killed run.
        write_if_changed(self.path, "".join(f"{json.dumps(entry)}\n" for entry in taken))
        return True


def begun(path: Path, of: Mapping[str, Any]) -> tuple[float, bool] | None:
    """(its seconds, whether its last run got an item done) of an unfinished run of the same."""
    entries = _of(path, _comparable(of))
    if entries is None:
        return None
    seconds = max((entry["seconds"] for entry in entries if "seconds" in entry), default=0.0)
    last = max((at for at, entry in enumerate(entries) if "begun" in entry), default=0)
    return seconds, any("done" in entry for entry in entries[last:])


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
