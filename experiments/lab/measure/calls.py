"""Calls of any series, ours or torch's, in any pass and with options, and their checks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.problem import Problem

from ..record import Row
from . import peers
from . import series as ours
from .check import Check, DropoutGate, Gate, WrongResult, gate, to_host
from .timing import Timing, number
from .workloads import Inputs

LONGEST = 1024  # whose gradients are computed in float64
# Of the options of our calls, what torch's take; the others have no counterpart there.
_TAKEN = ("dropout_p", "kv_lens")


def theirs(series: str) -> bool:
    return series.startswith("torch")


def make(
    series: str, pass_: str, problem: Problem, arrays: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """A function that runs the series once in a pass on q, k, v and, with gradients, dout; it takes
    `out`. Of `options`, our calls', torch's are given those that they have.
    """
    source: Any = peers if theirs(series) else ours
    if theirs(series):
        options = {name: value for name, value in options.items() if name in _TAKEN}
    if pass_ == "fwd":
        return source.call(series, problem, *arrays[:3], **options)
    return source.gradients(series, problem, pass_, *arrays, **options)


def shortened(longest: int, problem: Problem) -> Problem:
    """A problem of a longer sequence with one batch entry and that length, any other as it is."""
    if problem.seqlen_q <= longest:
        return problem
    return replace(problem, batch=1, seqlen_q=longest, seqlen_k=longest)


class Checks:
    """Checks of calls: of O on the problem itself, of gradients on what `shorter` makes of it, once
    and without an error where that is another; `given` are options by problem.
    """

    def __init__(
        self, inputs: Inputs, shorter: Callable[[Problem], Problem] | None = None,
        given: Callable[[Problem], dict[str, Any]] = lambda problem: {},
    ) -> None:  # fmt: skip
        self.inputs, self._given = inputs, given
        self._shorter = shorter or partial(shortened, LONGEST)
        self._gates: dict[Any, Gate] = {}
        self._passed: set[Any] = set()

    def __call__(
        self, series: str, pass_: str, problem: Problem, run: Any = None, **options: Any
    ) -> Check:
        """The check of a result; `run(problem, arrays)` gives the call. Raises WrongResult."""
        small = problem if pass_ == "fwd" else self._shorter(problem)
        gate = self.gate(pass_, small)
        check: Check = gate.peer if theirs(series) else gate
        if ours.by_planes(series):
            check = gate.by(ours.precision(series))
        if small == problem:
            return check

        def shorter() -> None:
            arrays = peers.on_device(self.inputs(small), small.dtype)
            call = run(small, arrays) if run else make(series, pass_, small, arrays, **options)
            check(call())

        return self.once((series, pass_, small), shorter)

    def once(self, key: Any, check: Callable[[], Any]) -> Check:
        """What `check` checks for others, which is done once for all of this key."""
        if key not in self._passed:
            check()
            self._passed.add(key)
        return lambda result: float("nan")

    def gate(self, pass_: str, problem: Problem, **options: Any) -> Gate:
        key = (pass_ == "fwd", problem, *map(str, options.items()))
        if key not in self._gates:
            options = self._given(problem) | options
            self._gates[key] = gate(problem, pass_, *self.inputs(problem), **options)
        return self._gates[key]


def check_once(
    series: str, problem: Problem, host: Sequence[np.ndarray], options: dict[str, Any]
) -> None:
    """Check all of O and the gradients of a small problem; `host` are q, k, v, dout. Of torch's
    calls with dropout O is held to `DropoutGate`, gradients to be finite. Raises WrongResult.
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
        DropoutGate(problem, q, k, v, **options).peer(out)
        if not all(np.isfinite(x).all() for x in gradients):
            raise WrongResult("a gradient with dropout is not finite")
        return
    for pass_, result in (("fwd", (out,)), ("bwd", gradients)):
        gate = Gate.of_whole(problem, pass_, q, k, v, dout, **options)
        (gate.peer if theirs(series) else gate)(result)


def time_row(timing: Timing | None, failure: str = "", place: str = "", **columns: Any) -> Row:
    """A row of time, or one that failed: its note says `place` and, behind a semicolon, why."""
    note = f"{place}; {failure}" if failure else place
    common = {"source": "measured", "metric": "time", "unit": "ms", "note": note, **columns}
    return Row(**number(timing), **common)


def workspace_bytes(run: Callable[..., Any]) -> int:
    """Peak memory of one call of ours beside inputs and output; it takes `out`."""
    out = run()
    device.synchronize()
    with device.track_memory() as memory:
        run(out=out)
        device.synchronize()
    return memory.peak_bytes


def own_peak_bytes(run: Callable[..., Any], results: int) -> int:
    """Peak memory of one call of ours, with what it returns: `results` bytes without torch. The
    peaks of workspace and results are added, which is a little more where their times differ.
    """
    with device.track_memory() as memory:
        if peers.available():
            results = peers.allocated_bytes(run)
        else:
            run()
            device.synchronize()
    return memory.peak_bytes + results
