"""Global-memory accesses, FLOPs and workspace in closed form.

Three kinds of numbers, not to be mixed:
- `standard`, `fa1`, `fa2`, and these names with `_backward`: exact loads and stores of this
  package's kernels, per array, in elements. Ragged edges, skipped tiles and valid lengths count as
  what they are.
- `theta_standard`, `theta_flash`, `saha_ye`: the published bounds with every constant set to 1.
- `standard_paper`, `fa1_paper`, `flops`: how the papers themselves count.

Below, for each batch entry: N_q, N_k its valid rows and columns, N_q', N_k' those that its arrays
have (seqlen_q, seqlen_k; packed sequences have no others than the valid ones), d the head
dimension, T_r = ceil(N_q/B_r), T_c = ceil(N_k/B_c), r_i and c_j the valid rows and columns of row
tile i and column tile j. Tile (i, j) of S is visited when a row of it sees a column of it, by the
causal mask and the window, and the block mask has it; without any of them all T_r T_c are. Sums
are over visited tiles: sum c_j is T_r N_k, and sum r_i is T_c N_q, when all are.

What is given "per head" is summed over batch entries and query heads. A query head loads the K/V
head it shares with others for itself, unless it says "per K/V head". Integers that all threads
read at one place (lengths, block mask) and ALiBi slopes are not counted; softcap and dropout cost
accesses only in `standard_backward`. The dtype of Q, K, V and O changes the counts of fa1 alone.
No kernel is imported here.

`block_mask` is the bool array (T_r, T_c) of the longest sequences, or that with leading axes that
broadcast to (B, Hq); it must be given if and only if the problem is sparse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .options import Features
from .problem import BlockSizes, Problem, as_size, check_block_mask

ALGORITHMS = ("standard", "fa1", "fa2")
PASSES = ("fwd", "bwd", "fwd+bwd")

ELEMENT_BYTES = 4  # float32
HALF_BYTES = 2  # float16 and bfloat16
# Arrays of the problem's own dtype
_OF_ONE_DTYPE = frozenset(("Q", "K", "V", "O", "S", "P", "dO", "dQ", "dK", "dV", "dP", "dS"))
PAPER_BYTES = 2  # fp16, what FA-1 Fig. 2 counts


@dataclass(frozen=True)
class Accesses:
    """Global-memory loads and stores of one call, in elements by array (Q K V O L l m S P ...).

    An array goes by the name of the kernel's parameter. An atomic add is a load and a store.
    `dtype` is that of Q, K, V, O, S, P and their gradients, but of those in `sums`; every other
    array is float32.

    An array that is never loaded (or stored) is left out of `loads` (or `stores`).
    """

    loads: dict[str, int]
    stores: dict[str, int]
    dtype: str = "float32"
    sums: tuple[str, ...] = ()

    @property
    def total_loads(self) -> int:
        return sum(self.loads.values())

    @property
    def total_stores(self) -> int:
        return sum(self.stores.values())

    @property
    def total(self) -> int:
        return self.total_loads + self.total_stores

    @property
    def bytes(self) -> int:
        """Bytes moved."""
        own = ELEMENT_BYTES if self.dtype == "float32" else HALF_BYTES
        halves = _OF_ONE_DTYPE - set(self.sums)
        counts = (*self.loads.items(), *self.stores.items())
        return sum(n * (own if name in halves else ELEMENT_BYTES) for name, n in counts)


def _accesses(problem: Problem, loads: dict[str, int], stores: dict[str, int]) -> Accesses:
    """These counts without the arrays that are not touched."""

    def touched(counts: dict[str, int]) -> dict[str, int]:
        return {name: n for name, n in counts.items() if n}

    return Accesses(touched(loads), touched(stores), problem.dtype)


def _sum(problem: Problem, parts: Iterable[Accesses]) -> Accesses:
    """The accesses of kernels that run one after the other; parameters of one name add up."""
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for part in parts:
        loads.update(part.loads)
        stores.update(part.stores)
    return Accesses(dict(loads), dict(stores), problem.dtype)


def _entries(problem: Problem) -> list[tuple[int, int]]:
    """A batch entry of each pair of lengths, and how many have these."""
    if problem.q_lens is None and problem.kv_lens is None:
        return [(0, problem.batch)]
    first: dict[tuple[int, int], int] = {}
    count: Counter[tuple[int, int]] = Counter()
    for entry in range(problem.batch):
        lengths = problem.lengths(entry)
        first.setdefault(lengths, entry)
        count[lengths] += 1
    return [(first[lengths], n) for lengths, n in count.items()]


class _Whole(NamedTuple):
    """Sums over batch entries and heads of what no mask changes, in the terms of the docstrings."""

    rows: int  # N_q
    columns: int  # N_k
    all_rows: int  # N_q'
    all_columns: int  # N_k'
    pairs: int  # N_q N_k
    tiles: int  # T_r T_c
    columns_by_row_tile: int  # T_r N_k
    rows_by_column_tile: int  # T_c N_q


def _whole(problem: Problem, tiles: BlockSizes, heads: int) -> _Whole:
    # Python integers: a count may exceed 64 bits.
    total = [0] * len(_Whole._fields)
    for entry, count in _entries(problem):
        Nq, Nk = problem.lengths(entry)
        Tr, Tc = -(-Nq // tiles.Br), -(-Nk // tiles.Bc)
        every = (Nq, Nk) if problem.packed else (problem.seqlen_q, problem.seqlen_k)
        one = (Nq, Nk, *every, Nq * Nk, Tr * Tc, Tr * Nk, Tc * Nq)
        total = [t + heads * count * n for t, n in zip(total, one, strict=True)]
    return _Whole(*total)


class _Visits(NamedTuple):
    """Sums over the visited tiles of all batch entries and query heads, of:"""

    tiles: int  # 1
    rows: int  # r_i
    columns: int  # c_j
    pairs: int  # r_i c_j
    rows_again: int  # r_i, column tile 0 left out
    rows_once: int  # r_i, once a row tile


def _visits(
    problem: Problem,
    tiles: BlockSizes,
    block_mask: Any,
    *,
    takes_all: bool = False,
    run: int = 1,
) -> _Visits:
    """The tiles that a kernel visits: both loop orders go through the same ones.

    With `takes_all` column tile 0 visits every row tile whatever the mask says, and exists even
    where N_k = 0. With `run` above 1 so many row tiles count as one, which visits the column
    tiles that any of them visits.
    """
    total = [0] * len(_Visits._fields)
    for entry, mask, count in _distinct_heads(problem, _as_blocks(problem, block_mask, tiles)):
        of_head = _row_tiles(problem, tiles, entry, mask, run)
        if takes_all:
            of_head = of_head.all_with_0(min(tiles.Bc, problem.lengths(entry)[1]))
        total = [t + count * n for t, n in zip(total, of_head.sums(), strict=True)]
    return _Visits(*total)


class _RowTiles(NamedTuple):
    """What the row tiles (or runs of them) of one head visit: a number for each."""

    rows: np.ndarray  # r_i
    seen: np.ndarray  # column tiles visited
    columns: np.ndarray  # their columns, sum_j c_j
    with_0: np.ndarray  # whether column tile 0 is one of them

    def all_with_0(self, columns: int) -> _RowTiles:
        """The same with column tile 0, which has so many columns, visited by every row tile."""
        new = ~self.with_0
        return _RowTiles(
            self.rows, self.seen + new, self.columns + columns * new, self.with_0 | new
        )

    def sums(self) -> _Visits:
        return _Visits(
            tiles=int(self.seen.sum()),
            rows=int(self.rows @ self.seen),
            columns=int(self.columns.sum()),
            pairs=int(self.rows @ self.columns),
            rows_again=int(self.rows @ (self.seen - self.with_0)),
            rows_once=int(self.rows @ (self.seen > 0)),
        )


def _row_tiles(
    problem: Problem, tiles: BlockSizes, entry: int, mask: np.ndarray | None, run: int
) -> _RowTiles:
    """The row tiles of a head of this batch entry and block mask, in runs of so many."""
    Nq, Nk = problem.lengths(entry)
    Bc, height = tiles.Bc, run * tiles.Br
    if mask is None:
        first, end = _column_tiles(problem, entry, height, Bc)
        seen, with_0 = end - first, (first == 0) & (end > 0)
        columns = np.minimum(end * Bc, Nk) - first * Bc
    else:
        first, end = _column_tiles(problem, entry, tiles.Br, Bc)
        j = np.arange(-(-Nk // Bc))
        visited = mask[: len(first), : len(j)] & (first[:, None] <= j) & (j < end[:, None])
        visited = np.logical_or.reduceat(visited, np.arange(0, len(first), run), axis=0)
        seen, with_0 = visited.sum(axis=1), visited[:, :1].any(axis=1)
        columns = visited @ np.minimum(Nk - j * Bc, Bc)
    rows = np.minimum(Nq - np.arange(0, Nq, height), height)
    return _RowTiles(rows, seen, columns, with_0)


def _column_tiles(
    problem: Problem, entry: int, height: int, Bc: int
) -> tuple[np.ndarray, np.ndarray]:
    """First and one past the last of the column tiles that row tiles of this height see.

    The ranges of columns that two neighbouring rows see overlap or touch, so successive rows see
    all columns from the first one's first to the last one's last.
    """
    Nq, _ = problem.lengths(entry)
    rows = np.arange(0, Nq, height)
    last = np.minimum(rows + height, Nq) - 1
    return problem.columns_begin(rows, entry) // Bc, -(-problem.columns_end(last, entry) // Bc)


def _as_blocks(
    problem: Problem, block_mask: Any, tiles: BlockSizes | None = None
) -> np.ndarray | None:
    """The block mask with four axes, checked; for tiles of any size unless `tiles` are given."""
    if not problem.sparse:
        if block_mask is not None:
            raise ValueError("block_mask is given: allowed is None, as the problem is not sparse")
        return None
    if block_mask is None:
        raise ValueError("block_mask is None: allowed is a bool array, as the problem is sparse")
    return check_block_mask(block_mask, problem, tiles)


def _distinct_heads(
    problem: Problem, blocks: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray | None, int]]:
    """(batch entry, its block mask, query heads that have the same) for all that may differ."""
    if blocks is None:
        for entry, count in _entries(problem):
            yield entry, None, count * problem.heads_q
        return
    each_apart = [(entry, 1) for entry in range(problem.batch)]
    for entry, count in _entries(problem) if len(blocks) == 1 else each_apart:
        masks = blocks[entry % len(blocks)]
        for mask in masks:
            yield entry, mask, count * (problem.heads_q // len(masks))


def standard(
    problem: Problem,
    tiles: BlockSizes,
    *,
    return_lse: bool = False,
    row_resident: bool = True,
    block_mask: Any = None,
) -> Accesses:
    """Accesses of standard attention (FA-1 Algorithm 0) in three tiled kernels.

    Per head:
        S = Q K^T   loads Q N_q d, K T_r N_k d, bias N_q N_k    stores S N_q N_k
        softmax     loads S N_q N_k                             stores P N_q N_k, L N_q'
        O = P V     loads P N_q N_k, V T_r N_k d                stores O N_q' d
    L with `return_lse`, bias if there is one. P takes S's place in memory and is named P from then
    on. A row of S too long for shared memory (`row_resident` False) is loaded twice by the softmax.
    No mask skips a tile, the block mask neither.
    """
    _as_blocks(problem, block_mask, tiles)
    d, head = problem.head_dim, _whole(problem, tiles, problem.heads_q)
    loads = {
        "Q": head.rows * d,
        "K": head.columns_by_row_tile * d,
        "bias": head.pairs if problem.bias else 0,
        "S": head.pairs * (1 if row_resident else 2),
        "P": head.pairs,
        "V": head.columns_by_row_tile * d,
    }
    stores = {
        "S": head.pairs,
        "P": head.pairs,
        "O": head.all_rows * d,
        "L": head.all_rows if return_lse else 0,
    }
    return _accesses(problem, loads, stores)


def fa1(
    problem: Problem,
    tiles: BlockSizes,
    *,
    query_splits: int = 1,
    return_lse: bool = False,
    block_mask: Any = None,
) -> Accesses:
    """Accesses of FA-1's Algorithm 1: K/V outer, Q inner; O, l and m through global memory.

    Column tile 0 initialises O, l and m (line 2) and so visits every row tile; per head:
        loads   Q: sum r_i d    K, V: sum_j s_j c_j d each    bias: sum r_i c_j
                O: sum_{j>0} r_i d    l, m: sum_{j>0} r_i each (the initial values need no read)
        stores  O: sum r_i d    l, m: sum r_i each
    with s_j the query splits that have a row tile which column tile j visits. All visited, one
    split, N_q = N_k = N: Q, K, V and O together are (3 T_c + 1) N d.

    With a window, `q_lens` or a block mask column tile 0 is as the others. Line 2 then stores
    O N_q' d, l and m N_q' each, and the loads of O, l and m have no "j > 0".

    `query_splits` deals the row tiles of the longest sequence out in runs of
    ceil(T_r / query_splits); a run without tiles does nothing. `return_lse` adds L = m + log l: l
    and m loaded once more, N_q' each, and L stored.

    In 16 bits O is kept in a float32 array `A`, and the last visit of a row tile rounds it to O:
        loads   A: what O loads above
        stores  O: r_i d in row tile i's last visit    A: r_i d in each of the others
    and where line 2 stores O it stores A too, N_q' d each.
    """
    splits = as_size("query_splits", query_splits)
    d, head = problem.head_dim, _whole(problem, tiles, problem.heads_q)
    run = -(-problem.seqlen_q // (tiles.Br * splits))
    initialises = Features.of(problem).initialises
    visits = _visits(problem, tiles, block_mask, takes_all=not initialises)
    by_split = _visits(problem, tiles, block_mask, takes_all=not initialises, run=run)

    read = visits.rows if initialises else visits.rows_again
    started = head.all_rows if initialises else 0
    written = visits.rows + started
    lse = head.all_rows if return_lse else 0
    kept = "O" if problem.dtype == "float32" else "A"
    loads = {
        "Q": visits.rows * d,
        "K": by_split.columns * d,
        "V": by_split.columns * d,
        "bias": visits.pairs if problem.bias else 0,
        kept: read * d,
        "l": read + lse,
        "m": read + lse,
    }
    stores = {kept: written * d, "l": written, "m": written, "L": lse}
    if kept == "A":
        stores["A"] -= visits.rows_once * d
        stores["O"] = (visits.rows_once + started) * d
    return _accesses(problem, loads, stores)


def fa2(problem: Problem, tiles: BlockSizes, *, block_mask: Any = None) -> Accesses:
    """Accesses of FA-2's Algorithm 1: Q outer, K/V inner; O written once.

    Per head:
        loads   Q: N_q d    K, V: sum c_j d each    bias: sum r_i c_j
        stores  O: N_q' d    L: N_q'
    All visited, N_q = N_k = N: Q, K, V and O together are (2 T_r + 2) N d. L is always stored.
    """
    d, head = problem.head_dim, _whole(problem, tiles, problem.heads_q)
    visits = _visits(problem, tiles, block_mask)
    loads = {
        "Q": head.rows * d,
        "K": visits.columns * d,
        "V": visits.columns * d,
        "bias": visits.pairs if problem.bias else 0,
    }
    return _accesses(problem, loads, {"O": head.all_rows * d, "L": head.all_rows})


def standard_backward(
    problem: Problem,
    tiles: BlockSizes,
    *,
    row_resident: bool = True,
    forward_resident: bool = True,
    block_mask: Any = None,
    dbias: bool = False,
) -> Accesses:
    """Accesses of standard attention's gradients (FA-1 Algorithm 3) in seven tiled kernels.

    P is made anew by the forward's scores and softmax. An array goes by the name that it has in
    its kernel. Per head:
        scores             loads Q N_q d, K T_r N_k d, bias N_q N_k    stores S N_q N_k
        softmax            loads S N_q N_k                             stores P N_q N_k
        dP = dO V^T        as scores without bias, named Q, K, S
        dS = P o (dP - D)  loads P, dP N_q N_k each                    stores dS N_q N_k
        dV = P^T dO        loads P N_q N_k, dO T_c N_q d               stores dV N_k' d
        dQ = dS K          loads P N_q N_k, V T_r N_k d                stores O N_q' d
        dK = dS^T Q        as dV, named P, dO, dV
    with dV, and dK, stored per K/V head. Dropout makes dS also store P, N_q N_k, without what is
    dropped; `dbias` makes it add to dbias, N_q N_k atomic adds, each a load and a store. A softcap
    takes the scores once more, to multiply dS by its slope: as dP, and S also loaded, N_q N_k.

    A row of S too long for shared memory (`forward_resident` False) is loaded twice by the softmax;
    rows of P and dP that are too long together (`row_resident` False), twice for dS. No mask skips
    a tile, the block mask neither.
    """
    _as_blocks(problem, block_mask, tiles)
    _check_dbias(problem, dbias)
    d, head = problem.head_dim, _whole(problem, tiles, problem.heads_q)
    shared = _whole(problem, tiles, problem.heads_k)
    matrix = head.pairs
    reads, forward_reads = (1 if resident else 2 for resident in (row_resident, forward_resident))
    bias = {"bias": matrix if problem.bias else 0}
    product = {"Q": head.rows * d, "K": head.columns_by_row_tile * d}
    dbias_adds = {"dbias": matrix if dbias else 0}
    kept = {"P": matrix if problem.dropout_p else 0}

    scores = _accesses(problem, product | bias, {"S": matrix})
    softmax = _accesses(problem, {"S": forward_reads * matrix}, {"P": matrix})
    dP = _accesses(problem, product, {"S": matrix})
    dS = _accesses(
        problem,
        {"P": reads * matrix, "dP": reads * matrix} | dbias_adds,
        {"dS": matrix} | kept | dbias_adds,
    )
    slopes = _accesses(problem, product | {"S": matrix}, {"S": matrix})
    transposed_output = _accesses(
        problem, {"P": matrix, "dO": head.rows_by_column_tile * d}, {"dV": shared.all_columns * d}
    )
    dQ = _accesses(
        problem, {"P": matrix, "V": head.columns_by_row_tile * d}, {"O": head.all_rows * d}
    )
    kernels = [scores, softmax, dP, dS, transposed_output, dQ, transposed_output]
    return _sum(problem, kernels if problem.softcap is None else [*kernels, slopes])


def fa1_backward(
    problem: Problem,
    tiles: BlockSizes,
    *,
    query_splits: int = 1,
    block_mask: Any = None,
    dbias: bool = False,
) -> Accesses:
    """Accesses of FA-1's Algorithm 4: K/V outer, Q inner; dQ through global memory in every pass.

    Column tile 0 initialises dQ (line 5) and so visits every row tile; per head:
        loads   Q, O, dO: sum r_i d each    L: sum r_i    bias: sum r_i c_j
                dQ: sum_{j>0} r_i d (line 5's zeros need no read)
        stores  dQ: sum r_i d
    and per K/V head K, V loaded, N_k d each, and dK, dV stored, N_k' d each. `dbias` adds
    sum r_i c_j atomic adds to dbias, each a load and a store.

    With a window, `q_lens` or a block mask column tile 0 is as the others. Line 5 then stores
    dQ N_q' d, and its loads have no "j > 0".

    In 16 bits dQ is kept in a float32 array `A`, and the last visit of a row tile rounds it to dQ,
    as in `fa1`. `query_splits` deals the row tiles out as there. Each of the runs loads K and V and
    adds to float32 sums of dK and dV, N_k' d atomic adds each; a kernel rounds them:
        loads  A: 2 N_k' d    stores  dQ: 2 N_k' d (dK and dV, by the name of that kernel's result)
    """
    _check_dbias(problem, dbias)
    splits = as_size("query_splits", query_splits)
    d, head = problem.head_dim, _whole(problem, tiles, problem.heads_q)
    shared = _whole(problem, tiles, problem.heads_k)
    initialises = Features.of(problem).initialises
    visits = _visits(problem, tiles, block_mask, takes_all=not initialises)
    run = -(-problem.seqlen_q // (tiles.Br * splits))
    runs = -(-problem.seqlen_q // (tiles.Br * run))

    read = visits.rows if initialises else visits.rows_again
    started = head.all_rows if initialises else 0
    kept = "dQ" if problem.dtype == "float32" else "A"
    dbias_adds = {"dbias": visits.pairs if dbias else 0}
    loads = {
        "Q": visits.rows * d,
        "O": visits.rows * d,
        "dO": visits.rows * d,
        "L": visits.rows,
        "bias": visits.pairs if problem.bias else 0,
        kept: read * d,
        "K": runs * shared.columns * d,
        "V": runs * shared.columns * d,
    }
    stores = {
        kept: (visits.rows + started) * d,
        "dK": runs * shared.all_columns * d,
        "dV": runs * shared.all_columns * d,
    }
    if kept == "A":
        stores["A"] -= visits.rows_once * d
        stores["dQ"] = (visits.rows_once + started) * d
    grid = _accesses(problem, loads | dbias_adds, stores | dbias_adds)
    if splits == 1:
        return grid
    sums = {name: stores[name] for name in ("dK", "dV")}
    rounded = 2 * shared.all_columns * d
    parts = _accesses(problem, sums, {}), _accesses(problem, {"A": rounded}, {"dQ": rounded})
    return replace(_sum(problem, (grid, *parts)), sums=("dK", "dV"))


def fa2_backward(
    problem: Problem,
    tiles: BlockSizes,
    *,
    deterministic: bool = False,
    sweep_tiles: BlockSizes | None = None,
    block_mask: Any = None,
    dbias: bool = False,
) -> Accesses:
    """Accesses of FA-2's Algorithm 2: D first, then a grid over K/V blocks.

    Per head:
        row sums      loads O, dO: N_q d each           stores D: N_q, dQ = 0: N_q' d
        the K/V grid  loads Q, dO: sum r_i d each, L, D: sum r_i each, bias: sum r_i c_j
                      dQ: sum r_i d atomic adds, each a load and a store
    and per K/V head K, V loaded, N_k d each, and dK, dV stored, N_k' d each. `dbias` adds
    sum r_i c_j atomic adds to dbias, each a load and a store.

    In 16 bits dQ is summed in a float32 array `A`, and then rounded:
        loads  A: N_q' d    stores  dQ: N_q' d

    `deterministic` drops the atomic adds to dQ, the zeros and the rounding. A grid over Q blocks,
    of `sweep_tiles` or the same, makes dQ instead: per head it
        loads  Q, dO: N_q d each, L, D: N_q each, K, V: sum c_j d each, bias: sum r_i c_j
        stores dQ: N_q' d
    """
    _check_dbias(problem, dbias)
    d, head = problem.head_dim, _whole(problem, tiles, problem.heads_q)
    shared = _whole(problem, tiles, problem.heads_k)
    visits = _visits(problem, tiles, block_mask)
    kept = "dQ" if problem.dtype == "float32" else "A"
    adds = {kept: 0 if deterministic else visits.rows * d, "dbias": visits.pairs if dbias else 0}

    row_sums = _accesses(
        problem,
        {"O": head.rows * d, "dO": head.rows * d},
        {"D": head.rows, kept: 0 if deterministic else head.all_rows * d},
    )
    over_columns = _accesses(
        problem,
        {
            "Q": visits.rows * d,
            "dO": visits.rows * d,
            "L": visits.rows,
            "D": visits.rows,
            "K": shared.columns * d,
            "V": shared.columns * d,
            "bias": visits.pairs if problem.bias else 0,
        }
        | adds,
        {"dK": shared.all_columns * d, "dV": shared.all_columns * d} | adds,
    )
    parts = [row_sums, over_columns]
    if deterministic:
        sweep = _visits(problem, sweep_tiles or tiles, block_mask)
        loads = {
            "Q": head.rows * d,
            "dO": head.rows * d,
            "L": head.rows,
            "D": head.rows,
            "K": sweep.columns * d,
            "V": sweep.columns * d,
            "bias": sweep.pairs if problem.bias else 0,
        }
        parts.append(_accesses(problem, loads, {"dQ": head.all_rows * d}))
    elif kept == "A":
        rounded = head.all_rows * d
        parts.append(_accesses(problem, {"A": rounded}, {"dQ": rounded}))
    return _sum(problem, parts)


def tiles_visited(
    algorithm: str,
    problem: Problem,
    tiles: BlockSizes,
    *,
    passes: str = "fwd",
    block_mask: Any = None,
) -> int:
    """Tiles of S computed, over batch and heads: B H T_r T_c without masks and lengths.

    fa2 leaves out every tile that no row of it sees or that the block mask lacks; fa1 too, but for
    column tile 0 where that initialises (see `fa1`); standard leaves out nothing. `passes` is "fwd"
    or "bwd"; one sweep backward visits the same tiles as one forward, the second sweep of a
    deterministic fa2_backward again.
    """
    _check("algorithm", algorithm, ALGORITHMS)
    _check("passes", passes, PASSES[:2])
    if algorithm == "standard":
        _as_blocks(problem, block_mask, tiles)
        return _whole(problem, tiles, problem.heads_q).tiles
    takes_all = algorithm == "fa1" and not Features.of(problem).initialises
    return _visits(problem, tiles, block_mask, takes_all=takes_all).tiles


def theta_standard(problem: Problem) -> float:
    """Theta(N d + N^2) accesses of standard attention (FA-1 Theorem 2), constant 1, in elements.

    B H ((N_q + N_k) d / 2 + N_q N_k), which is B H (N d + N^2) at N_q = N_k = N. No mask.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return problem.batch * problem.heads_q * ((Nq + Nk) * d / 2 + Nq * Nk)


def theta_flash(problem: Problem, M: float) -> float:
    """Theta(N^2 d^2 / M) accesses of FlashAttention (FA-1 Theorem 2), constant 1, in elements.

    B H N_q N_k d^2 / M. `M` is the on-chip memory in elements; the theorem is for d <= M <= N d,
    and Proposition 3 says that no exact algorithm does better for all of that range. No mask.
    """
    _check_memory(M)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return problem.batch * problem.heads_q * (Nq * Nk * d * d / M)


def saha_ye(problem: Problem, M: float) -> float:
    """Theta(min(N^2 d / sqrt(M), N^2 d^2 / M)) (Saha and Ye, arXiv 2402.07443, Theorem 3.1).

    Constant 1, in elements, `M` in elements, times B H, no mask. The two meet at M = d^2: above,
    it is `theta_flash` and FlashAttention is optimal; below, square tiles of S are.
    """
    flash = theta_flash(problem, M)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return min(problem.batch * problem.heads_q * (Nq * Nk * d / math.sqrt(M)), flash)


def standard_paper(problem: Problem) -> int:
    """Accesses of FA-1's Algorithm 0 with matrices of any size read once, in elements.

    Q, K, V read and O written, 2 (N_q + N_k) d; S and P written and read, 4 N_q N_k; per head.
    At N_q = N_k = N: 4 N d + 4 N^2. No mask.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return problem.batch * problem.heads_q * (2 * (Nq + Nk) * d + 4 * Nq * Nk)


def fa1_paper(problem: Problem, Bc: int) -> int:
    """Accesses of FA-1's Algorithm 1 as FA-1 Fig. 2 (middle) counts them, in elements.

    K and V read once; Q read, O read and O written in every pass over K/V, less the first read of
    O; no l and m, no mask: 2 N_k d + (3 T_c - 1) N_q d per head. At N_q = N_k = N that is
    X (3 N / B_c + 1) with X = B H N d.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    Tc = -(-Nk // as_size("Bc", Bc))
    return problem.batch * problem.heads_q * (2 * Nk + (3 * Tc - 1) * Nq) * d


def fa1_paper_gb(problem: Problem, Bc: int) -> float:
    """`fa1_paper` in the figure's unit: GB of 10^9 bytes, 2 bytes an element, O included."""
    return PAPER_BYTES * fa1_paper(problem, Bc) / 1e9


def flops(problem: Problem, passes: str = "fwd", *, block_mask: Any = None) -> int:
    """FLOPs as published (FA-2 section 4.1): the matrix products alone.

    4 N_q N_k d per head forward, halved when causal; 2.5 times that backward, 3.5 times both.
    `passes` is "fwd", "bwd" or "fwd+bwd". A convention for comparing speeds, not a count of
    operations. With a window, causal or not, N_q N_k is the exact number of pairs that it leaves. A
    sparse problem's `block_mask` multiplies what its heads have by the share of blocks that it
    keeps, of all blocks, those included that other masks hide; the result is rounded down.
    """
    _check("passes", passes, PASSES)
    blocks = _as_blocks(problem, block_mask)
    factor = {"fwd": 4, "bwd": 10, "fwd+bwd": 14}[passes]
    if problem.causal and problem.window == (-1, -1):
        factor //= 2
    pairs = 0  # times the blocks of one mask
    for entry, mask, count in _distinct_heads(problem, blocks):
        pairs += count * _pairs(problem, entry) * (1 if mask is None else int(mask.sum()))
    return factor * problem.head_dim * pairs // (1 if blocks is None else blocks[0, 0].size)


def _pairs(problem: Problem, entry: int) -> int:
    """Rows times columns of a batch entry, or the pairs of them that its window leaves."""
    Nq, Nk = problem.lengths(entry)
    if problem.window == (-1, -1):
        return Nq * Nk

    def summed(offset: int) -> int:
        """Of all rows i, columns below i + offset: the sum of min(max(i + offset, 0), N_k)."""

        def below(end: int) -> int:
            rising = min(max(end, 0), Nk)
            return rising * (rising - 1) // 2 + max(end - Nk, 0) * Nk

        return below(Nq + offset) - below(offset)

    # As columns_begin and columns_end have them, without an array of rows.
    ends = Nq * Nk if problem.right is None else summed(Nk - Nq + problem.right + 1)
    begins = 0 if problem.left is None else summed(Nk - Nq - problem.left)
    return ends - begins


def workspace(
    algorithm: str,
    problem: Problem,
    *,
    return_lse: bool = False,
    passes: str = "fwd",
    deterministic: bool = False,
    query_splits: int = 1,
) -> int:
    """Bytes of global memory beside inputs and outputs, `passes` "fwd" or "bwd".

    With R the rows of Q over all heads: B H N_q', for packed sequences H times their total.
    Forward. standard: S, which P overwrites, B H N_q N_k elements of the longest sequences in the
    problem's dtype, with a row of them rounded up to a multiple of 16 bytes. All else is float32.
    fa1: l and m, 8 R, and in 16 bits A, 4 R d with d rounded up to a multiple of 2. fa2: L, 4 R,
    and nothing when the caller takes L (`return_lse`). Backward. standard: P, and dP, which dS
    overwrites, twice the above. fa1: nothing, and in 16 bits A, with query splits as much for dK
    and for dV of their rows. fa2: D, 4 R, and in 16 bits A, but for `deterministic`.
    """
    _check("algorithm", algorithm, ALGORITHMS)
    _check("passes", passes, PASSES[:2])
    if algorithm == "standard":
        *rows_of_scores, Nk = problem.score_shape
        matrices = 1 if passes == "fwd" else 2
        size = ELEMENT_BYTES if problem.dtype == "float32" else HALF_BYTES
        return matrices * math.prod(rows_of_scores) * (-(-size * Nk // 16) * 16)
    rows = math.prod(problem.lse_shape)
    kept = 0 if problem.dtype == "float32" else -(-problem.head_dim // 2) * 2
    if passes == "bwd":
        if algorithm == "fa2":
            return ELEMENT_BYTES * rows * (1 if deterministic else 1 + kept)
        keys = math.prod(problem.k_shape[:-1]) if query_splits > 1 else 0
        return ELEMENT_BYTES * (rows + 2 * keys) * kept
    if algorithm == "fa1":
        return ELEMENT_BYTES * rows * (2 + kept)
    return 0 if return_lse else ELEMENT_BYTES * rows


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: allowed is {', '.join(map(repr, allowed))}")


def _check_dbias(problem: Problem, dbias: bool) -> None:
    if dbias and problem.bias is None:
        raise ValueError(f"dbias is {dbias!r}: allowed is False, as the problem has no bias")


def _check_memory(M: float) -> None:
    if not 0 < M < math.inf:
        raise ValueError(f"M is {M!r}: allowed is a finite number of elements > 0")
