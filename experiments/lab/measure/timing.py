"""Timing of calls on a GPU by device events. A call is timed after its result has been checked.

Each call is warmed up before, and L2 is flushed before each timed run.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fa_numba import device, io_model
from fa_numba.problem import Problem

from ..record import Row
from .check import PEER_BOUND, WrongResult

T = TypeVar("T")

REPEATS = 20
# Most rows of Q of a problem whose gradients are checked against float64 when it is timed.
CHECKED_SEQLEN = 2048
# Long calls: seconds that all timed calls take together, and the least number of timed calls.
SECONDS, FEWEST = 0.4, 5
# Calls that take longer than this many seconds have no further warm-up runs.
LONG = 0.05
PROTOCOL = {
    "clock": "device events around one call",
    "repeats": REPEATS,
    "warmup": "the call that is checked and one more, and 3 behind them where that takes "
    f"{LONG:g} s at most",
    "l2": "flushed before every call by overwriting at least 1 GiB twice, behind which the host "
    "cost of the launch hides too",
    "order": "the calls of a problem are timed in a random order, which the problem decides",
    "statistic": "median; p20 and p80 beside it",
    "check": "error against float64 of the same inputs at most twice that of the unfused "
    "computation in the same dtype and a rounding, on blocks of rows of two heads",
    "check of torch": "the same rows; error at most "
    + ", ".join(f"{bound:.2g} in {dtype}" for dtype, bound in PEER_BOUND.items())
    + ", that the same function was computed: how it rounds is not ours to certify",
    "long calls": f"repeats cut to {SECONDS:g} s of calls, {FEWEST} at least",
    "gradients": "dq, dk and dv are allocated in the call, by torch's caching allocator where "
    "torch is installed; fwd+bwd is one forward with the logsumexp and one backward in one timed "
    "call",
    "check of gradients": "dq, dk and dv of the whole last head, each at most twice the error of "
    "the unfused computation in the same dtype and a rounding off float64; beyond N="
    f"{CHECKED_SEQLEN} the same call is checked once at N={CHECKED_SEQLEN} of the same head "
    "dimension and mask instead, and no error is given",
}


@dataclass(frozen=True)
class Timing:
    """The percentiles of several readings of a number, such as the milliseconds of a call.

    Parameters
    ----------
    median, p20, p80 : float
        Median, 20th and 80th percentile of the readings.
    n : int
        Number of readings.
    error : float, default nan
        Relative error of the checked result against float64. NaN if no error is known.
    """

    median: float
    p20: float
    p80: float
    n: int
    error: float = math.nan

    @classmethod
    def of(cls, samples: Sequence[float], error: float = math.nan) -> Timing:
        """Return the percentiles of several readings.

        Parameters
        ----------
        samples : sequence of float
            The readings, such as milliseconds.
        error : float, default nan
            Relative error of the checked result.

        Returns
        -------
        Timing
            The timing.

        Examples
        --------
        >>> Timing.of([1.0, 2.0, 3.0]).median
        2.0
        """
        p20, median, p80 = np.percentile(samples, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(samples), error)


def time_call(
    call: Callable[..., Any], check: Callable[[Any], float], repeats: int = REPEATS,
    seconds: float | None = None,
) -> Timing:  # fmt: skip
    """Check a call's result, then time the call. This needs a CUDA GPU.

    Parameters
    ----------
    call : callable
        Runs the call once and returns the result. It is called as ``call()`` first, and then as
        ``call(out=result)`` with the first result, which the call overwrites.
    check : callable
        Takes a result and returns the relative error of the result. Raises if the result is wrong.
    repeats : int, default 20
        Number of timed calls.
    seconds : float, optional
        Approximate time to spend on the timed calls, in seconds. The number of calls is then
        reduced, but not below 5.

    Returns
    -------
    Timing
        Milliseconds of a call, and the error that `check` returned.

    Raises
    ------
    WrongResult
        If the result is wrong.

    Notes
    -----
    Before the timing the call runs twice: once for the check, and once more. Calls of at most 0.05
    s run 3 more times. The constant `PROTOCOL` describes all details.
    """
    out = call()
    device.synchronize()
    error = check(out)
    start = time.perf_counter()
    call(out=out)
    device.synchronize()
    took = time.perf_counter() - start
    warmup = 0 if took > LONG else 3
    if seconds is not None:
        repeats = max(min(FEWEST, repeats), min(repeats, int(seconds / took)))
    samples = device.time_ms(lambda: call(out=out), repeats=repeats, warmup=warmup, flush_l2=True)
    return Timing.of(samples, error)


def shuffled(items: Sequence[T], key: Any) -> list[T]:
    """Return items in a random order, so that no series is always measured first.

    A GPU becomes warmer and slower during a series of calls.

    Parameters
    ----------
    items : sequence
        The items, such as the calls of a problem.
    key : object
        Decides the order, by the text of the object. An interrupted run continues in the same
        order.

    Returns
    -------
    list
        The items.

    Examples
    --------
    >>> sorted(shuffled("abc", 1)), shuffled("abc", 1) == shuffled("abc", 1)
    (['a', 'b', 'c'], True)
    """
    return random.Random(str(key)).sample(items, len(items))


def number(found: Timing | None) -> dict[str, Any]:
    """Return the columns of a row that contain numbers of a timing: value, p20, p80 and n.

    Parameters
    ----------
    found : Timing or None
        The timing; None if the measurement failed.

    Returns
    -------
    dict
        Keyword arguments of `Row`. Only ``value=None`` if there is no timing.
    """
    if found is None:
        return {"value": None}
    return {"value": found.median, "p20": found.p20, "p80": found.p80, "n": found.n}


def timing_rows(timing: Timing, problem: Problem, **common: Any) -> Iterator[Row]:
    """Yield the rows of a timing: time (ms), speed (TFLOP/s) and, if it is known, the error.

    Parameters
    ----------
    timing : Timing
        Milliseconds of a call.
    problem : Problem
        The problem. The speed is its number of useful FLOPs divided by the time.
    **common
        The other columns of the rows.

    Yields
    ------
    Row
        Two or three rows.
    """
    yield Row(metric="time", unit="ms", **number(timing), **common)
    teraflop = io_model.flops(problem, common.get("pass_", "fwd")) / 1e9
    # The speed's 80th percentile belongs to the time's 20th percentile.
    median, p20, p80 = (teraflop / t for t in (timing.median, timing.p80, timing.p20))
    speed = Timing(median, p20, p80, timing.n)
    yield Row(metric="speed", unit="TFLOP/s", **number(speed), **common)
    if not math.isnan(timing.error):
        yield Row(metric="error", unit="1", value=timing.error, **common)


def attempt(work: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, str]:
    """Call a function and return its result, or the reason why it failed.

    Errors are caught, so that a run continues after a failure.

    Parameters
    ----------
    work : callable
        The function.
    *arguments, **named
        Arguments of the function.

    Returns
    -------
    result : Any
        The function's result; None if it failed.
    failure : str
        Empty, or "failed: " and the reason in at most 200 characters.

    Examples
    --------
    >>> attempt(int, "7"), attempt(int, "x")[1][:18]
    ((7, ''), 'failed: ValueError')
    """
    try:
        return work(*arguments, **named), ""
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "out of memory" in reason.lower():
            reason = "out of memory"
        elif not isinstance(error, WrongResult):
            reason = f"{type(error).__name__}: {reason}"
    gc.collect()  # the error's frames may hold arrays in cycles
    return None, f"failed: {reason[:200]}"
