"""Speed over the length in FA-2's setting: a `Study` says what `measure` measures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from ..record import Bench, Options, Row
from . import bandwidth, calls, peers
from .series import (
    DETERMINISTIC,
    HOPPER_FA1,
    HOPPER_SPLITS,
    MMA_SPLITS,
    SPLITS,
    backward_options,
    by_planes,
    columns,
    plan,
    query_splits,
)
from .timing import CHECKED_SEQLEN, SECONDS, attempt, time_call, timing_rows
from .workloads import HEAD_DIMS, SEQLENS, Inputs, fa2_setting

PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Series that one pass alone has, and those whose run is another's where there is one split.
_ONLY_IN = {SPLITS: "fwd", DETERMINISTIC: "bwd"}
UNSPLIT = {SPLITS: "fa1-simt", MMA_SPLITS: "fa1-mma", HOPPER_SPLITS: HOPPER_FA1}


@dataclass(frozen=True)
class Study:
    """What one experiment measures: series `ours` and `theirs`, FA-1's backward pass to
    `fa1_longest`, of `forward_dims` the forward pass alone; `figures` are the FA-2 paper's beside.
    """

    name: str
    dtype: str
    passes: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    fa1_longest: int | None = None
    forward_dims: tuple[int, ...] = ()
    figures: tuple[str, ...] = ()
    seqlens: tuple[int, ...] = SEQLENS

    @property
    def series(self) -> tuple[str, ...]:
        return (*self.ours, *self.theirs)

    @property
    def drawn(self) -> tuple[str, ...]:
        """The series of the figure: those of float32 by planes are in a table."""
        return tuple(series for series in self.series if not by_planes(series))

    def passes_of(self, series: str) -> tuple[str, ...]:
        """The passes in which the series is measured; those by planes in each alone."""
        only = _ONLY_IN.get(series)
        passes = (p for p in self.passes if only in (None, p))
        return tuple(p for p in passes if not by_planes(series) or p != "fwd+bwd")

    def at(self, problem: Problem, pass_: str) -> list[str]:
        if pass_ != "fwd" and problem.head_dim in self.forward_dims:
            return []
        shown = self.series if peers.available() else self.ours
        long = self.fa1_longest is not None and problem.seqlen_q > self.fa1_longest
        return [
            series
            for series in shown
            if pass_ in self.passes_of(series)
            and not (long and pass_ != "fwd" and series.startswith("fa1"))
        ]


def measure(study: Study, options: Options, bench: Bench) -> Iterator[Row]:
    """Rows of time, speed, error and, forward, peak memory; results are checked before timing."""
    lengths = options.seqlens or (study.seqlens[:2] if options.quick else study.seqlens)
    every = (*HEAD_DIMS, *study.forward_dims)
    beyond = [N for N in lengths if study.fa1_longest is not None and N > study.fa1_longest]
    if beyond:
        bench.say(
            f"  FA-1 is not measured at N={', '.join(map(str, beyond))}: its backward pass has one "
            f"thread block a head, too few of them beyond N={study.fa1_longest}"
        )
    peers.say_missing(bench.say)
    make, few = partial(fa2_setting, dtype=study.dtype), options.quick
    cases = options.grid(make, lengths, every[: 1 if few else None], (False, True)[: 2 - few])
    if peers.available():
        yield from bandwidth.matmul_peak(study.name, study.dtype, bench.machine)
    inputs = Inputs(gradient=study.passes != ("fwd",))
    checks = calls.Checks(inputs, calls.shortened(CHECKED_SEQLEN))
    for problem in bench.each(cases, "timing"):
        arrays = peers.on_device(inputs(problem), study.dtype)
        for pass_ in study.passes:
            measured: dict[str, list[Row]] = {}
            for series in study.at(problem, pass_):
                own = _splits(series, pass_, problem, bench.describe["multiprocessors"])
                if own == {"query_splits": 1}:
                    # The same launch: measuring it twice would only show noise.
                    unsplit = UNSPLIT[series]
                    for row in measured[unsplit]:
                        note = row.note or f"one split: the run of {unsplit}"
                        yield replace(row, series=series, note=note)
                    continue
                rows = _rows(study, series, pass_, problem, arrays, checks, bench.machine, own)
                measured[series] = list(rows)
                yield from measured[series]
                device.release_memory()
                peers.release()


def _splits(series: str, pass_: str, problem: Problem, multiprocessors: int) -> dict[str, int]:
    """query_splits of a series that has them for a pass, both passes' the backward one's; empty
    where there is no plan.
    """
    if series not in UNSPLIT:
        return {}
    passes = "fwd" if pass_ == "fwd" else "bwd"
    splits, failure = attempt(query_splits, problem, multiprocessors, UNSPLIT[series], passes)
    return {} if failure else {"query_splits": splits}


def _rows(
    study: Study, series: str, pass_: str, problem: Problem, arrays: Sequence[Any],
    checks: calls.Checks, machine: str, own: dict[str, int],
) -> Iterator[Row]:  # fmt: skip
    tiles: dict[str, int | None] = {}

    def work() -> tuple:
        if series in study.ours:
            more = {} if pass_ == "fwd" else {"passes": "bwd", **backward_options(series)}
            chosen = plan(series, problem, **own, **more).tiles
            tiles.update(Br=chosen.Br, Bc=chosen.Bc)
        check = checks(series, pass_, problem, **own)
        run = calls.make(series, pass_, problem, arrays, **own)
        timing = time_call(run, check, seconds=SECONDS)
        if pass_ != "fwd":
            return timing, None
        return timing, (peers.peak_bytes if series in study.theirs else calls.workspace_bytes)(run)

    result, failure = attempt(work)
    note = failure or ", ".join(f"{name}={value}" for name, value in own.items())
    more: dict[str, Any] = {"pass_": pass_, "note": note, **tiles}
    common = columns(study.name, series, problem, machine, **more)
    if failure:
        yield Row(metric="speed", unit="TFLOP/s", value=None, **common)
        return
    timing, peak = result
    yield from timing_rows(timing, problem, **common)
    if peak is not None:
        yield Row(metric="memory", unit="MiB", value=peak / 2**20, **common)
