"""Kernels compiled side by side, before anything is timed."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fa_numba import device
from fa_numba.device import kernel_cache
from fa_numba.problem import Problem

from ..record import Bench
from .series import backward_options, plan
from .timing import attempt

MOST_JOBS = 16
# Fewer kernels are compiled by the time that processes have started.
FEWEST = 3


@dataclass(frozen=True)
class Call:
    """One call to compile for: the arguments of `series.plan`."""

    series: str
    problem: Problem
    options: dict[str, Any] = field(default_factory=dict)


def calls(series: str, problem: Problem, pass_: str, **own: Any) -> Iterator[Call]:
    """The calls that `series.call` makes, or with gradients `series.gradients`; none of torch's."""
    if series.startswith("torch"):
        return
    if pass_ == "fwd":
        yield Call(series, problem, own)
    else:
        yield Call(series, problem, own | {"return_lse": True})
        yield Call(series, problem, own | {"passes": "bwd", **backward_options(series)})


def compile_ahead(calls: Iterable[Call], bench: Bench) -> None:
    """Compile the calls' kernels in many processes; what cannot be is left to fail later."""
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    if jobs == 1 or kernel_cache.directory() is None or not device.gpu_available():
        return
    missing = missing_kernels(calls)
    if len(missing) < FEWEST:
        return
    jobs = min(jobs, len(missing))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compile, *each) for each in missing]
        try:
            for future in bench.track(futures, f"compiling, {jobs} processes"):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what is not begun would be waited for
            raise


def missing_kernels(calls: Iterable[Call]) -> list[tuple[Call, int]]:
    """Kernels not on disk, a call and a place in its plan each; backward ones first."""
    found: dict[int, tuple[Call, int]] = {}
    capability = device.compute_capability()
    for call in calls:
        planned, _ = attempt(plan, call.series, call.problem, **call.options)
        for at, kernel in enumerate(planned.launched if planned is not None else ()):
            if id(kernel) not in found and kernel_cache.read(kernel, capability) is None:
                found[id(kernel)] = call, at
    return sorted(found.values(), key=lambda each: each[0].options.get("passes") != "bwd")


def _compile(call: Call, at: int) -> None:
    attempt(lambda: plan(call.series, call.problem, **call.options).launched[at].compiled())
