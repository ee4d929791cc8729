"""Accesses of FlashAttention-1: K/V outer, Q inner, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_numba.checks import as_size
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.io_model.accesses import Accesses, add_up, check_dbias, count, sink_gradients
from fa_numba.io_model.planes import of_planes, rows_loaded
from fa_numba.io_model.turned import values_loaded, with_turned_values
from fa_numba.io_model.visits import (
    rows_read,
    rows_started,
    starts_in_first_pass,
    visit_sums,
    whole_sums,
)
from fa_numba.problem import BlockSizes, Problem


def fa1(
    problem: Problem, tiles: BlockSizes, *, query_splits: int = 1, return_lse: bool = False,
    boxes: bool = False, block_mask: Any = None,
) -> Accesses:  # fmt: skip
    """Return the accesses of FA-1 forward: K/V outer, Q inner.

    O, l and m are read from global memory and written back in every pass over the rows.

    Parameters
    ----------
    problem : Problem
        Sizes, dtype and masks of the call.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    query_splits : int, default 1
        Thread blocks that share the rows of Q of one query head. Each thread block takes
        ceil(T_r / query_splits) consecutive row tiles of the longest sequence. A thread block
        without row tiles does nothing.
    return_lse : bool, default False
        Whether L = m + log l is stored. Then l and m are loaded once more, N_q' elements each, and
        N_q' elements of L are stored.
    boxes : bool, default False
        Whether the kernel moves complete boxes, as Hopper's copy engine does. Then the rows of a
        tile past `q_lens` are moved too. This applies to Q, and in 16-bit dtypes to O and its
        float32 sum A (see Notes). In packed sequences, a tile ends where its sequence ends. With
        `boxes`, and float32 split in planes, each row of a plane has its columns rounded up to a
        multiple of 64.
    block_mask : array_like of bool, optional
        Tiles that are computed; see the package's docstring.

    Returns
    -------
    Accesses
        Elements loaded and stored, by array.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, `query_splits` is not an integer or the block mask is not bool.
    ValueError
        If a size is below 1, the block mask has another shape, is missing for a sparse
        problem, or is given for another problem.

    Notes
    -----
    FlashAttention Algorithm 1. The pass over column tile 0 gives O, l and m their first values
    (line 2), and so it visits every row tile. Per head, with the symbols of `fa_numba.io_model`:

        array   loads                     stores
        Q       sum r_i d                 -
        K, V    sum_j s_j c_j d each      -
        bias    sum r_i c_j               -
        O       sum_{j>0} r_i d           sum r_i d
        l, m    sum_{j>0} r_i each        sum r_i each

    Here s_j is the number of query splits that visit at least one tile of column tile j. The sums
    over j > 0 leave out column tile 0, because its pass loads no O, l and m. If all tiles are
    visited, with one query split and N_q = N_k = N, then Q, K, V and O have (3 T_c + 1) N d
    accesses together.

    With a window, `q_lens` or a block mask, the kernel executes line 2 as a separate step before
    the pass over column tile 0 (`starts_in_first_pass` is False). There are two cases:

    - A window or `q_lens`, and no block mask: line 2 stores N_q' d elements of O, and N_q' elements
      each of l and m. The sums over j > 0 become sums over all j.
    - A block mask: line 2 stores only the rows of row tiles that are never visited, and of row
      tiles in which `q_lens` ends. Each sum over j > 0 becomes a sum over all visits of a row tile
      except its first visit.

    In 16-bit dtypes O is kept in a float32 array A. The last visit of a row tile rounds it to O:

        array   loads                     stores
        A       the loads of O above      r_i d in every visit of row tile i but the last
        O       -                         r_i d in the last visit of row tile i

    With a window or `q_lens` and no block mask, line 2 stores N_q' d elements of A too. With a
    block mask it does not store A.

    If float32 is split in planes, rows of Q, K and V have more elements; see the module
    `fa_numba.io_model.planes`. For e4m3, V is stored by columns first; see the module
    `fa_numba.io_model.turned`.

    Examples
    --------
    There are two row tiles, two column tiles and 8 x 2 elements per matrix. Q is loaded in both
    passes, and O is loaded in the second pass only.

    >>> from types import SimpleNamespace
    >>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
    >>> fa1(problem, tiles).loads
    {'Q': 32, 'K': 16, 'V': 16, 'O': 16, 'l': 8, 'm': 8}
    """
    splits = as_size("query_splits", query_splits, axis=False)
    d_v, head = problem.d_v, whole_sums(problem, tiles, problem.heads_q)
    run = ceil_div(problem.seqlen_q, tiles.Br * splits)
    starts = starts_in_first_pass(problem)
    visits = visit_sums(problem, tiles, block_mask, takes_all=starts)
    whole = boxes and not problem.packed
    moved = visit_sums(problem, tiles, block_mask, takes_all=starts, whole=whole)
    by_split = visit_sums(problem, tiles, block_mask, takes_all=starts, run=run)

    row, row_v = rows_loaded(problem, boxes=boxes)
    read, started = rows_read(problem, visits), rows_started(problem, visits, head)
    written = visits.rows + started
    lse = head.all_rows if return_lse else 0
    kept, out = ("O", visits) if DTYPES[problem.dtype].sums_in_place else ("A", moved)
    loads = {
        "Q": moved.rows * row,
        "K": by_split.columns * row,
        "V": values_loaded(problem, tiles, by_split.columns, by_split.tiles) * row_v,
        "bias": visits.pairs if problem.bias else 0,
        kept: rows_read(problem, out) * d_v,
        "l": read + lse,
        "m": read + lse,
    }
    stores = {kept: (out.rows + started) * d_v, "l": written, "m": written, "L": lse}
    if kept == "A":
        stores["A"] -= (moved.rows_once + started * problem.sparse) * d_v
        stores["O"] = (moved.rows_once + started) * d_v
    found = of_planes(problem, tiles, count(problem, loads, stores), boxes=boxes)
    return with_turned_values(problem, tiles, found)


def fa1_backward(
    problem: Problem, tiles: BlockSizes, *, query_splits: int = 1, block_mask: Any = None,
    dbias: bool = False, dlse: bool = False, dsinks: bool = False,
) -> Accesses:  # fmt: skip
    """Return the accesses of FA-1 backward: K/V outer, Q inner.

    dQ is read from global memory and written back in every pass over the rows.

    Parameters
    ----------
    problem : Problem
        Sizes, dtype and masks of the call.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    query_splits : int, default 1
        Thread blocks that share the rows of Q of one K/V head. Each thread block takes
        ceil(T_r / query_splits) consecutive row tiles of every query head of the K/V head.
    block_mask : array_like of bool, optional
        Tiles that are computed; see the package's docstring.
    dbias : bool, default False
        Whether the gradient of the bias is computed: sum r_i c_j atomic adds, each a load and a
        store.
    dlse : bool, default False
        Whether there is a gradient of L: dL is loaded as often as L.
    dsinks : bool, default False
        Whether the gradient of `sinks` is computed. Two more kernels run. The first kernel computes
        the row sums D: it loads N_q d elements each of O and dO, and with `dlse` N_q elements each
        of dL and L. It stores N_q elements of D. The second kernel loads N_q elements each of L and
        D, and stores one element of dsinks per query head.

    Returns
    -------
    Accesses
        Elements loaded and stored, by array.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, `query_splits` is not an integer or the block mask is not bool.
    ValueError
        If a size is below 1, the block mask has another shape, is missing for a sparse
        problem, or is given for another problem, or `dbias` is set for a problem without a bias.

    Notes
    -----
    FlashAttention Algorithm 4. The pass over column tile 0 gives dQ its first values (line 5), and
    so it visits every row tile. Per head, with the symbols of `fa_numba.io_model`:

        array     loads                   stores
        Q, O, dO  sum r_i d each          -
        L         sum r_i                 -
        bias      sum r_i c_j             -
        dQ        sum_{j>0} r_i d         sum r_i d

    and per K/V head N_k d loads of K and of V, and N_k' d stores of dK and of dV.

    With a window, `q_lens` or a block mask, line 5 runs before the pass over column tile 0. Line 5
    then stores as many rows of dQ as line 2 stores of O in `fa1`. The sum over j > 0 changes as
    described in the notes of `fa1`. In 16-bit dtypes dQ is kept in a float32 array A, and the last
    visit of a row tile rounds A to dQ.

    With `query_splits` above 1, each thread block of a K/V head loads K and V, and adds to dK and
    dV with N_k' d atomic adds each. In 16-bit dtypes these additions go to float32 sums of dK and
    dV. One more kernel is launched for each of the two sums, to round the sum. Together, the two
    launches load 2 N_k' d elements and store 2 N_k' d elements per K/V head. The loads are counted
    under the name A and the stores under the name dQ, because these are the names of the kernel's
    parameters.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
    >>> fa1_backward(problem, tiles).stores
    {'dQ': 32, 'dK': 16, 'dV': 16}
    """
    check_dbias(problem, dbias)
    splits = as_size("query_splits", query_splits, axis=False)
    (d, d_v), head = (problem.head_dim, problem.d_v), whole_sums(problem, tiles, problem.heads_q)
    shared = whole_sums(problem, tiles, problem.heads_k)
    starts = starts_in_first_pass(problem)
    visits = visit_sums(problem, tiles, block_mask, takes_all=starts)
    run = ceil_div(problem.seqlen_q, tiles.Br * splits)
    runs = ceil_div(problem.seqlen_q, tiles.Br * run)

    read, started = rows_read(problem, visits), rows_started(problem, visits, head)
    kept = "dQ" if DTYPES[problem.dtype].sums_in_place else "A"
    dbias_adds = {"dbias": visits.pairs if dbias else 0}
    loads = {
        "Q": visits.rows * d,
        "O": visits.rows * d_v,
        "dO": visits.rows * d_v,
        "L": visits.rows,
        "dL": visits.rows if dlse else 0,
        "bias": visits.pairs if problem.bias else 0,
        kept: read * d,
        "K": runs * shared.columns * d,
        "V": runs * shared.columns * d_v,
    }
    stores = {
        kept: (visits.rows + started) * d,
        "dK": runs * shared.all_columns * d,
        "dV": runs * shared.all_columns * d_v,
    }
    if kept == "A":
        stores["A"] -= (visits.rows_once + started * problem.sparse) * d
        stores["dQ"] = (visits.rows_once + started) * d
    parts = [count(problem, loads | dbias_adds, stores | dbias_adds)]
    if dsinks:
        parts += sink_gradients(problem, head.rows, dlse, has_d=False)
    if splits == 1:
        return add_up(problem, parts)
    sums = {name: stores[name] for name in ("dK", "dV")}
    parts.append(count(problem, sums, {}))
    if kept == "dQ":
        return add_up(problem, parts)
    rounded = shared.all_columns * (d + d_v)
    parts.append(count(problem, {"A": rounded}, {"dQ": rounded}))
    return replace(add_up(problem, parts), sums=("dK", "dV"))
