"""The schedule of a ring: which rank computes what at which step. This module does not use torch.

There are P ranks and P steps, 0 to P - 1. Each rank has a part of the sequence that stays, and a
part that travels. At step s, rank r has the travelling part of rank (r - s) mod P. At step 0 this
is its own part; at each later step it is the part that the previous rank had one step before.

Without a mask, each call is over all rows and all columns. With a causal mask, the sequence is cut
into 2P chunks. Rank r has chunk r followed by chunk 2P - 1 - r (zigzag), so that all ranks do equal
work:

======================= ========================================================================
columns of k belong to  what is computed
======================= ========================================================================
the rank of the rows    a causal call over the rank's own rows and columns
an earlier rank         all rows see the first half of the columns; no row sees the second half
a later rank            the second half of the rows sees all columns; the first half sees none
======================= ========================================================================

There is one call of attention per step. Only the call of step 0 has a mask.
"""

from __future__ import annotations

from typing import NamedTuple

TRAVELS = ("kv", "q")
ALL, FIRST, LAST = "all", "first", "last"


class Work(NamedTuple):
    """The call of attention in one step: which rows, which columns, and whether it is causal.

    Attributes
    ----------
    rows : {"all", "first", "last"}
        All rows, or the first or last half of the rows.
    columns : {"all", "first", "last"}
        All columns, or the first or last half of the columns.
    causal : bool
        Whether the call has a causal mask.
    """

    rows: str
    columns: str
    causal: bool


def owner_at(rank: int, step: int, ranks: int) -> int:
    """Return the rank that owns the travelling part which is at ``rank`` at a step.

    Parameters
    ----------
    rank : int
        Rank at which the part is at this step.
    step : int
        Number of the step, from 0.
    ranks : int
        Number of ranks.

    Returns
    -------
    int
        Rank that the part belongs to.

    Examples
    --------
    >>> [owner_at(0, step, 4) for step in range(4)]
    [0, 3, 2, 1]
    """
    return (rank - step) % ranks


def work(q_rank: int, k_rank: int, causal: bool) -> Work:
    """Return the call of attention for the rows of one rank and the columns of another rank.

    Parameters
    ----------
    q_rank : int
        Rank that the rows belong to.
    k_rank : int
        Rank that the columns belong to.
    causal : bool
        Whether the sequence has a causal mask.

    Returns
    -------
    Work
        The rows, the columns and the mask of the call.

    Examples
    --------
    >>> work(1, 0, causal=True)
    Work(rows='all', columns='first', causal=False)
    """
    if causal and k_rank < q_rank:
        return Work(ALL, FIRST, False)
    if causal and k_rank > q_rank:
        return Work(LAST, ALL, False)
    return Work(ALL, ALL, causal)


def span(half: str, size: int) -> tuple[int, int]:
    """Return (begin, end) of all ``size`` rows, or of the first or the last half of them.

    ``half`` is "all", "first" or "last".
    """
    if half == ALL:
        return 0, size
    return (0, size // 2) if half == FIRST else (size // 2, size)


def rows_of(rank: int, ranks: int, size: int, causal: bool) -> list[tuple[int, int]]:
    """Return the rows of the complete sequence that a rank has, in their order on the rank.

    Parameters
    ----------
    rank : int
        Number of the rank, from 0 to ranks - 1.
    ranks : int
        Number of ranks.
    size : int
        Number of rows of the complete sequence. It must be a multiple of ``ranks``. With a causal
        mask and more than one rank, it must be a multiple of ``2 * ranks``.
    causal : bool
        Whether the sequence has a causal mask.

    Returns
    -------
    list of tuple of int
        (begin, end) of each piece. Without a causal mask there is one piece. With a causal mask,
        the pieces are chunk ``rank`` and chunk ``2 * ranks - 1 - rank``.

    Raises
    ------
    ValueError
        If ``rank`` is out of range, or the rows cannot be divided evenly.

    Examples
    --------
    >>> rows_of(1, 2, 16, causal=False), rows_of(1, 2, 16, causal=True)
    ([(8, 16)], [(4, 8), (8, 12)])
    >>> rows_of(0, 2, 16, causal=True)
    [(0, 4), (12, 16)]
    """
    chunks = 2 * ranks if causal and ranks > 1 else ranks
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    if size % chunks:
        each = " (two chunks per rank under a causal mask)" if chunks != ranks else ""
        raise ValueError(
            f"the number of rows of the sequence must be a multiple of {chunks} for {ranks} "
            f"ranks{each}, got {size}"
        )
    rows = size // chunks
    held = (rank,) if chunks == ranks else (rank, chunks - 1 - rank)
    return [(n * rows, (n + 1) * rows) for n in held]
