"""Runs a plan: finds what its launches name, and makes them in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fa_numba import device
from fa_numba.device import DeviceArray
from fa_numba.dtypes import DTYPES
from fa_numba.host.binding import Binding, pack, score_scale
from fa_numba.host.plans import Argument, Boxes, Buffer, Grouped, Plan, Untouched
from fa_numba.options import SPLIT_SUMS, UNIFORM
from fa_numba.problem import Problem

# Arrays of a call that kernels take one by one; all others reach them in ``options``.
TENSORS = ("Q", "K", "V", "O", "dO", "L", "dQ", "dK", "dV")
# Beside uniform arrays, what hands out work.
_UNCOUNTED = (*UNIFORM, "taken")


def execute(plan: Plan, arguments: Binding, arrays: Mapping[str, Any], stream: Any) -> None:
    """Make the plan's launches on ``stream``, or have them recorded by it.

    ``arrays`` are launch arguments by name: inputs and outputs as the caller has them, the arrays
    among the options, and the words of the seed.
    """
    problem = plan.problem
    for output in plan.outputs:
        if output.zeroed:
            device.clear(arrays[output.name], stream)
    found: dict[str, Any] = {
        "scale": problem.scale,
        "score_scale": score_scale(problem, plan.score_unit),  # what scores are multiplied by first
        "group": problem.group,  # query heads that read one K/V head
        "split_rows": plan.split_rows,
    }
    found |= {name: _heads(problem, arrays[name]) for name in TENSORS if name in arrays}
    with device.scratch(stream) as allocate:
        for buffer in plan.workspace:
            found[buffer.name] = _allocated(buffer, allocate, stream)
        given = dict(arrays)
        if plan.kv_splits > 1:
            given |= {"kv_splits": plan.kv_splits} | {name: found[name] for name in SPLIT_SUMS}
        values = arguments.values(problem, given, plan.score_unit)
        for launch in plan.launches:
            taken = [_resolved(x, found, problem) for x in launch.arguments.values()]
            options = pack(launch.kernel, values)
            device.launch(launch.kernel, launch.grid, (*taken, options), stream, _UNCOUNTED)


def _resolved(argument: Argument, found: Mapping[str, Any], problem: Problem) -> Any:
    if isinstance(argument, Boxes):
        x, dtype = argument, argument.dtype or problem.dtype
        return device.TiledArray(found[x.name], x.rows, dtype, x.heads, x.ends)
    if isinstance(argument, Grouped):
        return device.grouped(found[argument.name], argument.heads)
    if isinstance(argument, Untouched):
        return _untouched(argument, found["Q"])
    return found[argument] if isinstance(argument, str) else argument


def _untouched(argument: Untouched, other: Any) -> Any:
    """An array of one element for all places: NaN and read-only on the emulator, an element of
    ``other`` on the GPU, where an address has to be valid.
    """
    dtype = DTYPES[argument.dtype]
    if isinstance(other, DeviceArray):
        strides = (0,) * len(argument.shape)
        return replace(other, shape=argument.shape, strides=strides, itemsize=dtype.bytes)
    return np.broadcast_to(np.array(dtype.nan, dtype.host), argument.shape)


def _allocated(buffer: Buffer, allocate: Callable, stream: Any) -> Any:
    """The workspace that ``buffer`` describes."""
    array = allocate(buffer.allocated, buffer.host_dtype)
    if buffer.zeroed:
        device.clear(array, stream)
    if isinstance(array, DeviceArray):
        return replace(array, shape=buffer.shape)
    return array[..., : buffer.shape[-1]]


def _heads(problem: Problem, array: Any) -> Any:
    """An array of a call as the kernels take it: (batch, heads, seqlen, ...) in any layout, (1,
    heads, total, ...) when packed.
    """
    if problem.layout == "bnhd" and len(array.shape) == 4:
        return device.permuted(array, (0, 2, 1, 3))
    if not problem.packed or len(array.shape) == 4:  # pages of K and V
        return array
    return device.transposed(array, (1, 0, 2) if len(array.shape) == 3 else (0, 1))
