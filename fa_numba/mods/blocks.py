"""The blocks of S that a ``mask_mod`` hides, so that kernels can skip them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EMPTY, MIXED, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A ``mask_mod`` and the blocks of S that it leaves empty, full or mixed.

    ``fa_numba.create_block_mask`` returns a block mask, and attention takes it as ``block_mask``.
    ``print`` shows the shares of empty, full and mixed blocks.

    Attributes
    ----------
    mask_mod : function
        The function. It uses the numbers and arrays that it used when the mask was made.
    tiles : Tiles
        Block sizes of the mask.
    shape : tuple of int
        Shape of the mask: (batch or 1, heads_q or 1, ceil(seqlen_q / Br), ceil(seqlen_k / Bc)).
    captured : Captured
        The function in the form that kernels are compiled with, and the values that it uses.
    lists : Lists
        Arrays from which kernels read the next visited block of each row and column of blocks.
    blocks : numpy.ndarray of uint8
        State of each block: 0 for an empty, 1 for a mixed, 2 for a full block.
    visited : numpy.ndarray of bool
        Whether each block is visited: True for mixed and full blocks.

    See Also
    --------
    fa_numba.create_block_mask : Make a mask.

    Examples
    --------
    >>> import fa_numba
    >>> tiles = fa_numba.Tiles(Br=16, Bc=16)
    >>> mask = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 32, 32, tiles=tiles)
    >>> mask.shape, mask.visited[0, 0].tolist()
    ((1, 1, 2, 2), [[True, False], [True, True]])
    >>> print(mask)  # doctest: +ELLIPSIS
    (1, 1, 2, 2) blocks of Tiles(...): 25.0% empty, 25.0% full, 50.0% mixed
    """

    mask_mod: Callable[..., Any]
    tiles: Any
    shape: tuple[int, int, int, int]
    captured: Any = field(repr=False)
    lists: Any = field(repr=False)

    @functools.cached_property
    def blocks(self) -> np.ndarray:
        """State of each block, an array of uint8 with the shape of the mask.

        0 means empty: no row of the block sees a column of the block. 2 means full: every row of
        the block sees every column of the block. 1 means mixed, which is everything else. States on
        a GPU are copied to the host at the first access.
        """
        return self.lists.states()

    @property
    def visited(self) -> np.ndarray:
        """Whether each block is visited: an array of bool that ``block_mask`` takes too."""
        return self.blocks != EMPTY

    def __str__(self) -> str:
        named = {"empty": EMPTY, "full": FULL, "mixed": MIXED}
        shares = (f"{(self.blocks == n).mean():.1%} {name}" for name, n in named.items())
        return f"{self.shape} blocks of {self.tiles}: {', '.join(shares)}"
