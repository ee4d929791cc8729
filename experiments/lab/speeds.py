"""Speed over the sequence length in FA-2's setting: what the speed experiments have in common.

An experiment is a `Study`, which says what is measured; `measure` and `draw` do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from . import peers, precompile, published
from .options import Bench, Options
from .series import (
    BACKWARD_LABELS,
    DETERMINISTIC,
    LABELS,
    MMA_SPLITS,
    SPLITS,
    backward_options,
    call,
    gradients,
    plan,
    query_splits,
    row_fields,
)
from .store import Row
from .timing import (
    CHECKED_SEQLEN,
    SECONDS,
    Gate,
    GradientGate,
    attempt,
    time_call,
    timing_rows,
)
from .workloads import HEAD_DIMS, SEQLENS, Inputs, fa2_setting

PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Series that one pass alone has, and those whose run is another's where there is one split.
_ONLY_IN = {SPLITS: "fwd", DETERMINISTIC: "bwd"}
_UNSPLIT = {SPLITS: "fa1-simt", MMA_SPLITS: "fa1-mma"}
# The published curves that are drawn, in the colour of our series, and a line a GPU.
PUBLISHED_METHODS = {"FlashAttention-2": "FA-2", "FlashAttention": "FA-1"}
PUBLISHED_GPUS = {"A100": ":", "H100": "-."}
_LIKE = {"FlashAttention-2": "fa2-mma", "FlashAttention": "fa1-mma"}


@dataclass(frozen=True)
class Study:
    """What one experiment measures.

    `ours` and `theirs` are series. Where `fa1_longest` is given, FA-1's backward pass is left out
    of longer problems. `figures` are those of the FA-2 paper to draw beside.
    """

    name: str
    dtype: str
    passes: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    fa1_longest: int | None = None
    figures: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        return (*self.ours, *self.theirs)

    def passes_of(self, series: str) -> tuple[str, ...]:
        """The passes in which the series is measured."""
        only = _ONLY_IN.get(series)
        return tuple(p for p in self.passes if only in (None, p))

    def at(self, problem: Problem, pass_: str) -> list[str]:
        """The series that are measured for the problem."""
        shown = self.series if peers.available() else self.ours
        long = self.fa1_longest is not None and problem.seqlen_q > self.fa1_longest
        return [
            series
            for series in shown
            if pass_ in self.passes_of(series)
            and not (long and pass_ != "fwd" and series.startswith("fa1"))
        ]


def measure(study: Study, options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed, error and, forward, peak memory of every series, checked before it is timed."""
    assert bench.machine is not None and bench.describe is not None
    lengths = options.seqlens or (SEQLENS[:2] if options.quick else SEQLENS)
    head_dims = options.head_dims or (HEAD_DIMS[:1] if options.quick else HEAD_DIMS)
    masks = options.causal or ((False,) if options.quick else (False, True))
    beyond = [N for N in lengths if study.fa1_longest is not None and N > study.fa1_longest]
    if beyond:
        bench.say(
            f"  FA-1 is not measured at N={', '.join(map(str, beyond))}: its backward pass has one "
            f"thread block a head, too few of them beyond N={study.fa1_longest}"
        )
    if not peers.available():
        bench.say("  no torch with CUDA here: its kernels are not measured")
    cases = [
        fa2_setting(N, d, mask, study.dtype) for d in head_dims for mask in masks for N in lengths
    ]
    precompile.compile_ahead(_planned(study, cases, bench.describe["multiprocessors"]), bench)
    checks = Checks(study)
    for problem in bench.track(cases, "timing"):
        arrays = peers.on_device(checks.inputs(problem), study.dtype)
        for pass_ in study.passes:
            measured: dict[str, list[Row]] = {}
            for series in study.at(problem, pass_):
                own = {}
                if series in _UNSPLIT:
                    unsplit = _UNSPLIT[series]
                    own = _splits(unsplit, pass_, problem, bench.describe["multiprocessors"])
                    if own == {"query_splits": 1}:
                        # The same launch: measuring it twice would only show noise.
                        yield from _copies(series, unsplit, measured[unsplit])
                        continue
                rows = _rows(study, series, pass_, problem, arrays, checks, bench.machine, own)
                measured[series] = list(rows)
                yield from measured[series]
                device.release_memory()
                peers.release()


def _planned(
    study: Study, cases: Sequence[Problem], multiprocessors: int
) -> Iterator[precompile.Call]:
    """Every call that `measure` makes of ours."""
    for problem in cases:
        for pass_ in study.passes:
            for series in (s for s in study.at(problem, pass_) if s in study.ours):
                own = {}
                if series in _UNSPLIT:
                    own = _splits(_UNSPLIT[series], pass_, problem, multiprocessors)
                yield from precompile.calls(series, problem, pass_, **own)


def _splits(series: str, pass_: str, problem: Problem, multiprocessors: int) -> dict[str, int]:
    """Query splits for the pass, for both the backward one's; none where there is no plan."""
    passes = "fwd" if pass_ == "fwd" else "bwd"
    splits, failure = attempt(lambda: query_splits(problem, multiprocessors, series, passes))
    return {} if failure else {"query_splits": splits}


def _copies(series: str, unsplit: str, rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        yield replace(row, series=series, note=row.note or f"one split: the run of {unsplit}")


def _call(
    study: Study, series: str, pass_: str, problem: Problem, arrays: Sequence[Any], **own: Any
) -> Callable[..., Any]:
    theirs = series in study.theirs
    if pass_ == "fwd":
        make = peers.call if theirs else call
        return make(series, problem, *arrays[:3], **own)
    return (peers.gradients if theirs else gradients)(series, problem, pass_, *arrays, **own)


class Checks:
    """The check of each series and pass: of the problem itself, or of a shorter one in its place.

    Float64 gradients of long problems take minutes; such a problem is let through when the same
    call gave the right gradients at CHECKED_SEQLEN, which is tried once.
    """

    def __init__(self, study: Study) -> None:
        self.inputs = Inputs(gradient=study.passes != ("fwd",))
        self._study = study
        self._gates: dict[tuple[bool, Problem], Gate | GradientGate] = {}
        self._passed: set[tuple[str, str, Problem]] = set()

    def __call__(
        self, series: str, pass_: str, problem: Problem, **own: Any
    ) -> Callable[[Any], float]:
        """A function of the result. Raises WrongResult when the shorter problem's are wrong."""
        if pass_ == "fwd" or problem.seqlen_q <= CHECKED_SEQLEN:
            return self._gate(series, pass_, problem)
        shorter = fa2_setting(CHECKED_SEQLEN, problem.head_dim, problem.causal, problem.dtype)
        if (series, pass_, shorter) not in self._passed:
            gate = self._gate(series, pass_, shorter)
            arrays = peers.on_device(self.inputs(shorter), shorter.dtype)
            gate(_call(self._study, series, pass_, shorter, arrays, **own)())
        return lambda result: float("nan")

    def _gate(self, series: str, pass_: str, problem: Problem) -> Callable[[Any], float]:
        forward = pass_ == "fwd"
        if (forward, problem) not in self._gates:
            arrays = self.inputs(problem)
            self._gates[forward, problem] = (
                Gate(problem, *arrays[:3]) if forward else GradientGate(problem, *arrays)
            )
        gate = self._gates[forward, problem]
        check = gate.peer if series in self._study.theirs else gate

        def checked(result: Any) -> float:
            error = check(result)
            self._passed.add((series, pass_, problem))
            return error

        return checked


def _rows(
    study: Study,
    series: str,
    pass_: str,
    problem: Problem,
    arrays: Sequence[Any],
    checks: Checks,
    machine: str,
    own: dict[str, int],
) -> Iterator[Row]:
    tiles: dict[str, int | None] = {}

    def work() -> tuple:
        if series in study.ours:
            more = {} if pass_ == "fwd" else {"passes": "bwd", **backward_options(series)}
            chosen = plan(series, problem, **own, **more).tiles
            tiles.update(Br=chosen.Br, Bc=chosen.Bc)
        check = checks(series, pass_, problem, **own)
        run = _call(study, series, pass_, problem, arrays, **own)
        if pass_ != "fwd":
            return time_call(run, check, seconds=SECONDS), None
        timing = time_call(run, check)
        return timing, (peers.peak_bytes if series in study.theirs else _peak_bytes)(run)

    result, failure = attempt(work)
    common = {
        "machine": machine,
        "experiment": study.name,
        "series": series,
        "source": "measured",
        "pass_": pass_,
        "note": failure or ", ".join(f"{name}={value}" for name, value in own.items()),
        **row_fields(problem),
        **tiles,
    }
    if failure:
        yield Row(metric="speed", unit="TFLOP/s", value=None, **common)
        return
    timing, peak = result
    for row in timing_rows(timing, problem, **common):
        # Beyond CHECKED_SEQLEN the error found of gradients is another problem's.
        if row.metric != "error" or pass_ == "fwd" or problem.seqlen_q <= CHECKED_SEQLEN:
            yield row
    if peak is not None:
        yield Row(metric="memory", unit="MiB", value=peak / 2**20, **common)


def _peak_bytes(run: Callable[..., Any]) -> int:
    """Peak memory of one call of ours beside inputs and output."""
    out = run()
    device.synchronize()
    with device.track_memory() as memory:
        run(out=out)
        device.synchronize()
    return memory.peak_bytes


def draw(study: Study, rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels a pass and head dimension, a column a mask."""
    from . import style

    rows = [row for row in rows if row.metric == "speed"]
    if not rows:
        return None
    several = len(study.passes) > 1
    labels = LABELS if "fwd" in study.passes else BACKWARD_LABELS
    across = [
        (p, d) for p in study.passes for d in sorted({r.head_dim for r in rows if r.pass_ == p})
    ]
    masks = sorted({row.causal for row in rows})
    height = 1.1 + 2.6 * len(across) if several else 0.9 + 3.1 * len(across)
    figure, axes = style.new(len(across), len(masks), height, sharey="row")
    for (pass_, d), panels in zip(across, axes, strict=True):
        for mask, ax in zip(masks, panels, strict=True):
            mine = [r for r in rows if (r.pass_, r.head_dim, r.causal) == (pass_, d, mask)]
            _curves(ax, mine, study.series, labels)
            _published(ax, study, pass_, d, mask, {r.seqlen_q for r in mine})
            ax.set_ylim(bottom=0)
            lengths = {row.seqlen_q for row in (rows if several else mine)}
            style.sizes(ax, sorted(lengths), "sequence length N")
            title = f"d={d}, {'causal' if mask else 'not causal'}"
            ax.set_title(f"{PASSES[pass_]}, {title}" if several else title)
        panels[0].set_ylabel("TFLOP/s")
    _legend(figure, axes, rows, study, labels)
    return figure


def _curves(ax: Any, rows: Sequence[Row], shown: Sequence[str], labels: dict[str, str]) -> None:
    """Speed over N of each series, the band between its percentiles behind it."""
    from . import style

    for series in shown:
        points = sorted(
            (r for r in rows if r.series == series and not r.failed), key=lambda r: r.seqlen_q
        )
        x = [r.seqlen_q for r in points]
        ax.plot(
            x,
            [r.value for r in points],
            color=style.COLOURS[series],
            marker=style.MARKERS[series],
            ls="--" if series.startswith("torch") else "-",
            zorder=2.5 if series in _UNSPLIT else 3,
            label=labels[series],
        )
        ax.fill_between(
            x,
            [r.value if r.p20 is None else r.p20 for r in points],
            [r.value if r.p80 is None else r.p80 for r in points],
            color=style.COLOURS[series],
            alpha=0.2,
            lw=0,
        )


def published_speeds(
    figures: Sequence[str], pass_: str, head_dim: int, causal: bool
) -> dict[tuple[str, str], dict[int, float]]:
    """(method, GPU) -> N -> TFLOP/s of those FA-2 paper's figures that show the pass."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    wanted = {"pass": pass_, "head_dim": str(head_dim), "causal": str(causal).lower()}
    for item in figures:
        for line in published.lookup(paper="fa2", item=item, metric="speed", **wanted):
            gpu = line["hardware"].split("-")[0]
            curve = found.setdefault((line["method"], gpu), {})
            curve[int(line["seqlen"])] = float(line["value"])
    return found


def _published(ax: Any, study: Study, pass_: str, d: int, mask: bool, lengths: set[int]) -> None:
    """What the paper shows of the same pass, as thin lines in the colour of our algorithm."""
    from . import style

    curves = published_speeds(study.figures, pass_, d, mask)
    for (method, gpu), line in curves.items():
        if method not in PUBLISHED_METHODS:
            continue
        points = sorted((N, value) for N, value in line.items() if N in lengths)
        ax.plot(
            [N for N, _ in points],
            [value for _, value in points],
            color=style.COLOURS[_LIKE[method]],
            ls=PUBLISHED_GPUS[gpu],
            lw=1.1,
            zorder=2,
            label=f"{PUBLISHED_METHODS[method]}, published, {gpu}",
        )


def _legend(
    figure: Any, axes: Any, rows: Sequence[Row], study: Study, labels: dict[str, str]
) -> None:
    """A legend of the series that have rows, and of what is published."""
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    used = {r.series for r in rows}
    left_out = {labels[series] for series in study.series if series not in used}
    order = [labels[series] for series in study.series]
    kept = [label for label in dict.fromkeys((*order, *handles)) if label not in left_out]
    title = f"{DTYPES[study.dtype]}, 16k tokens in all, hidden dimension 2048"
    if len(study.passes) == 1:
        title = f"{PASSES[study.passes[0]]}, {title}"
    longest, drawn = study.fa1_longest, max(r.seqlen_q for r in rows)
    if longest is not None and drawn > longest and any(s.startswith("fa1") for s in used):
        from .style import short

        title += f"; FA-1, one thread block a head, to N={short(longest)} only"
    figure.legend(
        [handles[label] for label in kept], kept, loc="outside upper center", ncols=3, title=title
    )
