"""What the papers publish of accesses: asymptotic bounds, and a count of an algorithm.

None is an exact count of a kernel. No mask is known here.
"""

from __future__ import annotations

import math
import numbers
import sys

from fa_numba.checks import as_size
from fa_numba.integers import ceil_div
from fa_numba.io_model.accesses import one_head_dim
from fa_numba.problem import Problem


def theta_standard(problem: Problem) -> float:
    """Theta(N d + N^2) accesses of standard attention (FA-1 Theorem 2), constant 1, in elements.

    B H ((N_q + N_k) d / 2 + N_q N_k), which is B H (N d + N^2) at N_q = N_k = N. No mask.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    return problem.batch * problem.heads_q * ((Nq + Nk) * d / 2 + Nq * Nk)


def theta_flash(problem: Problem, M: float) -> float:
    """Theta(N^2 d^2 / M) accesses of FlashAttention (FA-1 Theorem 2), constant 1, in elements.

    B H N_q N_k d^2 / M. `M` is the on-chip memory in elements; the theorem is for d <= M <= N d,
    and Proposition 3 says that no exact algorithm does better for all of that range. No mask.
    """
    if not isinstance(M, numbers.Real) or not 0 < M <= sys.float_info.max:
        raise ValueError(f"M is {M!r}: allowed is a finite number of elements > 0")
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    return problem.batch * problem.heads_q * (Nq * Nk * d * d / M)


def saha_ye(problem: Problem, M: float) -> float:
    """Theta(min(N^2 d / sqrt(M), N^2 d^2 / M)) (Saha and Ye, arXiv 2402.07443, Theorem 3.1).

    Constant 1, in elements, `M` in elements, times B H, no mask. The two meet at M = d^2: above,
    it is `theta_flash` and FlashAttention is optimal; below, square tiles of S are.
    """
    flash = theta_flash(problem, M)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    return min(problem.batch * problem.heads_q * (Nq * Nk * d / math.sqrt(M)), flash)


def li_liang(problem: Problem, M: float) -> float:
    """Theta(min((N^2 d^2 + N d^3) / M, (N^2 d + N d^2) / sqrt(M))), backward (Li, Liang, Shi, Song
    and Zhou, arXiv 2410.09397, main theorem).

    Constant 1, in elements, `M` in elements, times B H, no mask; of N d^2 the longer length's. As
    `saha_ye` forward the two meet at M = d^2, above which FlashAttention is optimal.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    more = problem.batch * problem.heads_q * max(Nq, Nk) * d * d
    return saha_ye(problem, M) + more * min(d / M, 1 / math.sqrt(M))


def fa1_paper(problem: Problem, Bc: int) -> int:
    """Accesses of FA-1's Algorithm 1 as FA-1 Fig. 2 (middle) counts them, in elements.

    K and V read once; Q read, O read and O written in every pass over K/V, less the first read of
    O; no l and m, no mask: 2 N_k d + (3 T_c - 1) N_q d per head. At N_q = N_k = N that is
    X (3 N / B_c + 1) with X = B H N d.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    Tc = ceil_div(Nk, as_size("Bc", Bc, axis=False))
    return problem.batch * problem.heads_q * (2 * Nk + (3 * Tc - 1) * Nq) * d
