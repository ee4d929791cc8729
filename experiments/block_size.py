"""Accesses and runtime over the block size: FlashAttention-1 paper, Fig. 2 middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fa_numba
from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab import counts, published, tables
from .lab.options import Bench, Options
from .lab.series import call, plan, row_fields
from .lab.store import EMULATOR, MODEL, PUBLISHED, Row
from .lab.tables import Table
from .lab.timing import Gate, attempt, time_call
from .lab.workloads import Inputs, one_head

NAME = "block_size"
TITLE = "accesses and runtime over the block size (FA-1 Fig. 2 middle)"
DESCRIPTION = (
    "FA-1 paper, Fig. 2 middle (N=1024, d=64, 16 heads, batch 64, forward): accesses and runtime "
    "over B_c for both orders, and over B_r for Q-outer, whose traffic B_r governs; the published "
    "points beside ours; the model counted on the emulator at the paper's length and head "
    "dimension, one head of them, and at a small size."
)
NEEDS_GPU = False

BATCH, HEADS, SEQLEN, HEAD_DIM = 64, 16, 1024, 64
SIZES = (16, 32, 64, 128, 256, 512)
# The block size that stays while the other one varies.
FIXED = 64
# Counted too: a size where the blocks do not divide the length, nor each other.
SMALL_SEQLEN, SMALL_HEAD_DIM, SMALL_SIZES, SMALL_FIXED = 96, 16, (16, 32, 48, 64), 32
# Columns that this experiment varies: a row of other block sizes is no older reading.
SWEPT = ("Br", "Bc")
FA1, FA2 = "fa1-simt", "fa2-simt"


def sweep(sizes: Sequence[int], fixed: int) -> list[tuple[str, int, int]]:
    """The tiles to run, as (series, Br, Bc): both orders over Bc, and the Q-outer one over Br.

    The block size that does not vary is `fixed`.
    """
    over_bc = [(series, fixed, size) for series in (FA1, FA2) for size in sizes]
    over_br = [(FA2, size, fixed) for size in sizes]
    return list(dict.fromkeys(over_bc + over_br))


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
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

    inputs = Inputs()
    counted = _counted(options, bench, masks)
    for problem, series, Br, Bc in counted:
        yield from _model(problem, series, Br, Bc)
    yield from bench.counted(counted, "counting on the emulator", partial(_count, inputs=inputs))

    if bench.machine is None:
        return
    for problem in problems:
        host = inputs(problem)
        gate = Gate(problem, *host)
        arrays = tuple(device.to_gpu(x) for x in host)
        for series, Br, Bc in bench.each(tiles, "timing"):
            yield _time(problem, series, Br, Bc, arrays, gate, bench.machine)


def _counted(
    options: Options, bench: Bench, masks: Sequence[bool]
) -> list[tuple[Problem, str, int, int]]:
    """What the emulator counts, as (problem of one head, series, Br, Bc): tiles that fit it."""
    sizes = [(SMALL_SEQLEN, SMALL_HEAD_DIM)]
    if options.complete:
        sizes.append((SEQLEN, HEAD_DIM))
    elif options.seqlens or options.head_dims:
        lengths = options.seqlens or (SMALL_SEQLEN,)
        sizes = [(N, d) for N in lengths for d in options.head_dims or (SMALL_HEAD_DIM,)]
    small = sweep(SMALL_SIZES[:2] if options.quick else SMALL_SIZES, SMALL_FIXED)
    large = sweep(SIZES[1:4] if options.quick else SIZES, FIXED)
    wanted = [one_head(N, d, mask) for N, d in sizes for mask in masks]
    fitting: list[tuple[Problem, str, int, int]] = []
    beyond: dict[str, None] = {}
    for problem in counts.countable(wanted, bench):
        for series, Br, Bc in small if problem.seqlen_q < SEQLEN else large:
            if _fits(problem, series, Br, Bc):
                fitting.append((problem, series, Br, Bc))
            else:
                beyond[f"{Br}x{Bc}, d={problem.head_dim}"] = None
    if beyond:
        bench.say(f"  not counted, beyond a block's shared memory: {'; '.join(beyond)}")
    return fitting


def _fits(problem: Problem, series: str, Br: int, Bc: int) -> bool:
    """Whether the emulated device has the shared memory for these tiles."""
    try:
        with device.using("emulator"):
            plan(series, problem, tiles=fa_numba.Tiles(Br=Br, Bc=Bc))
    except ValueError:
        return False
    return True


def _fields(problem: Problem, series: str, Br: int | None, Bc: int | None) -> dict[str, Any]:
    return {"experiment": NAME, "series": series, "Br": Br, "Bc": Bc, **row_fields(problem)}


def _model(problem: Problem, series: str, Br: int, Bc: int) -> Iterator[Row]:
    form = io_model.fa1 if series == FA1 else io_model.fa2
    accesses = form(problem, fa_numba.Tiles(Br=Br, Bc=Bc))
    fields = _fields(problem, series, Br, Bc)
    yield from counts.totals(accesses, machine=MODEL, source="model", **fields)


def _count(problem: Problem, series: str, Br: int, Bc: int, inputs: Inputs) -> Iterator[Row]:
    with fa_numba.count_accesses() as counted:
        call(series, problem, *inputs(problem), tiles=fa_numba.Tiles(Br=Br, Bc=Bc))()
    fields = _fields(problem, series, Br, Bc)
    yield from counts.totals(counted, machine=EMULATOR, source="counted", **fields)


def _time(
    problem: Problem, series: str, Br: int, Bc: int, arrays: tuple, gate: Gate, machine: str
) -> Row:
    def work() -> Any:
        tiles = fa_numba.Tiles(Br=Br, Bc=Bc)
        plan(series, problem, tiles=tiles)
        return time_call(call(series, problem, *arrays, tiles=tiles), gate)

    timing, failure = attempt(work)
    return Row(
        machine=machine,
        source="measured",
        metric="time",
        unit="ms",
        value=None if timing is None else timing.median,
        note=failure,
        **({} if timing is None else timing.spread),
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


def draw(rows: Sequence[Row]) -> Any:
    """Accesses in GB and runtime in ms over the block size; each problem has a row of panels."""
    from .lab import style

    large = [row for row in rows if row.batch == BATCH]
    problems = sorted({(row.seqlen_q, row.head_dim, row.causal) for row in large})
    if not problems:
        return None
    figure, axes = style.new(len(problems), 2, 1.0 + 3.8 * len(problems))
    for (N, d, mask), (left, right) in zip(problems, axes, strict=True):
        mine = [r for r in large if (r.seqlen_q, r.head_dim, r.causal) == (N, d, mask)]
        reference = published_rows() if (N, d, mask) == (SEQLEN, HEAD_DIM, False) else []
        gpu = {row.machine for row in mine if row.source == "measured"}
        setting = f"N={N}, d={d}{', causal' if mask else ''}"
        left.set_title(f"accesses (model), {setting}")
        right.set_title(f"runtime, {setting}" + ("" if gpu else ": ours not recorded yet"))
        _panel(left, mine, reference, "traffic", "loads + stores (GB)", style)
        _panel(right, mine, reference, "time", "ms", style)
        absent = sorted({max(row.Br or 0, row.Bc or 0) for row in mine if row.failed})
        if absent:
            right.annotate(
                f"not run at {', '.join(map(str, absent))}: reasons in the data file",
                (0.98, 0.95),
                xycoords="axes fraction",
                ha="right",
                fontsize=9,
            )
    counts.annotate(axes[0][0], rows, 0.88)
    shown = style.handles(axes)
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
    drawn: set[int] = set()
    for series, varied, ls, label in sweeps:
        other = "Br" if varied == "Bc" else "Bc"
        points: dict[int, float] = {}
        for row in rows:
            if row.series != series or getattr(row, other) != FIXED or row.failed:
                continue
            x = getattr(row, varied)
            if metric == "traffic" and row.unit == "elements" and row.source == "model":
                points[x] = points.get(x, 0) + row.number * io_model.ELEMENT_BYTES / 1e9
            elif metric == "time" and row.metric == "time":
                points[x] = row.number
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
    factor = 1e9 if metric == "traffic" else 1
    paper = {r.Bc: r.number / factor for r in reference if r.metric == metric and r.Bc is not None}
    if paper:
        drawn |= set(paper)
        ax.plot(
            list(paper),
            list(paper.values()),
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


def table(rows: Sequence[Row]) -> Table | None:
    """Accesses and runtime over the block size, the paper's beside ours."""
    paper = {(r.Bc, r.metric): r.value for r in published_rows()}
    here = [r for r in rows if (r.batch, *tables.sizes(r)) == (BATCH, SEQLEN, HEAD_DIM, False)]
    times = {(r.series, r.Br, r.Bc): r for r in here if r.metric == "time"}
    model: dict[tuple[str, int | None, int | None], float] = {}
    for r in here:
        if r.source == "model" and r.unit == "elements" and r.value is not None:
            tile = (r.series, r.Br, r.Bc)
            model[tile] = model.get(tile, 0) + r.value * io_model.ELEMENT_BYTES / 1e9
    if not model:
        return None
    problem = Problem(BATCH, HEADS, HEADS, SEQLEN, SEQLEN, HEAD_DIM)
    lines = []
    for size in SIZES:
        k_outer, q_outer = (FA1, FIXED, size), (FA2, size, FIXED)
        gb, ms = paper.get((size, "traffic")), paper.get((size, "time"))
        lines.append(
            [
                str(size),
                tables.MISSING if gb is None else f"{gb / 1e9:.2f}",
                f"{io_model.fa1_paper_gb(problem, size):.2f}",
                *(tables.number(model, tile, ".2f") for tile in (k_outer, q_outer)),
                tables.MISSING if ms is None else f"{ms:.1f}",
                *(
                    tables.cell(times.get(tile), lambda v: f"{v:.1f}")
                    for tile in (k_outer, q_outer)
                ),
            ]
        )
    header = [
        "block size",
        "paper, GB (2 B)",
        "its formula, GB (2 B)",
        "K/V outer over B_c, GB (4 B)",
        "Q outer over B_r, GB (4 B)",
        "paper, ms (A100, fp16)",
        "K/V outer, ms",
        "Q outer, ms",
    ]
    return Table(f"The other block size is {FIXED}.", tables.markdown(header, lines))
