"""A call from its arguments to its results: look it up, or check, plan, launch and keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_numba import device
from fa_numba.choices.requests import Choices
from fa_numba.dtypes import DTYPES
from fa_numba.host import launch_cache, placement, planning
from fa_numba.host.arrays import (
    HOST,
    SUMS,
    Operand,
    added_mask,
    check_out,
    check_shape,
    check_together,
    operand,
)
from fa_numba.host.binding import Binding
from fa_numba.host.execution import execute
from fa_numba.host.launch_cache import Call
from fa_numba.problem import Problem

# The arrays that a pass takes, in their order, as callers and as kernels name them.
_NAMES = {
    "fwd": {"q": "Q", "k": "K", "v": "V"},
    "bwd": {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "lse": "L"},
}


def attend(choices: Choices, arrays: tuple, options: Any, stream: Any, out: Any = None) -> Any:
    """O, or with ``return_lse`` (O, L), of (q, k, v); or the gradients of (q, k, v, out, dout,
    lse); with the other arguments of the public functions.
    """
    options = _with_numeric_mask(options, stream)
    call = launch_cache.describe_call(choices, arrays, options, out)
    results = launch_cache.replay(call, out, stream)
    if results is None:
        results = _first_attend(choices, arrays, options, stream, out, call)
    return results[0] if choices.passes == "fwd" and not choices.return_lse else tuple(results)


def _with_numeric_mask(options: Any, stream: Any) -> Any:
    """The options with what ``attn_mask`` adds to the scores in its place."""
    mask = options.get("attn_mask")
    if mask is None:
        return options
    with placement.made_on(stream, mask):
        return options | {"attn_mask": added_mask(mask)}


def _first_attend(
    choices: Choices, given: tuple, options: Any, stream: Any, out: Any, call: Call | None
) -> list:
    names = _NAMES[choices.passes]
    dtypes = {"lse": {"allowed": SUMS}}
    inputs = [operand(n, x, **dtypes.get(n, {})) for n, x in zip(names, given, strict=True)]
    arguments = Binding.of(options)
    matrices, rows = inputs[:5], inputs[5:]
    check_together(matrices, [*rows, *arguments.arrays.values()])
    q, k, v, *others = matrices
    problem = arguments.problem(q.shape, k.shape, v.shape, dtype=q.dtype)
    for x in others:
        check_shape(x, problem.q_shape)
    for x in rows:
        check_shape(x, problem.lse_shape)
    target = None
    if out is not None:
        target = operand("out", out, (problem.dtype,))
        check_together([q, target])
        check_out(target, problem.q_shape, [*inputs, *arguments.arrays.values()])
        matrices = [*matrices, target]
    with placement.placed(q):
        plan = planning.plan_of(problem, choices, _aligned(problem, matrices))
        arguments.check_mask(problem, choices.tiles, plan.tiles)
        handle = placement.stream_handle(stream, q)
        placement.check_size(plan)
        outputs: list = []
        for output in plan.outputs:
            # The gradient of a bias has the bias's own axes.
            bias = arguments.arrays["bias"].shape if output.name == "dbias" else None
            taken = target if output.name == "O" else None
            outputs.append((bias or output.shape, output.dtype, taken))

        def run(given: list, made: list, stream: Any) -> None:
            arrays = dict(zip(names.values(), given, strict=False))
            arrays |= arguments.named(given[len(inputs) :])
            arrays |= {output.name: x for output, x in zip(plan.outputs, made, strict=True)}
            execute(plan, arguments, arrays, stream)

        operands = [*inputs, *arguments.arrays.values()]
        return launch_cache.run_and_keep(run, operands, arguments.seeds, outputs, handle, call)


def _aligned(problem: Problem, operands: Sequence[Operand]) -> bool:
    """Whether 16-byte accesses are allowed; copies made for the GPU always allow them."""
    copies = device.on_gpu() and operands[0].place == HOST
    return problem.head_dim % DTYPES[problem.dtype].chunk == 0 and (
        copies or all(x.aligned for x in operands)
    )
