"""Calls of ``fa_numba.softmax``, the softmax of vectors: checks, plan and launch."""

from __future__ import annotations

import functools
from typing import Any

from fa_numba import io_model
from fa_numba.checks import as_size, check_grid_size
from fa_numba.choices.arguments import Buffer
from fa_numba.host import launch_cache, placement
from fa_numba.host.arrays import operand, operand_of_out
from fa_numba.host.execution import execute
from fa_numba.host.plans import Launch, LaunchPlan
from fa_numba.kernels.simt.softmax import MAKERS
from fa_numba.problem import MAX_SEQLEN

# Time of the emulator for one access, in multiply-adds of a tile.
STEPS_PER_ACCESS = 8


def softmax(x: Any, algorithm: str, out: Any, stream: Any) -> Any:
    """Return the softmax of each row of x. The arguments are those of ``fa_numba.softmax``."""
    call = launch_cache.describe_call(("softmax", algorithm), (x,), {}, out)
    found = launch_cache.replay(call, out, stream)
    if found is not None:
        return found[0]
    io_model.check_softmax(algorithm)
    given = operand("x", x, ("float32",))
    if len(given.shape) != 2:
        raise ValueError(f"x must have two axes, (batch, elements), got shape {given.shape}")
    batch, elements = map(as_size, ("batch", "elements"), given.shape)
    if elements > MAX_SEQLEN:
        raise ValueError(f"x must have at most {MAX_SEQLEN} elements per vector, got {elements}")
    check_grid_size("the number of vectors in x", batch, axis=0)
    target = operand_of_out(out, given.shape, given, [given])
    launch = Launch.of(MAKERS[algorithm](), (batch, 1, 1), X="x", Y="y")
    plan = LaunchPlan(launches=(launch,), outputs=(Buffer("y", given.shape),))
    with placement.placed(given):
        steps = STEPS_PER_ACCESS * io_model.softmax(batch, elements, algorithm).total
        placement.check_steps(plan, f"x of shape {given.shape}", steps)
        run = functools.partial(execute, plan)
        return launch_cache.run_and_keep(plan, {"x": given}, stream, call, run, target)[0]
