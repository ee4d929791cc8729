"""Times on a GPU that were checked first.

A call's result is held against float64 before it is timed; a wrong one is not timed. Times come
from device events, warm-up apart, the L2 cache flushed before every run.
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

from .store import Row

REPEATS = 20
# For kernels that are not ours: that they computed the same function. A forgotten scale or mask,
# or TF32, is further off; another order of summation is not.
PEER_BOUND = 1e-4
PROTOCOL = {
    "clock": "device events around one call",
    "repeats": REPEATS,
    "warmup": "3 calls, or 1 where a call takes over 200 ms",
    "l2": "flushed before every call",
    "statistic": "median; p20 and p80 beside it",
    "check": "error against float64 at most twice that of unfused float32, on blocks of rows of "
    "the first and the last head",
    "check of torch": f"the same rows; error at most {PEER_BOUND:g}, that the same function was "
    "computed: how it rounds is not ours to certify",
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


def to_host(array: Any) -> np.ndarray:
    """A NumPy copy of a NumPy, numba or torch array."""
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    if hasattr(array, "cpu"):
        return array.detach().cpu().numpy()
    return np.asarray(array)


class Gate:
    """Checks results for one problem: 3 blocks of 32 rows in each of two heads.

    `gate(out)` holds our kernels to `bound`, `gate.peer(out)` others to PEER_BOUND; both give the
    relative error and raise WrongResult when it is beyond the bound.

    A block of rows [a, b) of a causal problem is itself bottom-right aligned once the columns that
    row b - 1 does not see are cut off.
    """

    def __init__(
        self, problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: int = 32
    ) -> None:
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
                block = (
                    q[b : b + 1, h : h + 1, first : first + rows],
                    k[b : b + 1, heads : heads + 1, :columns],
                    v[b : b + 1, heads : heads + 1, :columns],
                )
                options = {"scale": problem.scale, "causal": problem.causal}
                self._places.append((b, h, slice(first, first + rows)))
                self._expected.append(reference.attention(*block, **options).ravel())
                unfused.append(np.ravel(reference.unfused(*block, dtype=np.float32, **options)))
        self._reference = np.concatenate(self._expected)
        of_unfused = reference.relative_error(np.concatenate(unfused), self._reference)
        # One rounding of the result on top: a unit in the last place of float32.
        self.bound = 2 * of_unfused + float(np.finfo(np.float32).eps)

    def __call__(self, out: Any) -> float:
        return self._check(out, self.bound)

    def peer(self, out: Any) -> float:
        return self._check(out, PEER_BOUND)

    def _check(self, out: Any, bound: float) -> float:
        blocks = [to_host(out[place]).ravel() for place in self._places]
        error = float(reference.relative_error(np.concatenate(blocks), self._reference))
        if not error <= bound:
            raise WrongResult(f"error {error:.2e} against float64, allowed {bound:.2e}")
        return error


def time_call(
    call: Callable[..., Any], check: Callable[[Any], float], repeats: int = REPEATS
) -> Timing:
    """Check `call()`'s result with a gate, then time `call(out=result)`."""
    out = call()
    device.synchronize()
    error = check(out)
    start = time.perf_counter()
    call(out=out)
    device.synchronize()
    warmup = 1 if time.perf_counter() - start > 0.2 else 3
    samples = device.time_ms(lambda: call(out=out), repeats=repeats, warmup=warmup, flush_l2=True)
    p20, median, p80 = np.percentile(samples, [20, 50, 80])
    return Timing(float(median), float(p20), float(p80), len(samples), error)


def timing_rows(timing: Timing, problem: Problem, **common: Any) -> Iterator[Row]:
    """The rows of one timing: time, speed and the error found before; `common` is their rest."""
    times = {"p20": timing.p20, "p80": timing.p80, "n": timing.n}
    yield Row(metric="time", unit="ms", value=timing.median, **times, **common)
    teraflop = io_model.flops(problem) / 1e9
    # The fastest fifth of the runs is the upper end of the speed.
    speeds = {"p20": teraflop / timing.p80, "p80": teraflop / timing.p20, "n": timing.n}
    yield Row(metric="speed", unit="TFLOP/s", value=teraflop / timing.median, **speeds, **common)
    yield Row(metric="error", unit="1", value=timing.error, **common)


def attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or (None, why it failed), so that one configuration does not end a run."""
    try:
        return work(), ""
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "out of memory" in reason.lower():
            reason = "out of memory"
        elif not isinstance(error, WrongResult):
            reason = f"{type(error).__name__}: {reason}"
        return None, f"failed: {reason[:200]}"
    finally:
        gc.collect()
