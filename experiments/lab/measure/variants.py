"""Compares several calls of one problem: times after a check, then bytes by hardware counters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from ..record import Bench, Row
from . import calls, counters, peers
from .series import backward_options, columns, plan, row_tiles
from .timing import CHECKED_SEQLEN, attempt, shuffled, time_call, timing_rows
from .workloads import Inputs


@dataclass(frozen=True)
class Variant:
    """One of the calls that an experiment compares.

    Parameters
    ----------
    series : str
        Name of the series.
    options : dict, default {}
        Further options of the call.
    same_as : str, optional
        Name of a series that makes the same call. The rows of that series are copied, and this call
        is not measured.
    note : str, default ""
        Note of the rows.
    passes : str, default "fwd"
        "fwd", "bwd" or "fwd+bwd".
    by_row_tile : bool, default False
        Whether the forward pass is computed by one call for each row tile of q, one call after the
        other. Each call of FA-2 then has one thread block per head.
    """

    series: str
    options: dict[str, Any] = field(default_factory=dict)
    same_as: str | None = None
    note: str = ""
    passes: str = "fwd"
    by_row_tile: bool = False

    @property
    def planned(self) -> dict[str, Any]:
        """Return the options for the plan of the call.

        For the passes "bwd" and "fwd+bwd" this is the plan of the backward pass.
        """
        backward = {"passes": "bwd", **backward_options(self.series)}
        return self.options | ({} if self.passes == "fwd" else backward)


Work = Sequence[tuple[Problem, list[Variant]]]


def splits_of(fa1: str, splits: int, passes: str = "fwd") -> Variant:
    """Return the call of FA-1 in which several thread blocks share the rows of Q of a head.

    Parameters
    ----------
    fa1 : str
        Name of the series without splits, such as "fa1-mma".
    splits : int
        Number of thread blocks per head.
    passes : str, default "fwd"
        "fwd", "bwd" or "fwd+bwd".

    Returns
    -------
    Variant
        The call. The name of its series ends in "-splits". If `splits` is 1, the call is not
        measured, because it equals the call of the series `fa1`. The rows of `fa1` are copied
        instead.
    """
    series = f"{fa1}-splits"
    if splits == 1:
        note = f"one split: the run of {fa1}"
        return Variant(series, same_as=fa1, note=note, passes=passes)
    return Variant(series, {"query_splits": splits}, note=f"query_splits={splits}", passes=passes)


def measure(
    experiment: str, work: Work, bench: Bench, profiled: Mapping[str, str], *,
    seconds: float | None = None, counted: Callable[[Problem], bool] = lambda problem: True,
) -> Iterator[Row]:  # fmt: skip
    """Measure all calls: first times, then bytes by hardware counters.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    work : sequence of (Problem, list of Variant)
        The calls of each problem. A variant with `same_as` must come after the variant whose rows
        are copied.
    bench : Bench
        Where the experiment runs.
    profiled : mapping of str to str
        Further hardware counters: maps the metric of a row to Nsight Compute's name of the counter.
    seconds : float, optional
        Approximate time to spend on the timed runs of each call, in seconds.
    counted : callable, optional
        Takes a problem and returns whether hardware counters are read. Default: for all problems.

    Yields
    ------
    Row
        Rows of `times` and of `hardware`.
    """
    yield from times(experiment, work, bench, seconds)
    yield from hardware(experiment, work, bench, profiled, counted)


def times(
    experiment: str, work: Work, bench: Bench, seconds: float | None = None, memory: bool = False
) -> Iterator[Row]:
    """Time all calls, the calls of a problem in random order. Each result is checked first.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    work : sequence of (Problem, list of Variant)
        The calls of each problem.
    bench : Bench
        Where the experiment runs.
    seconds : float, optional
        Approximate time to spend on the timed runs of each call, in seconds.
    memory : bool, default False
        Whether to measure the peak memory of forward calls too.

    Yields
    ------
    Row
        Rows of time, speed, error and memory.
    """
    backwards = any(s.passes != "fwd" for _, variants in work for s in variants)
    inputs = Inputs(gradient=backwards)
    checks = calls.Checks(inputs, partial(calls.shortened, CHECKED_SEQLEN))
    for problem, variants in bench.each(work, "timing"):
        arrays = peers.on_device(inputs(problem), problem.dtype)
        measured: dict[int, list[Row]] = {}
        for n in shuffled([n for n, v in enumerate(variants) if v.same_as is None], problem):
            of = (experiment, variants[n], problem, arrays, checks, bench.machine)
            measured[n] = list(_timed(*of, seconds, memory))
            device.release_memory()
            peers.release()
        timed: dict[str, list[Row]] = {}  # the last rows of each series
        for n, variant in enumerate(variants):
            same = None if variant.same_as is None else timed[variant.same_as]
            timed[variant.series] = measured[n] if same is None else copies(variant, same)
            yield from timed[variant.series]


def plain_times(
    experiment: str, work: Sequence[tuple[Problem, Sequence[str]]], passes: Sequence[str],
    bench: Bench, seconds: float,
) -> Iterator[Row]:  # fmt: skip
    """Time the calls of several series without options. Yield only the rows with metric "time".

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    work : sequence of (Problem, sequence of str)
        The series to time for each problem. torch's series are left out if torch is missing.
    passes : sequence of str
        Passes.
    bench : Bench
        Where the experiment runs.
    seconds : float
        Approximate time to spend on the timed runs of each call, in seconds.

    Yields
    ------
    Row
        Rows of time.
    """
    made = []
    for problem, series in work:
        here = [s for s in series if not calls.theirs(s) or peers.here((s,))]
        made.append((problem, [Variant(s, passes=pass_) for pass_ in passes for s in here]))
    yield from (row for row in times(experiment, made, bench, seconds) if row.metric == "time")


def _run(variant: Variant, problem: Problem, arrays: Sequence[Any]) -> Callable[..., Any]:
    if variant.by_row_tile:
        return row_tiles(variant.series, problem, *arrays[:3], **variant.options)
    # The forward pass before a backward pass alone gets no options: the planner chooses.
    own = variant.options | ({"before": {}} if variant.passes == "bwd" else {})
    return calls.make(variant.series, variant.passes, problem, arrays, **own)


def copies(variant: Variant, rows: Iterable[Row]) -> list[Row]:
    """Copy the rows of a call to the series of a variant that makes the same call.

    Parameters
    ----------
    variant : Variant
        The variant.
    rows : iterable of Row
        The rows of the original.

    Returns
    -------
    list of Row
        The copies.
    """
    return [replace(row, series=variant.series, note=row.note or variant.note) for row in rows]


def _common(
    experiment: str, variant: Variant, problem: Problem, machine: str | None
) -> tuple[dict[str, Any], Any, str]:
    """Return the columns of a variant's rows, the plan, and the reason why there is no plan.

    The plan is None for torch's series, and if planning failed. The reason is an empty text unless
    planning failed.
    """
    planned, failure = None, ""
    if not calls.theirs(variant.series):
        planned, failure = attempt(plan, variant.series, problem, **variant.planned)
    tiles = variant.options.get("tiles") if planned is None else planned.tiles
    common = columns(experiment, variant.series, problem, machine, tiles, pass_=variant.passes)
    return common, planned, failure


def _timed(
    experiment: str, variant: Variant, problem: Problem, arrays: tuple, checks: calls.Checks,
    machine: str | None, seconds: float | None, memory: bool,
) -> Iterator[Row]:  # fmt: skip
    common, _, failure = _common(experiment, variant, problem, machine)
    found = None
    if not failure:

        def work() -> Any:
            make = partial(_run, variant)
            name = " ".join(map(str, (variant.series, *variant.options.items())))
            check, run = checks(name, variant.passes, problem, make), make(problem, arrays)
            timing = time_call(run, check, seconds=seconds)
            # peak_bytes asks torch's allocator, which does not know JAX's memory.
            if not memory or variant.passes != "fwd" or variant.series == peers.PALLAS:
                return timing, None
            theirs = calls.theirs(variant.series)
            return timing, (peers.peak_bytes if theirs else calls.workspace_bytes)(run)

        found, failure = attempt(work)
    common["note"] = f"{variant.note}; {failure}" if failure else variant.note
    if found is None:
        for metric, unit_ in (("time", "ms"), ("speed", "TFLOP/s")):
            yield Row(metric=metric, unit=unit_, value=None, **common)
        return
    timing, peak = found
    yield from timing_rows(timing, problem, **common)
    if peak is not None:
        yield Row(metric="memory", unit="MiB", value=peak / 2**20, **common)


def hardware(
    experiment: str, work: Work, bench: Bench, profiled: Mapping[str, str] = MappingProxyType({}),
    counted: Callable[[Problem], bool] = lambda problem: True,
) -> Iterator[Row]:  # fmt: skip
    """Yield rows of the bytes that calls move, by the closed form and by hardware counters.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    work : sequence of (Problem, list of Variant)
        The calls of each problem.
    bench : Bench
        Where the experiment runs.
    profiled : mapping of str to str, default {}
        Further hardware counters: maps the metric of a row to Nsight Compute's name of the counter.
    counted : callable, optional
        Takes a problem and returns whether hardware counters are read. Default: for all problems.

    Yields
    ------
    Row
        Rows of traffic and of the further counters.
    """
    wanted = [(p, v) for p, variants in work for v in variants if v.same_as is None and counted(p)]
    cases = [_case(problem, variant) for problem, variant in wanted]
    metrics = (*counters.TRAFFIC, *profiled.values())
    results = counters.count_or_say(cases, metrics, bench.say) if cases else None
    read = iter(results or ())
    for problem, variants in work:
        # A copy gets the rows of the first variant of the series that it names.
        found: dict[str, list[Row]] = {}
        for variant in variants:
            if variant.same_as is not None:
                rows = copies(variant, found[variant.same_as])
            else:
                result = next(read) if results is not None and counted(problem) else None
                rows = list(_counted(experiment, variant, problem, result, bench.machine, profiled))
            found.setdefault(variant.series, rows)
            yield from rows


def _case(problem: Problem, variant: Variant) -> counters.Case:
    """Return the call whose hardware counters are read.

    Usually it is the call of the variant. If the variant makes one call for each row tile, the
    counters of only one of these calls are read. All of them then must move equally many bytes.
    Raise ValueError for a causal mask, because the calls then move different numbers of bytes.
    """
    if variant.by_row_tile:
        if problem.causal:
            raise ValueError(
                "problem must not be causal: one row tile is counted for all, and causal row tiles "
                "differ"
            )
        problem = replace(problem, seqlen_q=variant.options["tiles"].Br)
    return counters.Case(variant.series, problem, variant.options, variant.passes)


def _counted(
    experiment: str, variant: Variant, problem: Problem, result: dict[str, float] | str | None,
    machine: str | None, profiled: Mapping[str, str],
) -> Iterator[Row]:  # fmt: skip
    common, planned, failure = _common(experiment, variant, problem, machine)
    if result is not None and failure:
        result = failure
    # If each row tile has its own call, one of these calls is counted, and multiplied.
    calls = -(-problem.seqlen_q // variant.options["tiles"].Br) if variant.by_row_tile else 1
    yield from counters.traffic(result, planned, calls, variant.note, **common)
    if result is None:
        return
    for metric, name in profiled.items():
        value, why = counters.read(result, itemgetter(name))
        if value is not None and name.endswith(".sum"):
            value *= calls
        yield Row(metric=metric, unit="1", value=value, note=why or variant.note, **common)


def problems_of(rows: Iterable[Row]) -> dict[Problem, list[Row]]:
    """Group rows by problem.

    Parameters
    ----------
    rows : iterable of Row
        Rows.

    Returns
    -------
    dict of Problem to list of Row
        The rows of each problem. Problems in float32 come first, then problems without a mask. They
        are further sorted by length and head dimension.
    """
    found: dict[Problem, list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r.dtype != "float32", r.causal, r.seqlen_q, r.head_dim)):
        sizes = (row.batch, row.heads_q, row.heads_k, row.seqlen_q, row.seqlen_k, row.head_dim)
        problem = Problem(*sizes, dtype=row.dtype, causal=row.causal)
        found.setdefault(problem, []).append(row)
    return found
