"""Accesses of FlashAttention-2. Forward: Q outer, K/V inner. Backward: K/V outer, Q inner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fa_numba.checks import as_size
from fa_numba.dtypes import DTYPES, PRECISIONS
from fa_numba.io_model.accesses import Accesses, add_up, check_dbias, count, sink_gradients
from fa_numba.io_model.paging import table_reads
from fa_numba.io_model.planes import of_planes, rows_loaded
from fa_numba.io_model.turned import values_loaded, with_turned_values
from fa_numba.io_model.visits import columns_visited, visit_sums, whole_sums
from fa_numba.problem import BlockSizes, Problem


class _Block(NamedTuple):
    """The part of a row tile that belongs to one query head, if several heads share the tile.

    `Br` is the number of rows of the head in the tile. `Bc` is the number of columns of a tile.
    """

    Br: int
    Bc: int


def fa2(
    problem: Problem, tiles: BlockSizes, *, block_mask: Any = None, tile_heads: int = 1,
    kv_splits: int = 1, threads: int = 0, key_pieces: tuple[int, ...] = (), boxes: bool = False,
) -> Accesses:  # fmt: skip
    """Return the accesses of FA-2 forward: Q outer, K/V inner.

    O and L are written once.

    Parameters
    ----------
    problem : Problem
        Sizes, dtype and masks of the call.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    block_mask : array_like of bool, optional
        Tiles that are computed; see the package's docstring.
    tile_heads : int, default 1
        Query heads that share a row tile. The row tile has B_r / tile_heads rows of each of these
        heads. Its thread block loads K and V once for all of these heads.
    kv_splits : int, default 1
        Thread blocks that share the columns of a row tile.
    threads : int, default 0
        Threads of a thread block that load K and V. Used with pages only.
    key_pieces : tuple of int, default ()
        Two numbers, used with pages only: how many neighbouring threads load one row of K together,
        and how many load one row of V together.
    boxes : bool, default False
        Whether planes are loaded in boxes of 64 columns, as Hopper's copy engine does.

    Returns
    -------
    Accesses
        Elements loaded and stored, by array. Stores of L are always counted, because the kernel
        always stores L.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, a number is not an integer or the block mask is not bool.
    ValueError
        If a size is below 1, the block mask has another shape, is missing for a sparse
        problem, or is given for another problem.

    Notes
    -----
    FlashAttention-2 Algorithm 1. Per head, with the symbols of `fa_numba.io_model`:

        array   loads             stores
        Q       N_q d             -
        K, V    sum c_j d each    -
        bias    sum r_i c_j       -
        O       -                 N_q' d
        L       -                 N_q'

    If all tiles are visited and N_q = N_k = N, then Q, K, V and O have (2 T_r + 2) N d accesses
    together.

    With n = `kv_splits` above 1, every thread block loads Qi. Each thread block stores its partial
    result of O in an array A, and its l and m. A second kernel loads and merges the partial
    results:

        array   loads             stores
        Q       n N_q d           -
        A       n N_q' d          n N_q' d
        l, m    n N_q' each       n N_q' each
        O       -                 N_q' d
        L       -                 N_q'

    If float32 is split in planes, rows of Q, K and V have more elements; see the module
    `fa_numba.io_model.planes`. For e4m3, V is stored by columns first; see the module
    `fa_numba.io_model.turned`.

    Pages of K and V in e4m3 are counted in elements of 16 bits, each of which contains two numbers.

    With pages the block table is read too, once for K and once for V; see
    `fa_numba.io_model.paging.table_reads`. If `problem` does not contain the lengths, because they
    are in GPU memory, the counts are for sequences that fill all pages of the block table. Shorter
    sequences have fewer accesses.

    Examples
    --------
    Two row tiles and two column tiles, 8 x 2 elements per matrix: both row tiles load K and V.

    >>> from types import SimpleNamespace
    >>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
    >>> fa2(problem, tiles).loads, fa2(problem, tiles).stores
    ({'Q': 16, 'K': 32, 'V': 32}, {'O': 16, 'L': 8})
    """
    kv_splits = as_size("kv_splits", kv_splits, axis=False)
    tile_heads = as_size("tile_heads", tile_heads, axis=False)
    d_v, head = problem.d_v, whole_sums(problem, tiles, problem.heads_q)
    block = _Block(tiles.Br // tile_heads, tiles.Bc)
    visits = visit_sums(problem, block, block_mask)
    columns, (row, row_v) = visits.columns // tile_heads, rows_loaded(problem, boxes=boxes)
    halved = 2 if problem.kv_dtype else 1  # two e4m3 are loaded as one element of 16 bits
    loads = {
        "Q": kv_splits * head.rows * row,
        "K": columns * row // halved,
        "V": values_loaded(problem, tiles, columns, visits.tiles) * row_v // halved,
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
    found = of_planes(problem, tiles, count(problem, loads | sums, results | sums), boxes=boxes)
    return with_turned_values(problem, tiles, found)


def with_prefix(
    problem: Problem, own: Accesses, prefix: Accesses, *, width: int, gathered: bool = False
) -> Accesses:
    """Return the accesses of FA-2 forward for sequences that all begin with one prefix.

    There are two passes. The first pass is over the keys of the prefix; its rows are the queries of
    all sequences. The second pass is over each sequence's own keys. A kernel then merges O and L of
    both passes.

    Parameters
    ----------
    problem : Problem
        The problem of the sequences' own keys.
    own : Accesses
        Accesses of the pass over each sequence's own keys.
    prefix : Accesses
        Accesses of the pass over the keys of the prefix.
    width : int
        Elements of a row that each thread of the merging kernel computes.
    gathered : bool, default False
        Whether a kernel first copies the queries of all sequences to one array. Per head it loads
        sum N_q d elements, counted as X, and stores sum N_q d elements, counted as `rows`. The sums
        are over the batch entries.

    Returns
    -------
    Accesses
        The sums over all kernels.

    Notes
    -----
    The parameters of the merging kernel are X and Y for the outputs O of the two passes, and LX and
    LY for L of the two passes. Per head, with N' the sum of N_q' over the batch entries, its
    accesses are

        array   loads             stores
        X, Y    N' d each         -
        LX, LY  N' d / width each -
        O       -                 N' d
        L       -                 N'

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> tiles = SimpleNamespace(Br=4, Bc=4)
    >>> one, both = Problem(2, 1, 1, 1, 8, 4), Problem(1, 1, 1, 2, 16, 4)
    >>> found = with_prefix(one, fa2(one, tiles), fa2(both, tiles), width=4)
    >>> found.loads["X"], found.loads["LX"], found.loads["K"]
    (8, 2, 128)
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
    dlse: bool = False, dsinks: bool = False, group_splits: int = 1, boxes: bool = False,
    adders: int = 1,
) -> Accesses:  # fmt: skip
    """Return the accesses of FA-2 backward: a kernel for D, then a grid over column tiles.

    Parameters
    ----------
    problem : Problem
        Sizes, dtype and masks of the call.
    tiles : object with Br and Bc
        Rows of a row tile, columns of a column tile.
    deterministic : bool, default False
        Whether a second kernel computes dQ, without atomic adds. Set it also for the unit "wgmma"
        with a head dimension above 128, which always has this second kernel.
    dq_tiles : object with Br and Bc, optional
        Tiles of the second kernel. Default: `tiles`.
    block_mask : array_like of bool, optional
        Tiles that are computed; see the package's docstring.
    dbias : bool, default False
        Whether the gradient of the bias is computed: sum r_i c_j atomic adds, each a load and a
        store.
    dlse : bool, default False
        Whether there is a gradient of L. The kernel of the row sums then loads dL and L, N_q
        elements each.
    dsinks : bool, default False
        Whether the gradient of `sinks` is computed. One more kernel then loads L and D, N_q
        elements each, and stores one element of dsinks per query head.
    group_splits : int, default 1
        Thread blocks that share the query rows of a column tile of a K/V head.
    boxes : bool, default False
        Whether planes are loaded in boxes of 64 columns, as Hopper's copy engine does.
    adders : int, default 1
        Number of atomic adds to each element of dQ per visited tile. It is 2 if the columns of a
        tile are divided between two warpgroups and each adds the product of its own columns.

    Returns
    -------
    Accesses
        Elements loaded and stored, by array.

    Raises
    ------
    TypeError
        If `tiles` has no Br and Bc, `group_splits` is not an integer or the block mask is not bool.
    ValueError
        If a size is below 1, the block mask has another shape, is missing for a sparse
        problem, or is given for another problem, or `dbias` is set for a problem without a bias.

    Notes
    -----
    FlashAttention-2 Algorithm 2. Per head, with the symbols of `fa_numba.io_model`:

        kernel       loads                                    stores
        row sums     O, dO: N_q d each                        D: N_q, zeros in dQ: N_q' d
        column tiles Q, dO: sum r_i d each                    -
                     L, D: sum r_i each                       -
                     bias: sum r_i c_j                        -
                     dQ: sum r_i d                            dQ: sum r_i d (atomic adds)

    and per K/V head N_k d loads of K and of V, and N_k' d stores of dK and of dV.

    In 16-bit dtypes, and for float32 in planes, dQ is summed in a float32 array A. The zeros and
    the atomic adds above are then accesses to A. One more kernel multiplies A by `scale` and stores
    it as dQ: N_q' d loads of A and N_q' d stores of dQ, per head. With `adders` above 1 there are
    `adders` times as many atomic adds.

    With planes, the kernel of the row sums loads dO in float32; these loads are counted as X. Rows
    of Q, K, V and dO have more elements; see the module `fa_numba.io_model.planes`.

    With `deterministic` there are no zeros, no atomic adds to dQ and no array A. Instead, a second
    kernel with a grid over row tiles computes dQ. Its accesses per head are

        loads        Q, dO: N_q d each, L, D: N_q each, K, V: sum c_j d each, bias: sum r_i c_j
        stores       dQ: N_q' d

    With n = `group_splits` above 1, a column tile of a K/V head has n thread blocks. Each thread
    block loads K and V, and stores its own parts of dK and dV in float32. One more kernel adds up
    the parts. Its loads of the parts are counted as A, and its stores of dK and dV are counted as
    dQ, because these are the names of its parameters. Per K/V head:

        loads        K, V: n N_k d each, A: 2 n N_k' d
        stores       dK, dV: n N_k' d each, dQ: 2 N_k' d

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> problem, tiles = Problem(1, 1, 1, 8, 8, 2), SimpleNamespace(Br=4, Bc=4)
    >>> fa2_backward(problem, tiles).stores
    {'D': 8, 'dQ': 48, 'dK': 16, 'dV': 16}
    """
    check_dbias(problem, dbias)
    splits = as_size("group_splits", group_splits, axis=False)
    (d, d_v), head = (problem.head_dim, problem.d_v), whole_sums(problem, tiles, problem.heads_q)
    shared = whole_sums(problem, tiles, problem.heads_k)
    visits = visit_sums(problem, tiles, block_mask)
    split = PRECISIONS[problem.precision].planes > 1
    kept = "dQ" if DTYPES[problem.dtype].sums_in_place and not split else "A"
    row, row_v = rows_loaded(problem, True, boxes)
    added = 0 if deterministic else adders * visits.rows * d
    adds = {kept: added, "dbias": visits.pairs if dbias else 0}

    of_lse = dict.fromkeys(("dL", "L"), head.rows if dlse else 0)
    row_sums = count(
        problem,
        {"O": head.rows * d_v, "X" if split else "dO": head.rows * d_v} | of_lse,
        {"D": head.rows, kept: 0 if deterministic else head.all_rows * d},
    )

    def loaded(rows: int, keys: int, pairs: int, row: int, row_v: int) -> dict[str, int]:
        """Return the loads of a kernel, by array.

        The kernel loads `rows` rows of Q and of dO, and `keys` rows of K and of V. With a bias, it
        loads `pairs` elements of the bias. A row of Q or K has `row` elements, and a row of V or dO
        has `row_v` elements.
        """
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
        return of_planes(problem, tiles, add_up(problem, parts), backward=True, boxes=boxes)
    summed = shared.all_columns * (d + d_v)
    parts.append(count(problem, {"A": splits * summed}, {"dQ": summed}))
    return replace(add_up(problem, parts), sums=("dK", "dV"))
