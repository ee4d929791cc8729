"""Calls of any series, ours or torch's, in any pass and with options; and their checks."""

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
    """Return whether a series is a kernel of torch.

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    bool
        True for names that begin with "torch".
    """
    return series.startswith("torch")


def make(
    series: str, pass_: str, problem: Problem, arrays: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Return a function that runs a series once in a pass.

    Parameters
    ----------
    series : str
        Name of the series, such as "fa2-mma" or "torch-fa2".
    pass_ : str
        "fwd", "bwd" or "fwd+bwd".
    problem : Problem
        The problem.
    arrays : sequence of array
        Arrays q, k and v on the GPU; with gradients dout too.
    **options
        Options of our call. torch's calls get `dropout_p` and `kv_lens` only.

    Returns
    -------
    callable
        Takes the argument `out` and returns O or (dq, dk, dv).
    """
    source: Any = peers if theirs(series) else ours
    if theirs(series):
        options = {name: value for name, value in options.items() if name in _TAKEN}
    if pass_ == "fwd":
        return source.call(series, problem, *arrays[:3], **options)
    return source.gradients(series, problem, pass_, *arrays, **options)


def shortened(longest: int, problem: Problem) -> Problem:
    """Return a problem of at most `longest` rows, with one batch entry if it had to be shortened.

    Parameters
    ----------
    longest : int
        Most rows of Q.
    problem : Problem
        The problem.

    Returns
    -------
    Problem
        `problem` itself if it is short enough.
    """
    if problem.seqlen_q <= longest:
        return problem
    return replace(problem, batch=1, seqlen_q=longest, seqlen_k=longest)


class Checks:
    """The checks of an experiment's calls.

    O is checked on the problem itself. Gradients of a long problem are checked once on a shorter
    problem with the same head dimension and mask; the check of the long problem then returns NaN.

    Parameters
    ----------
    inputs : Inputs
        Inputs of any problem.
    shorter : callable, optional
        Returns the shorter problem of a problem. Default: at most 1024 rows.
    given : callable, optional
        Returns the options of a problem's calls. Default: none.
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
        """Return the check of a series' result.

        Parameters
        ----------
        series : str
            Name of the series.
        pass_ : str
            "fwd", "bwd" or "fwd+bwd".
        problem : Problem
            The problem.
        run : callable, optional
            Takes a problem and its arrays and returns the call. Default: the call that `make`
            returns.
        **options
            Options of the call.

        Returns
        -------
        callable
            Takes a result and returns its relative error, NaN if the shorter problem was checked
            instead.

        Raises
        ------
        WrongResult
            If the result of the shorter problem is wrong.
        """
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
        """Run a check unless it has passed before; return a check that accepts everything.

        Parameters
        ----------
        key : hashable
            Identifies the check.
        check : callable
            The check; it raises if something is wrong.

        Returns
        -------
        callable
            Takes a result and returns NaN.
        """
        if key not in self._passed:
            check()
            self._passed.add(key)
        return lambda result: float("nan")

    def gate(self, pass_: str, problem: Problem, **options: Any) -> Gate:
        """Return the gate of a problem's result in a pass; it is made once.

        Parameters
        ----------
        pass_ : str
            "fwd", "bwd" or "fwd+bwd".
        problem : Problem
            The problem.
        **options
            Options of the call, in addition to the given ones.

        Returns
        -------
        Gate
            The gate.
        """
        key = (pass_ == "fwd", problem, *map(str, options.items()))
        if key not in self._gates:
            options = self._given(problem) | options
            self._gates[key] = gate(problem, pass_, *self.inputs(problem), **options)
        return self._gates[key]


def check_once(
    series: str, problem: Problem, host: Sequence[np.ndarray], options: dict[str, Any]
) -> None:
    """Check O and the gradients of a small problem completely.

    For torch's calls with dropout, O is checked by `DropoutGate`, and gradients must be finite.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        A small problem.
    host : sequence of ndarray
        Arrays q, k, v and dout.
    options : dict
        Options of the call.

    Raises
    ------
    WrongResult
        If a result is wrong.
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
            raise WrongResult("all gradients with dropout must be finite, got inf or NaN")
        return
    for pass_, result in (("fwd", (out,)), ("bwd", gradients)):
        gate = Gate.of_whole(problem, pass_, q, k, v, dout, **options)
        (gate.peer if theirs(series) else gate)(result)


def time_row(timing: Timing | None, failure: str = "", place: str = "", **columns: Any) -> Row:
    """Return a row of time, or of a measurement that failed.

    Parameters
    ----------
    timing : Timing or None
        Milliseconds; None if the measurement failed.
    failure : str, default ""
        Why it failed.
    place : str, default ""
        What no column says; the beginning of the note.
    **columns
        The other columns of the row.

    Returns
    -------
    Row
        The row.
    """
    note = f"{place}; {failure}" if failure else place
    common = {"source": "measured", "metric": "time", "unit": "ms", "note": note, **columns}
    return Row(**number(timing), **common)


def workspace_bytes(run: Callable[..., Any]) -> int:
    """Return the peak memory of one of our calls, in bytes, besides inputs and output.

    Parameters
    ----------
    run : callable
        The call, as `make` returns it.

    Returns
    -------
    int
        Bytes.
    """
    out = run()
    device.synchronize()
    with device.track_memory() as memory:
        run(out=out)
        device.synchronize()
    return memory.peak_bytes


def own_peak_bytes(run: Callable[..., Any], results: int) -> int:
    """Return the peak memory of one of our calls, in bytes, with its results.

    The peaks of workspace and results are added. The sum is a little too large if they are at
    different times.

    Parameters
    ----------
    run : callable
        The call, as `make` returns it.
    results : int
        Bytes of the results. With torch installed they are measured instead.

    Returns
    -------
    int
        Bytes.
    """
    with device.track_memory() as memory:
        if peers.available():
            results = peers.allocated_bytes(run)
        else:
            run()
            device.synchronize()
    return memory.peak_bytes + results
