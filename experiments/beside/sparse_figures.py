"""Curves over the share of non-zero blocks, and how far they are from proportional to it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..lab.measure import counts
from ..lab.measure.series import LABELS
from ..lab.measure.speeds import DTYPES
from ..lab.record import PUBLISHED, Row
from ..lab.show import style

NO_MASK = "no mask"
Points = dict[int | None, float]


def place(share: int | None) -> str:
    """How the note of a row begins at this share in percent; None is the call without a mask."""
    return NO_MASK if share is None else f"{share} % of blocks"


def share_of(row: Row) -> int | None:
    return None if row.place == NO_MASK else int(row.place.split()[0])


def curve(rows: Sequence[Row], series: str, metrics: Sequence[str]) -> Points:
    """Share in percent (None: no mask) -> the sum of these metrics of one source and problem."""
    points: Points = {}
    for row in rows:
        if row.series == series and row.metric in metrics and row.value is not None:
            points[share_of(row)] = points.get(share_of(row), 0) + row.value
    return points


def relative(points: Points) -> Points:
    """A `curve` divided by its value without a mask; empty where that is missing."""
    dense = points.get(None)
    return {share: value / dense for share, value in points.items()} if dense else {}


def deviations(over: Mapping[int | None, float]) -> dict[int, float]:
    """Share -> how far a `relative` curve is above it: 0.03 is 3 % of the call without a mask."""
    return {share: value - share / 100 for share, value in over.items() if share is not None}


def draw(
    rows: Sequence[Row], paper: Sequence[Row], passes: Mapping[str, str], counted: Sequence[Row]
) -> Any:
    """Time, and its deviation from the diagonal, of each pass and problem; None without rows.
    `paper` are published rows, `counted` the emulator's and the model's.
    """
    panels = sorted(
        {(r.pass_, r.head_dim, r.causal, r.seqlen_q) for r in rows},
        key=lambda panel: (list(passes).index(panel[0]), panel[1:]),
    )
    if not panels:
        return None
    figure, axes = style.new(len(panels), 2, 1.1 + 3.1 * len(panels))
    for panel, (left, right) in zip(panels, axes, strict=True):
        pass_, d, mask, N = panel
        mine, theirs = (
            [r for r in of if (r.pass_, r.head_dim, r.causal, r.seqlen_q) == panel]
            for of in (rows, paper)
        )
        left.set_title(f"{passes[pass_]}, N={N}, d={d}{', causal' if mask else ''}")
        right.set_title("time over that without a mask, less the share")
        times = [r for r in mine if r.source == "measured"] + theirs
        model = [r for r in mine if r.source == "model"]
        _times(left, times)
        _deviations(right, times, model)
    shown = style.handles(axes)
    if shown:
        shown[""] = style.key("without a mask (large, hollow)", **_UNMASKED)
        title = "Time falls with the share of non-zero blocks; in fp16 few blocks leave some idle"
        checked = counts.said([r for r in counted if r.source in ("counted", "model")])
        title += f"\naccesses {checked}" if checked else ""
        style.legend(figure, list(shown.values()), title)
    return figure


_SERIES = {"fa1-simt": "float32", "fa2-simt": "float32", "fa1-mma": "float16", "fa2-mma": "float16"}
_UNMASKED: dict[str, Any] = {"color": "#444444", "ls": "", "marker": "o", "mfc": "none", "ms": 11}


def _look(series: str) -> dict[str, Any]:
    """Full marks and lines are fp32, dashes fp16; hollow marks are published."""
    look = {"color": style.COLOURS[series], "marker": style.MARKERS.get(series, "s")}
    if series == PUBLISHED:
        return look | {"label": "FA-1 paper, A100, fp16", "ls": "--", "mfc": "white"}
    dtype = _SERIES[series]
    dashes = "--" if dtype == "float16" else "-"
    return look | {"label": f"{LABELS[series]}, {DTYPES[dtype]}", "ls": dashes}


def _line(ax: Any, points: Mapping[int | None, float], **look: Any) -> None:
    """A line over the share; the call without a mask is an open marker at 100 %."""
    x = sorted(share for share in points if share is not None)
    if x:
        ax.plot(x, [points[share] for share in x], **look)
    if None in points:
        apart = {"ls": "", "mfc": "none", "ms": 11, "label": None}
        ax.plot([100], [points[None]], **look | apart)


def _times(ax: Any, times: Sequence[Row]) -> None:
    found = {series: curve(times, series, ("time",)) for series in (*_SERIES, PUBLISHED)}
    for series, points in found.items():
        _line(ax, points, **_look(series))
    if not any(found.values()):
        style.empty(ax, "not recorded yet")
        return
    style.log(ax.yaxis, 2)
    ax.set_ylabel("ms")
    _axes(ax)


def _deviations(ax: Any, times: Sequence[Row], model: Sequence[Row]) -> None:
    """0 is proportional to the share; in percent of the call without a mask."""
    found = {
        series: deviations(relative(curve(times, series, ("time",))))
        for series in (*_SERIES, PUBLISHED)
    }
    moved = {
        series: deviations(relative(curve(model, series, ("loads", "stores"))))
        for series in ("fa1-simt", "fa2-simt")
        if not any(found.values())  # accesses stand where no time does
    }
    for series, apart in moved.items():
        name = f"{LABELS[series]}: accesses (model)"
        look = {"color": style.COLOURS[series], "label": name, "ls": ":", "lw": 3}
        _line(ax, {share: 100 * by for share, by in apart.items()}, **look)
    for series, apart in found.items():
        _line(ax, {share: 100 * by for share, by in apart.items()}, **_look(series))
    if not any([*found.values(), *moved.values()]):
        style.empty(ax, "no call without a mask")
        return
    ax.axhline(0, color="#777777", lw=1, zorder=1)
    ax.set_ylabel("% of the call without a mask")
    _axes(ax)


def _axes(ax: Any) -> None:
    ax.set(xlim=(0, 105), xlabel="non-zero blocks (%)")
