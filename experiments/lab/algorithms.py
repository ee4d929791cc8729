"""Our algorithms under the names that the data store gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fa_numba
from fa_numba.problem import Problem

# Data store's series -> algorithm. "simt" is the unit they run on.
SERIES = {"standard-simt": "standard", "fa1-simt": "fa1", "fa2-simt": "fa2"}
SPLITS = "fa1-simt-splits"
# What figures and tables call a series.
LABELS = {
    "standard-simt": "standard",
    "fa1-simt": "FA-1 (K/V outer)",
    "fa1-simt-splits": "FA-1, query splits",
    "fa2-simt": "FA-2 (Q outer)",
    "torch-efficient": "torch efficient",
    "torch-unfused": "torch unfused",
}


def plan(series: str, problem: Problem, **options: Any) -> fa_numba.Plan:
    """The plan of one series for the problem."""
    return fa_numba.plan(
        problem.q_shape,
        problem.k_shape,
        algorithm="fa1" if series == SPLITS else SERIES[series],
        causal=problem.causal,
        **options,
    )


def call(series: str, problem: Problem, q: Any, k: Any, v: Any, **options: Any) -> Callable:
    """A function that runs the series once; it takes `out=`."""
    algorithm = "fa1" if series == SPLITS else SERIES[series]

    def run(out: Any = None) -> Any:
        return fa_numba.attention(
            q, k, v, algorithm=algorithm, causal=problem.causal, out=out, **options
        )

    return run


def query_splits(problem: Problem, multiprocessors: int) -> int:
    """The splits of FA-1's queries with which the longest multiprocessor visits fewest row tiles.

    A wave is one thread block on every multiprocessor; with equal waves the fewest splits win,
    since each split reads all of K and V.
    """
    Tr = -(-problem.seqlen_q // plan(SPLITS, problem).tiles.Br)
    heads = problem.batch * problem.heads_q

    def row_tiles(splits: int) -> int:
        rows = -(-Tr // splits)
        return -(-heads * -(-Tr // rows) // multiprocessors) * rows

    return min(range(1, Tr + 1), key=lambda splits: (row_tiles(splits), splits))


def row_fields(problem: Problem) -> dict[str, Any]:
    """The problem's columns of a row."""
    return {
        "dtype": problem.dtype,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_k": problem.heads_k,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "causal": problem.causal,
    }
