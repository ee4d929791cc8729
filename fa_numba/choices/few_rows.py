"""Calls of few rows of Q: which query heads share a tile, and what takes the time."""

from __future__ import annotations

from fa_numba.choices.requests import Request
from fa_numba.tiling.wgmma import GROUP_ROWS, PANEL

# Rows of the lowest tile of ``mma``.
LOW = 16
# Keys that a multiprocessor is busy with for a while.
LONG_KEYS = 1024


def heads_share_tiles(request: Request) -> bool:
    """Whether the query heads of a K/V head lie in the rows of one tile on Hopper's tensor cores:
    where a head has less than a warpgroup's rows, and these are whole rows of all. The map of the
    queries has no axis left for lengths then, unless they are packed, and slopes and a bias differ
    by head.
    """
    p, features = request.problem, request.features
    few = p.seqlen_q <= GROUP_ROWS and GROUP_ROWS % p.group == 0
    return p.group > 1 and few and not (features.q_lens or features.alibi or features.bias)


def suits_few_rows(request: Request) -> bool:
    """Whether Hopper's unit is the faster one for rows that do not fill a tile, which take as long
    as K and V take to come: as measured on an H200 (`experiments run decode`).

    Its copy engine brings pages faster than threads do, and keeps a multiprocessor's share of
    memory busy with one block. With much fewer row tiles than multiprocessors, or several each, the
    low tiles of ``mma`` are as fast or faster, but for more rows than those have.
    """
    p, shared = request.problem, heads_share_tiles(request)
    if p.page_size is not None:
        return True
    if p.seqlen_q * p.group > LOW or p.seqlen_k <= LONG_KEYS:
        return shared
    tiles = p.batch * (p.heads_k if shared else p.heads_q)
    fill = 4 * tiles >= 3 * request.multiprocessors
    return fill and (p.head_dim <= PANEL or tiles <= 3 * request.multiprocessors)


def heads_in_tiles(request: Request) -> int:
    """How many query heads of a K/V head lie in the rows of one tile of FlashAttention-2's forward
    kernel on tensor cores, a power of two: more than one where a head has few rows, and no option
    has values of its own for each head, or each row of it.
    """
    p, features = request.problem, request.features
    by_head = features.bias or features.alibi or features.dropout or features.sparse
    if request.algorithm != "fa2" or p.seqlen_q > GROUP_ROWS or by_head:
        return 1
    return min(p.group & -p.group, GROUP_ROWS)
