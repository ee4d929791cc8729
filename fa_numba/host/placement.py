"""Where a call runs: on the device of its arrays, on which stream, and how large it may be."""

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

# The emulator's limit for one call. Its steps are the multiply-adds of tiles, padding included, and
# STEPS_PER_THREAD for each thread. A unit says how many steps one core of a Xeon computes in a
# second at the least (``emulated_steps``), backward passes and options among them; it computes up
# to six times as many. Kernels of no unit are counted as those of the slowest unit.
EMULATOR_SECONDS = 30
STEPS_PER_THREAD = 100


def placed(q: Operand):
    """A context in which q's GPU is the current one; ValueError where the emulator runs."""
    if q.ordinal == HOST:
        return contextlib.nullcontext()
    if not device.on_gpu():
        raise ValueError(
            f"{q.name} must be in host memory, because kernels run on the emulator here, got "
            f"{q.where}"
        )
    return device.on_device(q.ordinal)


def check_size(plan: Plan) -> None:
    """Raise ValueError for a call that would take the emulator minutes; a GPU takes any size."""
    if device.on_gpu():
        return
    p, tiles = plan.problem, plan.tiles
    columns = round_up(p.head_dim, 32) + round_up(p.d_v, 32)  # what the threads of a row cover
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
    """Raise ValueError, which begins with ``of``, for launches that would take the emulator
    minutes: so many ``steps`` beside what every thread takes.
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
    """Raise ValueError for more blocks than a grid takes, or the emulator, over the rows of the
    array ``of``, and for more threads a head than 32 bits count.
    """
    kernel = plan.kernels[0]  # those of one plan have one grid
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
    """A context in which what torch makes of ``array`` is computed on ``stream``, and its memory
    not used again before that stream is done; for None that is torch's current stream already.
    """
    torch = sys.modules.get("torch")
    if stream is None or torch is None or not isinstance(array, torch.Tensor) or not array.is_cuda:
        return contextlib.nullcontext()
    handle = stream_handle(stream, None)
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, array.device))


def stream_handle(stream: Any, q: Any) -> int:
    """The address of ``stream``, and for None that of the current stream of q's library; of q are
    asked ``library`` and ``ordinal``.

    0 is the default stream, and stands for none on the emulator. Raises TypeError for what is no
    stream, ValueError for any stream on the emulator.
    """
    if stream is None:
        if q.ordinal == HOST:
            return 0
        if q.library == "torch":
            return int(sys.modules["torch"].cuda.current_stream(q.ordinal).cuda_stream)
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
