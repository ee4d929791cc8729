"""From FA-1 to FA-2 in single steps, and what each gains (FlashAttention-2 paper, section 3)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fa_numba import io_model
from fa_numba.problem import Problem

from .lab import tables, variants
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
    "backward, fp32 and fp16: warps over Q, O unnormalised, one logsumexp, Q outer with one block "
    "a head, the grid over the sequence, FA-2's tiles, causal skipping; and FA-1 with query "
    "splits, for the orders at an equal grid. Time, accesses, operations beside matrix products, "
    "and with Nsight Compute instructions, how often one is issued, and L2 and DRAM bytes."
)
NEEDS_GPU = True
PROTOCOL = (
    "one block a head of FA-2 is a launch for each row tile, one after the other; its counters are "
    "those of the first launch times the number of launches"
)

SEQLEN, QUICK_SEQLEN = 4096, 512
UNITS = {"simt": "float32", "mma": "float16"}
# The steps in their order, by what follows a series' "fa1-simt" or "fa2-mma".
STEPS = {
    "fa1-keys": "FA-1, a block a head, its warps share K and V",
    "fa1": "FA-1, a block a head (the paper's grid)",
    "fa1-unnormalised": "O not normalised between passes",
    "fa1-splits": "FA-1, query splits (more blocks a head)",
    "fa2-statistics": "Q outer, l and m stored",
    "fa2-one-block": "Q outer, a block a head, one logsumexp",
    "fa2-fa1-tiles": "Q outer, grid over the sequence (FA-2)",
    "fa2": "FA-2 at its own tiles",
}
# In the backward pass K and V are outside in both orders, and FA-2's grid is over them.
BACKWARD = STEPS | {"fa2-fa1-tiles": "FA-2, grid over K/V, FA-1's tiles"}
# Of these there is no kernel, and so no time: what the step changes is in the closed forms.
COUNTED_ONLY = ("fa1-unnormalised", "fa2-statistics")
# Our metric -> ncu's; all are sums, so that calls of several kernels have them.
PROFILED = {
    # warp instructions executed
    "instructions": "smsp__inst_executed.sum",
    # cycles in which a scheduler issued an instruction, had a warp, and passed
    "issuing": "smsp__issue_active.sum",
    "active": "smsp__cycles_active.sum",
    "elapsed": "smsp__cycles_elapsed.sum",
}


def series_of(step: str, unit: str) -> str:
    """A step's series: "fa1-splits" on "mma" is "fa1-mma-splits"."""
    algorithm, _, variant = step.partition("-")
    return "-".join(part for part in (algorithm, unit, variant) if part)


def step_of(series: str) -> str:
    algorithm, _, *variant = series.split("-")
    return "-".join((algorithm, *variant))


def configurations(
    problem: Problem, multiprocessors: int, passes: str = "fwd"
) -> list[variants.Variant]:
    """The steps of a pass that there are kernels for; a copy follows its original.

    FA-2 is given FA-1's tiles, threads included, until the last step.
    """
    on = next(unit for unit, dtype in UNITS.items() if dtype == problem.dtype)
    fa1, fa2, at_fa1 = (series_of(step, on) for step in ("fa1", "fa2", "fa2-fa1-tiles"))
    k_outer, q_outer = (plan(series, problem, passes=passes).tiles for series in (fa1, fa2))
    found = [variants.Variant(fa1, passes=passes)]
    if passes == "fwd" and on == "mma":
        keys = variants.Variant(series_of("fa1-keys", on), {"warp_partition": "keys"})
        found.insert(0, keys)
    splits = query_splits(problem, multiprocessors, fa1, passes)
    _, refused = attempt(plan, fa1, problem, passes=passes, query_splits=max(2, splits))
    if not refused:
        found.append(variants.splits_of(fa1, splits, passes))
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
    for passes in ("fwd", "bwd"):
        work = [(p, configurations(p, multiprocessors, passes)) for p in problems]
        yield from variants.measure(
            NAME, work, bench, PROFILED, seconds=SECONDS, counted=lambda p: not p.causal
        )
        for problem, steps in work:
            yield from _closed_forms(problem, steps, passes, bench.machine)


def _closed_forms(
    problem: Problem, steps: Sequence[variants.Variant], passes: str, machine: str
) -> Iterator[Row]:
    """Operations beside the matrix products of each step, and what no kernel shows."""
    on = unit(steps[0].series)
    plans = {step_of(s.series): plan(s.series, problem, **s.planned) for s in steps if s.options}
    for step in ("fa1", "fa2"):
        plans[step] = plan(series_of(step, on), problem, passes=passes)
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


def beside_products(step: str, problem: Problem, tiles: Any, passes: str = "fwd") -> int:
    """Operations on elements of S and O that are no matrix products, as a step has them.

    In each visited tile, whole: forward 5 Br Bc for scaling, row maxima, differences, exponentials
    and row sums, and Br d for each time that O is multiplied: by l, e^(m_old - m_new) and 1 / l in
    FA-1 (Algorithm 1 line 12), by the second alone where O stays unnormalised, which 1 / l ends
    once (FA-2 line 12). Backward 6 Br Bc for P and dS, and 2 Br d for D = rowsum(dO o O), which
    FA-1 has in every tile (Algorithm 4 line 19) and FA-2 once (Algorithm 2 line 4).
    """
    algorithm = step.split("-")[0]
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    visited = io_model.tiles_visited(algorithm, problem, tiles, passes=passes)
    often = algorithm == "fa1" and step != "fa1-unnormalised"
    if passes == "bwd":
        on_scores, on_output, once = 6, 2 * often, 2 * (not often)
    else:
        on_scores, on_output, once = 5, 3 if often else 1, int(not often)
    Br, Bc, d = tiles.Br, tiles.Bc, problem.head_dim
    return visited * (on_scores * Br * Bc + on_output * Br * d) + once * rows * d


Steps = Mapping[tuple[str, str, str], float]


def by_step(rows: Iterable[Row]) -> Steps:
    """(step, source, metric) -> value of the rows of one problem and pass."""
    return {(step_of(at[0]), *at[1:]): value for at, value in variants.values(rows).items()}


def factors(found: Steps) -> dict[str, float | None]:
    """How many times faster each step is, and what the change of loop order is made of.

    `total`, from FA-1 to FA-2, is `order_one_block` x `grid` x `tiles`, or `splits` x `order` x
    `tiles`: the order is changed at a block a head, or at an equal grid. `warps` is before both.
    A kernel runs for instructions / (issue x schedulers) of its multiprocessors' active cycles, so
    that `order` = `instructions` x `waiting` x `rest`; `rest` is what idle multiprocessors and the
    clock leave over. None where a number is missing.
    """

    def number(step: str, metric: str) -> float | None:
        stored = found.get((step, "measured", metric))
        if metric != "issue" or stored is not None:
            return stored
        issuing, active = number(step, "issuing"), number(step, "active")
        return issuing / active if issuing and active else None

    def ratio(metric: str, over: str, under: str) -> float | None:
        above, below = number(over, metric), number(under, metric)
        return above / below if above and below else None

    order = ratio("time", "fa1-splits", "fa2-fa1-tiles")
    instructions = ratio("instructions", "fa1-splits", "fa2-fa1-tiles")
    waiting = ratio("issue", "fa2-fa1-tiles", "fa1-splits")
    rest = order / (instructions * waiting) if order and instructions and waiting else None
    return {
        "total": ratio("time", "fa1", "fa2"),
        "warps": ratio("time", "fa1-keys", "fa1"),
        "order_one_block": ratio("time", "fa1", "fa2-one-block"),
        "grid": ratio("time", "fa2-one-block", "fa2-fa1-tiles"),
        "splits": ratio("time", "fa1", "fa1-splits"),
        "order": order,
        "instructions": instructions,
        "waiting": waiting,
        "rest": rest,
        "tiles": ratio("time", "fa2-fa1-tiles", "fa2"),
    }


def gigabytes(number: float) -> str:
    """Bytes in GB with three digits or so, such as 13.0 or 0.53."""
    return f"{number / 1e9:.{1 if number >= 1e10 else 2}f}"


Problems = dict[tuple[str, Problem], list[Row]]


def problems_of(rows: Iterable[Row]) -> Problems:
    """(pass, problem) -> its rows, forward first."""
    rows = list(rows)
    return {
        (passes, problem): mine
        for passes in ("fwd", "bwd")
        for problem, mine in variants.problems_of(r for r in rows if r.pass_ == passes).items()
    }


def _plain(found: Problems) -> Problems:
    """Those without a mask, or all where there are none."""
    return {at: mine for at, mine in found.items() if not at[1].causal} or found


def draw(rows: Sequence[Row]) -> Any:
    """Time of each step and DRAM bytes: a row of panels a pass and unit, a column a head dimension.

    Without a mask, where that is stored.
    """
    from .lab import style

    found = _plain(problems_of(r for r in rows if r.metric != "beside_products"))
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
            what = f"{PASSES[passes]}, {DTYPES[dtype]}, N={N}, d={d}{', causal' if causal else ''}"
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
    return figure


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


def table(rows: Sequence[Row]) -> Table | None:
    """The factor of every step from FA-1 to FA-2, and what was measured of each at one problem."""
    every = problems_of(rows)
    if not every:
        return None
    gains = []
    for (passes, problem), mine in _plain(every).items():
        found = factors(by_step(mine))
        skipping = _causal_skipping(every, passes, problem)
        cells = [tables.number(found, name, ".2f") for name in _GAINS]
        where = [passes, DTYPES[problem.dtype], str(problem.head_dim), str(problem.seqlen_q)]
        gains.append([*where, *cells, *skipping])
    header = ["pass", "dtype", "d", "N", *_GAINS.values()]
    header += ["causal skipping, FA-1", "causal skipping, FA-2"]
    first = tables.markdown(header, gains)
    (passes, problem), mine = _example(every)
    masked = ", causal" if problem.causal else ""
    what = f"{PASSES[passes]}, {DTYPES[problem.dtype]}, N={problem.seqlen_q}, d={problem.head_dim}"
    caption = (
        "How many times faster each step is, without a mask: FA-1 / FA-2 = loop order (a block a "
        "head) x grid of Q outer x tiles = grid of K/V outer x loop order (equal grid) x tiles; "
        "the order at an equal grid = its instructions x its waiting x its rest; causal skipping "
        "is the time without a mask over that with one. 16k tokens, hidden dimension 2048, "
        f"{runs(rows)}."
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
