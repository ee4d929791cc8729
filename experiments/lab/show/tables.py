"""The parts that all tables of the pages share: captions, Markdown, and texts of cells."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa_numba.problem import Problem

from ..record import Row

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Parameters
    ----------
    caption : str
        Sentences above the table. The page adds a sentence about the origin of the numbers.
    body : str
        The table in Markdown.
    """

    caption: str
    body: str


# A function from stored rows to a table; None if the rows contain nothing for the table.
Make = Callable[..., Table | None]


@dataclass(frozen=True)
class Across:
    """Makes a table from rows of several experiments. Call it with the rows to get the `Table`.

    Parameters
    ----------
    make : callable
        Takes the rows and returns a `Table`, or None if the rows contain nothing for the table.
    experiments : tuple of str
        Names of the experiments.
    cites : bool, default True
        Whether the page adds a sentence about the origin of the numbers. False if the cells contain
        the origin.
    timed : bool, default False
        Whether `make` also takes a dictionary from experiments to the measuring time of their
        recordings, in seconds.
    machine : str, default ""
        GPU whose recordings are used. Empty: the GPU that `report.gpu` returns.
    """

    make: Callable[..., Table | None]
    experiments: tuple[str, ...]
    cites: bool = True
    timed: bool = False
    machine: str = ""

    def __call__(self, rows: Sequence[Row], *seconds: Mapping[str, float]) -> Table | None:
        return self.make(rows, *seconds)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. The first column is aligned to the left, all others to the right.

    Parameters
    ----------
    header : sequence of str
        Names of the columns.
    lines : iterable of sequence of str
        Cells of each line.

    Returns
    -------
    str
        The table.

    Examples
    --------
    >>> print(markdown(["N", "ms"], [["512", "0.1"]]))
    | N | ms |
    | --- | ---: |
    | 512 | 0.1 |
    <BLANKLINE>
    """
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def of(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table | None:
    """Return a table made of a header and lines; None if there are no lines.

    Parameters
    ----------
    caption : str
        Sentences above the table.
    header : sequence of str
        Names of the columns.
    lines : sequence of sequence of str
        Cells of each line.

    Returns
    -------
    Table or None
        The table.
    """
    return Table(caption, markdown(header, lines)) if lines else None


def cell(row: Row | None, shown: Callable[[float], str]) -> str:
    """Return the text of a table cell that shows the value of a row of data.

    Parameters
    ----------
    row : Row or None
        The row of data.
    shown : callable
        Takes the value and returns its text.

    Returns
    -------
    str
        The text of the value; "failed" if the row failed; a dash if there is no row.
    """
    if row is None:
        return MISSING
    return "failed" if row.value is None else shown(row.value)


def number(values: Mapping[Any, float | None], key: Any, form: str) -> str:
    """Return the text of a table cell that shows one value of a mapping.

    Parameters
    ----------
    values : mapping
        Values; some may be None.
    key : hashable
        Key of the value.
    form : str
        Format, such as ".2f".

    Returns
    -------
    str
        The formatted value; a dash if the key is missing or the value is None.
    """
    value = values.get(key)
    return MISSING if value is None else format(value, form)


# The first columns of many tables. `problem_cells` returns their cells.
PROBLEM = ("d", "causal", "N")


def problem_cells(problem: Problem) -> list[str]:
    """Return the table cells that identify a problem: head dimension, causal, sequence length.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    list of str
        Three cells, for the columns `PROBLEM`.
    """
    return [str(problem.head_dim), yes_no(problem.causal), str(problem.seqlen_q)]


def spread(ratios: Sequence[float]) -> str:
    """Return the minimum, the median and the maximum of ratios as text.

    Parameters
    ----------
    ratios : sequence of float
        The ratios.

    Returns
    -------
    str
        Three numbers with two decimals; a dash if there are no ratios.

    Examples
    --------
    >>> spread([1.0, 1.5, 3.0])
    '1.00, 1.50, 3.00'
    """
    if not ratios:
        return MISSING
    return f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"


def between(values: Sequence[float]) -> str:
    """Return the minimum and the maximum of values as text.

    Parameters
    ----------
    values : sequence of float
        The values. If the minimum is at least 4, both numbers are written without decimals,
        otherwise with one decimal.

    Returns
    -------
    str
        The text, such as "5 to 135". Empty if there are no values.

    Examples
    --------
    >>> between([135, 5]), between([1.1, 1.42])
    ('5 to 135', '1.1 to 1.4')
    """
    if not values:
        return ""
    return span(values, ".0f" if min(values) >= 4 else ".1f")


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Return the minimum and the maximum of values as text, or one number if both have equal text.

    Parameters
    ----------
    values : iterable of float
        The values, at least one.
    form : str, default ".2f"
        Format of a number.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> span([1.38, 1.09]), span([2.001, 2.002])
    ('1.09 to 1.38', '2.00')
    """
    found = list(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(found), max(found))))


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    Parameters
    ----------
    words : sequence of str
        The words.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return ", ".join([*words[:-2], " and ".join(words[-2:])])


def yes_no(causal: bool) -> str:
    """Return "yes" or "no" for a causal mask.

    Parameters
    ----------
    causal : bool
        Whether the mask is causal.

    Returns
    -------
    str
        The text.
    """
    return "yes" if causal else "no"


def sizes(row: Row) -> tuple[int, int, bool]:
    """Return sequence length, head dimension and mask, in which most experiments' problems differ.

    Parameters
    ----------
    row : Row
        A row.

    Returns
    -------
    tuple
        (seqlen_q, head_dim, causal).
    """
    return row.seqlen_q, row.head_dim, row.causal


def runs(rows: Iterable[Row]) -> str:
    """Return text that says of how many runs the values are medians.

    An example of the text is "medians of 5 to 20 runs".

    Parameters
    ----------
    rows : iterable of Row
        Rows.

    Returns
    -------
    str
        The text; empty if no row has a number of runs.
    """
    counts = sorted({row.n for row in rows if row.n is not None and row.value is not None})
    if not counts:
        return ""
    few, many = counts[0], counts[-1]
    return f"medians of {many if few == many else f'{few} to {many}'} runs"


def fewer_runs(rows: Iterable[Row], experiment: str, least: int = 5) -> str:
    """Return sentences about the times that are medians of fewer runs than `least`.

    Parameters
    ----------
    rows : iterable of Row
        Rows.
    experiment : str
        Name of the experiment, which the sentences contain.
    least : int, default 5
        Times with fewer runs than this are mentioned.

    Returns
    -------
    str
        The sentences without the last full stop; empty if there are no such times.
    """
    timed = [row for row in rows if row.n is not None and not row.failed and row.metric == "time"]
    few = [row for row in timed if (row.n or least) < least]
    if not few:
        return ""
    runs = span((row.n or 0 for row in few), "d")
    names = ", ".join(sorted({row.series for row in few}))
    lengths = span((row.seqlen_q for row in few), "d")
    return (
        f"{len(few)} of the {len(timed)} recorded times of the experiment `{experiment}` are "
        f"medians of only {runs} run{'s' if runs != '1' else ''}. In the experiment "
        f"`{experiment}`, the calls with fewer than {least} runs have N={lengths} and belong to "
        f"the series {names}"
    )
