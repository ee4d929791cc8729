"""Accesses of standard attention, whose matrices S and P pass through global memory."""

from __future__ import annotations

from typing import Any

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
    """Accesses of standard attention (FA-1 Algorithm 0) in three tiled kernels.

    Per head:
        S = Q K^T   loads Q N_q d, K T_r N_k d, bias N_q N_k    stores S N_q N_k
        softmax     loads S N_q N_k                             stores P N_q N_k, L N_q'
        O = P V     loads P N_q N_k, V T_r N_k d                stores O N_q' d
    L with `return_lse`, bias if there is one. P takes S's place in memory and is named P from then
    on. A row of S too long for shared memory (`row_resident` False) is loaded twice by the softmax.
    No mask skips a tile, the block mask neither.
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
    return count(problem, loads, stores)


def standard_backward(
    problem: Problem, tiles: BlockSizes, *, row_resident: bool = True,
    forward_resident: bool = True, block_mask: Any = None, dbias: bool = False, dlse: bool = False,
    dsinks: bool = False,
) -> Accesses:  # fmt: skip
    """Accesses of standard attention's gradients (FA-1 Algorithm 3) in seven tiled kernels.

    The forward's scores and softmax make P again, and its product kernels are used for the other
    matrices too, so that an array goes by the name of that kernel's parameter. Per head:
        scores             loads Q N_q d, K T_r N_k d, bias N_q N_k    stores S N_q N_k
        softmax            loads S N_q N_k                             stores P N_q N_k
        dP = dO V^T        as scores without bias, named Q, K, S
        dS = P o (dP - D)  loads P, dP N_q N_k each                    stores dS N_q N_k
        dV = P^T dO        loads P N_q N_k, dO T_c N_q d               stores dV N_k' d
        dQ = dS K          loads P N_q N_k, V T_r N_k d                stores O N_q' d
        dK = dS^T Q        as dV, named P, dO, dV
    with dV, and dK, stored per K/V head. Dropout makes dS also store P, N_q N_k, without what is
    dropped; `dbias` makes it add to dbias, N_q N_k atomic adds, each a load and a store, and
    `dlse` load dL and L, N_q each; `dsinks` adds what it does in `fa1_backward`. A softcap or a
    score_mod whose slope is not 1 takes the scores once more, to multiply dS by it: as dP, and S
    also loaded, N_q N_k.

    A row of S too long for shared memory (`forward_resident` False) is loaded twice by the softmax;
    rows of P and dP that are too long together (`row_resident` False), twice for dS. No mask skips
    a tile, the block mask neither.
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
