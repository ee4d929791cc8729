"""Numbers that the papers publish, from figures/data/published.csv."""

import csv
from functools import cache

from .options import FIGURES
from .store import StoreError, naming

FILE = FIGURES / "data" / "published.csv"


@cache
def _lines() -> tuple[dict[str, str], ...]:
    with naming(FILE), open(FILE, newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file, strict=True))


def lookup(**wanted: str) -> list[dict[str, str]]:
    """Return the lines of the table whose columns have exactly these texts.

    Parameters
    ----------
    **wanted : str
        Columns and their text, such as ``paper="fa2", item="Fig. 5"``. None: all lines.

    Returns
    -------
    list of dict of str to str
        One dictionary per line: text by column.

    Raises
    ------
    StoreError
        If no line has this paper and item, or the file cannot be read.
    """
    found = [line for line in _lines() if all(line[name] == w for name, w in wanted.items())]
    of = {name: wanted[name] for name in ("paper", "item") if name in wanted}
    if not found and (of == wanted or not lookup(**of)):
        raise StoreError(f"{FILE} must have a line with {', '.join(of.values()) or 'any values'}")
    return found


def value(**wanted: str) -> float:
    """Return the number of the only line whose columns have exactly these texts.

    Parameters
    ----------
    **wanted : str
        Columns and their text, as for `lookup`.

    Returns
    -------
    float
        The number in column "value".

    Raises
    ------
    StoreError
        If there is no such line, or more than one.
    """
    found = lookup(**wanted)
    if len(found) != 1:
        raise StoreError(
            f"{FILE} must have one line with {', '.join(wanted.values())}, got {len(found)}"
        )
    return float(found[0]["value"])
