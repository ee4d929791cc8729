"""Global-memory accesses over the sequence length, for standard attention and both loop orders.

Closed form to 64k, counted on the emulator to N=1024, the published bounds, and on a GPU with
Nsight Compute the L2 and DRAM bytes in FA-2's setting.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fa_numba
from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab.measure import counters, counts
from .lab.measure.scaling import KINDS
from .lab.measure.series import LABELS, SERIES, call, columns, plan
from .lab.measure.timing import attempt
from .lab.measure.workloads import HEAD_DIMS, SEQLENS, Inputs, fa2_setting, one_head
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, select
from .lab.show import style, tables

NAME = "io_vs_seqlen"

MODEL_SEQLENS = tuple(1 << n for n in range(5, 17))
COUNTED_SEQLENS = (32, 64, 128, 256, 512, 1024)  # minutes on the emulator beyond
BOUNDS = {
    "theta-standard": lambda problem, M: io_model.theta_standard(problem),
    "theta-flash": io_model.theta_flash,
    "saha-ye": io_model.saha_ye,
}
WIDTHS = {"standard-simt": 1.8, "fa1-simt": 3.8, "fa2-simt": 1.8}
ORDER = {"fa1-simt": 2.0, "standard-simt": 2.1, "fa2-simt": 2.2}
# Drawn like the algorithm they bound. Saha and Ye's bound is FA-1's wherever M >= d^2, as it is
# for every head dimension here, so it has rows but no line.
BOUND_STYLES = {
    "theta-standard": ("standard-simt", "bound $Nd+N^2$"),
    "theta-flash": ("fa1-simt", "bound $N^2d^2/M$, {M}"),
}


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    lengths = MODEL_SEQLENS[: 6 if options.quick else None]
    cases = options.grid(one_head, lengths, HEAD_DIMS)
    for problem in bench.track(cases, "closed forms"):
        yield from _model(problem)

    inputs = Inputs()
    cases = _countable(options, bench)
    work = [(series, problem) for problem in cases for series in SERIES]
    yield from bench.counted(work, "counting on the emulator", partial(_count, inputs=inputs))

    if bench.machine is not None:
        lengths = SEQLENS[: 2 if options.quick else None]
        yield from _hardware(options.grid(fa2_setting, lengths, HEAD_DIMS), bench)


def _countable(options: Options, bench: Bench) -> list[Problem]:
    longest = max(COUNTED_SEQLENS)
    beyond = [N for N in options.seqlens or () if N > longest]
    if beyond:
        bench.say(
            f"  not counted: N={', '.join(map(str, beyond))}; beyond {longest} the emulator "
            "takes minutes"
        )
    every = options.grid(one_head, COUNTED_SEQLENS[: 2 if options.quick else None], HEAD_DIMS)
    return [problem for problem in every if problem.seqlen_q <= longest]


def _model(problem: Problem) -> list[Row]:
    """Closed forms at the emulated device's tiles, so that they are the same on every machine."""
    rows: list[Row] = []
    with device.using("emulator"):
        M = device.shared_bytes_limit() // io_model.ELEMENT_BYTES
        for series in SERIES:
            planned = plan(series, problem)
            common = columns(NAME, series, problem, MODEL, planned.tiles)
            rows += counts.totals(planned.accesses, **common)
    for series, bound in BOUNDS.items():
        note = "" if series == "theta-standard" else f"M={M}"
        common = columns(NAME, series, problem, MODEL, note=note)
        value = float(bound(problem, M))
        rows.append(Row(metric="accesses", unit="elements", value=value, **common))
    return rows


def _count(series: str, problem: Problem, inputs: Inputs) -> Iterator[Row]:
    with fa_numba.count_accesses() as counted:
        tiles = plan(series, problem).tiles
        call(series, problem, *inputs(problem))()
    yield from counts.totals(counted, **columns(NAME, series, problem, EMULATOR, tiles))


def _hardware(cases: Sequence[Problem], bench: Bench) -> Iterator[Row]:
    work = [(series, problem) for problem in cases for series in SERIES]
    wanted = [counters.Case.of(SERIES[series], problem) for series, problem in work]
    results = counters.count_or_say(wanted, counters.TRAFFIC, bench.say)
    if results is None:
        return
    for (series, problem), result in zip(work, results, strict=True):
        planned, failure = attempt(plan, series, problem)
        tiles = None if planned is None else planned.tiles
        common = columns(NAME, series, problem, bench.machine, tiles)
        yield from counters.traffic(failure or result, planned, **common)


# What is drawn of a source, one look each; bounds have another, without marks.
LOOKS = {
    "model": {},
    "counted": {"ls": ""},
    "l2": {"ls": "", "marker": "x"},
    "dram": {"ls": "--", "mfc": "white"},
}
_BOUND = {"ls": ":", "lw": 1.4}


def draw(rows: Sequence[Row]) -> Any:
    rows = [row for row in rows if not row.failed]
    panels = sorted({(row.causal, row.head_dim) for row in rows})
    if not panels:
        return None
    figure, axes = style.new(len(panels), 2, 0.9 + 3.4 * len(panels))
    for (left, right), (mask, d) in zip(axes, panels, strict=True):
        mine = [row for row in rows if (row.causal, row.head_dim) == (mask, d)]
        masked = ", causal" if mask else ""
        left.set_title(f"accesses of one head, fp32, d={d}{masked}")
        right.set_title(f"bytes moved, 16k tokens, hidden 2048, d={d}{masked}")
        _accesses(left, [row for row in mine if row.unit == "elements"])
        _bytes(right, [row for row in mine if row.metric == "traffic"])
    notes = {row.series: row.note for row in rows}
    drawn = {row.series for row in rows}
    # The bounds are rows of the model too, but dotted lines of their own.
    sources = {row.source for row in rows if row.series in SERIES}
    colours = {s: style.COLOURS[s] for s in SERIES if s in drawn}
    handles = [
        *(style.key(LABELS[s], color=colour, lw=WIDTHS[s]) for s, colour in colours.items()),
        *(
            style.key(KINDS[source], **{"marker": "o", "lw": 1.4, **look} if look else {})
            for source, look in LOOKS.items()
            if source in sources
        ),
        *(
            style.key(label.format(M=notes[series]), color=style.COLOURS[like], **_BOUND)
            for series, (like, label) in BOUND_STYLES.items()
            if series in notes
        ),
    ]
    style.legend(figure, handles, _message(rows))
    return figure


def _message(rows: Sequence[Row]) -> str:
    grown: dict[str, list[float]] = {}
    for series in SERIES:
        for d in {row.head_dim for row in rows}:
            points = _bytes_over_n(rows, series, "dram", d)
            if len(points) > 1:
                shortest, longest = points[0], points[-1]
                grown.setdefault(series, []).append(longest[1] / shortest[1])
    if "fa2-simt" not in grown or len(grown) < 2:
        return "Accesses grow with N² in both orders"
    others = tables.between([x for s, found in grown.items() if s != "fa2-simt" for x in found])
    own = tables.between(grown["fa2-simt"])
    lengths = f"from N={style.short(shortest[0])} to {style.short(longest[0])}"
    return (
        "A head's accesses grow with N² in both orders; FA-2's DRAM bytes hardly grow:\n"
        f"{lengths} {own} times in a call of as many tokens, the others' {others} times"
    )


def _accesses(ax: Any, rows: Sequence[Row]) -> None:
    if not rows:
        style.empty(ax, "no counts")
        return
    for series in SERIES:
        for source in ("model", "counted"):
            points = _per_head(r for r in rows if (r.series, r.source) == (series, source))
            ax.plot(*style.xy(points), **_look(series, source))
    for series, (like, _) in BOUND_STYLES.items():
        points = _per_head(r for r in rows if r.series == series)
        ax.plot(*style.xy(points), color=style.COLOURS[like], **_BOUND)
    lengths = sorted({row.seqlen_q for row in rows})
    style.sizes(ax, lengths[::2] if len(lengths) > 7 else lengths, "sequence length N")
    ax.set(xlim=(None, max(lengths) * 1.2), yscale="log", ylabel="loads + stores (elements)")


def _bytes(ax: Any, rows: Sequence[Row]) -> None:
    if not rows:
        style.empty(ax, "no hardware counters\nrecorded yet")
        return
    for series in SERIES:
        for source in ("model", "l2", "dram"):
            points = _bytes_over_n(rows, series, source)
            ax.plot(*style.xy(points), **_look(series, source))
    style.sizes(ax, sorted({row.seqlen_q for row in rows}), "sequence length N")
    ax.set_yscale("log")
    style.byte_axis(ax.yaxis)
    ax.set_ylabel("bytes of one forward call")


def _bytes_over_n(
    rows: Sequence[Row], series: str, source: str, d: int | None = None
) -> list[tuple[int, float]]:
    of = {} if d is None else {"head_dim": d, "causal": False}
    found = select(rows, series=series, source=source, metric="traffic", **of)
    return sorted((row.seqlen_q, row.number) for row in found)


def _look(series: str, source: str) -> dict[str, Any]:
    """FA-1's line lies beneath the others and is broader, so that it is never hidden."""
    look = {"color": style.COLOURS[series], "zorder": ORDER[series], "lw": WIDTHS[series]}
    if source != "model":
        look |= {"marker": style.MARKERS[series], "ms": 1.6 * WIDTHS[series] + 3, "lw": 1.4}
    return look | LOOKS[source]


def _per_head(rows: Any) -> list[tuple[int, float]]:
    """Loads and stores added up, for one batch entry and head, over N."""
    totals: dict[int, float] = {}
    for row in rows:
        share = row.value / (row.batch * row.heads_q)
        totals[row.seqlen_q] = totals.get(row.seqlen_q, 0) + share
    return sorted(totals.items())


# Of the lengths measured, those that the page shows.
SHOWN_SEQLENS = (512, 1024, 4096, 16384)


def table(rows: Sequence[Row]) -> tables.Table | None:
    found = {
        (r.head_dim, r.seqlen_q, r.series, r.source): r
        for r in rows
        if r.metric == "traffic" and not r.causal
    }
    sizes = sorted({key[:2] for key in found if key[1] in SHOWN_SEQLENS})
    if not sizes:
        return None
    sources = ("model", "l2", "dram")
    lines = []
    for d, N in sizes:
        cells = [found.get((d, N, series, source)) for series in SERIES for source in sources]
        numbers = [tables.cell(row, lambda v: f"{v / 1e9:.3g}") for row in cells]
        lines.append([str(d), str(N), *numbers])
    header = ["d", "N"]
    header += [f"{LABELS[s]}, {kind}" for s in SERIES for kind in ("accessed", "L2", "DRAM")]
    caption = "Forward, fp32, 16k tokens, hidden dimension 2048; GB of 10^9 bytes."
    return tables.of(caption, header, lines)
