"""FLOPs by the papers' convention, and the workspace that a call needs."""

from __future__ import annotations

import math
from typing import Any

from fa_numba.checks import as_size, check_name
from fa_numba.dtypes import CHUNK_BYTES, DTYPES, PRECISIONS
from fa_numba.integers import round_up
from fa_numba.io_model.accesses import ELEMENT_BYTES
from fa_numba.io_model.planes import rows_loaded
from fa_numba.io_model.turned import elements_of_turned
from fa_numba.io_model.visits import ALGORITHMS, PASSES, blocks_of, distinct_heads
from fa_numba.problem import Problem


def flops(problem: Problem, passes: str = "fwd", *, block_mask: Any = None) -> int:
    """Return the FLOPs of a call by the papers' convention, which counts matrix products only.

    Parameters
    ----------
    problem : Problem
        Sizes and masks.
    passes : {"fwd", "bwd", "fwd+bwd"}, default "fwd"
        The pass or passes.
    block_mask : array_like of bool, optional
        Blocks that are computed. The mask may have any number of blocks along each axis. It must be
        given if and only if the problem is sparse.

    Returns
    -------
    int
        FLOPs, rounded down.

    Raises
    ------
    TypeError
        If the block mask is not bool.
    ValueError
        If `passes` has another value, or the block mask does not fit.

    Notes
    -----
    FlashAttention-2 section 4.1: the forward pass has 4 N_q N_k d FLOPs per query head and batch
    entry. The backward pass has 2.5 times as many, both passes together 3.5 times as many. N_q and
    N_k are the numbers of rows and columns, d is the head dimension. If V has another head
    dimension, see `multiply_adds`. A causal mask halves the number.

    The convention is for comparing speeds. It is not a count of operations. With a window, causal
    or not, N_q N_k is replaced by the exact number of (row, column) pairs inside the window. A
    block mask multiplies the number of a head by the share of blocks that the mask keeps. This
    share is of all blocks, including blocks that other masks hide.

    Examples
    --------
    >>> flops(Problem(1, 1, 1, 1024, 1024, 64)) == 4 * 1024**2 * 64
    True
    >>> flops(Problem(1, 1, 1, 1024, 1024, 64, causal=True), "bwd") == 5 * 1024**2 * 64
    True
    """
    check_name("passes", passes, PASSES)
    blocks = blocks_of(problem, block_mask)
    halved = problem.causal and problem.window == (-1, -1)
    factor = (1 if halved else 2) * multiply_adds(problem, passes)
    pairs = 0  # (row, column) pairs, times the number of kept blocks with a block mask
    for entry, mask, count in distinct_heads(problem, blocks):
        pairs += count * _pairs(problem, entry) * (1 if mask is None else int(mask.sum()))
    return factor * pairs // (1 if blocks is None else blocks[0, 0].size)


def multiply_adds(problem: Problem, passes: str) -> int:
    """Return the number of multiply-adds for one element of S: one row and one column.

    The products for S, dQ and dK need d multiply-adds each, where d is the head dimension of Q and
    K. The products for O, dP and dV need d_v each, where d_v is the head dimension of V.

    Parameters
    ----------
    problem : Problem
        The problem; its head dimensions are used.
    passes : {"fwd", "bwd", "fwd+bwd"}
        The pass or passes.

    Returns
    -------
    int
        The number: d + d_v forward, 3 d + 2 d_v backward, the sum for both.

    Examples
    --------
    >>> multiply_adds(Problem(1, 1, 1, 8, 8, 64), "fwd+bwd")
    448
    """
    d, d_v = problem.head_dim, problem.d_v
    of_pass = {"fwd": d + d_v, "bwd": 3 * d + 2 * d_v}
    return sum(of_pass[name] for name in passes.split("+"))


def _pairs(problem: Problem, entry: int) -> int:
    """Return the number of (row, column) pairs that the masks `causal` and `window` do not hide.

    `entry` is the batch entry whose rows and columns are counted.
    """
    Nq, Nk = problem.lengths(entry)
    if problem.window == (-1, -1):
        return Nq * Nk

    def summed(offset: int) -> int:
        """Return the sum, over all rows i, of the number of columns j < i + offset.

        This is the sum of min(max(i + offset, 0), N_k).
        """

        def below(end: int) -> int:
            """Return the sum of min(max(n, 0), N_k) over all n < `end`."""
            rising = min(max(end, 0), Nk)
            return rising * (rising - 1) // 2 + max(end - Nk, 0) * Nk

        return below(Nq + offset) - below(offset)

    # The same limits as in Problem.columns_begin and columns_end, without an array of rows.
    ends = Nq * Nk if problem.right is None else summed(Nk - Nq + problem.right + 1)
    begins = 0 if problem.left is None else summed(Nk - Nq - problem.left)
    return ends - begins


def workspace(
    algorithm: str, problem: Problem, *, return_lse: bool = False, passes: str = "fwd",
    deterministic: bool = False, query_splits: int = 1, kv_splits: int = 1, group_splits: int = 1,
) -> int:  # fmt: skip
    """Return the bytes of workspace that a call needs in addition to its inputs and outputs.

    Parameters
    ----------
    algorithm : str
        "standard", "fa1" or "fa2".
    problem : Problem
        Sizes, dtype and precision.
    return_lse : bool, default False
        Whether L is an output of the forward pass. If so, L is not part of the workspace.
    passes : {"fwd", "bwd"}, default "fwd"
        The pass.
    deterministic : bool, default False
        Whether FA-2's backward pass computes dQ by a second kernel, without atomic adds. Set it
        also for the unit "wgmma" with a head dimension above 128, which always has this kernel.
    query_splits : int, default 1
        Thread blocks of FA-1 that share the rows of Q of one query head (forward) or of one K/V
        head (backward).
    kv_splits : int, default 1
        Thread blocks of FA-2 forward that share the columns of a row tile.
    group_splits : int, default 1
        Thread blocks of FA-2 backward that share a column tile of a K/V head.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    TypeError
        If a number of splits is not an integer.
    ValueError
        If a name is not allowed, or a number of splits is below 1.

    Notes
    -----
    The workspace contains these arrays:

        algorithm  passes  array      bytes              in which calls
        standard   fwd     S or P     see below          all; P overwrites S
        standard   bwd     P          see below          all
        standard   bwd     dP or dS   see below          all; dS overwrites dP
        fa1        fwd     l and m    8 R                all
        fa1        fwd     A          4 R d              dtypes of 16 bits
        fa1        bwd     A          4 R d              dtypes of 16 bits
        fa2        fwd     L          4 R                calls without `return_lse`
        fa2        bwd     D          4 R                all
        fa2        bwd     A          4 R d              dtypes of 16 bits, and float32 in planes;
                                                         not with `deterministic`

    R is the number of rows of Q over all heads: B H N_q', and for packed sequences H times the
    total number of rows. A is the float32 sum of O in the forward pass, and of dQ in the backward
    pass. d is the head dimension, rounded up to a multiple of 2. For O, d is the head dimension of
    V. S, P, dP and dS have B H N_q N_k elements of the problem's dtype, where N_q and N_k are the
    lengths of the longest sequences. The bytes of each row are rounded up to a multiple of 16. All
    other arrays are float32.

    Some arguments add to these numbers:

    - With `query_splits` above 1, FA-1 backward in 16 bits also needs float32 sums of dK and dV:
      4 d bytes for each row of dK and of dV, with d rounded up as for A.
    - With `kv_splits` above 1, FA-2 forward also needs A for O and 8 R bytes for l and m, for each
      split.
    - With `group_splits` above 1, FA-2 backward (which then is in 16 bits) also needs float32 parts
      of dK and dV for each split: 4 d bytes for each row of dK and of dV, with d rounded up as for
      A.
    - If float32 is split in n planes, FA-1 forward and both passes of FA-2 also need 2 n d' bytes
      for each row of Q, K and V. The backward pass needs them for each row of dO, too. d' is d
      rounded up to a multiple of 16; `fa_numba.io_model.planes.rows_loaded` says when it is rounded
      up to 32. With ``precision="fp16x3"``, 516 bytes are added for each head of these matrices,
      for their scales.

    Four uses of memory are not included:

    - With `return_dsinks`, the backward passes of "standard" and "fa1" also need 4 R bytes for D.
    - On the unit "wgmma", planes have d rounded up to a multiple of 64.
    - On the unit "wgmma", FA-2's forward pass may need a counter of 4 bytes.
    - On the unit "wgmma", FA-2's backward pass in 16 bits may have the rows of A rounded up to a
      multiple of 16 per head.

    Examples
    --------
    >>> problem = Problem(1, 2, 2, 1024, 1024, 64, dtype="float16")
    >>> [workspace(name, problem) for name in ("standard", "fa1", "fa2")]
    [4194304, 540672, 8192]
    """
    check_name("algorithm", algorithm, ALGORITHMS)
    check_name("passes", passes, PASSES[:2])
    query_splits = as_size("query_splits", query_splits, axis=False)
    kv_splits = as_size("kv_splits", kv_splits, axis=False)
    group_splits = as_size("group_splits", group_splits, axis=False)
    if algorithm == "standard":
        *rows_of_scores, Nk = problem.score_shape
        matrices = 1 if passes == "fwd" else 2
        row_bytes = round_up(DTYPES[problem.dtype].bytes * Nk, CHUNK_BYTES)
        return matrices * math.prod(rows_of_scores) * row_bytes
    rows = math.prod(problem.lse_shape)
    split = PRECISIONS[problem.precision].planes > 1 and passes == "bwd"
    in_place = DTYPES[problem.dtype].sums_in_place and not split
    kept = 0 if in_place else round_up(problem.d_v if passes == "fwd" else problem.head_dim, 2)
    if passes == "bwd":
        keys = math.prod(problem.k_shape[:-1])
        kept_v = 0 if in_place else round_up(problem.d_v, 2)
        if algorithm == "fa2":
            of_queries = rows * (1 if deterministic else 1 + kept)
            of_parts = group_splits * keys * (kept + kept_v) if group_splits > 1 else 0
            return ELEMENT_BYTES * (of_queries + of_parts) + _planes(problem, rows, True)
        keys = keys if query_splits > 1 else 0
        return ELEMENT_BYTES * (rows * kept + keys * (kept + kept_v))
    if algorithm == "fa1":
        others = _planes(problem, rows) + elements_of_turned(problem)
        return ELEMENT_BYTES * rows * (2 + kept) + others
    of_splits = kv_splits * (round_up(problem.d_v, 2) + 2) if kv_splits > 1 else 0
    found = ELEMENT_BYTES * rows * (of_splits + (0 if return_lse else 1))
    return found + _planes(problem, rows) + elements_of_turned(problem)


def _planes(problem: Problem, rows: int, backward: bool = False) -> int:
    """Return the bytes of the planes of Q, K and V, and in the backward pass of dO.

    `rows` is the number of rows of Q over all heads. The result is 0 without planes.
    """
    precision = PRECISIONS[problem.precision]
    if precision.planes == 1:
        return 0
    batch = 1 if problem.packed else problem.batch
    times = 2 if backward else 1
    heads = batch * (times * problem.heads_q + 2 * problem.heads_k)
    keys = math.prod(problem.k_shape[:-1])
    row, row_v = rows_loaded(problem, backward)
    elements = (rows + keys) * row + (keys + (rows if backward else 0)) * row_v
    return 2 * elements + (heads * 4 * 129 if precision.scaled else 0)
