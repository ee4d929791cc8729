"""Compiles kernels of other libraries before a measurement, in several processes.

flash-attn-4 and torch's flex_attention compile a kernel for seconds at the first call, and store it
on disk. An experiment names such calls in ``peer_calls(options)``. Several processes run each of
these calls once. The experiment then finds the compiled kernels on disk.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from fa_numba import device
from fa_numba.problem import Problem

from ..measure import calls, peers
from ..measure.workloads import Inputs
from ..record.options import Options
from ..record.registry import load

PeerCall = tuple[str, str, Problem]  # series, pass and problem
PROCESSES = 8
# If this environment variable is 1 when Python imports flash-attn-4, the package stores compiled
# kernels on disk.
STORES = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def store_on_disk() -> None:
    """Let flash-attn-4 store compiled kernels on disk, unless the user decided otherwise."""
    os.environ.setdefault(STORES, "1")


def compile_peers(name: str, options: Options) -> tuple[int, list[str]]:
    """Run the calls once that an experiment names in ``peer_calls``, in several processes.

    Parameters
    ----------
    name : str
        Name of the experiment.
    options : Options
        The user's choices.

    Returns
    -------
    tuple of int and list of str
        Number of calls that ran, and a text for each call that failed. A call that fails here fails
        again when the experiment measures it.
    """
    groups = len(list(_groups(name, options)))
    parts = min(PROCESSES, os.cpu_count() or 1, groups)
    if not parts:
        return 0, []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parts, mp_context=spawn) as pool:
        found = list(pool.map(partial(run_part, name, options, parts=parts), range(parts)))
    return sum(ran for ran, _ in found), [text for _, failures in found for text in failures]


def run_part(name: str, options: Options, part: int, parts: int) -> tuple[int, list[str]]:
    """Run every ``parts``-th group of an experiment's calls, from the group ``part`` on.

    Returns what `compile_peers` returns, for these groups.
    """
    make: Callable[..., Callable[[], object]] = getattr(load(name), "make", calls.make)
    inputs, ran, failures = Inputs(gradient=True), 0, []
    for group in itertools.islice(_groups(name, options), part, None, parts):
        for series, pass_, problem in group:
            try:
                arrays = peers.on_device(inputs(problem), problem.dtype)
                make(series, pass_, problem, arrays)()
                device.synchronize()
                ran += 1
            except Exception as error:
                failures.append(f"{series}, {pass_}, {problem}: {error!r}")
            peers.release()
    return ran, failures


def _groups(name: str, options: Options) -> Iterable[Sequence[PeerCall]]:
    """Return the groups of calls that an experiment names; one process runs a group."""
    named = getattr(load(name), "peer_calls", None)
    return () if named is None else named(options)
