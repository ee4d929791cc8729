"""The papers' published figures, figures/data/published.csv."""

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
    """The lines with just this text. Raises StoreError for an unknown item."""
    found = [line for line in _lines() if all(line[name] == w for name, w in wanted.items())]
    of = {name: wanted[name] for name in ("paper", "item") if name in wanted}
    if not found and (of == wanted or not lookup(**of)):
        raise StoreError(f"{FILE}: it has no line of {', '.join(of.values()) or 'anything'}")
    return found


def value(**wanted: str) -> float:
    """The number of the one line that `lookup` finds. Raises StoreError for none or several."""
    found = lookup(**wanted)
    if len(found) != 1:
        raise StoreError(
            f"{FILE}: it has {len(found)} lines of {', '.join(wanted.values())}: expected one"
        )
    return float(found[0]["value"])
