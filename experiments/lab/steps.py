"""Forward calls beside each other at one problem: times, checked first, then hardware counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from . import ahead, counters, peers
from .algorithms import algorithm, call, plan, row_fields
from .options import Bench
from .settings import Inputs
from .store import Row
from .timing import Gate, attempt, time_call, timing_rows


@dataclass(frozen=True)
class Configuration:
    """One step. `same_as` is the series that runs just this already; `note` says so."""

    series: str
    options: dict[str, Any] = field(default_factory=dict)
    same_as: str | None = None
    note: str = ""


Work = Sequence[tuple[Problem, list[Configuration]]]


def splits_of(fa1: str, splits: int) -> Configuration:
    """FA-1 with its queries split; a copy where there is one split."""
    series = f"{fa1}-splits"
    if splits == 1:
        return Configuration(series, same_as=fa1, note=f"one split: the run of {fa1}")
    return Configuration(series, {"query_splits": splits}, note=f"query_splits={splits}")


def measure(
    experiment: str,
    work: Work,
    bench: Bench,
    profiled: Mapping[str, str],
    *,
    seconds: float | None = None,
    counted: Callable[[Problem], bool] = lambda problem: True,
) -> Iterator[Row]:
    """Times of every problem's steps, then their bytes and what is `profiled`: metric -> ncu's.

    A step that is a copy follows its original. `seconds` as `time_call` has it; problems that are
    not `counted` get the model's bytes alone.
    """
    calls = [ahead.Call(s.series, problem, s.options) for problem, steps in work for s in steps]
    ahead.compile_ahead(calls, bench)
    inputs = Inputs()
    for problem, steps in bench.track(work, "timing"):
        host = inputs(problem)
        gate = Gate(problem, *host)
        arrays = peers.on_device(host, problem.dtype)
        timed: dict[str, list[Row]] = {}
        for step in steps:
            if step.same_as is None:
                rows = _timed(experiment, step, problem, arrays, gate, bench.machine, seconds)
                timed[step.series] = list(rows)
                device.release_memory()
            else:
                timed[step.series] = copies(step, timed[step.same_as])
            yield from timed[step.series]
    yield from _profiled(experiment, work, bench, profiled, counted)


def copies(step: Configuration, rows: Iterable[Row]) -> list[Row]:
    """Rows of one run under a second name: measuring it twice would only show noise."""
    return [replace(row, series=step.series, note=row.note or step.note) for row in rows]


def _common(
    experiment: str, step: Configuration, problem: Problem, machine: str | None
) -> tuple[dict[str, Any], Any, str]:
    """What the step's rows share, its plan or None, and why there is none."""
    common = {"machine": machine, "experiment": experiment, "series": step.series}
    common |= row_fields(problem)
    planned, failure = attempt(lambda: plan(step.series, problem, **step.options))
    if planned is not None:
        common |= {"Br": planned.tiles.Br, "Bc": planned.tiles.Bc}
    return common, planned, failure


def _timed(
    experiment: str,
    step: Configuration,
    problem: Problem,
    arrays: tuple,
    gate: Gate,
    machine: str | None,
    seconds: float | None,
) -> Iterator[Row]:
    common, _, failure = _common(experiment, step, problem, machine)
    timing = None
    if not failure:
        run = call(step.series, problem, *arrays, **step.options)
        timing, failure = attempt(lambda: time_call(run, gate, seconds=seconds))
    common |= {"source": "measured", "note": failure or step.note}
    if timing is None:
        yield Row(metric="time", unit="ms", value=None, **common)
    else:
        yield from timing_rows(timing, problem, **common)


def _profiled(
    experiment: str,
    work: Work,
    bench: Bench,
    profiled: Mapping[str, str],
    counted: Callable[[Problem], bool],
) -> Iterator[Row]:
    """Each step's counters, and the model's bytes beside them."""
    runs = [(problem, step) for problem, steps in work for step in steps if step.same_as is None]
    wanted = [(problem, step) for problem, step in runs if counted(problem)]
    cases = [
        counters.Case.of(algorithm(step.series), problem, **step.options)
        for problem, step in wanted
    ]
    metrics = (*counters.TRAFFIC, *profiled.values())
    results = counters.count_or_say(cases, metrics, bench.say) if cases else None
    read = {
        (problem, step.series): result
        for (problem, step), result in zip(wanted, results or (), strict=results is not None)
    }
    found: dict[tuple[Problem, str], list[Row]] = {}
    for problem, step in runs:
        result = read.get((problem, step.series))
        rows = _counted(experiment, step, problem, result, bench.machine, profiled)
        found[problem, step.series] = list(rows)
    for problem, steps in work:
        for step in steps:
            if step.same_as is not None:
                found[problem, step.series] = copies(step, found[problem, step.same_as])
            yield from found[problem, step.series]


def _counted(
    experiment: str,
    step: Configuration,
    problem: Problem,
    result: dict[str, float] | str | None,
    machine: str | None,
    profiled: Mapping[str, str],
) -> Iterator[Row]:
    common, planned, failure = _common(experiment, step, problem, machine)
    traffic = {"metric": "traffic", "unit": "bytes", **common}
    if planned is not None:
        yield Row(source="model", value=planned.accesses.bytes, note=step.note, **traffic)
    if result is None:
        return
    failure = failure or (result if isinstance(result, str) else "")
    note = failure or step.note
    for source, in_bytes in (("l2", counters.l2_bytes), ("dram", counters.dram_bytes)):
        value = None if failure else in_bytes(result)
        yield Row(source=source, value=value, note=note, **traffic)
    common |= {"source": "measured", "unit": "1", "note": note}
    for metric, name in profiled.items():
        yield Row(metric=metric, value=None if failure else result[name], **common)


Values = dict[tuple[str, str, str], float]


def values(rows: Iterable[Row]) -> Values:
    """(series, source, metric) -> value, for the rows of one problem that did not fail."""
    return {(r.series, r.source, r.metric): r.value for r in rows if r.value is not None}


def problems_of(rows: Iterable[Row]) -> dict[Problem, list[Row]]:
    """The rows by problem: float32 first and without a mask, then by length and head dimension."""
    found: dict[Problem, list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r.dtype != "float32", r.causal, r.seqlen_q, r.head_dim)):
        sizes = (row.batch, row.heads_q, row.heads_k, row.seqlen_q, row.seqlen_k, row.head_dim)
        problem = Problem(*sizes, dtype=row.dtype, causal=row.causal)
        found.setdefault(problem, []).append(row)
    return found
