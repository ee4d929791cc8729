"""Accesses of FlashAttention-2: Q outer, K/V inner; backward a grid over K/V blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fa_numba.checks import as_size
from fa_numba.dtypes import DTYPES, PRECISIONS
from fa_numba.io_model.accesses import Accesses, add_up, check_dbias, count, sink_gradients
from fa_numba.io_model.paging import table_reads
from fa_numba.io_model.planes import of_planes, rows_loaded
from fa_numba.io_model.visits import columns_visited, visit_sums, whole_sums
from fa_numba.problem import BlockSizes, Problem


class _Block(NamedTuple):
    Br: int
    Bc: int


def fa2(
    problem: Problem, tiles: BlockSizes, *, block_mask: Any = None, tile_heads: int = 1,
    kv_splits: int = 1, threads: int = 0, key_pieces: tuple[int, ...] = (), panels: bool = False,
) -> Accesses:  # fmt: skip
    """Accesses of FA-2's Algorithm 1: Q outer, K/V inner; O written once.

    Per head:
        loads   Q: N_q d    K, V: sum c_j d each    bias: sum r_i c_j
        stores  O: N_q' d    L: N_q'
    All visited, N_q = N_k = N: Q, K, V and O together are (2 T_r + 2) N d. L is always stored.

    With `tile_heads` so many heads share a tile, which has B_r / tile_heads rows of each: K and V
    are loaded once for all of them.

    With `kv_splits` S above 1 so many blocks share the columns of a row tile, each loads Qi, and
    O leaves through A, and m and l in place of L:
        loads   Q: S N_q d    K, V, bias as above    A: S N_q' d    l, m: S N_q' each
        stores  A: S N_q' d    l, m: S N_q' each    O: N_q' d    L: N_q'

    Where float32 is split in planes a row of Q, K or V has more elements (`planes`), the more on
    Hopper's unit, which takes `panels`.

    With pages the block table is read beside, for K and for V (`paging.table_reads`): of a block
    `threads` threads load, and `key_pieces` neighbouring ones share a row of K, and of V. Where
    the lengths are on the device, the numbers are of sequences as long as the table has pages for.
    """
    kv_splits = as_size("kv_splits", kv_splits, axis=False)
    tile_heads = as_size("tile_heads", tile_heads, axis=False)
    d_v, head = problem.d_v, whole_sums(problem, tiles, problem.heads_q)
    block = _Block(tiles.Br // tile_heads, tiles.Bc)
    visits = visit_sums(problem, block, block_mask)
    columns, (row, row_v) = visits.columns // tile_heads, rows_loaded(problem, panels=panels)
    loads = {
        "Q": kv_splits * head.rows * row,
        "K": columns * row,
        "V": columns * row_v,
        "bias": visits.pairs if problem.bias else 0,
    }
    if problem.page_size is not None:
        reads = sum(
            times * table_reads(c, tiles.Bc, problem.page_size, threads, pieces)
            for c, times in columns_visited(problem, block, block_mask).items()
            for pieces in key_pieces
        )
        loads["block_table"] = reads // tile_heads
    rows = head.all_rows
    results, sums = {"O": rows * d_v, "L": rows}, {}
    if kv_splits > 1:
        sums = {"A": kv_splits * rows * d_v, "l": kv_splits * rows, "m": kv_splits * rows}
    return of_planes(problem, tiles, count(problem, loads | sums, results | sums), panels=panels)


def with_prefix(
    problem: Problem, own: Accesses, prefix: Accesses, *, width: int, gathered: bool = False
) -> Accesses:
    """Accesses of FA-2 forward where all sequences begin with one prefix: of the pass over each
    sequence's ``own`` keys; of the one over those of the ``prefix``, whose rows are the queries of
    all, N' = sum N_q' a head; and of what merges O and L of both, ``width`` elements a thread.

    Per head the last
        loads  X, Y: N' d each    LX, LY: N' d / width each    stores  O: N' d    L: N'
    and where queries are ``gathered`` before, sum N_q d loads of X and stores of rows.
    """
    valid = sum(problem.lengths(b)[0] for b in range(problem.batch)) * problem.heads_q
    rows = valid if problem.packed else problem.heads_q * problem.batch * problem.seqlen_q
    n, taken = rows * problem.d_v, valid * problem.head_dim
    merged = {"X": n, "Y": n, "LX": n // width, "LY": n // width}
    parts = [prefix, own, count(problem, merged, {"O": n, "L": rows})]
    if gathered:
        parts.append(count(problem, {"X": taken}, {"rows": taken}))
    single = DTYPES[problem.dtype].sums_in_place
    halves = (*own.halves, *(() if single else ("X", "Y", "rows")))
    return replace(add_up(problem, parts), halves=halves)


def fa2_backward(
    problem: Problem, tiles: BlockSizes, *, deterministic: bool = False,
    dq_tiles: BlockSizes | None = None, block_mask: Any = None, dbias: bool = False,
    dlse: bool = False, dsinks: bool = False, group_splits: int = 1, panels: bool = False,
    adders: int = 1,
) -> Accesses:  # fmt: skip
    """Accesses of FA-2's Algorithm 2: D first, then a grid over K/V blocks.

    Per head:
        row sums      loads O, dO: N_q d each           stores D: N_q, dQ = 0: N_q' d
        the K/V grid  loads Q, dO: sum r_i d each, L, D: sum r_i each, bias: sum r_i c_j
                      dQ: sum r_i d atomic adds, each a load and a store
    and per K/V head K, V loaded, N_k d each, and dK, dV stored, N_k' d each. `dbias` adds
    sum r_i c_j atomic adds to dbias, each a load and a store; with `dlse` the row sums load dL and
    L, N_q each. `dsinks` loads L and D, N_q each, for dsinks, one a head.

    In 16 bits, and of float32 in planes, which Hopper's unit takes in `panels`, dQ is summed in a
    float32 array `A`, `adders` of a block each adding its columns' part, and then rounded:
        loads  A: N_q' d    stores  dQ: N_q' d

    `deterministic` goes without the atomic adds to dQ, its zeros and its rounding: a kernel of
    its own, a grid over Q blocks (of `dq_tiles`, or the same) makes dQ. Per head it
        loads  Q, dO: N_q d each, L, D: N_q each, K, V: sum c_j d each, bias: sum r_i c_j
        stores dQ: N_q' d

    With `group_splits` S above 1 so many blocks share the query rows of a K/V head. Each loads K
    and V and stores its parts of dK and dV, which are float32 and are then added up. Per K/V head:
        loads  K, V: S N_k d each    A: 2 S N_k' d
        stores  dK, dV: S N_k' d each    dQ: 2 N_k' d (its parameters' names, for parts and sums)
    """
    check_dbias(problem, dbias)
    splits = as_size("group_splits", group_splits, axis=False)
    (d, d_v), head = (problem.head_dim, problem.d_v), whole_sums(problem, tiles, problem.heads_q)
    shared = whole_sums(problem, tiles, problem.heads_k)
    visits = visit_sums(problem, tiles, block_mask)
    split = PRECISIONS[problem.precision].planes > 1
    kept = "dQ" if DTYPES[problem.dtype].sums_in_place and not split else "A"
    row, row_v = rows_loaded(problem, True, panels)
    added = 0 if deterministic else adders * visits.rows * d
    adds = {kept: added, "dbias": visits.pairs if dbias else 0}

    of_lse = dict.fromkeys(("dL", "L"), head.rows if dlse else 0)
    row_sums = count(
        problem,
        {"O": head.rows * d_v, "X" if split else "dO": head.rows * d_v} | of_lse,
        {"D": head.rows, kept: 0 if deterministic else head.all_rows * d},
    )

    def loaded(rows: int, keys: int, pairs: int, row: int, row_v: int) -> dict[str, int]:
        """Of so many rows of Q and keys, as long as ``row``, or of V ``row_v``."""
        of_rows = {"Q": rows * row, "dO": rows * row_v, "L": rows, "D": rows}
        return of_rows | {"K": keys * row, "V": keys * row_v, "bias": pairs if problem.bias else 0}

    over_columns = count(
        problem,
        loaded(visits.rows, splits * shared.columns, visits.pairs, row, row_v) | adds,
        {"dK": splits * shared.all_columns * d, "dV": splits * shared.all_columns * d_v} | adds,
    )
    parts = [row_sums, over_columns]
    if dsinks:
        parts += sink_gradients(problem, head.rows)
    if deterministic:
        of_dq = visit_sums(problem, dq_tiles or tiles, block_mask)
        loads = loaded(head.rows, of_dq.columns, of_dq.pairs, d, d_v)
        parts.append(count(problem, loads, {"dQ": head.all_rows * d}))
    elif kept == "A":
        rounded = head.all_rows * d
        parts.append(count(problem, {"A": rounded}, {"dQ": rounded}))
    if splits == 1:
        return of_planes(problem, tiles, add_up(problem, parts), backward=True, panels=panels)
    summed = shared.all_columns * (d + d_v)
    parts.append(count(problem, {"A": splits * summed}, {"dQ": summed}))
    return replace(add_up(problem, parts), sums=("dK", "dV"))
