"""Accesses and runtime over the block size: FlashAttention-1 paper, Fig. 2 middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import fa_numba
from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab import published
from .lab.options import Bench, Options
from .lab.series import call, plan, row_fields
from .lab.store import EMULATOR, MODEL, PUBLISHED, Row
from .lab.timing import Gate, attempt, time_call
from .lab.workloads import Inputs, one_head

NAME = "block_size"
TITLE = "accesses and runtime over the block size (FA-1 Fig. 2 middle)"
DESCRIPTION = (
    "FA-1 paper, Fig. 2 middle (N=1024, d=64, 16 heads, batch 64, forward): accesses and runtime "
    "over B_c for both orders, and over B_r for Q-outer, whose traffic B_r governs; the published "
    "points beside ours; the model counted on the emulator at a small size."
)
NEEDS_GPU = False

BATCH, HEADS, SEQLEN, HEAD_DIM = 64, 16, 1024, 64
SIZES = (16, 32, 64, 128, 256, 512)
# The block size that stays while the other one varies.
FIXED = 64
# Counted where the emulator takes a second: the same tiles, with fewer of them.
SMALL_SEQLEN, SMALL_HEAD_DIM, SMALL_SIZES, SMALL_FIXED = 96, 16, (16, 32, 48, 64), 32
COUNTED_SEQLEN, COUNTED_FLOPS = 256, 1e7  # half a minute for a problem's tiles; minutes beyond
# Columns that this experiment varies: a row of other block sizes is no older reading.
SWEPT = ("Br", "Bc")
FA1, FA2 = "fa1-simt", "fa2-simt"


def sweep(sizes: Sequence[int], fixed: int) -> list[tuple[str, int, int]]:
    """(series, Br, Bc): both orders over Bc, and the Q-outer one over Br."""
    over_bc = [(series, fixed, size) for series in (FA1, FA2) for size in sizes]
    over_br = [(FA2, size, fixed) for size in sizes]
    return list(dict.fromkeys(over_bc + over_br))


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Accesses from the model and counted; runtime where there is a GPU."""
    masks = options.causal or (False,)
    lengths, head_dims = options.seqlens or (SEQLEN,), options.head_dims or (HEAD_DIM,)
    problems = [
        Problem(BATCH, HEADS, HEADS, N, N, d, causal=mask)
        for N in lengths
        for d in head_dims
        for mask in masks
    ]
    sizes = SIZES[1:4] if options.quick else SIZES
    tiles = sweep(sizes, FIXED)
    work = [(problem, *tile) for problem in problems for tile in tiles]
    for problem, series, Br, Bc in bench.track(work, "closed forms"):
        yield from _model(problem, series, Br, Bc)

    small = sweep(SMALL_SIZES[:2] if options.quick else SMALL_SIZES, SMALL_FIXED)
    inputs = Inputs()
    counted = [(problem, *tile) for problem in _countable(options, bench, masks) for tile in small]
    for problem, series, Br, Bc in bench.track(counted, "counting on the emulator"):
        yield from _model(problem, series, Br, Bc)
        yield from _count(problem, series, Br, Bc, inputs)

    if bench.machine is None:
        return
    for problem in problems:
        host = inputs(problem)
        gate = Gate(problem, *host)
        arrays = tuple(device.to_gpu(x) for x in host)
        for series, Br, Bc in bench.track(tiles, "timing"):
            yield _time(problem, series, Br, Bc, arrays, gate, bench.machine)


def _countable(options: Options, bench: Bench, masks: Sequence[bool]) -> list[Problem]:
    """What the emulator counts; says which of the sizes asked for are too large for it."""
    sizes = [
        (N, d)
        for N in options.seqlens or (SMALL_SEQLEN,)
        for d in options.head_dims or (SMALL_HEAD_DIM,)
    ]
    small = [(N, d) for N, d in sizes if N <= COUNTED_SEQLEN and 4 * N * N * d <= COUNTED_FLOPS]
    beyond = [f"N={N}, d={d}" for N, d in sizes if (N, d) not in small]
    if beyond:
        bench.say(f"  not counted, minutes on the emulator: {'; '.join(beyond)}")
    return [one_head(N, d, mask) for N, d in small for mask in masks]


def _fields(problem: Problem, series: str, Br: int | None, Bc: int | None) -> dict[str, Any]:
    return {"experiment": NAME, "series": series, "Br": Br, "Bc": Bc, **row_fields(problem)}


def _totals(accesses: Any, **common: Any) -> Iterator[Row]:
    for metric, arrays in (("loads", accesses.loads), ("stores", accesses.stores)):
        value = sum(arrays.values())
        yield Row(metric=metric, unit="elements", value=value, **common)


def _model(problem: Problem, series: str, Br: int, Bc: int) -> Iterator[Row]:
    form = io_model.fa1 if series == FA1 else io_model.fa2
    accesses = form(problem, fa_numba.Tiles(Br=Br, Bc=Bc))
    yield from _totals(accesses, machine=MODEL, source="model", **_fields(problem, series, Br, Bc))


def _count(problem: Problem, series: str, Br: int, Bc: int, inputs: Inputs) -> Iterator[Row]:
    with fa_numba.count_accesses() as counts:
        call(series, problem, *inputs(problem), tiles=fa_numba.Tiles(Br=Br, Bc=Bc))()
    yield from _totals(
        counts, machine=EMULATOR, source="counted", **_fields(problem, series, Br, Bc)
    )


def _time(
    problem: Problem, series: str, Br: int, Bc: int, arrays: tuple, gate: Gate, machine: str
) -> Row:
    def work() -> Any:
        tiles = fa_numba.Tiles(Br=Br, Bc=Bc)
        plan(series, problem, tiles=tiles)
        return time_call(call(series, problem, *arrays, tiles=tiles), gate)

    timing, failure = attempt(work)
    times = {}
    if timing is not None:
        times = {"p20": timing.p20, "p80": timing.p80, "n": timing.n}
    return Row(
        machine=machine,
        source="measured",
        metric="time",
        unit="ms",
        value=None if timing is None else timing.median,
        note=failure,
        **times,
        **_fields(problem, series, Br, Bc),
    )


def published_rows() -> list[Row]:
    """The paper's points: fp16 on an A100; accesses in bytes, counted as the paper counts."""
    rows = []
    names = {"hbm_accesses": ("traffic", "bytes", 1e9), "runtime": ("time", "ms", 1.0)}
    for line in published.lookup(paper="fa1", item="Fig. 2 middle"):
        metric, unit, factor = names[line["metric"]]
        value = float(line["value"]) * factor
        problem = Problem(BATCH, HEADS, HEADS, SEQLEN, SEQLEN, HEAD_DIM)
        fields = _fields(problem, "published", None, int(line["block_c"])) | {"dtype": "float16"}
        rows.append(
            Row(
                machine=PUBLISHED,
                source=PUBLISHED,
                metric=metric,
                unit=unit,
                value=value,
                note=f"{line['hardware']}, {line['reading']}",
                **fields,
            )
        )
    return rows


def equal_counts(rows: Sequence[Row]) -> tuple[int, int]:
    """(counted numbers that equal the model's, counted numbers)."""

    def what(row: Row) -> tuple:
        return row.key[: row.key.index(row.source)] + row.key[row.key.index(row.source) + 1 :]

    model = {what(row): row.value for row in rows if row.source == "model"}
    counted = [row for row in rows if row.source == "counted"]
    return sum(model.get(what(row)) == row.value for row in counted), len(counted)


def draw(rows: Sequence[Row]) -> Any:
    """Accesses in GB and runtime in ms over the block size, a row of panels a problem."""
    from .lab import style

    large = [row for row in rows if row.batch == BATCH]
    problems = sorted({(row.seqlen_q, row.head_dim, row.causal) for row in large})
    if not problems:
        return None
    figure, axes = style.new(len(problems), 2, 1.0 + 3.8 * len(problems))
    equal, counted = equal_counts(rows)
    for (N, d, mask), (left, right) in zip(problems, axes, strict=True):
        mine = [r for r in large if (r.seqlen_q, r.head_dim, r.causal) == (N, d, mask)]
        reference = published_rows() if (N, d, mask) == (SEQLEN, HEAD_DIM, False) else []
        gpu = {row.machine for row in mine if row.source == "measured"}
        setting = f"N={N}, d={d}{', causal' if mask else ''}"
        left.set_title(f"accesses (model), {setting}")
        right.set_title(f"runtime, {setting}" + ("" if gpu else ": ours not recorded yet"))
        _panel(left, mine, reference, "traffic", "loads + stores (GB)", style)
        _panel(right, mine, reference, "time", "ms", style)
        absent = sorted({max(row.Br, row.Bc) for row in mine if row.failed})
        if absent:
            right.annotate(
                f"not run at {', '.join(map(str, absent))}: reasons in the data file",
                (0.98, 0.95),
                xycoords="axes fraction",
                ha="right",
                fontsize=9,
            )
    if counted:
        sizes = sorted({(r.seqlen_q, r.head_dim) for r in rows if r.source == "counted"})
        where = "; ".join(f"N={N}, d={d}" for N, d in sizes)
        axes[0][0].annotate(
            f"counted on the emulator at {where}:\n{equal} of {counted} numbers equal the model",
            (0.98, 0.55),
            xycoords="axes fraction",
            ha="right",
            fontsize=9,
        )
    shown: dict[str, Any] = {}
    for ax in axes.flat:
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True)) | shown
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=2)
    return figure


def _panel(
    ax: Any,
    rows: Sequence[Row],
    reference: Sequence[Row],
    metric: str,
    name: str,
    style: Any,
) -> None:
    sweeps = (
        (FA1, "Bc", "-", f"FA-1 (K/V outer) over $B_c$, $B_r$={FIXED}, fp32"),
        (FA2, "Br", "-", f"FA-2 (Q outer) over $B_r$, $B_c$={FIXED}, fp32"),
        (FA2, "Bc", ":", f"FA-2 (Q outer) over $B_c$, $B_r$={FIXED}, fp32"),
    )
    drawn: set[int | None] = set()
    for series, varied, ls, label in sweeps:
        other = "Br" if varied == "Bc" else "Bc"
        points: dict[int, float] = {}
        for row in rows:
            if row.series != series or getattr(row, other) != FIXED or row.failed:
                continue
            x = getattr(row, varied)
            if metric == "traffic" and row.unit == "elements" and row.source == "model":
                points[x] = points.get(x, 0) + row.value * io_model.ELEMENT_BYTES / 1e9
            elif metric == "time" and row.metric == "time":
                points[x] = row.value
        if not points:
            continue
        drawn |= set(points)
        x = sorted(points)
        ax.plot(
            x,
            [points[n] for n in x],
            color=style.COLOURS[series],
            marker=style.MARKERS[series],
            mfc="white" if ls == ":" else None,
            ls=ls,
            label=label,
        )
    published_points = [row for row in reference if row.metric == metric]
    if published_points:
        factor = 1e9 if metric == "traffic" else 1
        drawn |= {row.Bc for row in published_points}
        ax.plot(
            [row.Bc for row in published_points],
            [row.value / factor for row in published_points],
            color=style.COLOURS["published"],
            marker="x",
            ls="--",
            label="FA-1 paper over $B_c$, A100, fp16 (2 bytes an element)",
        )
    if not drawn:
        style.empty(ax, "not recorded yet" if metric == "time" else "no model")
        return
    style.sizes(ax, sorted(drawn), "block size")
    ax.set_ylabel(name)
    ax.set_ylim(bottom=0)
