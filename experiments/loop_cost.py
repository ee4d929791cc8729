"""From FA-1 to FA-2 in single steps, and what each gains (FlashAttention-2 paper, section 3)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import fa_numba
from fa_numba import Tiles
from fa_numba.problem import Problem

from .lab import tables, variants
from .lab.loop_steps import (
    BACKWARD,
    COUNTED_ONLY,
    STEPS,
    beside_products,
    by_step,
    factors,
    series_of,
    step_of,
)
from .lab.options import Bench, Options
from .lab.series import plan, query_splits, row_fields, unit
from .lab.speeds import DTYPES, PASSES
from .lab.store import MODEL, Row
from .lab.tables import Table
from .lab.timing import SECONDS, attempt
from .lab.workloads import Sizes, fa2_setting

NAME = "loop_cost"
TITLE = "from FA-1 to FA-2 in single steps (FA-2 paper, section 3)"
DESCRIPTION = (
    "What lies between FA-1 and FA-2, a step at a time, FA-2's setting at N=4096, forward and "
    "backward, fp32 and fp16, on Hopper by wgmma too: warps over Q, O unnormalised, one "
    "logsumexp, Q outer with one block a head, the grid over the sequence, FA-2's tiles, causal "
    "skipping; and FA-1 with query splits, for the orders at an equal grid. Time, accesses, "
    "operations beside matrix products, and with Nsight Compute instructions, how often one is "
    "issued, and L2 and DRAM bytes."
)
NEEDS_GPU = True
PROTOCOL = (
    "one block a head of FA-2 is a launch for each row tile, one after the other; its counters are "
    "those of the first launch times the number of launches"
)

SEQLEN, QUICK_SEQLEN = 4096, 512
UNITS = {"simt": "float32", "mma": "float16"}
# Where there is such a GPU: in 16 bits too, with a figure and a table of its own.
HOPPER = "wgmma"
# Our metric -> ncu's; all are sums, so that calls of several kernels have them.
PROFILED = {
    # warp instructions executed
    "instructions": "smsp__inst_executed.sum",
    # cycles in which a scheduler issued an instruction, had a warp, and passed
    "issuing": "smsp__issue_active.sum",
    "active": "smsp__cycles_active.sum",
    "elapsed": "smsp__cycles_elapsed.sum",
}


def configurations(
    problem: Problem, multiprocessors: int, passes: str = "fwd", on: str | None = None
) -> list[variants.Variant]:
    """The steps of a pass that there are kernels for on a unit; a copy follows its original.

    FA-2 is given FA-1's tiles, threads included, until the last step. On Hopper, where its
    registers hold fewer columns, FA-1 is given FA-2's after a first step with its own.
    """
    on = on or next(unit for unit, dtype in UNITS.items() if dtype == problem.dtype)
    fa1, fa2, at_fa1 = (series_of(step, on) for step in ("fa1", "fa2", "fa2-fa1-tiles"))
    k_outer, q_outer = (plan(series, problem, passes=passes).tiles for series in (fa1, fa2))
    found: list[variants.Variant] = []
    own: dict[str, Any] = {}
    if passes == "fwd" and on == "mma":
        keys = variants.Variant(series_of("fa1-keys", on), {"warp_partition": "keys"})
        found.append(keys)
    if passes == "fwd" and on == HOPPER:
        found.append(variants.Variant(series_of("fa1-own", on)))
        own, k_outer = {"tiles": Tiles(q_outer.Br, q_outer.Bc, q_outer.threads)}, q_outer
    found.append(variants.Variant(fa1, own, passes=passes))
    splits = query_splits(problem, multiprocessors, fa1, passes, own.get("tiles"))
    split = {**own, "query_splits": max(2, splits)}
    _, refused = attempt(plan, fa1, problem, passes=passes, **split)
    if not refused:
        step = variants.splits_of(fa1, splits, passes)
        found.append(replace(step, options=own | step.options if splits > 1 else {}))
    at = {"tiles": k_outer}
    if passes == "fwd":
        one_block = series_of("fa2-one-block", on)
        found.append(variants.Variant(one_block, at, by_row_tile=True))
    found.append(variants.Variant(fa2, passes=passes))
    if k_outer == q_outer:
        note = f"the same tiles: the run of {fa2}"
        found.append(variants.Variant(at_fa1, same_as=fa2, note=note, passes=passes))
    else:
        found.append(variants.Variant(at_fa1, at, passes=passes))
    return found


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Times, checked first, then the hardware counters of every step, then the closed forms."""
    assert bench.machine is not None and bench.describe is not None
    problems = Sizes.of(options, (SEQLEN,), (QUICK_SEQLEN,)).problems(UNITS.values())
    multiprocessors = bench.describe["multiprocessors"]
    hopper = fa_numba.device.compute_capability() == (9, 0)
    for passes in ("fwd", "bwd"):
        steps = {}
        for p in problems:
            more = (HOPPER,) if hopper and p.dtype == "float16" else ()
            for on in (None, *more):
                steps[p, on] = configurations(p, multiprocessors, passes, on)
        work = [
            (p, [s for at, mine in steps.items() if at[0] == p for s in mine]) for p in problems
        ]
        yield from variants.measure(
            NAME, work, bench, PROFILED, seconds=SECONDS, counted=lambda p: not p.causal
        )
        for (problem, _), mine in steps.items():
            yield from _closed_forms(problem, mine, passes, bench.machine)


def _closed_forms(
    problem: Problem, steps: Sequence[variants.Variant], passes: str, machine: str
) -> Iterator[Row]:
    """Operations beside the matrix products of each step, and what no kernel shows."""
    on = unit(steps[0].series)
    plans = {step_of(s.series): plan(s.series, problem, **s.planned) for s in steps if s.options}
    for step in ("fa1-own", "fa1", "fa2"):
        plans.setdefault(step, plan(series_of(step, on), problem, passes=passes))
    plans.setdefault("fa2-fa1-tiles", plans["fa2"])
    plans.setdefault("fa1-splits", plans["fa1"])
    if passes == "fwd":
        plans |= {"fa1-unnormalised": plans["fa1"], "fa2-statistics": plans["fa2-one-block"]}
    timed = {step_of(s.series) for s in steps}
    for step in STEPS:
        if step not in timed and not (step in COUNTED_ONLY and step in plans):
            continue
        tiles = plans[step].tiles
        common = {
            "machine": machine,
            "experiment": NAME,
            "series": series_of(step, on),
            "source": MODEL,
            "pass_": passes,
            "Br": tiles.Br,
            "Bc": tiles.Bc,
            **row_fields(problem),
        }
        value = beside_products(step, problem, tiles, passes)
        yield Row(metric="beside_products", unit="FLOP", value=value, **common)
        if step in COUNTED_ONLY:
            moved = plans[step].accesses.bytes
            if step == "fa2-statistics":  # l and m where FA-2 has L
                moved += 4 * problem.batch * problem.heads_q * problem.seqlen_q
            yield Row(metric="traffic", unit="bytes", value=moved, **common)


def gigabytes(number: float) -> str:
    """Bytes in GB with three digits or so, such as 13.0 or 0.53."""
    return f"{number / 1e9:.{1 if number >= 1e10 else 2}f}"


Problems = dict[tuple[str, Problem], list[Row]]


def problems_of(rows: Iterable[Row], units: Sequence[str] = tuple(UNITS)) -> Problems:
    """(pass, problem) -> its rows on the units, forward first."""
    rows = [row for row in rows if unit(row.series) in units]
    return {
        (passes, problem): mine
        for passes in ("fwd", "bwd")
        for problem, mine in variants.problems_of(r for r in rows if r.pass_ == passes).items()
    }


def _plain(found: Problems) -> Problems:
    """Those without a mask, or all where there are none."""
    return {at: mine for at, mine in found.items() if not at[1].causal} or found


def draw(rows: Sequence[Row], units: Sequence[str] = tuple(UNITS)) -> Any:
    """Time of each step and DRAM bytes: a row of panels a pass and unit, a column a head dimension.

    Without a mask, where that is stored.
    """
    from .lab import style

    found = _plain(problems_of((r for r in rows if r.metric != "beside_products"), units))
    if not found:
        return None
    across = list(dict.fromkeys((passes, p.dtype, p.seqlen_q, p.causal) for passes, p in found))
    head_dims = sorted({p.head_dim for _, p in found})
    shown = {at: _shown(found, at) for at in across}
    heights = [len(steps) + 0.9 for steps in shown.values()]
    figure, axes = style.new(
        *(len(across), len(head_dims), 0.6 + 0.62 * sum(heights)),
        sharey="row",
        height_ratios=heights,
    )
    for at, panels in zip(across, axes, strict=True):
        passes, dtype, N, causal = at
        for d, ax in zip(head_dims, panels, strict=True):
            what = f"{PASSES[passes]}, {_named(dtype, units)}, N={N}, d={d}"
            what += ", causal" if causal else ""
            ax.set_title(what)
            mine = [
                row
                for (pass_, p), of in found.items()
                if (pass_, p.dtype, p.seqlen_q, p.causal, p.head_dim) == (*at, d)
                for row in of
            ]
            _bars(ax, mine, shown[at], style)
        names = BACKWARD if passes == "bwd" else STEPS
        panels[0].set_yticks(range(len(shown[at])), [_wrapped(names[s]) for s in shown[at]])
    for ax in axes[-1]:
        ax.set_xlabel("ms")
    figure.suptitle("From FA-1 to FA-2, one step at a time: warps, grid, loop order, tiles")
    return figure


def _named(dtype: str, units: Sequence[str]) -> str:
    return DTYPES[dtype] + (", wgmma" if HOPPER in units else "")


def _shown(found: Problems, at: tuple) -> list[str]:
    """The steps with a time, or a failure, in this row of panels."""
    steps = {
        step_of(row.series)
        for (passes, p), mine in found.items()
        if (passes, p.dtype, p.seqlen_q, p.causal) == at
        for row in mine
        if row.metric == "time"
    }
    return [step for step in STEPS if step in steps]


def _wrapped(text: str) -> str:
    """On two lines, parted at the comma or bracket nearest to the middle."""
    places = [m.start() for m in re.finditer(r"(?<=,) | (?=\()", text)]
    if not places:
        return text
    at = min(places, key=lambda n: abs(n - len(text) / 2))
    return f"{text[:at]}\n{text[at + 1 :]}"


def _bars(ax: Any, rows: Sequence[Row], steps: Sequence[str], style: Any) -> None:
    """A bar of time a step, over it how many times faster it is than which other."""
    found, failed = by_step(rows), {step_of(r.series) for r in rows if r.failed}
    gains = factors(found)
    tiles = {step_of(r.series): f"{r.Br} x {r.Bc}" for r in rows if r.Br is not None}
    colours = {step_of(r.series): style.COLOURS.get(r.series) for r in rows}
    times = {step: found.get((step, "measured", "time")) for step in steps}
    longest = max((time for time in times.values() if time), default=1.0)
    for at, step in enumerate(steps):
        time = times[step]
        if time is None:
            ax.text(0, at, " failed" if step in failed else " no time", va="center", fontsize=9)
            continue
        ax.barh(at + 0.12, time, height=0.5, color=colours[step])
        text = f" {time:.3g} ms"
        if (moved := found.get((step, "dram", "traffic"))) is not None:
            text += f", DRAM {gigabytes(moved)} GB"
        ax.text(time, at + 0.12, text, va="center", fontsize=9)
        ax.text(0, at - 0.16, f" {_said(step, gains, tiles)}", va="bottom", fontsize=8.5)
    ax.set_ylim(len(steps) - 0.5, -0.6)
    ax.set_xlim(0, longest * 1.7)
    ax.grid(False, axis="y")


def _said(step: str, gains: Mapping[str, float | None], tiles: Mapping[str, str]) -> str:
    """A step's tiles and how many times faster it is, for those gains that are known."""
    over = {
        "fa1": {"warps": "warps over Q"},
        "fa1-splits": {"splits": "grid"},
        "fa2-one-block": {"order_one_block": "loop order, a block a head"},
        "fa2-fa1-tiles": {"grid": "grid", "order": "loop order, equal grid"},
        "fa2": {"tiles": "tiles"},
    }
    if gains["retiled"] is not None:  # FA-1 takes FA-2's tiles
        over |= {"fa1": {"retiled": "tiles"}, "fa2": {}}
    known = [
        f"{name} ×{gain:.2f}"
        for key, name in over.get(step, {}).items()
        if (gain := gains[key]) is not None
    ]
    return "; ".join([tiles.get(step, ""), *known])


# What the tables show: metric -> its column and format; source of bytes, and factor, -> column.
_MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "time": ("ms", lambda v: f"{v:.2f}"),
    "speed": ("TFLOP/s", lambda v: f"{v:.1f}"),
    "instructions": ("warp instructions, 10^9", lambda v: f"{v / 1e9:.2f}"),
}
_TRAFFIC = {"model": "accesses, GB", "l2": "L2, GB", "dram": "DRAM, GB"}
_GAINS = {
    "total": "FA-1 / FA-2",
    "warps": "warps over Q",
    "order_one_block": "loop order, a block a head",
    "grid": "grid of Q outer",
    "splits": "grid of K/V outer",
    "order": "loop order, equal grid",
    "instructions": "its instructions",
    "waiting": "its waiting",
    "rest": "its rest",
    "tiles": "tiles",
}


def table(rows: Sequence[Row], units: Sequence[str] = tuple(UNITS)) -> Table | None:
    """The factor of every step from FA-1 to FA-2, and what was measured of each at one problem."""
    every = problems_of(rows, units)
    if not every:
        return None
    gains = []
    for (passes, problem), mine in _plain(every).items():
        found = factors(by_step(mine))
        skipping = _causal_skipping(every, passes, problem)
        cells = [tables.number(found, name, ".2f") for name in _GAINS]
        where = [passes, _named(problem.dtype, units), str(problem.head_dim), str(problem.seqlen_q)]
        gains.append([*where, *cells, *skipping])
    header = ["pass", "dtype", "d", "N", *_GAINS.values()]
    header += ["causal skipping, FA-1", "causal skipping, FA-2"]
    first = tables.markdown(header, gains)
    (passes, problem), mine = _example(every)
    masked = ", causal" if problem.causal else ""
    dtype = _named(problem.dtype, units)
    what = f"{PASSES[passes]}, {dtype}, N={problem.seqlen_q}, d={problem.head_dim}"
    caption = (
        "How many times faster each step is, without a mask: FA-1 / FA-2 = loop order (a block a "
        "head) x grid of Q outer x tiles = grid of K/V outer x loop order (equal grid) x tiles; "
        "the order at an equal grid = its instructions x its waiting x its rest; causal skipping "
        "is the time without a mask over that with one. 16k tokens, hidden dimension 2048, "
        f"{runs(row for mine in every.values() for row in mine)}."
    )
    if HOPPER in units:
        caption = (
            f"![From FA-1 to FA-2 by wgmma](figures/loop_cost_hopper.png)\n\n{caption} Forward "
            "FA-1 takes FA-2's tiles, which is the factor of tiles; the whole is from its own."
        )
    return Table(caption, f"{first}\nWhat is known of each step, {what}{masked}:\n\n{_steps(mine)}")


def runs(rows: Iterable[Row]) -> str:
    """How many runs the times are medians of: "medians of 5 to 20 runs"."""
    return tables.runs(r for r in rows if r.metric == "time")


def _causal_skipping(every: Problems, passes: str, problem: Problem) -> list[str]:
    """The time without a mask over that with one, of FA-1 and FA-2."""
    times = []
    for causal in (False, True):
        sizes = (problem.seqlen_q, problem.head_dim, causal, problem.dtype)
        times.append(by_step(every.get((passes, fa2_setting(*sizes)), ())))
    at = [(step, "measured", "time") for step in ("fa1", "fa2")]
    return [
        f"{times[0][k] / times[1][k]:.2f}" if k in times[0] and k in times[1] else tables.MISSING
        for k in at
    ]


def _example(every: Problems) -> tuple[tuple[str, Problem], list[Row]]:
    """The problem whose steps are shown: forward, without a mask, 16 bits, where that is stored."""
    return min(
        every.items(),
        key=lambda item: (item[0][0] != "fwd", item[0][1].causal, item[0][1].dtype != "float16"),
    )


def _steps(rows: Sequence[Row]) -> str:
    of = {(step_of(r.series), r.source, r.metric): r for r in rows}
    lines = []
    for step, name in (BACKWARD if rows[0].pass_ == "bwd" else STEPS).items():
        found = next((r for at, r in of.items() if at[0] == step), None)
        if found is None:
            continue
        cells = [
            tables.cell(of.get((step, "measured", metric)), shown)
            for metric, (_, shown) in _MEASURED.items()
        ]
        cells += [tables.cell(of.get((step, source, "traffic")), gigabytes) for source in _TRAFFIC]
        beside = of.get((step, MODEL, "beside_products"))
        cells.append(tables.cell(beside, lambda v: f"{v / 1e9:.1f}"))
        lines.append([name, f"{found.Br} x {found.Bc}", *cells])
    names = (name for name, _ in _MEASURED.values())
    header = ["step", "tiles", *names, *_TRAFFIC.values(), "beside matrix products, GFLOP"]
    return tables.markdown(header, lines)


# The steps by Hopper's own instructions.
FIGURES = {"loop_cost_hopper": functools.partial(draw, units=(HOPPER,))}
TABLES = {"loop_cost_hopper": functools.partial(table, units=(HOPPER,))}
