"""The common look of all figures. Equal figures are saved as files with equal bytes.

matplotlib is imported only when something is drawn, so that measuring works without it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..measure.of_series import OfSeries
from ..record import write_if_changed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Mostly the Okabe-Ito colours, which people with any colour vision can tell apart. An algorithm has
# the same colour and marker on every unit, unless the unit defines other ones (`Unit.looks`).
_COLOURS = {
    "standard-simt": "#D55E00",
    "fa1-simt": "#0072B2",
    "fa1-simt-splits": "#56B4E9",
    "fa1-simt-keys": "#00456B",
    "fa2-simt": "#009E73",
    "fa2-simt-fa1-tiles": "#66C5AB",
    "fa2-simt-one-block": "#A9DECF",
    "fa2-simt-deterministic": "#003B2B",
    "torch-efficient": "#8B5A2B",
    "torch-fa2": "#000000",
    "torch-cudnn": "#E69F00",
    "cudnn": "#E69F00",
    "torch-unfused": "#BABABA",
    "torch-unfused-masked": "#7F7F7F",
    "torch-flex": "#0072B2",
    "fa4": "#B22222",
    "fa1-auto": "#3A6EA5",
    "fa2-auto": "#6000E6",
    "fa2-auto-splits": "#B497F5",
    "published": "#CC79A7",
    "model": "#666666",
    # These series are only published: no kernel of them is run here.
    "xformers": "#A05195",
    "triton": "#6B6ECF",
    "fa3": "#B22222",
}
_MARKERS = {
    "standard-simt": "s",
    "fa1-simt": "o",
    "fa1-simt-splits": "D",
    "fa2-simt": "^",
    "fa2-simt-deterministic": ">",
    "torch-efficient": "v",
    "torch-fa2": "v",
    "torch-cudnn": "X",
    "cudnn": "X",
    "torch-unfused": "P",
    "torch-unfused-masked": "d",
    "torch-flex": "D",
    "fa4": "p",
    "fa2-auto": "h",
    "fa2-auto-splits": "H",
}
COLOURS = OfSeries(
    _COLOURS, lambda unit, rest, of_first: unit.looks[rest][0] if rest in unit.looks else of_first
)
MARKERS = OfSeries(
    _MARKERS, lambda unit, rest, of_first: unit.looks[rest][1] if rest in unit.looks else of_first
)
QUIET = "#555555"  # explanations
WIDTH = 10.0  # inches; a README shows it about 800 pixels wide
PAD = 0.06  # inches of empty border
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.labelsize": 11,
    "legend.fontsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "fa_numba",
}


def new(
    rows: int, columns: int, height: float, width: float = WIDTH, **options: Any
) -> tuple[Figure, Any]:
    """Return a new figure and its grid of axes.

    Parameters
    ----------
    rows, columns : int
        Shape of the grid.
    height : float
        Height in inches.
    width : float, default 10
        Width in inches.
    **options
        Options of matplotlib's `Figure.subplots`, such as ``sharey``.

    Returns
    -------
    figure : Figure
        The figure.
    axes : ndarray of Axes, shape (rows, columns)
        The panels.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Figures must not depend on the user's matplotlibrc.
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def empty(ax: Any, text: str) -> None:
    """Write a text on a panel that has no data, and remove its axes.

    Parameters
    ----------
    ax : Axes
        The panel.
    text : str
        The text.
    """
    ax.text(0.5, 0.5, text, ha="center", transform=ax.transAxes)
    ax.set_axis_off()


def patch(label: str, **look: Any) -> Any:
    """Return a coloured box for use as an entry of a legend.

    Parameters
    ----------
    label : str
        Text of the entry.
    **look
        Options of matplotlib's `Patch`, such as ``color``.

    Returns
    -------
    Patch
        The box.
    """
    from matplotlib.patches import Patch

    return Patch(label=label, **look)


def key(label: str, **look: Any) -> Any:
    """Return a line for use as an entry of a legend.

    Parameters
    ----------
    label : str
        Text of the entry.
    **look
        Options of matplotlib's `Line2D`, such as ``ls`` and ``color``.

    Returns
    -------
    Line2D
        The line.
    """
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": "#444444", **look})


def handles(axes: Any) -> dict[str, Any]:
    """Return the legend entries of several panels. Each label occurs once.

    Parameters
    ----------
    axes : Axes or ndarray of Axes
        The panels.

    Returns
    -------
    dict of str to artist
        Maps a label to the first artist that has this label.
    """
    found: dict[str, Any] = {}
    for ax in np.atleast_1d(axes).flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def line(ax: Any, points: Mapping[Any, Any] | Iterable[Any], like: str = "", **look: Any) -> None:
    """Draw points that are connected by a line. Draw nothing if there are no points.

    Parameters
    ----------
    ax : Axes
        The panel.
    points : mapping or iterable of pairs
        Maps x to y, or contains pairs (x, y).
    like : str, default ""
        Name of a series. The line gets the colour and the marker of this series.
    **look
        Options of matplotlib's `Axes.plot`.
    """
    pairs = list(points.items() if isinstance(points, Mapping) else points)
    own = {"color": COLOURS[like], "marker": MARKERS.of(like)} if like else {}
    if pairs:
        ax.plot(*zip(*pairs, strict=True), **own | look)


def bars(ax: Any, shown: Sequence[tuple[str, float, str, str]]) -> None:
    """Draw horizontal bars. The first bar is at the top.

    Parameters
    ----------
    ax : Axes
        The panel.
    shown : sequence of (str, float, str, str)
        For each bar: its label at the axis, its length, its colour, and the text at its end.
    """
    for at, (_, value, color, text) in enumerate(shown):
        ax.barh(at, value, height=0.62, color=color)
        ax.text(value, at, f" {text}", va="center", fontsize=9.5)
    ax.set_yticks(range(len(shown)), [name for name, *_ in shown])
    longest = max(value for _, value, *_ in shown)
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.36 * longest or 1.0))
    ax.grid(False, axis="y")


def sizes(ax: Any, values: Sequence[int], name: str, every: int = 1) -> None:
    """Make the x axis logarithmic (base 2), with ticks at the given sizes. 1024 is written "1k".

    Parameters
    ----------
    ax : Axes
        The panel.
    values : sequence of int
        The sizes, in order.
    name : str
        Label of the axis.
    every : int, default 1
        Number n: a tick is drawn at every n-th size.
    """
    from matplotlib.ticker import NullLocator

    ticks = list(values)[::every]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [short(value) for value in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    if values:
        ax.set_xlim(min(values) / 1.2, max(values) * 1.2)
    ax.set_xlabel(name)


def legend(
    figure: Figure, handles: Sequence[Any], title: str, ncols: int = 3, about: str = ""
) -> None:
    """Put a title and a legend at the top of a figure, with smaller lines between them.

    Parameters
    ----------
    figure : Figure
        The figure.
    handles : sequence of artist
        Entries of the legend.
    title : str
        The title.
    ncols : int, default 3
        Number of columns of the legend.
    about : str, default ""
        Lines below the title, in a smaller font.
    """
    from matplotlib.offsetbox import TextArea

    look: dict[str, Any] = {"title_fontsize": 12, "columnspacing": 1.4, "ncols": ncols}
    found: Any = figure.legend(handles=handles, loc="outside upper center", title=title, **look)
    found.get_title().set_multialignment("center")
    if about:
        small = {"fontsize": 9.5, "color": QUIET, "multialignment": "center"}
        area = TextArea(about, textprops=small, multilinebaseline=True)
        area.set_figure(figure)
        found._legend_box.get_children().insert(1, area)


def short(value: float) -> str:
    """Return a number as text. Multiples of 1024 are written as "1k" or "64k".

    Parameters
    ----------
    value : float
        The number.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> short(65536), short(1000)
    ('64k', '1000')
    """
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def plain_ticks(axis: Any, label: Any = lambda value, _position: f"{value:g}") -> None:
    """Label the major ticks of an axis, and remove the labels of minor ticks.

    Parameters
    ----------
    axis : Axis
        The x or y axis of a panel.
    label : callable or Formatter
        Takes the value and the position of a tick and returns its text. Default: the plain number.
    """
    from matplotlib.ticker import NullFormatter

    axis.set_major_formatter(label)
    axis.set_minor_formatter(NullFormatter())


def log(axis: Any, base: int = 10) -> None:
    """Make an axis logarithmic, and write plain numbers at its major ticks.

    An axis with base 10 has ticks at 1, 2 and 5 of each decade if it covers at most two decades.

    Parameters
    ----------
    axis : Axis
        The x or y axis of a panel.
    base : int, default 10
        Base of the logarithm.
    """
    from matplotlib.ticker import LogLocator

    class Locator(LogLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            decades = np.log10(vmax / vmin) if 0 < vmin < vmax else 0
            self.set_params(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0))
            return super().tick_values(vmin, vmax)

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=base)
    if base == 10:
        axis.set_major_locator(Locator(numticks=12))
    plain_ticks(axis)


def byte_axis(axis: Any) -> None:
    """Label the ticks of an axis of bytes with MB, GB and TB (powers of ten).

    Parameters
    ----------
    axis : Axis
        The x or y axis of a panel.
    """
    from matplotlib.ticker import EngFormatter

    plain_ticks(axis, EngFormatter("B"))


def _settle(figure: Figure) -> None:
    """Lay out the panels of a figure, and round their positions to five decimals.

    Without rounding, the last bits of the positions could differ between machines, and equal
    figures would be saved as different SVG files.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)  # with "none" each savefig would draw twice
    for ax in figure.axes:
        left, bottom, width, height = (round(x, 5) for x in ax.get_position().bounds)
        ax.set_position((left, bottom, width, height))


def _show_single_points(figure: Figure) -> None:
    """Give each line that consists of a single point a short dash as its marker.

    Without a marker, a single point would be invisible. Lines with a marker are not changed.
    """
    for ax in figure.axes:
        for line in ax.lines:
            if np.size(line.get_xdata()) == 1 and line.get_marker() in ("None", "none", "", " "):
                line.set_marker("_")
                line.set_markersize(16)
                line.set_markeredgewidth(line.get_linewidth())


def texts(artist: Any) -> Iterator[Any]:
    """Yield the texts in a figure or in a part of a figure.

    Labels of minor ticks are left out, because they are slow to make.

    Parameters
    ----------
    artist : Artist
        A figure or a part of a figure.

    Yields
    ------
    Text
        Each text.
    """
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    if isinstance(artist, Text):
        yield artist
    if isinstance(artist, Axis):
        yield from (artist.label, *artist.get_majorticklabels())
    else:
        for child in artist.get_children():
            yield from texts(child)


def lay_out(figure: Figure, footnote: str) -> None:
    """Place the footnote and the panels of a figure. `save` calls this before it writes the files.

    Parameters
    ----------
    figure : Figure
        The figure.
    footnote : str
        Lines below the figure, as for `save`.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    _show_single_points(figure)
    said = footnote.splitlines()
    others = [line for line in said if not line.startswith("L2 is ")]
    if others != said and not any("L2" in text.get_text() for text in texts(figure)):
        footnote = "\n".join(others)
    if figure.get_figwidth() < WIDTH:
        footnote = ""
    lines = footnote.count("\n") + bool(footnote)
    room = (0.16 * lines + 0.06) / figure.get_figheight()
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0, room, 1, 1 - room), w_pad=PAD, h_pad=PAD)
    look: dict[str, Any] = {"fontsize": 8.5, "color": QUIET, "va": "bottom"}
    figure.text(0.008, 0.05 / figure.get_figheight(), footnote, **look)
    _settle(figure)


def save(figure: Figure, stem: Path, footnote: str) -> list[Path]:
    """Write a figure as an SVG file and as a PNG file, with a footnote.

    Parameters
    ----------
    figure : Figure
        The figure.
    stem : Path
        Path of the files without their suffix.
    footnote : str
        Lines below the figure. A figure narrower than 10 inches has no footnote. Lines about the L2
        cache are left out if no text of the figure contains "L2".

    Returns
    -------
    list of Path
        The files that changed.

    Raises
    ------
    StoreError
        If a file cannot be written.
    """
    import matplotlib

    with matplotlib.rc_context(RC):
        lay_out(figure, footnote)
        changed = []
        for suffix, options in (
            (".svg", {"metadata": {"Date": None, "Creator": None}}),
            (".png", {"dpi": 160, "metadata": {"Software": None}}),
        ):
            data = io.BytesIO()
            figure.savefig(data, format=suffix[1:], **options)
            path = stem.with_suffix(suffix)
            if write_if_changed(path, data.getvalue()):
                changed.append(path)
        return changed
