"""Compiling ahead: compiles kernels of several plans in parallel, before any call needs them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from fa_numba.device import Kernel, kernel_cache
from fa_numba.host.plans import LaunchPlan

# Compute capability of plans that were made for no GPU, which have the limits of an H100.
_EMULATED = (9, 0)


class Ahead(NamedTuple):
    """The result of ``compile_ahead``: two numbers of kernels.

    ``compiled`` is the number of kernels that the call compiled. ``stored`` is the number of
    kernels that were on disk before the call.
    """

    compiled: int
    stored: int


def compile_ahead(plans: Iterable[LaunchPlan], jobs: int | None = None) -> Ahead:
    """Compile the kernels of several plans in parallel, and store them on disk.

    Each kernel is compiled for the GPU for which its plan was made. This GPU need not be in this
    machine. Later calls load the stored kernels.

    Parameters
    ----------
    plans : iterable of plans
        Plans that ``fa_numba.plan`` returned. The kernels of plans that cannot be pickled, such as
        plans with a function that was defined inside another function, are compiled in this
        process.
    jobs : int, optional
        Number of processes. Default: one per CPU core, and at most one per kernel.

    Returns
    -------
    Ahead
        ``compiled``, the number of compiled kernels, and ``stored``, the number of kernels that
        were stored before.

    Raises
    ------
    ValueError
        If ``FA_NUMBA_CACHE`` is the empty string, so that no compiled kernel is stored.
    ImportError
        If NVIDIA's compiler is not installed.
    """
    if kernel_cache.directory() is None:
        raise ValueError(
            f"{kernel_cache.VARIABLE} must be the name of a folder, or not be set, so that "
            "compiled kernels can be stored, got an empty string"
        )
    here: list[tuple[Kernel, tuple[int, int]]] = []
    elsewhere: list[tuple[bytes, int, tuple[int, int]]] = []
    keys: dict[bytes, bool] = {}  # of every kernel: whether it is stored
    for plan in plans:
        capability = _capability(plan)
        text = None
        for n, kernel in enumerate(plan.launched):
            key = kernel_cache.key_of(kernel, capability)
            if key in keys:
                continue
            keys[key] = kernel_cache.read(kernel, capability) is not None
            if keys[key]:
                continue
            text = text or _pickled(plan)
            if text:
                elsewhere.append((text, n, capability))
            else:
                here.append((kernel, capability))
    jobs = min(jobs or os.cpu_count() or 1, len(elsewhere))
    if jobs > 1:
        # A new interpreter: a copy of this process would share its CUDA context.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context) as pool:
            list(pool.map(_compile_one, elsewhere))
    else:
        list(map(_compile_one, elsewhere))
    for kernel, capability in here:
        kernel.built(capability)
    return Ahead(len(elsewhere) + len(here), sum(keys.values()))


def _capability(plan: LaunchPlan) -> tuple[int, int]:
    """Return the compute capability of the GPU for which a plan was made."""
    asked = getattr(plan, "asked", None)
    return asked.capability if asked is not None else _EMULATED


def _pickled(plan: LaunchPlan) -> bytes:
    """Return the plan as bytes for another process, or no bytes if it cannot be pickled."""
    try:
        return pickle.dumps(plan)
    except (AttributeError, TypeError, ValueError, pickle.PicklingError):
        return b""


def _compile_one(task: tuple[bytes, int, tuple[int, int]]) -> None:
    """Compile one kernel of a plan for a GPU, and store the kernel on disk.

    ``task`` contains the pickled plan, the number of the kernel in the plan, and the compute
    capability of the GPU.
    """
    text, n, capability = task
    pickle.loads(text).launched[n].built(capability)
