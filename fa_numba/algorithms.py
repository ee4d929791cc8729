"""The papers' algorithms in NumPy, step by step: the text to read beside the kernels.

    function           algorithm                                 kernel
    standard_forward   FlashAttention, Algorithm 0               standard.py
    fa1_forward        FlashAttention, Algorithm 1               fa1_forward.py
    fa2_forward        FlashAttention-2, Algorithm 1             fa2_forward.py
    standard_backward  FlashAttention, Algorithm 3               standard_backward.py
    fa1_backward       FlashAttention, Algorithm 4               fa1_backward.py
    fa2_backward       FlashAttention-2, Algorithm 2             fa2_backward.py

The kernels are in kernels/simt, mma and wgmma, the last without those of standard attention.
FlashAttention: https://arxiv.org/abs/2205.14135, FlashAttention-2: https://arxiv.org/abs/2307.08691

How to read it
- A function computes one head: Q and O are (Nq, d), K and V (Nk, d), in float64. A whole call does
  the same for every head of every batch entry.
- Row tile i is Br rows of Q, column tile j is Bc rows of K and V; i0 and j0 are their first rows.
  The last tile may be shorter.
- Whole matrices (Q, K, V, O, l, m, dQ ...) lie in global memory, "HBM" in the papers. What belongs
  to one tile (Qi, Kj, Sij, Pij, Oi, li, mi ...) is on chip. `load` brings a tile there, assigning
  to a slice of a matrix writes it back, and everything else is arithmetic on chip.
- A comment names the line of the algorithm that the statements below it carry out. They stand in
  the paper's order; a kernel may load a tile earlier or take products in another order.
- The two flash algorithms are twins: a diff of fa1_forward and fa2_forward, or of fa1_backward and
  fa2_backward, shows what the second paper changed.

`watch`, a function of one Step, is called after each step of the inner loop:

>>> Q, K, V = np.array([[1.0]]), np.array([[1.0], [3.0]]), np.array([[10.0], [20.0]])
>>> def show(step):
...     m, l, factor = (step.on_chip[name].item() for name in ("mi", "li", "factor"))
...     print(f"block {step.j}: m = {m:.0f}, l = {l:.3f}, factor = {factor:.3f}")
>>> O, L = fa2_forward(Q, K, V, Br=1, Bc=1, watch=show)
block 0: m = 1, l = 1.000, factor = 0.000
block 1: m = 3, l = 1.135, factor = 0.135
>>> print(O.round(3))
[[18.808]]

Beside the papers: `scale` multiplies S, 1/sqrt(d) unless given; of the six only Algorithm 4 has it.
`causal` lets row i see the columns j <= i + Nk - Nq, and tiles that no row of them sees are not
visited (FlashAttention-2, section 3.1). A row that sees no column has O = 0, l = 0, m = L = -inf
and no gradients. Dropout and the other options are not here: see `reference`.
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
    """One step of an inner loop, for `watch`: tile (i, j) of S, after its statements have run.

    The arrays go by their names in the text. Those of `on_chip` have the values that the step
    leaves. `read` and `written` are what the inner loop loads from and writes to global memory in
    this step; the outer loop's own tiles (Kj and Vj, in fa2_forward Qi) are not among them.
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
    """(O, P) by Algorithm 0: S and P, both Nq x Nk, pass through global memory."""
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
    """(O, l, m) by FlashAttention's Algorithm 1: K/V outer, Q inner.

    O, l and m pass through global memory once for every column tile, and O is normalised each
    time: after column tile j it is attention over the first j + 1 tiles.
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
    """(O, L) by FlashAttention-2's Algorithm 1: Q outer, K/V inner.

    Oi, li and mi stay on chip from the first column tile to the last. Oi is normalised once, and
    one number a row, L = m + log l, is kept for the backward pass.
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
    """(dQ, dK, dV) by FlashAttention's Algorithm 3, from the P of `standard_forward`.

    P, dP and dS, all Nq x Nk, pass through global memory.
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
    """(dQ, dK, dV) by FlashAttention's Algorithm 4, from what `fa1_forward` gave.

    P is made again, tile by tile, of l and m (the kernels take L = m + log l for both, as the
    released code did). O is read once more in every pass over K/V, to make D again, and dQ passes
    through global memory.
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
    """(dQ, dK, dV) by FlashAttention-2's Algorithm 2, from what `fa2_forward` gave.

    The column tiles, still the outer loop, run side by side. D is made once, before; P is made
    again of L alone; dQ is summed in global memory, where the kernel adds atomically.
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
    """A tile of a matrix, brought on chip: a copy, which later writes to the matrix leave alone."""
    return matrix[tile].copy()


def hide(S: Array, i0: int, j0: int, Nq: int, Nk: int, causal: bool) -> Array:
    """The tile of S that starts at (i0, j0), -inf where a row does not see a column."""
    if not causal:
        return S
    rows, columns = i0 + np.arange(S.shape[0])[:, None], j0 + np.arange(S.shape[1])
    return np.where(visible_causal(rows, columns, Nk - Nq), S, -np.inf)


def columns_end(rows_end: int, Nq: int, Nk: int, causal: bool) -> int:
    """One past the last column that the rows before rows_end see."""
    return max(0, min(Nk, rows_end + Nk - Nq)) if causal else Nk


def first_row_tile(j0: int, Nq: int, Nk: int, Br: int, causal: bool) -> int:
    """Where the first row tile starts of which some row sees column j0; all below it do."""
    return max(0, j0 - (Nk - Nq)) // Br * Br if causal else 0


def scale_rows(X: Array, factor: Array) -> Array:
    """diag(factor) X"""
    return factor[:, None] * X


def exp_minus(x: Array, m: Array) -> Array:
    """e^(x - m), m one number a row; 0 where x = m = -inf: what nobody has seen weighs nothing."""
    m = np.where(m == -np.inf, np.zeros_like(m), m)
    return np.exp(x - (m[:, None] if x.ndim == 2 else m))


def divide_rows(X: Array, l: Array) -> Array:
    """diag(l)^-1 X; a row of l = 0 has seen nothing and stays 0."""
    return X / np.where(l == 0, np.ones_like(l), l)[:, None]


def logsumexp(m: Array, l: Array) -> Array:
    """L = m + log l, the logarithm of the sum of a row's e^S: all that a backward pass needs."""
    with np.errstate(divide="ignore"):  # log 0 = -inf is the L of a row that sees nothing
        return m + np.log(l)


def as_head(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, scale: float | None = None, causal: bool = False
) -> tuple[Array, Array, Array, float, int, int]:
    """Q, K and V in float64, the scale, Nq and Nk, or an error that names what is wrong."""
    Q, K, V = as_real("Q", Q), as_real("K", K), as_real("V", V)
    for name, x in zip("QKV", (Q, K, V), strict=True):
        if x.ndim != 2 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: allowed is (rows, d), both >= 1")
    if K.shape[1] != Q.shape[1]:
        raise ValueError(f"K has shape {K.shape}: allowed is (Nk, {Q.shape[1]}), as Q has d")
    check_shape("V", V.shape, K.shape, of=", K's")
    sizes: dict[str, Any] = dict(seqlen_q=len(Q), seqlen_k=len(K), head_dim=Q.shape[1], scale=scale)
    problem = Problem(batch=1, heads_q=1, heads_k=1, causal=causal, **sizes)  # checks the two
    return Q, K, V, problem.scale, len(Q), len(K)


def _like(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    x = as_real(name, x)
    check_shape(name, x.shape, shape)
    return x
