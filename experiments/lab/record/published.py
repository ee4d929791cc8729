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
        lines = csv.DictReader(file, strict=True)
        if tuple(header := lines.fieldnames or ()) != COLUMNS:
            raise ValueError(f"columns are {', '.join(header)}: expected {', '.join(COLUMNS)}")
        found = []
        for line in lines:
            if None in line.values() or not math.isfinite(float(line["value"])):
                raise ValueError(f"line {lines.line_num}: it is not whole, or has no finite value")
            found.append(line)
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
