"""A call from its arguments to its results: look it up, or check, plan, launch and keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_numba import device
from fa_numba.checks import as_flag
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
from fa_numba.host.plans import Plan
from fa_numba.problem import Problem


def attend(
    algorithm,
    qkv,
    options,
    tiles,
    return_lse,
    out,
    stream,
    unit,
    query_splits=1,
    warp_partition="rows",
    ablate=(),
    kv_splits="auto",
) -> Any:
    """O, or (O, L), of ``qkv`` with the arguments of the public functions."""
    options = _with_numeric_mask(options, stream)
    how = (query_splits, warp_partition, ablate, kv_splits)
    facts = ("fwd", algorithm, tiles, return_lse, unit, *how)
    call = launch_cache.describe_call(facts, qkv, options, out)
    results = launch_cache.replay(call, out, stream)
    if results is None:
        results = _first_attend(facts, qkv, options, out, stream, call)
    return tuple(results) if return_lse else results[0]


def _with_numeric_mask(options: Any, stream: Any) -> Any:
    """The options with what ``attn_mask`` adds to the scores in its place."""
    mask = options.get("attn_mask")
    if mask is None:
        return options
    with placement.made_on(stream, mask):
        return options | {"attn_mask": added_mask(mask)}


def _first_attend(facts, qkv, options, out, stream, call: Call | None) -> list:
    _, algorithm, tiles, return_lse, unit, query_splits, *others = facts
    return_lse = as_flag("return_lse", return_lse)
    inputs = [operand(*x) for x in zip("qkv", qkv, strict=True)]
    arguments = Binding.of(options)
    check_together(inputs, list(arguments.arrays.values()))
    problem = arguments.problem(*(x.shape for x in inputs), dtype=inputs[0].dtype)
    target = None
    if out is not None:
        target = operand("out", out, (problem.dtype,))
        check_together([inputs[0], target])
        check_out(target, problem.q_shape, [*inputs, *arguments.arrays.values()])
    with placement.placed(inputs[0]):
        aligned = _aligned(problem, [*inputs, target] if target else inputs)
        how = (return_lse, query_splits, unit, *others)
        plan = planning.forward(problem, algorithm, tiles, aligned, *how)
        named = dict(zip("QKV", inputs, strict=True))
        return _run(plan, arguments, tiles, named, stream, call, target)


def _run(
    plan: Plan,
    arguments: Binding,
    tiles: Any,
    inputs: dict[str, Operand],
    stream: Any,
    call: Call | None,
    target: Operand | None = None,
) -> list:
    """The results of ``plan`` with these inputs, by the kernels' names; ``target`` takes O."""
    arguments.check_mask(plan.problem, tiles, plan.tiles)
    handle = placement.stream_handle(stream, inputs["Q"])
    placement.check_size(plan)
    outputs: list = []
    for output in plan.outputs:
        # The gradient of a bias has the bias's own axes.
        shape = arguments.arrays["bias"].shape if output.name == "dbias" else output.shape
        outputs.append((shape, output.dtype, target if output.name == "O" else None))

    def run(given: list, made: list, stream: Any) -> None:
        arrays = dict(zip(inputs, given, strict=False)) | arguments.named(given[len(inputs) :])
        arrays |= {output.name: x for output, x in zip(plan.outputs, made, strict=True)}
        execute(plan, arguments, arrays, stream)

    given = [*inputs.values(), *arguments.arrays.values()]
    return launch_cache.run_and_keep(run, given, arguments.seeds, outputs, handle, call)


def _aligned(problem: Problem, operands: Sequence[Operand]) -> bool:
    """Whether 16-byte accesses are allowed; copies made for the GPU always allow them."""
    copies = device.on_gpu() and operands[0].place == HOST
    return problem.head_dim % DTYPES[problem.dtype].chunk == 0 and (
        copies or all(x.aligned for x in operands)
    )


def differentiate(
    algorithm,
    given,
    options,
    tiles,
    stream,
    unit,
    return_dbias,
    deterministic=False,
    query_splits=1,
    group_splits=1,
) -> Any:
    """The gradients of (dout, q, k, v, out, lse) with the arguments of the public functions."""
    options = _with_numeric_mask(options, stream)
    how = (deterministic, query_splits, group_splits)
    facts = ("bwd", algorithm, tiles, unit, return_dbias, *how)
    dout, q, k, v, out, lse = given
    inputs = (q, k, v, out, dout, lse)
    call = launch_cache.describe_call(facts, inputs, options)
    results = launch_cache.replay(call, None, stream)
    if results is None:
        results = _first_differentiate(facts, inputs, options, stream, call)
    return tuple(results)


def _first_differentiate(facts, given, options, stream, call: Call | None) -> list:
    _, algorithm, tiles, unit, return_dbias, deterministic, *splits = facts
    return_dbias = as_flag("return_dbias", return_dbias)
    deterministic = as_flag("deterministic", deterministic)
    names = ("q", "k", "v", "out", "dout", "lse")
    dtypes = {"lse": {"allowed": SUMS}}
    inputs = [operand(n, x, **dtypes.get(n, {})) for n, x in zip(names, given, strict=True)]
    q, k, v, out, dout, lse = inputs
    arguments = Binding.of(options)
    check_together([q, k, v, dout, out], [lse, *arguments.arrays.values()])
    problem = arguments.problem(q.shape, k.shape, v.shape, dtype=q.dtype)
    check_shape(dout, problem.q_shape)
    check_shape(out, problem.q_shape)
    check_shape(lse, problem.lse_shape)
    with placement.placed(q):
        aligned = _aligned(problem, inputs[:-1])
        how = (deterministic, return_dbias, unit, *splits)
        plan = planning.backward(problem, algorithm, tiles, aligned, *how)
        given = dict(zip(("Q", "K", "V", "O", "dO", "L"), inputs, strict=True))
        return _run(plan, arguments, tiles, given, stream, call)
