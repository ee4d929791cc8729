"""Runs a plan: finds what its launches name, and makes them in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.choices.arguments import Argument, Boxes, Buffer, Grouped, Untouched
from fa_numba.device import DeviceArray
from fa_numba.dtypes import DTYPES
from fa_numba.host.binding import Binding, pack, score_scale
from fa_numba.host.plans import LaunchPlan, Plan, takes_options
from fa_numba.options import POWERS, SPLIT_SUMS
from fa_numba.problem import Problem

# Arrays of attention that kernels take one by one; all others reach them in ``options``.
TENSORS = ("Q", "K", "V", "O", "dO", "L", "dQ", "dK", "dV")
# Those that reach some kernels there, seen as the others are.
_ROWS = ("L", "dL")


def attend(plan: Plan, arguments: Binding, arrays: Mapping[str, Any], stream: Any) -> None:
    """Make the launches of attention as ``execute`` does; ``arrays`` has the options' arrays and
    the words of the seed too, and ``arguments`` the other options.
    """
    problem = plan.problem
    found: dict[str, Any] = {
        "scale": problem.scale,
        "score_scale": score_scale(problem, plan.score_unit),  # what scores are multiplied by first
        "group": problem.group,  # query heads that read one K/V head
        "split_rows": plan.split_rows,
    }
    found |= {name: by_heads(problem, arrays[name]) for name in TENSORS if name in arrays}
    rows = {name: by_heads(problem, arrays[name]) for name in _ROWS if name in arrays}

    def options(workspace: Mapping[str, Any]) -> dict[str, Any]:
        given = {**arrays, **rows}
        if plan.kv_splits > 1:
            given |= {"kv_splits": plan.kv_splits} | {name: workspace[name] for name in SPLIT_SUMS}
        given |= {name: workspace[name] for name in POWERS if name in workspace}
        return arguments.values(problem, given, plan.score_unit)

    execute(plan, {**arrays, **found}, stream, options)


def execute(
    plan: LaunchPlan,
    arrays: Mapping[str, Any],
    stream: Any,
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> None:
    """Make the plan's launches on ``stream``, or have them recorded by it.

    ``arrays`` are launch arguments by the names that the launches take: arrays as the kernels see
    them, and numbers. ``options`` gives the last argument's fields, of these and the workspace.
    """
    for output in plan.outputs:
        if output.zeroed:
            device.clear(arrays[output.name], stream)
    with device.scratch(stream) as allocate:
        found = dict(arrays)
        for buffer in plan.workspace:
            found[buffer.name] = allocated(buffer, allocate, stream)
        values = options(found) if options else {}
        if getattr(plan, "asked", None) is not None:
            device.note_origin(plan.asked, stream)  # type: ignore[attr-defined]
        for launch in plan.launches:
            taken = [_resolved(x, found, plan) for x in launch.arguments.values()]
            if takes_options(launch.kernel):
                taken.append(pack(launch.kernel, values))
            device.launch(launch.kernel, launch.grid, tuple(taken), stream, plan.uncounted)


def _resolved(argument: Argument, found: Mapping[str, Any], plan: LaunchPlan) -> Any:
    if isinstance(argument, Boxes):
        x, dtype = argument, argument.dtype or plan.problem.dtype  # type: ignore[attr-defined]
        return device.TiledArray(found[x.name], x.rows, dtype, x.heads, x.ends)
    if isinstance(argument, Grouped):
        return device.grouped(found[argument.name], argument.heads)
    if isinstance(argument, Untouched):
        return _untouched(argument, found["Q"])
    return found[argument] if isinstance(argument, str) else argument


def _untouched(argument: Untouched, other: Any) -> Any:
    """One element for all: NaN on the emulator, in the memory of ``other`` on the GPU."""
    dtype = DTYPES[argument.dtype]
    if isinstance(other, DeviceArray):
        strides = (0,) * len(argument.shape)
        return replace(other, shape=argument.shape, strides=strides, itemsize=dtype.bytes)
    return np.broadcast_to(np.array(dtype.nan, dtype.host), argument.shape)


def allocated(buffer: Buffer, allocate: Callable, stream: Any) -> Any:
    """The workspace that ``buffer`` describes."""
    array = allocate(buffer.allocated, buffer.host_dtype)
    if buffer.zeroed:
        device.clear(array, stream)
    if isinstance(array, DeviceArray):
        return replace(array, shape=buffer.shape)
    return array[..., : buffer.shape[-1]]


def by_heads(problem: Problem, array: Any) -> Any:
    """An array as kernels take it: (batch, heads, seqlen, ...), packed (1, heads, total, ...)."""
    return heads_first(array, problem.layout == "bnhd", problem.packed)


def heads_first(array: Any, turned: bool, packed: bool = False) -> Any:
    """The same of an array that is ``turned``, (B, N, H, d), or ``packed``, (total, H, d)."""
    if len(array.shape) == 4:  # pages of K and V too
        return device.permuted(array, (0, 2, 1, 3)) if turned else array
    if not packed:
        return array
    return device.transposed(array, (1, 0, 2) if len(array.shape) == 3 else (0, 1))
