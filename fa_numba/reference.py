"""Attention and its gradients in float64: the oracle of every kernel.

Shapes everywhere: q (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_k, seqlen_k,
head_dim); outputs O as q, and L (batch, heads_q, seqlen_q), the natural logarithm of the sum of
the exponentials of a row's scaled and masked scores. With cu_seqlens_q and cu_seqlens_k q is
(total_q, heads_q, head_dim), k and v (total_k, heads_k, head_dim), O as q, L (heads_q, total_q).
Gradients have the shapes of q, k and v, and of the bias as it was given.

A row that sees no column, or only scores of -inf, has O = 0 and L = -inf and takes no part in the
gradients. What q_lens and kv_lens leave out is not read: there O = 0, L = -inf, gradients 0. Among
the rest a NaN or infinity in k or v may reach rows that do not see it, as 0 NaN.

The options are those of `options.AttentionOptions`. `tiles` is any object with Br and Bc, the block
sizes of block_mask, and is needed with it alone. Wrong arguments raise TypeError or ValueError with
their name, value and what is allowed.
No kernel is imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy import special

from . import dropout
from .masks import distance, visible_causal, visible_window
from .options import AttentionOptions, as_word
from .problem import UNBOUNDED, BlockSizes, Problem, as_size, check_block_mask

Array = NDArray[Any]
Result = Array | tuple[Array, Array]
Gradients = tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]
Softmax = Callable[..., Array]

_ROWS = 512  # rows of S held at a time: at seqlen_k = 65536 that is 256 MiB of float64


@dataclass(frozen=True)
class _Head:
    """One query head of one batch entry: its valid lengths, and where its matrices lie."""

    entry: int
    number: int
    Nq: int
    Nk: int
    q: tuple  # the index of Q, O, dO and dQ, each then (Nq, d)
    k: tuple  # of K, V, dK and dV, each then (Nk, d)
    lse: tuple  # of L, then (Nq,)

    def row_blocks(self) -> Iterator[slice]:
        for row in range(0, self.Nq, _ROWS):
            yield slice(row, min(row + _ROWS, self.Nq))


@dataclass(frozen=True)
class _Call:
    """A checked call, its arrays of `dtype`: what the options make of S and of P."""

    problem: Problem
    dtype: np.dtype
    bias: Array | None  # (B, Hq, Nq, Nk), as a view
    slopes: Array | None  # (B, Hq)
    block_mask: Array | None  # (B, Hq, Tr, Tc), as a view
    Br: int
    Bc: int
    seed: int
    offset: int

    def heads(self) -> Iterator[_Head]:
        """The query heads of every batch entry, without those that have no row or no column."""
        problem = self.problem
        row = column = 0
        for b in range(problem.batch):
            Nq, Nk = problem.lengths(b)
            rows, columns = slice(row, row + Nq), slice(column, column + Nk)
            for h in range(problem.heads_q if Nq and Nk else 0):
                hk = h // problem.group
                if problem.packed:
                    yield _Head(b, h, Nq, Nk, (rows, h), (columns, hk), (h, rows))
                else:
                    q = b, h, slice(Nq)
                    yield _Head(b, h, Nq, Nk, q, (b, hk, slice(Nk)), q)
            if problem.packed:
                row, column = rows.stop, columns.stop

    def scores(
        self, head: _Head, Qi: Array, Kj: Array, row: int, col: int = 0
    ) -> tuple[Array, Array | float]:
        """Sij, and its derivative by scale Qi Kj^T, of the tile that starts at `row` and `col`.

        Sij = softcap tanh(scale Qi Kj^T / softcap) - slope distance + bias, -inf where hidden.
        """
        b, h, problem = head.entry, head.number, self.problem
        rows, cols = np.arange(row, row + len(Qi)), np.arange(col, col + len(Kj))
        diagonal = head.Nk - head.Nq
        derivative: Array | float = 1.0
        Sij = self.dtype.type(problem.scale) * (Qi @ Kj.T)
        if problem.softcap is not None:
            softcap = self.dtype.type(problem.softcap)
            tanh = np.tanh(Sij / softcap)
            Sij, derivative = softcap * tanh, 1 - tanh * tanh
        if self.slopes is not None:
            away = distance(rows[:, None], cols[None, :], diagonal).astype(self.dtype)
            Sij -= self.slopes[b, h] * away
        if self.bias is not None:
            Sij += self.bias[b, h, row : row + len(Qi), col : col + len(Kj)]
        if (visible := self._visible(head, rows, cols, diagonal)) is not None:
            Sij[~visible] = -np.inf
        return Sij, derivative

    def _visible(self, head: _Head, rows: Array, cols: Array, diagonal: int) -> Array | None:
        """Which columns each row sees, or None for all."""
        masks = []
        if self.problem.causal:
            masks.append(visible_causal(rows[:, None], cols[None, :], diagonal))
        if self.problem.window != (-1, -1):
            left, right = (UNBOUNDED if n < 0 else n for n in self.problem.window)
            masks.append(visible_window(rows[:, None], cols[None, :], diagonal, left, right))
        if self.block_mask is not None:
            blocks = self.block_mask[head.entry, head.number]
            masks.append(blocks[rows[:, None] // self.Br, cols[None, :] // self.Bc])
        return np.logical_and.reduce(masks) if masks else None

    def dropout(self, head: _Head, rows: slice) -> Array | float:
        """What dropout multiplies whole rows of P by: 1 / (1 - p), or 0."""
        p = self.problem.dropout_p
        if p == 0.0:
            return 1.0
        kept = dropout.kept(
            head.entry,
            head.number,
            range(rows.start, rows.stop),
            head.Nk,
            dropout_p=p,
            seed=self.seed,
            offset=self.offset,
        )
        return kept * self.dtype.type(1 / (1 - p))


def _call(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dtype: DTypeLike = np.float64,
    *,
    tiles: BlockSizes | None = None,
    bias: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    block_mask: ArrayLike | None = None,
    seed: int = 0,
    offset: int = 0,
    **options: Any,
) -> tuple[_Call, Array, Array, Array]:
    """The checked call, and q, k and v in its dtype."""
    allowed = AttentionOptions.__annotations__
    for name in options:
        if name not in allowed:
            raise TypeError(f"{name} is no option: allowed are {', '.join(allowed)}")
    problem = Problem.from_shapes(
        np.shape(q),
        np.shape(k),
        np.shape(v),
        bias=None if bias is None else np.shape(bias),
        alibi=alibi_slopes is not None,
        sparse=block_mask is not None,
        **options,
    )
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, dtype), problem.score_shape)
    call = _Call(
        problem,
        np.dtype(dtype),
        bias,
        None if alibi_slopes is None else _slopes(problem, np.asarray(alibi_slopes, dtype)),
        *_blocks(problem, block_mask, tiles),
        as_word("seed", seed, 64),
        as_word("offset", offset, 32),
    )
    if problem.dropout_p and max(problem.batch, problem.heads_q) > dropout.MAX_HEADS:
        raise ValueError(
            f"q has batch {problem.batch} and heads {problem.heads_q}: allowed with dropout is at "
            f"most {dropout.MAX_HEADS} each"
        )
    return call, np.asarray(q, dtype), np.asarray(k, dtype), np.asarray(v, dtype)


def _slopes(problem: Problem, slopes: Array) -> Array:
    B, Hq = problem.batch, problem.heads_q
    if slopes.shape not in ((Hq,), (B, Hq)):
        raise ValueError(
            f"alibi_slopes has shape {slopes.shape}: allowed is ({Hq},) or ({B}, {Hq})"
        )
    return np.broadcast_to(slopes, (B, Hq))


def _blocks(
    problem: Problem, block_mask: ArrayLike | None, tiles: BlockSizes | None
) -> tuple[Array | None, int, int]:
    """The block mask for every head, and its block sizes."""
    if block_mask is None:
        return None, 1, 1
    if tiles is None:
        raise ValueError("block_mask is given without tiles: its blocks have their Br and Bc")
    Br, Bc = as_size("tiles.Br", tiles.Br, axis=False), as_size("tiles.Bc", tiles.Bc, axis=False)
    mask = check_block_mask(block_mask, problem, SimpleNamespace(Br=Br, Bc=Bc))
    return np.broadcast_to(mask, (problem.batch, problem.heads_q, *mask.shape[2:])), Br, Bc


def _finite_or_zero(m: Array) -> Array:
    """A row maximum to subtract: 0 for -inf, where the difference would be NaN."""
    return np.where(m == -np.inf, 0, m).astype(m.dtype)


def _one_if_zero(l: Array) -> Array:
    """A row sum to divide by: a row without weight has O = 0, not 0/0."""
    return np.where(l == 0, 1, l).astype(l.dtype)


def _logsumexp(m: Array, l: Array) -> Array:
    with np.errstate(divide="ignore"):  # log 0 = -inf is what a row without weight has
        return m + np.log(l)


def _exact_softmax(S: Array, L: Array | None = None) -> Array:
    """P by SciPy, which answers a row of -inf with NaN: here P = 0, L = -inf. Fills L if given."""
    empty = S.max(axis=1) == -np.inf
    S[empty] = 0
    P = special.softmax(S, axis=1)
    P[empty] = 0
    if L is not None:
        L[:] = special.logsumexp(S, axis=1)
        L[empty] = -np.inf
    return P


def _rounded_softmax(S: Array, L: Array | None = None) -> Array:
    """P = e^(S - rowmax(S)) / l, l its row sums, in the dtype of S; fills L, if given, with
    rowmax(S) + log l.
    """
    m = S.max(axis=1)
    P = np.exp(S - _finite_or_zero(m)[:, None])
    l = P.sum(axis=1)
    if L is not None:
        L[:] = _logsumexp(m, l)
    return P / _one_if_zero(l)[:, None]


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
    call: _Call,
    q: Array,
    k: Array,
    v: Array,
    rounded: Callable[..., Array] = np.asarray,
) -> tuple[Array, Array]:
    """O = (P o dropout) V and L of P, a block of rows at a time; P and O are `rounded`."""
    O = np.zeros(call.problem.q_shape, call.dtype)
    L = np.full(call.problem.lse_shape, -np.inf, call.dtype)
    for head in call.heads():
        Q, K, V = q[head.q], k[head.k], v[head.k]
        for rows in head.row_blocks():
            S, _ = call.scores(head, Q[rows], K, rows.start)
            P = softmax(S, L[head.lse][rows])
            O[head.q][rows] = rounded(rounded(P * call.dropout(head, rows)) @ V)
    return O, L


def _backward(
    softmax: Softmax,
    dout: ArrayLike,
    call: _Call,
    q: Array,
    k: Array,
    v: Array,
    dbias_shape: tuple[int, ...] | None,
    rounded: Callable[..., Array] = np.asarray,
) -> Gradients:
    """dQ, dK, dV and, for a `dbias_shape`, dbias, a block of rows at a time.

    The matrices that are multiplied, and the gradients but dbias, are `rounded`.

    dV = (P o dropout)^T dO, dP = dO V^T o dropout, D = rowsum(P o dP), dS = P o (dP - D), which is
    dbias; dS then times the softcap's derivative: dQ = scale dS K, dK = scale dS^T Q. dK and dV are
    sums over the query heads of a group, dbias over the axes that the bias broadcasts along.
    """
    problem = call.problem
    dO = rounded(np.asarray(dout, call.dtype))
    if dO.shape != problem.q_shape:
        raise ValueError(f"dout has shape {dO.shape}: allowed is q's, {problem.q_shape}")
    dQ = np.zeros(problem.q_shape, call.dtype)
    dK, dV = np.zeros(problem.k_shape, call.dtype), np.zeros(problem.k_shape, call.dtype)
    dbias = None if dbias_shape is None else np.zeros(problem.bias or (), call.dtype)
    scale = call.dtype.type(problem.scale)
    for head in call.heads():
        Q, K, V = q[head.q], k[head.k], v[head.k]
        for rows in head.row_blocks():
            dOi = dO[head.q][rows]
            S, derivative = call.scores(head, Q[rows], K, rows.start)
            dropped = call.dropout(head, rows)
            P = softmax(S)
            dP = (dOi @ V.T) * dropped
            D = (P * dP).sum(axis=1)
            dS = P * (dP - D[:, None])
            if dbias is not None:
                _add_to_bias(dbias, head, rows, dS)
            dS = rounded(dS * derivative)
            dV[head.k] += rounded(P * dropped).T @ dOi
            dQ[head.q][rows] = scale * (dS @ K)
            dK[head.k] += scale * (dS.T @ Q[rows])
    dQ, dK, dV = rounded(dQ), rounded(dK), rounded(dV)
    if dbias is None:
        return dQ, dK, dV
    return dQ, dK, dV, dbias.reshape(dbias_shape)


def _add_to_bias(dbias: Array, head: _Head, rows: slice, dS: Array) -> None:
    """Adds dS to the part of a 4-D dbias that reaches these rows, summed where that is 1 long."""
    part = dbias[head.entry if len(dbias) > 1 else 0, head.number if dbias.shape[1] > 1 else 0]
    if len(part) > 1:
        part = part[rows]
    else:
        dS = dS.sum(axis=0, keepdims=True)
    if part.shape[1] > 1:
        part[:, : head.Nk] += dS
    else:
        part += dS.sum(axis=1, keepdims=True)


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    tiles: BlockSizes | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Result:
    """O, or (O, L) with `return_lse`, in float64, by SciPy's softmax and logsumexp.

    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> attention(one_key, one_key, 3 * one_key)
    array([[[[3., 3.]]]])
    """
    O, L = _forward(_exact_softmax, *_call(q, k, v, tiles=tiles, **options))
    return (O, L) if return_lse else O


def unfused(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None,
    stored_scores: bool = False,
    tiles: BlockSizes | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Result:
    """Attention row by row with every step rounded to `dtype`: the yardstick of the tolerance.

    S = scale Q K^T with softcap, ALiBi and bias in this order, P = e^(S - rowmax(S)) / rowsum,
    O = (P o dropout) V, L = rowmax(S) + log rowsum. A kernel passes when its error against
    `attention` is at most twice this one's plus a rounding.

    `matrix_dtype`, "float16" or "bfloat16", is that of the matrices that are multiplied, and of O,
    as on tensor cores: q, k, v, P o dropout and O are rounded to it, and stay arrays of `dtype`, in
    which all else is: here float32. With `stored_scores` S is rounded to it as well, as where S
    passes through memory: standard attention.
    """
    rounded = _rounding(dtype, matrix_dtype)
    call, Q, K, V = _call(q, k, v, dtype, tiles=tiles, **options)
    softmax = _rounded_softmax
    if stored_scores:

        def softmax(S: Array, L: Array | None = None) -> Array:
            return _rounded_softmax(rounded(S), L)

    O, L = _forward(softmax, call, rounded(Q), rounded(K), rounded(V), rounded)
    return (O, L) if return_lse else O


def _rounding(dtype: DTypeLike, matrix_dtype: str | None) -> Callable[..., Array]:
    """What is done to the matrices that are multiplied; raises ValueError for other dtypes."""
    if matrix_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(f"matrix_dtype is {matrix_dtype!r}: allowed is float16, bfloat16 or None")
    if matrix_dtype is None:
        return np.asarray
    if np.dtype(dtype) != np.float32:
        raise ValueError(f"dtype is {dtype!r} with a matrix_dtype: allowed is float32")
    return functools.partial(_to_half, name=matrix_dtype)


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    tiles: BlockSizes | None = None,
    return_dbias: bool = False,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """(dq, dk, dv) in float64, the gradients of sum(dout o attention(q, k, v)), in closed form.

    dout has the shape of q. With `return_dbias` (dq, dk, dv, dbias).

    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> [g.ravel().tolist() for g in attention_backward(5 * one_key, one_key, one_key, one_key)]
    [[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]]
    """
    shape = _dbias_shape(return_dbias, options)
    return _backward(_exact_softmax, dout, *_call(q, k, v, tiles=tiles, **options), shape)


def unfused_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None,
    tiles: BlockSizes | None = None,
    return_dbias: bool = False,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """What `attention_backward` gives, from whole rows of P and dP, every step rounded to `dtype`.

    The yardstick of the backward kernels, as `unfused` is of the forward ones: with a
    `matrix_dtype` q, k, v, dout, P o dropout, dS, dQ, dK and dV are rounded to it.
    """
    rounded = _rounding(dtype, matrix_dtype)
    shape = _dbias_shape(return_dbias, options)
    call, Q, K, V = _call(q, k, v, dtype, tiles=tiles, **options)
    Q, K, V = rounded(Q), rounded(K), rounded(V)
    return _backward(_rounded_softmax, dout, call, Q, K, V, shape, rounded)


def _dbias_shape(return_dbias: bool, options: AttentionOptions) -> tuple[int, ...] | None:
    if not return_dbias:
        return None
    if options.get("bias") is None:
        raise ValueError("return_dbias is given without bias: there is nothing to differentiate")
    return np.shape(options["bias"])


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
