"""Calls with options of any kind, ours and torch's, and what their checks are made of."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba.problem import Problem

from ..lab.measure import flex, peers
from ..lab.measure.calls import make as make_call
from ..lab.measure.calls import theirs
from ..lab.measure.series import backward_options
from ..lab.measure.workloads import SEED

AUTO = "fa2-auto"
# The longest problem whose gradients are computed in float64 here, and its widest window.
LONGEST, WIDEST = 512, 100


def given(problem: Problem, shapes: bool = False) -> dict[str, Any]:
    """The options of our call for a problem: windows and caps as they are, slopes, a bias and ends
    of sequences as arrays of NumPy; with `shapes` a plan's shapes in place of slopes and a bias.
    """
    found: dict[str, Any] = {}
    if problem.window != (-1, -1):
        found["window"] = problem.window
    if problem.softcap is not None:
        found["softcap"] = problem.softcap
    if problem.alibi:
        heads = problem.heads_q
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1, dtype=np.float32) / heads)
        found["alibi_slopes"] = (heads,) if shapes else slopes
    if problem.bias is not None:
        found["bias"] = problem.bias if shapes else _bias(problem.bias)
    if problem.packed:
        for name, lens in (("q", problem.q_lens), ("k", problem.kv_lens)):
            found[f"cu_seqlens_{name}"] = np.cumsum([0, *(lens or ())]).astype(np.int32)
    return found


@functools.lru_cache(1)
def _bias(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(SEED).standard_normal(shape, dtype=np.float32)


def make(series: str, pass_: str, problem: Problem, arrays: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the series once on q, k, v, dout in a pass; it takes `out`."""
    options = flex.options_on_gpu(given(problem))
    if series == peers.FLEX:
        if pass_ == "fwd":
            return flex.call(problem, *arrays[:3], **options)
        return flex.gradients(problem, pass_, *arrays, **options)
    if theirs(series):
        if options:
            raise ValueError(f"series is {series}: it has no {', '.join(options)}")
    elif pass_ == "fwd":
        options["kv_splits"] = "auto"
    return make_call(series, pass_, problem, arrays, **options)


def plan_options(pass_: str, problem: Problem) -> dict[str, Any]:
    """What `series.plan` is told of the call that `make` makes, beside the series and problem."""
    if pass_ == "fwd":
        return {"kv_splits": "auto", **given(problem, shapes=True)}
    return {"passes": "bwd", **backward_options(AUTO), **given(problem, shapes=True)}


def shorter(problem: Problem) -> Problem:
    """One K/V head of one batch entry, lengths of at most LONGEST that leave the same remainder of
    half of that; a window of at most WIDEST columns to the left. Of packed sequences those of at
    most half of LONGEST rows.
    """
    half = LONGEST // 2
    if problem.packed:
        return _shorter_packed(problem, half)
    Nq, Nk = (N if N <= LONGEST else half + N % half for N in (problem.seqlen_q, problem.seqlen_k))
    left, right = problem.window
    sizes: dict[str, Any] = {"batch": 1, "heads_q": problem.group, "heads_k": 1}
    if problem.bias is not None:
        whole = (1, problem.group, Nq, Nk)
        sizes["bias"] = tuple(min(pair) for pair in zip(problem.bias, whole, strict=True))
    return replace(problem, **sizes, seqlen_q=Nq, seqlen_k=Nk, window=(min(left, WIDEST), right))


def _shorter_packed(problem: Problem, longest: int) -> Problem:
    pairs = zip(problem.q_lens or (), problem.kv_lens or (), strict=True)
    q_lens, kv_lens = zip(*(pair for pair in pairs if max(pair) <= longest), strict=True)
    lens: dict[str, Any] = {"q_lens": q_lens, "kv_lens": kv_lens, "batch": len(q_lens)}
    lens |= {"heads_q": problem.group, "heads_k": 1}
    return replace(problem, **lens, seqlen_q=max(q_lens), seqlen_k=max(kv_lens))
