"""Attention and its gradients in NumPy: what every kernel is tested against.

====================  ==============================================================================
function              what it returns
====================  ==============================================================================
`attention`           attention in float64, the exact result
`attention_backward`  its gradients in float64, the exact result
`unfused`             attention step by step in another dtype, with the usual rounding error
`unfused_backward`    its gradients step by step in another dtype
`attention_e4m3`      attention in float64 with P rounded to e4m3 tile by tile, as FP8 kernels do
`rotate`              rows multiplied by random signs and a Hadamard matrix
`dequantize`          the numbers that an array of e4m3 with scales represents
`relative_error`      relative error of one array against another
`worst`               where two arrays differ most
====================  ==============================================================================

A kernel passes a test if its error is at most about twice the error of `unfused`.

The functions take all options of `fa_numba.AttentionOptions`, except ``block_table`` and
``check_table``. ``precision`` is checked and has no effect. Shapes are those of
`fa_numba.attention`.

A row that sees no column, or has only scores of -inf, has output 0 and logsumexp -inf, and does not
contribute to the gradients. With ``sinks``, the logsumexp of such a row is the sink of the head.
Rows after ``q_lens`` and keys after ``kv_lens`` are not read, and have gradients 0. Rows after
``q_lens`` have output 0 and logsumexp -inf. A NaN or infinity in k or v can make rows NaN that do
not see it, because its product with 0 is NaN.

Wrong arguments raise TypeError or ValueError. The message names the argument, its value and what is
allowed. No kernel is imported here.

Examples
--------
>>> import numpy as np
>>> from fa_numba import reference
>>> q = np.eye(2).reshape(1, 1, 2, 2)
>>> reference.attention(q, q, q, causal=True)[0, 0, 0].tolist()
[1.0, 0.0]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .algorithms import divide_rows, exp_minus, logsumexp
from .checks import as_real, check_shape
from .dtypes import SCALED_ROWS
from .integers import ceil_div
from .masks import make_philox
from .options import AttentionOptions, as_word, documents_options
from .problem import BlockSizes
from .scores import Array, Call, Head, add_bias_gradient, checked_call

Result = Array | tuple[Array, Array]
Gradients = tuple[Any, ...]
Softmax = Callable[..., Array]

_E4M3_LARGEST = 448.0
_E4M3_OFFSET = 8  # P is multiplied by 2^8 before it is rounded to e4m3

_ROWS = 512  # rows of S held at a time: at seqlen_k = 65536 that is 256 MiB of float64


def _row_blocks(head: Head) -> Iterator[slice]:
    """Return slices of a head's rows, `_ROWS` rows in each."""
    for row in range(0, head.Nq, _ROWS):
        yield slice(row, min(row + _ROWS, head.Nq))


def _with_sinks(softmax: Softmax) -> Softmax:
    """Return ``softmax(S, L=None, sink=None)``, which appends the sink to S as a column.

    The sink's column takes part in the sum of a row, and is removed from P.
    """

    @functools.wraps(softmax)
    def with_sink(S: Array, L: Array | None = None, sink: Any = None) -> Array:
        if sink is None:
            return softmax(S, L)
        return softmax(np.column_stack([S, np.full(len(S), sink, S.dtype)]), L)[:, :-1]

    return with_sink


@_with_sinks
def _exact_softmax(S: Array, L: Array | None = None) -> Array:
    """Return P by SciPy, and fill L if it is given.

    A row that has only -inf, for which SciPy returns NaN, has P = 0 and L = -inf.
    """
    from scipy import special  # here: every import of fa_numba would wait for it

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
    """Return P = e^(S - m) / l in S's dtype, and fill L if it is given.

    m are the maxima and l the sums of the rows.
    """
    m = S.max(axis=1)
    P = exp_minus(S, m)
    l = P.sum(axis=1)
    if L is not None:
        L[:] = logsumexp(m, l)
    return divide_rows(P, l)


def _to_half(x: Array, name: str) -> Array:
    """Return float32 values rounded to the nearest float16 or bfloat16, as float32."""
    if name == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.astype(np.float32).view(np.uint32)
    up = np.uint32(0x7FFF) + (bits >> 16 & 1)  # to even where two are equally near
    nearest = (bits + up & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, nearest)


def _to_e4m3(x: Array) -> Array:
    """Return non-negative float64 values rounded to the nearest e4m3, at most 448, as float64."""
    _, exponent = np.frexp(x)  # x is at least 2^(exponent - 1)
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    return np.minimum(np.rint(x / step) * step, _E4M3_LARGEST)


def _e4m3_values(bits: Array) -> Array:
    """Return the float64 values of the bits of e4m3 numbers, an array of uint8."""
    exponent, fraction = bits.astype(np.int64) >> 3 & 15, bits & 7
    digits = np.where(exponent > 0, 8 + fraction, fraction).astype(np.float64)
    size = np.ldexp(digits, np.maximum(exponent, 1) - 10)
    size[bits & 0x7F == 0x7F] = np.nan
    return np.where(bits >> 7, -size, size)


def _forward(
    softmax: Softmax,
    call: Call,
    q: Array,
    k: Array,
    v: Array,
    rounded: Callable[..., Array] = np.asarray,
) -> tuple[Array, Array]:
    """Return O = (P o dropout) V, and L, one block of rows after the other.

    The function `rounded` is applied to P o dropout and to O.
    """
    O = np.zeros(call.problem.o_shape, call.dtype)
    L = np.full(call.problem.lse_shape, -np.inf, call.dtype)
    for head in call.heads():
        Q, K, V = q[head.q], k[head.k], v[head.k]
        for rows in _row_blocks(head):
            S, _ = call.scores(head, Q[rows], K, rows.start, sloped=False)
            P = softmax(S, L[head.lse][rows], call.sink(head))
            O[head.q][rows] = rounded(rounded(P * call.dropout(head, rows)) @ V)
    return O, L


def _backward(
    softmax: Softmax, dout: ArrayLike, call: Call, q: Array, k: Array, v: Array,
    dbias_shape: tuple[int, ...] | None, dlse: ArrayLike | None = None, return_dsinks: bool = False,
    return_dcaptured: bool = False, rounded: Callable[..., Array] = np.asarray,
) -> Gradients:  # fmt: skip
    """Return dQ, dK, dV, and dbias, dsinks and dcaptured if they are wanted.

    One block of rows is computed after the other. The function `rounded` is applied to the matrices
    that are multiplied, and to the first three gradients.

    - dV = (P o dropout)^T dO
    - dP = dO V^T o dropout
    - D = rowsum(P o dP) - dL, for a gradient dL of L
    - dS = P o (dP - D), which is dbias; then dS is multiplied by the derivative of the score
    - dQ = scale dS K
    - dK = scale dS^T Q

    dK and dV are summed over the query heads of a group, and dbias over the axes that are
    broadcast. A sink s is a column with dP = 0: ds = -sum e^(s - L) D.

    dcaptured maps the name of each array that score_mod uses to the gradient of the array. The
    gradient of an element is the sum of dS times the derivative of score_mod with respect to the
    element.
    """
    problem = call.problem
    if return_dsinks and call.sinks is None:
        raise ValueError("return_dsinks must be False without sinks, got True; pass sinks")
    if return_dcaptured and not call.captured:
        raise ValueError(
            "return_dcaptured must be False without a score_mod that captures a float32 array, got "
            "True"
        )
    dsinks = np.zeros(problem.heads_q, call.dtype)
    dcaptured = {name: np.zeros(x.shape, call.dtype) for name, x in call.captured.items()}
    dO = rounded(as_real("dout", dout, call.dtype))
    check_shape("dout", dO.shape, problem.o_shape, of=" (the shape of O)")
    dL = np.zeros(problem.lse_shape) if dlse is None else as_real("dlse", dlse, call.dtype)
    check_shape("dlse", dL.shape, problem.lse_shape, of=" (the shape of L)")
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
            if dlse is not None:  # a row without a column and without a sink
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


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@documents_options
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Result:  # fmt: skip
    """Return attention in float64, the exact result for tests.

    Parameters
    ----------
    q : array_like
        Queries, shape (batch, heads_q, seqlen_q, head_dim), or (total_q, heads_q, head_dim) with
        ``cu_seqlens_q``. Real numbers of any dtype.
    k : array_like
        Keys, shape (batch, heads_k, seqlen_k, head_dim). heads_k must divide heads_q.
    v : array_like
        Values, shape (batch, heads_k, seqlen_k, head_dim_v).
    tiles : object with Br and Bc, optional
        Block sizes of ``block_mask``, such as a ``Tiles``. They must be given if ``block_mask`` is
        an array, and are not used otherwise.
    return_lse : bool, default False
        Whether the logsumexp is returned too.

    Returns
    -------
    out : numpy.ndarray
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), or (total_q, heads_q, head_dim_v).
    lse : numpy.ndarray
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. Its shape is
        (batch, heads_q, seqlen_q), or (heads_q, total_q). It is the natural logarithm of each row's
        sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed.

    See Also
    --------
    attention_backward : Gradients in float64.
    fa_numba.attention : Attention by the kernels.

    Notes
    -----
    The softmax and the logsumexp are computed by SciPy. ``bias``, ``attn_mask``, ``alibi_slopes``
    and ``sinks`` may be real numbers of any dtype. ``block_table`` and ``check_table`` are refused.

    Examples
    --------
    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> attention(one_key, one_key, 3 * one_key)
    array([[[[3., 3.]]]])
    """
    O, L = _forward(_exact_softmax, *checked_call(q, k, v, tiles=tiles, **options))
    return (O, L) if return_lse else O


@overload
def unfused(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, stored_scores: bool = False, tiles: BlockSizes | None = None,
    return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Array: ...  # fmt: skip
@overload
def unfused(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, stored_scores: bool = False, tiles: BlockSizes | None = None,
    return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def unfused(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, stored_scores: bool = False, tiles: BlockSizes | None = None,
    return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@documents_options
def unfused(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, stored_scores: bool = False, tiles: BlockSizes | None = None,
    return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Result:  # fmt: skip
    """Return attention from complete rows of S and P, with every step rounded to a dtype.

    The error of the result against `attention` is the usual rounding error of the dtype. Tests
    compare kernels with it: the error of a kernel may be at most twice this error plus one
    rounding.

    Parameters
    ----------
    q : array_like
        Queries, shape (batch, heads_q, seqlen_q, head_dim), or (total_q, heads_q, head_dim) with
        ``cu_seqlens_q``. Real numbers of any dtype.
    k : array_like
        Keys, shape (batch, heads_k, seqlen_k, head_dim). heads_k must divide heads_q.
    v : array_like
        Values, shape (batch, heads_k, seqlen_k, head_dim_v).
    dtype : dtype, default numpy.float32
        Dtype of every step and of the results.
    matrix_dtype : {"float16", "bfloat16"}, optional
        Dtype to which the matrices that are multiplied, and the output, are rounded. This is what
        tensor cores need. ``dtype`` must then be float32. The results are float32 arrays; the
        values of the output are rounded to ``matrix_dtype``.
    stored_scores : bool, default False
        Whether S is rounded to ``matrix_dtype`` too. Standard attention does this, because it
        stores S.
    tiles : object with Br and Bc, optional
        Block sizes of ``block_mask``, such as a ``Tiles``. They must be given if ``block_mask`` is
        an array, and are not used otherwise.
    return_lse : bool, default False
        Whether the logsumexp is returned too.

    Returns
    -------
    out : numpy.ndarray
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), or (total_q, heads_q, head_dim_v).
    lse : numpy.ndarray
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. Its shape is
        (batch, heads_q, seqlen_q), or (heads_q, total_q). It is the natural logarithm of each row's
        sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed.

    See Also
    --------
    attention : The exact result.

    Notes
    -----
    The steps are:

    1. S = scale Q K^T, then ``softcap``, ``score_mod``, ALiBi, the bias and the masks;
    2. P = e^(S - m) / l. In each row, m is the maximum of S, and l is the sum of e^(S - m). With
       sinks, the sink of the head counts as a further element of the row;
    3. O = (P o dropout) V, and the logsumexp L = m + log l.

    ``block_table`` and ``check_table`` are refused.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((1, 1, 8, 4))
    >>> bool(0 < relative_error(unfused(x, x, x), attention(x, x, x)) < 1e-6)
    True
    """
    rounded = _rounding(dtype, matrix_dtype)
    call, Q, K, V = checked_call(q, k, v, dtype, tiles=tiles, **options)
    softmax = _rounded_softmax
    if stored_scores:

        def softmax(S: Array, L: Array | None = None, sink: Any = None) -> Array:
            return _rounded_softmax(rounded(S), L, sink)

    O, L = _forward(softmax, call, rounded(Q), rounded(K), rounded(V), rounded)
    return (O, L) if return_lse else O


def rotate(x: ArrayLike, seed: int) -> Array:
    """Return the rotated rows of an array in float64, as `fa_numba.quantize` rotates them.

    Parameters
    ----------
    x : array_like
        Real numbers, shape (..., head_dim). head_dim must be a power of two.
    seed : int
        Seed of the signs, from 0 to 2**64 - 1.

    Returns
    -------
    numpy.ndarray
        ``(x * signs) @ H / sqrt(head_dim)`` in float64, with the shape of ``x``. The rotation is an
        orthogonal matrix, so that it leaves products of two rotated rows as they are.

    Raises
    ------
    ValueError
        If head_dim is not a power of two.

    Notes
    -----
    H is the Hadamard matrix of Sylvester: entry (i, j) is -1 if ``i & j`` has an odd number of
    bits, else 1. The sign of column c is -1 if bit c % 32 of the first word of Philox4x32-7 is set,
    for the counter (c // 32, 0, 0, 0) and the key ``seed``.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 4, 16))
    >>> bool(np.allclose(rotate(q, 7) @ rotate(k, 7).T, q @ k.T))
    True
    """
    rows = as_real("x", x)
    d = rows.shape[-1]
    if d & (d - 1) or d < 1:
        raise ValueError(f"head_dim of x must be a power of two, got {d}")
    seed = as_word("seed", seed, 64)
    column = np.arange(d, dtype=np.uint32)
    zero, low, high = (np.uint32(n) for n in (0, seed % 2**32, seed >> 32))
    with np.errstate(over="ignore"):  # the sums of Philox wrap
        word = make_philox(np.uint32, np.uint64)(column // 32, zero, zero, zero, low, high)[0]
    signs = np.where(word >> column % 32 & 1, -1.0, 1.0)
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return rows * signs @ matrix / np.sqrt(d)


def dequantize(x: ArrayLike, scale: ArrayLike | None = None) -> Array:
    """Return the numbers that an array of float8_e4m3fn with scales represents.

    Parameters
    ----------
    x : array_like
        Stored numbers, shape (batch, heads, seqlen, head_dim). The dtype is
        ``ml_dtypes.float8_e4m3fn``, or uint8 for the bits of such numbers. An array of any other
        dtype is converted to float64 and multiplied by the scales too.
    scale : array_like, optional
        Scales: one number, or an array of shape (batch, heads), or an array of shape (batch, heads,
        blocks) with a scale for each 128 rows. None means 1.

    Returns
    -------
    numpy.ndarray
        ``x * scale`` in float64, with the shape of ``x``.

    Raises
    ------
    ValueError
        If the shape of ``scale`` does not fit the shape of ``x``.

    See Also
    --------
    fa_numba.quantize : Return the stored numbers and their scales.
    attention_e4m3 : Attention of such arrays.

    Examples
    --------
    >>> import numpy as np
    >>> bits = np.array([[[[0x38, 0x40]]]], np.uint8)  # 1.0 and 2.0
    >>> dequantize(bits, scale=3.0)
    array([[[[3., 6.]]]])
    """
    stored = np.asarray(x)
    values = _e4m3_values(stored) if stored.dtype == np.uint8 else stored.astype(np.float64)
    if scale is None:
        return values
    factors = np.asarray(scale, np.float64)
    if factors.ndim == 0:
        return values * factors
    shape = np.shape(values)
    blocks = ceil_div(shape[2], SCALED_ROWS) if len(shape) == 4 else None
    if blocks is None or factors.shape not in (shape[:2], (*shape[:2], blocks)):
        wanted = f"{shape[:2]} or {(*shape[:2], blocks)}" if blocks else "() for packed rows"
        raise ValueError(
            f"scale must have the shape () or {wanted}, one number for each head or for each "
            f"{SCALED_ROWS} rows, got {factors.shape} for an array of shape {shape}"
        )
    if factors.ndim == 2:
        return values * factors[..., None, None]
    return values * np.repeat(factors, SCALED_ROWS, axis=2)[:, :, : shape[2], None]


@documents_options
def attention_e4m3(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, columns: int = 128,
    descending: bool = False, scores_dtype: str | None = None, return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Result:  # fmt: skip
    """Return attention of e4m3 arrays in float64, with P rounded to e4m3 as FP8 kernels round it.

    All sums and exponentials are exact to float64. The only error is the rounding of P. Kernels
    visit the columns of S tile by tile, and the factor of P depends on the running maximum of the
    row.

    Parameters
    ----------
    q : array_like
        Queries, shape (batch, heads_q, seqlen_q, head_dim), in a dtype that `dequantize` takes.
    k : array_like
        Keys, shape (batch, heads_k, seqlen_k, head_dim). heads_k must divide heads_q.
    v : array_like
        Values, shape (batch, heads_k, seqlen_k, head_dim_v).
    columns : int, default 128
        Number of columns of a tile of S.
    descending : bool, default False
        Whether the last tile of a row is visited first.
    scores_dtype : {"float16"}, optional
        Dtype to which S is rounded before the softmax. None means no rounding. Standard attention
        stores S in float16. To compare with it, also pass a ``columns`` of at least seqlen_k.
    return_lse : bool, default False
        Whether the logsumexp is returned too.

    Returns
    -------
    out : numpy.ndarray
        Output in float64, shape (batch, heads_q, seqlen_q, head_dim_v).
    lse : numpy.ndarray
        Logsumexp, only returned with ``return_lse=True``, shape (batch, heads_q, seqlen_q).

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed. ``sinks`` and
        ``dropout_p`` are not allowed.

    See Also
    --------
    attention : Attention without the rounding of P.
    dequantize : The numbers that are multiplied.

    Notes
    -----
    For each tile of columns, m is the largest score of the row so far. P = e4m3(2^8 e^(S - m)), and
    the sum l of a row takes the numbers before they are rounded. The factor 2^8 makes better use of
    the range of e4m3. It is divided out at the end, together with l.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).integers(0x20, 0x40, (1, 1, 8, 16)).astype(np.uint8)
    >>> exact = attention(dequantize(x), dequantize(x), dequantize(x))
    >>> bool(0 < relative_error(attention_e4m3(x, x, x), exact) < 0.03)
    True
    """
    given = (
        dequantize(q, options.pop("q_scale", None)),  # type: ignore[arg-type]
        dequantize(k, options.pop("k_scale", None)),  # type: ignore[arg-type]
        dequantize(v, options.pop("v_scale", None)),  # type: ignore[arg-type]
    )
    if scores_dtype not in (None, "float16"):
        raise ValueError(f"scores_dtype must be 'float16' or None, got {scores_dtype!r}")
    call, Q, K, V = checked_call(*given, **options)
    problem = call.problem
    for name, used in (("sinks", problem.sinks), ("dropout_p", problem.dropout_p > 0)):
        if used:
            raise ValueError(f"{name} must not be given, because FP8 kernels do not support {name}")
    O = np.zeros(problem.o_shape)
    L = np.full(problem.lse_shape, -np.inf)
    for head in call.heads():
        starts = range(0, head.Nk, columns)
        for rows in _row_blocks(head):
            S, _ = call.scores(head, Q[head.q][rows], K[head.k], rows.start, sloped=False)
            if scores_dtype is not None:
                S = _to_half(S, scores_dtype)
            m, l = np.full(len(S), -np.inf), np.zeros(len(S))
            sums = np.zeros((len(S), V.shape[-1]))
            for first in reversed(starts) if descending else starts:
                tile = slice(first, first + columns)
                larger = np.maximum(m, S[:, tile].max(axis=1))
                P = np.ldexp(exp_minus(S[:, tile], larger), _E4M3_OFFSET)
                before = exp_minus(m, larger)
                l = l * before + P.sum(axis=1)
                sums = sums * before[:, None] + _to_e4m3(P) @ V[head.k][tile]
                m = larger
            O[head.q][rows] = divide_rows(sums, l)
            L[head.lse][rows] = logsumexp(m, np.ldexp(l, -_E4M3_OFFSET))
    return (O, L) if return_lse else O


def _rounding(dtype: DTypeLike, matrix_dtype: str | None) -> Callable[..., Array]:
    """Return the function that rounds the matrices; raise ValueError for unfit dtypes."""
    if matrix_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(
            f"matrix_dtype must be 'float16', 'bfloat16' or None, got {matrix_dtype!r}"
        )
    if matrix_dtype is None:
        return np.asarray
    if np.dtype(dtype) != np.float32:
        raise ValueError(f"dtype must be float32 if matrix_dtype is given, got {dtype!r}")
    return functools.partial(_to_half, name=matrix_dtype)


@documents_options
def attention_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, tiles: BlockSizes | None = None,
    dlse: ArrayLike | None = None, return_dbias: bool = False, return_dsinks: bool = False,
    return_dcaptured: bool = False, **options: Unpack[AttentionOptions],
) -> Gradients:  # fmt: skip
    """Return the gradients of attention in float64, the exact result for tests.

    The gradients are those of ``sum(dout * out) + sum(dlse * lse)``, computed by their formulas.

    Parameters
    ----------
    dout : array_like
        Gradient of the output, with the shape of the output.
    q : array_like
        Queries, shape (batch, heads_q, seqlen_q, head_dim), or (total_q, heads_q, head_dim) with
        ``cu_seqlens_q``. Real numbers of any dtype.
    k : array_like
        Keys, shape (batch, heads_k, seqlen_k, head_dim). heads_k must divide heads_q.
    v : array_like
        Values, shape (batch, heads_k, seqlen_k, head_dim_v).
    tiles : object with Br and Bc, optional
        Block sizes of ``block_mask``, such as a ``Tiles``. They must be given if ``block_mask`` is
        an array, and are not used otherwise.
    dlse : array_like, optional
        Gradient of the logsumexp, shape (batch, heads_q, seqlen_q), or (heads_q, total_q) with
        ``cu_seqlens_q``. It has no effect in rows with logsumexp -inf.
    return_dbias : bool, default False
        Whether the gradient of ``bias`` is returned too. It can be True only with ``bias``. This
        function computes no gradient of ``attn_mask``.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too. It can be True only with ``sinks``.
    return_dcaptured : bool, default False
        Whether the gradients of the float32 arrays that ``score_mod`` uses are returned too. It can
        be True only if there is such an array.

    Returns
    -------
    dq : numpy.ndarray
        Gradient of q, with the shape of q.
    dk : numpy.ndarray
        Gradient of k, with the shape of k.
    dv : numpy.ndarray
        Gradient of v, with the shape of v.
    dbias : numpy.ndarray
        Only with ``return_dbias=True``. Gradient of ``bias``, with the shape of ``bias``.
    dsinks : numpy.ndarray
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. Maps the name of each float32 array that ``score_mod``
        uses to the gradient of that array. Arrays of int32 or bool are not in it.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed.

    See Also
    --------
    attention : The forward pass.
    fa_numba.attention_backward : Gradients by the kernels.

    Notes
    -----
    ``block_table`` and ``check_table`` are refused.

    Examples
    --------
    >>> import numpy as np
    >>> one_key = np.ones((1, 1, 1, 2))
    >>> [g.ravel().tolist() for g in attention_backward(5 * one_key, one_key, one_key, one_key)]
    [[0.0, 0.0], [0.0, 0.0], [5.0, 5.0]]
    """
    shape = _dbias_shape(return_dbias, options)
    call = checked_call(q, k, v, tiles=tiles, **options)
    return _backward(_exact_softmax, dout, *call, shape, dlse, return_dsinks, return_dcaptured)


@documents_options
def unfused_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dtype: DTypeLike = np.float32,
    matrix_dtype: str | None = None, tiles: BlockSizes | None = None, dlse: ArrayLike | None = None,
    return_dbias: bool = False, return_dsinks: bool = False, return_dcaptured: bool = False,
    **options: Unpack[AttentionOptions],
) -> Gradients:  # fmt: skip
    """Return the gradients from complete rows of P and dP, with every step rounded to a dtype.

    The error of the result against `attention_backward` is the usual rounding error of the dtype.
    Tests compare the errors of kernels with it.

    Parameters
    ----------
    dout : array_like
        Gradient of the output, with the shape of the output.
    q : array_like
        Queries, shape (batch, heads_q, seqlen_q, head_dim), or (total_q, heads_q, head_dim) with
        ``cu_seqlens_q``. Real numbers of any dtype.
    k : array_like
        Keys, shape (batch, heads_k, seqlen_k, head_dim). heads_k must divide heads_q.
    v : array_like
        Values, shape (batch, heads_k, seqlen_k, head_dim_v).
    dtype : dtype, default numpy.float32
        Dtype of every step and of the results.
    matrix_dtype : {"float16", "bfloat16"}, optional
        Dtype to which q, k, v, dout, P o dropout, dS, dq, dk and dv are rounded. This is what
        tensor cores need. ``dtype`` must then be float32. The results are float32 arrays; the
        values of dq, dk and dv are rounded to ``matrix_dtype``.
    tiles : object with Br and Bc, optional
        Block sizes of ``block_mask``, such as a ``Tiles``. They must be given if ``block_mask`` is
        an array, and are not used otherwise.
    dlse : array_like, optional
        Gradient of the logsumexp, shape (batch, heads_q, seqlen_q), or (heads_q, total_q) with
        ``cu_seqlens_q``. It has no effect in rows with logsumexp -inf.
    return_dbias : bool, default False
        Whether the gradient of ``bias`` is returned too. It can be True only with ``bias``. This
        function computes no gradient of ``attn_mask``.
    return_dsinks : bool, default False
        Whether the gradient of ``sinks`` is returned too. It can be True only with ``sinks``.
    return_dcaptured : bool, default False
        Whether the gradients of the float32 arrays that ``score_mod`` uses are returned too. It can
        be True only if there is such an array.

    Returns
    -------
    dq : numpy.ndarray
        Gradient of q, with the shape of q.
    dk : numpy.ndarray
        Gradient of k, with the shape of k.
    dv : numpy.ndarray
        Gradient of v, with the shape of v.
    dbias : numpy.ndarray
        Only with ``return_dbias=True``. Gradient of ``bias``, with the shape of ``bias``.
    dsinks : numpy.ndarray
        Only with ``return_dsinks=True``. Gradient of ``sinks``, shape (heads_q,).
    dcaptured : dict
        Only with ``return_dcaptured=True``. Maps the name of each float32 array that ``score_mod``
        uses to the gradient of that array. Arrays of int32 or bool are not in it.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or an unknown name.
    ValueError
        If a value, a shape or a combination of arguments is not allowed.

    See Also
    --------
    attention_backward : The exact result.

    Notes
    -----
    ``block_table`` and ``check_table`` are refused.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((1, 1, 8, 4))
    >>> exact, (dq, dk, dv) = attention_backward(x, x, x, x), unfused_backward(x, x, x, x)
    >>> bool(relative_error(dq, exact[0]) < 1e-6)
    True
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
    bias: Any = options.get("bias")
    if bias is None:
        raise ValueError("return_dbias must be False without a bias, got True; pass a bias")
    return np.shape(bias)


def _differences(out: ArrayLike, ref: ArrayLike) -> tuple[Array, Array, Array]:
    """Return out, ref and |out - ref| in float64.

    The difference is 0 where both are the same infinity or both are NaN.
    """
    out, ref = as_real("out", out), as_real("ref", ref)
    check_shape("out", out.shape, ref.shape, of=" (the shape of ref)")
    if out.size == 0:
        raise ValueError(f"out must have no empty axis, got shape {out.shape}")
    same = (out == ref) | (np.isnan(out) & np.isnan(ref))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(out - ref))
    return out, ref, np.where(np.isnan(difference), np.inf, difference)


def relative_error(out: ArrayLike, ref: ArrayLike) -> float:
    """Return the relative error of an array: norm(out - ref) / norm(ref).

    The norms are Frobenius norms in float64.

    Parameters
    ----------
    out : array_like
        Array to judge.
    ref : array_like
        Exact array of the same shape.

    Returns
    -------
    float
        The error. It is 0 for equal arrays. It is inf if ``out`` differs from ``ref`` in an element
        in which one of them is infinite or NaN, or if ``ref`` is 0 everywhere and ``out`` is not.

    Raises
    ------
    TypeError
        If an array is not of real numbers.
    ValueError
        If the shapes differ, or an axis is empty.

    See Also
    --------
    worst : Find the element with the largest difference.

    Examples
    --------
    >>> relative_error([3.0, 4.5], [3.0, 4.0])
    0.1
    """
    _, ref, difference = _differences(out, ref)
    error = float(np.linalg.norm(difference))
    if error == 0.0:
        return 0.0
    size = float(np.linalg.norm(np.where(np.isfinite(ref), ref, 0.0)))
    return error / size if size > 0.0 else np.inf


def worst(out: ArrayLike, ref: ArrayLike) -> tuple[tuple[int, ...], float, float]:
    """Return where two arrays differ most, for the message of a failed test.

    Parameters
    ----------
    out : array_like
        Array to judge.
    ref : array_like
        Exact array of the same shape.

    Returns
    -------
    coordinate : tuple of int
        Index of the element with the largest absolute difference.
    got : float
        The element of ``out``.
    expected : float
        The element of ``ref``.

    Raises
    ------
    TypeError
        If an array is not of real numbers.
    ValueError
        If the shapes differ, or an axis is empty.

    See Also
    --------
    relative_error : Return the relative error of an array.

    Examples
    --------
    >>> worst([3.0, 4.5], [3.0, 4.0])
    ((1,), 4.5, 4.0)
    """
    out, ref, difference = _differences(out, ref)
    where = np.unravel_index(int(np.argmax(difference)), difference.shape)
    return tuple(int(i) for i in where), float(out[where]), float(ref[where])
