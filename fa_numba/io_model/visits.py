"""Which tiles of S an algorithm visits, and the sums over them that the counts are made of."""

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
    """Batch entries of which each has other lengths, and how many have the same as each."""
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
    """What no mask changes, summed over batch entries and heads, in the package's terms."""

    rows: int  # N_q
    columns: int  # N_k
    all_rows: int  # N_q'
    all_columns: int  # N_k'
    pairs: int  # N_q N_k
    tiles: int  # T_r T_c
    columns_by_row_tile: int  # T_r N_k
    rows_by_column_tile: int  # T_c N_q


def whole_sums(problem: Problem, tiles: BlockSizes, heads: int) -> Whole:
    """The sums over all batch entries and so many heads of each."""
    check_blocks(tiles)
    # Python integers: a count may exceed 64 bits.
    total = [0] * len(Whole._fields)
    for entry, count in entries(problem):
        Nq, Nk = problem.lengths(entry)
        Tr, Tc = ceil_div(Nq, tiles.Br), ceil_div(Nk, tiles.Bc)
        every = (Nq, Nk) if problem.packed else (problem.seqlen_q, problem.seqlen_k)
        one = (Nq, Nk, *every, Nq * Nk, Tr * Tc, Tr * Nk, Tc * Nq)
        total = [t + heads * count * n for t, n in zip(total, one, strict=True)]
    return Whole(*total)


class Visits(NamedTuple):
    """Sums over the visited tiles (i, j) of all batch entries and query heads."""

    tiles: int  # how many there are
    rows: int  # of r_i
    columns: int  # of c_j
    pairs: int  # of r_i c_j
    rows_again: int  # of r_i, without those of column tile 0
    rows_once: int  # of r_i, each row tile once that is visited at all
    rows_whole: int  # of these the rows of tiles without rows past `q_lens`


def starts_in_first_pass(problem: Problem) -> bool:
    """Whether FA-1's pass over column tile 0 is what gives O, l and m (or dQ) their first values.

    Line 2 of Algorithm 1 (line 5 of Algorithm 4) then costs no accesses of its own. That takes a
    first pass that goes over every row of the arrays. It goes over every row tile, also those that
    see nothing of column tile 0 by the causal mask, but it is like any other pass with a window or
    a block mask; and rows past `q_lens` are in no tile, unless sequences are packed, where such
    rows do not exist.
    """
    every_row_has_a_tile = problem.q_lens is None or problem.packed
    takes_every_tile = problem.window == (-1, -1) and not problem.sparse
    return every_row_has_a_tile and takes_every_tile


def rows_read(problem: Problem, visits: Visits) -> int:
    """Rows of FA-1's O, l and m, or dQ, that its visits read: all but those that a visit starts.
    A block mask's lists say of a row tile which visit is its first; a window or `q_lens` do not.
    """
    if starts_in_first_pass(problem):
        return visits.rows_again
    return visits.rows - visits.rows_once * problem.sparse


def rows_started(problem: Problem, visits: Visits, whole: Whole) -> int:
    """Rows that line 2 (line 5) stores before the first pass: with a window or `q_lens` all; with a
    block mask those of row tiles that no visit goes to, or that `q_lens` ends in.
    """
    if starts_in_first_pass(problem):
        return 0
    return whole.all_rows - visits.rows_whole * problem.sparse


def visit_sums(
    problem: Problem, tiles: BlockSizes, block_mask: Any, *, takes_all: bool = False, run: int = 1,
    whole: bool = False,
) -> Visits:  # fmt: skip
    """The sums over the tiles that a kernel visits, in either loop order.

    With `takes_all` column tile 0 is visited by every row tile, whatever it sees, and exists even
    where N_k = 0. With `run` above 1 so many row tiles count as one, which visits every column
    tile that one of them visits: what a block of FA-1's query splits loads of K and V. With `whole`
    a row tile has the rows that the arrays have, also those past `q_lens`.
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
    """How many of the visited tiles have so many columns, c_j, of all batch entries and heads."""
    found: Counter[int] = Counter()
    for entry, mask, count in distinct_heads(problem, blocks_of(problem, block_mask, tiles)):
        visited, columns = _visited(problem, tiles, entry, mask)
        for c, times in zip(columns, visited.sum(axis=0), strict=True):
            found[int(c)] += count * int(times)
    return found


def _visited(
    problem: Problem, tiles: BlockSizes, entry: int, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles of a head are visited, bool (Tr, Tc), and the columns of each column tile."""
    Nk, Bc = problem.lengths(entry)[1], tiles.Bc
    first, end = _column_tiles(problem, entry, tiles.Br, Bc)
    j = np.arange(ceil_div(Nk, Bc))
    visited = (first[:, None] <= j) & (j < end[:, None])
    if mask is not None:
        visited &= mask[: len(first), : len(j)]
    return visited, np.minimum(Nk - j * Bc, Bc)


class RowTiles(NamedTuple):
    """What each row tile of one head (or each run of row tiles) visits."""

    rows: np.ndarray  # its rows, r_i
    seen: np.ndarray  # how many column tiles it visits
    whole: np.ndarray  # whether no row of the tile's is past `q_lens`
    columns: np.ndarray  # the columns of these, sum_j c_j
    with_0: np.ndarray  # whether column tile 0 is one of them

    def all_with_0(self, columns: int) -> RowTiles:
        """These visits, and column tile 0, which has so many columns, by every row tile too."""
        new = ~self.with_0
        seen, all_columns = self.seen + new, self.columns + columns * new
        return self._replace(seen=seen, columns=all_columns, with_0=self.with_0 | new)

    def sums(self) -> Visits:
        """The sums over this head's tiles."""
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
    """The row tiles of a head of this batch entry with this block mask, in runs of so many."""
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
    """For each row tile of this height the first column tile that it sees, and one past the last.

    The columns that two neighbouring rows see overlap or touch, so the rows of a tile together see
    all columns from the first row's first to the last row's last.
    """
    Nq, _ = problem.lengths(entry)
    rows = np.arange(0, Nq, height)
    last = np.minimum(rows + height, Nq) - 1
    return problem.columns_begin(rows, entry) // Bc, -(-problem.columns_end(last, entry) // Bc)


def blocks_of(
    problem: Problem, block_mask: Any, tiles: BlockSizes | None = None
) -> np.ndarray | None:
    """The block mask with four axes, checked; None where the problem is not sparse.

    Without `tiles` it may have any number of blocks.
    """
    if not problem.sparse:
        if block_mask is not None:
            raise ValueError("block_mask is given: allowed is None, as the problem is not sparse")
        return None
    if block_mask is None:
        raise ValueError("block_mask is None: allowed is a bool array, as the problem is sparse")
    return check_block_mask(block_mask, problem, tiles)


def distinct_heads(
    problem: Problem, blocks: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray | None, int]]:
    """Heads that may differ: (batch entry, block mask, how many query heads have the same)."""
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
    """Tiles of S computed, over batch and heads: B H T_r T_c without masks and lengths.

    fa2 computes the visited tiles alone. So does fa1, except that its first pass may go over every
    row tile (`starts_in_first_pass`). standard computes all tiles. `passes` is "fwd" or "bwd", and
    the number is the same for both; a deterministic fa2_backward goes over its tiles twice.
    """
    check_name("algorithm", algorithm, ALGORITHMS)
    check_name("passes", passes, PASSES[:2])
    if algorithm == "standard":
        every = whole_sums(problem, tiles, problem.heads_q).tiles
        blocks_of(problem, block_mask, tiles)
        return every
    takes_all = algorithm == "fa1" and starts_in_first_pass(problem)
    return visit_sums(problem, tiles, block_mask, takes_all=takes_all).tiles
