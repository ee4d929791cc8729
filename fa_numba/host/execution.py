"""Executes a plan: allocates the workspace, and launches the kernels in their order.

The launches of a plan contain the names of arguments. This module replaces the names by arrays and
numbers.
"""

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

# Arrays that are parameters of kernels. Kernels get all other arrays in the parameter ``options``.
TENSORS = ("Q", "K", "V", "O", "dO", "L", "dQ", "dK", "dV")
# Arrays that some kernels get in ``options``, with the axes that kernels use.
_ROWS = ("L", "dL")


def execute_attention(
    plan: Plan, arguments: Binding, arrays: Mapping[str, Any], stream: Any
) -> None:
    """Launch the kernels of a plan of attention.

    ``arrays`` contains arrays and numbers by the names that kernels use: the inputs, the outputs,
    the arrays among the options, and the seed and offset of dropout as 32-bit words. ``arguments``
    contains the other options. ``stream`` is as in ``execute``.
    """
    problem = plan.problem
    found: dict[str, object] = {
        "scale": problem.scale,
        "score_scale": score_scale(problem, plan.score_unit),
        "group": problem.group,  # query heads that read one K/V head
        "split_rows": plan.split_rows,
    }
    found |= {name: by_heads(problem, arrays[name]) for name in TENSORS if name in arrays}
    if problem.kv_dtype:  # kernels load two e4m3 as one element of 16 bits
        found |= {name: device.as_halves(found[name]) for name in "KV"}
    rows = {name: by_heads(problem, arrays[name]) for name in _ROWS if name in arrays}

    def options(workspace: Mapping[str, Any]) -> dict[str, object]:
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
    """Launch the kernels of a plan in their order.

    ``stream`` is the number of a CUDA stream, or a ``LaunchRecord``, which records the launches.
    ``arrays`` contains arrays and numbers by the names that the launches of the plan use.
    ``options`` is a function that returns the fields of the kernels' last parameter, ``options``.
    It takes one dictionary with ``arrays`` and the arrays of the workspace.
    """
    device.compile_together(launch.kernel for launch in plan.launches)
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
    """Return an array for a kernel parameter that the kernel neither reads nor writes.

    ``argument`` contains the shape and the dtype. The array needs no memory of its own: all its
    elements have the same address. On a GPU, this is the address of the array ``other``. On the
    emulator, it is the address of one NaN.
    """
    dtype = DTYPES[argument.dtype]
    if isinstance(other, DeviceArray):
        strides = (0,) * len(argument.shape)
        return replace(other, shape=argument.shape, strides=strides, itemsize=dtype.bytes)
    return np.broadcast_to(np.array(dtype.nan, dtype.host), argument.shape)


def allocated(buffer: Buffer, allocate: Callable, stream: Any) -> Any:
    """Allocate the array of the workspace that ``buffer`` describes.

    ``allocate`` is the function that ``device.scratch`` returned.
    """
    array = allocate(buffer.allocated, buffer.host_dtype)
    if buffer.zeroed:
        device.clear(array, stream)
    if isinstance(array, DeviceArray):
        return replace(array, shape=buffer.shape)
    return array[..., : buffer.shape[-1]]


def by_heads(problem: Problem, array: Any) -> Any:
    """Return a view of an input or output of a call, with the order of axes that kernels use.

    The result has the shape (batch, heads, seqlen, ...), or (1, heads, total, ...) for packed
    sequences.
    """
    return heads_first(array, problem.layout == "bnhd", problem.packed)


def heads_first(array: Any, turned: bool, packed: bool = False) -> Any:
    """Return an array with the axes (batch, heads, rows, ...), without a copy.

    ``turned`` says that arrays with four axes are (B, N, H, d). ``packed`` says that arrays with up
    to three axes are packed sequences:

    axes of the array   arguments       axes of the result
    (B, H, N, d)                        (B, H, N, d)
    (B, N, H, d)        ``turned``      (B, H, N, d)
    (total, H, d)       ``packed``      (1, H, total, d)
    (H, total)          ``packed``      (1, H, total)
    (B, H, N)           not ``packed``  (B, H, N)
    """
    if len(array.shape) == 4:  # matrices that are not packed, and pages of K and V
        return device.permuted(array, (0, 2, 1, 3)) if turned else array
    if not packed:
        return array
    return device.transposed(array, (1, 0, 2) if len(array.shape) == 3 else (0, 1))
