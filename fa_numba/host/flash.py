"""The plans of FlashAttention-1 and FlashAttention-2, forward and backward.

A plan lists the launches, the arguments of each launch by name, and the workspace.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from fa_numba import io_model
from fa_numba.choices import decisions
from fa_numba.choices.arguments import Argument, Boxes, Buffer, Untouched
from fa_numba.choices.decisions import Decision
from fa_numba.choices.requests import Request
from fa_numba.choices.tiles import Chosen
from fa_numba.choices.units import UNITS, Unit
from fa_numba.dtypes import PRECISIONS
from fa_numba.host import sinks
from fa_numba.host.plans import Launch, Plan
from fa_numba.integers import ceil_div, round_up
from fa_numba.kernels import merge_splits, planes, turned_values
from fa_numba.options import PLAIN, POWERS, SPLIT_SUMS
from fa_numba.tiling.spec import FRAGMENT_ROWS


def forward(request: Request, chosen: Chosen[Unit]) -> Plan:
    """Return the plan of a forward pass: Algorithm 1 of the FA-1 paper or of the FA-2 paper.

    The plan has one attention kernel. Further kernels are added in three cases:

    case                            further kernels
    FA-2 with key splits            a kernel that merges the splits
    a ``precision`` like "fp16x3"   kernels that split the matrices into planes
    inputs in float8_e4m3fn         a kernel that stores V transposed in a workspace
    """
    decided, p = decisions.forward(request, chosen), request.problem
    return_lse, paged = request.choices.return_lse, request.problem.pages is not None
    unit, tiles, spec, splits = decided.unit, decided.tiles, decided.spec, decided.splits
    Tr = ceil_div(p.seqlen_q, spec.head_rows)
    if request.choices.algorithm == "fa2":
        kernel = unit.kernels.fa2_forward.make_forward(spec)
        # The kernel always writes L, which costs one float per row.
        own: tuple[Buffer, ...] = () if return_lse else (Buffer("L", request.row_shape),)
        grid, bound, workspace = unit.copies.of_fa2_forward(request, spec, splits)
        own += workspace
        merge: tuple[Launch, ...] = ()
        if splits > 1:
            merge = (_merge(request, spec.tile_heads, splits),)
            own += _split_sums(request, spec.tile_heads, splits)
        before, of_planes, taken = _planes(request, spec)
        own += of_planes
        in_planes = {name: _as_bound(bound.get(name), of, spec) for name, of in taken.items()}
        main = Launch.of(kernel, grid, **{"scale": "score_scale", **bound, **in_planes})
        turned, of_values = _turned_values(request, spec)
        own += of_values
        launches = (*before, *turned, main, *merge)
        count = functools.partial(
            io_model.fa2, p, tiles,
            tile_heads=spec.tile_heads, kv_splits=splits, boxes=unit.copies.by_boxes,
            threads=spec.loading_threads if paged else 0,
            key_pieces=spec.key_pieces if paged else (),
        )  # fmt: skip
        return Plan.of(request, decided, launches, own, count)
    kernel = unit.kernels.fa1_forward.make_forward(spec)
    split_rows = ceil_div(Tr, request.choices.query_splits) * tiles.Br
    grid = (ceil_div(p.seqlen_q, split_rows), p.heads_q, p.batch)
    workspace = (Buffer("l", request.row_shape), Buffer("m", request.row_shape))
    if not request.dtype.sums_in_place:  # float32 sums of O between the passes
        workspace += (_sum("A", request.o_shape),)
    L: Argument = "L" if return_lse else Untouched(request.row_shape)
    bound = unit.copies.of_fa1_forward(spec)
    before, of_planes, taken = _planes(request, spec)
    in_planes = {name: _as_bound(bound.get(name), of, spec) for name, of in taken.items()}
    if in_planes:
        in_planes = {**in_planes, "O": "O", "A": Untouched(request.o_shape)}
    main = Launch.of(kernel, grid, **{"L": L, "scale": "score_scale", **bound, **in_planes})
    turned, of_values = _turned_values(request, spec)
    launches = (*before, *turned, main)
    workspace += (*of_planes, *of_values)
    count = functools.partial(
        io_model.fa1, p, tiles, query_splits=request.choices.query_splits,
        return_lse=return_lse, boxes=unit.copies.by_boxes,
    )  # fmt: skip
    return Plan.of(request, decided, launches, workspace, count, split_rows)


def _turned_values(request: Request, spec: Any) -> tuple[tuple[Launch, ...], tuple[Buffer, ...]]:
    """Return the launch that stores V by columns, and the buffer for the result.

    Both are empty unless the inputs are e4m3 (kernels/turned_values.py).
    """
    if not request.features.scales:
        return (), ()
    p = request.problem
    batch, heads, rows, _ = request.k_shape
    kernel = turned_values.make_turn_values(p.d_v, replace(PLAIN, kv_lens=request.features.kv_lens))
    keys = round_up(rows, turned_values.GROUP) + turned_values.GROUP
    VT = Buffer("VT", (batch, heads, p.d_v, keys), p.dtype)
    return (Launch.of(kernel, (keys // turned_values.GROUP, heads, batch)),), (VT,)


def _as_bound(boxes: Argument | None, of: Argument, spec: Any) -> Argument:
    """Return the kernel argument that passes the planes of a matrix instead of the matrix.

    argument   meaning
    boxes      argument that passes the matrix itself. It is a ``Boxes`` object if the copy engine
               (TMA) copies the matrix. Otherwise it is a name or None
    of         name of the array that contains the planes
    spec       spec of the kernel; ``spec.dtype`` is the dtype of the planes

    If ``boxes`` is a ``Boxes`` object, the result is a ``Boxes`` object for the array ``of``.
    Otherwise the result is ``of``.
    """
    return replace(boxes, name=str(of), dtype=spec.dtype) if isinstance(boxes, Boxes) else of


def _planes(
    request: Request, spec: Any
) -> tuple[tuple[Launch, ...], tuple[Buffer, ...], dict[str, Argument]]:
    """Return the launches that split the float32 matrices of a pass into planes.

    The function returns three results: the launches, the buffers for the planes, and a mapping from
    the name of each matrix to the name of the array with its planes. All three are empty if the
    precision of the call splits no matrices.
    """
    p, launches, buffers = request.problem, [], []
    taken: dict[str, Argument] = {}
    precision = PRECISIONS[p.precision]
    if precision.planes == 1:
        return (), (), {}
    of_keys, of_values = spec.plane_columns
    shapes = {"Q": request.q_shape, "K": request.k_shape, "V": request.k_shape}
    if request.choices.passes == "bwd":
        shapes["dO"] = request.q_shape
    for (name, shape), power in zip(shapes.items(), POWERS, strict=False):
        lens, keys = request.lengths_of_rows, name in "KV"
        keys &= lens != PLAIN
        sizes = (p.d_v, of_values) if name in ("V", "dO") else (p.head_dim, of_keys)
        facts = planes.PlaneFacts(lens, *sizes, p.precision, request.aligned, keys)
        heads, rows, of = shape[:2], shape[2], f"largest of {name}"
        row, of_name = precision.planes * facts.columns, f"planes of {name}"
        taken[name] = of_name
        buffers.append(Buffer(of_name, (*heads, rows, row), precision.dtype))
        scaling: dict[str, Argument] = {"M": of, "power": power}
        if precision.scaled:
            partial = (*heads, planes.WARPS_OF_HEAD)
            buffers += [Buffer(of, partial), Buffer(power, heads)]
            grid = (planes.WARPS_OF_HEAD // planes.WARPS, *heads[::-1])
            launches.append(Launch.of(planes.make_largest(facts), grid, X=name, M=of))
        else:
            scaling = {"M": Untouched((*heads, 1)), "power": Untouched(heads)}
        grid = (ceil_div(rows, planes.ROWS * planes.WARPS), *heads[::-1])
        kernel = planes.make_split_rows(facts)
        launches.append(Launch.of(kernel, grid, X=name, planes=of_name, **scaling))
    return tuple(launches), tuple(buffers), taken


def _row_sums_of_planes(request: Request) -> Launch:
    """Return the launch that computes D = rowsum(dO o O) - dL in a pass with planes.

    The kernel reads the float32 matrix dO, and not its planes. dL is 0 without ``dlse``. The kernel
    also sets the array A, the float32 sum of dQ, to 0.
    """
    p = request.problem
    facts = planes.PlaneFacts(request.lengths_of_rows, p.head_dim, 0, "", request.aligned, False)
    return Launch.of(planes.make_row_sums(facts, p.d_v), _by_rows(request, 4), X="dO")


def _split_sums(request: Request, heads: int, splits: int) -> tuple[Buffer, ...]:
    """Return the buffers in which FA-2's key splits store their O, l and m.

    ``heads`` is the number of query heads that share a row tile. In the buffers, the rows of these
    heads alternate. ``splits`` is the number of key splits. The names of the buffers are
    ``options.SPLIT_SUMS``.
    """
    batch, heads_q, rows = request.row_shape
    shape = (splits, batch, heads_q // heads, rows * heads)
    A, l, m = SPLIT_SUMS
    return _sum(A, (*shape, request.problem.d_v)), Buffer(l, shape), Buffer(m, shape)


def _merge(request: Request, heads: int, splits: int) -> Launch:
    """Return the launch that merges the results of the key splits of each row.

    ``heads`` is the number of query heads that share a row tile. ``splits`` is the number of key
    splits.
    """
    p = request.problem
    features = replace(PLAIN, packed=request.features.packed)
    if features.packed:  # with pages, there are no starts of the sequences of K
        features = replace(features, page_size=request.features.page_size)
    row_warps = 1 if splits <= merge_splits.FEW_SPLITS else merge_splits.WARPS
    facts = merge_splits.MergeFacts(features, p.d_v, p.o_dtype, request.aligned, heads, row_warps)
    grid = (ceil_div(p.seqlen_q, merge_splits.WARPS // row_warps), p.heads_q, p.batch)
    return Launch.of(merge_splits.make_merge(facts), grid)


def backward(request: Request, chosen: Chosen[Unit]) -> Plan:
    """Return the plan of a backward pass: Algorithm 4 of FA-1's paper, or Algorithm 2 of FA-2's."""
    make = _fa1_backward if request.choices.algorithm == "fa1" else _fa2_backward
    return make(request, decisions.backward(request, chosen))


def _fa1_backward(request: Request, decided: Decision) -> Plan:
    """Return the plan of FA-1's backward pass, which has one main kernel.

    With query splits, several thread blocks add to dK and dV of the same head. If the dtype has 16
    bits, they add to float32 sums. Two more launches then round the sums to dK and dV.
    """
    unit, p, splits = decided.unit, request.problem, request.choices.query_splits
    tiles, spec = decided.tiles, decided.spec
    split_rows = ceil_div(ceil_div(p.seqlen_q, tiles.Br), splits) * tiles.Br
    grid = (ceil_div(p.seqlen_q, split_rows), p.heads_k, p.batch)
    kernel = unit.kernels.fa1_backward.make_backward(spec)
    workspace: tuple[Buffer, ...] = ()
    if not request.dtype.sums_in_place:  # float32 sums of dQ between the passes
        workspace = (_sum("A", request.q_shape),)
    in_place = splits == 1 or request.dtype.sums_in_place
    bound: dict[str, Argument] = {
        "scale_log2": "score_scale",
        **unit.copies.of_backward(request, tiles, spec, in_place),
    }
    if in_place:
        launches: tuple[Launch, ...] = (Launch.of(kernel, grid, **bound),)
    else:
        sums = {"dK": "sum of dK", "dV": "sum of dV"}
        shapes = request.k_shape, (*request.k_shape[:-1], p.d_v)
        workspace += tuple(_sum(*x, zeroed=True) for x in zip(sums.values(), shapes, strict=True))
        launches = (
            Launch.of(kernel, grid, **(bound | sums)),
            *(_rounding(request, A, out, 1.0, keys=True) for out, A in sums.items()),
        )
    of_sinks, beside = sinks.gradients(request, has_d=False)
    launches, workspace = (*launches, *of_sinks), (*workspace, *beside)
    asked = request.choices
    count = functools.partial(
        io_model.fa1_backward, p, tiles, query_splits=splits,
        dbias=asked.return_dbias, dlse=asked.dlse, dsinks=asked.return_dsinks,
    )  # fmt: skip
    return Plan.of(request, decided, launches, workspace, count, split_rows)


def _fa2_backward(request: Request, decided: Decision) -> Plan:
    """Return the plan of FA-2's backward pass.

    The first launch computes D = rowsum(dO o O) - dL, where dL is 0 without ``dlse``. The main
    launch over column tiles computes dK and dV. There are three ways to compute dQ:

    - The main kernel adds to dQ atomically, in float32.
    - The main kernel adds to a float32 sum atomically, and another launch rounds the sum to dQ.
    - Another kernel over row tiles computes dQ, for example with ``deterministic``.

    Further launches split the matrices into planes, add the group splits of dK and dV, and compute
    the gradient of the sinks, if the call needs them.
    """
    unit, tiles, spec, splits = decided.unit, decided.tiles, decided.spec, decided.splits
    p = request.problem
    kernels, atomic = unit.kernels.fa2_backward, unit.adds_dq(request)
    over_columns = unit.copies.over_columns(request, tiles, spec, splits)
    workspace = [Buffer("D", request.row_shape)]
    sums = "dQ" if request.dtype.sums_in_place and spec.planes == 1 else "A"
    before, of_planes, taken = _planes(request, spec)
    workspace += of_planes
    sum_of_dq: dict[str, Argument] = {} if atomic else {sums: Untouched(request.q_shape)}
    fragments = spec.adds_fragments
    row_sums = (
        sinks.row_sums(request, atomic, fragments) if not taken else _row_sums_of_planes(request)
    )
    boxes = unit.copies.of_backward(request, tiles, spec, splits == 1)
    taken = {name: _as_bound(boxes.get(name), of, spec) for name, of in taken.items()}
    parts = {"dK": "parts of dK", "dV": "parts of dV"} if splits > 1 else {}
    # Query heads of a split, or splits of a query head.
    shared = {"group": max(p.group // splits, splits // p.group)} if splits > 1 else {}
    bound = {"scale_log2": "score_scale", **boxes, **sum_of_dq, **taken, **parts, **shared}
    launches = [
        row_sums,
        *before,
        Launch.of(kernels.make_backward(spec, atomic), over_columns, **bound),
    ]
    dq_tiles = None
    if not atomic:
        dq_tiles, dq_spec = unit.dq_kernel(request, tiles, spec)
        over_rows, of_dq, _ = unit.copies.of_dq_kernel(request, dq_tiles, dq_spec)
        kernel = kernels.make_query_gradients(dq_spec)
        launches.append(Launch.of(kernel, over_rows, scale_log2="score_scale", **of_dq))
    elif sums == "A":
        rounding, of_sum = _rounding(request, "A", "dQ", "scale"), _sum("A", request.q_shape)
        if fragments:
            rounding, of_sum = _rounding_of_fragments(request)
        workspace.append(of_sum)
        launches.append(rounding)
    batch, heads, rows, d = request.k_shape
    for out, name in parts.items():
        columns = p.d_v if out == "dV" else d
        workspace.append(_sum(name, (batch, heads * splits, rows, columns)))
        launches.append(_rounding(request, name, out, 1.0, keys=True, splits=splits))
    launches += sinks.gradients(request, has_d=True)[0]
    asked = request.choices
    count = functools.partial(
        io_model.fa2_backward, p, tiles,
        deterministic=not atomic, dq_tiles=dq_tiles,
        dbias=asked.return_dbias, dlse=asked.dlse, dsinks=asked.return_dsinks,
        group_splits=splits, boxes=unit.copies.by_boxes, adders=spec.adders,
    )  # fmt: skip
    return Plan.of(request, decided, launches, workspace, count)


def _sum(name: str, shape: tuple[int, ...], zeroed: bool = False) -> Buffer:
    """Return the buffer of a float32 sum, an array of workspace.

    The length of a row is rounded up to an even number, so that rows start at 8-byte addresses. If
    ``zeroed`` is True, the buffer is filled with zeros before the launches.
    """
    return Buffer(name, (*shape[:-1], round_up(shape[-1], 2)), zeroed=zeroed)


def _rounding(
    request: Request, A: str, out: str, scale: Argument, keys: bool = False, splits: int = 1
) -> Launch:
    """Return the launch that computes ``out`` = ``scale`` A, rounded to the dtype of the call.

    ``A`` is the name of a float32 array. If ``splits`` is above 1, the array contains this number
    of parts, and the kernel adds the parts first. If ``keys`` is True, ``out`` has as many rows as
    K. Otherwise, it has as many rows as Q.
    """
    unit, p = UNITS[request.unit], request.problem
    d = p.d_v if out == "dV" else p.head_dim
    kernels, facts = unit.kernels.rows, (d, *unit.row_facts(request))
    precision = request.features.precision
    kernel = kernels.make_round_rows(*facts, splits=splits, precision=precision)
    return Launch.of(kernel, _by_rows(request, kernels.WARPS, keys), A=A, dQ=out, scale=scale)


def _rounding_of_fragments(request: Request) -> tuple[Launch, Buffer]:
    """Return the launch that computes dQ from its float32 sum, and the buffer of the sum.

    The kernel multiplies the sum by the scale of the scores, and rounds the product. The elements
    of the sum are stored in the order of tensor-core fragments.
    """
    kernels, p = UNITS[request.unit].kernels.rows, request.problem
    kernel = kernels.make_round_fragments(p.head_dim, p.dtype)
    batch, heads, rows, d = request.q_shape
    groups = ceil_div(rows, FRAGMENT_ROWS)
    blocks = ceil_div(groups, kernels.groups_of_rounding(p.head_dim))
    launch = Launch.of(kernel, (blocks, heads, batch))
    return launch, Buffer("A", (batch, heads, groups, FRAGMENT_ROWS * d))


def _by_rows(request: Request, warps: int, keys: bool = False) -> tuple[int, int, int]:
    """Return the grid of a kernel in which each warp computes one row of Q.

    If ``keys`` is True, each warp computes one row of K instead. ``warps`` is the number of warps
    of a thread block.
    """
    batch, heads, rows, _ = request.k_shape if keys else request.q_shape
    return ceil_div(rows, warps), heads, batch
