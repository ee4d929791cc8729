"""The page paper_repro.md: every experiment's tables, made from stored rows, between markers.

    <!-- table: NAME -->
    ...
    <!-- end: NAME -->

What stands between two markers is replaced; all other text is written by hand.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

from . import registry
from .options import FIGURES, REPOSITORY
from .provenance import clocks, device_name, l2_counter, of_rows, when_and_where
from .store import EMULATOR, MODEL, Row, Store
from .tables import Across, Make, fewer_runs

PAGE = REPOSITORY / "paper_repro.md"
# The GPU of the page's numbers: whatever else is recorded, the page stays as it is.
MACHINE = "nvidia-h200"
NO_RECORDING = "no recording yet"
_BLOCK = re.compile(
    r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<end><!-- end: (?P=name) -->)",
    re.DOTALL,
)
# A column of bytes of L2; "sectors from L2" is a counter by its own name.
_L2 = re.compile(r"(?<!from )(?<!to )\bL2\b")

# A table of times or speeds.
_TIMED = re.compile(
    r"\b(ms|us)\b|T(FLOP|B)/s|[Tt]imes? (of|over|at|a|than)\b|[Mm]icroseconds|[Ff]astest|"
    r"Speed (of|in)\b"
)


def known() -> dict[str, tuple[Make, tuple[str, ...]]]:
    """Every table by its name: what makes it, and the experiments whose rows it takes.

    Raises ValueError where two experiments give a table one name.
    """
    found: dict[str, tuple[Make, tuple[str, ...]]] = {}
    for experiment in registry.names():
        for name, make in registry.tables(experiment).items():
            if name in found:
                others = ", ".join(found[name][1])
                raise ValueError(f"table {name!r} is of {experiment} and of {others}: rename one")
            of = make.experiments if isinstance(make, Across) else (experiment,)
            found[name] = make, of
    verdicts = importlib.import_module("experiments.verdicts")
    return found | {name: (make, make.experiments) for name, make in verdicts.tables().items()}


def text(name: str, store: Store) -> str:
    """The table between the markers: caption and source, an empty line, the table.

    Raises ValueError for a name that no experiment has.
    """
    tables = known()
    if name not in tables:
        raise ValueError(f"no table named {name!r}: known are {', '.join(tables)}")
    make, experiments = tables[name]
    rows: list[Row] = []
    for experiment in experiments:
        for machine in (MODEL, EMULATOR, MACHINE):
            rows += store.read(experiment, machine)
    table = make(rows)
    if table is None:
        return f"{NO_RECORDING}\n"
    if isinstance(make, Across) and not make.cites:
        return f"{table.caption}\n\n{table.body}"
    l2 = _L2.search(table.body) is not None
    sources = [source for each in experiments for source in _source(store, each, l2)]
    how = _how_timed(store, experiments) if _TIMED.search(table.caption + table.body) else ""
    return f"{table.caption} {'; '.join(sources)}\n\n{table.body}{how}"


def _how_timed(store: Store, experiments: Sequence[str]) -> str:
    """At which clocks, and what is of few runs, of each experiment that timed something."""
    said = []
    for name in experiments:
        rows = [row for row in store.read(name, MACHINE) if row.n is not None]
        runs = of_rows(store.runs(name, MACHINE), rows)
        words = [clocks(run) for run in runs] + [each for each in (fewer_runs(rows),) if each]
        if runs:
            sentence = f"{'; '.join(words)}."
            several = len(experiments) > 1
            said.append(f"{name}: {sentence}" if several else sentence[0].upper() + sentence[1:])
    return f"\n{' '.join(said)}\n" if said else ""


def _source(store: Store, experiment: str, l2: bool) -> list[str]:
    """Which recording it is: the GPU, or without one what is counted, or the closed forms; date,
    commit, for a table that shows `l2` what counted it, and file.
    """
    stored = store.machines(experiment)
    counted = EMULATOR, "Counted on the emulator"
    for machine, name in ((MACHINE, MACHINE), counted, (MODEL, "closed forms")):
        if machine in stored:
            rows = store.read(experiment, machine)
            runs = of_rows(store.runs(experiment, machine), rows)
            said = when_and_where(runs, device_name(runs, name))
            by = l2_counter(runs, rows) if l2 else ""
            file = f"figures/data/{experiment}/{machine}.csv"
            return ["; ".join(part for part in (said, by, file) if part)]
    return []


def render(page: str, store: Store) -> str:
    """The page with every marked table made anew. Raises ValueError for an unknown table."""

    def table(found: re.Match[str]) -> str:
        return f"{found['start']}{text(found['name'], store)}{found['end']}"

    return _BLOCK.sub(table, page)


def tables(page: str) -> dict[str, str]:
    """Name -> text of the marked tables. Raises ValueError for a marker without its end."""
    found = {block["name"]: block["body"] for block in _BLOCK.finditer(page)}
    for name in re.findall(r"<!-- table: ([\w-]+) -->", page):
        if name not in found:
            raise ValueError(f"table {name!r} has no end marker")
    return found


def check(path: Path = PAGE, store: Store | None = None) -> list[str]:
    """Names of the tables on the page that differ from what the stored rows give."""
    page = path.read_text()
    now, new = tables(page), tables(render(page, store or Store(FIGURES)))
    return [name for name in now if now[name] != new[name]]


def update(path: Path = PAGE, store: Store | None = None) -> list[str]:
    """Write the tables anew; gives the names of those that changed."""
    stale = check(path, store)
    if stale:
        path.write_text(render(path.read_text(), store or Store(FIGURES)))
    return stale
