"""A paper's speed figure together with our numbers: as bars, or as ratios if the GPUs differ."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.measure import peers
from ..lab.measure.speeds import DTYPES, PASSES
from ..lab.record import Row, published_numbers
from ..lab.show import style

Curve = dict[int, float]


@dataclass(frozen=True)
class Bar:
    """A bar of the figure, for a published method or for our series.

    Parameters
    ----------
    label : str
        Text in the legend.
    like : str
        Series whose colour the bar has.
    method : str, default ""
        Published method that the bar shows. Such a bar is hollow.
    series : tuple of str, default ()
        Our series. The bar shows the fastest of them.
    """

    label: str
    like: str
    method: str = ""
    series: tuple[str, ...] = ()


# The bars of a paper's figures. A published bar is followed by our bar with which it is compared.
# Methods of the paper without a counterpart are left out.
BARS = {
    "fa2": (
        Bar("PyTorch, published", "torch-unfused", method="PyTorch"),
        Bar("torch's unfused attention, measured", "torch-unfused", series=("torch-unfused",)),
        Bar("FlashAttention, published", "fa1-mma", method="FlashAttention"),
        Bar("FA-1 at its faster grid, measured", "fa1-mma", series=("fa1-mma", "fa1-mma-splits")),
        Bar("FlashAttention-2, published", "fa2-mma", method="FlashAttention-2"),
        Bar("FA-2 (Q outer), measured", "fa2-mma", series=("fa2-mma",)),
    ),
    "fa3": (
        Bar("FlashAttention-2, published", "torch-fa2", method="FA-2"),
        Bar("torch's FlashAttention-2, measured", "torch-fa2", series=("torch-fa2",)),
        Bar("cuDNN, published", "torch-cudnn", method="cuDNN"),
        Bar("cuDNN, measured", "torch-cudnn", series=("torch-cudnn",)),
        Bar("FlashAttention-3, published", "fa3", method="FA-3"),
        Bar("FA-2 (wgmma), measured", "fa2-wgmma", series=("fa2-wgmma",)),
    ),
}
NAMES = {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3"}
# Names of the kernels in figures of ratios, one for each pair of bars. The last kernel is divided
# by the others.
SHORT = {
    "fa2": ("PyTorch", "FA-1", "FA-2"),
    "fa3": ("FlashAttention-2", "cuDNN", "FA-2 (wgmma)"),
}


def draw(paper: str, item: str, rows: Sequence[Row]) -> Any:
    """Draw a figure of a paper with our numbers: a panel for each head dimension and mask.

    Parameters
    ----------
    paper : str
        "fa2" or "fa3".
    item : str
        The figure, such as "Fig. 5".
    rows : sequence of Row
        Our rows.

    Returns
    -------
    Figure or None
        None if no row belongs to the figure.
    """
    lines = published_numbers.lookup(paper=paper, item=item, metric="speed")
    pass_ = lines[0]["pass"]
    speeds = [r for r in rows if r.metric == "speed" and not r.failed and r.series != peers.MATMUL]
    mine = [r for r in speeds if r.pass_ == pass_]
    panels = sorted({(int(line["head_dim"]), line["causal"] == "true") for line in lines})
    panels = [at for at in panels if any((r.head_dim, r.causal) == at for r in mine)]
    if not panels:
        return None
    curves = {}
    for d, causal in panels:
        at = {"head_dim": str(d), "causal": str(causal).lower()}
        theirs = published_numbers.lookup(paper=paper, item=item, metric="speed", **at)
        here = [r for r in mine if (r.head_dim, r.causal) == (d, causal)]
        every = {bar: _curve(bar, theirs, here) for bar in BARS[paper]}
        curves[f"d={d}, {'causal' if causal else 'not causal'}"] = every
    gpu = lines[0]["hardware"].split("-")[0]
    what = f"{NAMES[paper]}, {item}: {PASSES[pass_]}, {DTYPES[mine[0].dtype]}, 16k tokens"
    if any(gpu.lower() in (r.machine or "").split("-") for r in mine):
        return _bars(paper, curves, f"{what}; hollow: published, {gpu}")
    return _ratios(paper, curves, gpu, what)


# Title of a panel -> its bars.
Panels = Mapping[str, Mapping[Bar, Curve]]


def _over(over: Curve, under: Curve) -> Curve:
    """Return the curve `over` divided by the curve `under`, at the sequence lengths of both."""
    return {N: value / under[N] for N, value in sorted(over.items()) if N in under}


def _bars(paper: str, panels: Panels, what: str) -> Any:
    """Draw the figure with a bar for each speed. This is used if our GPU is the paper's GPU.

    `panels` maps the title of a panel to its curves. `what` is the line below the title.
    """
    figure, axes = style.new(len(panels), 1, 1.3 + 2.5 * len(panels))
    *_, theirs, ours = BARS[paper]
    found: list[float] = []
    for (title, curves), ax in zip(panels.items(), axes[:, 0], strict=True):
        _groups(ax, {bar: curve for bar, curve in curves.items() if curve})
        found += _over(curves[ours], curves[theirs]).values()
        ax.set(title=title, ylabel="speed (TFLOP/s)")
    message = f"Speeds of {NAMES[paper]}'s {what.partition(', ')[2].partition(':')[0]}"
    if found:
        whose = "the" if paper == "fa2" else f"{NAMES[paper]}'s"
        many = f"{statistics.median(found):.2f} times {whose} published speed"
        message = f"Our {SHORT[paper][-1]} reaches {many} (median)"
    style.legend(figure, list(style.handles(axes).values()), f"{message}\n{what}")
    axes[-1, 0].set_xlabel("sequence length N (tokens)")
    return figure


def _ratios(paper: str, panels: Panels, gpu: str, what: str) -> Any:
    """Draw ratios of speeds as lines. This is used if our GPU is not the paper's GPU.

    For each paper, the constant SHORT lists three kernels. The speed of the last kernel is divided
    by the speed of each of the other kernels. One line shows the published ratios, and the other
    line shows our ratios. `panels` maps the title of a panel to its curves. `gpu` is the paper's
    GPU. `what` is the line below the title.
    """
    *names, last = SHORT[paper]
    theirs, ours = BARS[paper][::2], BARS[paper][1::2]
    looks = {
        f"published, {gpu}": (theirs, style.COLOURS["published"], {"ls": "--", "mfc": "white"}),
        "measured here": (ours, style.COLOURS[ours[-1].like], {}),
    }
    figure, axes = style.new(len(names), len(panels), 1.4 + 2.3 * len(names), sharey="row")
    found: dict[str, list[float]] = {}
    for at, (name, across) in enumerate(zip(names, axes[::-1], strict=True)):
        for (title, curves), ax in zip(panels.items(), across, strict=True):
            for label, (bars, colour, look) in looks.items():
                points = _over(curves[bars[-1]], curves[bars[at]])
                style.line(ax, points, color=colour, marker="o", label=label, **look)
                if bars is ours:
                    found.setdefault(name, []).extend(points.values())
            ax.axhline(1, color="#555555", lw=0.8, zorder=1)
            lengths = {N for bar in ours for N in curves[bar]}
            style.sizes(ax, sorted(lengths), "N (tokens)")
            ax.set_title(title)
        across[0].set(ylabel=f"{last} / {name}\n(speed ratio)", ylim=(0, None))
        across[0].locator_params(axis="y", nbins=5)
    message = f"{last} over other kernels, published and measured"
    what += "; FA-1 here at its faster grid" if paper == "fa2" else ""
    if ratios := found.get(names[-1]):
        other = "our FA-1" if paper == "fa2" else names[-1]
        message = f"Our {last} is {statistics.median(ratios):.1f} times as fast as {other} (median)"
    style.legend(figure, list(style.handles(axes).values()), f"{message}\n{what}")
    return figure


def _curve(bar: Bar, theirs: Sequence[Mapping[str, str]], here: Sequence[Row]) -> Curve:
    """Return the speeds that a bar shows in one panel, as {N: TFLOP/s}.

    If the bar is for a published method, the speeds are from `theirs`: the lines of published.csv
    for the panel. If the bar is for our series, the speeds are from `here`: our rows for the panel.
    For several series, the largest speed at each N is returned.
    """
    if bar.method:
        return {int(x["seqlen"]): float(x["value"]) for x in theirs if x["method"] == bar.method}
    found: Curve = {}
    for row in here:
        if row.series in bar.series:
            found[row.seqlen_q] = max(row.number, found.get(row.seqlen_q, 0.0))
    return found


def _groups(ax: Any, curves: Mapping[Bar, Curve]) -> None:
    """Draw the bars of a panel, with one group of bars for each sequence length."""
    lengths = sorted({N for bar, curve in curves.items() if bar.series for N in curve})
    width = 0.86 / len(curves)
    for n, (bar, curve) in enumerate(curves.items()):
        x = [at - 0.43 + (n + 0.5) * width for at, N in enumerate(lengths) if N in curve]
        y = [curve[N] for N in lengths if N in curve]
        colour = style.COLOURS[bar.like]
        look = {"facecolor": "white" if bar.method else colour, "edgecolor": colour}
        ax.bar(x, y, 0.9 * width, linewidth=1.0, label=bar.label, **look)
        for at, value in zip(x, y, strict=True):
            ax.text(at, value, f" {value:.0f}", rotation=90, ha="center", va="bottom", fontsize=7)
    ax.set_xticks(range(len(lengths)), [style.short(N) for N in lengths])
    ax.set(
        xlim=(-0.5, len(lengths) - 0.5),
        ylim=(None, 1.16 * max(value for curve in curves.values() for value in curve.values())),
    )
    ax.grid(False, axis="x")
