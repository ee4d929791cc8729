"""What a ``mask_mod`` hides of whole blocks of S, so that kernels need not look."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EMPTY, MIXED, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A ``mask_mod`` and the blocks of ``tiles`` that it leaves empty, full or mixed, of ``shape``
    (B or 1, Hq or 1, Tr, Tc).

    ``mask_mod`` has the values that it captured when they were made; ``captured`` are these, and
    how kernels have it. ``lists`` has what kernels read, where the captured arrays lie
    (``host/blocks.py``).
    """

    mask_mod: Callable[..., Any]
    tiles: Any
    shape: tuple[int, int, int, int]
    captured: Any = field(repr=False)
    lists: Any = field(repr=False)

    @functools.cached_property
    def blocks(self) -> np.ndarray:
        """uint8: 0 where no row of a block sees a column of it, 2 where each sees all, 1 elsewhere;
        read back from a GPU when it is first asked for.
        """
        return self.lists.states()

    @property
    def visited(self) -> np.ndarray:
        """Which blocks are visited: bool, as a ``block_mask``."""
        return self.blocks != EMPTY

    def __str__(self) -> str:
        named = {"empty": EMPTY, "full": FULL, "mixed": MIXED}
        shares = (f"{(self.blocks == n).mean():.1%} {name}" for name, n in named.items())
        return f"{self.shape} blocks of {self.tiles}: {', '.join(shares)}"
