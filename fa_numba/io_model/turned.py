"""Accesses for e4m3 matrices, where V is stored by columns before the kernel of attention."""

from __future__ import annotations

from dataclasses import replace

from fa_numba.dtypes import DTYPES
from fa_numba.integers import round_up
from fa_numba.io_model.accesses import Accesses, add_up, count
from fa_numba.io_model.visits import whole_sums
from fa_numba.problem import BlockSizes, Problem

GROUP = 256  # the number of keys in VT is a multiple of this number
BOX = 128  # keys of a box: 128 bytes


def values_loaded(problem: Problem, tiles: BlockSizes, columns: int, visited: int) -> int:
    """Return the rows of V that a kernel of attention loads, including rows of zeros.

    Parameters
    ----------
    problem : Problem
        The problem; its dtype is used.
    tiles : object with Br and Bc
        Block sizes.
    columns : int
        Sum of the columns of the visited tiles, sum c_j.
    visited : int
        Number of visited tiles.

    Returns
    -------
    int
        Number of rows. Except for e4m3 it is `columns`. For e4m3, each visited tile counts as B_c
        rows, rounded up to complete boxes. The rows after the last key are zeros in the array VT.
    """
    return visited * round_up(tiles.Bc, BOX) if DTYPES[problem.dtype].scaled else columns


def elements_of_turned(problem: Problem) -> int:
    """Return the number of elements of VT, the array in which V is stored by columns.

    Parameters
    ----------
    problem : Problem
        The problem.

    Returns
    -------
    int
        Number of elements for e4m3. For any other dtype the number is 0.
    """
    if not DTYPES[problem.dtype].scaled:
        return 0
    heads = problem.batch * problem.heads_k
    return heads * problem.d_v * (round_up(problem.seqlen_k, GROUP) + GROUP)


def with_turned_values(problem: Problem, tiles: BlockSizes, kernel: Accesses) -> Accesses:
    """Return the accesses of a kernel of attention, and of the kernel that stores V by columns.

    Parameters
    ----------
    problem : Problem
        The problem. If its dtype is not e4m3, `kernel` is returned unchanged.
    tiles : object with Br and Bc
        Block sizes.
    kernel : Accesses
        Accesses of the kernel of attention. It loads VT under the name of its parameter, V.

    Returns
    -------
    Accesses
        The sums.

    Notes
    -----
    The kernel that stores V by columns writes the array VT. Keys after the last valid key are 0.
    Per K/V head, with N_k'' = 256 (ceil(N_k' / 256) + 1):

        array   loads      stores
        V       N_k d      -
        VT      -          N_k'' d
    """
    if not DTYPES[problem.dtype].scaled:
        return kernel
    keys = whole_sums(problem, tiles, problem.heads_k).columns
    before = count(problem, {"V": keys * problem.d_v}, {"VT": elements_of_turned(problem)})
    found = add_up(problem, [before, kernel])
    if DTYPES[problem.o_dtype].sums_in_place:
        return replace(found, sums=("O",))
    return replace(found, halves=("O",))
