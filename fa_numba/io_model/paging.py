"""Reads of a block table: which entries the warps of a block look up for a tile of K or V."""

from __future__ import annotations

from math import gcd

import numpy as np

from fa_numba.integers import ceil_div


def table_reads(columns: int, Bc: int, page_size: int, threads: int, pieces: int) -> int:
    """Entries that a block reads to load ``columns`` rows of a tile of ``Bc``.

    The tile is copied in turns, in which each of ``threads`` threads takes a piece of a row and
    ``pieces`` neighbours share one. The rows come in runs of g = gcd(page_size, Bc), which lie in
    one page each. In every turn a warp reads an entry for each run that it has valid rows of; where
    g is so many turns' rows, in the first of these turns alone.
    """
    run = gcd(page_size, Bc)
    turn_rows, rest = divmod(threads, pieces)
    shared = run // turn_rows if rest == 0 and run % turn_rows == 0 else 1
    turns = np.arange(0, ceil_div(Bc * pieces, threads), shared)
    rows = (turns[:, None] * threads + np.arange(threads)) // pieces
    warps = np.broadcast_to(np.arange(threads) // 32, rows.shape)
    valid = rows < min(columns, Bc)
    at = np.broadcast_to(turns[:, None], rows.shape)
    looked_up = np.stack((at[valid], warps[valid], rows[valid] // run))
    return np.unique(looked_up, axis=1).shape[1]
