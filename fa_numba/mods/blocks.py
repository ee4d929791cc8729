"""The blocks of S that a ``mask_mod`` hides, so that kernels can skip them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_numba.integers import ceil_div

EMPTY, MIXED, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False, repr=False)
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
    seqlen_q : int
        Number of rows of q that the mask was made for.
    seqlen_k : int
        Number of rows of k that the mask was made for.
    shape : tuple of int
        Shape of the mask: (batch or 1, heads_q or 1, ceil(seqlen_q / Br), ceil(seqlen_k / Bc)).
    captured : Captured
        The function in the form that kernels are compiled with, and the values that it uses.
    lists : Lists
        Arrays from which kernels read the next visited block of each row and column of blocks.
    reads : tuple of str
        Which of the parameters "b", "h", "i" and "j" the function uses.
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
    >>> mask = fa_numba.create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 32, 30, tiles=tiles)
    >>> mask.shape, mask.visited[0, 0].tolist()
    ((1, 1, 2, 2), [[True, False], [True, True]])
    >>> print(mask)
    (1, 1, 2, 2) blocks of 16 x 16 for 32 rows and 30 columns: 25.0% empty, 25.0% full, 50.0% mixed
    """

    mask_mod: Callable[..., Any]
    tiles: Any
    seqlen_q: int
    seqlen_k: int
    shape: tuple[int, int, int, int]
    captured: Any
    lists: Any
    reads: tuple[str, ...]

    @property
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

    def check(self, problem: Any) -> None:
        """Raise ValueError unless the mask was made for the sizes of a problem.

        Packed sequences and pages have lengths of their own, and rows and columns count from 0 in
        each sequence. A mask for longer sequences is right for them too.

        Parameters
        ----------
        problem : Problem
            Problem of the call that takes the mask.
        """
        sizes = ("seqlen_q", self.seqlen_q), ("seqlen_k", self.seqlen_k)
        longer = problem.packed, problem.packed or problem.pages is not None
        again = "make a mask for these sizes with create_block_mask"
        fits, wanted = True, []
        for (name, size), may_be_longer in zip(sizes, longer, strict=True):
            called = getattr(problem, name)
            fits &= size == called or (may_be_longer and size > called)
            wanted.append(f"{name}={called}{' or more' * may_be_longer}")
        if not fits:
            of = "the longest sequence" if problem.packed else "the arrays"
            raise ValueError(
                f"block_mask must be made for {' and '.join(wanted)}, the sizes of {of}, got a "
                f"BlockMask for {' and '.join(f'{name}={size}' for name, size in sizes)}; {again}"
            )
        parts = ("batch", "b", problem.batch), ("heads", "h", problem.heads_q)
        for size, (name, parameter, called) in zip(self.shape, parts, strict=False):
            if size not in (1, called):
                raise ValueError(
                    f"block_mask must be made for {name}={called} (or {name}=1, if its mask_mod "
                    f"does not use {parameter}), got a BlockMask for {name}={size}; {again}"
                )
            if size != called and parameter in self.reads:
                raise ValueError(
                    f"block_mask must be made for {name}={called}, because its mask_mod "
                    f"({self.captured.mod}) uses {parameter}, got a BlockMask for {name}={size}; "
                    f"pass {name}={called} to create_block_mask"
                )

    def visited_tiles(self, problem: Any) -> np.ndarray:
        """Return whether a call visits each tile, for the rows and columns that the call has.

        Parameters
        ----------
        problem : Problem
            Problem of the call. Its packed sequences may be shorter than the mask.

        Returns
        -------
        numpy.ndarray of bool
            The visited tiles, shape (batch or 1, heads_q or 1, row tiles, column tiles).
        """
        Tr = ceil_div(problem.seqlen_q, self.tiles.Br)
        Tc = ceil_div(problem.seqlen_k, self.tiles.Bc)
        return self.visited[:, :, :Tr, :Tc]

    def __repr__(self) -> str:
        batch, heads, *_ = self.shape
        sizes = f"batch={batch}, heads={heads}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}"
        return f"BlockMask({self.captured.mod}, {sizes}, blocks of {self._size})"

    def __str__(self) -> str:
        named = {"empty": EMPTY, "full": FULL, "mixed": MIXED}
        shares = (f"{(self.blocks == n).mean():.1%} {name}" for name, n in named.items())
        of = f"{self.shape} blocks of {self._size} for {self.seqlen_q} rows and {self.seqlen_k} "
        return f"{of}columns: {', '.join(shares)}"

    @property
    def _size(self) -> str:
        return f"{self.tiles.Br} x {self.tiles.Bc}"
