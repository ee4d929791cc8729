"""Bytes between devices that share a sequence, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from fa_numba.dtypes import DTYPES
from fa_numba.io_model.work import PASSES
from fa_numba.problem import Problem

TRAVELS = ("kv", "q")
_SUM_BYTES = 4  # a float32: sums of several parts, and L


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that a rank sends to the next and receives from the one before."""

    sent: int
    received: int


def ring(
    problem: Problem, ranks: int, rank: int = 0, *, travels: str = "kv", passes: str = "fwd"
) -> LinkTraffic:
    """Bytes on the link of one rank in a call of ``fa_numba.torch.ring_attention``.

    ``problem`` is one rank's part: seqlen_q rows and seqlen_k columns; ``causal`` stands for the
    zigzag split. ``passes`` is "fwd" or "bwd".

    With e bytes an element, n_q = B H_q N_q d, n_k = B H_k N_k d, R = B H_q N_q rows, a message has

        travels  pass  what travels            its results
        "kv"     fwd   2 e n_k                 -
        "kv"     bwd   2 e n_k                 2 w n_k
        "q"      fwd   e n_q                   w n_q + 4 R
        "q"      bwd   3 e n_q + 4 R           w n_q

    (Q; dO, O and L beside it in the backward pass), and there are P - 1 messages of each kind. Of
    results w = e in the first message, what one kernel has left, and 4 after it, float32 sums.
    Under a causal mask the results that rank r sends after step s <= r are of half the rows: no
    rank that they have passed by then has seen the others. What a rank receives the one before has
    sent.

    Source: the schedule of ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889, section 3)
    for K and V; this package's own for Q. Raises ValueError for another pass, rank or operand.

    >>> from fa_numba.problem import Problem
    >>> p = Problem(1, 16, 16, 16384, 16384, 128, dtype="float16")
    >>> ring(p, 2).sent == 2 * 2 * 16 * 16384 * 128
    True
    >>> ring(p, 8).sent, ring(p, 8, travels="q").sent
    (939524096, 1349517312)
    """
    _check(problem, ranks, travels, passes)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: allowed is 0 to {ranks - 1}")
    before = (rank - 1) % ranks
    return LinkTraffic(*(_sent(problem, ranks, r, travels, passes) for r in (rank, before)))


def ring_messages(
    problem: Problem, *, travels: str = "kv", passes: str = "fwd"
) -> tuple[int, int, int]:
    """Bytes of one message of each kind, as the table of ``ring`` has them without a mask: what
    travels, the first message of its results, and a later one.

    >>> from fa_numba.problem import Problem
    >>> ring_messages(Problem(1, 1, 1, 64, 64, 32, dtype="float16"), passes="bwd")
    (8192, 8192, 16384)
    """
    _check(problem, 1, travels, passes)
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    n_k = problem.batch * problem.heads_k * problem.seqlen_k * problem.head_dim
    size = n_k if travels == "kv" else rows * problem.head_dim
    e, sums = DTYPES[problem.dtype].bytes, rows * _SUM_BYTES
    if travels == "kv":
        results = 0 if passes == "fwd" else 2 * size
        return 2 * size * e, results * e, results * _SUM_BYTES
    if passes == "fwd":
        return size * e, size * e + sums, size * _SUM_BYTES + sums
    return 3 * size * e + sums, size * e, size * _SUM_BYTES


def _sent(problem: Problem, ranks: int, rank: int, travels: str, passes: str) -> int:
    operands, first, later = ring_messages(problem, travels=travels, passes=passes)
    halves = rank if problem.causal else 0  # messages of half the rows, the first ones
    total = (ranks - 1) * operands
    for n in range(ranks - 1):
        results = first if n == 0 else later
        total += results // 2 if n < halves else results
    return total


def ring_break_even(
    ranks: int, *, dtype: str = "float16", head_dim: int = 128, passes: str = "fwd"
) -> float:
    """(H_k N_k) / (H_q N_q) above which Q on its way sends less than K and V, without a mask.

    The ratio of the bytes of ``ring`` by element, summed over the P - 1 messages:

        fwd   (e (P - 1) + e + 4 (P - 2) + 4 (P - 1) / d) / (2 e (P - 1))
        bwd   (3 e (P - 1) + e + 4 (P - 2) + 4 (P - 1) / d) / (2 e (P - 1) + 2 (e + 4 (P - 2)))

    In 16 bits that is 1 between two ranks, but for L, and for many ranks 3/2 forward and 5/6
    backward: as many queries as keys are best left where they are, and their gradients too, where
    those of K and V would follow these in float32. Heads that share K and V make the ratio smaller,
    a few queries on a long cache make it larger.

    >>> round(ring_break_even(2), 2), round(ring_break_even(1024), 2)
    (1.01, 1.51)
    >>> round(ring_break_even(2, passes="bwd"), 2), round(ring_break_even(1024, passes="bwd"), 2)
    (1.0, 0.84)
    """
    square = Problem(1, 1, 1, 1, 1, head_dim, dtype=dtype)
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}: allowed is 2 or more")
    moved = [ring(square, ranks, travels=each, passes=passes).sent for each in ("q", "kv")]
    return moved[0] / moved[1]


def _check(problem: Problem, ranks: int, travels: str, passes: str) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}: allowed is a positive integer")
    if travels not in TRAVELS:
        raise ValueError(f"travels is {travels!r}: allowed is {' or '.join(map(repr, TRAVELS))}")
    if passes not in PASSES:
        raise ValueError(f"passes is {passes!r}: allowed is one of {', '.join(PASSES)}")
    if problem.causal and (
        problem.seqlen_q != problem.seqlen_k or (ranks > 1 and problem.seqlen_q % 2)
    ):
        raise ValueError(
            f"problem has {problem.seqlen_q} rows and {problem.seqlen_k} columns with causal: "
            "allowed are as many of both, an even number"
        )
