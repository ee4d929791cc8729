"""Calls with options of any kind, ours and torch's, and their checks against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba import reference
from fa_numba.problem import Problem

from ..lab.measure import peers
from ..lab.measure import series as ours
from ..lab.measure.calls import theirs
from ..lab.measure.series import backward_options
from ..lab.measure.timing import PEER_BOUND, ROUNDING, WrongResult, rounds, to_host
from ..lab.measure.workloads import SEED, Inputs
from . import flex

AUTO = "fa2-auto"
# The longest problem whose gradients are computed in float64 here, and its widest window.
LONGEST, WIDEST = 512, 100
ROWS = 32  # of a block of rows that is checked


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
    """A function that runs the series once in a pass; it takes `out`.

    `arrays` are q, k, v and dout on the GPU.
    """
    options = flex.options_on_gpu(given(problem))
    if series == peers.FLEX:
        if pass_ == "fwd":
            return flex.call(problem, *arrays[:3], **options)
        return flex.gradients(problem, pass_, *arrays, **options)
    if theirs(series):
        if options:
            raise ValueError(f"series is {series}: it has no {', '.join(options)}")
        if pass_ == "fwd":
            return peers.call(series, problem, *arrays[:3])
        return peers.gradients(series, problem, pass_, *arrays)
    if pass_ == "fwd":
        return ours.call(series, problem, *arrays[:3], kv_splits="auto", **options)
    return ours.gradients(series, problem, pass_, *arrays, **options)


def plan_options(pass_: str, problem: Problem) -> dict[str, Any]:
    """What `series.plan` is told of the call that `make` makes, beside the series and problem."""
    if pass_ == "fwd":
        return {"kv_splits": "auto", **given(problem, shapes=True)}
    return {"passes": "bwd", **backward_options(AUTO), **given(problem, shapes=True)}


class Checks:
    """Checks of calls against float64: rows of the output of the problem itself, gradients of a
    shorter problem of the same kind, which the same call is made of once.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._rows: tuple[Problem, RowsGate] | None = None
        self._gradients: tuple[Problem, GradientsGate] | None = None
        self._passed: set[tuple[str, str, Problem]] = set()

    def __call__(self, series: str, pass_: str, problem: Problem) -> Callable[[Any], float]:
        """The check of a result. Raises WrongResult at once where a shorter problem's is wrong."""
        if pass_ == "fwd":
            if self._rows is None or self._rows[0] != problem:
                self._rows = problem, RowsGate(problem, *self._inputs(problem)[:3])
            gate = self._rows[1]
            return gate.peer if theirs(series) else gate
        small = shorter(problem)
        if (series, pass_, small) not in self._passed:
            arrays = self._inputs(small)
            if self._gradients is None or self._gradients[0] != small:
                self._gradients = small, GradientsGate(small, *arrays)
            of = self._gradients[1]
            run = make(series, pass_, small, peers.on_device(arrays, small.dtype))
            (of.peer if theirs(series) else of)(run())
            self._passed.add((series, pass_, small))
        return lambda result: float("nan")


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


class RowsGate:
    """Checks the first, the middle and the last rows of the first and of the last head of an output
    with any options but lengths of padded sequences, a block mask and dropout, to the bounds of
    `timing.Gate`.

    `gate(out)` is for our kernels, `gate.peer(out)` for others; both give the relative error and
    raise WrongResult where it is beyond the bound.
    """

    def __init__(self, problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self._dtype = problem.dtype
        self._places, expected, unfused = [], [], []
        options = given(problem)
        for b, h in dict.fromkeys([(0, 0), (problem.batch - 1, problem.heads_q - 1)]):
            Nq, _ = problem.lengths(b)
            rows = min(ROWS, Nq)
            for first in dict.fromkeys([0, (Nq - rows) // 2, Nq - rows]):
                # A block of rows is aligned as the whole is once later columns are cut off.
                end = problem.columns_end(first + rows - 1, b)
                if end == 0:
                    continue
                at = _place(problem, problem.q_lens, b, h, first, first + rows)
                columns = _place(problem, problem.kv_lens, b, h // problem.group, 0, end)
                block = [x[where][None, None] for x, where in ((q, at), (k, columns), (v, columns))]
                own: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal}
                own |= {n: options[n] for n in ("window", "softcap") if n in options}
                if problem.alibi:
                    own["alibi_slopes"] = options["alibi_slopes"][h : h + 1]
                if problem.bias is not None:
                    bias = np.broadcast_to(options["bias"], problem.score_shape)
                    own["bias"] = bias[b : b + 1, h : h + 1, first : first + rows, :end]
                self._places.append(at)
                expected.append(np.ravel(reference.attention(*block, **own)))
                unfused.append(np.ravel(reference.unfused(*block, **own | rounds(problem))))
        self._reference = np.concatenate(expected)
        of_unfused = reference.relative_error(np.concatenate(unfused), self._reference)
        self._bound = 2 * of_unfused + ROUNDING[problem.dtype]

    def __call__(self, out: Any) -> float:
        return self._check(out, self._bound)

    def peer(self, out: Any) -> float:
        return self._check(out, PEER_BOUND[self._dtype])

    def _check(self, out: Any, bound: float) -> float:
        got = np.concatenate([to_host(out[place]).ravel() for place in self._places])
        return _held("O", got, self._reference, bound)


def _place(
    problem: Problem, lens: Sequence[int] | None, entry: int, head: int, first: int, end: int
) -> tuple[Any, ...]:
    """Where rows of a head of a batch entry are: in (batch, heads, N, d), or packed (total, heads,
    d).
    """
    if not problem.packed:
        return entry, head, slice(first, end)
    begin = sum((lens or ())[:entry])
    return slice(begin + first, begin + end), head


class GradientsGate:
    """Checks dq, dk and dv of a small problem, all of them, to the bounds of
    `timing.GradientGate`; the error is the largest of the three. `arrays` are q, k, v and dout.
    """

    def __init__(self, problem: Problem, *arrays: np.ndarray) -> None:
        q, k, v, dout = arrays
        options = {"scale": problem.scale, "causal": problem.causal, **given(problem)}
        self._expected = reference.attention_backward(dout, q, k, v, **options)[:3]
        unfused = reference.unfused_backward(dout, q, k, v, **options, **rounds(problem))[:3]
        self._bounds = [
            2 * reference.relative_error(*pair) + ROUNDING[problem.dtype]
            for pair in zip(unfused, self._expected, strict=True)
        ]
        self._peer = PEER_BOUND[problem.dtype]

    def __call__(self, gradients: Sequence[Any]) -> float:
        return self._check(gradients, self._bounds)

    def peer(self, gradients: Sequence[Any]) -> float:
        return self._check(gradients, [self._peer] * 3)

    def _check(self, gradients: Sequence[Any], bounds: Sequence[float]) -> float:
        found = zip(("dq", "dk", "dv"), gradients, self._expected, bounds, strict=True)
        return max(_held(name, to_host(got), right, bound) for name, got, right, bound in found)


def _held(name: str, got: np.ndarray, right: np.ndarray, bound: float) -> float:
    error = float(reference.relative_error(got, right))
    if not error <= bound:
        raise WrongResult(f"{name}: error {error:.2e} against float64, allowed {bound:.2e}")
    return error
