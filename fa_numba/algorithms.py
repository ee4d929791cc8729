"""The papers' algorithms in NumPy, step by step: the text to read next to the kernels.

    function           algorithm                                 kernel
    standard_forward   FlashAttention, Algorithm 0               standard.py
    fa1_forward        FlashAttention, Algorithm 1               fa1_forward.py
    fa2_forward        FlashAttention-2, Algorithm 1             fa2_forward.py
    standard_backward  FlashAttention, Algorithm 3               standard_backward.py
    fa1_backward       FlashAttention, Algorithm 4               fa1_backward.py
    fa2_backward       FlashAttention-2, Algorithm 2             fa2_backward.py

The kernels are in kernels/simt, kernels/mma and kernels/wgmma. kernels/wgmma has no kernel of
standard attention.
FlashAttention: https://arxiv.org/abs/2205.14135, FlashAttention-2: https://arxiv.org/abs/2307.08691

How to read the code:

- A function computes one head in float64: Q and O are (Nq, d), K and V are (Nk, d). A complete call
  does the same for every head of every batch entry.
- Row tile i is Br rows of Q. Column tile j is Bc rows of K and V. Their first rows are i0 and j0.
  The last tile may be shorter.
- Whole matrices (Q, K, V, O, l, m, dQ ...) are in global memory, "HBM" in the papers. The arrays of
  one tile (Qi, Kj, Sij, Pij, Oi, li, mi ...) are on chip. `load` copies a tile from global memory
  to the chip. An assignment to a slice of a matrix writes the tile back. All other statements
  compute on chip.
- A comment names the line of the algorithm that the statements below it carry out. The statements
  are in the paper's order. A kernel may load a tile earlier or compute products in another order.
- The two flash algorithms are twins: a diff of fa1_forward and fa2_forward, or of fa1_backward and
  fa2_backward, shows what the second paper changed.

The caller may pass a function `watch`. It is called with a `Step` after each step of the inner
loop:

>>> Q, K, V = np.array([[1.0]]), np.array([[1.0], [3.0]]), np.array([[10.0], [20.0]])
>>> def show(step):
...     m, l, factor = (step.on_chip[name].item() for name in ("mi", "li", "factor"))
...     print(f"block {step.j}: m = {m:.0f}, l = {l:.3f}, factor = {factor:.3f}")
>>> O, L = fa2_forward(Q, K, V, Br=1, Bc=1, watch=show)
block 0: m = 1, l = 1.000, factor = 0.000
block 1: m = 3, l = 1.135, factor = 0.135
>>> print(O.round(3))
[[18.808]]

Two arguments are not in all of the papers' algorithms. `scale` multiplies S and is 1/sqrt(d) unless
given; of the six algorithms only Algorithm 4 has it. `causal` lets row i see the columns
j <= i + Nk - Nq. The two flash forward and backward passes do not visit tiles in which no row sees
a column (FlashAttention-2, section 3.1). A row that sees no column gets O = 0, l = 0, m = L = -inf
and gradients of 0. Dropout and the other options are not here: see `fa_numba.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .checks import as_real, as_size, check_shape
from .masks import visible_causal
from .problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One step of an inner loop: tile (i, j) of S, after the statements of this step have run.

    The functions of this module pass a Step to `watch`. The arrays have the names that the code
    uses, such as "Sij". The outer loop's own tiles (Kj and Vj; in `fa2_forward` Qi) are in no
    mapping, as the inner loop does not load them.

    Parameters
    ----------
    algorithm : str
        Name of the function, such as "fa1_forward".
    i, j : int
        Numbers of the row tile and of the column tile, from 0.
    rows : slice
        Rows of Q that belong to row tile i.
    columns : slice
        Rows of K and V that belong to column tile j.
    read : mapping of str to array
        Arrays that the inner loop loads from global memory in this step.
    on_chip : mapping of str to array
        Arrays on chip, with the values that they have at the end of the step.
    written : mapping of str to array
        Arrays that the inner loop writes to global memory in this step.

    Examples
    --------
    >>> steps = []
    >>> Q = np.ones((4, 2))
    >>> O, l, m = fa1_forward(Q, Q, Q, Br=2, Bc=4, watch=steps.append)
    >>> [(step.i, step.j, step.rows, sorted(step.written)) for step in steps]
    [(0, 0, slice(0, 2, None), ['Oi', 'li', 'mi']), (1, 0, slice(2, 4, None), ['Oi', 'li', 'mi'])]
    """

    algorithm: str  # the function's name
    i: int  # number of the row tile, from 0
    j: int  # number of the column tile, from 0
    rows: slice  # its rows of Q
    columns: slice  # its rows of K and V
    read: Mapping[str, Array]
    on_chip: Mapping[str, Array]
    written: Mapping[str, Array]


Watch = Callable[[Step], Any]


def standard_forward(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, *, scale: float | None = None, causal: bool = False
) -> tuple[Array, Array]:
    """Compute attention by FlashAttention's Algorithm 0, with the whole matrices S and P.

    S and P, both (Nq, Nk), are written to global memory and read again.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries of one head. Any real dtype; converted to float64.
    K, V : array_like, shape (Nk, d)
        Keys and values of one head.
    scale : float, optional
        Factor of the scores. Default: 1/sqrt(d).
    causal : bool, default False
        Whether row i sees only the columns j <= i + Nk - Nq.

    Returns
    -------
    O : ndarray of float64, shape (Nq, d)
        The output softmax(scale Q KT) V. A row that sees no column is 0.
    P : ndarray of float64, shape (Nq, Nk)
        The matrix softmax(scale Q KT), which `standard_backward` needs.

    Raises
    ------
    TypeError
        If an array is not real, or `scale` or `causal` has another type.
    ValueError
        If the shapes do not fit, or `scale` is not finite.

    Examples
    --------
    >>> O, P = standard_forward([[0.0, 0.0]], np.eye(2), np.eye(2))
    >>> print(O, P)
    [[0.5 0.5]] [[0.5 0.5]]
    """
    Q, K, V, scale, Nq, Nk = as_head(Q, K, V, scale, causal)

    # Alg. 0 line 1: S = scale Q KT
    S = hide(scale * (Q @ K.T), 0, 0, Nq, Nk, causal)
    # Alg. 0 line 2: P = softmax(S), row by row
    m = S.max(axis=1)
    P = exp_minus(S, m)
    P = divide_rows(P, P.sum(axis=1))
    # Alg. 0 line 3: O = P V
    O = P @ V
    # Alg. 0 line 4; Algorithm 3 needs P as well
    return O, P


def fa1_forward(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, *, Br: int, Bc: int,
    scale: float | None = None, causal: bool = False, watch: Watch | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute attention by FlashAttention's Algorithm 1: K/V outer, Q inner.

    O, l and m are read from global memory and written back once for every column tile. O is
    normalised each time: after column tile j it is attention over the first j + 1 column tiles.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries of one head. Any real dtype; converted to float64.
    K, V : array_like, shape (Nk, d)
        Keys and values of one head.
    Br : int
        Rows of a row tile, at least 1.
    Bc : int
        Columns of a column tile, at least 1.
    scale : float, optional
        Factor of the scores. Default: 1/sqrt(d).
    causal : bool, default False
        Whether row i sees only the columns j <= i + Nk - Nq.
    watch : callable, optional
        Function of one `Step`, called after each step of the inner loop.

    Returns
    -------
    O : ndarray of float64, shape (Nq, d)
        The attention output. A row that sees no column is 0.
    l : ndarray of float64, shape (Nq,)
        Sum of e^(S - m) over each row of S; 0 for a row that sees no column.
    m : ndarray of float64, shape (Nq,)
        Maximum of each row of S; -inf for a row that sees no column.

    Raises
    ------
    TypeError
        If an array is not real, or another argument has another type.
    ValueError
        If the shapes do not fit, a block size is below 1, or `scale` is not finite.

    See Also
    --------
    fa2_forward : The same result with the other loop order.
    logsumexp : Compute L from `m` and `l`.

    Examples
    --------
    The output does not depend on the block sizes:

    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.normal(size=(3, 8, 4))
    >>> O, l, m = fa1_forward(Q, K, V, Br=2, Bc=3)
    >>> bool(np.allclose(O, standard_forward(Q, K, V)[0]))
    True
    """
    # Alg. 1 line 1: the caller sets the block sizes; the paper's are Bc = ceil(M / 4d) and
    # Br = min(Bc, d), for M elements on chip
    Br, Bc = as_size("Br", Br, axis=False), as_size("Bc", Bc, axis=False)
    Q, K, V, scale, Nq, Nk = as_head(Q, K, V, scale, causal)

    # Alg. 1 line 2: O = 0, l = 0, m = -inf, in global memory
    O, l, m = np.zeros_like(Q), np.zeros(Nq), np.full(Nq, -np.inf)

    # Alg. 1 lines 3, 4: the tiles are slices of the matrices
    # Alg. 1 line 5: for each column tile j
    for j0 in range(0, Nk, Bc):
        columns = slice(j0, min(j0 + Bc, Nk))
        # Alg. 1 line 6: load Kj, Vj
        Kj, Vj = load(K, columns), load(V, columns)
        # Alg. 1 line 7: for each row tile i that sees column tile j
        for i0 in range(first_row_tile(j0, Nq, Nk, Br, causal), Nq, Br):
            rows = slice(i0, min(i0 + Br, Nq))
            # Alg. 1 line 8: load Qi, Oi, li, mi
            Qi = load(Q, rows)
            Oi, li, mi = load(O, rows), load(l, rows), load(m, rows)
            # Alg. 1 line 9: Sij = scale Qi KjT
            Sij = hide(scale * (Qi @ Kj.T), i0, j0, Nq, Nk, causal)
            # Alg. 1 line 10: of this tile alone, mij = rowmax(Sij), Pij = exp(Sij - mij),
            # lij = rowsum(Pij), which the paper writes with a tilde
            mij = Sij.max(axis=1)
            Pij = exp_minus(Sij, mij)
            lij = Pij.sum(axis=1)
            # Alg. 1 line 11: m_new = max(mi, mij),
            # l_new = e^(mi - m_new) li + e^(mij - m_new) lij
            m_new = np.maximum(mi, mij)
            factor = exp_minus(mi, m_new)
            tile_factor = exp_minus(mij, m_new)
            l_new = factor * li + tile_factor * lij
            # Alg. 1 line 12: O = diag(l_new)^-1
            #     (diag(li) e^(mi - m_new) Oi + e^(mij - m_new) Pij Vj)
            O_new = scale_rows(Oi, li * factor) + scale_rows(Pij @ Vj, tile_factor)
            O_new = divide_rows(O_new, l_new)
            # Alg. 1 lines 12, 13: write Oi, li, mi
            O[rows], l[rows], m[rows] = O_new, l_new, m_new
            if watch is not None:
                read = dict(Qi=Qi, Oi=Oi, li=li, mi=mi)
                written = dict(Oi=O_new, li=l_new, mi=m_new)
                on_chip = dict(Sij=Sij, Pij=Pij, factor=factor, **written)
                at = i0 // Br, j0 // Bc, rows, columns
                watch(Step("fa1_forward", *at, read, on_chip, written))

    # Alg. 1 line 16; l and m are what Algorithm 4 needs. `logsumexp` makes L of them.
    return O, l, m


def fa2_forward(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, *, Br: int, Bc: int,
    scale: float | None = None, causal: bool = False, watch: Watch | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute attention by FlashAttention-2's Algorithm 1: Q outer, K/V inner.

    Oi, li and mi stay on chip from the first column tile to the last. Oi is normalised once, at the
    end. One number per row, L = m + log l, is written for the backward pass.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries of one head. Any real dtype; converted to float64.
    K, V : array_like, shape (Nk, d)
        Keys and values of one head.
    Br : int
        Rows of a row tile, at least 1.
    Bc : int
        Columns of a column tile, at least 1.
    scale : float, optional
        Factor of the scores. Default: 1/sqrt(d).
    causal : bool, default False
        Whether row i sees only the columns j <= i + Nk - Nq.
    watch : callable, optional
        Function of one `Step`, called after each step of the inner loop.

    Returns
    -------
    O : ndarray of float64, shape (Nq, d)
        The attention output. A row that sees no column is 0.
    L : ndarray of float64, shape (Nq,)
        Logarithm of the sum of e^S over each row of S; -inf for a row that sees no column.

    Raises
    ------
    TypeError
        If an array is not real, or another argument has another type.
    ValueError
        If the shapes do not fit, a block size is below 1, or `scale` is not finite.

    See Also
    --------
    fa1_forward : The same result with the other loop order.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> Q, K, V = rng.normal(size=(3, 8, 4))
    >>> O, L = fa2_forward(Q, K, V, Br=2, Bc=3)
    >>> _, l, m = fa1_forward(Q, K, V, Br=2, Bc=3)
    >>> bool(np.allclose(L, logsumexp(m, l)))
    True
    """
    # The caller sets the block sizes; the paper chooses 64 or 128 for both by hand (section 3.3)
    Br, Bc = as_size("Br", Br, axis=False), as_size("Bc", Bc, axis=False)
    Q, K, V, scale, Nq, Nk = as_head(Q, K, V, scale, causal)

    # In global memory; nothing has to be initialised there
    O, L = np.empty_like(Q), np.empty(Nq)

    # Alg. 1 lines 1, 2: the tiles are slices of the matrices
    # Alg. 1 line 3: for each row tile i; the kernel runs them side by side
    for i0 in range(0, Nq, Br):
        rows = slice(i0, min(i0 + Br, Nq))
        # Alg. 1 line 4: load Qi
        Qi = load(Q, rows)
        # Alg. 1 line 5: O = 0, l = 0, m = -inf, on chip
        Oi, li, mi = np.zeros_like(Qi), np.zeros(len(Qi)), np.full(len(Qi), -np.inf)
        # Alg. 1 line 6: for each column tile j that row tile i sees
        for j0 in range(0, columns_end(rows.stop, Nq, Nk, causal), Bc):
            columns = slice(j0, min(j0 + Bc, Nk))
            # Alg. 1 line 7: load Kj, Vj
            Kj, Vj = load(K, columns), load(V, columns)
            # Alg. 1 line 8: Sij = scale Qi KjT
            Sij = hide(scale * (Qi @ Kj.T), i0, j0, Nq, Nk, causal)
            # Alg. 1 line 9: m_new = max(mi, rowmax(Sij)), Pij = exp(Sij - m_new),
            # l_new = e^(mi - m_new) li + rowsum(Pij)
            m_new = np.maximum(mi, Sij.max(axis=1))
            Pij = exp_minus(Sij, m_new)
            factor = exp_minus(mi, m_new)
            l_new = factor * li + Pij.sum(axis=1)
            # Alg. 1 line 10: O = diag(e^(mi - m_new)) Oi + Pij Vj, not yet normalised. The paper
            # prints diag(e^(mi - m_new))^-1, the inverse of the factor that it means.
            O_new = scale_rows(Oi, factor) + Pij @ Vj
            Oi, li, mi = O_new, l_new, m_new
            if watch is not None:
                read = dict(Kj=Kj, Vj=Vj)
                on_chip = dict(Sij=Sij, Pij=Pij, factor=factor, Oi=Oi, li=li, mi=mi)
                at = i0 // Br, j0 // Bc, rows, columns
                watch(Step("fa2_forward", *at, read, on_chip, written={}))
        # Alg. 1 lines 12, 14: O = diag(l)^-1 O, written once
        O[rows] = divide_rows(Oi, li)
        # Alg. 1 lines 13, 15: L = m + log l
        L[rows] = logsumexp(mi, li)

    # Alg. 1 line 17
    return O, L


def standard_backward(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, P: ArrayLike, dO: ArrayLike,
    *, scale: float | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute the gradients of attention by FlashAttention's Algorithm 3.

    P, dP and dS, all (Nq, Nk), are written to global memory and read again.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries of one head. Any real dtype; converted to float64.
    K, V : array_like, shape (Nk, d)
        Keys and values of one head.
    P : array_like, shape (Nq, Nk)
        The second result of `standard_forward`. A mask needs no argument here, because P is 0 where
        the mask hides a column.
    dO : array_like, shape (Nq, d)
        Gradient of O.
    scale : float, optional
        Factor of the scores in the forward pass. Default: 1/sqrt(d).

    Returns
    -------
    dQ : ndarray of float64, shape (Nq, d)
        Gradient of Q.
    dK, dV : ndarray of float64, shape (Nk, d)
        Gradients of K and V.

    Raises
    ------
    TypeError
        If an array is not real, or `scale` is not a number.
    ValueError
        If the shapes do not fit, or `scale` is not finite.

    Examples
    --------
    >>> Q, K, V, dO = np.random.default_rng(0).normal(size=(4, 8, 2))
    >>> dQ, dK, dV = standard_backward(Q, K, V, standard_forward(Q, K, V)[1], dO)
    >>> dQ.shape, dK.shape, dV.shape
    ((8, 2), (8, 2), (8, 2))
    """
    Q, K, V, scale, Nq, Nk = as_head(Q, K, V, scale, False)
    P, dO = _like("P", P, (Nq, Nk)), _like("dO", dO, Q.shape)

    # Alg. 3 line 1: dV = PT dO
    dV = P.T @ dO
    # Alg. 3 line 2: dP = dO VT
    dP = dO @ V.T
    # Alg. 3 line 3: dS = P o (dP - D) with D = rowsum(P o dP), the softmax's derivative
    D = (P * dP).sum(axis=1)
    dS = P * (dP - D[:, None])
    # Alg. 3 line 4: dQ = scale dS K
    dQ = scale * (dS @ K)
    # Alg. 3 line 5: dK = scale dST Q
    dK = scale * (dS.T @ Q)
    # Alg. 3 line 6
    return dQ, dK, dV


def fa1_backward(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, O: ArrayLike, dO: ArrayLike,
    l: ArrayLike, m: ArrayLike, *, Br: int, Bc: int,
    scale: float | None = None, causal: bool = False, watch: Watch | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute the gradients of attention by FlashAttention's Algorithm 4: K/V outer, Q inner.

    P is computed again, tile by tile, from l and m. The kernels read L = m + log l in place of l
    and m, as the released code of FlashAttention did. The algorithm reads O in every pass over the
    rows of Q, to compute D again. In every pass it also reads dQ from global memory and writes dQ
    back.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries of one head. Any real dtype; converted to float64.
    K, V : array_like, shape (Nk, d)
        Keys and values of one head.
    O : array_like, shape (Nq, d)
        The attention output of `fa1_forward`.
    dO : array_like, shape (Nq, d)
        Gradient of O.
    l, m : array_like, shape (Nq,)
        Row sums and row maxima that `fa1_forward` returned.
    Br : int
        Rows of a row tile, at least 1.
    Bc : int
        Columns of a column tile, at least 1.
    scale : float, optional
        Factor of the scores in the forward pass. Default: 1/sqrt(d).
    causal : bool, default False
        Whether the forward pass was causal.
    watch : callable, optional
        Function of one `Step`, called after each step of the inner loop.

    Returns
    -------
    dQ : ndarray of float64, shape (Nq, d)
        Gradient of Q; 0 in a row that sees no column.
    dK, dV : ndarray of float64, shape (Nk, d)
        Gradients of K and V.

    Raises
    ------
    TypeError
        If an array is not real, or another argument has another type.
    ValueError
        If the shapes do not fit, a block size is below 1, or `scale` is not finite.

    Examples
    --------
    >>> Q, K, V, dO = np.random.default_rng(0).normal(size=(4, 8, 2))
    >>> sizes = dict(Br=3, Bc=2)
    >>> O, l, m = fa1_forward(Q, K, V, **sizes)
    >>> dQ, dK, dV = fa1_backward(Q, K, V, O, dO, l, m, **sizes)
    >>> expected, _, _ = standard_backward(Q, K, V, standard_forward(Q, K, V)[1], dO)
    >>> bool(np.allclose(dQ, expected))
    True
    """
    # Alg. 4 lines 1, 2: no random state, as nothing is dropped; the caller sets the block sizes
    Br, Bc = as_size("Br", Br, axis=False), as_size("Bc", Bc, axis=False)
    Q, K, V, scale, Nq, Nk = as_head(Q, K, V, scale, causal)
    O, dO = _like("O", O, Q.shape), _like("dO", dO, Q.shape)
    l, m = _like("l", l, (Nq,)), _like("m", m, (Nq,))

    # Alg. 4 lines 3, 4: the tiles are slices of the matrices
    # Alg. 4 line 5: dQ = 0, dK = 0, dV = 0, in global memory
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)

    # Alg. 4 line 6: for each column tile j
    for j0 in range(0, Nk, Bc):
        columns = slice(j0, min(j0 + Bc, Nk))
        # Alg. 4 line 7: load Kj, Vj
        Kj, Vj = load(K, columns), load(V, columns)
        # Alg. 4 line 8: dKj = 0, dVj = 0, on chip
        dKj, dVj = np.zeros_like(Kj), np.zeros_like(Vj)
        # Alg. 4 line 9: for each row tile i that sees column tile j
        for i0 in range(first_row_tile(j0, Nq, Nk, Br, causal), Nq, Br):
            rows = slice(i0, min(i0 + Br, Nq))
            # Alg. 4 line 10: load Qi, Oi, dOi, dQi, li, mi
            Qi, dOi = load(Q, rows), load(dO, rows)
            Oi, dQi, li, mi = load(O, rows), load(dQ, rows), load(l, rows), load(m, rows)
            # Alg. 4 lines 11, 12: Sij = scale Qi KjT, masked
            Sij = hide(scale * (Qi @ Kj.T), i0, j0, Nq, Nk, causal)
            # Alg. 4 line 13: Pij = diag(li)^-1 exp(Sij - mi)
            Pij = divide_rows(exp_minus(Sij, mi), li)
            # Alg. 4 lines 14, 15: nothing of Pij is dropped
            # Alg. 4 line 16: dVj += PijT dOi
            dVj = dVj + Pij.T @ dOi
            # Alg. 4 lines 17, 18: dPij = dOi VjT
            dPij = dOi @ Vj.T
            # Alg. 4 line 19: Di = rowsum(dOi o Oi), in every pass
            Di = (dOi * Oi).sum(axis=1)
            # Alg. 4 line 20: dSij = Pij o (dPij - Di)
            dSij = Pij * (dPij - Di[:, None])
            # Alg. 4 line 21: write dQi + scale dSij Kj to dQi
            dQ_new = dQi + scale * (dSij @ Kj)
            dQ[rows] = dQ_new
            # Alg. 4 line 22: dKj += scale dSijT Qi
            dKj = dKj + scale * (dSij.T @ Qi)
            if watch is not None:
                read = dict(Qi=Qi, Oi=Oi, dOi=dOi, dQi=dQi, li=li, mi=mi)
                on_chip = dict(Sij=Sij, Pij=Pij, dPij=dPij, dSij=dSij, Di=Di, dKj=dKj, dVj=dVj)
                at = i0 // Br, j0 // Bc, rows, columns
                watch(Step("fa1_backward", *at, read, on_chip, written=dict(dQi=dQ_new)))
        # Alg. 4 line 24: write dKj, dVj
        dK[columns], dV[columns] = dKj, dVj

    # Alg. 4 line 26
    return dQ, dK, dV


def fa2_backward(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, O: ArrayLike, dO: ArrayLike,
    L: ArrayLike, *, Br: int, Bc: int,
    scale: float | None = None, causal: bool = False, watch: Watch | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute the gradients of attention by FlashAttention-2's Algorithm 2: K/V outer, Q inner.

    The column tiles are still the outer loop; the kernel runs them in parallel. D is computed once,
    before the loops. P is computed again from L alone. dQ is summed in global memory, where the
    kernel adds atomically.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries of one head. Any real dtype; converted to float64.
    K, V : array_like, shape (Nk, d)
        Keys and values of one head.
    O : array_like, shape (Nq, d)
        The attention output of `fa2_forward`.
    dO : array_like, shape (Nq, d)
        Gradient of O.
    L : array_like, shape (Nq,)
        The second result of `fa2_forward`.
    Br : int
        Rows of a row tile, at least 1.
    Bc : int
        Columns of a column tile, at least 1.
    scale : float, optional
        Factor of the scores in the forward pass. Default: 1/sqrt(d).
    causal : bool, default False
        Whether the forward pass was causal.
    watch : callable, optional
        Function of one `Step`, called after each step of the inner loop.

    Returns
    -------
    dQ : ndarray of float64, shape (Nq, d)
        Gradient of Q; 0 in a row that sees no column.
    dK, dV : ndarray of float64, shape (Nk, d)
        Gradients of K and V.

    Raises
    ------
    TypeError
        If an array is not real, or another argument has another type.
    ValueError
        If the shapes do not fit, a block size is below 1, or `scale` is not finite.

    Examples
    --------
    >>> Q, K, V, dO = np.random.default_rng(0).normal(size=(4, 8, 2))
    >>> O, L = fa2_forward(Q, K, V, Br=3, Bc=2)
    >>> dQ, dK, dV = fa2_backward(Q, K, V, O, dO, L, Br=3, Bc=2)
    >>> expected, _, _ = standard_backward(Q, K, V, standard_forward(Q, K, V)[1], dO)
    >>> bool(np.allclose(dQ, expected))
    True
    """
    # The caller sets the block sizes
    Br, Bc = as_size("Br", Br, axis=False), as_size("Bc", Bc, axis=False)
    Q, K, V, scale, Nq, Nk = as_head(Q, K, V, scale, causal)
    O, dO = _like("O", O, Q.shape), _like("dO", dO, Q.shape)
    L = _like("L", L, (Nq,))

    # Alg. 2 lines 1, 2: the tiles are slices of the matrices
    # Alg. 2 line 3: dQ = 0, dK = 0, dV = 0, in global memory
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    # Alg. 2 line 4: D = rowsum(dO o O), in global memory, once
    D = (dO * O).sum(axis=1)

    # Alg. 2 line 5: for each column tile j; the kernel runs them side by side
    for j0 in range(0, Nk, Bc):
        columns = slice(j0, min(j0 + Bc, Nk))
        # Alg. 2 line 6: load Kj, Vj
        Kj, Vj = load(K, columns), load(V, columns)
        # Alg. 2 line 7: dKj = 0, dVj = 0, on chip
        dKj, dVj = np.zeros_like(Kj), np.zeros_like(Vj)
        # Alg. 2 line 8: for each row tile i that sees column tile j
        for i0 in range(first_row_tile(j0, Nq, Nk, Br, causal), Nq, Br):
            rows = slice(i0, min(i0 + Br, Nq))
            # Alg. 2 line 9: load Qi, dOi, Li, Di. The paper's list has Oi and dQi too: the one is
            # not used again, and line 15 loads the other itself.
            Qi, dOi = load(Q, rows), load(dO, rows)
            Li, Di = load(L, rows), load(D, rows)
            # Alg. 2 line 10: Sij = scale Qi KjT
            Sij = hide(scale * (Qi @ Kj.T), i0, j0, Nq, Nk, causal)
            # Alg. 2 line 11: Pij = exp(Sij - Li)
            Pij = exp_minus(Sij, Li)
            # Alg. 2 line 12: dVj += PijT dOi
            dVj = dVj + Pij.T @ dOi
            # Alg. 2 line 13: dPij = dOi VjT
            dPij = dOi @ Vj.T
            # Alg. 2 line 14: dSij = Pij o (dPij - Di)
            dSij = Pij * (dPij - Di[:, None])
            # Alg. 2 line 15: dQi += scale dSij Kj, in global memory. The paper leaves the scale
            # out; dQ and dK have it because S has it.
            dQi = load(dQ, rows)
            dQ_new = dQi + scale * (dSij @ Kj)
            dQ[rows] = dQ_new
            # Alg. 2 line 16: dKj += scale dSijT Qi
            dKj = dKj + scale * (dSij.T @ Qi)
            if watch is not None:
                read = dict(Qi=Qi, dOi=dOi, dQi=dQi, Li=Li, Di=Di)
                on_chip = dict(Sij=Sij, Pij=Pij, dPij=dPij, dSij=dSij, Di=Di, dKj=dKj, dVj=dVj)
                at = i0 // Br, j0 // Bc, rows, columns
                watch(Step("fa2_backward", *at, read, on_chip, written=dict(dQi=dQ_new)))
        # Alg. 2 line 18: write dKj, dVj
        dK[columns], dV[columns] = dKj, dVj

    # Alg. 2 line 20
    return dQ, dK, dV


# --- what the algorithms share; the last three keep any floating-point dtype ------------------


def load(matrix: Array, tile: slice) -> Array:
    """Return a tile of a matrix, brought on chip.

    Parameters
    ----------
    matrix : ndarray, shape (rows, d) or (rows,)
        A matrix, or one number per row, in global memory.
    tile : slice
        Rows of the tile.

    Returns
    -------
    ndarray
        A copy. Later writes to the matrix do not change the copy.
    """
    return matrix[tile].copy()


def hide(S: Array, i0: int, j0: int, Nq: int, Nk: int, causal: bool) -> Array:
    """Return a tile of S with -inf where a row does not see a column.

    Parameters
    ----------
    S : ndarray, shape (rows, columns)
        The tile of S whose first element is S[i0, j0] of the whole matrix.
    i0, j0 : int
        First row and first column of the tile.
    Nq, Nk : int
        Rows and columns of the whole matrix.
    causal : bool
        Whether row i sees only the columns j <= i + Nk - Nq. If False, `S` itself is returned.

    Returns
    -------
    ndarray, shape (rows, columns)
        The masked tile.

    Examples
    --------
    >>> print(hide(np.zeros((2, 2)), 0, 0, 2, 2, causal=True))
    [[  0. -inf]
     [  0.   0.]]
    """
    if not causal:
        return S
    rows, columns = i0 + np.arange(S.shape[0])[:, None], j0 + np.arange(S.shape[1])
    return np.where(visible_causal(rows, columns, Nk - Nq), S, -np.inf)


def columns_end(rows_end: int, Nq: int, Nk: int, causal: bool) -> int:
    """Return one past the last column that the rows before `rows_end` see.

    Parameters
    ----------
    rows_end : int
        One past the last row.
    Nq, Nk : int
        Rows and columns of S.
    causal : bool
        Whether row i sees only the columns j <= i + Nk - Nq. If False, the result is Nk.

    Returns
    -------
    int
        A number of columns, from 0 to Nk.

    Examples
    --------
    >>> columns_end(4, 8, 8, causal=True), columns_end(4, 8, 8, causal=False)
    (4, 8)
    """
    return max(0, min(Nk, rows_end + Nk - Nq)) if causal else Nk


def first_row_tile(j0: int, Nq: int, Nk: int, Br: int, causal: bool) -> int:
    """Return the first row of the first row tile in which some row sees column j0.

    All row tiles below that row tile see column j0 too.

    Parameters
    ----------
    j0 : int
        First column of a column tile.
    Nq, Nk : int
        Rows and columns of S.
    Br : int
        Rows of a row tile.
    causal : bool
        Whether row i sees only the columns j <= i + Nk - Nq. If False, the result is 0.

    Returns
    -------
    int
        A row number, which is a multiple of Br. It is at least Nq if no row sees the column.

    Examples
    --------
    >>> first_row_tile(5, 8, 8, Br=4, causal=True)
    4
    """
    return max(0, j0 - (Nk - Nq)) // Br * Br if causal else 0


def scale_rows(X: Array, factor: Array) -> Array:
    """Return diag(factor) X: every row of X times the row's own factor.

    Parameters
    ----------
    X : ndarray, shape (rows, d)
        A tile.
    factor : ndarray, shape (rows,)
        One number per row.

    Returns
    -------
    ndarray, shape (rows, d)
        The product.
    """
    return factor[:, None] * X


def exp_minus(x: Array, m: Array) -> Array:
    """Return e^(x - m), which is 0 where x = m = -inf.

    A row that has seen no column yet has m = -inf. Its weights are 0, not NaN.

    Parameters
    ----------
    x : ndarray, shape (rows, columns) or (rows,)
        Scores of any floating-point dtype.
    m : ndarray, shape (rows,)
        One number per row, at least as large as the row's largest score.

    Returns
    -------
    ndarray, same shape as `x`
        The exponentials, in the wider dtype of x and m.

    Examples
    --------
    >>> print(exp_minus(np.array([0.0, -np.inf]), np.array([0.0, -np.inf])))
    [1. 0.]
    """
    m = np.where(m == -np.inf, np.zeros_like(m), m)
    return np.exp(x - (m[:, None] if x.ndim == 2 else m))


def divide_rows(X: Array, l: Array) -> Array:
    """Return diag(l)^-1 X: every row of X divided by the row's own sum.

    Parameters
    ----------
    X : ndarray, shape (rows, d)
        A tile of any floating-point dtype.
    l : ndarray, shape (rows,)
        Row sums. A row with l = 0 has seen no column; it is divided by 1.

    Returns
    -------
    ndarray, shape (rows, d)
        The quotient, in the wider dtype of X and l.

    Examples
    --------
    >>> print(divide_rows(np.array([[2.0, 4.0], [0.0, 0.0]]), np.array([2.0, 0.0])))
    [[1. 2.]
     [0. 0.]]
    """
    return X / np.where(l == 0, np.ones_like(l), l)[:, None]


def logsumexp(m: Array, l: Array) -> Array:
    """Return L = m + log l, the logarithm of the sum of e^S over each row of S.

    L is all that a backward pass needs of the softmax.

    Parameters
    ----------
    m : ndarray, shape (rows,)
        Maximum of each row of S, of any floating-point dtype. The result has the wider dtype of m
        and l.
    l : ndarray, shape (rows,)
        Sum of e^(S - m) over each row of S.

    Returns
    -------
    ndarray, shape (rows,)
        L; -inf for a row that sees no column (l = 0), without a warning.

    Examples
    --------
    >>> print(logsumexp(np.array([3.0, -np.inf]), np.array([1.0, 0.0])))
    [  3. -inf]
    """
    with np.errstate(divide="ignore"):  # log 0 = -inf is the L of a row that sees nothing
        return m + np.log(l)


def as_head(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: float | None = None, causal: bool = False
) -> tuple[Array, Array, Array, float, int, int]:
    """Check the arrays of one head and convert them to float64.

    Parameters
    ----------
    Q : array_like, shape (Nq, d)
        Queries.
    K, V : array_like, shape (Nk, d)
        Keys and values.
    scale : float, optional
        Factor of the scores. Default: 1/sqrt(d).
    causal : bool, default False
        Whether row i sees only the columns j <= i + Nk - Nq; checked, not used.

    Returns
    -------
    Q, K, V : ndarray of float64
        The arrays.
    scale : float
        The factor of the scores.
    Nq, Nk : int
        Rows of Q, rows of K.

    Raises
    ------
    TypeError
        If an array is not real, `scale` is not a number or `causal` is not a bool.
    ValueError
        If an array does not have two axes of at least 1 element, the shapes do not fit each other,
        or `scale` is not finite.
    """
    Q, K, V = as_real("Q", Q), as_real("K", K), as_real("V", V)
    for name, x in zip("QKV", (Q, K, V), strict=True):
        if x.ndim != 2 or 0 in x.shape:
            raise ValueError(f"{name} must have shape (rows, d), both at least 1, got {x.shape}")
    if K.shape[1] != Q.shape[1]:
        raise ValueError(f"K must have shape (Nk, {Q.shape[1]}) (the d of Q), got {K.shape}")
    check_shape("V", V.shape, K.shape, of=" (the shape of K)")
    sizes: dict[str, Any] = dict(seqlen_q=len(Q), seqlen_k=len(K), head_dim=Q.shape[1], scale=scale)
    problem = Problem(batch=1, heads_q=1, heads_k=1, causal=causal, **sizes)  # checks the two
    return Q, K, V, problem.scale, len(Q), len(K)


def _like(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    x = as_real(name, x)
    check_shape(name, x.shape, shape)
    return x
