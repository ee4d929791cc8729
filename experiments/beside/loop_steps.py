"""The steps from FA-1 to FA-2, and what their rows say."""

from collections.abc import Iterable, Mapping
from typing import Any

from fa_numba import io_model
from fa_numba.problem import Problem

from ..lab.record import Row, values

# The steps in their order, by what follows a series' "fa1-simt" or "fa2-mma".
STEPS = {
    "fa1-keys": "FA-1, a block a head, its warps share K and V",
    "fa1-own": "FA-1, a block a head, its own tiles",
    "fa1": "FA-1, a block a head (the paper's grid)",
    "fa1-unnormalised": "O not normalised between passes",
    "fa1-splits": "FA-1, query splits (more blocks a head)",
    "fa2-statistics": "Q outer, l and m stored",
    "fa2-one-block": "Q outer, a block a head, one logsumexp",
    "fa2-fa1-tiles": "Q outer, grid over the sequence (FA-2)",
    "fa2": "FA-2 at its own tiles",
}
# In the backward pass K and V are outside in both orders, and FA-2's grid is over them.
BACKWARD = STEPS | {"fa2-fa1-tiles": "FA-2, grid over K/V, FA-1's tiles"}
# Of these there is no kernel, and so no time: what the step changes is in the closed forms.
COUNTED_ONLY = ("fa1-unnormalised", "fa2-statistics")


def series_of(step: str, unit: str) -> str:
    """A step's series: "fa1-splits" on "mma" is "fa1-mma-splits"."""
    algorithm, _, variant = step.partition("-")
    return "-".join(part for part in (algorithm, unit, variant) if part)


def step_of(series: str) -> str:
    algorithm, _, *variant = series.split("-")
    return "-".join((algorithm, *variant))


def beside_products(step: str, problem: Problem, tiles: Any, passes: str = "fwd") -> int:
    """Operations on elements of S and O that are no matrix products, as a step has them.

    In each visited tile, whole: forward 5 Br Bc for scaling, row maxima, differences, exponentials
    and row sums, and Br d for each time that O is multiplied: by l, e^(m_old - m_new) and 1 / l in
    FA-1 (Algorithm 1 line 12), by the second alone where O stays unnormalised, which 1 / l ends
    once (FA-2 line 12). Backward 6 Br Bc for P and dS, and 2 Br d for D = rowsum(dO o O), which
    FA-1 has in every tile (Algorithm 4 line 19) and FA-2 once (Algorithm 2 line 4).
    """
    algorithm = step.split("-")[0]
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    visited = io_model.tiles_visited(algorithm, problem, tiles, passes=passes)
    often = algorithm == "fa1" and step != "fa1-unnormalised"
    if passes == "bwd":
        on_scores, on_output, once = 6, 2 * often, 2 * (not often)
    else:
        on_scores, on_output, once = 5, 3 if often else 1, int(not often)
    Br, Bc, d = tiles.Br, tiles.Bc, problem.head_dim
    return visited * (on_scores * Br * Bc + on_output * Br * d) + once * rows * d


Steps = Mapping[tuple[str, str, str], float]


def by_step(rows: Iterable[Row]) -> Steps:
    """(step, source, metric) -> value of the rows of one problem and pass."""
    found = values(rows, "series", "source", "metric")
    return {(step_of(series), *at): value for (series, *at), value in found.items()}


def factors(found: Steps) -> dict[str, float | None]:
    """How many times faster each step is, and what the change of loop order is made of.

    `total`, from FA-1 to FA-2, is `order_one_block` x `grid` x `tiles`, or `splits` x `order` x
    `tiles`: the order is changed at a block a head, or at an equal grid. `warps` is before both.
    Where FA-1 takes FA-2's tiles, `tiles` is `retiled`, what that gains it, and the total is from
    its own.
    A kernel runs for instructions / (issue x schedulers) of its multiprocessors' active cycles, so
    that `order` = `instructions` x `waiting` x `rest`; `rest` is what idle multiprocessors and the
    clock leave over. None where a number is missing.
    """

    def number(step: str, metric: str) -> float | None:
        stored = found.get((step, "measured", metric))
        if metric != "issue" or stored is not None:
            return stored
        issuing, active = number(step, "issuing"), number(step, "active")
        return issuing / active if issuing and active else None

    def ratio(metric: str, over: str, under: str) -> float | None:
        above, below = number(over, metric), number(under, metric)
        return above / below if above and below else None

    order = ratio("time", "fa1-splits", "fa2-fa1-tiles")
    instructions = ratio("instructions", "fa1-splits", "fa2-fa1-tiles")
    waiting = ratio("issue", "fa2-fa1-tiles", "fa1-splits")
    rest = order / (instructions * waiting) if order and instructions and waiting else None
    own = "fa1-own" if number("fa1-own", "time") else "fa1"
    retiled = ratio("time", "fa1-own", "fa1")
    return {
        "total": ratio("time", own, "fa2"),
        "warps": ratio("time", "fa1-keys", "fa1"),
        "order_one_block": ratio("time", "fa1", "fa2-one-block"),
        "grid": ratio("time", "fa2-one-block", "fa2-fa1-tiles"),
        "splits": ratio("time", "fa1", "fa1-splits"),
        "order": order,
        "instructions": instructions,
        "waiting": waiting,
        "rest": rest,
        "retiled": retiled,
        "tiles": retiled or ratio("time", "fa2-fa1-tiles", "fa2"),
    }
