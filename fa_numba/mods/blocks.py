"""What a ``mask_mod`` hides of whole blocks of S, so that kernels need not look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EMPTY, MIXED, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A ``mask_mod`` and the blocks of ``tiles`` that it leaves empty, full or mixed.

    ``blocks`` is uint8 (B or 1, Hq or 1, Tr, Tc): 0 where no row of a block sees a column of it, 2
    where each sees all, 1 elsewhere. ``mask_mod`` has the values that it captured when they were
    made.
    """

    mask_mod: Callable[..., Any]
    tiles: Any
    blocks: np.ndarray = field(repr=False)

    @property
    def visited(self) -> np.ndarray:
        """Which blocks are visited: bool, as a ``block_mask``."""
        return self.blocks != EMPTY

    @property
    def full(self) -> np.ndarray:
        """In which of them the function is not asked."""
        return self.blocks == FULL

    def __str__(self) -> str:
        named = {"empty": EMPTY, "full": FULL, "mixed": MIXED}
        shares = (f"{(self.blocks == n).mean():.1%} {name}" for name, n in named.items())
        return f"{self.blocks.shape} blocks of {self.tiles}: {', '.join(shares)}"
