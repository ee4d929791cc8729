"""Times on a GPU, warm, of device events, with L2 flushed, of results checked first."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_numba import device, io_model
from fa_numba.problem import Problem

from ..record import Row
from .check import PEER_BOUND, WrongResult

REPEATS = 20
# The longest problem whose gradients are computed in float64 here.
CHECKED_SEQLEN = 2048
# Of calls that take long: about so much time, and no fewer calls.
SECONDS, FEWEST = 0.4, 5
# Seconds from which on a call needs no more warming up than its check.
LONG = 0.05
PROTOCOL = {
    "clock": "device events around one call",
    "repeats": REPEATS,
    "warmup": "the call that is checked and one more, and 3 behind them where that takes "
    f"{LONG:g} s at most",
    "l2": "flushed before every call by overwriting at least 1 GiB twice, behind which the host "
    "cost of the launch hides too",
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
    """Milliseconds of a call, or what else of several runs, and the error of the check before."""

    median: float
    p20: float
    p80: float
    n: int
    error: float = math.nan

    @classmethod
    def of(cls, samples: Sequence[float], error: float = math.nan) -> Timing:
        p20, median, p80 = np.percentile(samples, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(samples), error)


def time_call(
    call: Callable[..., Any], check: Callable[[Any], float], repeats: int = REPEATS,
    seconds: float | None = None,
) -> Timing:  # fmt: skip
    """Check `call()`'s result with a gate, then time `call(out=result)`: `repeats` runs or, with
    `seconds`, as many as that takes, FEWEST at least. One of more than LONG seconds is warm then.
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


def number(found: Timing | None) -> dict[str, Any]:
    """The columns of a row that have what was found, or that nothing was."""
    if found is None:
        return {"value": None}
    return {"value": found.median, "p20": found.p20, "p80": found.p80, "n": found.n}


def timing_rows(timing: Timing, problem: Problem, **common: Any) -> Iterator[Row]:
    """Rows of time, speed and, where there is one, error; `common` are their other columns."""
    yield Row(metric="time", unit="ms", **number(timing), **common)
    teraflop = io_model.flops(problem, common.get("pass_", "fwd")) / 1e9
    # The fastest fifth of the runs is the upper end of the speed.
    median, p20, p80 = (teraflop / t for t in (timing.median, timing.p80, timing.p20))
    speed = Timing(median, p20, p80, timing.n)
    yield Row(metric="speed", unit="TFLOP/s", **number(speed), **common)
    if not math.isnan(timing.error):
        yield Row(metric="error", unit="1", value=timing.error, **common)


def attempt(work: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, str]:
    """(result, "") of the call, or (None, why it failed): one failure does not end a run."""
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
