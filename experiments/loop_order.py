"""Compares time and accesses of both loop orders at equal unit, dtype, tiles and work.

The numbers of FA-1 (K/V outer) are divided by the numbers of FA-2 (Q outer) at equal tiles, on
every unit. FA-1 runs on the paper's grid and with query splits. The figures show ratios of times,
accesses, L2 bytes and DRAM bytes over N in FA-2's setting. Ratios of times and accesses are also
shown over batch size times heads.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fa_numba.problem import Problem
from fa_numba.tiling import Tiles

from .lab.measure import variants
from .lab.measure.series import UNIT_NAMES as NAMES_OF_UNITS
from .lab.measure.series import plan, query_splits
from .lab.measure.speeds import DTYPES
from .lab.measure.timing import SECONDS, attempt
from .lab.measure.workloads import HEAD_DIMS, SEQLENS, fa2_problems, fa2_setting
from .lab.record import Bench, Options, Row, values
from .lab.show import style, tables

NAME = "loop_order"
NEEDS = ("GPU",)
TAKES = ("seqlens", "head_dims")

UNITS = {"simt": "float32", "mma": "float16", "wgmma": "float16"}
UNIT_NAMES = {unit: f"{DTYPES[dtype]}, {NAMES_OF_UNITS[unit]}" for unit, dtype in UNITS.items()}
# Batch x heads at one sequence length: from one head to enough heads to fill a large GPU.
HEADS_SEQLEN, QUICK_SEQLEN = 4096, 512
HEADS = (1, 4, 16, 32, 64, 128)
# Sequence lengths at which hardware counters are read.
COUNTED_SEQLENS = (1024, 4096, 16384)


def series_of(unit: str) -> tuple[str, str, str]:
    """Return the three series that are compared on a unit: FA-1, FA-1 with query splits, and FA-2.

    All three have equal tiles: FA-2's tiles on wgmma, and FA-1's tiles on the other units.
    """
    q_outer = "fa2-wgmma" if unit == "wgmma" else f"fa2-{unit}-fa1-tiles"
    return f"fa1-{unit}", f"fa1-{unit}-splits", q_outer


def configurations(problem: Problem, multiprocessors: int, unit: str) -> list[variants.Variant]:
    """Return the three calls that are compared on a unit, for one problem.

    On wgmma, the list is empty if the problem has no plan.
    """
    k_outer, _, q_outer = series_of(unit)
    own: dict[str, Any] = {}
    if unit == "wgmma":
        planned, _ = attempt(lambda: plan(q_outer, problem))
        if planned is None:
            return []
        tiles = planned.tiles
        own = {"tiles": Tiles(tiles.Br, tiles.Bc, tiles.threads)}
    else:
        tiles = plan(k_outer, problem).tiles
    splits = query_splits(problem, multiprocessors, k_outer, **own)
    split = variants.splits_of(k_outer, splits)
    return [
        variants.Variant(k_outer, own),
        replace(split, options=own | split.options),
        variants.Variant(q_outer, {"tiles": tiles}),
    ]


def many_heads(heads: int, head_dim: int, dtype: str, seqlen: int = HEADS_SEQLEN) -> Problem:
    """Return a problem with one batch entry and the given number of heads.

    Only the product of batch size and heads matters to the kernels.
    """
    return Problem(1, heads, heads, seqlen, seqlen, head_dim, dtype=dtype)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield times and bytes of both loop orders, over N and over the number of heads."""
    dtypes = dict.fromkeys(UNITS.values())
    problems = fa2_problems(options, dtypes, SEQLENS, SEQLENS[:2])
    if options.seqlens is None:
        seqlen = QUICK_SEQLEN if options.quick else HEADS_SEQLEN
        problems += [
            many_heads(heads, d, dtype, seqlen)
            for dtype in dtypes
            for d in options.head_dims or HEAD_DIMS[: 1 if options.quick else None]
            for heads in (HEADS[:2] if options.quick else HEADS)
        ]
    multiprocessors = bench.describe["multiprocessors"]
    work = [
        (p, [v for unit in units_of(p.dtype) for v in configurations(p, multiprocessors, unit)])
        for p in dict.fromkeys(problems)
    ]

    def counted(problem: Problem) -> bool:
        wanted = options.seqlens or options.quick or problem.seqlen_q in COUNTED_SEQLENS
        return bool(wanted) and in_setting(problem) and not problem.causal

    yield from variants.measure(NAME, work, bench, {}, seconds=SECONDS, counted=counted)


def units_of(dtype: str) -> list[str]:
    """Return the units on which problems of a dtype are measured, in order."""
    return [unit for unit, own in UNITS.items() if own == dtype]


def in_setting(problem: Problem) -> bool:
    """Return whether a problem is one of the FA-2 paper's benchmark, with 16k tokens.

    The other problems are results of `many_heads`.
    """
    sizes = problem.seqlen_q, problem.head_dim, problem.causal, problem.dtype
    return problem == fa2_setting(*sizes)


def sweep_of(row: Row) -> str:
    """Return the name of a row's sweep: the part of the experiment in which one quantity varies.

    It is "seqlen" (over N in the FA-2 paper's setting) or "heads" (over the number of heads at one
    N).
    """
    sizes = row.seqlen_q, row.head_dim, row.causal, row.dtype
    setting = fa2_setting(*sizes)
    return "seqlen" if (row.batch, row.heads_q) == (setting.batch, setting.heads_q) else "heads"


# Ratio -> (header of its column, index of FA-1's series in `series_of`, source, metric).
RATIOS = {
    "grid": ("time, paper's grid", 0, "measured", "time"),
    "splits": ("time, full grid", 1, "measured", "time"),
    "model": ("accesses", 1, "model", "traffic"),
    "l2": ("L2 bytes", 1, "l2", "traffic"),
    "dram": ("DRAM bytes", 1, "dram", "traffic"),
}


def ratios(rows: Iterable[Row], unit: str) -> dict[str, float]:
    """Return FA-1's numbers divided by FA-2's numbers, by the names in RATIOS.

    The rows must be of one problem. `grid` is the ratio of times on the paper's grid. The other
    ratios are for FA-1 with query splits.
    """
    found, of = values(rows, "series", "source", "metric"), series_of(unit)
    pairs = {
        name: (found.get((of[n], *at)), found.get((of[2], *at)))
        for name, (_, n, *at) in RATIOS.items()
    }
    return {name: over / under for name, (over, under) in pairs.items() if over and under}


# A unit and a problem.
Place = tuple[str, Problem]


def _every(rows: Sequence[Row]) -> dict[Place, dict[str, float]]:
    of = {
        (unit, problem): ratios(mine, unit)
        for problem, mine in variants.problems_of(rows).items()
        for unit in units_of(problem.dtype)
    }
    return {place: values for place, values in of.items() if values}


def draw(rows: Sequence[Row]) -> Any:
    """Draw two ratios of FA-1 to FA-2 over N, without a mask: DRAM bytes, and time on a full grid.

    Return None without rows.
    """
    found = {
        (unit, problem): values
        for (unit, problem), values in _every(rows).items()
        if in_setting(problem) and not problem.causal
    }
    if not found:
        return None
    figure, ((left, right),) = style.new(1, 2, 4.6)
    _hero(left, found, "dram")
    _hero(right, found, "splits")
    dram, splits = (
        max((ratio[name] for ratio in found.values() if name in ratio), default=None)
        for name in ("dram", "splits")
    )
    many = f": up to {dram:.0f} times as many" if dram else ""
    left.set(title=f"DRAM bytes{many}", ylabel="DRAM bytes, FA-1 / FA-2 (ratio)")
    long = f": up to {splits:.1f} times as long" if splits else ""
    right.set(title=f"time{long}", ylabel="time, FA-1 / FA-2 (ratio)")
    message = "K/V outer (FA-1) costs more than Q outer (FA-2)"
    if splits:
        message = f"K/V outer takes up to {splits:.1f} times as long as Q outer"
    what = "equal tiles and work, full grid; forward, 16k tokens, hidden dimension 2048"
    units = {unit for unit, _ in found}
    shown = [
        *(style.patch(UNIT_NAMES[u], color=c) for u, c in _UNITS.items() if u in units),
        *(style.key(f"d={d}", marker=marker, ls=ls)
          for d, (marker, ls) in _LOOKS.items() if d in {p.head_dim for _, p in found}),
    ]  # fmt: skip
    style.legend(figure, shown, f"{message}\n{what}")
    return figure


# Colours of the units, which no series has. Marks and line styles of the head dimensions.
_UNITS = {"simt": "#999933", "mma": "#CC6677", "wgmma": "#332288"}
_LOOKS = {64: ("o", "-"), 128: ("s", "--")}


def _hero(ax: Any, found: Mapping[Place, Mapping[str, float]], name: str) -> None:
    places = sorted({(list(UNITS).index(unit), p.head_dim, unit) for unit, p in found})
    for _, d, unit in places:
        points = sorted(
            (p.seqlen_q, values[name])
            for (where, p), values in found.items()
            if (where, p.head_dim) == (unit, d) and name in values
        )
        marker, ls = _LOOKS.get(d, ("D", ":"))
        style.line(ax, points, color=_UNITS[unit], marker=marker, ls=ls)
    ax.axhline(1, color="#555555", lw=0.8, zorder=1)
    if name == "dram":
        style.log(ax.yaxis, 2)
    style.sizes(ax, sorted({p.seqlen_q for _, p in found}), "sequence length N (tokens)")


# Ratio -> (series whose colour the line has, marker, line style, label).
_LINES = {
    "grid": ("fa1-simt", "o", "-", "time, the paper's grid"),
    "splits": ("fa1-simt-splits", "D", "-", "time, full grid (marks: query splits)"),
    "model": ("model", "", "-", "accesses in bytes, model"),
    "l2": ("model", "x", "", "L2 bytes, measured"),
}


def detail(rows: Sequence[Row], over_heads: bool) -> Any:
    """Draw ratios of FA-1 to FA-2 over N or, if `over_heads`, over batch x heads.

    The ratios are of times (on the paper's grid and on a full grid), accesses and L2 bytes. There
    is a row of panels per unit and a column per head dimension. Return None without rows.
    """
    found = {
        place: ratio for place, ratio in _every(rows).items() if in_setting(place[1]) != over_heads
    }
    if not found:
        return None
    plans, head_dims = _plans(rows), sorted({p.head_dim for _, p in found})
    units = [unit for unit in UNITS if any(where == unit for where, _ in found)]
    size = (len(units), len(head_dims), 1.5 + 2.3 * len(units))
    figure, axes = style.new(*size, sharey=True, sharex=True)
    for unit, across in zip(units, axes, strict=True):
        for d, ax in zip(head_dims, across, strict=True):
            mine = {
                p: (ratio, *plans[where, p])
                for (where, p), ratio in found.items()
                if (where, p.head_dim) == (unit, d)
            }
            _panel(ax, mine, over_heads)
            ax.set_title(f"{UNIT_NAMES[unit]}, d={d}")
        across[0].set_ylabel("FA-1 / FA-2 (ratio)")
    for ax in axes[:-1].flat:
        ax.set_xlabel("")
    shown = style.handles(axes)
    if any(p.causal for _, p in found):
        shown["causal"] = style.key("dotted, small marks: causal", ls=":", lw=1.2)
    if any(line.get_linestyle() == "-." for ax in axes.flat for line in ax.lines):
        shown["tiles"] = style.key("here the tiles change", ls="-.", lw=1.0, color=_CHANGE)
    slowest = max((ratio["grid"] for ratio in found.values() if "grid" in ratio), default=None)
    message = "At equal tiles K/V outer (FA-1) takes longer than Q outer (FA-2)"
    if slowest:
        message = f"On the paper's grid FA-1 takes up to {slowest:.0f} times FA-2's time"
    what = "forward, FA-1 over FA-2 at equal tiles; "
    if over_heads:
        what += f"N={next(p.seqlen_q for _, p in found)}, not causal"
    else:
        what += "16k tokens, hidden dimension 2048"
    style.legend(figure, list(shown.values()), f"{message}\n{what}")
    return figure


_CHANGE = "#B22222"
# The tiles (Br, Bc) of both orders, and whether FA-1 has query splits.
Planned = tuple[tuple[int, int], bool]


def _plans(rows: Sequence[Row]) -> dict[Place, Planned]:
    found: dict[Place, Planned] = {}
    for problem, mine in variants.problems_of(rows).items():
        for unit in units_of(problem.dtype):
            of = [r for r in mine if r.series in series_of(unit)]
            if of:
                split = any(r.note.startswith("query_splits=") for r in of)
                found[unit, problem] = (of[0].Br or 0, of[0].Bc or 0), split
    return found


def _panel(
    ax: Any, found: Mapping[Problem, tuple[dict[str, float], tuple[int, int], bool]],
    over_heads: bool,
) -> None:  # fmt: skip
    def at(problem: Problem) -> int:
        return problem.heads_q if over_heads else problem.seqlen_q

    sizes = sorted({at(p) for p in found})
    for causal in (False, True):
        mine = sorted((at(p), *of) for p, of in found.items() if p.causal == causal)
        for name, (like, marker, line, label) in _LINES.items():
            points = [(x, values[name]) for x, values, *_ in mine if name in values]
            look: dict[str, Any] = {"color": style.COLOURS[like], "marker": marker, "ls": line}
            look |= {"lw": 1.8, "ms": 6, "label": label}
            if causal:
                look |= {"ls": line and ":", "lw": 1.2, "ms": 4, "label": None}
            if name == "splits":  # without query splits, the point is on the paper's grid: no mark
                split = [splits for _, values, _, splits in mine if name in values]
                look["markevery"] = [n for n, splits in enumerate(split) if splits]
            style.line(ax, points, **look)
    ax.axhline(1, color="#555555", lw=0.8, zorder=1)
    style.log(ax.yaxis, 2)
    style.sizes(ax, sizes, "batch x heads" if over_heads else "sequence length N (tokens)")
    _tiles(ax, {(p.causal, at(p)): tiles for p, (_, tiles, _) in found.items()}, over_heads)


def _tiles(ax: Any, found: Mapping[tuple[bool, int], tuple[int, int]], over_heads: bool) -> None:
    """Write the tile sizes into a corner of a panel. Draw a line where they change.

    `found` maps (causal, x) to (Br, Bc), where x is N or the number of heads.
    """
    said = []
    for causal in sorted({causal for causal, _ in found}):
        mine = sorted((x, tiles) for (mask, x), tiles in found.items() if mask == causal)
        words = ["causal: " if causal else "tiles: ", ""]
        steps = [(0, mine[0])] + [(a[0], b) for a, b in itertools.pairwise(mine) if a[1] != b[1]]
        for before, (x, (Br, Bc)) in steps:
            if before:
                ax.axvline((before * x) ** 0.5, color=_CHANGE, lw=1.0, ls="-.", ymax=0.74, zorder=1)
                words.append(f"; from {style.short(x)}: {Br} x {Bc}")
            else:
                words.append(f"{Br} x {Bc}")
        said.append("".join(words))
    first, *others = said
    others = [each for each in others if each.partition(": ")[2] != first.partition(": ")[2]]
    side, left = ("right", 0.98) if over_heads else ("left", 0.02)
    text = "\n".join([first, *others])
    ax.text(left, 0.97, text, transform=ax.transAxes, fontsize=9, ha=side, va="top")


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of times and ratios at the shortest and the longest N.

    Only problems whose DRAM bytes were measured are in the table. If there are no such problems,
    all problems of FA-2's setting are considered.
    """
    every = {
        (unit, p): mine
        for p, mine in variants.problems_of(rows).items()
        for unit in units_of(p.dtype)
        if in_setting(p) and {row.series for row in mine}.intersection(series_of(unit))
    }
    measured = {at: mine for at, mine in every.items() if "dram" in ratios(mine, at[0])} or every
    lengths = {p.seqlen_q for _, p in measured}
    lines = []
    for (unit, problem), mine in measured.items():
        if problem.seqlen_q not in (min(lengths), max(lengths)):
            continue
        found = {(r.series, r.source, r.metric): r for r in mine}
        took = [found.get((s, "measured", "time")) for s in series_of(unit)]
        over = ratios(mine, unit)
        cells = [DTYPES[problem.dtype] + (", wgmma" if unit == "wgmma" else "")]
        cells += [*tables.problem_cells(problem), str(problem.batch * problem.heads_q)]
        cells += [tables.cell(row, lambda v: f"{v:.3g}") for row in took]
        lines.append([*cells, *(tables.number(over, name, ".2f") for name in RATIOS)])
    shown = ("FA-1, paper's grid", "FA-1, query splits", "FA-2")
    header = ["dtype", *tables.PROBLEM, "batch x heads", *(f"{name}, ms" for name in shown)]
    header += [f"FA-1 / FA-2: {name}" for name, *_ in RATIOS.values()]
    times = (r for mine in every.values() for r in mine if r.metric == "time")
    problems = {p for _, p in every}
    caption = (
        "The table compares both loop orders in forward calls with 16k tokens (batch x N) and a "
        "hidden dimension (heads x d) of 2048. Both orders use the same tiles: FA-1's tiles on "
        f"CUDA cores and on mma, and FA-2's tiles on wgmma. The times are {tables.runs(times)}. "
        "The column *time, full grid* contains the ratio *time of FA-1 with query splits / time "
        "of FA-2*. With query splits, several thread blocks share the rows of Q of a head, so "
        "that FA-1 has enough thread blocks to fill the GPU. The last three columns contain the "
        "same ratio for the number of accesses, L2 bytes and DRAM bytes. The ratios *FA-1 / FA-2* "
        f"of all {len(problems)} measured problems are in the CSV file of `loop_order` and in the "
        f"figures [{NAME}_seqlen.png](figures/{NAME}_seqlen.png) and "
        f"[{NAME}_heads.png](figures/{NAME}_heads.png)."
    )
    return tables.of(caption, header, lines)


FIGURES = {
    f"{NAME}_seqlen": partial(detail, over_heads=False),
    f"{NAME}_heads": partial(detail, over_heads=True),
}
