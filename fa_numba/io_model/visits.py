"""Which tiles of S an algorithm visits, and the sums over these tiles that all counts use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fa_numba.checks import check_name
from fa_numba.integers import ceil_div
from fa_numba.problem import BlockSizes, Problem, check_block_mask, check_blocks

ALGORITHMS = ("standard", "fa1", "fa2")
PASSES = ("fwd", "bwd", "fwd+bwd")


def entries(problem: Problem) -> list[tuple[int, int]]:
    """Return groups of batch entries with equal lengths (valid rows and valid columns).

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    list of tuple of int
        One pair for each group: its first batch entry, and its number of batch entries.
    """
    if problem.q_lens is None and problem.kv_lens is None:
        return [(0, problem.batch)]
    first: dict[tuple[int, int], int] = {}
    count: Counter[tuple[int, int]] = Counter()
    for entry in range(problem.batch):
        lengths = problem.lengths(entry)
        first.setdefault(lengths, entry)
        count[lengths] += 1
    return [(first[lengths], n) for lengths, n in count.items()]


class Whole(NamedTuple):
    """Sums over all tiles, batch entries and heads. They do not depend on masks.

    The formulas below are for one batch entry and head, with the symbols of `fa_numba.io_model`.

    Parameters
    ----------
    rows, columns : int
        Valid rows N_q, valid columns N_k.
    all_rows, all_columns : int
        Rows N_q' and columns N_k' of the arrays.
    pairs : int
        Pairs of a row and a column, N_q N_k.
    tiles : int
        Tiles of S, T_r T_c.
    columns_by_row_tile : int
        Columns, counted once for each row tile: T_r N_k.
    rows_by_column_tile : int
        Rows, counted once for each column tile: T_c N_q.
    """

    rows: int
    columns: int
    all_rows: int
    all_columns: int
    pairs: int
    tiles: int
    columns_by_row_tile: int
    rows_by_column_tile: int


def whole_sums(problem: Problem, tiles: BlockSizes, heads: int) -> Whole:
    """Return the sums over all batch entries, with `heads` heads each.

    Parameters
    ----------
    problem : Problem
        The problem.
    tiles : object with Br and Bc
        Block sizes.
    heads : int
        Heads of a batch entry: heads_q or heads_k.

    Returns
    -------
    Whole
        The sums.
    """
    check_blocks(tiles)
    # Python's integers, because a sum may exceed 64 bits.
    total = [0] * len(Whole._fields)
    for entry, count in entries(problem):
        Nq, Nk = problem.lengths(entry)
        Tr, Tc = ceil_div(Nq, tiles.Br), ceil_div(Nk, tiles.Bc)
        every = (Nq, Nk) if problem.packed else (problem.seqlen_q, problem.seqlen_k)
        one = (Nq, Nk, *every, Nq * Nk, Tr * Tc, Tr * Nk, Tc * Nq)
        total = [t + heads * count * n for t, n in zip(total, one, strict=True)]
    return Whole(*total)


class Visits(NamedTuple):
    """Sums over the visited tiles (i, j) of all batch entries and query heads.

    r_i is the number of valid rows of row tile i, c_j the number of valid columns of column tile j.

    Parameters
    ----------
    tiles : int
        Number of visited tiles.
    rows, columns, pairs : int
        Sums of r_i, of c_j and of r_i c_j.
    rows_again : int
        Sum of r_i over the visited tiles outside of column tile 0.
    rows_once : int
        Sum of r_i over the row tiles that are visited. Each row tile counts once.
    rows_whole : int
        Sum of r_i over the visited row tiles that contain no rows past `q_lens`. Each row tile
        counts once.
    """

    tiles: int
    rows: int
    columns: int
    pairs: int
    rows_again: int
    rows_once: int
    rows_whole: int


def starts_in_first_pass(problem: Problem) -> bool:
    """Return whether FA-1's pass over column tile 0 gives O, l and m (or dQ) their first values.

    If the result is True, line 2 of Algorithm 1 (line 5 of Algorithm 4) is not a separate step, and
    has no accesses. The first pass then visits every row tile, even row tiles that do not see
    column tile 0 under a causal mask.

    The result is False in three cases: with a window, with a block mask, and with `q_lens` if the
    sequences are not packed. In the third case the rows past `q_lens` are in no tile.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    bool
        Whether the first pass gives the first values.

    Examples
    --------
    >>> starts_in_first_pass(Problem(1, 1, 1, 8, 8, 2, causal=True))
    True
    >>> starts_in_first_pass(Problem(1, 1, 1, 8, 8, 2, window=(4, 0)))
    False
    """
    every_row_has_a_tile = problem.q_lens is None or problem.packed
    takes_every_tile = problem.window == (-1, -1) and not problem.sparse
    return every_row_has_a_tile and takes_every_tile


def rows_read(problem: Problem, visits: Visits) -> int:
    """Return the number of rows of FA-1's O, l and m (or dQ) that the visits read.

    In general every visit reads the rows of its row tile. There are two exceptions. If the first
    pass gives the first values (`starts_in_first_pass`), the visits of the first pass read nothing.
    With a block mask, the first visit of each row tile reads nothing.

    Parameters
    ----------
    problem : Problem
        The problem.
    visits : Visits
        Sums over the visited tiles.

    Returns
    -------
    int
        Rows. A row counts once for each visit that reads the row.
    """
    if starts_in_first_pass(problem):
        return visits.rows_again
    return visits.rows - visits.rows_once * problem.sparse


def rows_started(problem: Problem, visits: Visits, whole: Whole) -> int:
    """Return the number of rows that FA-1 stores before the first pass, to give them first values.

    These stores are line 2 of Algorithm 1, or line 5 of Algorithm 4:

        case                                          rows that are stored
        the first pass gives the first values         none
        a window or `q_lens`, without a block mask    all rows
        a block mask                                  rows of row tiles that are never visited, and
                                                      of row tiles in which `q_lens` ends

    Parameters
    ----------
    problem : Problem
        The problem.
    visits : Visits
        Sums over the visited tiles.
    whole : Whole
        Sums over all tiles.

    Returns
    -------
    int
        Number of rows.
    """
    if starts_in_first_pass(problem):
        return 0
    return whole.all_rows - visits.rows_whole * problem.sparse


def visit_sums(
    problem: Problem, tiles: BlockSizes, block_mask: Any, *, takes_all: bool = False, run: int = 1,
    whole: bool = False,
) -> Visits:  # fmt: skip
    """Return the sums over the tiles that a kernel visits. Both loop orders have the same sums.

    Parameters
    ----------
    problem : Problem
        The problem.
    tiles : object with Br and Bc
        Block sizes.
    block_mask : array_like of bool or None
        Tiles that are computed.
    takes_all : bool, default False
        Whether every row tile visits column tile 0, even if no row sees a column of this tile.
        Column tile 0 then exists even if N_k = 0.
    run : int, default 1
        Number of neighbouring row tiles that count as one row tile. This larger row tile visits
        every column tile that at least one of the row tiles visits. With FA-1's query splits, the
        row tiles of a thread block are such a run: the thread block loads a column tile once for
        the complete run.
    whole : bool, default False
        Whether all rows of a visited row tile count, also rows past `q_lens`. By default, only the
        valid rows count.

    Returns
    -------
    Visits
        The sums.
    """
    check_blocks(tiles)
    total = [0] * len(Visits._fields)
    for entry, mask, count in distinct_heads(problem, blocks_of(problem, block_mask, tiles)):
        of_head = _row_tiles(problem, tiles, entry, mask, run)
        if whole:
            starts = np.arange(len(of_head.rows)) * run * tiles.Br
            of_head = of_head._replace(rows=np.minimum(problem.seqlen_q - starts, run * tiles.Br))
        if takes_all:
            of_head = of_head.all_with_0(min(tiles.Bc, problem.lengths(entry)[1]))
        total = [t + count * n for t, n in zip(total, of_head.sums(), strict=True)]
    return Visits(*total)


def columns_visited(problem: Problem, tiles: BlockSizes, block_mask: Any) -> Counter[int]:
    """Return how many tiles are visited, separately for each number of columns of a tile.

    The last column tile may have fewer columns than the other tiles. The count is over all batch
    entries and query heads.

    Parameters
    ----------
    problem : Problem
        The problem.
    tiles : object with Br and Bc
        Block sizes.
    block_mask : array_like of bool or None
        Tiles that are computed.

    Returns
    -------
    Counter
        Maps a number of columns to the number of visited tiles with this number of columns.
    """
    found: Counter[int] = Counter()
    for entry, mask, count in distinct_heads(problem, blocks_of(problem, block_mask, tiles)):
        visited, columns = _visited(problem, tiles, entry, mask)
        for c, times in zip(columns, visited.sum(axis=0), strict=True):
            found[int(c)] += count * int(times)
    return found


def _visited(
    problem: Problem, tiles: BlockSizes, entry: int, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the visited tiles of a head, and the number of columns of each column tile.

    The visited tiles are a bool array of shape (T_r, T_c). `entry` is the head's batch entry, and
    `mask` the head's block mask or None.
    """
    Nk, Bc = problem.lengths(entry)[1], tiles.Bc
    first, end = _column_tiles(problem, entry, tiles.Br, Bc)
    j = np.arange(ceil_div(Nk, Bc))
    visited = (first[:, None] <= j) & (j < end[:, None])
    if mask is not None:
        visited &= mask[: len(first), : len(j)]
    return visited, np.minimum(Nk - j * Bc, Bc)


class RowTiles(NamedTuple):
    """The row tiles of one head, and the column tiles that each row tile visits.

    All arrays have one element per row tile. Several neighbouring row tiles may count as one larger
    row tile, if the result is for such runs of row tiles.

    Parameters
    ----------
    rows : ndarray of int
        Number of rows of the row tile, r_i.
    seen : ndarray of int
        Number of column tiles that the row tile visits.
    whole : ndarray of bool
        Whether the row tile contains no rows past `q_lens`.
    columns : ndarray of int
        Sum of the columns of the visited column tiles, sum_j c_j.
    with_0 : ndarray of bool
        Whether the row tile visits column tile 0.
    """

    rows: np.ndarray
    seen: np.ndarray
    whole: np.ndarray
    columns: np.ndarray
    with_0: np.ndarray

    def all_with_0(self, columns: int) -> RowTiles:
        """Return these row tiles, with a visit of column tile 0 added to every row tile.

        Row tiles that already visit column tile 0 do not change.

        Parameters
        ----------
        columns : int
            Columns of column tile 0.

        Returns
        -------
        RowTiles
            The row tiles.
        """
        new = ~self.with_0
        seen, all_columns = self.seen + new, self.columns + columns * new
        return self._replace(seen=seen, columns=all_columns, with_0=self.with_0 | new)

    def sums(self) -> Visits:
        """Return the sums over this head's tiles.

        Returns
        -------
        Visits
            The sums.
        """
        return Visits(
            tiles=int(self.seen.sum()),
            rows=int(self.rows @ self.seen),
            columns=int(self.columns.sum()),
            pairs=int(self.rows @ self.columns),
            rows_again=int(self.rows @ (self.seen - self.with_0)),
            rows_once=int(self.rows @ (self.seen > 0)),
            rows_whole=int(self.rows @ ((self.seen > 0) & self.whole)),
        )


def _row_tiles(
    problem: Problem, tiles: BlockSizes, entry: int, mask: np.ndarray | None, run: int
) -> RowTiles:
    """Return the row tiles of one head.

    `entry` is the head's batch entry, and `mask` the head's block mask or None. `run` neighbouring
    row tiles count as one row tile.
    """
    Nq, Nk = problem.lengths(entry)
    Bc, height = tiles.Bc, run * tiles.Br
    if mask is None:
        first, end = _column_tiles(problem, entry, height, Bc)
        seen, with_0 = end - first, (first == 0) & (end > 0)
        columns = np.minimum(end * Bc, Nk) - first * Bc
    else:
        visited, of_tile = _visited(problem, tiles, entry, mask)
        visited = np.logical_or.reduceat(visited, np.arange(0, len(visited), run), axis=0)
        seen, with_0 = visited.sum(axis=1), visited[:, :1].any(axis=1)
        columns = visited @ of_tile
    begin = np.arange(0, Nq, height)
    rows = np.minimum(Nq - begin, height)
    whole = (begin + height <= Nq) | (problem.q_lens is None) | problem.packed
    return RowTiles(rows, seen, whole, columns, with_0)


def _column_tiles(
    problem: Problem, entry: int, height: int, Bc: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with the range of column tiles that each row tile sees.

    The first array contains the first column tile, and the second array the last one plus 1.

    `entry` is the batch entry. `height` is the number of rows of a row tile, and `Bc` the number of
    columns of a column tile. The ranges of columns that two neighbouring rows see overlap or touch.
    A row tile therefore sees all columns from the first column of its first row to the last column
    of its last row.
    """
    Nq, _ = problem.lengths(entry)
    rows = np.arange(0, Nq, height)
    last = np.minimum(rows + height, Nq) - 1
    return problem.columns_begin(rows, entry) // Bc, -(-problem.columns_end(last, entry) // Bc)


def blocks_of(
    problem: Problem, block_mask: Any, tiles: BlockSizes | None = None
) -> np.ndarray | None:
    """Check the block mask of a problem, and return it with four axes.

    Parameters
    ----------
    problem : Problem
        The problem.
    block_mask : array_like of bool or None
        Tiles that are computed, with two to four axes.
    tiles : object with Br and Bc, optional
        Block sizes. If None, the mask may have any number of blocks.

    Returns
    -------
    ndarray of bool or None
        The block mask, shape (batch or 1, heads_q or 1, blocks of rows, blocks of columns). None if
        the problem has no block mask: `problem.sparse` is False.

    Raises
    ------
    TypeError
        If the mask is not bool.
    ValueError
        If the mask has another shape, is missing, or is given for a problem that is not sparse.
    """
    if not problem.sparse:
        if block_mask is not None:
            raise ValueError(
                "block_mask must be None for a problem with sparse=False, got an array; pass a "
                "Problem with sparse=True, or leave block_mask out"
            )
        return None
    if block_mask is None:
        raise ValueError("block_mask must be a bool array for a problem with sparse=True, got None")
    return check_block_mask(block_mask, problem, tiles)


def distinct_heads(
    problem: Problem, blocks: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray | None, int]]:
    """Yield the heads of a problem in groups with equal lengths and equal block mask.

    Parameters
    ----------
    problem : Problem
        The problem.
    blocks : ndarray of bool or None
        The block mask as `blocks_of` returns it.

    Yields
    ------
    entry : int
        A batch entry with heads of the group.
    mask : ndarray of bool or None
        The block mask of the heads.
    count : int
        Number of query heads in the group.
    """
    if blocks is None:
        for entry, count in entries(problem):
            yield entry, None, count * problem.heads_q
        return
    each_apart = [(entry, 1) for entry in range(problem.batch)]
    for entry, count in entries(problem) if len(blocks) == 1 else each_apart:
        masks = blocks[entry % len(blocks)]
        for mask in masks:
            yield entry, mask, count * (problem.heads_q // len(masks))


def tiles_visited(
    algorithm: str,
    problem: Problem,
    tiles: BlockSizes,
    *,
    passes: str = "fwd",
    block_mask: Any = None,
) -> int:
    """Return the number of tiles of S that an algorithm computes.

    The number is the sum over batch entries and query heads. FA-2 computes the visited tiles only.
    FA-1 computes the visited tiles, too, but its first pass may visit every row tile; see
    `starts_in_first_pass`. Standard attention computes all tiles.

    Parameters
    ----------
    algorithm : str
        "standard", "fa1" or "fa2".
    problem : Problem
        Sizes and masks.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    passes : {"fwd", "bwd"}, default "fwd"
        The pass. Both passes have the same number of tiles. A deterministic FA-2 backward pass
        computes each tile twice, but each tile counts once.
    block_mask : array_like of bool, optional
        Tiles that are computed; required if and only if the problem is sparse.

    Returns
    -------
    int
        Number of tiles. Without masks and lengths it is B H T_r T_c for B batch entries, H query
        heads, T_r row tiles and T_c column tiles.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, or the block mask is not bool.
    ValueError
        If a name is not allowed, a block size is below 1, or the block mask does not fit.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> tiles = SimpleNamespace(Br=4, Bc=4)
    >>> causal = Problem(1, 2, 2, 16, 16, 8, causal=True)
    >>> [tiles_visited(name, causal, tiles) for name in ("standard", "fa2")]
    [32, 20]
    """
    check_name("algorithm", algorithm, ALGORITHMS)
    check_name("passes", passes, PASSES[:2])
    if algorithm == "standard":
        every = whole_sums(problem, tiles, problem.heads_q).tiles
        blocks_of(problem, block_mask, tiles)
        return every
    takes_all = algorithm == "fa1" and starts_in_first_pass(problem)
    return visit_sums(problem, tiles, block_mask, takes_all=takes_all).tiles
