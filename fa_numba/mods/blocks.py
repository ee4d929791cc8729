"""The blocks of S that a ``mask_mod`` hides, so that kernels can skip them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from fa_numba import mods
from fa_numba.integers import ceil_div

EMPTY, MIXED, FULL = 0, 1, 2


class BlockSize(NamedTuple):
    """Number of rows and columns of a block of S, or of a tile."""

    Br: int
    Bc: int

    def __str__(self) -> str:
        return f"{self.Br} x {self.Bc}"


def states_of_tiles(
    blocks: np.ndarray, size: BlockSize, tile: BlockSize, seqlens: tuple[int, int]
) -> np.ndarray:
    """Return the states of tiles from the states of blocks of another size.

    A tile is empty if all blocks that it overlaps are empty, and full if all are full. Every other
    tile is mixed, and a kernel evaluates the function for each element of a mixed tile. Sizes of
    blocks and tiles may be arbitrary. A tile that consists of complete blocks gets the exact state.
    A tile inside of a mixed block is mixed.

    Parameters
    ----------
    blocks : numpy.ndarray of uint8
        States of the blocks, shape (batch, heads, block rows, block columns).
    size : BlockSize
        Rows and columns of a block.
    tile : BlockSize
        Rows and columns of a tile.
    seqlens : tuple of int
        Number of rows and columns of S.

    Returns
    -------
    numpy.ndarray of uint8
        States of the tiles, shape (batch, heads, row tiles, column tiles).
    """
    most, least = blocks, blocks
    for axis, *lengths in zip((2, 3), size, tile, seqlens, strict=True):
        most = _over_tiles(np.maximum, most, axis, *lengths)
        least = _over_tiles(np.minimum, least, axis, *lengths)
    found = np.full(most.shape, MIXED, np.uint8)
    found[most == EMPTY], found[least == FULL] = EMPTY, FULL
    return found


def _over_tiles(
    pick: Callable[..., np.ndarray],
    blocks: np.ndarray,
    axis: int,
    size: int,
    tile: int,
    seqlen: int,
) -> np.ndarray:
    """Return the smallest or largest state among the blocks that each tile overlaps, along one
    axis.

    ``pick`` is ``numpy.minimum`` or ``numpy.maximum``. ``size`` and ``tile`` are the numbers of
    rows (or columns) of a block and of a tile, and ``seqlen`` is the number of all rows (or
    columns).
    """
    begin = np.arange(ceil_div(seqlen, tile)) * tile
    first, last = begin // size, (np.minimum(begin + tile, seqlen) - 1) // size
    found = blocks.take(first, axis)
    for n in range(1, int((last - first).max()) + 1):
        found = pick(found, blocks.take(np.minimum(first + n, last), axis))
    return found


def next_visited(visited: np.ndarray, axis: int) -> np.ndarray:
    """Return, for each block, the number of the next visited block in its row or column of blocks.

    ``visited`` is bool, shape (..., block rows, block columns). With ``axis`` -1, the function
    looks for the next block in the same row of blocks. With ``axis`` -2, it looks in the same
    column.

    Let there be n blocks in this row or column. The result contains n + 1 numbers for it, along its
    last axis. Number k is the number of the first visited block at or after block k. It is n if
    there is no such block, so that the last number is always n. The dtype is int32.
    """
    along = np.moveaxis(visited, axis, -1)
    count = along.shape[-1]
    numbers = np.where(along, np.arange(count, dtype=np.int32), np.int32(count))
    ends = np.full((*along.shape[:-1], 1), count, np.int32)
    reversed_ = np.concatenate((numbers, ends), -1)[..., ::-1]
    return np.ascontiguousarray(np.minimum.accumulate(reversed_, -1)[..., ::-1])


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A ``mask_mod`` and the blocks of S that it leaves empty, full or mixed.

    ``fa_numba.create_block_mask`` returns a block mask, and attention takes it as ``block_mask``.
    ``print`` shows the shares of empty, full and mixed blocks.

    A mask never changes, so that ``copy.deepcopy`` returns the mask itself. ``pickle`` stores the
    name of the function, the values that it uses, and the states of the blocks. The function must
    therefore be defined by ``def`` at the top of a module. Arrays on a GPU are stored as their
    library pickles them; the states of the blocks are on the host after loading.

    Attributes
    ----------
    mask_mod : function
        The function. It uses the numbers and arrays that it used when the mask was made.
    block_size : BlockSize
        Rows Br and columns Bc of a block.
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
    tiles : Tiles or None
        Tiles that calls with this mask use, if the mask was made for tiles. None means that calls
        choose tiles as they do without a block mask.
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
    block_size: BlockSize
    seqlen_q: int
    seqlen_k: int
    shape: tuple[int, int, int, int]
    captured: Any
    lists: Any
    reads: tuple[str, ...]
    tiles: Any = None

    @property
    def blocks(self) -> np.ndarray:
        """State of each block, an array of uint8 with the shape of the mask.

        0 means empty: no row of the block sees a column of the block. 2 means full: every row of
        the block sees every column of the block. 1 means mixed, which is everything else. States on
        a GPU are copied to the host at the first access. The array is read-only.
        """
        return self.lists.states()

    @property
    def visited(self) -> np.ndarray:
        """New bool array with the shape of the mask: True for each visited block.

        Calls also accept this array as their argument ``block_mask``.
        """
        return np.array(self.lists.visited())

    def check(self, problem: Any) -> None:
        """Raise ValueError unless the mask was made for the sizes of a problem.

        Calls with packed sequences or pages also accept a mask that was made for longer sequences,
        because rows and columns are counted from 0 in each sequence.

        Parameters
        ----------
        problem : Problem
            Problem of the call that takes the mask.
        """
        sizes = ("seqlen_q", self.seqlen_q), ("seqlen_k", self.seqlen_k)
        longer = problem.packed, problem.packed or problem.pages is not None
        again = "create a block mask for these sizes with create_block_mask"
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

    def visited_tiles(self, problem: Any, tile: Any = None) -> np.ndarray | None:
        """Return which tiles a call visits, for the numbers of rows and columns of the call.

        Parameters
        ----------
        problem : Problem
            Problem of the call. Its packed sequences may be shorter than the mask.
        tile : object with Br and Bc, optional
            Rows and columns of a tile, such as a ``Tiles``. None means the size of a block.

        Returns
        -------
        numpy.ndarray of bool or None
            The visited tiles, shape (batch or 1, heads_q or 1, row tiles, column tiles). None for a
            mask without blocks.
        """
        if self.lists is None:
            return None
        size = self.block_size if tile is None else BlockSize(tile.Br, tile.Bc)
        Tr, Tc = ceil_div(problem.seqlen_q, size.Br), ceil_div(problem.seqlen_k, size.Bc)
        return self.lists.visited(size)[:, :, :Tr, :Tc]

    def without_blocks(self) -> BlockMask:
        """Return a copy of the mask without its blocks, for plans that need no blocks.

        If blocks are on a GPU, a plan with the copy does not copy them to the host.

        Returns
        -------
        BlockMask
            The mask without ``lists``. A plan with this mask cannot compute accesses.
        """
        return replace(self, lists=None)

    def __copy__(self) -> BlockMask:
        return self

    def __deepcopy__(self, _: Any) -> BlockMask:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        function = self.mask_mod
        module, name = function.__module__, function.__qualname__
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if getattr(found, "__code__", None) is not function.__code__:
            raise TypeError(
                "to pickle a BlockMask, its mask_mod must be defined by def at the top level of a "
                f"module, got {self.captured.mod}; define mask_mod there, or create the block "
                "mask again where it is used"
            )
        others = {f.name: getattr(self, f.name) for f in fields(self)}
        del others["mask_mod"], others["captured"], others["reads"]
        # Only captured variables are stored. Computed numbers, whose names are texts, are not.
        values = {n: x for n, x in self.captured.values if n.isidentifier()}
        return _loaded, (module, name, values, self.captured.mod.value, others)

    def __repr__(self) -> str:
        batch, heads, *_ = self.shape
        sizes = f"batch={batch}, heads={heads}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}"
        tiles = "" if self.tiles is None else f", tiles={self.tiles}"
        return f"BlockMask({self.captured.mod}, {sizes}, blocks of {self.block_size}{tiles})"

    def __str__(self) -> str:
        named = {"empty": EMPTY, "full": FULL, "mixed": MIXED}
        shares = (f"{(self.blocks == n).mean():.1%} {name}" for name, n in named.items())
        of = f"for {self.seqlen_q} rows and {self.seqlen_k} columns"
        return f"{self.shape} blocks of {self.block_size} {of}: {', '.join(shares)}"


def _loaded(
    module: str, name: str, values: Mapping[str, Any], text: Any, others: Mapping[str, Any]
) -> BlockMask:
    """Load a pickled block mask: import its function by name and give it the stored values.

    ``values`` are the captured values by name, ``text`` is the translated function when the mask
    was pickled, and ``others`` are the other fields of the ``BlockMask``. Raises ValueError if the
    code of the function has changed since then.
    """
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    held: Any = mods.holding(found, values)
    captured = mods.captured("mask_mod", held)
    if captured.mod.value != text:
        raise ValueError(
            "mask_mod must be the function with which the pickled BlockMask was created, got "
            f"{captured.mod}, which has changed since then; create the block mask again with "
            "create_block_mask"
        )
    reads = mods.parameters_read("mask_mod", held)
    return BlockMask(mask_mod=held, captured=captured, reads=reads, **others)
