"""Where the time of the K/V-outer loop goes: from FA-1's grid to FA-2 in steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fa_numba
from fa_numba.problem import Problem

from .lab import tables, variants
from .lab.options import Bench, Options
from .lab.series import FA1_TILES, SPLITS, plan, query_splits
from .lab.store import Row
from .lab.tables import Table
from .lab.workloads import HEAD_DIMS, fa2_setting

NAME = "loop_cost"
TITLE = "where the time of the K/V-outer loop goes"
DESCRIPTION = (
    "From FA-1's grid to FA-2 in steps (query splits, the other loop order at the same tiles, its "
    "own tiles), FA-2's setting at N=4096, forward, fp32: time, and with Nsight Compute "
    "instructions, how often one is issued, and L2 and DRAM bytes, which say what each step gains."
)
NEEDS_GPU = True

SEQLEN, QUICK_SEQLEN = 4096, 512
FA1, FA2 = "fa1-simt", "fa2-simt"
STEPS = {
    FA1: "FA-1, the paper's grid",
    SPLITS: "FA-1, query splits",
    FA1_TILES: "FA-2 at FA-1's tiles",
    FA2: "FA-2 at its own tiles",
}
_STALLED = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
# Our metric -> ncu's.
PROFILED = {
    # warp instructions executed
    "instructions": "smsp__inst_executed.sum",
    # share of the cycles, in which a scheduler had a warp, in which it issued an instruction
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    # the same share of all cycles: multiprocessors without a block count
    "issue_elapsed": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    # warps that wait for global memory, for each instruction issued
    "stall_global": _STALLED,
}


def configurations(problem: Problem, multiprocessors: int) -> list[variants.Variant]:
    """The steps in the order in which they are measured: a copy follows its original."""
    b = variants.splits_of(FA1, query_splits(problem, multiprocessors))
    k_outer, q_outer = (plan(series, problem).tiles for series in (FA1, FA2))
    if (k_outer.Br, k_outer.Bc) == (q_outer.Br, q_outer.Bc):
        c = variants.Variant(FA1_TILES, same_as=FA2, note="the same tiles: the run of fa2-simt")
    else:
        tiles = fa_numba.Tiles(Br=k_outer.Br, Bc=k_outer.Bc)
        c = variants.Variant(FA1_TILES, {"tiles": tiles})
    return [variants.Variant(FA1), b, variants.Variant(FA2), c]


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Times, checked first, then the hardware counters of every step."""
    assert bench.machine is not None and bench.describe is not None
    lengths = options.seqlens or ((QUICK_SEQLEN,) if options.quick else (SEQLEN,))
    head_dims = options.head_dims or (HEAD_DIMS[:1] if options.quick else HEAD_DIMS)
    masks = options.causal or (False,)
    problems = [fa2_setting(N, d, mask) for d in head_dims for mask in masks for N in lengths]
    multiprocessors = bench.describe["multiprocessors"]
    work = [(p, configurations(p, multiprocessors)) for p in problems]
    yield from variants.measure(NAME, work, bench, PROFILED)


def factors(found: variants.Values) -> dict[str, float | None]:
    """How many times faster each step is, and what the change of loop order is made of.

    `total` = grid x order x tiles, in times. A kernel runs for instructions / (issue x
    schedulers) cycles of those in which its multiprocessors are active, so that
    `order` = instructions x waiting x rest; `rest` is what idle multiprocessors and the clock
    leave over. None where a number is missing.
    """

    def ratio(metric: str, over: str, under: str) -> float | None:
        pair = [found.get((series, "measured", metric)) for series in (over, under)]
        return pair[0] / pair[1] if pair[0] and pair[1] else None

    order = ratio("time", SPLITS, FA1_TILES)
    instructions = ratio("instructions", SPLITS, FA1_TILES)
    waiting = ratio("issue", FA1_TILES, SPLITS)
    rest = None
    if order and instructions and waiting:
        rest = order / (instructions * waiting)
    return {
        "total": ratio("time", FA1, FA2),
        "grid": ratio("time", FA1, SPLITS),
        "order": order,
        "instructions": instructions,
        "waiting": waiting,
        "rest": rest,
        "tiles": ratio("time", FA1_TILES, FA2),
    }


def gigabytes(number: float) -> str:
    """Bytes in GB with three digits or so, such as 13.0 or 0.53."""
    return f"{number / 1e9:.{1 if number >= 1e10 else 2}f}"


def draw(rows: Sequence[Row]) -> Any:
    """Time of each step, and bytes of both loop orders; each problem has a row of panels."""
    from .lab import style

    problems = list(variants.problems_of(rows).items())
    if not problems:
        return None
    figure, axes = style.new(len(problems), 2, 0.5 + 3.0 * len(problems), width_ratios=(2.3, 1))
    for (problem, mine), (left, right) in zip(problems, axes, strict=True):
        masked = ", causal" if problem.causal else ""
        _draw_times(left, mine, style)
        left.set_title(
            f"one forward call, fp32, N={problem.seqlen_q}, d={problem.head_dim}{masked}"
        )
        _draw_bytes(right, mine, style)
        right.set_title("bytes moved")
    return figure


def _step_labels(rows: Sequence[Row]) -> dict[str, str]:
    notes = " ".join({r.note for r in rows if r.series == SPLITS})
    splits = re.search(r"query_splits=(\d+)", notes)
    tiles = {r.series: f"\n$B_r$={r.Br}, $B_c$={r.Bc}" for r in rows if r.Br is not None}
    names = STEPS | {SPLITS: f"FA-1, blocks a head: {splits[1] if splits else 1}"}
    return {series: name + tiles.get(series, "") for series, name in names.items()}


def _draw_times(ax: Any, rows: Sequence[Row], style: Any) -> None:
    """Bars of time; the light end of a bar is what the step took away, × how many times faster."""
    found = variants.values(rows)
    gains = factors(found)

    def times(name: str, label: str) -> str:
        return "" if gains[name] is None else f"{label} ×{gains[name]:.2f}"

    order = times("order", "loop order")
    if gains["rest"] is not None:
        parts = [times("instructions", "fewer instructions"), times("waiting", "less waiting")]
        if abs(gains["rest"] - 1) >= 0.005:
            parts.append(times("rest", "rest"))
        order += f" = {', '.join(parts)}"
    texts = {SPLITS: times("grid", "grid"), FA1_TILES: order, FA2: times("tiles", "tiles")}
    before = None
    for at, series in enumerate(STEPS):
        time = found.get((series, "measured", "time"))
        if time is None:
            failed = any(r.series == series and r.failed for r in rows)
            ax.text(0, at, " failed" if failed else " no time", va="center", fontsize=9.5)
            before = None
            continue
        colour = style.COLOURS[series]
        ax.barh(at, time, height=0.46, color=colour)
        ink = "black" if series in (SPLITS, FA1_TILES) else "white"  # on light and dark bars
        ax.text(time, at, f"{time:.3g} ms ", ha="right", va="center", color=ink, weight="bold")
        if before is not None:
            ax.barh(at, max(0, before - time), left=time, height=0.46, color=colour, alpha=0.22)
            ax.text(0, at - 0.27, f" {texts[series]}", va="bottom", fontsize=9.5)
        before = time
    labels = _step_labels(rows)
    ax.set_yticks(range(len(STEPS)), [labels[series] for series in STEPS])
    ax.set_ylim(len(STEPS) - 0.6, -0.6)
    ax.set_xlim(left=0)
    ax.grid(False, axis="y")
    ax.set_xlabel("ms; × is how many times faster a step is")


def _draw_bytes(ax: Any, rows: Sequence[Row], style: Any) -> None:
    """Model, L2 and DRAM bytes of both orders at the same tiles."""
    found = variants.values(rows)
    sources = {"model": "model", "l2": "L2", "dram": "DRAM"}
    pair = {SPLITS: "FA-1", FA1_TILES: "FA-2"}
    largest = 0.0
    for at, source in enumerate(sources):
        for side, series in zip((-0.2, 0.2), pair, strict=True):
            moved = found.get((series, source, "traffic"))
            if moved is None:
                ax.text(0, at + side, " not measured", va="center", fontsize=9)
                continue
            largest = max(largest, moved / 1e9)
            ax.barh(at + side, moved / 1e9, height=0.36, color=style.COLOURS[series])
            text = f" {pair[series]}: {gigabytes(moved)} GB"
            ax.text(moved / 1e9, at + side, text, va="center", fontsize=9)
    ax.set_yticks(range(len(sources)), list(sources.values()))
    ax.set_ylim(len(sources) - 0.5, -0.5)
    ax.set_xlim(0, largest * 1.75 or 1)
    ax.grid(False, axis="y")
    ax.set_xlabel("GB, at FA-1's tiles")


# What the tables show: metric -> its column and format; source of bytes, and factor, -> column.
_MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "time": ("ms", lambda v: f"{v:.2f}"),
    "speed": ("TFLOP/s", lambda v: f"{v:.1f}"),
    "instructions": ("warp instructions, 10^9", lambda v: f"{v / 1e9:.2f}"),
    "issue": ("issue, active cycles", lambda v: f"{v:.3f}"),
    "issue_elapsed": ("issue, all cycles", lambda v: f"{v:.3f}"),
    "stall_global": ("warps waiting for global memory per issue", lambda v: f"{v:.2f}"),
}
_TRAFFIC = {"model": "model, GB", "l2": "L2, GB", "dram": "DRAM, GB"}
_GAINS = {
    "total": "FA-1 / FA-2",
    "grid": "grid",
    "order": "loop order",
    "instructions": "its instructions",
    "waiting": "its waiting",
    "rest": "its rest",
    "tiles": "tiles",
}


def table(rows: Sequence[Row]) -> Table | None:
    """The factor of every step from FA-1's grid to FA-2, and what was measured of each."""
    gains, steps = [], []
    for problem, mine in variants.problems_of(rows).items():
        where = tables.problem_cells(problem)
        found = factors(variants.values(mine))
        gains.append([*where, *(tables.number(found, name, ".2f") for name in _GAINS)])
        of = {(r.series, r.source, r.metric): r for r in mine}
        for series, name in STEPS.items():
            cells = [
                tables.cell(of.get((series, "measured", metric)), shown)
                for metric, (_, shown) in _MEASURED.items()
            ]
            cells += [
                tables.cell(of.get((series, source, "traffic")), gigabytes) for source in _TRAFFIC
            ]
            steps.append([*where, name, *cells])
    if not steps:
        return None
    header = [*tables.PROBLEM, "step", *(name for name, _ in _MEASURED.values())]
    first = tables.markdown([*tables.PROBLEM, *_GAINS.values()], gains)
    second = tables.markdown([*header, *_TRAFFIC.values()], steps)
    caption = (
        "How many times faster each step is: FA-1 / FA-2 = grid x loop order x tiles, and loop "
        "order = instructions x waiting x rest. Forward, fp32, 16k tokens, hidden dimension 2048."
    )
    return Table(caption, f"{first}\nWhat was measured of each step:\n\n{second}")
