"""The fastest tiles in measurements. The command `python -m experiments tune` writes the table."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fa_numba.integers import round_up
from fa_numba.tiling.tiles import Tiles, is_valid

TABLE = Path(__file__).with_name("tuned.csv")
KEY = ("compute_capability", "unit", "algorithm", "pass", "head_dim")
COLUMNS = (*KEY, "Br", "Bc", "threads", "stages")


@functools.cache
def _table(path: Path) -> dict[tuple[str, ...], Tiles]:
    lines = list(csv.reader(path.read_text("utf-8").splitlines()))
    if tuple(lines[0]) != COLUMNS:
        raise ValueError(f"{path} must have the columns {list(COLUMNS)}, got {lines[0]}")
    return {tuple(line[: len(KEY)]): Tiles(*map(int, line[len(KEY) :])) for line in lines[1:]}


def tuned_tiles(
    capability: tuple[int, int], unit: str, algorithm: str, passes: str, seqlen_q: int,
    seqlen_k: int, head_dim: int, select: Callable[[Tiles], Any],
) -> Tiles | None:  # fmt: skip
    """Return the fastest tiles measured on GPUs of a compute capability, or None.

    ``unit``, ``algorithm`` and ``passes`` name the kernel. The head dimension is rounded up to a
    multiple of 16. ``select`` takes tiles, and raises ValueError if there is no kernel for them.
    The result is None in these cases:

    - The kernel was not measured at this compute capability and head dimension.
    - The tiles have more rows or columns than the sequence.
    - ``select`` raises ValueError for the tiles.
    """
    key = (".".join(map(str, capability)), unit, algorithm, passes, str(round_up(head_dim, 16)))
    tiles = _table(TABLE).get(key)
    if tiles is None or tiles.Br > seqlen_q or tiles.Bc > seqlen_k:
        return None
    return tiles if is_valid(tiles, select) else None
