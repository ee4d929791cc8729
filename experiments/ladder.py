"""Measures what each optimisation of the tensor-core kernels gains, one after the other.

FA-2 runs forward in fp16 at N=4096, in steps from a plain kernel to the complete kernel. FA-1 runs
with the rows or the keys of a tile divided over the warps. On Hopper, further steps use wgmma and
the copy engine, also with a causal mask. For each step, the time, the instructions, the bank
conflicts and the sectors from L2 are measured. The speed is compared with the fastest matrix
products and exponentials. On Hopper, a call without one optimisation runs too, at the sizes of the
FlashAttention-3 paper (N=8448).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import fa_numba
from fa_numba.problem import Problem
from fa_numba.tiling import MEASURES, WGMMA_MEASURES

from .beside import ceilings
from .lab.measure import bandwidth, counters, peers, variants
from .lab.measure.series import UNIT_NAMES, algorithm, columns, plan, unit
from .lab.measure.timing import REPEATS, attempt, number
from .lab.measure.workloads import HEAD_DIMS, fa2_setting
from .lab.record import Bench, Options, Row, values
from .lab.show import style, tables

NAME = "ladder"
NEEDS = ("GPU",)
TAKES = ()

SEQLEN, QUICK_SEQLEN = 4096, 512
BASE = "fa2-mma"
PEER = "torch-fa2"


@dataclass(frozen=True)
class Step:
    """A step of the ladder: a kernel with one more optimisation than the step before.

    | field | meaning |
    |---|---|
    | series | name of the series |
    | label | text in the figure |
    | predicted | gain over the step before, predicted before the first run |
    | kept | the optimisations that are on; None: all of them, with the plan's tiles |
    | threads | threads of a thread block |
    | stages | pipeline slots of K and V |
    | size | rows and columns of the tiles |
    | causal | predicted gain with a causal mask, if it differs from `predicted` |
    """

    series: str
    label: str
    predicted: float | None = None
    kept: tuple[str, ...] | None = None
    threads: int | None = None
    stages: int = 1
    size: tuple[int, int] = (128, 64)
    causal: float | None = None

    @property
    def tiles(self) -> fa_numba.Tiles:
        """Return the tiles of the step. They are used only if `kept` is not None."""
        return fa_numba.Tiles(*self.size, self.threads, self.stages)


_ORDER = tuple(MEASURES)
LADDER = (
    Step(f"{BASE}-plain", "plain kernel", None, (), 256),
    Step(f"{BASE}-padding", "+ rows padded against bank conflicts", 2.0, _ORDER[:1], 256),
    Step(f"{BASE}-swizzle", "+ rows swizzled, not padded", 1.03, _ORDER[:2], 256),
    Step(f"{BASE}-prefetch", "+ tiles prefetched", 1.15, _ORDER[:3], 256),
    Step(f"{BASE}-q-registers", "+ Q in registers", 1.05, _ORDER[:4], 256),
    Step(f"{BASE}-folded-scale", "+ scale in the exponent", 1.05, _ORDER[:5], 256),
    Step(f"{BASE}-wide-stores", "+ O in 16-byte stores", 1.01, _ORDER, 256),
    Step(f"{BASE}-32-rows", "+ 32 rows a warp", 1.25, _ORDER, 128),
    Step(BASE, "+ planned tiles", 1.04),
)
# An alternative to the step with 32 rows a warp. The gain is over that step.
TWO_STAGES = replace(
    LADDER[-2],
    series=f"{BASE}-two-stages",
    label="32 rows a warp, two stages of K and V",
    predicted=1.04,
    stages=2,
)
STEPS = (*LADDER, TWO_STAGES)
HOPPER = "fa2-wgmma"
# All steps of the ladder have a producer warpgroup. Only the ablation has a call without it.
_MEASURES = tuple(name for name in WGMMA_MEASURES if name != "specialisation")


def _hopper(name: str, label: str, predicted: float | None, kept: int, rows: int = 128) -> Step:
    return Step(f"{HOPPER}-{name}", label, predicted, _MEASURES[:kept], None, 2, (rows, 128))


# The ladder for Hopper's own instructions. A thread of the producer warpgroup starts the copies.
# From the second step on, the next tiles are copied while a tile is computed.
HOPPER_LADDER = (
    replace(_hopper("tma", "plain kernel, copies by TMA", None, 0, 64), stages=1),
    _hopper("one", "+ tiles prefetched, one consumer warpgroup", 1.4, 0, 64),
    _hopper("two", "+ two consumer warpgroups", 1.6, 0),
    _hopper("turns", "+ warpgroups take turns", 1.1, 1),
    _hopper("overlap", "+ products during the softmax", 1.15, 2),
    _hopper("persistent", "+ persistent blocks", 1.05, 3),
    _hopper("counter", "+ row tiles from a counter", 1.0, 4),
    _hopper("ahead", "+ first product of the next row tile early", 1.03, 5),
    replace(_hopper("late", "+ row tiles taken late", 1.0, 6), causal=1.05),
    Step(HOPPER, "+ planned tiles", 1.02),
)
# The problem of FA-3's ablation (arXiv 2407.08608, Table 2).
ABLATED = Problem(4, 16, 16, 8448, 8448, 128, dtype="float16")


@dataclass(frozen=True)
class Ablation:
    """A call for FA-3's ablation: all optimisations on wgmma, without some of them.

    | field | meaning |
    |---|---|
    | label | text in the table |
    | ablate | the optimisations that are switched off |
    | predicted | predicted speed with all optimisations / speed of this call |
    | published | TFLOP/s in Table 2 of the FlashAttention-3 paper; None: not in the table |
    """

    label: str
    ablate: tuple[str, ...] = ()
    predicted: float | None = None
    published: float | None = None


NO_OVERLAP, ONE_TILE = f"{HOPPER}-no-overlap", f"{HOPPER}-one-tile"
NO_PRODUCER = f"{HOPPER}-no-specialisation"
_ALONE = ("persistent", "counter")
ABLATIONS = {
    NO_OVERLAP: Ablation("no products during the softmax", ("overlap",), 1.14, 582),
    ONE_TILE: Ablation("a thread block for each row tile", _ALONE, 1.05),
    NO_PRODUCER: Ablation(
        "a thread block for each row tile, and no producer warpgroup",
        (*_ALONE, "specialisation"),
        1.15,
        570,
    ),
    HOPPER: Ablation("all optimisations", published=661),
}
HOPPER_LABELS = {step.series: step.label for step in HOPPER_LADDER}
# Measured limits of a kernel's speed: matrix products by torch, wgmma products whose operands stay
# in shared memory, and exponentials.
LIMITS = {
    peers.MATMUL: "speed / cuBLAS",
    "wgmma-resident": "speed / resident wgmma",
    "exponentials": "exponentials / measured limit",
}
# FA-1 with the keys or the rows of a tile divided over the warps. The first two series have equal
# tiles, and the third has the tiles of its own plan.
PARTITIONS = {
    "fa1-mma-keys": "FA-1, keys over the warps",
    "fa1-mma-rows": "FA-1, rows over the warps",
    "fa1-mma": "FA-1, rows over the warps, planned tiles",
}
PREDICTED_PARTITION = 1.15
LABELS = {step.series: step.label for step in STEPS} | PARTITIONS
LABELS |= {PEER: "torch's FlashAttention-2"}
PROFILED = {
    "instructions": "smsp__inst_executed.sum",
    # wavefronts of shared memory, in addition to the wavefronts that the accesses need at least
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",  # of 32 bytes, read from L2
}
# Shares of the call's cycles in which a multiprocessor has a thread block, and in which its tensor
# cores are busy. They are measured only if Nsight Compute has these counters.
OCCUPIED = {
    "busy": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
}


def configurations(problem: Problem, hopper: bool = False) -> list[variants.Variant]:
    """Return the calls to measure for a problem.

    If `hopper` is true, the calls are the steps of HOPPER_LADDER. Otherwise they are the steps on
    mma.sync, and FA-1 with the rows or the keys of a tile divided over the warps.

    The last step of a ladder has the tiles that the planner chooses. They can be the tiles of the
    step before. Both steps are then the same call. It is measured once, and the last step gets a
    copy of the rows.
    """
    steps, before = (HOPPER_LADDER, HOPPER_LADDER[-2]) if hopper else (STEPS, LADDER[-2])
    own, measures = plan(HOPPER if hopper else BASE, problem).tiles, _MEASURES if hopper else _ORDER
    own = replace(own, threads=None) if hopper else own
    found = []
    for step in steps:
        options: dict[str, Any] = {}
        if step.kept is not None:
            left_out = tuple(name for name in measures if name not in step.kept)
            options = {"tiles": step.tiles, "ablate": left_out}
        same = step.kept is None and own == before.tiles
        note = "the plan's tiles are those of the step before" if same else ""
        original = before.series if same else None
        found.append(variants.Variant(step.series, options, same_as=original, note=note))
    if hopper:
        return found
    keys = plan("fa1-mma-keys", problem, warp_partition="keys").tiles
    tiles = {"tiles": fa_numba.Tiles(keys.Br, keys.Bc)}
    found.append(variants.Variant("fa1-mma-keys", {"warp_partition": "keys"}))
    return [*found, variants.Variant("fa1-mma-rows", tiles), variants.Variant("fa1-mma")]


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield the time, instructions, bank conflicts and sectors of each step."""
    hopper = fa_numba.device.compute_capability() == (9, 0)
    N = QUICK_SEQLEN if options.quick else SEQLEN
    problems = [
        fa2_setting(N, d, mask, "float16")
        for d in HEAD_DIMS[: 1 if options.quick else None]
        for mask in ((False, True) if hopper else (False,))
    ]
    if peers.available():
        theirs = [(problem, [variants.Variant(PEER)]) for problem in problems]
        yield from variants.times(NAME, theirs, bench)
    else:
        bench.say("  no torch with CUDA here: its kernel is not measured")
    yield from _limits(bench, hopper)
    work = []
    for problem in problems:
        mine = [] if hopper and problem.causal else configurations(problem)
        work.append((problem, mine + (configurations(problem, hopper=True) if hopper else [])))
    if hopper and not options.quick:
        calls = [
            variants.Variant(series, {"ablate": each.ablate} if each.ablate else {})
            for series, each in ABLATIONS.items()
        ]
        work.append((ABLATED, calls))
    known = counters.available_metrics() or set()
    more = {metric: name for metric, name in OCCUPIED.items() if name.split(".")[0] in known}
    yield from variants.measure(NAME, work, bench, PROFILED | more)


def _limits(bench: Bench, hopper: bool) -> Iterator[Row]:
    """Yield the highest speeds that attention could reach: of matrix products and of exponentials.

    Each speed is measured by a kernel that computes nothing else. In these rows, the columns for
    the sequence length and the head dimension contain the sizes of the matrices. If `hopper` is
    false, only torch's matrix products are measured.
    """
    if peers.available():
        yield from bandwidth.matmul_peak(NAME, "float16", bench.machine)
    problem = Problem(1, 1, 1, 1, 1, 1, dtype="float16")
    sizes = {"seqlen_q": ceilings.ROWS, "seqlen_k": ceilings.COLUMNS, "head_dim": ceilings.SUMMED}
    units = {"wgmma-resident": ("speed", "TFLOP/s"), "exponentials": ("rate", "10^12/s")}
    for series, run in ceilings.MEASURES.items() if hopper else ():
        metric, unit = units[series]
        found, failure = attempt(run, fa_numba.device.multiprocessors(), REPEATS)
        common = columns(NAME, series, problem, bench.machine, note=failure, **sizes)
        yield Row(metric=metric, unit=unit, **number(found), **common)


def shares(rows: Sequence[Row], speed: float, head_dim: int) -> dict[str, float]:
    """Return the share of each measured limit that a speed reaches, as {limit: share}.

    `speed` is in TFLOP/s. The keys are the series in LIMITS. Attention computes one exponential for
    every 4 d FLOPs.
    """
    limits = values(rows, "series", series=tuple(LIMITS))
    found = {name: speed / limit for name, limit in limits.items()}
    if "exponentials" in found:
        found["exponentials"] /= 4 * head_dim
    return found


def gains(rows: Sequence[Row]) -> dict[str, float]:
    """Return the gain of each step of the ladders, as {series: gain}.

    | series | gain |
    |---|---|
    | a step of a ladder | time of the step before / time of the step |
    | TWO_STAGES | time of the step with 32 rows per warp / time with TWO_STAGES |
    | "fa1-mma-rows" | FA-1's time with keys divided over the warps / its time with rows divided |
    """
    times = values(rows, "series", metric="time")
    pairs = [(LADDER[-2].series, TWO_STAGES.series), ("fa1-mma-keys", "fa1-mma-rows")]
    for ladder in (LADDER, HOPPER_LADDER):
        pairs += [(a.series, b.series) for a, b in pairwise(ladder)]
    return {b: times[a] / times[b] for a, b in pairs if a in times and b in times}


def predictions(causal: bool = False) -> dict[str, float]:
    """Return the predicted gain of each step by series, with a causal mask or without."""
    steps = (*STEPS, *HOPPER_LADDER)
    found = {step.series: step.predicted for step in steps if step.predicted is not None}
    if causal:
        found |= {step.series: step.causal for step in steps if step.causal is not None}
    return found | {"fa1-mma-rows": PREDICTED_PARTITION}


def _split(rows: Sequence[Row], causal: bool) -> tuple[dict[Problem, list[Row]], dict[str, str]]:
    """Return the rows of calls by problem, and the labels of the measured series.

    `causal` says whether the rows with or the rows without a causal mask are returned. Rows of
    LIMITS and of the problem ABLATED are left out.
    """
    calls = [r for r in rows if r.series not in LIMITS and r.causal == causal]
    calls = [r for r in calls if r.seqlen_q != ABLATED.seqlen_q]
    tried, every = {r.series for r in calls}, LABELS | HOPPER_LABELS
    labels = {series: label for series, label in every.items() if series in tried}
    return variants.problems_of(calls), labels


def draw(rows: Sequence[Row]) -> Any:
    """Draw a bar with the speed of each step, without a mask. Return None without rows."""
    problems, labels = _split(rows, False)
    if not problems:
        return None
    height = 1.5 + 0.26 * len(labels)
    figure, (axes,) = style.new(1, len(problems), height, sharey=True)
    for ax, (problem, mine) in zip(axes, problems.items(), strict=True):
        _bars(ax, problem, mine, labels)
    tried = {_looks(series): _group(series) for series in labels}
    shown = [style.patch(name, color=style.COLOURS[like]) for like, name in tried.items()]
    what = "×: speed over that of the step before; of two stages, over one stage"
    style.legend(figure, shown, f"{_message(problems, labels)}\n{what}", ncols=2)
    return figure


def _looks(series: str) -> str:
    """Return the name of the series that gives the bar of the step `series` its colour."""
    return PEER if series == PEER else "-".join(series.split("-")[:2])


def _group(series: str) -> str:
    """Return the legend's text for the colour of a series: loop order and unit."""
    if series == PEER:
        return LABELS[PEER]
    order = {"fa1": "FA-1 (K/V outer)", "fa2": "FA-2 (Q outer)"}[algorithm(series)]
    return f"{order}, {UNIT_NAMES[unit(series)]}"


def _message(problems: Mapping[Problem, list[Row]], labels: Mapping[str, str]) -> str:
    """Return the title, which names the step with the largest gain over the step before."""
    found = {
        (gain, labels[series].removeprefix("+ "))
        for rows in problems.values()
        for series, gain in gains(rows).items()
        if series in labels and labels[series].startswith("+ ")
    }
    if not found:
        return "Speed of each step"
    gain, label = max(found)
    return f"The largest gain is ×{gain:.2f}: {label}"


def _bars(ax: Any, problem: Problem, rows: Sequence[Row], labels: Mapping[str, str]) -> None:
    speeds, found = values(rows, "series", metric="speed"), gains(rows)
    shown = []
    for series, label in labels.items():
        text = f"{speeds[series]:.0f}" if series in speeds else "no time"
        text += f"  ×{found[series]:.2f}" if series in found else ""
        shown.append((label, speeds.get(series, 0.0), style.COLOURS[_looks(series)], text))
    style.bars(ax, shown)
    ax.set_xlabel("speed (TFLOP/s)")
    ax.set_title(f"forward, fp16, N={problem.seqlen_q}, d={problem.head_dim}")


# Metric -> (header of its column, format of its cells).
_MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "instructions": ("warp instructions, 10^9", lambda v: f"{v / 1e9:.2f}"),
    "wavefronts": ("shared-memory wavefronts, 10^9", lambda v: f"{v / 1e9:.2f}"),
    "conflicts": ("bank conflicts, 10^9", lambda v: f"{v / 1e9:.3f}"),
    "sectors": ("read from L2, GB", lambda v: f"{v * 32 / 1e9:.2f}"),
    "busy": ("multiprocessors with a block", lambda v: f"{v:.0%}"),
    "tensor": ("tensor cores busy", lambda v: f"{v:.0%}"),
}


def table(rows: Sequence[Row], causal: bool = False) -> tables.Table | None:
    """Return the table of the steps, with a causal mask or without."""
    predicted, lines = predictions(causal), []
    problems, labels = _split(rows, causal)
    for problem, mine in problems.items():
        found = {(r.series, r.metric): r for r in mine if r.source == "measured"}
        gained = gains(mine)
        for series, label in labels.items():
            at = found.get((series, "speed"))
            block = f"{at.Br} x {at.Bc}" if at is not None and at.Br else tables.MISSING
            share = {} if at is None or at.failed else shares(rows, at.number, problem.head_dim)
            cells = [block, tables.cell(at, lambda v: f"{v:.1f}")]
            cells += [tables.number(each, series, ".2f") for each in (gained, predicted)]
            cells += [tables.number(share, name, ".0%") for name in LIMITS]
            cells += [
                tables.cell(found.get((series, metric)), shown)
                for metric, (_, shown) in _MEASURED.items()
            ]
            lines.append([*tables.problem_cells(problem), label, *cells])
    header = [*tables.PROBLEM, "step", "Br x Bc", "TFLOP/s", "gain", "predicted gain"]
    header += [*LIMITS.values(), *(name for name, _ in _MEASURED.values())]
    mask = " with a causal mask" if causal else ""
    caption = (
        "Each row of the table of optimisation steps shows the speed and the hardware counters of "
        f"the forward kernel{mask} after one more optimisation step. All calls in the table of "
        "optimisation steps are in fp16, with 16k tokens (batch x N) and a hidden dimension "
        "(heads x d) of 2048. The section [How to read these tables](#how-to-read-these-tables) "
        "explains the columns of the table of optimisation steps."
    )
    return tables.of(caption, header, lines)


def ablation(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of FA-3's ablation: speeds on Hopper without some of the optimisations.

    Return None unless the speed with all optimisations and another speed were measured.
    """
    speeds = values(rows, "series", seqlen_q=ABLATED.seqlen_q, metric="speed")
    measured = {series: each for series, each in ABLATIONS.items() if series in speeds}
    if HOPPER not in measured or len(measured) < 2:
        return None
    best, lines = ABLATIONS[HOPPER].published or 0.0, []
    for series, each in measured.items():
        gain = {} if series == HOPPER else {"ours": speeds[HOPPER] / speeds[series]}
        gain |= {"published": best / each.published} if each.published and gain else {}
        gain |= {"predicted": each.predicted} if each.predicted else {}
        shown = [tables.number(gain, name, ".2f") for name in ("ours", "predicted", "published")]
        theirs = tables.MISSING if each.published is None else f"{each.published:.0f}"
        lines.append([each.label, f"{speeds[series]:.1f}", theirs, *shown])
    p = ABLATED
    header = ["kernel on wgmma", "TFLOP/s", "published TFLOP/s (FA-3, H100)"]
    header += ["gain", "predicted gain", "published gain"]
    caption = (
        "The table of ablations has forward calls in fp16 with batch "
        f"{p.batch}, {p.heads_q} heads, N={p.seqlen_q} and d={p.head_dim}, as in Table 2 of the "
        "FlashAttention-3 paper. A *gain* is the ratio *speed with all optimisations / speed of "
        "the row*. If a gain is below 1, the kernel is faster without the optimisation. Without a "
        "producer warpgroup, a thread block computes one row tile, and one of its computing "
        "threads loads all tiles. The row *a thread block for each row tile* therefore shows how "
        "much of the loss has another cause than the missing producer warpgroup."
    )
    return tables.of(caption, header, lines)


TABLES = {"ladder_causal": partial(table, causal=True), "ladder_ablation": ablation}
