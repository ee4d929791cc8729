"""Accesses as papers publish them: asymptotic bounds, and one count of an algorithm.

These numbers are not exact counts of kernels. They ignore masks.
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
    """Return the bound N d + N^2 on the accesses of standard attention, in elements.

    Parameters
    ----------
    problem : Problem
        The problem. Masks are ignored.

    Returns
    -------
    float
        B H ((N_q + N_k) d / 2 + N_q N_k) elements, which is B H (N d + N^2) at N_q = N_k = N. B is
        the batch size, H the number of query heads, d the head dimension.

    Raises
    ------
    ValueError
        If V has another head dimension than Q and K.

    Notes
    -----
    Theta(N d + N^2), FlashAttention Theorem 2, with the constant 1.

    Examples
    --------
    >>> theta_standard(Problem(1, 1, 1, 1024, 1024, 64)) == 1024 * 64 + 1024**2
    True
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    return problem.batch * problem.heads_q * ((Nq + Nk) * d / 2 + Nq * Nk)


def theta_flash(problem: Problem, M: float) -> float:
    """Return the bound N^2 d^2 / M on the accesses of FlashAttention, in elements.

    Parameters
    ----------
    problem : Problem
        The problem. Masks are ignored.
    M : float
        On-chip memory in elements, above 0. The theorem is for d <= M <= N d.

    Returns
    -------
    float
        B H N_q N_k d^2 / M elements. B is the batch size, H the number of query heads, d the head
        dimension.

    Raises
    ------
    ValueError
        If `M` is not a finite number above 0, or V has another head dimension than Q and K.

    Notes
    -----
    Theta(N^2 d^2 / M), FlashAttention Theorem 2, with the constant 1. Proposition 3 of that paper
    says that no exact algorithm has asymptotically fewer accesses for all M from d to N d.

    Examples
    --------
    >>> theta_flash(Problem(1, 1, 1, 1024, 1024, 64), M=2**15) == 1024**2 * 64**2 / 2**15
    True
    """
    if not isinstance(M, numbers.Real) or not 0 < M <= sys.float_info.max:
        raise ValueError(
            "M, the size of the on-chip memory in elements, must be a finite number greater than "
            f"0, got {M!r}{' (a string)' if isinstance(M, str) else ''}"
        )
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    return problem.batch * problem.heads_q * (Nq * Nk * d * d / M)


def saha_ye(problem: Problem, M: float) -> float:
    """Return the lower bound of Saha and Ye on the accesses of any exact attention, in elements.

    Parameters
    ----------
    problem : Problem
        The problem. Masks are ignored.
    M : float
        On-chip memory in elements, above 0.

    Returns
    -------
    float
        B H min(N_q N_k d / sqrt(M), N_q N_k d^2 / M) elements. B is the batch size, H the number of
        query heads, d the head dimension.

    Raises
    ------
    ValueError
        If `M` is not a finite number above 0, or V has another head dimension than Q and K.

    Notes
    -----
    Theta(min(N^2 d / sqrt(M), N^2 d^2 / M)), Saha and Ye, arXiv 2402.07443, Theorem 3.1, with the
    constant 1. The two terms are equal at M = d^2. For larger M the bound equals `theta_flash`:
    FlashAttention is optimal. For smaller M an algorithm with square tiles of S is optimal.

    Examples
    --------
    >>> problem = Problem(1, 1, 1, 1024, 1024, 64)
    >>> saha_ye(problem, 2 * 64**2) == theta_flash(problem, 2 * 64**2)
    True
    >>> saha_ye(problem, 64**2 / 4) < theta_flash(problem, 64**2 / 4)
    True
    """
    flash = theta_flash(problem, M)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    return min(problem.batch * problem.heads_q * (Nq * Nk * d / math.sqrt(M)), flash)


def li_liang(problem: Problem, M: float) -> float:
    """Return the lower bound of Li, Liang, Shi, Song and Zhou for the backward pass, in elements.

    Parameters
    ----------
    problem : Problem
        The problem. Masks are ignored.
    M : float
        On-chip memory in elements, above 0.

    Returns
    -------
    float
        B H min((N_q N_k d^2 + N d^3) / M, (N_q N_k d + N d^2) / sqrt(M)) elements. N is the larger
        of N_q and N_k. B is the batch size, H the number of query heads, d the head dimension.

    Raises
    ------
    ValueError
        If `M` is not a finite number above 0, or V has another head dimension than Q and K.

    Notes
    -----
    Theta(min((N^2 d^2 + N d^3) / M, (N^2 d + N d^2) / sqrt(M))), arXiv 2410.09397, main theorem,
    with the constant 1. The two terms are equal at M = d^2, as in `saha_ye`. For larger M
    FlashAttention is optimal.

    Examples
    --------
    >>> li_liang(Problem(1, 1, 1, 1024, 1024, 64), M=64**2) == 1024**2 + 1024 * 64
    True
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    more = problem.batch * problem.heads_q * max(Nq, Nk) * d * d
    return saha_ye(problem, M) + more * min(d / M, 1 / math.sqrt(M))


def fa1_paper(problem: Problem, Bc: int) -> int:
    """Return the accesses of FA-1 forward, in elements, as FlashAttention's Fig. 2 (middle) counts.

    Parameters
    ----------
    problem : Problem
        The problem. Masks are ignored.
    Bc : int
        Columns of a column tile, at least 1.

    Returns
    -------
    int
        B H (2 N_k d + (3 T_c - 1) N_q d) elements with T_c = ceil(N_k / B_c) column tiles. At
        N_q = N_k = N that is B H N d (3 T_c + 1).

    Raises
    ------
    TypeError
        If `Bc` is not an integer.
    ValueError
        If `Bc` is below 1, or V has another head dimension than Q and K.

    Notes
    -----
    K and V are read once. In every pass over the rows, Q is read and O is written. O is read in
    every pass except the first pass. l and m are not counted.

    Examples
    --------
    >>> fa1_paper(Problem(1, 1, 1, 1024, 1024, 64), Bc=256) == (3 * 4 + 1) * 1024 * 64
    True
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, one_head_dim(problem)
    Tc = ceil_div(Nk, as_size("Bc", Bc, axis=False))
    return problem.batch * problem.heads_q * (2 * Nk + (3 * Tc - 1) * Nq) * d
