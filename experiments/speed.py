"""Forward speed over the sequence length in FA-2's setting, beside torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .lab import peers
from .lab.algorithms import LABELS, SPLITS, call, plan, query_splits, row_fields
from .lab.options import Bench, Options
from .lab.settings import HEAD_DIMS, SEQLENS, Inputs, fa2_setting
from .lab.store import Row
from .lab.timing import Gate, attempt, time_call, timing_rows

NAME = "speed"
TITLE = "TFLOP/s over the sequence length, both loop orders and torch"
DESCRIPTION = (
    "Forward TFLOP/s over N in the FA-2 paper's setting (16k tokens, hidden dimension 2048), fp32: "
    "both loop orders, FA-1 with query splits, standard attention, and torch's kernels where "
    "torch is installed; peak memory beside inputs and outputs."
)
NEEDS_GPU = True

OURS = ("standard-simt", "fa1-simt", SPLITS, "fa2-simt")
ALL = (*OURS, *peers.FLOAT32)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed, error and peak memory of every series, checked before they are timed."""
    assert bench.machine is not None and bench.describe is not None
    lengths = options.seqlens or (SEQLENS[:2] if options.quick else SEQLENS)
    head_dims = options.head_dims or HEAD_DIMS
    masks = options.causal or ((False,) if options.quick else (False, True))
    if not peers.available():
        bench.say("  no torch with CUDA here: its kernels are not measured")
    cases = [fa2_setting(N, d, mask) for d in head_dims for mask in masks for N in lengths]
    inputs = Inputs()
    for problem in bench.track(cases, "timing"):
        host = inputs(problem)
        gate = Gate(problem, *host)
        arrays = tuple(device.to_gpu(x) for x in host)
        splits = query_splits(problem, bench.describe["multiprocessors"])
        fa1: list[Row] = []
        for series in OURS:
            if series == SPLITS and splits == 1:
                # The same launch: measuring it twice would only show noise.
                yield from _copies(fa1)
                continue
            own = {"query_splits": splits} if series == SPLITS else {}
            rows = list(_ours(series, problem, arrays, gate, bench.machine, own))
            device.release_memory()
            if series == "fa1-simt":
                fa1 = rows
            yield from rows
        if peers.available():
            for series in peers.FLOAT32:
                yield from _peer(series, problem, arrays, gate, bench.machine)
                peers.release()


def _ours(
    series: str, problem: Problem, arrays: tuple, gate: Gate, machine: str, own: dict[str, int]
) -> Iterator[Row]:
    tiles: dict[str, int | None] = {}

    def work() -> tuple:
        chosen = plan(series, problem, **own).tiles
        tiles.update(Br=chosen.Br, Bc=chosen.Bc)
        run = call(series, problem, *arrays, **own)
        timing = time_call(run, gate)
        out = run()
        device.synchronize()
        with device.track_memory() as memory:
            run(out=out)
            device.synchronize()
        return timing, memory.peak_bytes

    note = ", ".join(f"{name}={value}" for name, value in own.items())
    yield from _rows(series, problem, machine, work, tiles, note)


def _peer(series: str, problem: Problem, arrays: tuple, gate: Gate, machine: str) -> Iterator[Row]:
    def work() -> tuple:
        run = peers.call(series, problem, *arrays)
        return time_call(run, gate.peer), peers.peak_bytes(run)

    yield from _rows(series, problem, machine, work, {}, "")


def _rows(
    series: str,
    problem: Problem,
    machine: str,
    work: Callable[[], tuple],
    tiles: dict[str, int | None],
    note: str,
) -> Iterator[Row]:
    result, failure = attempt(work)
    common = {
        "machine": machine,
        "experiment": NAME,
        "series": series,
        "source": "measured",
        "note": failure or note,
        **row_fields(problem),
        **tiles,
    }
    if failure:
        yield Row(metric="speed", unit="TFLOP/s", value=None, **common)
        return
    timing, peak = result
    yield from timing_rows(timing, problem, **common)
    yield Row(metric="memory", unit="MiB", value=peak / 2**20, **common)


def _copies(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        yield replace(row, series=SPLITS, note=row.note or "one split: the run of fa1-simt")


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels a head dimension, a column a mask."""
    from .lab import style

    rows = [row for row in rows if row.metric == "speed"]
    if not rows:
        return None
    head_dims = sorted({row.head_dim for row in rows})
    masks = sorted({row.causal for row in rows})
    figure, axes = style.new(len(head_dims), len(masks), 0.9 + 3.1 * len(head_dims), sharey="row")
    for d, across in zip(head_dims, axes, strict=True):
        for mask, ax in zip(masks, across, strict=True):
            mine = [r for r in rows if (r.head_dim, r.causal) == (d, mask)]
            curves(ax, mine, ALL)
            style.sizes(ax, sorted({row.seqlen_q for row in rows}), "sequence length N")
            ax.set_title(f"d={d}, {'causal' if mask else 'not causal'}")
        across[0].set_ylabel("TFLOP/s")
    legend(figure, axes, rows, ALL, "forward, fp32, 16k tokens in all, hidden dimension 2048")
    return figure


def curves(
    ax: Any, rows: Sequence[Row], shown: Sequence[str], labels: Mapping[str, str] = LABELS
) -> None:
    """Speed over N of each series, the band between its percentiles behind it."""
    from .lab import style

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
            zorder=2.5 if series == SPLITS else 3,
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
    ax.set_ylim(bottom=0)


def legend(figure: Any, axes: Any, rows: Sequence[Row], shown: Sequence[str], title: str) -> None:
    """A legend of the series that have rows."""
    handles, labels = axes[0][0].get_legend_handles_labels()
    used = {r.series for r in rows}
    pairs = zip(handles, labels, strict=True)
    kept = [pair for pair, series in zip(pairs, shown, strict=True) if series in used]
    figure.legend(*zip(*kept, strict=True), loc="outside upper center", ncols=3, title=title)
