"""Attention and its gradients in NumPy: what every kernel is tested against.

`attention` and `attention_backward` compute in float64 and are the truth. `unfused` and
`unfused_backward` compute the same, step by step in the kernels' own dtype: their error says how
much rounding is usual, and a kernel may have about twice as much. `relative_error` and `worst`
compare two arrays. All options are taken, see `options.AttentionOptions`.

Shapes: q is (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_k, seqlen_k, head_dim). The
output O is as q, L, the natural logarithm of the sum of the exponentials of a row's scores, is
(batch, heads_q, seqlen_q). The head dimension of v may be another, which O then has. With
layout="bnhd" heads and seqlen change places, but not in L. With
cu_seqlens_q and cu_seqlens_k q is (total_q, heads_q, head_dim), k and v are (total_k, heads_k,
head_dim), O is as q and L (heads_q, total_q). Gradients have the shapes of q, k and v, and of the
bias as it was given. `tiles`, any object with Br and Bc, gives the sizes of the blocks of a
block_mask and is needed for that alone.

A row that sees no column, or has only scores of -inf, gets O = 0 and L = -inf and takes no part in
the gradients. Rows and columns past q_lens and kv_lens are not read; their O and gradients are 0,
their L is -inf. A NaN or infinity in k or v can reach rows that do not see it, as 0 times it is
NaN.

Wrong arguments raise TypeError or ValueError with the argument's name, its value and what is
allowed. No kernel is imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike
from scipy import special

from .algorithms import divide_rows, exp_minus, logsumexp
from .checks import as_real, check_shape
from .options import AttentionOptions
from .problem import BlockSizes
from .scores import Array, Call, Head, add_bias_gradient, checked_call

Result = Array | tuple[Array, Array]
Gradients = tuple[Any, ...]
Softmax = Callable[..., Array]

_ROWS = 512  # rows of S held at a time: at seqlen_k = 65536 that is 256 MiB of float64


def _row_blocks(head: Head) -> Iterator[slice]:
    """The rows of a head, so many at a time."""
    for row in range(0, head.Nq, _ROWS):
        yield slice(row, min(row + _ROWS, head.Nq))


def _with_sinks(softmax: Softmax) -> Softmax:
    """``softmax(S, L=None, sink=None)``: a sink is a score of the row that has no P of it."""

    @functools.wraps(softmax)
    def with_sink(S: Array, L: Array | None = None, sink: Any = None) -> Array:
        if sink is None:
            return softmax(S, L)
        return softmax(np.column_stack([S, np.full(len(S), sink, S.dtype)]), L)[:, :-1]

    return with_sink


@_with_sinks
def _exact_softmax(S: Array, L: Array | None = None) -> Array:
    """P by SciPy; L, if given, is filled. A row of -inf, for SciPy NaN, has P = 0 and L = -inf."""
    empty = S.max(axis=1) == -np.inf
    S[empty] = 0
    P = special.softmax(S, axis=1)
    P[empty] = 0
    if L is not None:
        L[:] = special.logsumexp(S, axis=1)
        L[empty] = -np.inf
    return P


@_with_sinks
def _rounded_softmax(S: Array, L: Array | None = None) -> Array:
    """P = e^(S - m) / l, m the rows' maxima, l their sums, in S's dtype; L is filled if given."""
    m = S.max(axis=1)
    P = exp_minus(S, m)
    l = P.sum(axis=1)
    if L is not None:
        L[:] = logsumexp(m, l)
    return divide_rows(P, l)


def _to_half(x: Array, name: str) -> Array:
    """float32 values rounded to the nearest of float16 or bfloat16, as float32."""
    if name == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.astype(np.float32).view(np.uint32)
    up = np.uint32(0x7FFF) + (bits >> 16 & 1)  # to even where two are equally near
    nearest = (bits + up & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, nearest)


def _forward(
    softmax: Softmax,
    call: Call,
    q: Array,
    k: Array,
    v: Array,
    rounded: Callable[..., Array] = np.asarray,
) -> tuple[Array, Array]:
    """O = (P o dropout) V, and L, a block of rows at a time; P o dropout and O are `rounded`."""
    O = np.zeros(call.problem.o_shape, call.dtype)
    L = np.full(call.problem.lse_shape, -np.inf, call.dtype)
    for head in call.heads():
        Q, K, V = q[head.q], k[head.k], v[head.k]
        for rows in _row_blocks(head):
            S, _ = call.scores(head, Q[rows], K, rows.start)
            P = softmax(S, L[head.lse][rows], call.sink(head))
            O[head.q][rows] = rounded(rounded(P * call.dropout(head, rows)) @ V)
    return O, L


def _backward(
    softmax: Softmax, dout: ArrayLike, call: Call, q: Array, k: Array, v: Array,
    dbias_shape: tuple[int, ...] | None, dlse: ArrayLike | None = None, return_dsinks: bool = False,
    return_dcaptured: bool = False, rounded: Callable[..., Array] = np.asarray,
) -> Gradients:  # fmt: skip
    """dQ, dK, dV, for a `dbias_shape` dbias, then dsinks and dcaptured, a block of rows at a time.

    The matrices that are multiplied, and the first three gradients, are `rounded`.

    dV = (P o dropout)^T dO, dP = dO V^T o dropout, D = rowsum(P o dP) - dL for a gradient dL of L,
    dS = P o (dP - D), which is dbias; dS then times the softcap's derivative: dQ = scale dS K, dK =
    scale dS^T Q. dK and dV are sums over the query heads of a group, dbias over the axes that the
    bias broadcasts along. A sink s is a column with dP = 0: ds = -sum e^(s - L) D. dcaptured has,
    by its name, for each array that score_mod captures the sum of dS by its elements.
    """
    problem = call.problem
    if return_dsinks and call.sinks is None:
        raise ValueError("return_dsinks is True without sinks: allowed is False")
    if return_dcaptured and not call.captured:
        raise ValueError(
            "return_dcaptured is True without a score_mod that captures a float32 array: allowed "
            "is False"
        )
    dsinks = np.zeros(problem.heads_q, call.dtype)
    dcaptured = {name: np.zeros(x.shape, call.dtype) for name, x in call.captured.items()}
    dO = rounded(as_real("dout", dout, call.dtype))
    check_shape("dout", dO.shape, problem.o_shape, of=", O's")
    dL = np.zeros(problem.lse_shape) if dlse is None else as_real("dlse", dlse, call.dtype)
    check_shape("dlse", dL.shape, problem.lse_shape, of=", L's")
    dQ = np.zeros(problem.q_shape, call.dtype)
    dK, dV = np.zeros(problem.k_shape, call.dtype), np.zeros(problem.v_shape, call.dtype)
    dbias = None if dbias_shape is None else np.zeros(problem.bias or (), call.dtype)
    scale = call.dtype.type(problem.scale)
    for head in call.heads():
        Q, K, V = q[head.q], k[head.k], v[head.k]
        for rows in _row_blocks(head):
            dOi = dO[head.q][rows]
            S, derivative = call.scores(head, Q[rows], K, rows.start)
            dropped = call.dropout(head, rows)
            L, sink = np.empty(len(S), S.dtype), call.sink(head)
            P = softmax(S, L, sink)
            dP = (dOi @ V.T) * dropped
            D = (P * dP).sum(axis=1)
            if dlse is not None:  # a row that sees no column has no L
                D -= np.where(L == -np.inf, 0, dL[head.lse][rows])
            if return_dsinks:
                dsinks[head.number] -= (exp_minus(np.full_like(L, sink), L) * D).sum()
            dS = P * (dP - D[:, None])
            if dbias is not None:
                add_bias_gradient(dbias, head, rows, dS)
            if return_dcaptured:
                places = np.argwhere(dS)
                slopes = call.captured_slopes(head, Q[rows], K, rows.start, places)
                for name, element, place, slope in slopes:
                    dcaptured[name][element] += dS[place] * slope
            # A slope may be no number where P is 0
            dS = rounded(np.where(dS == 0, dS, dS * derivative))
            dV[head.k] += rounded(P * dropped).T @ dOi
            dQ[head.q][rows] = scale * (dS @ K)
            dK[head.k] += scale * (dS.T @ Q[rows])
    dQ, dK, dV = rounded(dQ), rounded(dK), rounded(dV)
    added = () if dbias is None else (dbias.reshape(dbias_shape),)
    last = [dcaptured] if return_dcaptured else []
    return dQ, dK, dV, *added, *([dsinks] if return_dsinks else []), *last


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Result:  # fmt: skip
    """O, or (O, L) with `return_lse`, in float64, by SciPy's softmax and logsumexp.

    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> attention(one_key, one_key, 3 * one_key)
    array([[[[3., 3.]]]])
    """
    O, L = _forward(_exact_softmax, *checked_call(q, k, v, tiles=tiles, **options))
    return (O, L) if return_lse else O


def unfused(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, stored_scores: bool = False, tiles: BlockSizes | None = None,
    return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Result:  # fmt: skip
    """O, or (O, L) with `return_lse`, from whole rows of S and P, every step rounded to `dtype`.

    S = scale Q K^T with softcap, ALiBi and bias in this order, P = e^(S - m) / l with the rows'
    maxima m and sums l, O = (P o dropout) V, L = m + log l. It measures how much error is usual: a
    kernel passes when its error against `attention` is at most twice this one's plus a rounding.

    `matrix_dtype`, "float16" or "bfloat16", computes as tensor cores do: the matrices that are
    multiplied (q, k, v, P o dropout) and O are rounded to it, everything else to `dtype`, which is
    then float32; the arrays returned have that dtype. `stored_scores` rounds S to it as well, as
    standard attention does, whose S passes through memory.
    """
    rounded = _rounding(dtype, matrix_dtype)
    call, Q, K, V = checked_call(q, k, v, dtype, tiles=tiles, **options)
    softmax = _rounded_softmax
    if stored_scores:

        def softmax(S: Array, L: Array | None = None, sink: Any = None) -> Array:
            return _rounded_softmax(rounded(S), L, sink)

    O, L = _forward(softmax, call, rounded(Q), rounded(K), rounded(V), rounded)
    return (O, L) if return_lse else O


def _rounding(dtype: DTypeLike, matrix_dtype: str | None) -> Callable[..., Array]:
    """The function that rounds what is multiplied; ValueError for dtypes that do not fit."""
    if matrix_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(f"matrix_dtype is {matrix_dtype!r}: allowed is float16, bfloat16 or None")
    if matrix_dtype is None:
        return np.asarray
    if np.dtype(dtype) != np.float32:
        raise ValueError(f"dtype is {dtype!r} with a matrix_dtype: allowed is float32")
    return functools.partial(_to_half, name=matrix_dtype)


def attention_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    dlse: ArrayLike | None = None, return_dbias: bool = False, return_dsinks: bool = False,
    return_dcaptured: bool = False, **options: Unpack[AttentionOptions],
) -> Gradients:  # fmt: skip
    """(dq, dk, dv) in float64: the gradients of sum(dout o attention(q, k, v)), by their formulas.

    dout has the shape of O. With `return_dbias`, which needs a bias, (dq, dk, dv, dbias), with
    `return_dsinks` then dsinks, and with `return_dcaptured` at last those of the float32 arrays
    that score_mod captures, by its names for them. With a `dlse` of L's shape those of
    sum(dout o O) + sum(dlse o L), over rows that see a column.

    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> [g.ravel().tolist() for g in attention_backward(5 * one_key, one_key, one_key, one_key)]
    [[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]]
    """
    shape = _dbias_shape(return_dbias, options)
    call = checked_call(q, k, v, tiles=tiles, **options)
    return _backward(_exact_softmax, dout, *call, shape, dlse, return_dsinks, return_dcaptured)


def unfused_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, tiles: BlockSizes | None = None, dlse: ArrayLike | None = None,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    **options: Unpack[AttentionOptions],
) -> Gradients:  # fmt: skip
    """What `attention_backward` gives, from whole rows of P and dP, every step rounded to `dtype`.

    It is for the backward kernels what `unfused` is for the forward ones. With a `matrix_dtype` q,
    k, v, dout, P o dropout, dS, dQ, dK and dV are rounded to it.
    """
    rounded = _rounding(dtype, matrix_dtype)
    shape = _dbias_shape(return_dbias, options)
    call, Q, K, V = checked_call(q, k, v, dtype, tiles=tiles, **options)
    Q, K, V = rounded(Q), rounded(K), rounded(V)
    how = dlse, return_dsinks, return_dcaptured, rounded
    return _backward(_rounded_softmax, dout, call, Q, K, V, shape, *how)


def _dbias_shape(return_dbias: bool, options: AttentionOptions) -> tuple[int, ...] | None:
    if not return_dbias:
        return None
    if options.get("bias") is None:
        raise ValueError("return_dbias is given without bias: there is nothing to differentiate")
    return np.shape(options["bias"])


def _differences(out: ArrayLike, ref: ArrayLike) -> tuple[Array, Array, Array]:
    """out, ref and |out - ref| in float64; 0 where both are the same infinity or both NaN."""
    out, ref = as_real("out", out), as_real("ref", ref)
    check_shape("out", out.shape, ref.shape, of=", the reference's")
    if out.size == 0:
        raise ValueError(f"out has shape {out.shape}: allowed is a shape without an empty axis")
    same = (out == ref) | (np.isnan(out) & np.isnan(ref))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(out - ref))
    return out, ref, np.where(np.isnan(difference), np.inf, difference)


def relative_error(out: ArrayLike, ref: ArrayLike) -> float:
    """||out - ref|| / ||ref||, Frobenius norms in float64.

    Where `ref` is infinite or NaN, `out` must be the same, or the error is inf; such elements add
    nothing to either norm. Any difference from a `ref` of zeros is an error of inf too.
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
