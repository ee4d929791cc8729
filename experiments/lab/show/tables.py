"""What the tables of the pages have in common: captions, Markdown, how a cell is written."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa_numba.problem import Problem

from ..record import Row

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """A table's `caption`, behind which the page writes its recording, and `body` in Markdown."""

    caption: str
    body: str


# From an experiment's stored rows; None where they hold nothing of the table.
Make = Callable[..., Table | None]


@dataclass(frozen=True)
class Across:
    """A table that `make` makes of the rows of all of `experiments`. `cites` is False where its
    cells say what they are from; `timed`, it takes the seconds of each recording too; `machine` is
    the GPU whose recordings it is of, where it is of one.
    """

    make: Callable[..., Table | None]
    experiments: tuple[str, ...]
    cites: bool = True
    timed: bool = False
    machine: str = ""

    def __call__(self, rows: Sequence[Row], *seconds: Mapping[str, float]) -> Table | None:
        return self.make(rows, *seconds)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned to the left, the others to the right."""
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def of(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table | None:
    return Table(caption, markdown(header, lines)) if lines else None


def cell(row: Row | None, shown: Callable[[float], str]) -> str:
    """The row's value as `shown` writes it, "failed" where it failed, a dash without a row."""
    if row is None:
        return MISSING
    return "failed" if row.value is None else shown(row.value)


def number(values: Mapping[Any, float | None], key: Any, form: str) -> str:
    """The value under the key in the format `form`, a dash where there is none."""
    value = values.get(key)
    return MISSING if value is None else format(value, form)


# The first columns of many a table, and a problem's cells in them.
PROBLEM = ("d", "causal", "N")


def problem_cells(problem: Problem) -> list[str]:
    return [str(problem.head_dim), yes_no(problem.causal), str(problem.seqlen_q)]


def spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return MISSING
    return f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"


def between(values: Sequence[float]) -> str:
    """The smallest and the largest: "5 to 135", "1.1 to 1.4"; empty where there are none."""
    if not values:
        return ""
    return span(values, ".0f" if min(values) >= 4 else ".1f")


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the largest: "1.09 to 1.38", or one number where they look the same."""
    found = list(values)
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(found), max(found))))


def yes_no(causal: bool) -> str:
    return "yes" if causal else "no"


def sizes(row: Row) -> tuple[int, int, bool]:
    """What distinguishes the problems of most experiments: length, head dimension, mask."""
    return row.seqlen_q, row.head_dim, row.causal


def runs(rows: Iterable[Row]) -> str:
    """Such as "medians of 5 to 20 runs"; empty where no row says so."""
    counts = sorted({row.n for row in rows if row.n is not None and row.value is not None})
    if not counts:
        return ""
    few, many = counts[0], counts[-1]
    return f"medians of {many if few == many else f'{few} to {many}'} runs"


def fewer_runs(rows: Iterable[Row], least: int = 5) -> str:
    """Say which times are medians of fewer than `least` runs; return "" if none is."""
    timed = [row for row in rows if row.n is not None and not row.failed and row.metric == "time"]
    few = [row for row in timed if (row.n or least) < least]
    if not few:
        return ""
    runs = span((row.n or 0 for row in few), "d")
    names = ", ".join(sorted({row.series for row in few}))
    return (
        f"{len(few)} of {len(timed)} times are medians of only {runs} "
        f"run{'s' if runs != '1' else ''} (N={span((row.seqlen_q for row in few), 'd')}; {names})"
    )
