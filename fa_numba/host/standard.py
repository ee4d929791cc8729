"""The plans of standard attention, whose kernels write S and P to global memory."""

from __future__ import annotations

import functools
from dataclasses import replace

from fa_numba import io_model
from fa_numba.choices.arguments import Buffer, Untouched
from fa_numba.choices.decisions import Decision
from fa_numba.choices.requests import Request
from fa_numba.choices.tiles import Chosen
from fa_numba.choices.units import Unit
from fa_numba.dtypes import DTYPES, DType
from fa_numba.host import sinks
from fa_numba.host.plans import Launch, Plan
from fa_numba.integers import ceil_div, power_of_two, round_up


def forward(request: Request, chosen: Chosen[Unit]) -> Plan:
    """Return the plan of a forward pass (Algorithm 0): S = Q KT, P = softmax(S), O = P V.

    P replaces S in memory.
    """
    (unit, why_unit), p, dtype = chosen, request.problem, request.dtype
    tiles, spec, why = unit.standard(request)
    decided = Decision(unit, tiles, spec, why={"unit": why_unit, "tiles": why})
    if dtype.scaled:
        return _forward_of_e4m3(request, decided)
    return_lse = request.choices.return_lse
    features, kernels = request.features, unit.kernels.standard
    lengths = request.lengths
    scores = replace(spec, features=replace(features, dropout=False, sinks=False))
    softmax = replace(lengths, dropout=features.dropout, sinks=features.sinks)
    row = row_elements(p.seqlen_k, request.shared_limit, dtype, kernels.MAX_WARPS)
    warps = row_warps(p.seqlen_k, dtype, kernels.MAX_WARPS)
    row_tiles = (ceil_div(p.seqlen_q, tiles.Br), p.heads_q, p.batch)
    rows = (p.seqlen_q, p.heads_q, p.batch)
    L = "L" if return_lse else Untouched(request.row_shape)
    of_dtype = unit.row_facts(request)[:1]
    over_rows = kernels.make_standard_softmax(row, warps, return_lse, softmax, *of_dtype)
    output = kernels.make_standard_output(replace(spec, features=lengths))
    launches = (
        Launch.of(kernels.make_standard_scores(scores), row_tiles, scale="score_scale"),
        Launch.of(over_rows, rows, P="S", L=L),
        Launch.of(output, row_tiles, P="S"),
    )
    count = functools.partial(
        io_model.standard, p, tiles, return_lse=return_lse, row_resident=row > 0
    )
    return Plan.of(request, decided, launches, [_matrix("S", request)], count)


def _forward_of_e4m3(request: Request, decided: Decision) -> Plan:
    """Return the plan of a forward pass of e4m3 arrays.

    S is in float16, and P has a buffer of its own in e4m3. The array l contains the sum of each
    row. The kernel of O divides by it.
    """
    p, (unit, tiles, spec) = request.problem, (decided.unit, decided.tiles, decided.spec)
    dtype, kernels = DTYPES[spec.dtype], unit.kernels
    of_scores, own = kernels.standard, kernels.standard_e4m3
    row = row_elements(p.seqlen_k, request.shared_limit, dtype, of_scores.MAX_WARPS)
    warps = row_warps(p.seqlen_k, dtype, of_scores.MAX_WARPS)
    row_tiles = (ceil_div(p.seqlen_q, tiles.Br), p.heads_q, p.batch)
    return_lse = request.choices.return_lse
    softmax = own.make_softmax(row, warps, return_lse, request.lengths, dtype.name)
    lengths = replace(request.lengths, scales=request.features.scales)
    output = own.make_output(replace(spec, features=lengths), p.o_dtype)
    L = "L" if return_lse else Untouched(request.row_shape)
    launches = (
        Launch.of(of_scores.make_standard_scores(spec), row_tiles, scale="score_scale"),
        Launch.of(softmax, (p.seqlen_q, p.heads_q, p.batch), L=L),
        Launch.of(output, row_tiles),
    )
    workspace = (
        replace(_matrix("S", request), dtype=dtype.name),
        _matrix("P", request),
        Buffer("l", request.row_shape),
    )
    count = functools.partial(
        io_model.standard, p, tiles, return_lse=return_lse, row_resident=row > 0
    )
    return Plan.of(request, decided, launches, workspace, count)


def backward(request: Request, chosen: Chosen[Unit]) -> Plan:
    """Return the plan of a backward pass (Algorithm 3).

    The launches compute S and P again, then dP = dO VT, then dS, and then dV, dQ and dK. dS
    replaces dP in memory. If a ``softcap`` or a ``score_mod`` changes the derivative of the scores,
    one more launch multiplies dS by this derivative. The tiles are chosen for the larger one of the
    two head dimensions.
    """
    (unit, why_unit), p, dtype = chosen, request.problem, request.dtype
    larger = replace(p, head_dim=p.largest_dim, head_dim_v=None)
    (tiles, spec, why), across = unit.standard_backward(replace(request, problem=larger))
    spec, across = (replace(x, head_dim=p.head_dim) for x in (spec, across))
    shared, own = unit.kernels.standard, unit.kernels.standard_backward
    features = request.features
    lengths = request.lengths
    masked = replace(spec, features=replace(features, dropout=False, dbias=False))
    plain = replace(spec, features=lengths)
    asked = request.choices
    summed = replace(lengths, dropout=features.dropout, dbias=features.dbias, dlse=asked.dlse)
    limit, most = request.shared_limit, shared.MAX_WARPS
    row = row_elements(p.seqlen_k, limit, dtype, most)
    pair = row_elements(p.seqlen_k, limit, dtype, most, rows=2)
    warps = row_warps(p.seqlen_k, dtype, most)
    row_tiles = (ceil_div(p.seqlen_q, tiles.Br), p.heads_q, p.batch)
    column_tiles = (ceil_div(p.seqlen_k, tiles.Bc), p.heads_k, p.batch)
    rows = (p.seqlen_q, p.heads_q, p.batch)
    of_dtype = unit.row_facts(request)[:1]
    normalised = replace(lengths, sinks=p.sinks)
    softmax = shared.make_standard_softmax(row, warps, False, normalised, *of_dtype)
    gradients = own.make_standard_score_gradients(pair, warps, summed, *of_dtype)
    product = shared.make_standard_scores(replace(plain, head_dim=p.d_v))
    output = shared.make_standard_output(plain)
    across = replace(across, features=lengths)
    of_dk = own.make_standard_transposed_output(across)
    of_dv = own.make_standard_transposed_output(replace(across, head_dim=p.d_v))
    scores = shared.make_standard_scores(masked)
    launches = [
        Launch.of(scores, row_tiles, S="P", scale="score_scale"),
        Launch.of(softmax, rows, S="P", L=Untouched(request.row_shape)),
        Launch.of(product, row_tiles, Q="dO", K="V", S="dP", scale=1.0),
        Launch.of(gradients, rows, dS="dP"),
    ]
    if features.slopes:
        changing = replace(
            lengths,
            softcap=features.softcap,
            score_mod=features.score_mod,
            score_mod_grad=features.score_mod_grad,
        )
        changed = replace(plain, features=changing)
        slopes = shared.make_standard_scores(changed, slopes=True)
        launches.append(Launch.of(slopes, row_tiles, S="dP", scale="score_scale"))
    launches += [
        Launch.of(of_dv, column_tiles),
        Launch.of(output, row_tiles, P="dP", V="K", O="dQ"),
        Launch.of(of_dk, column_tiles, P="dP", dO="Q", dV="dK"),
    ]
    of_sinks, beside = sinks.gradients(request, has_d=False)
    count = functools.partial(
        io_model.standard_backward, p, tiles,
        row_resident=pair > 0, forward_resident=row > 0,
        dbias=asked.return_dbias, dlse=asked.dlse, dsinks=asked.return_dsinks,
    )  # fmt: skip
    decided = Decision(unit, tiles, spec, why={"unit": why_unit, "tiles": why})
    matrices = [_matrix(name, request) for name in ("P", "dP")]
    return Plan.of(request, decided, launches + of_sinks, matrices + beside, count)


def _matrix(name: str, request: Request) -> Buffer:
    """Return the buffer of a matrix (batch, heads_q, seqlen_q, seqlen_k) in the dtype of q.

    Gaps between the rows let each row start at a 16-byte address.
    """
    p = request.problem
    pitch = round_up(p.seqlen_k, request.dtype.chunk)
    return Buffer(name, p.score_shape, p.dtype, pitch=pitch)


def row_elements(Nk: int, limit: int, dtype: DType, max_warps: int, rows: int = 1) -> int:
    """Return the number of elements of shared memory that a kernel reserves for a row of S.

    argument    meaning
    Nk          length of a row of S
    limit       size of the shared memory in bytes
    dtype       dtype of S
    max_warps   number of warps for each of which the kernel needs two more float32 numbers
    rows        number of rows of S that a thread block keeps in shared memory

    Normally the result is ``Nk`` rounded up to a power of two, and at least 256. Few different
    kernels are compiled then. The result is smaller if the shared memory is too small for this
    number: it is the largest number that fits, or 0 if ``Nk`` elements do not fit.
    """
    most = (limit - 8 * max_warps) // (16 * rows) * dtype.chunk  # a multiple of 16 bytes
    if most < Nk:
        return 0
    return min(most, max(256, power_of_two(Nk)))


def row_warps(Nk: int, dtype: DType, max_warps: int) -> int:
    """Return the number of warps that share a row of S, from 1 to ``max_warps``.

    ``Nk`` is the length of the row. The number is chosen so that each thread takes about 16 bytes
    of the row. A thread takes more if ``max_warps`` warps are too few for this. Below
    ``max_warps``, the number is a power of two.
    """
    return min(max_warps, max(1, power_of_two(Nk) // (32 * dtype.chunk)))
