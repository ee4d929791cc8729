"""A paper's speed figure drawn as the paper draws it, ours beside: grouped bars over N."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.measure import peers
from ..lab.measure.speeds import DTYPES, PASSES
from ..lab.record import Row, published
from ..lab.show import style

Curve = dict[int, float]


@dataclass(frozen=True)
class Bar:
    """A bar: a published `method`, hollow, or the faster `series` of ours; in `like`'s colour."""

    label: str
    like: str
    method: str = ""
    series: tuple[str, ...] = ()


# The bars of a paper's figures, each published one before that of ours that it is compared with;
# other libraries' are left to the paper.
BARS = {
    "fa2": (
        Bar("PyTorch, published", "torch-unfused", method="PyTorch"),
        Bar("torch unfused, here", "torch-unfused", series=("torch-unfused",)),
        Bar("FlashAttention, published", "fa1-mma", method="FlashAttention"),
        Bar("FA-1, ours, the faster grid", "fa1-mma", series=("fa1-mma", "fa1-mma-splits")),
        Bar("FlashAttention-2, published", "fa2-mma", method="FlashAttention-2"),
        Bar("FA-2, ours", "fa2-mma", series=("fa2-mma",)),
    ),
    "fa3": (
        Bar("FlashAttention-2, published", "torch-fa2", method="FA-2"),
        Bar("torch FA-2, here", "torch-fa2", series=("torch-fa2",)),
        Bar("cuDNN, published", "torch-cudnn", method="cuDNN"),
        Bar("cuDNN by torch, here", "torch-cudnn", series=("torch-cudnn",)),
        Bar("FlashAttention-3, published", "fa2-wgmma", method="FA-3"),
        Bar("FA-2 on wgmma, ours", "fa2-wgmma", series=("fa2-wgmma",)),
    ),
}
NAMES = {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3"}


def draw(paper: str, item: str, rows: Sequence[Row]) -> Any:
    """The figure `item` of a paper, a panel for each of its head dimensions and masks; None where
    no row is of it.
    """
    lines = published.lookup(paper=paper, item=item, metric="speed")
    pass_ = lines[0]["pass"]
    speeds = [r for r in rows if r.metric == "speed" and not r.failed and r.series != peers.MATMUL]
    mine = [r for r in speeds if r.pass_ == pass_]
    panels = sorted({(int(line["head_dim"]), line["causal"] == "true") for line in lines})
    panels = [at for at in panels if any((r.head_dim, r.causal) == at for r in mine)]
    if not panels:
        return None
    figure, axes = style.new(len(panels), 1, 1.3 + 2.5 * len(panels))
    fastest: list[str] = []
    for (d, causal), ax in zip(panels, axes[:, 0], strict=True):
        at = {"head_dim": str(d), "causal": str(causal).lower()}
        theirs = published.lookup(paper=paper, item=item, metric="speed", **at)
        here = [r for r in mine if (r.head_dim, r.causal) == (d, causal)]
        curves = {bar: _curve(bar, theirs, here) for bar in BARS[paper]}
        _groups(ax, {bar: curve for bar, curve in curves.items() if curve})
        ours = {bar: curve for bar, curve in curves.items() if bar.series}
        for N in sorted(set().union(*ours.values())):
            _, winner = max((curve.get(N, 0.0), bar.label) for bar, curve in ours.items())
            fastest.append(winner)
        ax.set(title=f"d={d}, {'causal' if causal else 'not causal'}", ylabel="TFLOP/s")
    gpu = lines[0]["hardware"].split("-")[0]
    dtype = DTYPES[mine[0].dtype]
    shown = style.handles(axes)
    ((first, times),) = Counter(fastest).most_common(1)
    message = f"{first.partition(',')[0]} is the fastest here at {times} of {len(fastest)} sizes"
    what = f"{NAMES[paper]}, {item}: {PASSES[pass_]}, {dtype}, 16k tokens"
    title = f"{message}\n{what}; hollow: published, {gpu}; filled: here"
    style.legend(figure, list(shown.values()), title)
    axes[-1, 0].set_xlabel("sequence length N")
    return figure


def _curve(bar: Bar, theirs: Sequence[Mapping[str, str]], here: Sequence[Row]) -> Curve:
    """N -> TFLOP/s of a bar in one panel; of several series the fastest."""
    if bar.method:
        return {int(x["seqlen"]): float(x["value"]) for x in theirs if x["method"] == bar.method}
    found: Curve = {}
    for row in here:
        if row.series in bar.series:
            found[row.seqlen_q] = max(row.number, found.get(row.seqlen_q, 0.0))
    return found


def _groups(ax: Any, curves: Mapping[Bar, Curve]) -> None:
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
