"""How many thread blocks share the columns of a row tile of FlashAttention-2's forward pass, or a
column tile of its backward pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from fa_numba.checks import MAX_KV_SPLITS
from fa_numba.choices.requests import Request
from fa_numba.integers import ceil_div
from fa_numba.problem import Problem
from fa_numba.tiling import Tiles
from fa_numba.tiling.spec import Spec
from fa_numba.tiling.wgmma_backward import LARGEST_ATOMIC

# Row tiles this high are computed for longer than their K and V take to come.
HIGH = 64
# Blocks that a multiprocessor's registers leave side by side where tiles are lower.
_MOST_SIDE_BY_SIDE = 8
# Shared memory of the blocks side by side whose loads keep memory busy: with more blocks a call
# reads no faster, and has more sums to merge.
_BUSY_BYTES = 144 << 10
# Column tiles of a split at least: fewer do not pay for O of a split and the second kernel.
_LEAST_TILES = 2
# Of few rows: column tiles whose time O, l and m of a split take, there and back.
_TILES_OF_SUMS = 2
# Of rows that fill their tiles, as measured on an H200: products of an element of S with a head
# dimension that a multiprocessor makes in a microsecond, by unit; how many of these its exponential
# takes as long as; microseconds until the second kernel runs; bytes of sums that move in one.
_PRODUCTS = {"wgmma": 2.6e6, "mma": 1.5e6, "simt": 0.17e6}
_EXPONENTIAL = 112
_UNTIL_MERGED, _MERGED_BYTES = 3.5, 3e6
# Rounds of splits that are tried where row tiles are of unequal length.
_MOST_ROUNDS = 4

# Blocks along the second axis of a grid.
MAX_SHARES = 65535
# Blocks that share the rows of a query head, as "auto" tries them.
_ROW_SPLITS = (2, 3, 4, 6, 8, 12, 16)
# Backward, in visits of a row tile, each some 3 microseconds of a multiprocessor, 10 Br Bc d FLOPs.
# Estimates, whose choices were then timed on an H200. Rounds of blocks that are tried:
_MOST_SHARES = 8
# until a block's first product, and after its last;
_VISITS_OF_BLOCK = 2
# head dimensions whose float32 parts of dK and dV take a block one visit to store;
_DIMENSIONS_A_VISIT = 64
# until the two kernels that add up the parts run, and the bytes that they move in a visit.
_VISITS_OF_SUMS, _BYTES_A_VISIT = 1, 9e6


def chosen_splits(request: Request, tiles: Tiles, spec: Spec, blocks: int) -> int:
    """The splits that a request asks for, or for "auto" those that keep the GPU busy.

    One where ``blocks``, those of unsplit columns, already have all places on the GPU, and on the
    emulator, which has none. Else those whose longest block, times the rounds in which blocks find
    a place, takes the least time; the fewest of these. Under a causal mask the last row tiles are
    longer than the others: see ``_causal_splits``.
    """
    if request.kv_splits != "auto":
        return int(request.kv_splits)
    places = request.multiprocessors * _side_by_side(request, tiles, spec)
    p = request.problem
    plain = p.left is None and not p.packed and not p.sparse
    if places and p.right is not None and plain and p.seqlen_q > spec.head_rows:
        return _causal_splits(request, tiles, spec, blocks, places)
    if blocks >= places:
        return 1
    columns = ceil_div(_columns(request, tiles), tiles.Bc)

    def column_tiles(splits: int) -> float:
        each, merged = _of_sums(request, tiles, spec, splits)
        return ceil_div(blocks * splits, places) * (ceil_div(columns, splits) + each) + merged

    most = max(1, min(columns // _LEAST_TILES, MAX_KV_SPLITS))
    return min(range(1, most + 1), key=column_tiles)


def _causal_splits(request: Request, tiles: Tiles, spec: Spec, blocks: int, places: int) -> int:
    """The splits with which the last block ends first, the longest begun first; the fewest of
    these. One where the longest row tile takes no longer than a place's even share of all.
    """
    p, rows = request.problem, spec.head_rows
    Tr = ceil_div(p.seqlen_q, rows)
    heads, total = blocks // Tr, 0
    columns: list[int] = []
    for i in reversed(range(Tr)):
        end = min((i + 1) * rows, p.seqlen_q) - 1
        columns.append(max(1, ceil_div(p.columns_end(end), tiles.Bc)))
        total += columns[-1]
        if columns[0] * places <= heads * total:  # of many row tiles the first few say so
            return 1

    def column_tiles(splits: int) -> float:
        free = [0] * places
        more, merged = _of_sums(request, tiles, spec, splits)
        for each in columns:
            for n in range(heads * splits):
                piece = each // splits + (n % splits < each % splits) + more
                heapq.heapreplace(free, free[0] + piece)
        return max(free) + merged

    most = max(1, min(columns[0] // _LEAST_TILES, MAX_KV_SPLITS, _MOST_ROUNDS * places // blocks))
    return min(range(1, most + 1), key=column_tiles)


def _of_sums(request: Request, tiles: Tiles, spec: Spec, splits: int) -> tuple[int, float]:
    """Column tiles whose time O, l and m of the splits take: of each block, and of the call."""
    p = request.problem
    if splits == 1:
        return 0, 0.0
    if tiles.Br < HIGH or p.seqlen_q * spec.tile_heads <= HIGH:
        return _TILES_OF_SUMS, 0.0
    there_and_back = 2 * 4 * splits * p.batch * p.heads_q * p.seqlen_q * p.head_dim
    tile = tiles.Br * tiles.Bc * (p.head_dim + _EXPONENTIAL) / _PRODUCTS[request.unit]
    return 0, (_UNTIL_MERGED + there_and_back / _MERGED_BYTES) / tile


def _side_by_side(request: Request, tiles: Tiles, spec: Spec) -> int:
    """Blocks that a multiprocessor takes at a time before more of them wait for each other.

    A high tile's keep the tensor cores busy alone. A low one's wait for K and V: the more of them,
    the more bytes are on their way, until memory is busy.
    """
    if tiles.Br >= HIGH:
        return 1
    busy = ceil_div(_BUSY_BYTES, spec.shared_bytes)
    return max(1, min(_MOST_SIDE_BY_SIDE, busy, request.shared_limit // spec.shared_bytes))


def _columns(request: Request, tiles: Tiles) -> int:
    """The most columns that a row tile visits, but for a block mask."""
    p = request.problem
    if p.left is None or p.right is None:
        return p.seqlen_k
    return min(p.seqlen_k, p.left + p.right + tiles.Br)


# --- the backward pass -------------------------------------------------------------------------


def check_group_splits(request: Request) -> None:
    """Raise ValueError where a column tile's query heads cannot be split as the request asks."""
    p, splits = request.problem, request.group_splits
    if splits in ("auto", 1):
        return
    if not _can_split_group(request):
        raise ValueError(
            f"group_splits is {splits} with algorithm {request.algorithm!r} and a head dimension "
            f"of {p.head_dim} on unit {request.unit!r}: only fa2 on unit 'wgmma' splits the query "
            f"heads of a K/V head, up to head dimension {LARGEST_ATOMIC}, allowed is 1 or 'auto'"
        )
    if p.group % int(splits) and int(splits) % p.group:
        raise ValueError(
            f"group_splits is {splits} with {p.heads_q} query heads and {p.heads_k} of K and V: "
            f"allowed is {', '.join(map(str, _divisors(p.group)))}, a divisor of {p.group}, a "
            "multiple of it, or 'auto'"
        )
    if int(splits) > p.group and not _can_split_rows(request):
        raise ValueError(
            f"group_splits is {splits} with {p.group} query heads a K/V head and a softcap, slopes "
            f"or a bias, beside which rows are not split: allowed is at most {p.group}, or 'auto'"
        )
    if p.heads_k * int(splits) > MAX_SHARES:
        raise ValueError(
            f"group_splits is {splits} with {p.heads_k} heads of K and V: allowed are {MAX_SHARES} "
            "shares of all heads, a grid's limit"
        )


def chosen_group_splits(request: Request, tiles: Tiles, spec: Any) -> int:
    """The blocks that share a column tile of a K/V head: those that a request asks for, or for
    "auto" the number with which the parts of dK and dV are summed first; the fewest of these.

    Blocks go to multiprocessors in their order, one each, as these become free; under a causal mask
    the first column tiles take longest. Several blocks have query heads each, or the rows of one;
    each loads Kj and Vj, and stores its parts in float32, which two more kernels add up. One where
    there are many rounds of blocks, and on the emulator.
    """
    if request.group_splits != "auto":
        return int(request.group_splits)
    p, places = request.problem, request.multiprocessors
    heads, sequences = p.heads_k * p.batch, [(p.seqlen_q, p.seqlen_k)]
    if p.packed:  # a head's blocks take one after the other
        heads, sequences = p.heads_k, [p.lengths(b) for b in range(p.batch)]
    Tc = sum(ceil_div(Nk, tiles.Bc) for _, Nk in sequences)
    if not _can_split_group(request) or not places or not Tc:
        return 1
    most = max(1, _MOST_SHARES * places // (heads * Tc))
    tried = [n for n in _divisors(p.group) if n <= most]
    if _can_split_rows(request):
        tried += [p.group * m for m in _ROW_SPLITS if p.group * m <= most]
    if len(tried) == 1:
        return tried[0]
    visits = [
        _row_tiles(p, tiles, Nq, Nk, j)
        for Nq, Nk in sequences
        for j in range(ceil_div(Nk, tiles.Bc))
    ]
    elements = 2 * sum(Nk for _, Nk in sequences) * heads * p.head_dim

    def end(splits: int) -> float:
        free, of_head = [0.0] * places, max(1, splits // p.group)
        each = [max(1, p.group // splits) * ceil_div(n, of_head) for n in visits]
        more, sums = 0.0, 0.0
        if splits > 1:
            more = p.head_dim / _DIMENSIONS_A_VISIT
            sums = _VISITS_OF_SUMS + elements * (4 * splits + 2) / _BYTES_A_VISIT
        for j in _in_launch_order(Tc, heads * splits, spec.chunk_tiles):
            heapq.heapreplace(free, free[0] + each[j] + _VISITS_OF_BLOCK + more)
        return max(free) + sums

    return min(tried, key=end)


def _can_split_group(request: Request) -> bool:
    """Whether there is a kernel whose blocks share the query heads of a K/V head."""
    kernel = (request.algorithm, request.passes, request.unit)
    return kernel == ("fa2", "bwd", "wgmma") and request.problem.head_dim <= LARGEST_ATOMIC


def _can_split_rows(request: Request) -> bool:
    """Whether blocks can share a query head's rows, too; they would spill what changes scores."""
    return not request.features.changes_scores


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def _row_tiles(p: Problem, tiles: Tiles, Nq: int, Nk: int, j: int) -> int:
    """The row tiles that column tile j of a sequence visits, of each query head."""
    diagonal, first, end = Nk - Nq, 0, Nq
    if p.right is not None:
        first = max(0, j * tiles.Bc - diagonal - p.right) // tiles.Br * tiles.Br
    if p.left is not None:
        end = min(end, max(0, (j + 1) * tiles.Bc - diagonal + p.left))
    return max(0, ceil_div(end - first, tiles.Br))


def _in_launch_order(Tc: int, shares: int, chunk: int) -> Iterator[int]:
    """The column tile of each block in turn, as ``column_tile`` of parts/wgmma/schedule.py."""
    for begin in range(0, Tc, chunk or Tc):
        for _ in range(shares):
            yield from range(begin, min(begin + (chunk or Tc), Tc))
