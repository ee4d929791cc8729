"""Changes FA-1 into FA-2 in single steps, and measures what each step gains.

The steps follow section 3 of the FlashAttention-2 paper:

    1. The rows of Q, instead of the keys, are divided over the warps.
    2. O is not normalised between passes.
    3. Q becomes the outer loop, with one thread block per head.
    4. The logsumexp L replaces l and m.
    5. The grid covers the sequence.
    6. FA-2's own tiles are used.
    7. A causal mask skips tiles.

FA-1 with query splits is measured too. The problems are those of FA-2's benchmark at N=4096,
forward and backward, in fp32 and fp16, on Hopper also by wgmma. For each step, the time, accesses,
instructions, L2 and DRAM bytes are measured or computed. The operations other than matrix products
are computed too.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import fa_numba
from fa_numba import Tiles, io_model
from fa_numba.problem import Problem

from .lab.measure import variants
from .lab.measure.series import UNIT_NAMES, plan, query_splits, unit
from .lab.measure.speeds import DTYPES, PASSES
from .lab.measure.timing import SECONDS, attempt
from .lab.measure.workloads import fa2_problems
from .lab.record import MODEL, Bench, Options, Row, values
from .lab.show import style, tables
from .lab.show.tables import Table

NAME = "loop_cost"
NEEDS = ("GPU",)
TAKES = ("seqlens", "head_dims")
PROTOCOL = (
    "one block a head of FA-2 is a launch for each row tile, one after the other; its counters are "
    "those of the first launch times the number of launches"
)

SEQLEN, QUICK_SEQLEN = 4096, 512
UNITS = ("simt", "mma")
# The third unit, in 16 bits too. It is measured on Hopper only, and has its own figure and table.
HOPPER = "wgmma"
DTYPES_OF = {"simt": "float32", "mma": "float16", HOPPER: "float16"}
# Our metric -> Nsight Compute's counter. All counters are sums, which can be added over kernels.
PROFILED = {
    # warp instructions executed
    "instructions": "smsp__inst_executed.sum",
    # cycles in which a scheduler issued an instruction; cycles in which the schedulers were active
    "issuing": "smsp__issue_active.sum",
    "active": "smsp__cycles_active.sum",
}


# The steps in order: the name of a series without the unit -> description.
STEPS = {
    "fa1-keys": "FA-1, one block per head, keys over the warps",
    "fa1-own": "FA-1, one block per head, its own tiles",
    "fa1": "FA-1, one block per head (the paper's grid)",
    "fa1-unnormalised": "O not normalised between passes",
    "fa1-splits": "FA-1, query splits (more blocks per head)",
    "fa2-statistics": "Q outer, l and m stored",
    "fa2-one-block": "Q outer, one block per head, L stored instead of l and m",
    "fa2-fa1-tiles": "Q outer, grid over the sequence (FA-2)",
    "fa2": "FA-2 with its own tiles",
}
# Steps without a kernel, and therefore without a time -> the step whose tiles their closed forms
# use.
COUNTED_ONLY = {"fa1-unnormalised": "fa1", "fa2-statistics": "fa2-one-block"}


def series_of(step: str, unit: str) -> str:
    """Return the name of a step's series on a unit.

    For example, the step "fa1-splits" on "mma" has the name "fa1-mma-splits".
    """
    algorithm, _, variant = step.partition("-")
    return "-".join(part for part in (algorithm, unit, variant) if part)


def step_of(series: str) -> str:
    """Return the step of a series: the name of the series without the unit."""
    algorithm, _, *variant = series.split("-")
    return "-".join((algorithm, *variant))


def beside_products(step: str, problem: Problem, tiles: Any) -> int:
    """Return the number of operations on S and O in a forward step, without matrix products.

    `step` is a step from FA-1 to FA-2, such as "fa1-splits". Each visited tile of S takes 5 Br Bc
    operations: scaling, row maxima, differences, exponentials and row sums. In addition, the rows
    of O are multiplied by factors. One factor for a tile takes Br d operations:

    | step | factors for each visited tile | factors at the end |
    |---|---|---|
    | FA-1 (Algorithm 1 line 12) | l, e^(m_old - m_new) and 1 / l | none |
    | FA-1 without normalising O between passes | e^(m_old - m_new) | 1 / l |
    | FA-2 (line 12) | e^(m_old - m_new) | 1 / l |
    """
    algorithm = step.split("-")[0]
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    visited = io_model.tiles_visited(algorithm, problem, tiles)
    often = algorithm == "fa1" and step != "fa1-unnormalised"
    Br, Bc, d = tiles.Br, tiles.Bc, problem.head_dim
    return visited * (5 * Br * Bc + (3 if often else 1) * Br * d) + (not often) * rows * d


Steps = Mapping[tuple[str, str, str], float]


def by_step(rows: Iterable[Row]) -> Steps:
    """Return the values of the rows as {(step, source, metric): value}.

    A step is a step from FA-1 to FA-2, such as "fa1-splits". All rows must be of one problem, pass
    and unit.
    """
    found = values(rows, "series", "source", "metric")
    return {(step_of(series), *at): value for (series, *at), value in found.items()}


# Gain -> (header of its column, metric, step in the numerator, step in the denominator).
GAINS = {
    "total": ("total, FA-1 / FA-2", "time", "fa1", "fa2"),
    "warps": ("FA-1, rows over the warps", "time", "fa1-keys", "fa1"),
    "order_one_block": ("loop order, one block per head", "time", "fa1", "fa2-one-block"),
    "grid": ("grid of Q outer", "time", "fa2-one-block", "fa2-fa1-tiles"),
    "splits": ("grid of K/V outer", "time", "fa1", "fa1-splits"),
    "order": ("loop order, full grid", "time", "fa1-splits", "fa2-fa1-tiles"),
    "instructions": ("part: instructions", "instructions", "fa1-splits", "fa2-fa1-tiles"),
    "waiting": ("part: waiting", "issue", "fa2-fa1-tiles", "fa1-splits"),
    "rest": ("part: rest", "", "", ""),
    "tiles": ("tiles", "time", "fa2-fa1-tiles", "fa2"),
}


def factors(found: Steps) -> dict[str, float | None]:
    """Return the factors whose product is FA-2's gain over FA-1, as {name in GAINS: factor}.

    `found` contains the values of the steps, as `by_step` returns them. A factor is None if a
    number is missing. Most factors are the time before a change divided by the time after the
    change:

    | factor | change |
    |---|---|
    | warps | rows, not keys, are divided over the warps; `total` does not contain this factor |
    | order_one_block | Q becomes the outer loop, with one thread block per head before and after |
    | grid | the grid of Q outer covers the sequence |
    | splits | FA-1 gets query splits |
    | order | Q becomes the outer loop, on a full grid before and after |
    | tiles | FA-2's tiles are used instead of FA-1's tiles |
    | total | all changes from FA-1 to FA-2 |

    Three other factors are parts of `order`:

    | factor | ratio |
    |---|---|
    | instructions | FA-1's number of executed instructions / FA-2's number |
    | waiting | FA-2's issued instructions per cycle / FA-1's issued instructions per cycle |
    | rest | the remaining factor, by idle multiprocessors and the clock |

    The factors satisfy these equations:

        total = order_one_block x grid x tiles
        total = splits x order x tiles
        order = instructions x waiting x rest

    In the forward pass on wgmma, FA-1 is measured with its own tiles and with FA-2's tiles. `tiles`
    is then FA-1's gain by FA-2's tiles. `total` is FA-2's gain over FA-1 with FA-1's own tiles.
    """

    def number(step: str, metric: str) -> float | None:
        if metric == "issue":
            issuing, active = number(step, "issuing"), number(step, "active")
            return issuing / active if issuing and active else None
        return found.get((step, "measured", metric))

    def ratio(metric: str, over: str, under: str) -> float | None:
        above, below = number(over, metric), number(under, metric)
        return above / below if above and below else None

    gains = {name: ratio(*of) for name, (_, *of) in GAINS.items()}
    if retiled := ratio("time", "fa1-own", "fa1"):
        gains |= {"total": ratio("time", "fa1-own", "fa2"), "tiles": retiled}
    order, instructions, waiting = (gains[x] for x in ("order", "instructions", "waiting"))
    if order and instructions and waiting:
        gains["rest"] = order / (instructions * waiting)
    return gains


def configurations(
    problem: Problem, multiprocessors: int, passes: str, on: str
) -> list[variants.Variant]:
    """Return the calls of the steps that have kernels on the unit `on`, for one problem and pass.

    The steps of FA-1 have the tiles that the planner chooses for FA-1. The steps of FA-2 have these
    tiles too, except the step "fa2", which has FA-2's own tiles. The forward pass on "wgmma"
    differs: there, all steps have FA-2's tiles, and a further step, "fa1-own", is FA-1 with FA-1's
    own tiles. Two steps may make the same call. Only the first of them is measured, and its rows
    are copied for the other.
    """
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
    """Yield the time, bytes and instructions of each step, in both passes."""
    problems = fa2_problems(options, dict.fromkeys(DTYPES_OF.values()), (SEQLEN,), (QUICK_SEQLEN,))
    multiprocessors = bench.describe["multiprocessors"]
    hopper = fa_numba.device.compute_capability() == (9, 0)
    units = [*UNITS, HOPPER] if hopper else UNITS
    for passes in ("fwd", "bwd"):
        work = [
            (p, [step for on in units if DTYPES_OF[on] == p.dtype
                 for step in configurations(p, multiprocessors, passes, on)])
            for p in problems
        ]  # fmt: skip
        yield from variants.measure(
            NAME, work, bench, PROFILED, seconds=SECONDS, counted=lambda p: not p.causal
        )


def gigabytes(number: float) -> str:
    """Return a number of bytes as text in GB: one decimal from 10 GB on, else two decimals."""
    return f"{number / 1e9:.{1 if number >= 1e10 else 2}f}"


Problems = dict[tuple[str, Problem], list[Row]]


def problems_of(rows: Iterable[Row], units: Sequence[str] = UNITS) -> Problems:
    """Return the rows of series on the given units as {(pass, problem): rows}, forward first."""
    rows = [row for row in rows if unit(row.series) in units]
    return {
        (passes, problem): mine
        for passes in ("fwd", "bwd")
        for problem, mine in variants.problems_of(r for r in rows if r.pass_ == passes).items()
    }


def _plain(found: Problems) -> Problems:
    return {at: mine for at, mine in found.items() if not at[1].causal}


# The bars of the waterfall chart: step -> label of the change from the step before.
WATERFALL = {
    "fa1-own": "",
    "fa1": "FA-2's tiles, {tiles}",
    "fa1-splits": "grid: query splits",
    "fa2-fa1-tiles": "loop order: Q outer",
    "fa2": "FA-2's own tiles, {tiles}",
}


def draw(rows: Sequence[Row], units: Sequence[str] = UNITS) -> Any:
    """Draw the times of the steps for one problem as a waterfall chart.

    Return None without rows.
    """
    found = _plain(problems_of(rows, units))
    if not found:
        return None
    (passes, problem), mine = _example(found, largest=True)
    figure, ((ax,),) = style.new(1, 1, 3.9)
    on = HOPPER if HOPPER in units else "simt" if problem.dtype == "float32" else "mma"
    at = f"N={problem.seqlen_q}, d={problem.head_dim}"
    what = f"{PASSES[passes]}, {DTYPES[problem.dtype]}, {UNIT_NAMES[on]}, {at}"
    ax.set_title(f"{what}\nbehind a bar: gain of the step, time, DRAM bytes")
    _waterfall(ax, mine)
    figure.suptitle(_message(mine))
    return figure


def _message(rows: Sequence[Row]) -> str:
    gains = factors(by_step(rows))
    if gains["total"] is None:
        return "From FA-1 to FA-2, one step at a time"
    return f"FA-2 is {gains['total']:.1f} times as fast as FA-1"


def _said(passes: str, p: Problem, units: Sequence[str]) -> str:
    return f"{PASSES[passes]}, {_named(p.dtype, units)}, N={p.seqlen_q}, d={p.head_dim}"


def _named(dtype: str, units: Sequence[str]) -> str:
    return DTYPES[dtype] + (", wgmma" if HOPPER in units else "")


def _waterfall(ax: Any, rows: Sequence[Row]) -> None:
    found = by_step(rows)
    known = {step_of(row.series): row for row in rows}
    steps = [s for s in WATERFALL if (s, "measured", "time") in found]
    if "fa1-own" in steps and "fa2-fa1-tiles" in steps:  # both last steps have FA-2's own tiles
        steps.remove("fa2")
    if not steps:
        style.empty(ax, "no time")
        return
    times = [found[step, "measured", "time"] for step in steps]
    tiles = [f"{known[step].Br} x {known[step].Bc}" for step in steps]
    names, colours = [], [style.COLOURS[known[step].series] for step in steps]
    for at, (step, time) in enumerate(zip(steps, times, strict=True)):
        before = times[at - 1] if at else 0.0
        moved = found.get((step, "dram", "traffic"))
        text = f"{time:.3g} ms" + ("" if moved is None else f", {gigabytes(moved)} GB")
        text = f"×{before / time:.2f}, {text}" if at else text
        first = f"FA-1, one block per head, tiles {tiles[0]}"
        names.append(WATERFALL[step].format(tiles=tiles[at]) if at else first)
        ax.barh(at, abs(time - before), left=min(time, before), height=0.62, color=colours[at])
        ax.text(max(time, before), at, f"  {text}", va="center", fontsize=10)
        if at:  # connect the end of the bar before with the beginning of this bar
            ax.plot([before, before], [at - 1, at], color="#777777", lw=0.8, zorder=0)
    last = known.get("fa2", known[steps[-1]])
    ax.barh(len(steps), times[-1], height=0.62, color=style.COLOURS[last.series])
    ax.text(times[-1], len(steps), f"  {times[-1]:.3g} ms", va="center", fontsize=10)
    ax.set_yticks(range(len(steps) + 1), [*names, f"FA-2, tiles {tiles[-1]}"])
    ax.set(ylim=(len(steps) + 0.6, -0.6), xlim=(0, max(times) * 1.38))
    ax.set_xlabel("time (ms); a bar is what a step saves or costs")
    ax.grid(False, axis="y")


# Metric -> (header of its column, format of its cells).
_MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "time": ("ms", lambda v: f"{v:.2f}"),
    "speed": ("TFLOP/s", lambda v: f"{v:.1f}"),
    "instructions": ("warp instructions, 10^9", lambda v: f"{v / 1e9:.2f}"),
}
# Source of bytes -> header of its column.
_TRAFFIC = {"model": "accesses, GB", "l2": "L2, GB", "dram": "DRAM, GB"}


def table(rows: Sequence[Row], units: Sequence[str] = UNITS) -> Table | None:
    """Return the table of the factors of each problem, or None without rows.

    A second table, below the first table, contains all steps of one problem.
    """
    every = problems_of(rows, units)
    plain = _plain(every)
    if not plain:
        return None
    gains = []
    for (passes, problem), mine in plain.items():
        found = factors(by_step(mine))
        skipping = _causal_skipping(every, passes, problem)
        cells = [tables.number(found, name, ".2f") for name in GAINS]
        where = [passes, _named(problem.dtype, units), str(problem.head_dim), str(problem.seqlen_q)]
        gains.append([*where, *cells, *skipping])
    header = ["pass", "dtype", "d", "N", *(name for name, *_ in GAINS.values())]
    header += ["causal skipping, FA-1", "causal skipping, FA-2"]
    first = tables.markdown(header, gains)
    example, steps = _example(plain)
    caption = (
        "Each factor in the table is the ratio *time before a step / time after the step*. If the "
        "factor of a step from FA-1 to FA-2 is above 1, the step saves time. The calls have 16k "
        "tokens (batch x N), a hidden dimension (heads x d) of 2048 and no mask. The times are "
        f"{tables.runs(r for mine in every.values() for r in mine if r.metric == 'time')}. The "
        "columns *causal skipping* contain the ratio *time of a kernel without a mask / time with "
        "a causal mask*."
    )
    if HOPPER in units:
        caption = (
            f"![From FA-1 to FA-2 by wgmma](figures/loop_cost_hopper.png)\n\n{caption} On wgmma, "
            "all forward steps from FA-1 to FA-2 except the first step use FA-2's tiles. The "
            "column *tiles* contains the ratio *time of FA-1 with FA-1's own tiles / time of FA-1 "
            "with FA-2's tiles*. The column *total* contains the ratio *time of FA-1 with FA-1's "
            "own tiles / time of FA-2*."
        )
    what = (
        f"The next table shows each step from FA-1 to FA-2 in detail ({_said(*example, units)}). A "
        "step from FA-1 to FA-2 without a time has numbers from closed forms instead of "
        "measurements, because no kernel computes the step"
    )
    return Table(caption, f"{first}\n{what}:\n\n{_steps(example[1], steps)}")


def _causal_skipping(every: Problems, passes: str, problem: Problem) -> list[str]:
    """Return two table cells, for FA-1 and FA-2: how much faster a call is with a causal mask.

    The number is the time without a mask / the time with a causal mask. `every` contains the rows
    of each pass and problem.
    """
    whole = by_step(every[passes, problem])
    skipped = by_step(every.get((passes, replace(problem, causal=True)), ()))
    at = [(step, "measured", "time") for step in ("fa1", "fa2")]
    over = {key: whole[key] / skipped[key] for key in at if key in whole and key in skipped}
    return [tables.number(over, key, ".2f") for key in at]


def _example(every: Problems, largest: bool = False) -> tuple[tuple[str, Problem], list[Row]]:
    """Return the problem that is shown in detail, as ((pass, problem), rows).

    A problem in fp16 is preferred to other dtypes. Among these problems, the problem with the
    smallest head dimension is taken, or with the largest head dimension if `largest` is true. If
    the problem has rows of both passes, the forward pass is taken.
    """

    def order(item: tuple[tuple[str, Problem], list[Row]]) -> tuple:
        (_, p), _ = item  # forward comes first
        return p.dtype != "float16", p.head_dim * (-1) ** largest

    return min(every.items(), key=order)


def _steps(problem: Problem, rows: Sequence[Row]) -> str:
    of = {(step_of(r.series), r.source, r.metric): r for r in rows if r.metric != "beside_products"}
    lines = []
    for step, name in STEPS.items():
        run = COUNTED_ONLY.get(step, step)
        found = next((r for at, r in of.items() if at[0] == run), None)
        if found is None:
            continue
        cells = [
            tables.cell(of.get((step, "measured", metric)), shown)
            for metric, (_, shown) in _MEASURED.items()
        ]
        moved = {source: of.get((step, source, "traffic")) for source in _TRAFFIC}
        if run != step and (same := of.get((run, MODEL, "traffic"))):
            more = 4 * problem.batch * problem.heads_q * problem.seqlen_q
            own = same.number + more * (step == "fa2-statistics")  # l and m are stored instead of L
            moved[MODEL] = replace(same, value=own)
        beside = beside_products(step, problem, found)
        cells += [*(tables.cell(row, gigabytes) for row in moved.values()), f"{beside / 1e9:.1f}"]
        lines.append([name, f"{found.Br} x {found.Bc}", *cells])
    names = (name for name, _ in _MEASURED.values())
    header = ["step", "tiles", *names, *_TRAFFIC.values()]
    header.append("operations besides matrix products, GFLOP")
    return tables.markdown(header, lines)


# The figure and the table for Hopper's own instructions (wgmma).
FIGURES = {"loop_cost_hopper": functools.partial(draw, units=(HOPPER,))}
TABLES = {"loop_cost_hopper": functools.partial(table, units=(HOPPER,))}
