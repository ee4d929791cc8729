"""Accesses of FlashAttention-1: K/V outer, Q inner, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_numba.checks import as_size
from fa_numba.dtypes import DTYPES
from fa_numba.integers import ceil_div
from fa_numba.io_model.accesses import Accesses, add_up, check_dbias, count, sink_gradients
from fa_numba.io_model.planes import of_planes, rows_loaded
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
    whole_tiles: bool = False, block_mask: Any = None,
) -> Accesses:  # fmt: skip
    """Accesses of FA-1's Algorithm 1: K/V outer, Q inner; O, l and m through global memory.

    The pass over column tile 0 starts O, l and m (line 2) and so visits every row tile. Per head:
        loads   Q: sum r_i d    K, V: sum_j s_j c_j d each    bias: sum r_i c_j
                O: sum_{j>0} r_i d    l, m: sum_{j>0} r_i each (the initial values need no read)
        stores  O: sum r_i d    l, m: sum r_i each
    with s_j the query splits that have a row tile which column tile j visits. All visited, one
    split, N_q = N_k = N: Q, K, V and O together are (3 T_c + 1) N d.

    With a window, `q_lens` or a block mask that pass is like the others (`starts_in_first_pass`).
    Line 2 is then carried out before it, which stores O N_q' d and l and m N_q' each, and the sums
    over "j > 0" are over all j. With a block mask that is so of rows alone that are in no visited
    tile, or in one that `q_lens` ends in, and the sums are over all j but each row tile's first.

    `query_splits` blocks share a head: each takes a run of ceil(T_r / query_splits) row tiles of
    the longest sequence; one without tiles does nothing. `return_lse` adds L = m + log l: l and m
    loaded once more, N_q' each, and L stored.

    In 16 bits O is kept in a float32 array `A`, and the last visit of a row tile rounds it to O:
        loads   A: what O loads above
        stores  O: r_i d in row tile i's last visit    A: r_i d in each of the others
    and where line 2 stores O it stores A too, N_q' d each, without a block mask.

    Where float32 is split in planes a row of Q, K or V has more elements (`planes`).

    With `whole_tiles` a row tile of Q, and in 16 bits of O and A, is moved whole, also the rows
    past `q_lens`: what the copy engine does, by panels of 64 columns of planes. It ends where a
    packed sequence does.
    """
    splits = as_size("query_splits", query_splits, axis=False)
    d_v, head = problem.d_v, whole_sums(problem, tiles, problem.heads_q)
    run = ceil_div(problem.seqlen_q, tiles.Br * splits)
    starts = starts_in_first_pass(problem)
    visits = visit_sums(problem, tiles, block_mask, takes_all=starts)
    whole = whole_tiles and not problem.packed
    moved = visit_sums(problem, tiles, block_mask, takes_all=starts, whole=whole)
    by_split = visit_sums(problem, tiles, block_mask, takes_all=starts, run=run)

    row, row_v = rows_loaded(problem, panels=whole_tiles)
    read, started = rows_read(problem, visits), rows_started(problem, visits, head)
    written = visits.rows + started
    lse = head.all_rows if return_lse else 0
    kept, out = ("O", visits) if DTYPES[problem.dtype].sums_in_place else ("A", moved)
    loads = {
        "Q": moved.rows * row,
        "K": by_split.columns * row,
        "V": by_split.columns * row_v,
        "bias": visits.pairs if problem.bias else 0,
        kept: rows_read(problem, out) * d_v,
        "l": read + lse,
        "m": read + lse,
    }
    stores = {kept: (out.rows + started) * d_v, "l": written, "m": written, "L": lse}
    if kept == "A":
        stores["A"] -= (moved.rows_once + started * problem.sparse) * d_v
        stores["O"] = (moved.rows_once + started) * d_v
    return of_planes(problem, tiles, count(problem, loads, stores), panels=whole_tiles)


def fa1_backward(
    problem: Problem, tiles: BlockSizes, *, query_splits: int = 1, block_mask: Any = None,
    dbias: bool = False, dlse: bool = False, dsinks: bool = False,
) -> Accesses:  # fmt: skip
    """Accesses of FA-1's Algorithm 4: K/V outer, Q inner; dQ through global memory in every pass.

    The pass over column tile 0 starts dQ (line 5) and so visits every row tile. Per head:
        loads   Q, O, dO: sum r_i d each    L: sum r_i    bias: sum r_i c_j
                dQ: sum_{j>0} r_i d (line 5's zeros need no read)
        stores  dQ: sum r_i d
    and per K/V head K, V loaded, N_k d each, and dK, dV stored, N_k' d each. `dbias` adds
    sum r_i c_j atomic adds to dbias, each a load and a store, `dlse` loads dL as L. `dsinks` adds
    FA-2's row sums, which store D, N_q, and loads L and D, N_q each, for dsinks, one a head.

    With a window, `q_lens` or a block mask that pass is like the others, as in `fa1`: line 5 then
    stores dQ as line 2 stores O there, and the sum over "j > 0" is as there. In 16 bits dQ is kept
    in a float32 array `A`, and the last visit of a row tile rounds it to dQ, as O there.

    `query_splits` blocks share the row tiles of a head as there. Each loads K and V and adds to
    dK and dV, N_k' d atomic adds each; in 16 bits to float32 sums, which one more kernel rounds:
        loads  A: 2 N_k' d    stores  dQ: 2 N_k' d (its parameters' names, for dK and dV)
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
