"""Which rank computes what at which step, and what it then sends; nothing here knows of torch.

There are P ranks and P steps, 0 to P - 1. At step s rank r has what travels of rank (r - s) mod P:
its own at step 0, then what the rank before it had. Without a mask a call is over all rows and all
columns. Under a causal mask rank r holds chunks r and 2P - 1 - r of the 2P that the sequence is cut
into (zigzag), in this order, so that all ranks do equal work:

    Q and K of one rank      a causal call on what it holds, as positions only grow
    K of a rank before Q's   all rows see the first half of the columns, none the second
    K of a rank after Q's    the second half of the rows sees all columns, the first half none

One call a step, without a mask but at step 0.
"""

from __future__ import annotations

from typing import NamedTuple

TRAVELS = ("kv", "q")
ALL, FIRST, LAST = "all", "first", "last"


class Work(NamedTuple):
    """One step's call: "all", the "first" or the "last" half of rows and of columns."""

    rows: str
    columns: str
    causal: bool


def owner_at(rank: int, step: int, ranks: int) -> int:
    """Whose part has come to ``rank`` at ``step``."""
    return (rank - step) % ranks


def work(q_rank: int, k_rank: int, causal: bool) -> Work:
    """What is computed of the rows of one rank with the columns of another."""
    if not causal or q_rank == k_rank:
        return Work(ALL, ALL, causal)
    if k_rank < q_rank:
        return Work(ALL, FIRST, False)
    return Work(LAST, ALL, False)


def span(half: str, size: int) -> tuple[int, int]:
    """(begin, end) of a half of ``size`` rows."""
    if half == ALL:
        return 0, size
    return (0, size // 2) if half == FIRST else (size // 2, size)


def rows_of(rank: int, ranks: int, size: int, causal: bool) -> list[tuple[int, int]]:
    """The (begin, end) of the rows of a sequence of ``size`` that a rank holds, in its order.

    Without a mask neighbouring rows; under a causal one chunks rank and 2 ranks - 1 - rank of
    2 ranks. Raises ValueError where these are not of equal size.

    >>> rows_of(1, 2, 16, causal=False), rows_of(1, 2, 16, causal=True)
    ([(8, 16)], [(4, 8), (8, 12)])
    >>> rows_of(0, 2, 16, causal=True)
    [(0, 4), (12, 16)]
    """
    chunks = 2 * ranks if causal and ranks > 1 else ranks
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: allowed is 0 to {ranks - 1}")
    if size % chunks:
        how = ", two for each under a causal mask" if chunks != ranks else ""
        raise ValueError(
            f"the sequence has {size} rows for {ranks} ranks: allowed is a multiple of {chunks}"
            f"{how}"
        )
    rows = size // chunks
    held = (rank,) if chunks == ranks else (rank, chunks - 1 - rank)
    return [(n * rows, (n + 1) * rows) for n in held]
