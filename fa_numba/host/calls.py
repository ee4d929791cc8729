"""A call from its arguments to its results: look it up, or check, plan, launch and keep it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fa_numba import mods
from fa_numba.choices.requests import Choices
from fa_numba.host import execution, held, launch_cache, placement, planning
from fa_numba.host.arrays import (
    SUMS,
    Operand,
    added_mask,
    all_aligned,
    check_shape,
    check_together,
    operand,
    operand_of_out,
)
from fa_numba.host.binding import Binding
from fa_numba.host.launch_cache import Call
from fa_numba.problem import Problem

# The arrays that a pass takes, in their order, as callers and as kernels name them.
_NAMES = {
    "fwd": {"q": "Q", "k": "K", "v": "V"},
    "bwd": {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "lse": "L", "dlse": "dL"},
}


def attend(choices: Choices, arrays: tuple, options: Any, stream: Any, out: Any = None) -> Any:
    """O, or with ``return_lse`` (O, L), of (q, k, v); or the gradients of (q, k, v, out, dout,
    lse, dlse or None); with the other arguments of the public functions.
    """
    held.check(options)
    mask = options.get("attn_mask")
    if mask is not None:  # becomes what it adds to the scores
        with placement.made_on(stream, mask):
            options = options | {"attn_mask": added_mask(mask)}
    call = launch_cache.describe_call(choices, arrays, options, out)
    results = launch_cache.replay(call, out, stream)
    if results is None:
        results = _first_attend(choices, arrays, options, stream, out, call)
    if choices.return_dcaptured:
        results = _by_names(results, options["score_mod"])
    return results[0] if choices.passes == "fwd" and not choices.return_lse else tuple(results)


def _by_names(results: list, score_mod: Any) -> list:
    """The results, those of captured arrays as one dictionary, with None for other dtypes."""
    mod, values = mods.captured("score_mod", score_mod)
    names = {name: own for name, (own, _) in zip(mod.fields, values, strict=True)}
    arrays = (name for name, kind in zip(mod.fields, mod.captures, strict=True) if "[" in kind)
    found = dict.fromkeys(names[name] for name in arrays)
    first = len(results) - len(mod.differentiated)
    for field, gradient in zip(mod.differentiated.values(), results[first:], strict=True):
        found[names[field]] = gradient
    return [*results[:first], found]


def _first_attend(
    choices: Choices, given: tuple, options: Any, stream: Any, out: Any, call: Call | None
) -> list:
    names = dict(_NAMES[choices.passes])
    if choices.passes == "bwd" and not choices.dlse:
        del names["dlse"]
        given = given[:-1]
    dtypes = {"lse": {"allowed": SUMS}, "dlse": {"allowed": SUMS}}
    inputs = [operand(n, x, **dtypes.get(n, {})) for n, x in zip(names, given, strict=True)]
    arguments = Binding.of(options)
    matrices, rows = inputs[:5], inputs[5:]
    check_together(matrices, [*rows, *arguments.arrays.values()])
    q, k, v, *others = matrices
    problem = arguments.problem(q.shape, k.shape, v.shape, dtype=q.dtype)
    for x in others:
        check_shape(x, problem.o_shape)
    for x in rows:
        check_shape(x, problem.lse_shape)
    target = operand_of_out(out, problem.o_shape, q, [*inputs, *arguments.arrays.values()])
    if target is not None:
        matrices = [*matrices, target]
    with placement.placed(q):
        aligned = aligned_rows(problem, matrices, q)
        plan = planning.plan_of(problem, choices, aligned, arguments.block_mask)
        arguments.check_mask(problem, choices.tiles, plan.tiles)
        placement.check_size(plan)
        arguments = arguments.at(matrices[0].ordinal, plan.tiles)
        named = {**dict(zip(names.values(), inputs, strict=True)), **arguments.arrays}
        run = functools.partial(execution.attend, plan, arguments)
        return launch_cache.run_and_keep(plan, named, stream, call, run, target, arguments.seeds)


def aligned_rows(problem: Problem, operands: Sequence[Operand], q: Operand) -> bool:
    """Whether 16-byte accesses of all rows are allowed."""
    return problem.whole_chunks and all_aligned(operands, q)
