"""Global-memory accesses, FLOPs and workspace in closed form.

    standard, fa1, fa2, standard_backward,      loads and stores of this package's kernels, exact
    fa1_backward, fa2_backward
    with_prefix                                 loads and stores with a prefix that all sequences
                                                begin with, exact
    softmax                                     loads and stores of the softmax of vectors, exact
    tiles_visited                               number of tiles of S that the kernels compute, exact
    theta_standard, theta_flash, saha_ye        published bounds, every constant set to 1
    li_liang                                    a published bound of the backward pass
    fa1_paper                                   accesses as the first paper counts them
    ring, ring_messages, ring_break_even        bytes between devices that share a sequence, exact
    flops, workspace                            FLOPs by the papers' convention; workspace in bytes

Exact counts, bounds and the paper's own count are three different kinds of numbers. Never mix them
in one comparison. The exact counts are in elements, by array. They hold for partial tiles at the
edges, for skipped tiles and for sequences of different lengths. Tests compare them with the
emulator's counts. This package imports no kernel, so that the two counts are independent.

The formulas in the docstrings use these symbols. They are for one batch entry:

    N_q, N_k     the valid rows and the valid columns of the batch entry
    N_q', N_k'   the rows and columns of the arrays: seqlen_q and seqlen_k. All rows of packed
                 sequences are valid, so that N_q' = N_q and N_k' = N_k.
    d            the head dimension of Q and K. If `head_dim_v` is set, d is `head_dim_v` in the
                 rows of V, O, dO and dV, and in the row of `A` if `A` is the sum of O. The
                 published bounds have one d only: they raise ValueError if `head_dim_v` is set.
    B_r, B_c     rows of a row tile, columns of a column tile
    T_r, T_c     number of tiles: T_r = ceil(N_q / B_r), T_c = ceil(N_k / B_c)
    r_i, c_j     valid rows of row tile i, valid columns of column tile j
    B, H         batch entries, query heads

Tile (i, j) of S is visited if one of its rows sees one of its columns (causal mask and window) and
the block mask keeps it. Without masks all T_r T_c tiles are visited. A sum of r_i or c_j is over
the visited tiles: if all are visited, sum c_j is T_r N_k and sum r_i is T_c N_q.

A formula "per head" is for one batch entry and one query head; the count is the sum over all of
them. If query heads share a K/V head, each of them loads K and V. A formula that counts these loads
once per K/V head says "per K/V head".

Some accesses are not counted: integers that all threads read at one address (lengths, block mask),
ALiBi slopes, sinks, and the loads of the caller's functions (`score_mod`, `mask_mod`). Softcap,
`score_mod` and dropout add accesses in `standard_backward` only. If a kernel keeps a running
float32 sum in global memory and the output has 16 bits, the sum is in an additional array `A`.

`tiles` is any object with integer attributes Br and Bc. `block_mask` is a bool array of shape
(T_r, T_c), for the longest sequences, or with leading axes that broadcast to (batch, heads_q). It
must be given if and only if `problem.sparse` is True. Wrong arguments raise TypeError or
ValueError.

>>> from types import SimpleNamespace
>>> from fa_numba.problem import Problem
>>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
>>> print(fa2(problem, tiles))
array         loads     stores
Q                16          0
K                32          0
V                32          0
O                 0         16
L                 0          8
elements         80         24
bytes           320         96
"""

from fa_numba.io_model.accesses import ELEMENT_BYTES, Accesses
from fa_numba.io_model.count_fa1 import fa1, fa1_backward
from fa_numba.io_model.count_fa2 import fa2, fa2_backward, with_prefix
from fa_numba.io_model.count_softmax import check_softmax, softmax
from fa_numba.io_model.count_standard import standard, standard_backward
from fa_numba.io_model.paper_formulas import (
    fa1_paper,
    li_liang,
    saha_ye,
    theta_flash,
    theta_standard,
)
from fa_numba.io_model.ring import LinkTraffic, ring, ring_break_even, ring_messages
from fa_numba.io_model.visits import starts_in_first_pass, tiles_visited
from fa_numba.io_model.work import ALGORITHMS, PASSES, flops, multiply_adds, workspace
