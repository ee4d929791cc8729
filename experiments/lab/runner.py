"""Runs experiments: measure, store, draw, and say what came from where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fa_numba import device

from . import peers, provenance, registry, tune
from .options import FIGURES, Bench, Options
from .registry import load
from .store import EMULATOR, MODEL, Outcome, Recorder, Row, Store

_NOT_GPUS = (EMULATOR, MODEL)


@dataclass
class Report:
    """What became of one experiment."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    drawn_from: list[str] = field(default_factory=list)
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    not_measured: str = ""


class Runner:
    """One command: `measure`, `draw` and `summary` for the experiments it names."""

    def __init__(self, options: Options, arguments: Sequence[str], console: Console) -> None:
        self.options, self.console = options, console
        self.store = Store(options.out)
        self.gpu = dict(device.describe()) if device.gpu_available() else None
        self.machine = provenance.slug(self.gpu["name"]) if self.gpu else None
        self._provenance = provenance.Provenance(list(arguments), self.gpu)
        self.reports: dict[str, Report] = {}

    def measure(self, name: str) -> None:
        """Measure what this machine can; rows are stored as they come."""
        report = self.reports.setdefault(name, Report())
        module = load(name)
        if module.NEEDS_GPU and self.machine is None:
            report.not_measured = "needs a CUDA GPU"
            self.console.print(f"[bold]{name}[/]: needs a CUDA GPU, and this machine has none")
            return
        if registry.needs_torch(module) and not peers.available():
            report.not_measured = "needs torch with CUDA"
            self.console.print(f"[bold]{name}[/]: needs torch with CUDA, which is not installed")
            return
        self.console.print(f"[bold]{name}[/]: {module.TITLE}")
        self._record(
            name,
            registry.swept(module),
            lambda bench: module.measure(self.options, bench),
            complete=self.options.complete,
            protocol=registry.protocol(name, module),
        )

    def _record(
        self,
        name: str,
        swept: Sequence[str],
        measure: Callable[[Bench], Iterable[Row]],
        complete: bool,
        protocol: Mapping[str, str] | None = None,
    ) -> None:
        """Store the rows as they come; what goes wrong stands in the report."""
        report = self.reports.setdefault(name, Report())
        about = functools.partial(self._provenance.for_machine, own=protocol)
        recorder = Recorder(self.store, name, about, swept)
        report.outcomes = recorder.outcomes
        with Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        ) as progress:
            bench = Bench(
                machine=self.machine,
                describe=self.gpu,
                progress=lambda items, label: progress.track(items, description=label),
                say=progress.console.print,
            )
            done = False
            try:
                for row in measure(bench):
                    recorder.add(row)
                done = True
            except Exception as error:
                report.error = f"{type(error).__name__}: {error}"
                progress.console.print_exception()
            finally:
                recorder.finish(complete=complete and done)

    def tune(self, wanted: Sequence[tune.Candidate], jobs: int | None) -> int:
        """Sweep tiles on this machine's GPU and store the fastest; an exit status."""
        if self.machine is None or self.gpu is None:
            self.console.print("[red]tune needs a CUDA GPU, and this machine has none[/]")
            return 1
        self.console.print(f"[bold]{tune.NAME}[/]: {len(wanted)} candidates")
        self._record(
            tune.NAME, tune.SWEPT, lambda bench: tune.measure(wanted, bench, jobs), complete=False
        )
        rows = self.store.read(tune.NAME, self.machine)
        swept = {(c.series, c.pass_, c.head_dim) for c in wanted}
        found = tune.best([r for r in rows if (r.series, r.pass_, r.head_dim) in swept])
        for (name, pass_, d), (tiles, speed) in sorted(found.items()):
            text = f"Br={tiles.Br}, Bc={tiles.Bc}, {tune.note(tiles)}: {speed:.0f} TFLOP/s"
            self.console.print(f"  {name} {pass_} d={d}: {text}")
        changed = tune.update(found, self.gpu["compute_capability"])
        self.console.print(f"  {tune.TABLE.name}: {'changed' if changed else 'same as before'}")
        return 1 if self.reports[tune.NAME].error else 0

    def draw(self, name: str) -> bool:
        """Draw one figure from stored files alone; False when there is nothing to draw."""
        report = self.reports.setdefault(name, Report())
        try:
            module = load(name)
            from . import style
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            report.error = (
                "not drawn: matplotlib is not installed; the extra 'experiments' brings it"
            )
            self.console.print(f"[red]{name}: {report.error}[/]")
            return False
        rows, report.recorded = self._stored(name)
        report.drawn_from = sorted({row.machine for row in rows})
        figure = module.draw(rows) if rows else None
        if figure is None:
            report.drawn_from = []
            self.console.print(f"[yellow]{name}: no data, no figure[/]")
            return False
        changed = style.save(
            figure, self.options.out / name, footnote(report.drawn_from, report.recorded)
        )
        state = "drawn" if changed else "drawn, same as before"
        self.console.print(f"  {self.options.out / name}.svg and .png: {state}", soft_wrap=True)
        return True

    def _stored(self, name: str) -> tuple[list[Row], dict[str, dict[str, Any]]]:
        """The rows to draw: closed forms, counts, and one GPU's; with their provenance.

        A machine missing from --out is taken from the recordings that come with the project.
        """
        places: dict[str, Store] = {}
        for store in (Store(FIGURES), self.store):
            places.update(dict.fromkeys(store.machines(name), store))
        abouts = {machine: places[machine].provenance(name, machine) for machine in places}
        gpus = [machine for machine in places if machine not in _NOT_GPUS]

        def preferred(machine: str) -> tuple[bool, bool, str, str]:
            """This machine's GPU, else one recorded in --out, else the latest recording."""
            date = str(abouts[machine].get("date"))
            return machine == self.machine, places[machine] is self.store, date, machine

        gpus.sort(key=preferred)
        chosen = [machine for machine in places if machine in _NOT_GPUS] + gpus[-1:]
        rows = [row for machine in chosen for row in places[machine].read(name, machine)]
        rows = [row for row in rows if self.options.admits(row)]
        return rows, {machine: abouts[machine] for machine in chosen}

    def summary(self, chosen: Iterable[str]) -> Table:
        """For each figure: what is new, counted here, or from a recording, and of which machine."""
        table = Table(title="Figures", title_justify="left")
        for column in ("figure", "data", "this run", "recorded"):
            table.add_column(column)
        for name in chosen:
            report = self.reports.get(name, Report())
            machines = sorted(set(report.drawn_from) | set(report.outcomes))
            if not machines:
                state = report.error or report.not_measured
                table.add_row(name, "-", "no data" + (f" ({state})" if state else ""), "-")
            for i, machine in enumerate(machines):
                table.add_row(
                    name if i == 0 else "",
                    {MODEL: "closed forms", EMULATOR: "counts"}.get(machine, machine),
                    _what_happened(machine, report),
                    provenance.when(report.recorded.get(machine, {})),
                )
            if report.error and machines:
                table.add_row("", "", f"[red]{report.error}[/]", "")
        return table


def _what_happened(machine: str, report: Report) -> str:
    outcome = report.outcomes.get(machine)
    if outcome is None:
        why = f" ({report.not_measured} to measure)" if report.not_measured else ""
        return f"drawn from the recording{why}"
    verb = {MODEL: "computed", EMULATOR: "counted"}.get(machine, "measured")
    text = f"{verb} here: {outcome.measured} rows, "
    text += "new" if outcome.changed else "same as recorded"
    return text + (f"; [red]{outcome.failed} failed[/]" if outcome.failed else "")


def footnote(machines: Sequence[str], recorded: dict[str, dict[str, Any]]) -> str:
    """Machine, date and commit of every file that a figure is drawn from; a GPU's first."""
    gpus, others = [], []
    for machine in machines:
        about = recorded.get(machine, {})
        if machine in _NOT_GPUS:
            label = {MODEL: "closed forms", EMULATOR: "counted on the emulator"}[machine]
            others.append(provenance.when_and_where(about, label))
        else:
            name = (about.get("device") or {}).get("name", machine)
            gpus.append(provenance.when_and_where(about, f"recorded on {name}"))
    return "\n".join("; ".join(line) for line in (gpus, others) if line)
