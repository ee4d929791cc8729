"""Attention and its gradients in float64, the oracle of every kernel, and the two tiled algorithms
in plain NumPy.

Shapes everywhere: q (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_k, seqlen_k,
head_dim); outputs O as q, and L (batch, heads_q, seqlen_q), the natural logarithm of the sum of
the exponentials of a row's scaled and masked scores. A row that sees no column, or only scores of
-inf, has O = 0 and L = -inf. A NaN or infinity in v may reach rows that do not see it, as 0 NaN.
Gradients have the shapes of q, k and v; such a row takes no part in them.
No kernel is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import special

from .masks import visible_causal
from .problem import Problem, as_size

Array = NDArray[Any]
Result = Array | tuple[Array, Array]

_ROWS = 512  # rows of S held at a time: at seqlen_k = 65536 that is 256 MiB of float64


def _problem(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, scale: float | None, causal: bool
) -> Problem:
    return Problem.from_shapes(np.shape(q), np.shape(k), np.shape(v), scale=scale, causal=causal)


def _heads(
    problem: Problem, q: ArrayLike, k: ArrayLike, v: ArrayLike, dtype: DTypeLike = np.float64
) -> Iterator[tuple[tuple[int, int], Array, Array, Array]]:
    """Each ((batch, head), Q, K, V), the matrices two-dimensional and of `dtype`."""
    q, k, v = (np.asarray(a, dtype) for a in (q, k, v))
    for b, h in np.ndindex(problem.batch, problem.heads_q):
        yield (b, h), q[b, h], k[b, h // problem.group], v[b, h // problem.group]


def _scores(problem: Problem, Qi: Array, Kj: Array, row: int, col: int) -> Array:
    """Scaled and masked scores of a tile whose first row and column are `row` and `col`."""
    Sij = Qi.dtype.type(problem.scale) * (Qi @ Kj.T)
    if problem.causal:
        rows = np.arange(row, row + len(Qi))[:, None]
        cols = np.arange(col, col + len(Kj))[None, :]
        Sij[~visible_causal(rows, cols, problem.diagonal)] = -np.inf
    return Sij


def _finite_or_zero(m: Array) -> Array:
    """A row maximum to subtract: 0 for -inf, where the difference would be NaN."""
    return np.where(m == -np.inf, 0, m).astype(m.dtype)


def _one_if_zero(l: Array) -> Array:
    """A row sum to divide by: a row without weight has O = 0, not 0/0."""
    return np.where(l == 0, 1, l).astype(l.dtype)


def _logsumexp(m: Array, l: Array) -> Array:
    with np.errstate(divide="ignore"):  # log 0 = -inf is what a row without weight has
        return m + np.log(l)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Result:
    """O, or (O, L) with `return_lse`, in float64, by SciPy's softmax and logsumexp.

    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> attention(one_key, one_key, 3 * one_key)
    array([[[[3., 3.]]]])
    """
    problem = _problem(q, k, v, scale, causal)
    O, L = np.empty(problem.q_shape), np.empty(problem.lse_shape)
    for head, Q, K, V in _heads(problem, q, k, v):
        for row in range(0, problem.seqlen_q, _ROWS):
            rows = slice(row, row + _ROWS)
            S = _scores(problem, Q[rows], K, row, 0)
            empty = S.max(axis=1) == -np.inf
            S[empty] = 0  # SciPy answers a row of -inf with NaN: overwritten below
            O[head][rows] = special.softmax(S, axis=1) @ V
            L[head][rows] = special.logsumexp(S, axis=1)
            O[head][rows][empty] = 0
            L[head][rows][empty] = -np.inf
    return (O, L) if return_lse else O


def unfused(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention row by row with every step rounded to `dtype`: the yardstick of the tolerance.

    S = scale Q K^T, P = e^(S - rowmax(S)), O = P V / rowsum(P), L = rowmax(S) + log rowsum(P). A
    kernel passes when its error against `attention` is at most twice this one's plus a rounding.
    """
    problem = _problem(q, k, v, scale, causal)
    O, L = np.empty(problem.q_shape, dtype), np.empty(problem.lse_shape, dtype)
    for head, Q, K, V in _heads(problem, q, k, v, dtype):
        for row in range(0, problem.seqlen_q, _ROWS):
            rows = slice(row, row + _ROWS)
            S = _scores(problem, Q[rows], K, row, 0)
            m = S.max(axis=1)
            P = np.exp(S - _finite_or_zero(m)[:, None])
            l = P.sum(axis=1)
            O[head][rows] = (P / _one_if_zero(l)[:, None]) @ V
            L[head][rows] = _logsumexp(m, l)
    return (O, L) if return_lse else O


def _output_gradient(problem: Problem, dout: ArrayLike, dtype: DTypeLike) -> Array:
    dout = np.asarray(dout, dtype)
    if dout.shape != problem.q_shape:
        raise ValueError(f"dout has shape {dout.shape}: allowed is q's, {problem.q_shape}")
    return dout


def _gradients(
    problem: Problem, dO: Array, q: ArrayLike, k: ArrayLike, v: ArrayLike, softmax: Callable
) -> tuple[Array, Array, Array]:
    """dQ, dK, dV in dO's dtype from P = softmax(S), a block of rows at a time.

    dV = P^T dO, dP = dO V^T, D = rowsum(P o dP), dS = P o (dP - D), dQ = scale dS K,
    dK = scale dS^T Q; dK and dV summed over the query heads of a group.
    """
    dQ = np.empty(problem.q_shape, dO.dtype)
    dK, dV = np.zeros(problem.k_shape, dO.dtype), np.zeros(problem.k_shape, dO.dtype)
    scale = dO.dtype.type(problem.scale)
    for head, Q, K, V in _heads(problem, q, k, v, dO.dtype):
        b, h = head
        shared = b, h // problem.group
        for row in range(0, problem.seqlen_q, _ROWS):
            rows = slice(row, row + _ROWS)
            P = softmax(_scores(problem, Q[rows], K, row, 0))
            dP = dO[head][rows] @ V.T
            D = (P * dP).sum(axis=1)
            dS = P * (dP - D[:, None])
            dV[shared] += P.T @ dO[head][rows]
            dQ[head][rows] = scale * (dS @ K)
            dK[shared] += scale * (dS.T @ Q[rows])
    return dQ, dK, dV


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float64, the gradients of sum(dout o attention(q, k, v)), in closed form.

    dout has the shape of q. P is SciPy's softmax; a row that sees no column has P = 0.

    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> [g.ravel().tolist() for g in attention_backward(5 * one_key, one_key, one_key, one_key)]
    [[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]]
    """

    def softmax(S: Array) -> Array:
        empty = S.max(axis=1) == -np.inf
        S[empty] = 0  # SciPy answers a row of -inf with NaN
        P = special.softmax(S, axis=1)
        P[empty] = 0
        return P

    problem = _problem(q, k, v, scale, causal)
    dO = _output_gradient(problem, dout, np.float64)
    return _gradients(problem, dO, q, k, v, softmax)


def unfused_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
    scale: float | None = None,
    causal: bool = False,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) from whole rows of P and dP with every step rounded to `dtype`.

    The yardstick of the backward kernels, as `unfused` is of the forward ones.
    """

    def softmax(S: Array) -> Array:
        P = np.exp(S - _finite_or_zero(S.max(axis=1))[:, None])
        return P / _one_if_zero(P.sum(axis=1))[:, None]

    problem = _problem(q, k, v, scale, causal)
    dO = _output_gradient(problem, dout, dtype)
    return _gradients(problem, dO, q, k, v, softmax)


def fa1_tiled(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    Br: int,
    Bc: int,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Result:
    """FlashAttention (arXiv 2205.14135), Algorithm 1, in float64: K/V outer, Q inner.

    O, l and m are the arrays in HBM; what one pass of the inner loop binds is on chip. Beyond the
    paper: tiles that the causal mask hides entirely are skipped, and L = m + log l at the end.
    """
    Br, Bc = as_size("Br", Br), as_size("Bc", Bc)  # line 1: the caller has set the block sizes
    problem = _problem(q, k, v, scale, causal)
    Nq, Nk = problem.seqlen_q, problem.seqlen_k
    # Line 2: initialise O, l, m in HBM.
    O = np.zeros(problem.q_shape)
    l = np.zeros(problem.lse_shape)
    m = np.full(problem.lse_shape, -np.inf)
    for head, Q, K, V in _heads(problem, q, k, v):
        # Lines 3-5: blocks are slices; the last of each may be short. For each K/V block:
        for col in range(0, Nk, Bc):
            # Line 6: load Kj, Vj.
            Kj, Vj = K[col : col + Bc], V[col : col + Bc]
            # Line 7: for each Q block
            for row in range(0, Nq, Br):
                rows = slice(row, min(row + Br, Nq))
                if col > 0 and problem.columns_end(rows.stop - 1) <= col:
                    continue
                # Line 8: load Qi, Oi, li, mi.
                Qi, Oi, li, mi = Q[rows], O[head][rows], l[head][rows], m[head][rows]
                # Line 9: Sij = scale Qi Kj^T
                Sij = _scores(problem, Qi, Kj, row, col)
                # Line 10: statistics of this tile alone
                mij = Sij.max(axis=1)
                Pij = np.exp(Sij - _finite_or_zero(mij)[:, None])
                lij = Pij.sum(axis=1)
                # Line 11: merge them with those of the columns before.
                m_new = np.maximum(mi, mij)
                old = np.exp(mi - _finite_or_zero(m_new))
                new = np.exp(mij - _finite_or_zero(m_new))
                l_new = old * li + new * lij
                # Line 12: Oi <- diag(l_new)^-1
                #     (diag(li) e^(mi - m_new) Oi + e^(mij - m_new) Pij Vj)
                O[head][rows] = (
                    (li * old)[:, None] * Oi + new[:, None] * (Pij @ Vj)
                ) / _one_if_zero(l_new)[:, None]
                # Line 13: write li, mi.
                l[head][rows] = l_new
                m[head][rows] = m_new
    # Line 16
    return (O, _logsumexp(m, l)) if return_lse else O


def fa2_tiled(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    Br: int,
    Bc: int,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Result:
    """FlashAttention-2 (arXiv 2307.08691), Algorithm 1, in float64: Q outer, K/V inner.

    Line 10 of the paper prints diag(e^(m_old - m_new))^-1 before O; the factor that keeps O on the
    scale of the new maximum is e^(m_old - m_new) itself, and that is used here.
    """
    Br, Bc = as_size("Br", Br), as_size("Bc", Bc)
    problem = _problem(q, k, v, scale, causal)
    Nq = problem.seqlen_q
    O, L = np.empty(problem.q_shape), np.empty(problem.lse_shape)
    for head, Q, K, V in _heads(problem, q, k, v):
        # Lines 1-3: blocks are slices; the last of each may be short. For each Q block:
        for row in range(0, Nq, Br):
            rows = slice(row, min(row + Br, Nq))
            # Line 4: load Qi.
            Qi = Q[rows]
            # Line 5: initialise Oi, li, mi on chip.
            Oi = np.zeros_like(Qi)
            li = np.zeros(len(Qi))
            mi = np.full(len(Qi), -np.inf)
            # Line 6: for each K/V block; causal: up to the last that a row here sees (section 3.1)
            for col in range(0, problem.columns_end(rows.stop - 1), Bc):
                # Line 7: load Kj, Vj.
                Kj, Vj = K[col : col + Bc], V[col : col + Bc]
                # Line 8: Sij = scale Qi Kj^T
                Sij = _scores(problem, Qi, Kj, row, col)
                # Line 9: running maximum and sum
                m_old, mi = mi, np.maximum(mi, Sij.max(axis=1))
                Pij = np.exp(Sij - _finite_or_zero(mi)[:, None])
                factor = np.exp(m_old - _finite_or_zero(mi))
                li = factor * li + Pij.sum(axis=1)
                # Line 10: Oi <- diag(e^(m_old - m_new)) Oi + Pij Vj, not yet normalised
                Oi = factor[:, None] * Oi + Pij @ Vj
            # Lines 12 and 14: Oi <- diag(li)^-1 Oi, written once
            O[head][rows] = Oi / _one_if_zero(li)[:, None]
            # Lines 13 and 15: Li = mi + log li
            L[head][rows] = _logsumexp(mi, li)
    # Line 17
    return (O, L) if return_lse else O


def _differences(out: ArrayLike, ref: ArrayLike) -> tuple[Array, Array, Array]:
    """out, ref and |out - ref| in float64; 0 where both are the same infinity or both NaN."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {out.shape}: allowed is the reference's, {ref.shape}")
    if out.size == 0:
        raise ValueError(f"out has shape {out.shape}: allowed is a shape without an empty axis")
    same = (out == ref) | (np.isnan(out) & np.isnan(ref))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(out - ref))
    return out, ref, np.where(np.isnan(difference), np.inf, difference)


def relative_error(out: ArrayLike, ref: ArrayLike) -> float:
    """||out - ref|| / ||ref||, Frobenius norms in float64.

    Where `ref` is infinite or NaN, `out` must be the same: such elements then add nothing to
    either norm, and else the error is inf. So it is for any difference from a `ref` of zeros.
    """
    _, ref, difference = _differences(out, ref)
    error = float(np.linalg.norm(difference))
    if error == 0.0:
        return 0.0
    size = float(np.linalg.norm(np.where(np.isfinite(ref), ref, 0.0)))
    return error / size if size > 0.0 else np.inf


def worst(out: ArrayLike, ref: ArrayLike) -> tuple[tuple[int, ...], float, float]:
    """(coordinate, got, expected) of the largest absolute difference, to print in a failure."""
    out, ref, difference = _differences(out, ref)
    where = np.unravel_index(int(np.argmax(difference)), difference.shape)
    return tuple(int(i) for i in where), float(out[where]), float(ref[where])
