"""Backward speed over the sequence length in FA-2's setting, alone and with the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .lab import peers
from .lab.algorithms import (
    BACKWARD_LABELS,
    DETERMINISTIC,
    backward_options,
    gradients,
    plan,
    row_fields,
)
from .lab.options import Bench, Options
from .lab.settings import HEAD_DIMS, SEQLENS, Inputs, fa2_setting
from .lab.store import Row
from .lab.timing import (
    CHECKED_SEQLEN,
    SECONDS,
    GradientGate,
    attempt,
    time_call,
    timing_rows,
)
from .speed import curves, legend

NAME = "speed_backward"
TITLE = "TFLOP/s of the backward pass over the sequence length, both loop orders and torch"
DESCRIPTION = (
    "Backward and forward + backward TFLOP/s over N in the FA-2 paper's setting (16k tokens, "
    "hidden dimension 2048), fp32: both loop orders, FA-2 with a deterministic dQ, standard "
    "attention, and torch's kernels where torch is installed."
)
NEEDS_GPU = True

PASSES = {"bwd": "backward", "fwd+bwd": "forward + backward"}
OURS = ("standard-simt", "fa1-simt", "fa2-simt", DETERMINISTIC)
ALL = (*OURS, *peers.FLOAT32)
# FA-1 has one thread block a head: beyond this few blocks are left, and a call takes seconds.
FA1_LONGEST = 8192


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time and speed of every series and pass, checked before they are timed."""
    assert bench.machine is not None
    lengths = options.seqlens or (SEQLENS[:2] if options.quick else SEQLENS)
    head_dims = options.head_dims or (HEAD_DIMS[:1] if options.quick else HEAD_DIMS)
    masks = options.causal or ((False,) if options.quick else (False, True))
    beyond = [N for N in lengths if N > FA1_LONGEST]
    if beyond:
        bench.say(
            f"  FA-1 is not measured at N={', '.join(map(str, beyond))}: its backward pass has one "
            f"thread block a head, too few of them beyond N={FA1_LONGEST}"
        )
    if not peers.available():
        bench.say("  no torch with CUDA here: its kernels are not measured")
    cases = [fa2_setting(N, d, mask) for d in head_dims for mask in masks for N in lengths]
    checks = Checks()
    for problem in bench.track(cases, "timing"):
        arrays = on_device(checks.inputs(problem))
        for series in series_at(problem):
            for pass_ in passes_of(series):
                yield from _rows(series, pass_, problem, arrays, checks, bench.machine)
                device.release_memory()
                peers.release()


def series_at(problem: Problem) -> list[str]:
    """The series that are measured for the problem."""
    return [
        series
        for series in (ALL if peers.available() else OURS)
        if series != "fa1-simt" or problem.seqlen_q <= FA1_LONGEST
    ]


def passes_of(series: str) -> tuple[str, ...]:
    """The deterministic sum is the backward pass's alone."""
    return ("bwd",) if series == DETERMINISTIC else tuple(PASSES)


def on_device(host: Sequence[Any]) -> tuple[Any, ...]:
    """q, k, v and dout on the GPU; torch's where it is, for its allocator makes the gradients."""
    return peers.tensors(host) if peers.available() else tuple(device.to_gpu(x) for x in host)


def _call(series: str, pass_: str, problem: Problem, arrays: Sequence[Any]) -> Callable[..., Any]:
    make = peers.gradients if series in peers.FLOAT32 else gradients
    return make(series, problem, pass_, *arrays)


class Checks:
    """The check of each series and pass: of the problem itself, or of a shorter one in its place.

    Float64 gradients of long problems take minutes; such a problem is let through when the same
    call gave the right gradients at CHECKED_SEQLEN, which is tried once.
    """

    def __init__(self) -> None:
        self.inputs = Inputs(gradient=True)
        self._gates: dict[Problem, GradientGate] = {}
        self._passed: set[tuple[str, str, Problem]] = set()

    def __call__(self, series: str, pass_: str, problem: Problem) -> Callable[[Any], float]:
        """A function of the gradients. Raises WrongResult when the shorter problem's are wrong."""
        if problem.seqlen_q <= CHECKED_SEQLEN:
            return self._gate(series, pass_, problem)
        shorter = fa2_setting(CHECKED_SEQLEN, problem.head_dim, problem.causal)
        if (series, pass_, shorter) not in self._passed:
            gate = self._gate(series, pass_, shorter)
            gate(_call(series, pass_, shorter, on_device(self.inputs(shorter)))())
        return lambda result: float("nan")

    def _gate(self, series: str, pass_: str, problem: Problem) -> Callable[[Any], float]:
        if problem not in self._gates:
            self._gates[problem] = GradientGate(problem, *self.inputs(problem))
        gate = self._gates[problem]
        check = gate.peer if series in peers.FLOAT32 else gate

        def checked(result: Any) -> float:
            error = check(result)
            self._passed.add((series, pass_, problem))
            return error

        return checked


def _rows(
    series: str,
    pass_: str,
    problem: Problem,
    arrays: Sequence[Any],
    checks: Checks,
    machine: str,
) -> Iterator[Row]:
    tiles: dict[str, int | None] = {}

    def work() -> Any:
        if series in OURS:
            planned = plan(series, problem, passes="bwd", **backward_options(series))
            tiles.update(Br=planned.tiles.Br, Bc=planned.tiles.Bc)
        check = checks(series, pass_, problem)
        return time_call(_call(series, pass_, problem, arrays), check, seconds=SECONDS)

    timing, failure = attempt(work)
    common = {
        "machine": machine,
        "experiment": NAME,
        "series": series,
        "source": "measured",
        "pass_": pass_,
        "note": failure,
        **row_fields(problem),
        **tiles,
    }
    if timing is None:
        yield Row(metric="speed", unit="TFLOP/s", value=None, **common)
        return
    for row in timing_rows(timing, problem, **common):
        # Beyond CHECKED_SEQLEN the error found is another problem's.
        if row.metric != "error" or problem.seqlen_q <= CHECKED_SEQLEN:
            yield row


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels a pass and head dimension, a column a mask."""
    from .lab import style

    rows = [row for row in rows if row.metric == "speed"]
    if not rows:
        return None
    across = [(p, d) for p in PASSES for d in sorted({r.head_dim for r in rows if r.pass_ == p})]
    masks = sorted({row.causal for row in rows})
    lengths = sorted({row.seqlen_q for row in rows})
    figure, axes = style.new(len(across), len(masks), 1.1 + 2.6 * len(across), sharey="row")
    for (pass_, d), panels in zip(across, axes, strict=True):
        for mask, ax in zip(masks, panels, strict=True):
            mine = [r for r in rows if (r.pass_, r.head_dim, r.causal) == (pass_, d, mask)]
            curves(ax, mine, ALL, BACKWARD_LABELS)
            style.sizes(ax, lengths, "sequence length N")
            ax.set_title(f"{PASSES[pass_]}, d={d}, {'causal' if mask else 'not causal'}")
        panels[0].set_ylabel("TFLOP/s")
    title = "fp32, 16k tokens in all, hidden dimension 2048"
    if max(lengths) > FA1_LONGEST and any(r.series == "fa1-simt" for r in rows):
        title += f"; FA-1, one thread block a head, to N={style.short(FA1_LONGEST)} only"
    legend(figure, axes, rows, ALL, title)
    return figure
