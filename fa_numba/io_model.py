"""Global-memory accesses, FLOPs and workspace in closed form.

Three kinds of numbers, not to be mixed:
- `standard`, `fa1`, `fa2`, and these names with `_backward`: exact loads and stores of this
  package's kernels, per array, in elements. Ragged edges and skipped causal tiles count as what
  they are.
- `theta_standard`, `theta_flash`, `saha_ye`: the published bounds with every constant set to 1.
- `standard_paper`, `fa1_paper`, `flops`: how the papers themselves count.

Below: N_q, N_k sequence lengths, d head dimension, B H = batch x query heads, T_r = ceil(N_q/B_r),
T_c = ceil(N_k/B_c), r_i and c_j the rows and columns of row tile i and column tile j. A query head
loads the K/V head it shares with others for itself, unless it says "per K/V head", of which there
are B H_k. No kernel is imported here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .problem import Problem, as_size

ALGORITHMS = ("standard", "fa1", "fa2")
PASSES = ("fwd", "bwd", "fwd+bwd")

ELEMENT_BYTES = 4  # float32, the kernels' element
PAPER_BYTES = 2  # fp16, what FA-1 Fig. 2 counts


class TileSizes(Protocol):
    """Anything with the block sizes: rows of Q, and of K and V, in one tile."""

    @property
    def Br(self) -> int: ...
    @property
    def Bc(self) -> int: ...


@dataclass(frozen=True)
class Accesses:
    """Global-memory loads and stores of one call, in elements by array (Q K V O L l m S P ...).

    An array goes by the name of the kernel's parameter. An atomic add is a load and a store.

    An array that is never loaded (or stored) is left out of `loads` (or `stores`).
    """

    loads: dict[str, int]
    stores: dict[str, int]

    @property
    def total_loads(self) -> int:
        return sum(self.loads.values())

    @property
    def total_stores(self) -> int:
        return sum(self.stores.values())

    @property
    def total(self) -> int:
        return self.total_loads + self.total_stores

    @property
    def bytes(self) -> int:
        """Bytes moved: every array here is float32."""
        return ELEMENT_BYTES * self.total


def _accesses(
    problem: Problem,
    loads: dict[str, int],
    stores: dict[str, int],
    shared_loads: dict[str, int] | None = None,
    shared_stores: dict[str, int] | None = None,
) -> Accesses:
    """The counts of all heads from those of one, without the arrays that are not touched.

    `loads` and `stores` are of a query head, `shared_loads` and `shared_stores` of a K/V head.
    """
    # Python integers: a count may exceed 64 bits.
    heads, shared = problem.batch * problem.heads_q, problem.batch * problem.heads_k

    def total(own: dict[str, int], common: dict[str, int] | None) -> dict[str, int]:
        counts = {name: heads * n for name, n in own.items()}
        for name, n in (common or {}).items():
            counts[name] = counts.get(name, 0) + shared * n
        return {name: n for name, n in counts.items() if n}

    return Accesses(total(loads, shared_loads), total(stores, shared_stores))


def _sum(parts: Iterable[Accesses]) -> Accesses:
    """The accesses of kernels that run one after the other; parameters of one name add up."""
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for part in parts:
        loads.update(part.loads)
        stores.update(part.stores)
    return Accesses(dict(loads), dict(stores))


def _tile_counts(problem: Problem, tiles: TileSizes) -> tuple[int, int]:
    """T_r and T_c."""
    return -(-problem.seqlen_q // tiles.Br), -(-problem.seqlen_k // tiles.Bc)


def _column_tiles(problem: Problem, tiles: TileSizes) -> np.ndarray:
    """Q-outer: for each row tile, how many column tiles its last row (and so any row) sees."""
    Tr, _ = _tile_counts(problem, tiles)
    last = np.minimum((np.arange(Tr) + 1) * tiles.Br, problem.seqlen_q) - 1
    return -(-problem.columns_end(last) // tiles.Bc)


def _first_row_tiles(
    problem: Problem, tiles: TileSizes, *, first_pass_takes_all: bool = True
) -> np.ndarray:
    """K/V-outer: for each column tile, the first row tile it visits; it visits all from there.

    That is the row tile of the first row that sees the tile's first column. The last row sees every
    column, so there always is one. With `first_pass_takes_all` column tile 0 visits every row tile:
    that is what initialises O, l and m, or dQ.
    """
    _, Tc = _tile_counts(problem, tiles)
    first = np.zeros(Tc, dtype=np.int64)
    if problem.causal:
        column = np.arange(Tc) * tiles.Bc
        first = np.maximum(column - problem.diagonal, 0) // tiles.Br
        if first_pass_takes_all:
            first[0] = 0
    return first


def standard(
    problem: Problem, tiles: TileSizes, *, return_lse: bool = False, row_resident: bool = True
) -> Accesses:
    """Accesses of standard attention (FA-1 Algorithm 0) in three tiled kernels.

    Per head: S = Q K^T loads Q once, N_q d, and K in every row tile, T_r N_k d, and stores S,
    N_q N_k; the softmax loads S and stores P, N_q N_k each, and L, N_q, with `return_lse`;
    O = P V loads P, N_q N_k, and V in every row tile, T_r N_k d, and stores O, N_q d. P takes S's
    place in memory and is named P from then on. Masked tiles are not skipped. A row of S too long
    for shared memory (`row_resident` False) is loaded twice by the softmax.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    Tr, _ = _tile_counts(problem, tiles)
    loads = {
        "Q": Nq * d,
        "K": Tr * Nk * d,
        "S": Nq * Nk * (1 if row_resident else 2),
        "P": Nq * Nk,
        "V": Tr * Nk * d,
    }
    stores = {"S": Nq * Nk, "P": Nq * Nk, "O": Nq * d, "L": Nq if return_lse else 0}
    return _accesses(problem, loads, stores)


def fa1(
    problem: Problem, tiles: TileSizes, *, query_splits: int = 1, return_lse: bool = False
) -> Accesses:
    """Accesses of FA-1's Algorithm 1: K/V outer, Q inner; O, l and m through global memory.

    With R_j = N_q - f_j B_r the rows that column tile j visits, f_j its first row tile (0 unless
    causal, see `tiles_visited`), and s_j the query splits that have such a row, per head:
        loads   K, V: sum_j s_j c_j d each    Q: sum_j R_j d    O: sum_{j>0} R_j d
                l, m: sum_{j>0} R_j each (line 2's initial values need no read)
        stores  O: sum_j R_j d    l, m: sum_j R_j each
    Not causal, one split, N_q = N_k = N: Q, K, V and O together are (3 T_c + 1) N d.
    `query_splits` deals the row tiles out in runs of ceil(T_r / query_splits); a run without
    tiles does nothing. `return_lse` adds L = m + log l: l and m loaded once more, L stored.
    """
    splits = as_size("query_splits", query_splits)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    Tr, Tc = _tile_counts(problem, tiles)
    first = _first_row_tiles(problem, tiles)
    rows = Nq - first * tiles.Br
    columns = np.minimum(Nk - np.arange(Tc) * tiles.Bc, tiles.Bc)

    run = -(-Tr // splits)
    # Runs before first[j] // run end above the diagonal: they skip column tile j.
    visiting = -(-Tr // run) - first // run

    visited, reread = int(rows.sum()), int(rows[1:].sum())
    kv = int((visiting * columns).sum()) * d
    lse = Nq if return_lse else 0
    loads = {
        "K": kv,
        "V": kv,
        "Q": visited * d,
        "O": reread * d,
        "l": reread + lse,
        "m": reread + lse,
    }
    stores = {"O": visited * d, "l": visited, "m": visited, "L": lse}
    return _accesses(problem, loads, stores)


def fa2(problem: Problem, tiles: TileSizes) -> Accesses:
    """Accesses of FA-2's Algorithm 1: Q outer, K/V inner; O written once.

    With n_i the column tiles that row tile i visits (T_c unless causal, see `tiles_visited`), per
    head:
        loads   Q: N_q d    K, V: sum_i min(n_i B_c, N_k) d each
        stores  O: N_q d    L: N_q
    Not causal, N_q = N_k = N: Q, K, V and O together are (2 T_r + 2) N d. L is always stored.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    columns = np.minimum(_column_tiles(problem, tiles) * tiles.Bc, Nk)
    kv = int(columns.sum()) * d
    return _accesses(problem, {"Q": Nq * d, "K": kv, "V": kv}, {"O": Nq * d, "L": Nq})


def standard_backward(
    problem: Problem,
    tiles: TileSizes,
    *,
    row_resident: bool = True,
    forward_resident: bool = True,
) -> Accesses:
    """Accesses of standard attention's gradients (FA-1 Algorithm 3) in seven tiled kernels.

    P is made anew by the forward's scores and softmax. An array goes by the name that it has in
    its kernel. Per head:
        scores             loads Q N_q d, K T_r N_k d        stores S N_q N_k
        softmax            loads S N_q N_k                   stores P N_q N_k
        dV = P^T dO        loads P N_q N_k, dO T_c N_q d     stores dV N_k d, per K/V head
        dP = dO V^T        as scores, named Q, K, S
        dS = P o (dP - D)  loads P, dP N_q N_k each          stores dS N_q N_k
        dQ = dS K          loads P N_q N_k, V T_r N_k d      stores O N_q d
        dK = dS^T Q        as dV, named P, dO, dV
    A row of S too long for shared memory (`forward_resident` False) is loaded twice by the softmax;
    rows of P and dP that are too long together (`row_resident` False), twice for dS. Masked tiles
    are not skipped.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    Tr, Tc = _tile_counts(problem, tiles)
    matrix = Nq * Nk
    reads, forward_reads = (1 if resident else 2 for resident in (row_resident, forward_resident))
    scores = _accesses(problem, {"Q": Nq * d, "K": Tr * Nk * d}, {"S": matrix})
    softmax = _accesses(problem, {"S": forward_reads * matrix}, {"P": matrix})
    transposed_output = _accesses(
        problem, {"P": matrix, "dO": Tc * Nq * d}, {}, shared_stores={"dV": Nk * d}
    )
    score_gradients = _accesses(
        problem, {"P": reads * matrix, "dP": reads * matrix}, {"dS": matrix}
    )
    output = _accesses(problem, {"P": matrix, "V": Tr * Nk * d}, {"O": Nq * d})
    dV, dP, dS, dQ, dK = transposed_output, scores, score_gradients, output, transposed_output
    return _sum((scores, softmax, dV, dP, dS, dQ, dK))


def fa1_backward(problem: Problem, tiles: TileSizes) -> Accesses:
    """Accesses of FA-1's Algorithm 4: K/V outer, Q inner; dQ through global memory in every pass.

    With R_j = N_q - f_j B_r the rows that column tile j visits (see `fa1`), per head:
        loads   Q, O, dO: sum_j R_j d each    L: sum_j R_j
                dQ: sum_{j>0} R_j d (line 5's zeros need no read)
        stores  dQ: sum_j R_j d
    and per K/V head K, V loaded and dK, dV stored once, N_k d each.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    rows = Nq - _first_row_tiles(problem, tiles) * tiles.Br
    visited, reread = int(rows.sum()), int(rows[1:].sum())
    return _accesses(
        problem,
        {"Q": visited * d, "O": visited * d, "dO": visited * d, "L": visited, "dQ": reread * d},
        {"dQ": visited * d},
        {"K": Nk * d, "V": Nk * d},
        {"dK": Nk * d, "dV": Nk * d},
    )


def fa2_backward(problem: Problem, tiles: TileSizes, *, deterministic: bool = False) -> Accesses:
    """Accesses of FA-2's Algorithm 2: D first, then a grid over K/V blocks.

    With R_j the rows that column tile j visits: N_q, and with a causal mask those from the row tile
    of the first row that sees it; per head:
        row sums      loads O, dO: N_q d each           stores D: N_q, dQ = 0: N_q d
        the K/V grid  loads Q, dO: sum_j R_j d each, L, D: sum_j R_j each
                      dQ: sum_j R_j d atomic adds, each a load and a store
    and per K/V head K, V loaded and dK, dV stored once, N_k d each.

    `deterministic` drops the atomic adds and the zeros. A grid over Q blocks makes dQ instead:
    with n_i the column tiles that row tile i sees, per head it
        loads  Q, dO: N_q d each, L, D: N_q each, K, V: sum_i min(n_i B_c, N_k) d each
        stores dQ: N_q d
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    first = _first_row_tiles(problem, tiles, first_pass_takes_all=False)
    visited = int((Nq - first * tiles.Br).sum())
    added = 0 if deterministic else visited * d
    row_sums = _accesses(
        problem, {"O": Nq * d, "dO": Nq * d}, {"D": Nq, "dQ": 0 if deterministic else Nq * d}
    )
    columns = _accesses(
        problem,
        {"Q": visited * d, "dO": visited * d, "L": visited, "D": visited, "dQ": added},
        {"dQ": added},
        {"K": Nk * d, "V": Nk * d},
        {"dK": Nk * d, "dV": Nk * d},
    )
    if not deterministic:
        return _sum((row_sums, columns))
    kv = int(np.minimum(_column_tiles(problem, tiles) * tiles.Bc, Nk).sum()) * d
    rows = _accesses(
        problem,
        {"Q": Nq * d, "dO": Nq * d, "L": Nq, "D": Nq, "K": kv, "V": kv},
        {"dQ": Nq * d},
    )
    return _sum((row_sums, columns, rows))


def tiles_visited(
    algorithm: str, problem: Problem, tiles: TileSizes, *, passes: str = "fwd"
) -> int:
    """Tiles of S computed, over batch and heads: B H T_r T_c without a mask.

    Causal: fa2 leaves out every tile that no row of it sees; fa1 too, but for column tile 0, in
    which it initialises O, l and m; standard leaves out nothing. `passes` is "fwd" or "bwd"; one
    sweep backward visits the same tiles as one forward, the second sweep of a deterministic
    fa2_backward again.
    """
    _check("algorithm", algorithm, ALGORITHMS)
    _check("passes", passes, PASSES[:2])
    Tr, Tc = _tile_counts(problem, tiles)
    if algorithm == "standard":
        per_head = Tr * Tc
    elif algorithm == "fa1":
        per_head = Tr * Tc - int(_first_row_tiles(problem, tiles).sum())
    else:
        per_head = int(_column_tiles(problem, tiles).sum())
    return problem.batch * problem.heads_q * per_head


def theta_standard(problem: Problem) -> float:
    """Theta(N d + N^2) accesses of standard attention (FA-1 Theorem 2), constant 1, in elements.

    B H ((N_q + N_k) d / 2 + N_q N_k), which is B H (N d + N^2) at N_q = N_k = N. No mask.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return problem.batch * problem.heads_q * ((Nq + Nk) * d / 2 + Nq * Nk)


def theta_flash(problem: Problem, M: float) -> float:
    """Theta(N^2 d^2 / M) accesses of FlashAttention (FA-1 Theorem 2), constant 1, in elements.

    B H N_q N_k d^2 / M. `M` is the on-chip memory in elements; the theorem is for d <= M <= N d,
    and Proposition 3 says that no exact algorithm does better for all of that range. No mask.
    """
    _check_memory(M)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return problem.batch * problem.heads_q * (Nq * Nk * d * d / M)


def saha_ye(problem: Problem, M: float) -> float:
    """Theta(min(N^2 d / sqrt(M), N^2 d^2 / M)) (Saha and Ye, arXiv 2402.07443, Theorem 3.1).

    Constant 1, in elements, `M` in elements, times B H, no mask. The two meet at M = d^2: above,
    it is `theta_flash` and FlashAttention is optimal; below, square tiles of S are.
    """
    flash = theta_flash(problem, M)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return min(problem.batch * problem.heads_q * (Nq * Nk * d / math.sqrt(M)), flash)


def standard_paper(problem: Problem) -> int:
    """Accesses of FA-1's Algorithm 0 with matrices of any size read once, in elements.

    Q, K, V read and O written, 2 (N_q + N_k) d; S and P written and read, 4 N_q N_k; per head.
    At N_q = N_k = N: 4 N d + 4 N^2. No mask.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    return problem.batch * problem.heads_q * (2 * (Nq + Nk) * d + 4 * Nq * Nk)


def fa1_paper(problem: Problem, Bc: int) -> int:
    """Accesses of FA-1's Algorithm 1 as FA-1 Fig. 2 (middle) counts them, in elements.

    K and V read once; Q read, O read and O written in every pass over K/V, less the first read of
    O; no l and m, no mask: 2 N_k d + (3 T_c - 1) N_q d per head. At N_q = N_k = N that is
    X (3 N / B_c + 1) with X = B H N d.
    """
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    Tc = -(-Nk // as_size("Bc", Bc))
    return problem.batch * problem.heads_q * (2 * Nk + (3 * Tc - 1) * Nq) * d


def fa1_paper_gb(problem: Problem, Bc: int) -> float:
    """`fa1_paper` in the figure's unit: GB of 10^9 bytes, 2 bytes an element, O included."""
    return PAPER_BYTES * fa1_paper(problem, Bc) / 1e9


def flops(problem: Problem, passes: str = "fwd") -> int:
    """FLOPs as published (FA-2 section 4.1): the matrix products alone.

    4 B H N_q N_k d forward, halved when causal; 2.5 times that backward, 3.5 times both. `passes`
    is "fwd", "bwd" or "fwd+bwd". A convention for comparing speeds, not a count of operations.
    """
    _check("passes", passes, PASSES)
    Nq, Nk, d = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    factor = {"fwd": 4, "bwd": 10, "fwd+bwd": 14}[passes]
    if problem.causal:
        factor //= 2
    return factor * problem.batch * problem.heads_q * Nq * Nk * d


def workspace(
    algorithm: str, problem: Problem, *, return_lse: bool = False, passes: str = "fwd"
) -> int:
    """Bytes of global memory beside inputs and outputs (float32), `passes` "fwd" or "bwd".

    Forward. standard: S, which P overwrites, 4 B H N_q N_k with N_k rounded up to a multiple of 4.
    fa1: l and m, 8 B H N_q. fa2: L, 4 B H N_q, and nothing when the caller takes L (`return_lse`).
    Backward. standard: P, and dP, which dS overwrites, twice the above. fa1: nothing.
    fa2: D, 4 B H N_q.
    """
    _check("algorithm", algorithm, ALGORITHMS)
    _check("passes", passes, PASSES[:2])
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    if algorithm == "standard":
        matrices = 1 if passes == "fwd" else 2
        return ELEMENT_BYTES * matrices * rows * (-(-problem.seqlen_k // 4) * 4)
    if passes == "bwd":
        return 0 if algorithm == "fa1" else ELEMENT_BYTES * rows
    if algorithm == "fa1":
        return ELEMENT_BYTES * 2 * rows
    return 0 if return_lse else ELEMENT_BYTES * rows


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: allowed is {', '.join(map(repr, allowed))}")


def _check_memory(M: float) -> None:
    if not 0 < M < math.inf:
        raise ValueError(f"M is {M!r}: allowed is a finite number of elements > 0")
