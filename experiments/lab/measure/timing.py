"""Times on a GPU that were checked first.

A call's result is compared with float64 first, and a wrong one is not timed. Times are of device
events, after a warm-up, with the L2 cache flushed before every run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_numba import device, io_model, reference
from fa_numba.problem import Problem

from ..record.store import Row

REPEATS = 20
# Allowed beside the error of the unfused computation: a rounding of the result.
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# For kernels that are not ours: that they computed the same function. A forgotten scale or mask,
# or TF32 in float32, is further off; another order of summation, or 16-bit scores, is not.
PEER_BOUND = {"float32": 1e-4, "float16": 2.0**-8, "bfloat16": 2.0**-5}
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


class WrongResult(Exception):
    """The result is further from float64 than the tolerance allows."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call, and the relative error found by the check before it."""

    median: float
    p20: float
    p80: float
    n: int
    error: float

    @property
    def spread(self) -> dict[str, Any]:
        """The columns of a row that say how the times are spread."""
        return {"p20": self.p20, "p80": self.p80, "n": self.n}


def to_host(array: Any) -> np.ndarray:
    """A NumPy copy of a NumPy, numba or torch array."""
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    if hasattr(array, "cpu"):
        return array.detach().float().cpu().numpy()
    return np.asarray(array)


def rounds(problem: Problem) -> dict[str, Any]:
    """How the unfused computation of the problem's dtype rounds: sums are float32 in any."""
    return {"matrix_dtype": None if problem.dtype == "float32" else problem.dtype}


class Gate:
    """Checks results for one problem: 3 blocks of 32 rows in each of two heads.

    q, k and v are NumPy's, or lie on the GPU, from where only what is looked at is copied.

    `gate(out)` holds our kernels to `bound`, `gate.peer(out)` others to its `peer_bound`; both give
    the relative error and raise WrongResult when it is beyond the bound.

    A block of rows [a, b) of a causal problem is itself bottom-right aligned once the columns that
    row b - 1 does not see are cut off.
    """

    def __init__(self, problem: Problem, q: Any, k: Any, v: Any, *, rows: int = 32) -> None:
        Nq, rows = problem.seqlen_q, min(rows, problem.seqlen_q)
        self._places = []
        self._expected = []
        unfused = []
        last = (problem.batch - 1, problem.heads_q - 1)
        for b, h in dict.fromkeys([(0, 0), last]):
            for first in dict.fromkeys([0, (Nq - rows) // 2, Nq - rows]):
                columns = problem.columns_end(first + rows - 1)
                if columns == 0:
                    continue
                heads = h // problem.group
                places = (
                    (q, (b, h, slice(first, first + rows))),
                    (k, (b, heads, slice(columns))),
                    (v, (b, heads, slice(columns))),
                )
                block = [to_host(x[at])[None, None] for x, at in places]
                options: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal}
                self._places.append((b, h, slice(first, first + rows)))
                self._expected.append(np.ravel(reference.attention(*block, **options)))
                near = reference.unfused(*block, **options | rounds(problem))
                unfused.append(np.ravel(near))
        self._reference = np.concatenate(self._expected)
        of_unfused = reference.relative_error(np.concatenate(unfused), self._reference)
        self.bound = 2 * of_unfused + ROUNDING[problem.dtype]
        self.peer_bound = PEER_BOUND[problem.dtype]

    def __call__(self, out: Any) -> float:
        return self._check(out, self.bound)

    def peer(self, out: Any) -> float:
        return self._check(out, self.peer_bound)

    def _check(self, out: Any, bound: float) -> float:
        blocks = [to_host(out[place]).ravel() for place in self._places]
        error = float(reference.relative_error(np.concatenate(blocks), self._reference))
        if not error <= bound:
            raise WrongResult(f"error {error:.2e} against float64, allowed {bound:.2e}")
        return error


class GradientGate:
    """Checks dq, dk and dv of the whole last head, as `Gate` checks rows of the output.

    `arrays` are q, k, v and dout. The error is the largest of the three. Query and K/V heads must
    be as many: with shared K/V heads dk and dv are sums over heads.
    """

    def __init__(self, problem: Problem, *arrays: np.ndarray) -> None:
        if problem.group != 1:
            raise ValueError(f"heads_q is {problem.heads_q}, not heads_k, {problem.heads_k}")
        b, h = self._head = (problem.batch - 1, problem.heads_q - 1)
        q, k, v, dout = (x[b : b + 1, h : h + 1] for x in arrays)
        options: dict[str, Any] = {"scale": problem.scale, "causal": problem.causal}
        exact = reference.attention_backward(dout, q, k, v, **options)
        unfused = reference.unfused_backward(dout, q, k, v, **options | rounds(problem))
        self._expected = [x[0, 0] for x in exact]
        self.bounds = [
            2 * reference.relative_error(*pair) + ROUNDING[problem.dtype]
            for pair in zip(unfused, exact, strict=True)
        ]
        self.peer_bounds = [PEER_BOUND[problem.dtype]] * 3

    def __call__(self, gradients: Any) -> float:
        return self._check(gradients, self.bounds)

    def peer(self, gradients: Any) -> float:
        return self._check(gradients, self.peer_bounds)

    def _check(self, gradients: Any, bounds: list[float]) -> float:
        errors = []
        for name, got, expected, bound in zip(
            ("dq", "dk", "dv"), gradients, self._expected, bounds, strict=True
        ):
            errors.append(float(reference.relative_error(to_host(got[self._head]), expected)))
            if not errors[-1] <= bound:
                raise WrongResult(
                    f"{name}: error {errors[-1]:.2e} against float64, allowed {bound:.2e}"
                )
        return max(errors)


def time_call(
    call: Callable[..., Any],
    check: Callable[[Any], float],
    repeats: int = REPEATS,
    seconds: float | None = None,
) -> Timing:
    """Check `call()`'s result with a gate, then time `call(out=result)`.

    With `seconds`, fewer than `repeats` runs are timed where all would take longer than that, but
    at least FEWEST. A call of more than LONG seconds is warm after the check's and the one that
    tells how long it takes.
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
    p20, median, p80 = np.percentile(samples, [20, 50, 80])
    return Timing(float(median), float(p20), float(p80), len(samples), error)


def timing_rows(timing: Timing, problem: Problem, **common: Any) -> Iterator[Row]:
    """Rows of time, speed and error from one timing; `common` are their other columns."""
    yield Row(metric="time", unit="ms", value=timing.median, **timing.spread, **common)
    teraflop = io_model.flops(problem, common.get("pass_", "fwd")) / 1e9
    # The fastest fifth of the runs is the upper end of the speed.
    speeds: dict[str, Any] = {
        "p20": teraflop / timing.p80,
        "p80": teraflop / timing.p20,
        "n": timing.n,
    }
    yield Row(metric="speed", unit="TFLOP/s", value=teraflop / timing.median, **speeds, **common)
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
