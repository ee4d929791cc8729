"""Calls of attention: replay an earlier call from the launch cache, or check, plan and launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fa_numba import mods
from fa_numba.choices.requests import Choices
from fa_numba.dtypes import DTYPES, E4M3
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

# The arrays that a pass takes, in their order: {name of the argument: name in kernels}.
_NAMES = {
    "fwd": {"q": "Q", "k": "K", "v": "V"},
    "bwd": {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "lse": "L", "dlse": "dL"},
}


def call_attention(
    choices: Choices, arrays: tuple, options: Any, stream: Any, out: Any = None
) -> Any:
    """Compute a forward or a backward pass of attention, as ``choices.passes`` says.

    A forward pass takes the ``arrays`` (q, k, v), and returns O, or (O, L) with
    ``choices.return_lse``. A backward pass takes (q, k, v, out, dout, lse, dlse or None), and
    returns a tuple of gradients. ``options``, ``stream`` and ``out`` are the arguments of the
    public functions.
    """
    if options:
        held.check(options)
        mask = options.get("attn_mask")
        if mask is not None:
            with placement.made_on(stream, mask):
                options = options | {"attn_mask": added_mask(mask)}
    call = launch_cache.describe_call(choices, arrays, options, out)
    results = launch_cache.replay(call, out, stream)
    if results is None:
        results = _call_first_time(choices, arrays, options, stream, out, call)
    if choices.return_dcaptured:
        results = _by_names(results, options["score_mod"])
    return results[0] if choices.passes == "fwd" and not choices.return_lse else tuple(results)


def _by_names(results: list, score_mod: Any) -> list:
    """Return the results with the gradients of captured arrays collected in a dictionary.

    The dictionary is the last result. It maps the name of each captured array to the gradient, or
    to None if the array is not float32.
    """
    mod, values = mods.captured("score_mod", score_mod)
    names = {name: own for name, (own, _) in zip(mod.fields, values, strict=True)}
    arrays = (name for name, kind in zip(mod.fields, mod.captures, strict=True) if "[" in kind)
    found = dict.fromkeys(names[name] for name in arrays)
    first = len(results) - len(mod.differentiated)
    for field, gradient in zip(mod.differentiated.values(), results[first:], strict=True):
        found[names[field]] = gradient
    return [*results[:first], found]


def _call_first_time(
    choices: Choices, given: tuple, options: Any, stream: Any, out: Any, call: Call | None
) -> list:
    names = dict(_NAMES[choices.passes])
    if choices.passes == "bwd" and not choices.dlse:
        del names["dlse"]
        given = given[:-1]
    dtypes: dict[str, dict[str, Sequence[str]]] = {
        "lse": {"allowed": SUMS},
        "dlse": {"allowed": SUMS},
    }
    if choices.passes == "fwd":
        dtypes |= {name: {"allowed": tuple(DTYPES)} for name in "qkv"}
    inputs = [operand(n, x, **dtypes.get(n, {})) for n, x in zip(names, given, strict=True)]
    arguments = Binding.of(options)
    matrices, rows = inputs[:5], inputs[5:]
    q, k, v, *others = matrices
    # Pages of K and V can be e4m3 beside a Q of 16 bits.
    cached = E4M3.name == k.dtype != q.dtype and arguments.paged.shape is not None
    if cached:
        check_together([k, v], [q])
        check_together([q], arguments.arrays.values())
    else:
        check_together(matrices, [*rows, *arguments.arrays.values()])
    problem = arguments.problem(q.shape, k.shape, v.shape, dtype=q.dtype, kv_dtype=k.dtype)
    for x in others:
        check_shape(x, problem.o_shape)
    for x in rows:
        check_shape(x, problem.lse_shape)
    others = [*inputs, *arguments.arrays.values()]
    target = operand_of_out(out, problem.o_shape, q, others, problem.o_dtype)
    if target is not None:
        matrices = [*matrices, target]
    with placement.placed(q):
        aligned = aligned_rows(problem, matrices, q)
        if cached:
            check_pages_aligned((k, v), q)
        plan = planning.plan_of_attention(problem, choices, aligned, arguments.block_mask)
        arguments.check_mask(problem, choices.tiles, plan.tiles)
        placement.check_size(plan)
        arguments = arguments.at(matrices[0].ordinal, plan.tiles)
        named = {**dict(zip(names.values(), inputs, strict=True)), **arguments.arrays}
        run = functools.partial(execution.execute_attention, plan, arguments)
        return launch_cache.run_and_keep(plan, named, stream, call, run, target, arguments.seeds)


def check_pages_aligned(pages: Sequence[Operand], q: Operand) -> None:
    """Raise ValueError unless rows of e4m3 pages start at multiples of 16 bytes.

    ``q`` is the operand that decides on which device the call runs.
    """
    for x in pages:
        if not all_aligned([x], q):
            raise ValueError(
                f"{x.name} must have rows that start at multiples of 16 bytes if it is {x.dtype}, "
                f"got strides {x.strides} bytes at address {x.pointer:#x}; pass a contiguous copy"
            )


def aligned_rows(problem: Problem, operands: Sequence[Operand], q: Operand) -> bool:
    """Return whether kernels may use 16-byte accesses to all rows.

    The rows must consist of complete 16-byte chunks, and the ``operands`` must be aligned. ``q`` is
    the operand that decides on which device the call runs.
    """
    return problem.whole_chunks and all_aligned(operands, q)
