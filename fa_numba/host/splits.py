"""How many thread blocks share the columns of a row tile of FlashAttention-2's forward pass."""

from __future__ import annotations

import heapq

from fa_numba.checks import MAX_KV_SPLITS
from fa_numba.host.requests import Request
from fa_numba.integers import ceil_div
from fa_numba.tiling import Tiles
from fa_numba.tiling.spec import Spec

# Row tiles this high are computed for longer than their K and V take to come.
HIGH = 64
# Blocks that a multiprocessor's registers leave side by side where tiles are lower.
_MOST_SIDE_BY_SIDE = 8
# Shared memory of the blocks side by side whose loads keep memory busy: with more blocks a call
# reads no faster, and has more sums to merge.
_BUSY_BYTES = 144 << 10
# Column tiles of a split at least: fewer do not pay for O of a split and the second kernel.
_LEAST_TILES = 2
# Column tiles whose time O, l and m of a split take, there and back.
_TILES_OF_SUMS = 2
# Rounds of splits that are tried where row tiles are of unequal length.
_MOST_ROUNDS = 4


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
        return _causal_splits(request, tiles, spec.head_rows, blocks, places)
    if blocks >= places:
        return 1
    columns = ceil_div(_columns(request, tiles), tiles.Bc)

    def column_tiles(splits: int) -> int:
        longest = ceil_div(columns, splits) + (_TILES_OF_SUMS if splits > 1 else 0)
        return ceil_div(blocks * splits, places) * longest

    most = max(1, min(columns // _LEAST_TILES, MAX_KV_SPLITS))
    return min(range(1, most + 1), key=column_tiles)


def _causal_splits(request: Request, tiles: Tiles, rows: int, blocks: int, places: int) -> int:
    """The splits with which the last block ends first, the longest begun first; the fewest of
    these. One where the longest row tile takes no longer than a place's even share of all.
    """
    p = request.problem
    Tr = ceil_div(p.seqlen_q, rows)
    heads, total = blocks // Tr, 0
    columns: list[int] = []
    for i in reversed(range(Tr)):
        end = min((i + 1) * rows, p.seqlen_q) - 1
        columns.append(max(1, ceil_div(p.columns_end(end), tiles.Bc)))
        total += columns[-1]
        if columns[0] * places <= heads * total:  # of many row tiles the first few say so
            return 1

    def column_tiles(splits: int) -> int:
        free = [0] * places
        more = _TILES_OF_SUMS if splits > 1 else 0
        for each in columns:
            for n in range(heads * splits):
                piece = each // splits + (n % splits < each % splits) + more
                heapq.heapreplace(free, free[0] + piece)
        return max(free)

    most = max(1, min(columns[0] // _LEAST_TILES, MAX_KV_SPLITS, _MOST_ROUNDS * places // blocks))
    return min(range(1, most + 1), key=column_tiles)


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
