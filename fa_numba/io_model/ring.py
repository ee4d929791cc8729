"""Bytes that the devices of a ring send to each other for one sequence, in closed form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa_numba.checks import as_size, check_name
from fa_numba.dtypes import DTYPES
from fa_numba.io_model.work import PASSES
from fa_numba.problem import Problem

TRAVELS = ("kv", "q")
_SUM_BYTES = 4  # bytes of a float32: a sum of several results, or L


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that a rank sends to the next rank, and receives from the rank before.

    Parameters
    ----------
    sent, received : int
        Bytes.
    """

    sent: int
    received: int


def ring(
    problem: Problem, ranks: int, rank: int = 0, *, travels: str = "kv", passes: str = "fwd",
    q_lens: Sequence[int] | None = None, kv_lens: Sequence[int] | None = None, dlse: bool = False,
) -> LinkTraffic:  # fmt: skip
    """Return the bytes that one rank sends and receives in `fa_numba.torch.ring_attention`.

    Parameters
    ----------
    problem : Problem
        One rank's part of the call: `seqlen_q` rows and `seqlen_k` columns. ``causal`` means the
        zigzag split. ``window`` is the window of the whole sequence.
    ranks : int
        Number of ranks, P.
    rank : int, default 0
        The rank, from 0 to P - 1.
    travels : {"kv", "q"}, default "kv"
        What is sent from rank to rank: K and V, or Q.
    passes : {"fwd", "bwd"}, default "fwd"
        Forward or backward pass.
    q_lens, kv_lens : sequence of int, optional
        Valid rows and columns of the whole sequence, one number per batch entry.
    dlse : bool, default False
        Whether there is a gradient of L. Used in the backward pass only.

    Returns
    -------
    LinkTraffic
        Bytes sent and received by the rank.

    Raises
    ------
    TypeError
        If `ranks` or a length is not an integer.
    ValueError
        If `rank`, `travels` or `passes` has another value, lengths do not fit, or ``problem``
        itself has lengths. If a causal problem has seqlen_q != seqlen_k, or an odd length with more
        than one rank.

    Notes
    -----
    The schedule is ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889, section 3) if K and V
    travel. If Q travels, the schedule is fa_numba's own. Symbols:

        e      bytes per element of the inputs
        n_q    elements of a rank's Q: B H_q N_q d; in O and dO, d is the head dimension of V
        n_k    elements of a rank's K: B H_k N_k d; in V and dV, d is the head dimension of V
        R      rows of a rank's Q over batch entries and heads: B H_q N_q
        w      bytes per element of a result: e in the first message, which one kernel call
               computed; 4 in later messages, which are float32 sums

    There are P - 1 messages of operands and P - 1 messages of results. Bytes of one message:

        travels  pass  operands                             results
        "kv"     fwd   2 e n_k (K, V)                       -
        "kv"     bwd   2 e n_k (K, V)                       2 w n_k (dK, dV)
        "q"      fwd   e n_q (Q)                            w n_q + 4 R (O, L)
        "q"      bwd   3 e n_q + 4 R (Q, dO, O, L)          w n_q (dQ)

    With a gradient of L, the operands of the last line have 4 R bytes more. In each step
    s = 0, 1, ... a rank computes with the operands that it holds in this step, and sends them to
    the next rank. With a causal mask, each rank's part consists of two chunks of rows. The results
    that rank r sends after step s <= r then contain one chunk only, because no earlier step has
    computed anything for the other chunk. Each rank receives as many bytes as the rank before it
    sends.

    With a window or lengths, a step is left out if no rank has a row that sees a column in this
    step. The messages are shorter, too. A message of operands contains the rows from the first to
    the last row that a later step reads. A message of results contains the rows from the first to
    the last row that an earlier step has read; w is e if one kernel call computed the results,
    else 4.

    A rank has one chunk of rows and one chunk of columns, or two chunks of each with a causal mask.
    Take a chunk with the valid rows i0 <= i < i1, and a chunk with the valid columns
    j0 <= j < j1. Let D be the number of valid columns minus the number of valid rows of the whole
    sequence. The first line gives the rows of the first chunk that see a column of the second
    chunk. The second line gives the columns of the second chunk that such rows see:

        rows     max(i0, j0 - D - right) <= i < min(i1, j1 - D + left)
        columns  max(j0, i0 + D - left) <= j < min(j1, i1 + D + right)

    For example, take the window (left, 0) with left at most N_k = N_q. Every rank but the last then
    sends `left` columns of K and V once. In the backward pass the gradients of these columns are
    sent back once.

    Examples
    --------
    >>> from fa_numba.problem import Problem
    >>> p = Problem(1, 16, 16, 16384, 16384, 128, dtype="float16")
    >>> ring(p, 2).sent == 2 * 2 * 16 * 16384 * 128
    True
    >>> ring(p, 8).sent, ring(p, 8, travels="q").sent
    (939524096, 1349517312)
    >>> back = Problem(1, 16, 16, 16384, 16384, 128, dtype="float16", window=(4096, 0))
    >>> ring(back, 8).sent == 2 * 2 * 16 * 4096 * 128
    True
    """
    _check(problem, ranks, travels, passes)
    if rank not in range(ranks):
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    sides = problem.left, None if problem.causal else problem.right
    if sides != (None, None) or q_lens is not None or kv_lens is not None:
        changed: dict[str, Any] = {"window": (-1, -1), "q_lens": q_lens, "kv_lens": kv_lens}
        changed |= {"seqlen_q": ranks * problem.seqlen_q, "seqlen_k": ranks * problem.seqlen_k}
        whole = replace(problem, **changed)
        lens = [whole.lengths(entry) for entry in range(problem.batch)]
        if sides != (None, None) or {*lens} != {(whole.seqlen_q, whole.seqlen_k)}:
            return _of_seen(
                problem, _seen(problem, ranks, travels, lens), rank, travels, passes, dlse
            )
    before = (rank - 1) % ranks
    return LinkTraffic(*(_sent(problem, ranks, r, travels, passes, dlse) for r in (rank, before)))


def ring_messages(
    problem: Problem, *, travels: str = "kv", passes: str = "fwd", dlse: bool = False
) -> tuple[int, int, int]:
    """Return the bytes of one complete message of each kind.

    Masks are ignored: with a mask, `ring` may have shorter messages.

    Parameters
    ----------
    problem : Problem
        One rank's part of the call, as for `ring`.
    travels : {"kv", "q"}, default "kv"
        What is sent from rank to rank: K and V, or Q.
    passes : {"fwd", "bwd"}, default "fwd"
        Forward or backward pass.
    dlse : bool, default False
        Whether there is a gradient of L. Used in the backward pass only.

    Returns
    -------
    operands : int
        Bytes of a message of operands.
    first : int
        Bytes of the first message of results, in the inputs' dtype.
    later : int
        Bytes of a later message of results, in float32.

    Raises
    ------
    ValueError
        If `travels` or `passes` has another value, ``problem`` has lengths, or a causal problem has
        seqlen_q != seqlen_k.

    Notes
    -----
    The table in the notes of `ring` has the formulas.

    Examples
    --------
    >>> from fa_numba.problem import Problem
    >>> ring_messages(Problem(1, 1, 1, 64, 64, 32, dtype="float16"), passes="bwd")
    (8192, 8192, 16384)
    """
    _check(problem, 1, travels, passes)
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    keys = problem.batch * problem.heads_k * problem.seqlen_k
    of_q, of_o = rows * problem.head_dim, rows * problem.d_v
    e, sums = DTYPES[problem.dtype].bytes, rows * _SUM_BYTES
    if travels == "kv":
        both = keys * (problem.head_dim + problem.d_v)
        results = 0 if passes == "fwd" else both
        return both * e, results * e, results * _SUM_BYTES
    if passes == "fwd":
        return of_q * e, of_o * e + sums, of_o * _SUM_BYTES + sums
    return (of_q + 2 * of_o) * e + sums * (1 + dlse), of_q * e, of_q * _SUM_BYTES


def _sent(problem: Problem, ranks: int, rank: int, travels: str, passes: str, dlse: bool) -> int:
    """Return the bytes that a rank sends in a call without a window and without lengths."""
    operands, first, later = ring_messages(problem, travels=travels, passes=passes, dlse=dlse)
    if ranks == 1:
        return 0
    halves = rank if problem.causal else 0  # the first messages of results contain half the rows
    halved = max(halves - 1, 0)  # the number of these messages without the first message
    results = (first // 2 if halves else first) + halved * (later // 2)
    return (ranks - 1) * operands + results + (ranks - 2 - halved) * later


Span = tuple[int, int]  # first row, and one past the last


def _seen(
    problem: Problem, ranks: int, travels: str, lens: list[tuple[int, int]]
) -> list[list[list[Span]]]:
    """Return which of the travelling rows each step of a ring needs, as ranges of rows.

    The travelling rows are rows of Q if Q travels, else rows of K and V. Each rank owns a part of
    these rows at the start. Entry [step][owner] of the result is for the rows that the rank `owner`
    owned at the start, and that have been sent `step` times. The entry contains one range of rows
    for each kernel call that computes with these rows. Rows are counted from the first row of the
    owner's part. `lens` contains the numbers of valid rows and valid columns of each batch entry.
    """
    left, right = (2**40 if x is None else x for x in (problem.left, problem.right))
    halves = 2 if problem.causal and ranks > 1 else 1

    def chunks(rank: int, size: int) -> list[tuple[int, int]]:
        """Return a pair for each chunk of rows that a rank has.

        The pair contains two row numbers for the chunk's first row: in the complete sequence, and
        in the rank's part. `size` is the number of rows of a rank's part.
        """
        held = (rank, 2 * ranks - 1 - rank) if halves == 2 else (rank,)
        return [(n * size // halves, i * size // halves) for i, n in enumerate(held)]

    def pairs(step: int, owner: int) -> list[Span]:
        """Return the ranges of the rows of the rank `owner` that step number `step` needs."""
        there = (owner + step) % ranks
        q_rank, k_rank = (owner, there) if travels == "q" else (there, owner)
        found = []
        for (Nq, Nk), _ in itertools.groupby(lens):
            for (a, i), (c, j) in itertools.product(
                chunks(q_rank, problem.seqlen_q), chunks(k_rank, problem.seqlen_k)
            ):
                b = min(Nq, a + problem.seqlen_q // halves)
                d = min(Nk, c + problem.seqlen_k // halves)
                D = Nk - Nq
                rows = max(a, c - D - right), min(b, d - D + left)
                columns = max(c, a + D - left), min(d, b + D + right)
                if a < b and c < d and rows[0] < rows[1] and columns[0] < columns[1]:
                    (begin, end), shift = (rows, i - a) if travels == "q" else (columns, j - c)
                    found.append((begin + shift, end + shift))
        return found

    return [[pairs(step, owner) for owner in range(ranks)] for step in range(ranks)]


def _of_seen(
    problem: Problem,
    seen: list[list[list[Span]]],
    rank: int,
    travels: str,
    passes: str,
    dlse: bool,
) -> LinkTraffic:
    """Return the bytes that one rank sends and receives in a call with a window or with lengths.

    `seen` is the result of `_seen`. The other arguments are those of `ring`.
    """
    ranks, rows = len(seen), problem.seqlen_q if travels == "q" else problem.seqlen_k
    messages = ring_messages(problem, travels=travels, passes=passes, dlse=dlse)
    operands, first, later = (x // rows for x in messages)  # bytes of one row
    stops = [step for step in range(ranks) if step == 0 or any(seen[step])]

    def bytes_of(owner: int, steps: list[int], each: int | None) -> int:
        """Return the bytes of a message about the rows that the rank `owner` had at the start.

        The message contains all rows from the first to the last row that one of `steps` reads.
        `each` is the number of bytes per row in a message of operands. None means a message of
        results, whose number of bytes per row depends on the number of kernel calls that computed
        them.
        """
        calls = [span for step in steps for span in seen[step][owner]]
        if not calls:
            return 0
        if each is None:
            each = first if len(calls) == 1 else later
        return each * (max(end for _, end in calls) - min(begin for begin, _ in calls))

    sent = received = 0
    for n, (step, after) in enumerate(zip(stops, [*stops[1:], ranks], strict=True)):
        for owner, goes in (((rank - step) % ranks, True), ((rank - after) % ranks, False)):
            moved = bytes_of(owner, stops[n + 1 :], operands)
            moved += bytes_of(owner, stops[1 : n + 1], None)
            sent, received = (sent + moved, received) if goes else (sent, received + moved)
    return LinkTraffic(sent, received)


def ring_break_even(
    ranks: int, *, dtype: str = "float16", head_dim: int = 128, passes: str = "fwd"
) -> float:
    """Return the ratio of keys to queries above which sending Q is cheaper than sending K and V.

    Cheaper means that each rank sends fewer bytes.

    Parameters
    ----------
    ranks : int
        Number of ranks P, at least 2.
    dtype : str, default "float16"
        Dtype of the inputs.
    head_dim : int, default 128
        Head dimension d of Q, K and V.
    passes : {"fwd", "bwd"}, default "fwd"
        Forward or backward pass.

    Returns
    -------
    float
        The ratio (H_k N_k) / (H_q N_q) at which both send the same number of bytes, without a mask.
        H_k and H_q are the numbers of heads, N_k and N_q the numbers of columns and rows.

    Raises
    ------
    TypeError
        If `ranks` is not an integer.
    ValueError
        If `ranks` is below 2, or another argument has a value that is not allowed.

    Notes
    -----
    The ratio is a quotient. Its numerator is the bytes per element of Q if Q is sent. Its
    denominator is the bytes per element of K if K and V are sent. Both are summed over the P - 1
    messages of `ring`. With e bytes per element of the inputs:

        fwd   (e (P - 1) + e + 4 (P - 2) + 4 (P - 1) / d) / (2 e (P - 1))
        bwd   (3 e (P - 1) + e + 4 (P - 2) + 4 (P - 1) / d) / (2 e (P - 1) + 2 (e + 4 (P - 2)))

    In 16 bits the ratio is about 1 for two ranks. For many ranks it tends to 3/2 forward and to 5/6
    backward. With many ranks and as many queries as keys, sending K and V takes fewer bytes in the
    forward pass. Sending Q takes fewer bytes in the backward pass, where gradients of K and V would
    be sent in float32. Query heads that share K and V make (H_k N_k) / (H_q N_q) smaller. A few
    queries on a long cache make it larger.

    Examples
    --------
    >>> round(ring_break_even(2), 2), round(ring_break_even(1024), 2)
    (1.01, 1.51)
    >>> round(ring_break_even(2, passes="bwd"), 2), round(ring_break_even(1024, passes="bwd"), 2)
    (1.0, 0.84)
    """
    square = Problem(1, 1, 1, 1, 1, head_dim, dtype=dtype)
    if as_size("ranks", ranks, axis=False) < 2:
        raise ValueError(f"ranks must be at least 2, got {ranks}")
    moved = [ring(square, ranks, travels=each, passes=passes).sent for each in ("q", "kv")]
    return moved[0] / moved[1]


def _check(problem: Problem, ranks: int, travels: str, passes: str) -> None:
    """Raise TypeError or ValueError unless the arguments of `ring` are valid."""
    as_size("ranks", ranks, axis=False)
    check_name("travels", travels, TRAVELS)
    check_name("passes", passes, PASSES[:2])
    if problem.q_lens is not None or problem.kv_lens is not None:
        raise ValueError(
            "problem describes the part of one rank and must have no q_lens or kv_lens, got q_lens "
            f"{problem.q_lens} and kv_lens {problem.kv_lens}; pass the lengths of the complete "
            "sequence as the arguments q_lens and kv_lens"
        )
    if problem.causal and (
        problem.seqlen_q != problem.seqlen_k or (ranks > 1 and problem.seqlen_q % 2)
    ):
        raise ValueError(
            "problem must have equal and even numbers of rows and columns with causal=True, got "
            f"{problem.seqlen_q} rows and {problem.seqlen_k} columns"
        )
