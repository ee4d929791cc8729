"""Accesses of standard attention, which writes the matrices S and P to global memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_numba.dtypes import DTYPES
from fa_numba.io_model.accesses import Accesses, add_up, check_dbias, count, sink_gradients
from fa_numba.io_model.visits import blocks_of, whole_sums
from fa_numba.problem import BlockSizes, Problem


def standard(
    problem: Problem,
    tiles: BlockSizes,
    *,
    return_lse: bool = False,
    row_resident: bool = True,
    block_mask: Any = None,
) -> Accesses:
    """Return the accesses of standard attention forward, which runs three tiled kernels.

    Parameters
    ----------
    problem : Problem
        Sizes, dtype and masks of the call. All tiles are computed, also under a mask.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    return_lse : bool, default False
        Whether L is stored.
    row_resident : bool, default True
        Whether a row of S fits into shared memory. If not, the softmax loads S twice.
    block_mask : array_like of bool, optional
        The block mask of a sparse problem. It is checked, but all tiles are computed.

    Returns
    -------
    Accesses
        Elements loaded and stored, by array.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, or the block mask is not bool.
    ValueError
        If a size is below 1, the block mask has another shape, is missing for a sparse
        problem, or is given for another problem.

    Notes
    -----
    FlashAttention Algorithm 0. Per head, with the symbols of `fa_numba.io_model`:

        kernel      loads                                      stores
        S = Q K^T   Q N_q d, K T_r N_k d, bias N_q N_k         S N_q N_k
        softmax     S N_q N_k                                  P N_q N_k, L N_q'
        O = P V     P N_q N_k, V T_r N_k d                     O N_q' d

    P overwrites S in memory, and is counted under the name P from then on. For e4m3, P has memory
    of its own. The softmax kernel then also stores l, N_q' elements, and the kernel of O loads N_q
    of them. S has 2 bytes per element, and P has 1 byte.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
    >>> standard(problem, tiles).stores
    {'S': 64, 'P': 64, 'O': 16}
    """
    d, head = problem.head_dim, whole_sums(problem, tiles, problem.heads_q)
    blocks_of(problem, block_mask, tiles)
    loads = {
        "Q": head.rows * d,
        "K": head.columns_by_row_tile * d,
        "bias": head.pairs if problem.bias else 0,
        "S": head.pairs * (1 if row_resident else 2),
        "P": head.pairs,
        "V": head.columns_by_row_tile * problem.d_v,
    }
    stores = {
        "S": head.pairs,
        "P": head.pairs,
        "O": head.all_rows * problem.d_v,
        "L": head.all_rows if return_lse else 0,
    }
    if not DTYPES[problem.dtype].scaled:
        return count(problem, loads, stores)
    found = count(problem, loads | {"l": head.rows}, stores | {"l": head.all_rows})
    if DTYPES[problem.o_dtype].sums_in_place:
        return replace(found, sums=("O",), halves=("S",))
    return replace(found, halves=("S", "O"))


def standard_backward(
    problem: Problem, tiles: BlockSizes, *, row_resident: bool = True,
    forward_resident: bool = True, block_mask: Any = None, dbias: bool = False, dlse: bool = False,
    dsinks: bool = False,
) -> Accesses:  # fmt: skip
    """Return the accesses of standard attention backward, which runs seven tiled kernels.

    Parameters
    ----------
    problem : Problem
        Sizes, dtype and masks of the call. All tiles are computed, also under a mask.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    row_resident : bool, default True
        Whether a row of P and a row of dP fit into shared memory together. If not, the kernel of dS
        loads both twice.
    forward_resident : bool, default True
        Whether a row of S fits into shared memory. If not, the softmax loads S twice.
    block_mask : array_like of bool, optional
        The block mask of a sparse problem. It is checked, but all tiles are computed.
    dbias : bool, default False
        Whether the gradient of the bias is computed: N_q N_k atomic adds to dbias, each a load and
        a store.
    dlse : bool, default False
        Whether there is a gradient of L. Then dL and L are loaded, N_q elements each.
    dsinks : bool, default False
        Whether the gradient of `sinks` is computed, as in `fa1_backward`.

    Returns
    -------
    Accesses
        Elements loaded and stored, by array.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, or the block mask is not bool.
    ValueError
        If a size is below 1, the block mask has another shape, is missing for a sparse
        problem, or is given for another problem, or `dbias` is set for a problem without a bias.

    Notes
    -----
    FlashAttention Algorithm 3. The forward pass's kernels compute P again. The forward kernel of S
    also computes dP, the forward kernel of O also computes dQ, and the kernel of dV also computes
    dK. Accesses are counted under the names of the kernels' parameters. The last column names the
    matrices that a kernel takes in parameters with other names: in the kernel of dP, for example,
    the parameter Q is dO. Per head, with the symbols of `fa_numba.io_model`:

        kernel             loads                               stores      parameter: matrix
        S = Q K^T          Q N_q d, K T_r N_k d, bias N_q N_k  S N_q N_k
        softmax            S N_q N_k                           P N_q N_k
        dP = dO V^T        Q N_q d, K T_r N_k d                S N_q N_k   Q: dO, K: V, S: dP
        dS = P o (dP - D)  P N_q N_k, dP N_q N_k               dS N_q N_k
        dV = P^T dO        P N_q N_k, dO T_c N_q d             dV N_k' d
        dQ = dS K          P N_q N_k, V T_r N_k d              O N_q' d    P: dS, V: K, O: dQ
        dK = dS^T Q        P N_q N_k, dO T_c N_q d             dV N_k' d   P: dS, dO: Q, dV: dK

    If `head_dim_v` is set, d is the head dimension of the matrix, and not of the parameter. dV and
    dK are stored once per K/V head.

    With dropout, the kernel of dS also stores P, N_q N_k elements, in which dropped elements are 0.
    With a softcap, or a `score_mod` whose derivative is not 1, one more kernel computes the scores
    again and multiplies dS by the derivative. It loads N_q d elements of Q, T_r N_k d elements of K
    and N_q N_k elements of S, and stores N_q N_k elements of S. Its parameter S is the matrix dS.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
    >>> standard_backward(problem, tiles).stores
    {'S': 128, 'P': 64, 'dS': 64, 'dV': 32, 'O': 16}
    """
    check_dbias(problem, dbias)
    d, d_v, head = problem.head_dim, problem.d_v, whole_sums(problem, tiles, problem.heads_q)
    blocks_of(problem, block_mask, tiles)
    shared = whole_sums(problem, tiles, problem.heads_k)
    matrix = head.pairs
    reads, forward_reads = (1 if resident else 2 for resident in (row_resident, forward_resident))
    bias = {"bias": matrix if problem.bias else 0}
    product = {"Q": head.rows * d, "K": head.columns_by_row_tile * d}
    of_values = {"Q": head.rows * d_v, "K": head.columns_by_row_tile * d_v}
    dbias_adds = {"dbias": matrix if dbias else 0}
    of_lse = dict.fromkeys(("dL", "L"), head.rows if dlse else 0)
    kept = {"P": matrix if problem.dropout_p else 0}

    scores = count(problem, product | bias, {"S": matrix})
    softmax = count(problem, {"S": forward_reads * matrix}, {"P": matrix})
    dP = count(problem, of_values, {"S": matrix})
    dS = count(
        problem,
        {"P": reads * matrix, "dP": reads * matrix} | dbias_adds | of_lse,
        {"dS": matrix} | kept | dbias_adds,
    )
    slopes = count(problem, product | {"S": matrix}, {"S": matrix})
    dV, dK = (
        count(
            problem,
            {"P": matrix, "dO": head.rows_by_column_tile * n},
            {"dV": shared.all_columns * n},
        )
        for n in (d_v, d)
    )
    dQ = count(problem, {"P": matrix, "V": head.columns_by_row_tile * d}, {"O": head.all_rows * d})
    kernels = [scores, softmax, dP, dS, dV, dQ, dK]
    if dsinks:
        kernels += sink_gradients(problem, head.rows, dlse, has_d=False)
    return add_up(problem, [*kernels, slopes] if problem.slopes else kernels)
