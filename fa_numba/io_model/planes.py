"""Accesses for float32 matrices that are split in planes of 16 bits."""

from __future__ import annotations

from dataclasses import replace

from fa_numba.dtypes import PRECISIONS
from fa_numba.integers import round_up
from fa_numba.io_model.accesses import Accesses, add_up, count
from fa_numba.io_model.visits import whole_sums
from fa_numba.problem import BlockSizes, Problem


def rows_loaded(problem: Problem, backward: bool = False, boxes: bool = False) -> tuple[int, int]:
    """Return how many elements a kernel loads for a row of Q or K, and for a row of V or dO.

    Without planes, these numbers are the head dimensions. With planes, they are the number of
    planes times the head dimension, which is rounded up to a multiple of:

        case                                               multiple
        the kernel loads boxes                             64
        backward pass, and a head dimension is above 64    32
        otherwise                                          16

    Parameters
    ----------
    problem : Problem
        The problem; its head dimensions and its precision are used.
    backward : bool, default False
        Whether the kernel is of the backward pass.
    boxes : bool, default False
        Whether the kernel loads boxes of 64 columns.

    Returns
    -------
    of_keys : int
        Elements of a row of Q or K.
    of_values : int
        Elements of a row of V or dO.
    """
    dims, planes = (problem.head_dim, problem.d_v), PRECISIONS[problem.precision].planes
    if planes == 1:
        return dims
    to = 64 if boxes else 32 if backward and problem.largest_dim > 64 else 16
    of_keys, of_values = (planes * round_up(d, to) for d in dims)
    return of_keys, of_values


def of_planes(
    problem: Problem,
    tiles: BlockSizes,
    kernel: Accesses,
    backward: bool = False,
    boxes: bool = False,
) -> Accesses:
    """Return the accesses of a kernel that loads planes, and of the kernels that make the planes.

    Parameters
    ----------
    problem : Problem
        The problem. If its precision has no planes, `kernel` is returned unchanged.
    tiles : object with Br and Bc
        Block sizes.
    kernel : Accesses
        Accesses of the kernel that loads the planes.
    backward : bool, default False
        Whether dO is split too.
    boxes : bool, default False
        Whether the planes are loaded in boxes of 64 columns.

    Returns
    -------
    Accesses
        The sums.

    Notes
    -----
    Each matrix is split by one kernel. For a matrix with N valid rows, this kernel has the accesses
    below. P is the number of planes. d' is d rounded up to a multiple of 16, or to a larger
    multiple as in `rows_loaded`.

        array   loads                                      stores
        X       N d; 2 N d if the planes are scaled        -
        planes  -                                          N P d'
    """
    precision = PRECISIONS[problem.precision]
    if precision.planes == 1:
        return kernel
    queries = whole_sums(problem, tiles, problem.heads_q).rows
    keys = whole_sums(problem, tiles, problem.heads_k).columns
    both, times = queries + keys, 2 if precision.scaled else 1
    of_v = queries + keys if backward else keys  # rows of V, and of dO in the backward pass
    loads = {"X": times * (both * problem.head_dim + of_v * problem.d_v)}
    row, row_v = rows_loaded(problem, backward, boxes)
    before = count(problem, loads, {"planes": both * row + of_v * row_v})
    return replace(add_up(problem, [before, kernel]), halves=("Q", "K", "V", "dO", "planes"))
