"""The papers' published figures, figures/data/published.csv."""

from __future__ import annotations

import csv
from functools import cache

from .options import FIGURES


@cache
def _lines() -> tuple[dict[str, str], ...]:
    with open(FIGURES / "data" / "published.csv", newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def lookup(**wanted: str) -> list[dict[str, str]]:
    """The lines of the file, in its order, whose columns have just the `wanted` text.

    Columns: paper, item, hardware, method, pass, dropout, mask, causal, batch, heads, head_dim,
    seqlen, block_c, metric, unit, value, reading.
    """
    return [line for line in _lines() if all(line[name] == w for name, w in wanted.items())]
