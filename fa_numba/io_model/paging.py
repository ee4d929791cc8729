"""Loads of a block table by a thread block that loads a tile of K or V from pages."""

from __future__ import annotations

from math import gcd

import numpy as np

from fa_numba.integers import ceil_div


def table_reads(columns: int, Bc: int, page_size: int, threads: int, pieces: int) -> int:
    """Return the number of block-table entries that a thread block reads to load one tile.

    Parameters
    ----------
    columns : int
        Valid rows of K (or V) in the tile.
    Bc : int
        Rows of K (or V) in a full tile.
    page_size : int
        Rows of a page.
    threads : int
        Threads that load.
    pieces : int
        Neighbouring threads that share a row: each loads one piece of the row.

    Returns
    -------
    int
        Entries, summed over the warps.

    Notes
    -----
    The tile is copied in several steps. In each step, every thread loads one piece of a row. The
    rows are divided into runs of g = gcd(page_size, Bc) rows. All rows of a run are in one page. In
    each step, a warp reads one entry for each run of which it loads valid rows. There is one
    exception: if g is a multiple of the number of rows of a step, several consecutive steps load
    the same run. A warp then reads the entry only in the first of these steps.

    Examples
    --------
    Two warps load 64 rows of 8 pieces in pages of 16 rows. A step loads 8 rows, 4 rows per warp.
    Every warp reads the entry of each of the 4 pages once.

    >>> table_reads(64, 64, 16, threads=64, pieces=8)
    8
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
