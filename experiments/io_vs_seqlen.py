"""Shows accesses over the sequence length, for standard attention and both loop orders.

The closed forms go to N=64k, and the counts of the emulator go to N=1024. The figure also has
published bounds. On a GPU with Nsight Compute, the L2 and DRAM bytes are measured in FA-2's
setting.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab.measure import counts, scaling
from .lab.measure.scaling import KINDS, Setting
from .lab.measure.series import LABELS, SERIES, columns, plan
from .lab.measure.workloads import HEAD_DIMS, SEQLENS, Inputs, fa2_setting, one_head
from .lab.record import MODEL, Bench, Options, Row, nested, select
from .lab.show import style, tables

NAME = "io_vs_seqlen"

MODEL_SEQLENS = tuple(1 << n for n in range(5, 17))
COUNTED_SEQLENS = (32, 64, 128, 256, 512, 1024)
BOUNDS = {
    "theta-standard": lambda problem, M: io_model.theta_standard(problem),
    "theta-flash": io_model.theta_flash,
    "saha-ye": io_model.saha_ye,
}
WIDTHS = {"standard-simt": 1.8, "fa1-simt": 3.8, "fa2-simt": 1.8}
ORDER = {"fa1-simt": 2.0, "standard-simt": 2.1, "fa2-simt": 2.2}
# Bound -> (the series whose colour the bound has, label). Saha and Ye's bound has no line: it
# equals FA-1's bound for M >= d^2, which holds for all head dimensions here.
BOUND_STYLES = {
    "theta-standard": ("standard-simt", "bound $Nd+N^2$"),
    "theta-flash": ("fa1-simt", "bound $N^2d^2/M$, {M}"),
}


def at(problem: Problem) -> list[Setting]:
    """Return one call per series for a problem, with the tiles of the series' plan."""
    tiles = {series: plan(series, problem).tiles for series in SERIES}
    return [Setting(series, problem, of.Br, of.Bc) for series, of in tiles.items()]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield accesses, both computed by closed forms and counted on the emulator.

    On a GPU, also yield L2 and DRAM bytes.
    """
    lengths = MODEL_SEQLENS[: 6 if options.quick else None]
    cases = options.grid(one_head, lengths, HEAD_DIMS)
    for problem in bench.track(cases, "closed forms"):
        yield from _model(problem)

    lengths = COUNTED_SEQLENS[: 2 if options.quick else None]
    cases = counts.countable(options.grid(one_head, lengths, HEAD_DIMS), bench)
    with device.using("emulator"):
        settings = [(setting,) for problem in cases for setting in at(problem)]
    count = partial(scaling.count, NAME, inputs=Inputs())  # _model yields the closed forms
    yield from bench.counted(settings, "counting on the emulator", count)

    if bench.machine is not None:
        lengths = SEQLENS[: 2 if options.quick else None]
        cases = options.grid(fa2_setting, lengths, HEAD_DIMS)
        yield from scaling.hardware(NAME, [s for problem in cases for s in at(problem)], bench)


def _model(problem: Problem) -> Iterator[Row]:
    """Yield the accesses of each series by closed forms, and the published bounds.

    The tiles are planned for the emulated device, so that the numbers are equal on every machine.
    """
    with device.using("emulator"):
        M = device.shared_bytes_limit() // io_model.ELEMENT_BYTES
        for series in SERIES:  # the plan says whether a row of S fits into shared memory
            made = plan(series, problem)
            common = columns(NAME, series, problem, MODEL, made.tiles)
            yield from counts.totals(made.accesses, **common)
    for series, bound in BOUNDS.items():
        note = "" if series == "theta-standard" else f"M={M}"
        common = columns(NAME, series, problem, MODEL, note=note)
        value = float(bound(problem, M))
        yield Row(metric="accesses", unit="elements", value=value, **common)


ABOUT = "fp32, CUDA cores. Right: 16k tokens, hidden dimension 2048."
# The line style of each source. Bounds have a line style of their own, without marks.
LOOKS = {
    "model": {},
    "counted": {"ls": ""},
    "l2": {"ls": "", "marker": "x"},
    "dram": {"ls": "--", "mfc": "white"},
}
_BOUND: dict[str, Any] = {"ls": ":", "lw": 1.4}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the accesses over the sequence length. Return None without rows."""
    rows = [row for row in rows if not row.failed]
    panels = sorted({(row.causal, row.head_dim) for row in rows})
    if not panels:
        return None
    figure, axes = style.new(len(panels), 2, 0.9 + 3.4 * len(panels))
    for (left, right), (mask, d) in zip(axes, panels, strict=True):
        mine = [row for row in rows if (row.causal, row.head_dim) == (mask, d)]
        masked = ", causal" if mask else ""
        left.set_title(f"accesses of one head, d={d}{masked}")
        right.set_title(f"bytes of a forward call, d={d}{masked}")
        _panel(left, select(mine, unit="elements"), ("model", "counted"))
        for series, (like, _) in BOUND_STYLES.items():
            points = _over_n(select(mine, series=series))
            style.line(left, points, color=style.COLOURS[like], **_BOUND)
        left.set_ylabel("loads + stores (elements)")
        _panel(right, select(mine, metric="traffic"), ("model", "l2", "dram"))
        style.byte_axis(right.yaxis)
        right.set_ylabel("bytes moved")
    notes = {row.series: row.note for row in rows}
    drawn = {row.series for row in rows}
    # Bounds have the source "model" too, but get legend entries of their own.
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
    style.legend(figure, handles, *_message(rows))
    return figure


def _message(rows: Sequence[Row]) -> tuple[str, int, str]:
    """Return the title, the number of columns of the legend, and the lines below the title."""
    at = {"source": "dram", "metric": "traffic", "causal": False}
    grown: dict[bool, list[float]] = {}
    for series, by_d in nested(rows, "series", "head_dim", "seqlen_q", **at).items():
        for of in by_d.values():
            low, high = min(of), max(of)
            grown.setdefault(series == "fa2-simt", []).append(of[high] / of[low])
    if len(grown) < 2:
        return "Accesses grow with N² in both orders", 3, ABOUT
    lengths = f"From N={style.short(low)} to {style.short(high)}"
    title = f"{lengths}, FA-2's DRAM bytes grow at most {max(grown[True]):.1f} times"
    about = (
        f"DRAM bytes of FA-1 and standard attention grow {tables.between(grown[False])} times; "
        f"accesses of one head grow with N² in all three.\n{ABOUT}"
    )
    return title, 3, about


def _panel(ax: Any, rows: Sequence[Row], sources: Sequence[str]) -> None:
    if not rows:
        style.empty(ax, "nothing recorded yet")
        return
    for series in SERIES:
        for source in sources:
            points = _over_n(select(rows, series=series, source=source))
            style.line(ax, points, **_look(series, source))
    lengths = sorted({row.seqlen_q for row in rows})
    style.sizes(ax, lengths[::2] if len(lengths) > 7 else lengths, "sequence length N (tokens)")
    ax.set(xlim=(None, max(lengths) * 1.2), yscale="log")


def _over_n(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Return the points of a line over the sequence length N, as a sorted list of (N, value).

    If there are two rows for an N, with loads and with stores, the value is their sum. For bytes,
    there is only one row for each N.
    """
    totals: dict[int, float] = {}
    for row in rows:
        totals[row.seqlen_q] = totals.get(row.seqlen_q, 0) + row.number
    return sorted(totals.items())


def _look(series: str, source: str) -> dict[str, Any]:
    """Return the colour, width and marker of the line for a series and a source.

    FA-1's line is broader and behind the other lines, so that it stays visible.
    """
    look = {"color": style.COLOURS[series], "zorder": ORDER[series], "lw": WIDTHS[series]}
    if source != "model":
        look |= {"marker": style.MARKERS[series], "ms": 1.6 * WIDTHS[series] + 3, "lw": 1.4}
    return look | LOOKS[source]


# The measured sequence lengths that the page shows.
SHOWN_SEQLENS = (512, 1024, 4096, 16384)


_KINDS = ("accessed, GB", "L2, GB", "DRAM, GB")


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the bytes of a forward call, or None without rows."""
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
    header += [f"{LABELS[s]}, {kind}" for s in SERIES for kind in _KINDS]
    caption = (
        "The table of bytes over N contains the bytes of a forward call in fp32 with 16k tokens "
        "and hidden dimension 2048. The columns *accessed* contain the bytes that the kernels "
        "load and store."
    )
    return tables.of(caption, header, lines)
