"""Rows of accesses that the emulator counted, and their comparison with the model."""

from collections.abc import Iterator, Sequence
from typing import Any

from fa_numba.problem import Problem

from ..record import Bench, Row

# Limits of a problem that the emulator runs in half a minute: rows of Q, and 4 N^2 d.
LONGEST, FLOPS = 1024, 2**29


def countable(problems: Sequence[Problem], bench: Bench) -> list[Problem]:
    """Return the problems that the emulator runs within half a minute. Print the other problems.

    Parameters
    ----------
    problems : sequence of Problem
        Problems.
    bench : Bench
        Where the experiment runs.

    Returns
    -------
    list of Problem
        The problems that are small enough.
    """
    small = [
        p for p in problems if p.seqlen_q <= LONGEST and 4 * p.seqlen_q**2 * p.head_dim <= FLOPS
    ]
    beyond = {f"N={p.seqlen_q}, d={p.head_dim}": None for p in problems if p not in small}
    if beyond:
        bench.say(f"  not counted, because it takes minutes on the emulator: {'; '.join(beyond)}")
    return small


def totals(*accesses: Any, **common: Any) -> Iterator[Row]:
    """Yield one row with the loads and one row with the stores, in elements.

    Each number is the sum over all arrays and all of the given accesses.

    Parameters
    ----------
    *accesses : Counts or Accesses
        Objects whose attributes `loads` and `stores` map the name of an array to a number of
        elements.
    **common
        The other columns of the rows.

    Yields
    ------
    Row
        Two rows.
    """
    for metric in ("loads", "stores"):
        value = sum(sum(getattr(each, metric).values()) for each in accesses)
        yield Row(metric=metric, unit="elements", value=value, **common)


def equal(rows: Sequence[Row]) -> tuple[int, int]:
    """Count how many counted numbers equal the model's number for the same quantity.

    Parameters
    ----------
    rows : sequence of Row
        Rows with source "counted" and "model".

    Returns
    -------
    same : int
        Number of counted numbers that equal the model's number.
    counted : int
        Number of all counted numbers.
    """

    def what(row: Row) -> tuple:
        at = row.key.index(row.source)
        return (*row.key[:at], *row.key[at + 1 :], row.place)

    model = {what(row): row.value for row in rows if row.source == "model"}
    counted = [row for row in rows if row.source == "counted"]
    return sum(model.get(what(row)) == row.value for row in counted), len(counted)


def said(rows: Sequence[Row]) -> str:
    """Return a sentence that says how many counted numbers equal the model.

    Parameters
    ----------
    rows : sequence of Row
        Rows with source "counted" and "model".

    Returns
    -------
    str
        The sentence, without a full stop. Empty if `rows` contains no counted number.
    """
    found, counted = equal(rows)
    if not counted:
        return ""
    sizes = sorted({(r.seqlen_q, r.head_dim) for r in rows if r.source == "counted"})
    where = "; ".join(f"N={N}, d={d}" for N, d in sizes)
    return f"counted on the emulator at {where}: {found} of {counted} numbers equal the model"


def annotate(ax: Any, rows: Sequence[Row], height: float) -> None:
    """Write at the right edge of a panel how many counted numbers equal the model.

    Parameters
    ----------
    ax : Axes
        The panel.
    rows : sequence of Row
        Rows with source "counted" and "model".
    height : float
        Upper edge of the text, from 0 (bottom) to 1 (top).
    """
    text = said(rows).replace(" at ", "\nat ").replace(": ", ":\n")
    if text:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
        look = {"ha": "right", "va": "top", "fontsize": 8.5, "bbox": box}
        ax.annotate(text, (0.98, height), xycoords="axes fraction", **look)
