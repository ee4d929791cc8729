"""Launches for the gradient of the sinks, and for the row sums D that this gradient needs."""

from __future__ import annotations

from dataclasses import replace

from fa_numba.choices.arguments import Argument, Buffer, Untouched
from fa_numba.choices.requests import Request
from fa_numba.choices.units import UNITS
from fa_numba.host.plans import Launch
from fa_numba.integers import ceil_div
from fa_numba.kernels.sink_gradients import make_sink_gradients


def row_sums(request: Request, clears: bool, fragments: bool = False) -> Launch:
    """Return the launch that computes D = rowsum(dO o O) - dL, where dL is 0 without ``dlse``.

    If ``clears`` is True, the kernel also sets the float32 sum of dQ to 0. If ``fragments`` is
    True, the elements of this sum are in the order of tensor-core fragments, and ``clears`` must
    be True too.
    """
    kernels, p = UNITS[request.unit].kernels.rows, request.problem
    batch, heads, rows, _ = request.q_shape
    if fragments:
        of_groups = kernels.make_group_row_sums(p.head_dim, p.dtype, request.lengths_of_rows)
        _, per_block = kernels.rows_of_sums(p.head_dim)
        return Launch.of(of_groups, (ceil_div(rows, per_block), heads, batch))
    facts = (p.head_dim, p.d_v, *UNITS[request.unit].row_facts(request))
    kernel = kernels.make_row_sums(*facts, clears, request.lengths_of_rows)
    sums = "dQ" if request.dtype.sums_in_place else "A"
    bound: dict[str, Argument] = {} if clears else {sums: Untouched(request.q_shape)}
    return Launch.of(kernel, (ceil_div(rows, kernels.WARPS), heads, batch), **bound)


def gradients(request: Request, has_d: bool) -> tuple[list[Launch], list[Buffer]]:
    """Return the launches that compute the gradient of the sinks, and their workspace.

    Both lists are empty without ``return_dsinks``. ``has_d`` says whether another launch of the
    pass computes the row sums D. If ``has_d`` is False, the lists also contain a launch that
    computes D, and the buffer of D.
    """
    if not request.choices.return_dsinks:
        return [], []
    features = replace(request.lengths, packed=False, sinks=True)
    own = Launch.of(make_sink_gradients(features), (request.problem.heads_q, 1, 1))
    if has_d:
        return [own], []
    return [row_sums(request, False), own], [Buffer("D", request.row_shape)]
