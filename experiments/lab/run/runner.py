"""Runs experiments: measures them, stores their rows, draws their figures and adds the origin."""

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
from fa_numba.commands.compile import compile_ahead
from fa_numba.commands.ending import reason
from fa_numba.device import kernel_cache

from ..measure import ahead, clocks, counters, peers, tune, variants
from ..measure.calls import theirs
from ..record import kept, outdated, provenance, ran, registry
from ..record.options import FIGURES, Bench, Options, Refused
from ..record.recorder import Outcome, Recorder
from ..record.registry import Experiment, load
from ..record.store import EMULATOR, MODEL, Row, Store, StoreError, write_if_changed
from ..show import style, thumbs
from . import peers_ahead
from .origin import Origin, slug

_NOT_GPUS = (EMULATOR, MODEL)


@dataclass
class Report:
    """The result of a command for one experiment.

    Parameters
    ----------
    drawn_from : list of str
        Machines whose rows are in the figure. Empty if nothing was drawn.
    error : str, default ""
        Message of the error. Empty if there was none.
    not_measured : str, default ""
        Why the experiment was not measured: what it needs and this machine lacks. Empty if it was
        measured or only drawn.
    """

    drawn_from: list[str] = field(default_factory=list)
    error: str = ""
    not_measured: str = ""


class Runner:
    """Measures and draws experiments for one command, and keeps a report for each.

    Parameters
    ----------
    options : Options
        The user's choices.
    arguments : sequence of str
        Arguments of the command line. They are stored with the rows.
    console : Console
        The console to which messages are printed.
    """

    def __init__(self, options: Options, arguments: Sequence[str], console: Console) -> None:
        self.options, self.console = options, console
        self.store = Store(options.out)
        self.gpu = dict(device.describe()) if device.gpu_available() else None
        self.machine = slug(self.gpu["name"]) if self.gpu else None
        peers_ahead.store_on_disk()
        self._origin = Origin(list(arguments), self.gpu)
        self.reports: dict[str, Report] = {}

    def measure(self, name: str, *, again: bool = True) -> None:
        """Measure an experiment and store its rows.

        If `again` is False, the experiment is measured only if this GPU's recording is missing or
        not current. A recording is current if the experiment's code and kernels have not changed.
        """
        report = self.reports.setdefault(name, Report())
        with self._reporting(name, report):
            module = load(name)
            report.not_measured = self._lacking(module)
            if report.not_measured:
                text = f"not measured, because it {report.not_measured}, which is missing here"
                self.console.print(f"[bold]{name}[/]: {text}")
                return
            if not again and self._recorded_now(name):
                text = "not measured again, because the code and the kernels have not changed"
                self.console.print(f"[bold]{name}[/]: {text}")
                return
            if self.machine and self.options.complete and not self.options.replace:
                before = self.recording(name, self.machine).read(name, self.machine)
                if why := lost(before):
                    raise Refused(
                        f"the stored recording has {why}. --replace stores a recording without "
                        "these numbers"
                    )
            self.console.print(f"[bold]{name}[/]: {registry.words(module)[0]}")
            if self.machine and self.options.complete:
                self._compile_ahead(name)
                self._compile_peers_ahead(name)
            counts = None
            if self.options.complete and not self.options.recount:
                counts = kept.stored(self.store, name)
            own = {name: module.PROTOCOL} if hasattr(module, "PROTOCOL") else {}
            outcomes = self._record(
                name,
                lambda bench: module.measure(self.options, replace(bench, kept=counts or ())),
                functools.partial(self._origin.for_machine, own=own),
                self.options.complete,
                self._current_rows(name) if self.options.seconds else (),
            )
            counted, complete = outcomes.get(EMULATOR), self.options.complete
            rows = self.store.read(name, EMULATOR)
            if complete and counted and counted.measured == len(rows) and not counted.failed:
                made = ran.merged(counted.made)
                kept.keep(self.store, name, self._origin.for_machine(EMULATOR), made)

    def _compile_ahead(self, name: str) -> None:
        """Compile the kernels of earlier recordings in parallel, so that measuring waits less.

        The recordings are those of all GPUs. Kernels that were compiled before are not compiled
        again. Nothing is compiled if compiled kernels are not stored.
        """
        if kernel_cache.directory() is None:
            return
        start = time.monotonic()
        machines = (x for x in Store(FIGURES).machines(name) if x not in _NOT_GPUS)
        rows = [row for machine in machines for row in Store(FIGURES).read(name, machine)]
        try:
            found = compile_ahead(ahead.plans(rows))
        except Exception as error:  # the first calls then compile their kernels
            self.console.print(f"  kernels were not compiled in parallel: {escape(repr(error))}")
            return
        if found.compiled:
            seconds = time.monotonic() - start
            text = f"compiled {found.compiled} kernels in parallel in {seconds:.0f} s"
            self.console.print(f"  {text}")

    def _compile_peers_ahead(self, name: str) -> None:
        """Compile kernels of other libraries in parallel, if the experiment names such calls."""
        start = time.monotonic()
        try:
            calls, failures = peers_ahead.compile_peers(name, self.options)
        except Exception as error:  # the first calls then compile their kernels
            self.console.print(f"  peers were not compiled in parallel: {escape(repr(error))}")
            return
        seconds = time.monotonic() - start
        if calls:
            self.console.print(f"  compiled peers by {calls} calls in parallel in {seconds:.0f} s")
        for failure in failures:
            self.console.print(f"  not compiled in parallel: {escape(failure)}")

    def recording(self, name: str, machine: str) -> Store:
        """Return the store that contains the recording of an experiment on a machine.

        It is the store in the folder --out if this store has the recording, else the store in
        `figures`.
        """
        return self.store if machine in self.store.machines(name) else Store(FIGURES)

    def _recorded_now(self, name: str) -> bool:
        """Return whether this GPU has a current recording, so that measuring is unnecessary.

        A recording is current if the experiment's code and kernels have not changed since. The
        result is always False without a GPU, if the user selected a part of the experiment, and
        with the option --recount.
        """
        if self.machine is None or self.options.recount or not self.options.complete:
            return False
        found = outdated.state(self.recording(name, self.machine), name, self.machine)
        return found.state == outdated.CURRENT

    def _current_rows(self, name: str) -> list[Row]:
        """Return this GPU's stored rows whose code and kernels have not changed since the run."""
        if self.machine is None:
            return []
        rows, runs = self.store.recorded(name, self.machine)
        current = {
            run.get("id", "")
            for run in runs
            if ran.changed(run.get("ran"), name, self.machine) == []
        }
        return [row for row in rows if row.run in current]

    def _lacking(self, module: Experiment) -> str:
        """Return the requirement of an experiment that this machine lacks; empty if none."""
        needs = registry.needs(module)
        if "GPU" in needs and self.machine is None:
            return "needs a CUDA GPU"
        if "torch" in needs and not peers.available():
            return "needs torch with CUDA"
        return ""

    @contextlib.contextmanager
    def _reporting(self, name: str, report: Report) -> Iterator[None]:
        """Catch and print errors inside the context, so that the next experiment can run.

        An expected problem is printed as one line: a damaged file, a full disk, or a reason why
        nothing is measured. A GPU that lacks a unit is no error. Any other error is a fault of the
        program, and is printed with its traceback.
        """
        try:
            yield
        except (StoreError, Refused) as error:
            if report.error != str(error):
                report.error = str(error)
                self.console.print(f"[red]{name}: {escape(report.error)}[/]", soft_wrap=True)
        except NoUnit as error:  # an older GPU, which can measure other experiments
            report.not_measured = str(error)
            text = f"not measured, because this GPU cannot compute it: {error}"
            self.console.print(f"{name}: {escape(text)}", soft_wrap=True)
        except OSError as error:  # a full disk; if the output goes to it too, printing raises again
            report.error = reason(error)
            self.console.print(f"[red]{name}: {escape(report.error)}[/]", soft_wrap=True)
        except Exception as error:
            report.error = f"{type(error).__name__}: {error}"
            self.console.print_exception()

    def _record(
        self, name: str, measure: Callable[[Bench], Iterable[Row | Sequence[Row]]],
        about: Callable[[str], dict[str, Any]], complete: bool, stored: Sequence[Row] = (),
    ) -> dict[str, Outcome]:  # fmt: skip
        """Measure an experiment, store the rows meanwhile, and write the recording at the end.

        `measure` takes the `Bench` object and yields rows. `about` returns the description of the
        run for a machine. `complete` says whether the run measures the complete experiment.

        If a run is interrupted, the next run with the same options continues where it stopped. If
        the run is not complete, the next run must also have the same command line.

        A run with a time limit adds its rows to the recording after each item. It does not measure
        the rows `stored` again.
        """
        seconds = self.options.seconds
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

            recorder = Recorder(self.store, name, now, of, made_with, seconds is not None)
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
                        stored=stored,
                        over=lambda: seconds is not None and time.monotonic() - start > seconds,
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
        """Time the calls of `work` on this GPU, store the fastest tiles, return the exit status."""
        report = self.reports.setdefault(tune.NAME, Report())
        if self.machine is None or self.gpu is None:
            self.console.print("[red]tune needs a CUDA GPU, which this machine does not have[/]")
            return 1
        count = sum(len(calls) for _, calls in work)
        self.console.print(f"[bold]{tune.NAME}[/]: {count} calls to time")
        with self._reporting(tune.NAME, report):
            self._record(
                tune.NAME,
                lambda bench: variants.times(tune.NAME, work, bench, tune.SECONDS),
                self._origin.for_machine,
                complete=False,
            )
            rows, swept = self.store.read(tune.NAME, self.machine), tune.swept(work)
            found = tune.best([r for r in rows if (r.series, r.pass_, r.head_dim) in swept])
            for (name, pass_, d), (tiles, speed) in sorted(found.items()):
                text = f"Br={tiles.Br}, Bc={tiles.Bc}, {tune.note(tiles)}: {speed:.0f} TFLOP/s"
                self.console.print(f"  {name} {pass_} d={d}: {text}")
            changed = tune.update(found, self.gpu["compute_capability"])
            self.console.print(f"  {tune.TABLE.name}: {'changed' if changed else 'unchanged'}")
        return 1 if report.error else 0

    def draw(self, name: str) -> None:
        """Draw the figures of an experiment from stored rows. Print why if this is not possible."""
        report = self.reports.setdefault(name, Report())
        with self._reporting(name, report):
            report.drawn_from = self._draw(name)

    def _draw(self, name: str) -> list[str]:
        """Draw the figures of an experiment; return the machines whose rows are drawn."""
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            raise Refused(
                "not drawn, because matplotlib is not installed. Install the extra 'experiments': "
                "pip install -e '.[experiments]'"
            ) from None
        module, (stored, runs) = load(name), self._stored(name)
        rows = [row for row in stored if self.options.admits(row)]
        figure = module.draw(rows) if rows else None
        if figure is None:
            what = " for the chosen sizes" if stored and not rows else ""
            self.console.print(f"[yellow]{name}: not drawn, because there are no data{what}[/]")
            return []
        note, stem = self._footnote(module, runs, rows), self.options.out / name
        changed, kinds = bool(style.save(figure, stem, note)), [".svg", ".png"]
        for kind, make in ((".gif", "animate"), (".html", "page")):
            made = getattr(module, make, lambda *_: None)(rows, note)
            if made is not None:
                changed |= write_if_changed(stem.with_suffix(kind), made)
                kinds.append(kind)
        self._say_drawn(name, kinds, changed)
        for other, draw in thumbs.figures(module).items():
            further = draw(rows)
            if further is not None:
                changed = bool(style.save(further, self.options.out / other, note))
                self._say_drawn(other, kinds[:2], changed)
        return sorted({row.machine for row in rows})

    def _footnote(self, module: Any, runs: dict[str, list[dict[str, Any]]], rows: list[Row]) -> str:
        """Return the footnote of an experiment's figures.

        If the figures also contain a GPU's rows of other experiments, the module names these
        experiments in ALSO_DRAWN. The footnote then has a line for each of them.
        """
        lines = [provenance.footnote(runs, rows)]
        for other in getattr(module, "ALSO_DRAWN", ()):
            found, their_runs = self._stored(other)
            mine = [row for row in found if row.machine not in _NOT_GPUS]
            if mine:
                lines.append(f"{other}: {provenance.footnote(their_runs, mine).splitlines()[0]}")
        return "\n".join(lines)

    def _say_drawn(self, name: str, kinds: Sequence[str], changed: bool) -> None:
        state = "drawn" if changed else "drawn, unchanged"
        said = f"  {self.options.out / name}{', '.join(kinds[:-1])} and {kinds[-1]}: {state}"
        self.console.print(escape(said), soft_wrap=True)

    def _stored(self, name: str) -> tuple[list[Row], dict[str, list[dict[str, Any]]]]:
        """Return the rows to draw, and the runs of each machine.

        The rows are closed forms, counts of the emulator, and the rows of one GPU.

        If a machine has recordings in --out and in `figures`, the recording in --out is taken. Of
        several GPUs, this machine's GPU is preferred, then GPUs with a recording in --out, then the
        latest date.
        """
        places: dict[str, Store] = {}
        for store in (Store(FIGURES), self.store):
            places.update(dict.fromkeys(store.machines(name), store))
        found = {machine: places[machine].recorded(name, machine) for machine in places}
        runs = {machine: found[machine][1] for machine in found}
        gpus = [machine for machine in places if machine not in _NOT_GPUS]

        def preferred(machine: str) -> tuple[bool, bool, str, str]:
            """Return a sort key for the name of a GPU. The preferred GPU gets the largest key.

            This machine's GPU is preferred to all other GPUs. Among the other GPUs, a GPU with a
            recording in the folder --out is preferred. Then a later date is preferred.
            """
            date = max((str(run.get("date")) for run in runs[machine]), default="")
            return machine == self.machine, places[machine] is self.store, date, machine

        gpus.sort(key=preferred)
        chosen = [machine for machine in places if machine in _NOT_GPUS] + gpus[-1:]
        rows = [row for machine in chosen for row in found[machine][0]]
        return rows, {machine: runs[machine] for machine in chosen}


def lost(before: Sequence[Row]) -> str:
    """Return text that names the numbers of a recording which this machine cannot measure.

    The text is empty if this machine can measure all kinds of numbers in the rows `before`.
    """
    found = []
    if not counters.available() and any(row.source in counters.BYTES for row in before):
        found.append("hardware counters, but Nsight Compute (ncu) is missing here")
    others = {row.series for row in before if theirs(row.series)}
    if not peers.available() and others - {peers.FA4}:
        found.append("times of torch's kernels, but torch with CUDA is missing here")
    if peers.FA4 in others - {*peers.here((peers.FA4,))}:
        found.append("times of flash-attn-4's kernels, but flash-attn-4 is missing here")
    return "; and ".join(found)
