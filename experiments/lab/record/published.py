"""The papers' published figures, figures/data/published.csv."""

import csv
import math
from functools import cache

from .options import FIGURES
from .store import StoreError, naming

COLUMNS = (
    *("paper", "item", "hardware", "method", "pass", "dropout", "mask", "causal", "batch", "heads"),
    *("head_dim", "seqlen", "block_c", "metric", "unit", "value", "reading"),
)
FILE = FIGURES / "data" / "published.csv"


@cache
def _lines() -> tuple[dict[str, str], ...]:
    with naming(FILE), open(FILE, newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        if tuple(header := next(lines, [])) != COLUMNS:
            raise ValueError(f"columns are {', '.join(header)}: expected {', '.join(COLUMNS)}")
        found = []
        for line in lines:
            where, count = f"line {lines.line_num}", len(line)
            if count != len(COLUMNS):
                raise ValueError(f"{where}: it has {count} columns: expected {len(COLUMNS)}")
            found.append(dict(zip(COLUMNS, line, strict=True)))
            if not math.isfinite(float(found[-1]["value"])):
                raise ValueError(f"{where}: value is {found[-1]['value']}: allowed is a number")
        return tuple(found)


def lookup(**wanted: str) -> list[dict[str, str]]:
    """The lines with just this text. Raises StoreError for a damaged file or an unknown item."""
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
