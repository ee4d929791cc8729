"""Calls of any series, ours or torch's, in any pass and with options, and checks of results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.problem import Problem

from ..record import Row
from . import flex, pallas, peers
from . import series as ours
from .check import Check, DropoutGate, Gate, WrongResult, gate, to_host
from .timing import Timing, number
from .workloads import Inputs

LONGEST = 1024  # most rows of Q of a problem whose gradients are checked against float64
# The options of our calls that torch's calls take too.
_TAKEN = ("dropout_p", "kv_lens")


def theirs(series: str) -> bool:
    """Return whether a series is run by another library instead of by our kernels.

    Parameters
    ----------
    series : str
        Name of the series.

    Returns
    -------
    bool
        True for names that begin with "torch" or "jax", and for flash-attn-4.
    """
    return series.startswith(("torch", "jax")) or series == peers.FA4


def forward_only() -> tuple[str, ...]:
    """Return the series of other libraries that are called in the forward pass only.

    Returns
    -------
    tuple of str
        Names of series.
    """
    return (*peers.FLEX_BACKENDS, peers.PALLAS)


def make(
    series: str, pass_: str, problem: Problem, arrays: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Return a function that runs one call of a series in one pass.

    Parameters
    ----------
    series : str
        Name of the series, such as "fa2-mma" or "torch-fa2".
    pass_ : str
        "fwd", "bwd" or "fwd+bwd".
    problem : Problem
        The problem.
    arrays : sequence of array
        Arrays q, k and v on the GPU; for a pass with gradients also dout.
    **options
        Options of our call. torch's calls get `dropout_p` and `kv_lens` only.

    Returns
    -------
    callable
        Function ``run(out=None)`` that returns O, or the tuple (dq, dk, dv). Our forward calls
        write O to `out` if it is given. Other calls ignore `out`.
    """
    if series in forward_only():
        if pass_ != "fwd" or any(options.get(name) for name in _TAKEN):
            raise ValueError(f"{series} must be called forward and without dropout_p or kv_lens")
        if series == peers.PALLAS:
            return pallas.call(problem, *arrays[:3])
        return flex.call(problem, *arrays[:3], backend=peers.FLEX_BACKENDS[series])
    source: Any = peers if theirs(series) else ours
    if theirs(series):
        options = {name: value for name, value in options.items() if name in _TAKEN}
    if pass_ == "fwd":
        return source.call(series, problem, *arrays[:3], **options)
    return source.gradients(series, problem, pass_, *arrays, **options)


def shortened(longest: int, problem: Problem) -> Problem:
    """Return a problem with at most `longest` rows, for checks that are slow on long problems.

    Parameters
    ----------
    longest : int
        Most rows of Q.
    problem : Problem
        The problem.

    Returns
    -------
    Problem
        `problem` itself if it has at most `longest` rows. Otherwise a copy with batch 1 and with
        `longest` rows of Q, K and V.
    """
    if problem.seqlen_q <= longest:
        return problem
    return replace(problem, batch=1, seqlen_q=longest, seqlen_k=longest)


class Checks:
    """The checks of the results of an experiment's calls.

    O is checked on the problem itself. Gradients of a long problem are too slow to check. Instead,
    they are checked once on a shorter problem with the same head dimension and mask. The gradients
    of the long problem are then accepted without a check, and their error is NaN.

    Parameters
    ----------
    inputs : Inputs
        Returns the input arrays of any problem.
    shorter : callable, optional
        Takes a problem and returns the problem on which gradients are checked. Default: the problem
        cut to at most 1024 rows.
    given : callable, optional
        Takes a problem and returns options that all calls of the problem have. Default: no options.
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
        """Return the function that checks the result of one call of a series.

        A float64 reference of a long problem would take too long. For gradients of a long problem,
        a similar problem with a shorter sequence is computed and checked now instead.

        Parameters
        ----------
        series : str
            Name of the series.
        pass_ : str
            "fwd", "bwd" or "fwd+bwd".
        problem : Problem
            The problem.
        run : callable, optional
            Takes a problem and its arrays, and returns the function that makes the call. It is used
            for the shorter problem. Default: the call that `make` returns.
        **options
            Options of the call.

        Returns
        -------
        callable
            Takes a result and returns the relative error of the result. Returns NaN if the shorter
            problem was checked instead.

        Raises
        ------
        WrongResult
            If there is a shorter problem, and its result is wrong.
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
        """Run a check now, unless it has already passed.

        This is for results that are not checked themselves. Instead, the result of a similar,
        shorter call is checked once. `check` is this check. The timing functions need a function
        that checks each result, and this method returns such a function. It checks nothing more.

        Parameters
        ----------
        key : hashable
            Identifies the check. If a check with an equal key has passed, `check` is not called.
        check : callable
            Takes no argument. Raises an error if something is wrong.

        Returns
        -------
        callable
            Takes any result and returns NaN, the error of a result that was not checked.
        """
        if key not in self._passed:
            check()
            self._passed.add(key)
        return lambda result: float("nan")

    def gate(self, pass_: str, problem: Problem, **options: Any) -> Gate:
        """Return the gate that checks results of a problem. Equal arguments give the same gate.

        Parameters
        ----------
        pass_ : str
            "fwd", "bwd" or "fwd+bwd".
        problem : Problem
            The problem.
        **options
            Options of the call, in addition to the options that `given` returns.

        Returns
        -------
        Gate
            A gate for O (pass "fwd") or for the gradients (other passes).
        """
        key = (pass_ == "fwd", problem, *map(str, options.items()))
        if key not in self._gates:
            options = self._given(problem) | options
            self._gates[key] = gate(problem, pass_, *self.inputs(problem), **options)
        return self._gates[key]


def check_once(
    series: str, problem: Problem, host: Sequence[np.ndarray], options: dict[str, Any]
) -> None:
    """Run both passes of a small problem, and check all elements of O and of the gradients.

    For torch's calls with dropout, `DropoutGate` checks O, and the gradients must be finite.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        A small problem.
    host : sequence of ndarray
        Arrays q, k, v and dout in host memory.
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
    # Rows past q_lens are padding. torch has no such option, and computes these rows too.
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
    """Return the row with the time of a call, or the row that says why the measurement failed.

    Parameters
    ----------
    timing : Timing or None
        Milliseconds of the call; None if the measurement failed.
    failure : str, default ""
        Why the measurement failed; the end of the note.
    place : str, default ""
        Beginning of the note: facts about the measurement for which there is no column.
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
    """Return the peak workspace of one of our calls: memory in addition to inputs and output.

    Parameters
    ----------
    run : callable
        The call, as `make` returns it. It is called once without and once with `out`.

    Returns
    -------
    int
        Bytes of GPU memory.
    """
    out = run()
    device.synchronize()
    with device.track_memory() as memory:
        run(out=out)
        device.synchronize()
    return memory.peak_bytes


def own_peak_bytes(run: Callable[..., Any], results: int) -> int:
    """Return the peak memory of one of our calls: its workspace and its results.

    The peak of the workspace and the peak of the results are added. The sum is a little too large
    if the two peaks occur at different times.

    Parameters
    ----------
    run : callable
        The call, as `make` returns it.
    results : int
        Bytes of the results. This number is used only if torch is missing. With torch, the memory
        of the results is measured.

    Returns
    -------
    int
        Bytes of GPU memory.
    """
    with device.track_memory() as memory:
        if peers.available():
            results = peers.allocated_bytes(run)
        else:
            run()
            device.synchronize()
    return memory.peak_bytes + results
