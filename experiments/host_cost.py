"""Measures the time that a call takes on the host before the GPU can start.

The call has one head with N=128 and d=64, and arrays on the GPU. Many calls follow each other
without waiting for the GPU. The series are both loop orders, forward and backward, in fp32 and
fp16, and torch's attention.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import calls, check, peers
from .lab.measure.series import BACKWARD_LABELS, LABELS, columns
from .lab.measure.speeds import DTYPES, PASSES
from .lab.measure.timing import Timing, attempt, shuffled
from .lab.measure.workloads import Inputs, one_head
from .lab.record import Bench, Options, Row
from .lab.show import style, tables

NAME = "host_cost"
NEEDS = ("GPU",)
TAKES = ()
PROTOCOL = (
    "host clock around each of 1000 calls, outputs allocated in it; 10 rounds of 100 calls of each "
    "series, the series in random order, the GPU waited for around the 100 calls; torch's backward "
    "is its autograd engine's"
)

SEQLEN, HEAD_DIM = 128, 64
# Calls between two waits for the GPU, and the number of rounds of such calls. The waits keep the
# GPU's queue of launches short. WARMUP calls before each round are not timed.
CALLS, ROUNDS, QUICK_ROUNDS = 100, 10, 2
WARMUP = 20
SERIES = {
    "float32": ("fa1-simt", "fa2-simt", peers.EFFICIENT),
    "float16": ("fa1-mma", "fa2-mma", peers.FLASH),
}


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield how long calls take on the host to return, without waiting for the GPU."""
    peers.say_missing(bench.say)
    cases = [
        (one_head(SEQLEN, HEAD_DIM, dtype=dtype), pass_, series)
        for dtype in SERIES
        for pass_ in ("fwd", "bwd")
        for series in SERIES[dtype]
        if peers.available() or not calls.theirs(series)
    ]
    inputs = Inputs(gradient=True)
    made = [attempt(_checked, *case, inputs) for case in cases]
    samples: list[list[float]] = [[] for _ in cases]
    # Every call runs in each round, so that a disturbance of the host affects all calls equally.
    for turn in bench.each(range(QUICK_ROUNDS if options.quick else ROUNDS), "timing"):
        for n in shuffled([n for n, (run, _) in enumerate(made) if run is not None], turn):
            samples[n] += host_ms(made[n][0])
    for (problem, pass_, series), (_, failure), of in zip(cases, made, samples, strict=True):
        common = columns(NAME, series, problem, bench.machine, pass_=pass_)
        yield calls.time_row(Timing.of(of) if of else None, failure, **common)


def _checked(problem: Problem, pass_: str, series: str, inputs: Inputs) -> Callable[[], Any]:
    """Check the result of a call once, and return a function that runs the call."""
    host = inputs(problem)
    gate = check.gate(problem, pass_, *host)
    run = calls.make(series, pass_, problem, peers.on_device(host, problem.dtype))
    (gate.peer if calls.theirs(series) else gate)(run())
    return run


def host_ms(run: Callable[[], Any]) -> list[float]:
    """Run a call CALLS times, and return the host's time for each run, in milliseconds.

    The host waits for the GPU before the first call and after the last call.
    """
    for _ in range(WARMUP):
        run()
    device.synchronize()
    samples = []
    for _ in range(CALLS):
        start = time.perf_counter_ns()
        run()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    device.synchronize()
    return samples


def label(row: Row) -> str:
    """Return the name of a row's series, followed by the dtype."""
    names = LABELS if row.pass_ == "fwd" else BACKWARD_LABELS
    return f"{names[row.series]}, {DTYPES[row.dtype]}"


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of the figure.

    The forward pass is before the backward pass. In a pass, the order is as in SERIES.
    """
    of = {(row.pass_, row.dtype, row.series): row for row in rows}
    order = [(p, dtype, s) for p in ("fwd", "bwd") for dtype in SERIES for s in SERIES[dtype]]
    return [of[at] for at in order if at in of]


def draw(rows: Sequence[Row]) -> Any:
    """Draw a bar with the host time of each series and pass. Return None without rows."""
    mine = [row for row in shown(rows) if not row.failed]
    if not mine:
        return None
    figure, ((ax,),) = style.new(1, 1, 1.0 + 0.34 * len(mine))
    style.bars(ax, [
        (f"{label(row)}, {PASSES[row.pass_]}", 1e3 * row.number, style.COLOURS[row.series],
         f"{1e3 * row.number:.3g}")
        for row in mine
    ])  # fmt: skip
    ax.set_xlabel("host time per call (µs)")
    ours = [1e3 * row.number for row in mine if not calls.theirs(row.series)]
    message = "What a call costs the host"
    if ours:
        message = f"A call of ours costs the host at most {max(ours):.0f} µs"
    figure.suptitle(f"{message}\nmedians, one head, N={SEQLEN}, d={HEAD_DIM}", fontsize=12)
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of host times in microseconds."""
    lines = [
        [
            label(row),
            row.pass_,
            *(str(n) for n in (row.seqlen_q, row.head_dim)),
            tables.yes_no(row.causal),
            tables.cell(row, lambda ms: f"{1e3 * ms:.1f}"),
            *(tables.MISSING if ms is None else f"{1e3 * ms:.1f}" for ms in (row.p20, row.p80)),
        ]
        for row in shown(rows)
    ]
    header = [
        "call",
        "pass",
        "N",
        "d",
        "causal",
        "median, us",
        "20th percentile, us",
        "80th percentile, us",
    ]
    return tables.of(
        "The table of host costs contains the time that the host (CPU) spends on a call for one "
        "head, with arrays on the GPU.",
        header,
        lines,
    )
