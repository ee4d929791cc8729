"""Accesses of float32 matrices that are split in planes of 16 bits, and what makes these."""

from __future__ import annotations

from dataclasses import replace

from fa_numba.dtypes import PRECISIONS
from fa_numba.integers import round_up
from fa_numba.io_model.accesses import Accesses, add_up, count
from fa_numba.io_model.visits import whole_sums
from fa_numba.problem import BlockSizes, Problem


def rows_loaded(problem: Problem, backward: bool = False, panels: bool = False) -> tuple[int, int]:
    """Elements that a kernel loads of a row of Q or K, and of one of V or dO: as many as it has, or
    those of all planes, of d rounded up to a multiple of 16, ``backward`` beyond 64 of either of
    32, by ``panels`` of 64.
    """
    dims, planes = (problem.head_dim, problem.d_v), PRECISIONS[problem.precision].planes
    if planes == 1:
        return dims
    to = 64 if panels else 32 if backward and problem.largest_dim > 64 else 16
    of_keys, of_values = (planes * round_up(d, to) for d in dims)
    return of_keys, of_values


def of_planes(
    problem: Problem,
    tiles: BlockSizes,
    kernel: Accesses,
    backward: bool = False,
    panels: bool = False,
) -> Accesses:
    """The accesses of a ``kernel`` that takes Q, K and V as planes, and dO ``backward``, and of
    those that make them.

    Of each, with N valid rows, P planes and d' = d rounded up to a multiple of 16:
        loads  X: N d; twice where the planes are scaled    stores  planes: N P d'
    """
    precision = PRECISIONS[problem.precision]
    if precision.planes == 1:
        return kernel
    queries = whole_sums(problem, tiles, problem.heads_q).rows
    keys = whole_sums(problem, tiles, problem.heads_k).columns
    both, times = queries + keys, 2 if precision.scaled else 1
    of_v = queries + keys if backward else keys  # and of dO
    loads = {"X": times * (both * problem.head_dim + of_v * problem.d_v)}
    row, row_v = rows_loaded(problem, backward, panels)
    before = count(problem, loads, {"planes": both * row + of_v * row_v})
    return replace(add_up(problem, [before, kernel]), halves=("Q", "K", "V", "dO", "planes"))
