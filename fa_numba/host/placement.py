"""Placement: on which device and stream a call runs, and checks of the size of the call."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from dataclasses import replace
from typing import Any

from fa_numba import device, io_model
from fa_numba.checks import check_grid_size
from fa_numba.choices.units import Unit
from fa_numba.dtypes import PRECISIONS
from fa_numba.host.arrays import HOST, Operand
from fa_numba.host.plans import LaunchPlan, Plan
from fa_numba.integers import round_up

# The emulator's limit for one call, in seconds. The time is estimated from a number of steps: the
# multiply-adds of tiles, including padding, plus STEPS_PER_THREAD for each thread.
# ``Unit.emulated_steps`` is the number of steps that one core of a Xeon computes per second in the
# slowest case. Other cases are up to six times as fast. Kernels without a unit, such as merges,
# count as kernels of the slowest unit.
EMULATOR_SECONDS = 30
STEPS_PER_THREAD = 100


def placed(q: Operand):
    """Return a context in which the GPU of ``q`` is the current GPU.

    The context does nothing if ``q`` is on the host. Raises ValueError if ``q`` is on a GPU and
    kernels run on the emulator.
    """
    if q.ordinal == HOST:
        return contextlib.nullcontext()
    if not device.on_gpu():
        raise ValueError(
            f"{q.name} must be in host memory, because kernels run on the emulator here, got "
            f"{q.where}"
        )
    return device.on_device(q.ordinal)


def check_size(plan: Plan) -> None:
    """Raise ValueError if the emulator would take longer than EMULATOR_SECONDS for a call.

    On a GPU, calls of all sizes are allowed.
    """
    if device.on_gpu():
        return
    p, tiles = plan.problem, plan.tiles
    columns = round_up(p.head_dim, 32) + round_up(p.d_v, 32)  # with padding
    dense = replace(p, sparse=False)
    tiles_visited = io_model.tiles_visited(plan.algorithm, dense, tiles)
    steps = tiles_visited * tiles.Br * tiles.Bc * columns
    steps *= sum(range(1, PRECISIONS[p.precision].planes + 1))
    if plan.passes == "bwd":
        steps = steps * 5 // 2
    check_steps(
        plan,
        f"q of shape {p.q_shape} and k of shape {p.k_shape}",
        steps,
        "; take a smaller problem or a machine with a GPU, or call fa_numba.reference for the "
        "values or fa_numba.plan for the accesses",
    )


def check_steps(plan: LaunchPlan, of: str, steps: int = 0, instead: str = "") -> None:
    """Raise ValueError if the emulator would take longer than EMULATOR_SECONDS for the launches.

    The estimate counts ``steps``, the number of multiply-adds, and a fixed number of steps for each
    thread. ``of`` is the subject of the message, such as "x of shape (2, 8)". ``instead`` is the
    advice at the end of the message.
    """
    steps += sum(STEPS_PER_THREAD * math.prod(k.grid) * k.threads for k in plan.kernels)
    unit = plan.decided.unit if isinstance(plan, Plan) else Unit
    seconds = steps / unit.emulated_steps
    if seconds > EMULATOR_SECONDS and not device.on_gpu():
        raise ValueError(
            f"{of} would take the emulator up to about {seconds:,.0f} s, which is more than the "
            f"limit of {EMULATOR_SECONDS} s. The emulator runs here because "
            f"{device.why_no_gpu() or 'it was chosen'}"
            f"{instead or '; take a smaller problem or a machine with a GPU'}"
        )


def check_grid(plan: LaunchPlan, of: str) -> None:
    """Raise ValueError if the grid of a plan is too large for a GPU or for the emulator.

    A head may have at most 2**32 threads, because kernels count threads in 32 bits. ``of`` is the
    name of the array whose rows the launches copy or merge.
    """
    kernel = plan.kernels[0]  # all launches of such a plan have equal grids
    pieces = kernel.grid[0] * kernel.threads
    if pieces > 2**32:
        raise ValueError(
            f"a launch over {of} can have at most 2**32 threads per head, but would need {pieces}; "
            "pass fewer rows, or an array whose rows start at multiples of 16 bytes (each thread "
            "then copies more elements)"
        )
    for name, size in ((f"heads of {of}", kernel.grid[1]), ("batch", kernel.grid[2])):
        check_grid_size(name, size)
    launch = f"the launch over {of}, with {kernel.grid} thread blocks of {kernel.threads} threads,"
    check_steps(plan, launch)


def made_on(stream: Any, array: Any):
    """Return a context in which torch computes on ``stream``.

    When torch frees an array that was allocated inside the context, only later work on ``stream``
    reuses the memory. The context does nothing if ``stream`` is None, or if ``array`` is not a
    torch tensor on a GPU.
    """
    torch = sys.modules.get("torch")
    if stream is None or torch is None or not isinstance(array, torch.Tensor) or not array.is_cuda:
        return contextlib.nullcontext()
    handle = stream_handle(stream, None)
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, array.device))


def _current_stream_of_torch(ordinal: int) -> int:
    """Return the address of torch's current stream on the GPU with this ordinal.

    The function calls torch's internal function ``_cuda_getCurrentRawStream`` if it exists. This is
    twenty times as fast as ``torch.cuda.current_stream``, because no ``Stream`` object is made.
    """
    torch = sys.modules["torch"]
    fast = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return int(fast(ordinal) if fast else torch.cuda.current_stream(ordinal).cuda_stream)


def stream_handle(stream: Any, q: Any) -> int:
    """Return the address of the CUDA stream on which a call runs.

    If ``stream`` is given, the result is the address of this stream. If ``stream`` is None, the
    result is the address of the current stream of q's library. ``q`` is any object with the
    attributes ``library`` and ``ordinal``.

    The address 0 stands for the default stream. On the emulator, the result is always 0. Raises
    TypeError if ``stream`` is not a stream, and ValueError for any stream on the emulator.
    """
    if stream is None:
        if q.ordinal == HOST:
            return 0
        if q.library == "torch":
            return _current_stream_of_torch(q.ordinal)
        if q.library == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(q.ordinal):  # each GPU has a current stream
                return int(cupy.cuda.get_current_stream().ptr)
        return 0
    if not device.on_gpu():
        raise ValueError(f"stream must be None on the emulator (it has no streams), got {stream!r}")
    for attribute in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    wanted = f"stream must be a CUDA stream, its address as an integer, or None, got {stream!r}"
    if isinstance(stream, bool):
        raise TypeError(wanted)
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(wanted) from None
