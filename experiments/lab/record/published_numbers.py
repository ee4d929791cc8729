"""Numbers that papers and web pages state, read from the file figures/data/published.csv."""

import csv
from collections.abc import Mapping
from functools import cache
from typing import Any

from .options import FIGURES
from .store import StoreError, naming

FILE = FIGURES / "data" / "published.csv"


@cache
def _lines() -> tuple[dict[str, str], ...]:
    with naming(FILE):
        return tuple(csv.DictReader(FILE.read_text("utf-8").splitlines(True), strict=True))


def lookup(**wanted: str) -> list[dict[str, str]]:
    """Return the lines of published.csv that have the given texts in the given columns.

    Parameters
    ----------
    **wanted : str
        Column names and their texts, such as ``paper="fa2", item="Fig. 5"``. Without arguments, all
        lines are returned.

    Returns
    -------
    list of dict of str to str
        One dictionary {column: text} per line. The list is empty if the paper and the item exist,
        but no line matches the other columns.

    Raises
    ------
    StoreError
        If no line has this paper and item, the table is empty, or the file cannot be read.
    """
    found = [line for line in _lines() if all(line[name] == w for name, w in wanted.items())]
    of = {name: wanted[name] for name in ("paper", "item") if name in wanted}
    if not found and (of == wanted or not lookup(**of)):
        if not of:
            raise StoreError(f"{FILE} has no lines, but must have at least one")
        same = [x for x in _lines() if x["paper"] == of.get("paper", x["paper"])]
        column = "item" if same and "item" in of else "paper"
        names = sorted({x[column] for x in (same or _lines())})
        raise StoreError(
            f"{FILE} has no line with {_said(of)}; values of {column}"
            f"{' for this paper' if column == 'item' and 'paper' in of else ''}: "
            f"{', '.join(map(repr, names))}"
        )
    return found


def _said(wanted: Mapping[Any, str]) -> str:
    """Return columns and their texts as words, such as "paper='fa2', item='Fig. 5'"."""
    return ", ".join(f"{name}={text!r}" for name, text in wanted.items())


def value(**wanted: str) -> float:
    """Return the number of the only line that has the given texts in the given columns.

    Parameters
    ----------
    **wanted : str
        Column names and their texts, as for `lookup`.

    Returns
    -------
    float
        The number in column "value".

    Raises
    ------
    StoreError
        If there is no such line, or there is more than one.
    """
    found = lookup(**wanted)
    if len(found) != 1:
        raise StoreError(
            f"{FILE} must have exactly one line with {_said(wanted)}, but it has "
            f"{len(found) or 'no'} such line{'s' * (len(found) > 1)}"
        )
    return float(found[0]["value"])
