"""Runs experiments: measure, store, draw, and say what came from where."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from fa_numba import device
from fa_numba.choices.units import NoUnit

from ..measure import clocks, counters, peers, tune, variants
from ..show import style
from . import kept, provenance, ran, registry
from .options import FIGURES, Bench, Options, Refused
from .recorder import Outcome, Recorder
from .registry import Experiment, load
from .store import EMULATOR, MODEL, Row, Store, StoreError, write_if_changed

_NOT_GPUS = (EMULATOR, MODEL)


@dataclass
class Report:
    """What became of one experiment: the machines whose rows are drawn, what went wrong, what is
    missing here to measure it.
    """

    drawn_from: list[str] = field(default_factory=list)
    error: str = ""
    not_measured: str = ""


class Runner:
    """One command: `measure` and `draw` for the experiments it names."""

    def __init__(self, options: Options, arguments: Sequence[str], console: Console) -> None:
        self.options, self.console = options, console
        self.store = Store(options.out)
        self.gpu = dict(device.describe()) if device.gpu_available() else None
        self.machine = provenance.slug(self.gpu["name"]) if self.gpu else None
        self._provenance = provenance.Provenance(list(arguments), self.gpu)
        self.reports: dict[str, Report] = {}

    def measure(self, name: str, *, again: bool = True) -> None:
        """Measure and store what the options ask for. Without `again`, a recording of this GPU is
        left as it is while the experiment's code and the kernels that it launched are the same.
        """
        report = self.reports.setdefault(name, Report())
        with self._reporting(name, report):
            module = load(name)
            report.not_measured = self._lacking(module)
            if report.not_measured:
                self.console.print(f"[bold]{name}[/]: {report.not_measured}; there is none here")
                return
            if not again and self._recorded_now(name):
                self.console.print(
                    f"[bold]{name}[/]: as recorded here, by the same code and kernels"
                )
                return
            if self.machine and self.options.complete and not self.options.replace:
                before = self.recording(name, self.machine).read(name, self.machine)
                if why := lost(before):
                    raise Refused(f"the recording has {why}: --replace replaces it without")
            self.console.print(f"[bold]{name}[/]: {registry.words(module)[0]}")
            counts = None
            if self.options.complete and not self.options.recount:
                counts = kept.stored(self.store, name)
            own = {name: module.PROTOCOL} if hasattr(module, "PROTOCOL") else {}
            outcomes = self._record(
                name,
                lambda bench: module.measure(self.options, replace(bench, kept=counts or ())),
                functools.partial(self._provenance.for_machine, own=own),
                self.options.complete,
            )
            counted, complete = outcomes.get(EMULATOR), self.options.complete
            rows = self.store.read(name, EMULATOR)
            if complete and counted and counted.measured == len(rows) and not counted.failed:
                made = ran.merged(counted.made)
                kept.keep(self.store, name, self._provenance.for_machine(EMULATOR), made)

    def recording(self, name: str, machine: str) -> Store:
        """The last recording of the machine: in --out, or else the one that is with the project."""
        return self.store if machine in self.store.machines(name) else Store(FIGURES)

    def _recorded_now(self, name: str) -> bool:
        """Whether this GPU has a recording that a run would repeat, as far as code can tell."""
        if self.machine is None or self.options.recount or not self.options.complete:
            return False
        runs = self.recording(name, self.machine).runs(name, self.machine)
        then = [run.get("ran") for run in runs]
        return bool(then) and all(ran.changed(x, name, self.machine) == [] for x in then)

    def _lacking(self, module: Experiment) -> str:
        """What the experiment needs to measure and this machine has not; empty for nothing."""
        needs = registry.needs(module)
        if "GPU" in needs and self.machine is None:
            return "needs a CUDA GPU"
        if "torch" in needs and not peers.available():
            return "needs torch with CUDA"
        return ""

    @contextlib.contextmanager
    def _reporting(self, name: str, report: Report) -> Iterator[None]:
        """What goes wrong is printed and put into the report, and the next experiment goes on: in a
        line what is in the way, why nothing is measured, or that this GPU lacks the unit, which is
        no fault; with its traceback a fault of the program.
        """
        try:
            yield
        except (StoreError, Refused) as error:
            if report.error != str(error):
                report.error = str(error)
                self.console.print(f"[red]{name}: {escape(report.error)}[/]", soft_wrap=True)
        except NoUnit as error:  # an older GPU, which measures the others
            report.not_measured = str(error)
            self.console.print(f"{name}: not measured here, {escape(str(error))}", soft_wrap=True)
        except Exception as error:
            report.error = f"{type(error).__name__}: {error}"
            self.console.print_exception()

    def _record(
        self, name: str, measure: Callable[[Bench], Iterable[Row | Sequence[Row]]],
        about: Callable[[str], dict[str, Any]], complete: bool,
    ) -> dict[str, Outcome]:  # fmt: skip
        """Keep rows as they come, and put them into the recording at the end; what is cut off the
        next run of the same goes on with, which for a part is one by the same command.
        """
        of = about(self.machine or EMULATOR) | {"sources": kept.sources()}
        of |= {"command": ""} if complete else {}
        code = ran.code_of(name)
        with (
            ran.collecting() as collected,
            clocks.Sampling() if self.machine else contextlib.nullcontext() as sampling,
        ):
            start = time.monotonic()

            def now(machine: str) -> dict[str, Any]:
                run = about(machine) | {"seconds": round(time.monotonic() - start, 1)}
                if sampling is not None and machine not in _NOT_GPUS:
                    run["clocks"] = sampling.summary()
                return run

            def made_with(machine: str) -> ran.Ran:
                return {} if machine == MODEL else {"experiment": code} | collected.of(machine)

            recorder = Recorder(self.store, name, now, of, made_with)
            try:
                with Progress(console=self.console) as progress:
                    bench = Bench(
                        machine=self.machine,
                        describe=self.gpu,
                        progress=lambda items, label: progress.track(
                            items, description=f"  {label}"
                        ),
                        say=progress.console.print,
                        recorder=recorder,
                    )
                    for found in measure(bench):
                        recorder.add(*([found] if isinstance(found, Row) else found))
            except BaseException:
                recorder.keep()
                raise
            outcomes = recorder.finish(complete=complete)
            for machine, outcome in outcomes.items():
                self.console.print(f"  {machine}: {outcome}", highlight=False)
            return outcomes

    def tune(self, work: variants.Work) -> int:
        """Time the tiles on this GPU; store the fastest; exit status."""
        report = self.reports.setdefault(tune.NAME, Report())
        if self.machine is None or self.gpu is None:
            self.console.print("[red]tune needs a CUDA GPU, and this machine has none[/]")
            return 1
        self.console.print(f"[bold]{tune.NAME}[/]: {sum(len(calls) for _, calls in work)} calls")
        with self._reporting(tune.NAME, report):
            self._record(
                tune.NAME,
                lambda bench: variants.times(tune.NAME, work, bench, tune.SECONDS),
                self._provenance.for_machine,
                complete=False,
            )
            rows, swept = self.store.read(tune.NAME, self.machine), tune.swept(work)
            found = tune.best([r for r in rows if (r.series, r.pass_, r.head_dim) in swept])
            for (name, pass_, d), (tiles, speed) in sorted(found.items()):
                text = f"Br={tiles.Br}, Bc={tiles.Bc}, {tune.note(tiles)}: {speed:.0f} TFLOP/s"
                self.console.print(f"  {name} {pass_} d={d}: {text}")
            changed = tune.update(found, self.gpu["compute_capability"])
            self.console.print(f"  {tune.TABLE.name}: {'changed' if changed else 'same as before'}")
        return 1 if report.error else 0

    def draw(self, name: str) -> None:
        """Draw one figure from stored files alone; where that cannot be it is said."""
        report = self.reports.setdefault(name, Report())
        with self._reporting(name, report):
            report.drawn_from = self._draw(name)

    def _draw(self, name: str) -> list[str]:
        """The machines whose rows are drawn; none where nothing is."""
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            raise Refused(
                "not drawn: matplotlib is not installed; the extra 'experiments' brings it"
            ) from None
        module, (stored, runs) = load(name), self._stored(name)
        rows = [row for row in stored if self.options.admits(row)]
        figure = module.draw(rows) if rows else None
        if figure is None:
            what = " of what was asked for" if stored and not rows else ""
            self.console.print(f"[yellow]{name}: no data{what}, no figure[/]")
            return []
        note, stem = provenance.footnote(runs, rows), self.options.out / name
        changed, kinds = bool(style.save(figure, stem, note)), [".svg", ".png"]
        for kind, make in ((".gif", "animate"), (".html", "page")):
            made = getattr(module, make, lambda *_: None)(rows, note)
            if made is not None:
                changed |= write_if_changed(stem.with_suffix(kind), made)
                kinds.append(kind)
        self._say_drawn(name, kinds, changed)
        for other, draw in registry.figures(module).items():
            further = draw(rows)
            if further is not None:
                changed = bool(style.save(further, self.options.out / other, note))
                self._say_drawn(other, kinds[:2], changed)
        return sorted({row.machine for row in rows})

    def _say_drawn(self, name: str, kinds: Sequence[str], changed: bool) -> None:
        state = "drawn" if changed else "drawn, same as before"
        said = f"  {self.options.out / name}{', '.join(kinds[:-1])} and {kinds[-1]}: {state}"
        self.console.print(escape(said), soft_wrap=True)

    def _stored(self, name: str) -> tuple[list[Row], dict[str, list[dict[str, Any]]]]:
        """Closed forms, counts and one GPU's rows to draw, with their runs: those in --out, else
        the project's.
        """
        places: dict[str, Store] = {}
        for store in (Store(FIGURES), self.store):
            places.update(dict.fromkeys(store.machines(name), store))
        found = {machine: places[machine].recorded(name, machine) for machine in places}
        runs = {machine: found[machine][1] for machine in found}
        gpus = [machine for machine in places if machine not in _NOT_GPUS]

        def preferred(machine: str) -> tuple[bool, bool, str, str]:
            """To sort by: this machine's GPU comes last, before it those in --out, then by date."""
            date = max((str(run.get("date")) for run in runs[machine]), default="")
            return machine == self.machine, places[machine] is self.store, date, machine

        gpus.sort(key=preferred)
        chosen = [machine for machine in places if machine in _NOT_GPUS] + gpus[-1:]
        rows = [row for machine in chosen for row in found[machine][0]]
        return rows, {machine: runs[machine] for machine in chosen}


def lost(before: Sequence[Row]) -> str:
    """What a recording has and this machine has nothing to measure with; empty for nothing."""
    found = []
    if not counters.available() and any(row.source in counters.BYTES for row in before):
        found.append("hardware counters, and there is no Nsight Compute (ncu) here")
    if not peers.available() and any(row.series.startswith("torch") for row in before):
        found.append("torch's kernels, and there is no torch with CUDA here")
    return "; ".join(found)
