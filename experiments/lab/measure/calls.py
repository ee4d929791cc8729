"""Calls of any series, ours or torch's, in any pass and with options, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba import device, reference
from fa_numba.problem import Problem

from ..record.store import Row
from . import peers
from . import series as ours
from .timing import PEER_BOUND, ROUNDING, Gate, GradientGate, Timing, WrongResult, to_host
from .workloads import Inputs

Check = Callable[[Any], float]
LONGEST = 1024  # whose gradients are computed in float64
# Of the options of our calls, what torch's take; the others have no counterpart there.
_TAKEN = ("dropout_p", "kv_lens")
# How far from what dropout makes them a result's deviation and its size may be.
DEVIATION_BOUND, SIZE_BOUND = 0.2, 0.06


def theirs(series: str) -> bool:
    """Whether the series is one of torch's kernels."""
    return series.startswith("torch")


def make(
    series: str, pass_: str, problem: Problem, arrays: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """A function that runs the series once in a pass; it takes `out`.

    `arrays` are q, k, v and, for a pass with gradients, dout. `options` are those of our calls:
    dropout_p, seed, q_lens, kv_lens and more; torch's calls are given those that it has.
    """
    source: Any = peers if theirs(series) else ours
    if theirs(series):
        options = {name: value for name, value in options.items() if name in _TAKEN}
    if pass_ == "fwd":
        return source.call(series, problem, *arrays[:3], **options)
    return source.gradients(series, problem, pass_, *arrays, **options)


class Checks:
    """Checks of plain calls, on the problem itself or, of gradients, on a shorter one.

    Gradients are computed in float64 up to the length `longest`. The call of a longer problem is
    checked once at that length, with one batch entry and the same heads, and no error is given.
    """

    def __init__(self, inputs: Inputs, longest: int = LONGEST) -> None:
        self._inputs, self._longest = inputs, longest
        self._gates: dict[tuple[bool, Problem], Any] = {}
        self._passed: set[tuple[str, str, Problem]] = set()

    def __call__(self, series: str, pass_: str, problem: Problem) -> Check:
        """The check of a result. Raises WrongResult at once where a shorter problem's is wrong."""
        if pass_ == "fwd" or problem.seqlen_q <= self._longest:
            return self._gate(series, pass_, problem)
        N = self._longest
        shorter = replace(problem, batch=1, seqlen_q=N, seqlen_k=N)
        if (series, pass_, shorter) not in self._passed:
            arrays = peers.on_device(self._inputs(shorter), shorter.dtype)
            self._gate(series, pass_, shorter)(make(series, pass_, shorter, arrays)())
            self._passed.add((series, pass_, shorter))
        return lambda result: float("nan")

    def _gate(self, series: str, pass_: str, problem: Problem) -> Check:
        forward = pass_ == "fwd"
        if (forward, problem) not in self._gates:
            arrays = self._inputs(problem)
            self._gates[forward, problem] = (
                Gate(problem, *arrays[:3]) if forward else GradientGate(problem, *arrays)
            )
        gate = self._gates[forward, problem]
        return gate.peer if theirs(series) else gate


class OptionsGate:
    """Checks the output of a call with lengths or dropout: the middle and the last 32 valid rows of
    the first and of the last head, of a call with dropout 128.

    Without dropout a result is held to the bounds of `timing.Gate`. Dropout draws other elements in
    torch than in our kernels: of any call with it, the deviation from float64 without dropout is
    held to what it has to be, whose square is p / (1 - p) times the sum of Pij^2 |vj|^2, within
    20 percent, and its size, its projection on the result without dropout, to 1 within 6 percent.

    `gate(out)` is for our kernels, `gate.peer(out)` for others; both give the relative error, or
    the deviation, and raise WrongResult where it is beyond the bound.
    """

    def __init__(
        self,
        problem: Problem,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        dropout_p: float = 0.0,
        q_lens: Sequence[int] | None = None,
        kv_lens: Sequence[int] | None = None,
        **_: Any,
    ) -> None:
        self._p, self._dtype = dropout_p, problem.dtype
        self._places, expected, unfused = [], [], []
        spread = 0.0
        options: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal}
        matrix = None if problem.dtype == "float32" else problem.dtype
        for b, h in dict.fromkeys([(0, 0), (problem.batch - 1, problem.heads_q - 1)]):
            Nq = problem.seqlen_q if q_lens is None else int(q_lens[b])
            Nk = problem.seqlen_k if kv_lens is None else int(kv_lens[b])
            # Dropout needs many rows, and none that sees a few columns alone.
            rows = min(128, max(1, Nq // 2)) if dropout_p else min(32, Nq)
            for first in dict.fromkeys([(Nq - rows) // 2, Nq - rows]):
                # With both ends of the diagonal cut alike the block is aligned as the whole is.
                end = min(Nk, first + rows + Nk - Nq) if problem.causal else Nk
                block = (
                    q[b : b + 1, h : h + 1, first : first + rows],
                    *(x[b : b + 1, h // problem.group][:, None, :end] for x in (k, v)),
                )
                self._places.append((b, h, slice(first, first + rows)))
                expected.append(np.ravel(reference.attention(*block, **options)))
                near = reference.unfused(*block, **options, matrix_dtype=matrix)
                unfused.append(np.ravel(near))
                if dropout_p:
                    spread += _spread(*(x[0, 0].astype(np.float64) for x in block), **options)
        self._reference = np.concatenate(expected)
        size = float(self._reference @ self._reference)
        self._deviation = float(np.sqrt(dropout_p / (1 - dropout_p) * spread / size))
        of_unfused = reference.relative_error(np.concatenate(unfused), self._reference)
        self._bound = 2 * of_unfused + ROUNDING[problem.dtype]

    def __call__(self, out: Any) -> float:
        return self._check(out, self._bound)

    def peer(self, out: Any) -> float:
        return self._check(out, PEER_BOUND[self._dtype])

    def _check(self, out: Any, bound: float) -> float:
        got = np.concatenate([to_host(out[place]).ravel() for place in self._places])
        exact = self._reference
        error = float(reference.relative_error(got, exact))
        if self._p:
            wanted = self._deviation
            size = float(got @ exact / (exact @ exact))
            near = abs(error / wanted - 1) <= DEVIATION_BOUND and abs(size - 1) <= SIZE_BOUND
            if not near:
                raise WrongResult(
                    f"with dropout {error:.3f} off float64 without and {size:.3f} of its size, "
                    f"expected {wanted:.3f} and 1"
                )
        elif not error <= bound:
            raise WrongResult(f"error {error:.2e} against float64, allowed {bound:.2e}")
        return error


def _spread(Q: np.ndarray, K: np.ndarray, V: np.ndarray, scale: float, causal: bool) -> float:
    """The sum of Pij^2 |vj|^2 over the rows of Q, which are the last ones of a head."""
    S = scale * (Q @ K.T)
    if causal:
        above = np.arange(len(K)) > np.arange(len(Q))[:, None] + len(K) - len(Q)
        S[above] = -np.inf
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    return float(np.sum(P**2 @ np.sum(V**2, axis=1)))


def check_once(
    series: str, problem: Problem, host: Sequence[np.ndarray], options: dict[str, Any]
) -> None:
    """Check O and the gradients of a small problem, all of them, with all the options.

    `host` are q, k, v and dout. What torch drops is not known here: of its calls with dropout the
    output is held to what `OptionsGate` says, and the gradients have to be finite. Raises
    WrongResult.
    """
    q_lens = options.get("q_lens")
    valid = np.ones((problem.batch, 1, problem.seqlen_q, 1), np.float32)
    if q_lens is not None:
        valid[:, 0, :, 0] = np.arange(problem.seqlen_q) < np.asarray(q_lens)[:, None]
    # Rows past q_lens are nobody's: torch has no such option, and computes them.
    q, k, v, dout = (*host[:3], host[3] * valid)
    arrays = peers.on_device((q, k, v, dout), problem.dtype)
    out = to_host(make(series, "fwd", problem, arrays, **options)()) * valid
    gradients = [to_host(x) for x in make(series, "bwd", problem, arrays, **options)()]
    if theirs(series) and options.get("dropout_p"):
        OptionsGate(problem, q, k, v, **options).peer(out)
        if not all(np.isfinite(x).all() for x in gradients):
            raise WrongResult("a gradient with dropout is not finite")
        return
    given = {**options, "causal": problem.causal, "scale": problem.scale}
    matrix = None if problem.dtype == "float32" else problem.dtype
    exact = [reference.attention(q, k, v, **given)]
    exact += reference.attention_backward(dout, q, k, v, **given)
    near = [reference.unfused(q, k, v, matrix_dtype=matrix, **given)]
    near += reference.unfused_backward(dout, q, k, v, matrix_dtype=matrix, **given)
    for name, got, right, rounded in zip(
        ("O", "dq", "dk", "dv"), (out, *gradients), exact, near, strict=True
    ):
        error = reference.relative_error(got, right)
        bound = 2 * reference.relative_error(rounded, right) + ROUNDING[problem.dtype]
        bound = PEER_BOUND[problem.dtype] if theirs(series) else bound
        if not error <= bound:
            raise WrongResult(
                f"{name}: error {error:.2e} against float64 at N={problem.seqlen_q}, "
                f"allowed {bound:.2e}"
            )


def time_row(timing: Timing | None, failure: str = "", place: str = "", **columns: Any) -> Row:
    """A row of time, or one that failed: its note says `place` and, behind a semicolon, why."""
    note = f"{place}; {failure}" if failure else place
    common = {"source": "measured", "metric": "time", "unit": "ms", "note": note, **columns}
    if timing is None:
        return Row(value=None, **common)
    return Row(value=timing.median, **timing.spread, **common)


def workspace_bytes(run: Callable[..., Any]) -> int:
    """Peak memory of one call of ours beside inputs and output; it takes `out`."""
    out = run()
    device.synchronize()
    with device.track_memory() as memory:
        run(out=out)
        device.synchronize()
    return memory.peak_bytes


def own_peak_bytes(run: Callable[..., Any], results: int) -> int:
    """Peak memory of one call of ours, what it returns with the rest.

    Workspace is what the package's own allocator gives; results are what torch's gives where torch
    is installed, and else `results` bytes. The two peaks need not be at the same time: where they
    are not, this is a little more than was ever taken at once.
    """
    with device.track_memory() as memory:
        if peers.available():
            results = peers.allocated_bytes(run)
        else:
            run()
            device.synchronize()
    return memory.peak_bytes + results
