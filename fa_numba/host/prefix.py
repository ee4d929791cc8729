"""Calls with a prefix: keys and values that all sequences of a batch begin with.

Such a call reads the prefix once for the queries of all sequences. It has three steps (Hydragen,
arXiv 2402.05099, section 3; RelayAttention, arXiv 2402.14808):

1. A forward pass of FlashAttention-2 over the prefix. The queries of all sequences are its rows.
2. A forward pass over the own keys of each sequence, which may be in pages.
3. A merge of the two results, by their logsumexps.

Each row sees all keys of the prefix. In addition, each row sees those own keys of its sequence that
it would see without a prefix.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np

from fa_numba import device, io_model
from fa_numba.checks import LAYOUTS, as_shape, as_sizes, one_of
from fa_numba.choices.arguments import Buffer
from fa_numba.choices.requests import Choices, Request
from fa_numba.dtypes import DTYPES, UNSCALED
from fa_numba.host import execution, launch_cache, merging, placement, planning
from fa_numba.host.arrays import HOST, Operand, check_together, operand, operand_of_out
from fa_numba.host.binding import Binding, sent
from fa_numba.host.calls import aligned_rows
from fa_numba.host.plans import Launch, LaunchPlan, Plan, Reasons
from fa_numba.kernels.merge_parts import width_of
from fa_numba.kernels.simt.append import blocks, make_gather
from fa_numba.options import FEATURES, PLAIN, argument_of
from fa_numba.problem import Problem

# Fields of a Problem that are allowed with a prefix. Other options depend on column numbers or hide
# columns, and it would not be obvious what they mean for the columns of the prefix.
_BESIDE = {
    *("causal", "softcap", "sinks", "q_lens", "kv_lens", "packed", "pages", "page_size"),
    *("layout", "precision", "head_dim_v"),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class PrefixPlan(Plan):
    """The plan of a call with a prefix, which consists of up to four plans.

    field     meaning
    gather    plan that copies q; None if q can be read as rows of one batch entry
    prefix    plan of the pass of all queries over the prefix
    own       plan of the pass over the own keys of each sequence
    merge     plan that merges the results of both passes
    between   workspace for results of one plan that another plan reads
    made_by   the arguments of ``_planned``

    Kernels, workspace, accesses and FLOPs are totals over all of these plans. The other attributes
    of ``Plan`` come from the plan ``own``.
    """

    gather: LaunchPlan | None
    prefix: Plan
    own: Plan
    merge: LaunchPlan
    between: tuple[Buffer, ...]
    made_by: tuple = field(compare=False, repr=False)

    @property
    def why(self) -> Reasons:
        of_prefix = {f"prefix: {name}": why for name, why in self.prefix.why.items()}
        return Reasons({**of_prefix, **self.own.why})

    @functools.cached_property
    def flops(self) -> int:
        return self.prefix.flops + self.own.flops

    def __str__(self) -> str:
        first, problem, *others = super().__str__().splitlines()
        p = self.prefix.problem
        of = f"prefix     {p.seqlen_k} keys, read once for {p.seqlen_q} rows a head"
        return "\n".join((first, problem, of, *others))


def plan_with_prefix(problem: Problem, prefix: Any, choices: Choices, options: Any) -> PrefixPlan:
    """Return the plan of a call with a prefix, for contiguous arrays.

    ``prefix`` is the array ``prefix_k`` or its shape. ``options`` are the options of the call, for
    messages.
    """
    if (choices.algorithm, choices.passes) != ("fa2", "fwd"):
        raise ValueError(
            "prefix_k needs the forward pass of algorithm 'fa2', got algorithm "
            f"{choices.algorithm!r} with passes={choices.passes!r}"
        )
    if DTYPES[problem.dtype].scaled:
        raise ValueError(
            f"prefix_k cannot be given with {problem.dtype} arrays; pass {one_of(UNSCALED)} arrays"
        )
    prefix = as_shape("prefix_k", getattr(prefix, "shape", prefix))
    first = _of_prefix(problem, prefix, (*prefix[:-1], problem.d_v), options)
    gathered, wide = not _is_one_batch_entry(None, problem), problem.whole_chunks
    return _plan_of_both(problem, first, choices, (wide, wide, wide), gathered)


def call_with_prefix(
    choices: Choices, arrays: tuple, prefix: tuple, options: Any, stream: Any, out: Any = None
) -> Any:
    """Compute a forward pass with a prefix. Return O, or (O, L) with ``choices.return_lse``.

    ``arrays`` is (q, k, v), and ``prefix`` is (prefix_k, prefix_v). ``options``, ``stream`` and
    ``out`` are the arguments of the public function.
    """
    if any(x is None for x in prefix):
        given, missing = ("prefix_v", "prefix_k") if prefix[0] is None else ("prefix_k", "prefix_v")
        raise ValueError(f"{given} must be given together with {missing}, got {given} alone")
    call = launch_cache.describe_call((choices, "prefix"), (*arrays, *prefix), options, out)
    results = launch_cache.replay(call, out, stream)
    if results is None:
        results = _call_first_time(choices, (*arrays, *prefix), options, stream, out, call)
    return tuple(results) if choices.return_lse else results[0]


def _call_first_time(
    choices: Choices, given: tuple, options: Any, stream: Any, out: Any, call: Any
) -> list:
    names = ("q", "k", "v", "prefix_k", "prefix_v")
    inputs = [operand(name, x) for name, x in zip(names, given, strict=True)]
    q, k, v, *of_prefix = inputs
    arguments = Binding.of(options)
    check_together(inputs, list(arguments.arrays.values()))
    problem = arguments.problem(q.shape, k.shape, v.shape, dtype=q.dtype)
    first = _of_prefix(problem, of_prefix[0].shape, of_prefix[1].shape, options)
    target = operand_of_out(out, problem.o_shape, q, [*inputs, *arguments.arrays.values()])
    with placement.placed(q):
        copies = device.on_gpu() and q.ordinal == HOST  # copies on the GPU are contiguous
        gathered = not _is_one_batch_entry(None if copies else q, problem)
        written = [] if target is None else [target]  # a new O is contiguous
        shared = of_prefix if gathered else [q, *of_prefix]
        aligned = [aligned_rows(problem, x, q) for x in ([q, k, v, *written], shared, written)]
        plan = _plan_of_both(problem, first, choices, aligned, gathered)
        for part in (plan.prefix, plan.own):
            placement.check_size(part)
        for copying in (plan.merge, plan.gather):
            if copying is not None:
                placement.check_grid(copying, "q")
        known_as = (*"QKV", "prefix K", "prefix V")
        named = {**dict(zip(known_as, inputs, strict=True)), **arguments.arrays}
        run = functools.partial(_execute, plan, arguments)
        return launch_cache.run_and_keep(plan, named, stream, call, run, target, arguments.seeds)


def _execute(plan: PrefixPlan, arguments: Binding, arrays: dict[str, object], stream: Any) -> None:
    p = plan.problem

    def lengths(_: Any) -> dict[str, object]:
        return {} if p.q_lens is None else {"q_lens": sent(np.array(p.q_lens, np.int32))}

    with device.scratch(stream) as allocate:
        made = {b.name: execution.allocated(b, allocate, stream) for b in plan.between}
    Q, O = (execution.by_heads(p, arrays[name]) for name in "QO")
    if plan.gather is not None:
        execution.execute(plan.gather, {"X": Q, "rows": made["rows"]}, stream, lengths)
    rows = made["rows"] if plan.gather is not None else device.as_one(Q)
    turn = (1, 0, 2) if p.layout == "bnhd" else (0, 1, 2)
    of_prefix = {"Q": rows, "O": made["prefix O"], "L": made["prefix L"]}
    of_prefix |= {x: device.transposed(arrays[f"prefix {x}"], turn) for x in "KV"}
    execution.execute_attention(plan.prefix, Binding.of({}), of_prefix, stream)
    execution.execute_attention(plan.own, arguments, {**arrays, "L": made["own L"]}, stream)
    x_lse, lse = (execution.by_heads(p, L) for L in (made["own L"], arrays.get("L", made.get("L"))))
    y, y_lse = (device.as_batch(made[name], O.shape[0]) for name in ("prefix O", "prefix L"))
    merged = {"x": O, "x_lse": x_lse, "y": y, "y_lse": y_lse, "lse": lse}
    execution.execute(plan.merge, merged, stream, lengths)


def _is_one_batch_entry(q: Operand | None, problem: Problem) -> bool:
    """Return whether the queries of all sequences can be read as rows of one batch entry.

    This is possible if the rows of a head are at equal distances in memory, across all sequences.
    ``q`` is the operand of the queries, or None for contiguous queries.
    """
    if problem.packed:
        return True
    if problem.q_lens is not None:  # rows of padding must not be read
        return False
    if 1 in (problem.batch, problem.seqlen_q):
        return True
    if q is None:
        return problem.layout == "bnhd" or problem.heads_q == 1
    axis = LAYOUTS[problem.layout].index("seqlen")
    return q.strides[0] == q.shape[axis] * q.strides[axis]


def _of_prefix(problem: Problem, k_shape: Any, v_shape: Any, options: Any) -> Problem:
    """Return the problem of the pass over the prefix, with the queries of all sequences.

    ``k_shape`` and ``v_shape`` are the shapes of ``prefix_k`` and ``prefix_v``. Raises ValueError
    or TypeError if these shapes do not match k and v, and for options that a call with a prefix
    does not support.
    """
    axes = LAYOUTS[problem.layout][1:]
    k, v = as_sizes("prefix_k", k_shape, axes), as_sizes("prefix_v", v_shape, axes)
    sizes = {"heads": problem.heads_k, "head_dim": problem.head_dim}
    for axis, size in sizes.items():
        if (found := k[axes.index(axis)]) != size:
            raise ValueError(
                f"prefix_k must have {axis}={size} like k, got {axis}={found} (shape {k})"
            )
    if v != (wanted := (*k[:-1], problem.d_v)):
        raise ValueError(
            f"prefix_v must have shape {wanted} (the axes of prefix_k, and the head_dim of v), got "
            f"{v}"
        )
    for flag in problem.options:
        if flag not in _BESIDE:
            name = argument_of(flag) if flag in FEATURES else flag
            name = "attn_mask" if name == "bias" and options.get("bias") is None else name
            raise ValueError(
                f"{name} cannot be given with prefix_k; a call with a prefix accepts the options "
                "scale, causal, softcap, sinks, q_lens, kv_lens, block_table, check_table, "
                "cu_seqlens_q, cu_seqlens_k, layout and precision"
            )
    names = ("heads_q", "heads_k", "head_dim", "head_dim_v", "dtype")
    kept = {name: getattr(problem, name) for name in (*names, "scale", "softcap", "precision")}
    rows = sum(cast(tuple, problem.q_lens)) if problem.packed else problem.batch * problem.seqlen_q
    return Problem(batch=1, seqlen_q=rows, seqlen_k=k[axes.index("seqlen")], **kept)


def _plan_of_both(
    problem: Problem, prefix: Problem, choices: Choices, aligned: Sequence[bool], gathered: bool
) -> PrefixPlan:
    """Return the plan of a call with a prefix.

    ``problem`` is the problem of the pass over the own keys of each sequence. ``prefix`` is the
    problem of the pass over the prefix. ``aligned`` contains three values: whether the rows are
    aligned in the pass over the own keys, in the pass over the prefix, and in O. ``gathered`` says
    that a kernel first copies q to contiguous memory.
    """
    with_lse = replace(choices, return_lse=True)
    own, of_prefix = map(Request.here, (with_lse,) * 2, (problem, prefix), aligned)
    return _planned(own, of_prefix, choices.return_lse, aligned[2], gathered)


@functools.lru_cache(maxsize=1024)
def _planned(
    of_own: Request, of_prefix: Request, return_lse: bool, aligned: bool, gathered: bool
) -> PrefixPlan:
    """Return the plan of the two passes and the merge. Plans are cached.

    ``of_own`` and ``of_prefix`` are the requests for the pass over the own keys and for the pass
    over the prefix. ``aligned`` says that the rows of O are aligned. ``gathered`` says that a
    kernel first copies q to contiguous memory.
    """
    own, prefix = planning.planned(of_own), planning.planned(of_prefix)
    p, one = own.problem, (1, own.problem.heads_q, prefix.problem.seqlen_q)
    between = [Buffer("prefix O", (*one, p.d_v), p.dtype), Buffer("prefix L", one)]
    between += [Buffer("own L", p.lse_shape)] + ([] if return_lse else [Buffer("L", p.lse_shape)])
    batch, heads, rows = of_own.row_shape
    lengths = replace(PLAIN, q_lens=of_own.features.q_lens)
    sizes = batch, heads, rows, p.d_v
    merge = merging.plan_of_merge_in_place(sizes, (p.dtype, p.dtype), aligned, True, lengths)
    gather = None
    if gathered:
        d = p.head_dim
        between.append(Buffer("rows", (*one, d), p.dtype, zeroed=lengths.q_lens))
        kernel = make_gather(d, p.dtype, of_own.aligned, lengths)
        grid = (blocks(rows, d, p.dtype, of_own.aligned), heads, batch)
        gather = LaunchPlan(launches=(Launch.of(kernel, grid),))
    parts = [part for part in (gather, prefix, own, merge) if part is not None]

    def count(block_mask: Any = None) -> io_model.Accesses:
        how = {"width": width_of(p.d_v, aligned), "gathered": gathered}
        return io_model.with_prefix(p, own.accesses, prefix.accesses, **how)

    changed = {
        "launches": tuple(launch for part in parts for launch in part.launches),
        "workspace": (*between, *(buffer for part in parts for buffer in part.workspace)),
        "outputs": own.outputs if return_lse else own.outputs[:1],
        "count": count,
    }
    kept = {f.name: getattr(own, f.name) for f in fields(own)} | changed
    own_fields = {"gather": gather, "prefix": prefix, "own": own, "merge": merge}
    made_by = of_own, of_prefix, return_lse, aligned, gathered
    return PrefixPlan(**kept, **own_fields, between=tuple(between), made_by=made_by)


def _again(of_own: Request, *others: Any) -> PrefixPlan:
    """Return the plan that ``_planned`` returns, for the device that the request ``of_own`` names.

    ``pickle`` calls this function when it loads a plan. ``others`` are the other arguments of
    ``_planned``.
    """
    with planning.planning_for(of_own):
        return _planned(of_own, *others)


copyreg.pickle(PrefixPlan, lambda plan: (_again, plan.made_by))
