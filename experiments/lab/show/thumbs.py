"""Small figures for the README: each shows one panel of an experiment, a third of the page wide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..measure.workloads import TOKENS
from ..record import EMULATOR, Row, select
from ..record.registry import Experiment
from . import style

SUFFIX = "_small"
WIDTH, HEIGHT = 3.4, 2.9  # inches; shown some 270 pixels wide


@dataclass(frozen=True)
class Thumb:
    """The content of a small figure: which rows it shows, and its texts.

    Parameters
    ----------
    title : str
        Title of the figure.
    series : mapping of str to str
        Maps the name of a series to its label.
    y : str
        Label of the y axis.
    fields : mapping
        Attributes of the rows to show, and their values, as for `record.select`.
    x : str, default "seqlen_q"
        Attribute of a row that gives x.
    unit : float, default 1.0
        Number by which the values are divided.
    log : bool, default True
        Whether the y axis is logarithmic.
    tokens : bool, default False
        Whether only problems with 16k tokens (batch times sequence length) are shown.
    """

    title: str
    series: Mapping[str, str]
    y: str
    fields: Mapping[str, Any]
    x: str = "seqlen_q"
    unit: float = 1.0
    log: bool = True
    tokens: bool = False

    def points(self, rows: Sequence[Row], series: str) -> list[tuple[int, float]]:
        """Return the points (x, y) of a series, sorted. Counts of the emulator are left out.

        Parameters
        ----------
        rows : sequence of Row
            Rows of the experiment.
        series : str
            Name of the series.

        Returns
        -------
        list of (int, float)
            The points.
        """
        return sorted(
            (getattr(row, self.x), row.number / self.unit)
            for row in select(rows, series=series, **self.fields)
            if row.machine != EMULATOR and (not self.tokens or row.batch * row.seqlen_q == TOKENS)
        )


ORDERS = {"standard-simt": "standard attention", "fa1-simt": "FA-1", "fa2-simt": "FA-2"}
PLAIN = {"causal": False, "pass_": "fwd"}
THUMBS = {
    "io_vs_seqlen": Thumb(
        "FA-2's DRAM bytes do not grow with N", ORDERS, "DRAM bytes (GB)", unit=1e9, tokens=True,
        fields={"source": "dram", "head_dim": 64, **PLAIN},
    ),
    "loop_order": Thumb(
        "At equal tiles K/V outer takes longer",
        {"fa1-mma": "FA-1, paper's grid", "fa1-mma-splits": "FA-1, full grid",
         "fa2-mma-fa1-tiles": "FA-2"},
        "time (ms)", tokens=True, fields={"metric": "time", "head_dim": 64, "heads_q": 32, **PLAIN},
    ),
    "speed_fp16": Thumb(
        "FA-2 (wgmma) keeps up with cuDNN",
        {"fa2-wgmma": "FA-2 (wgmma)", "torch-cudnn": "cuDNN", "fa2-mma": "FA-2 (mma)",
         "torch-fa2": "torch's FA-2"},
        "speed (TFLOP/s)", log=False, fields={"metric": "speed", "head_dim": 128, **PLAIN},
    ),
    "runtime_memory": Thumb(
        "Unfused attention needs N² memory",
        {"torch-unfused": "torch's unfused", "fa2-mma": "FA-2"}, "peak memory (GiB)", unit=1024,
        fields={"metric": "memory", "source": "measured", "pass_": "fwd+bwd", "place": "plain"},
    ),
    "numerics": Thumb(
        "Outliers cost standard attention digits",
        {"standard-mma": "standard", "fa2-mma": "FA-2"}, "relative error × 10 000", unit=1e-4,
        log=False, fields={"metric": "error", "dtype": "float16", "place": "outliers"},
    ),
    "decode": Thumb(
        "Key splits speed up one query",
        {"fa2-mma-splits": "FA-2, key splits", "torch-fa2": "torch's FA-2", "fa2-mma": "FA-2"},
        "K and V read (TB/s)", x="seqlen_k", log=False,
        fields={"metric": "bandwidth", "batch": 1, "heads_k": 32, "head_dim": 128, "seqlen_q": 1},
    ),
}  # fmt: skip


def figures(experiment: Experiment) -> dict[str, Callable[[Sequence[Row]], Any]]:
    """Return the further figures of an experiment, and its small figure for the README.

    Parameters
    ----------
    experiment : Experiment
        The module.

    Returns
    -------
    dict of str to callable
        Maps the name of a file to a function that takes rows and returns a figure.
    """
    name = getattr(experiment, "__name__", "").rpartition(".")[2]
    small = {name + SUFFIX: partial(draw, name)} if name in THUMBS else {}
    return {**getattr(experiment, "FIGURES", {}), **small}


def draw(experiment: str, rows: Sequence[Row]) -> Any:
    """Draw the small figure of an experiment.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    rows : sequence of Row
        Rows of the experiment.

    Returns
    -------
    Figure or None
        The figure. None if a series has no points.
    """
    thumb = THUMBS[experiment]
    lines = {series: thumb.points(rows, series) for series in thumb.series}
    if not all(lines.values()):
        return None
    figure, ((ax,),) = style.new(1, 1, HEIGHT, width=WIDTH)
    for series, points in lines.items():
        base = series.removesuffix("-fa1-tiles")
        look = {"color": style.COLOURS[base], "marker": style.MARKERS[base]}
        ax.plot(*zip(*points, strict=True), label=thumb.series[series], lw=2.4, **look)
    every = sorted({x for points in lines.values() for x, _ in points})
    name = "keys" if thumb.x == "seqlen_k" else "sequence length N"
    style.sizes(ax, every, name, 1 + len(every) // 5)
    if thumb.log:
        style.log(ax.yaxis)
    else:
        ax.set_ylim(bottom=0)
        ax.locator_params(axis="y", nbins=5)
    ax.set_ylabel(thumb.y)
    figure.suptitle(thumb.title, fontsize=12)
    figure.legend(loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=1.5)
    return figure
