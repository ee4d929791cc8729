"""Draws the curves of accesses per score that `measure.scaling` computes, and their legend."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..measure.scaling import KINDS, LABELS, RULE, Points
from . import style

LOOKS: dict[str, dict[str, Any]] = {
    "model": {},
    "counted": {"ls": "", "marker": "o", "ms": 7},
    "l2": {"ls": "", "marker": "o", "ms": 5},
    "dram": {"ls": "--", "lw": 1.2, "marker": "o", "ms": 5, "mfc": "white"},
}


def draw(ax: Any, found: dict[tuple[str, str], Points], sources: Sequence[str]) -> None:
    """Draw the curves of accesses per score that belong to the given sources.

    Parameters
    ----------
    ax : Axes
        The panel.
    found : dict
        The curves, as `scaling.per_score` returns them.
    sources : sequence of str
        Names of sources, such as "model" and "counted".
    """
    for (series, source), points in found.items():
        if source not in sources:
            continue
        base = series.removesuffix(RULE)
        look = {"lw": 1.8, **LOOKS[source]}
        if series != base:
            look |= {"lw": 5 if source == "model" else look["lw"], "alpha": 0.5}
        ax.plot(list(points), list(points.values()), color=style.COLOURS[base], **look)


def handles(found: Iterable[tuple[str, str]]) -> list[Any]:
    """Return the entries of a legend: one for each series and one for each source of the curves.

    Parameters
    ----------
    found : iterable of (str, str)
        Series and source of each curve.

    Returns
    -------
    list of Line2D
        The entries.
    """
    there = list(found)
    lines = []
    for series, label in LABELS.items():
        if any(series == name for name, _ in there):
            base = series.removesuffix(RULE)
            look: dict[str, Any] = {"lw": 5, "alpha": 0.5} if series != base else {"lw": 1.8}
            lines.append(style.key(label, color=style.COLOURS[base], **look))
    for source, label in KINDS.items():
        if any(source == name for _, name in there):
            lines.append(style.key(label, **{"lw": 1.8, **LOOKS[source]}))
    return lines
