"""The forward and the backward pass of a rank.

A step's results are of two kinds: those of what stays, which are summed where they are, and those
of what travels, which follow it a step behind and come home after the last. Of these the owner's
own part, of step 0, waits at home: the message begins at the next rank, and has a rank's part more
at each. With K and V on their way O and dQ stay, dK and dV follow; with Q the other way round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fa_numba
from fa_numba.ring.link import Exchange, Link
from fa_numba.ring.parts import Part, half_of, joined
from fa_numba.ring.schedule import travelled, work_at

# Of a step: what travels as it is at hand, half of rows, half of columns, causal or not; returns
# the part of what stays and the part of what travels, None for a kind without results.
Step = Callable[[Sequence[Any], str, str, bool], tuple[Part | None, Part | None]]


@dataclass(frozen=True)
class Ring:
    """A call: ``options`` are of every step, ``ahead`` those of forward steps alone, ``backward``
    of backward steps.
    """

    link: Link
    travels: str
    causal: bool
    layout: str
    options: dict[str, Any]
    ahead: dict[str, Any]
    backward: dict[str, Any]

    @property
    def axis(self) -> int:
        """That of the rows in q, k and v."""
        return 1 if self.layout == "bnhd" else 2


def forward(ring: Ring, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(O, L) of this rank's rows."""
    queries = ring.travels == "q"

    def step(held: Sequence[Any], rows: str, columns: str, causal: bool) -> tuple:
        (q_at, k_at, v_at) = (*held, k, v) if queries else (q, *held)
        q_at = half_of(q_at, rows, ring.axis)
        k_at, v_at = (half_of(x, columns, ring.axis) for x in (k_at, v_at))
        out, lse = fa_numba.attention(
            q_at, k_at, v_at, causal=causal, return_lse=True, **ring.options, **ring.ahead
        )
        part = Part((out,), lse, rows, ring.layout)
        return (None, part) if queries else (part, None)

    staying, travelling = _around(ring, (q,) if queries else (k, v), step, q.dtype)
    found = travelling if queries else staying
    assert found is not None
    return found.tensors[0], found.lse


def backward(
    ring: Ring, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any
) -> tuple[Any, Any, Any]:
    """(dQ, dK, dV) of this rank's rows and columns.

    ``out`` and ``lse`` are those of the whole rows: P = exp(S - L) and D = rowsum(dO o O) of any
    columns need no more.
    """
    queries = ring.travels == "q"

    def step(held: Sequence[Any], rows: str, columns: str, causal: bool) -> tuple:
        q_at, dout_at, out_at, lse_at = held if queries else (q, dout, out, lse)
        k_at, v_at = (k, v) if queries else held
        q_at, dout_at, out_at = (half_of(x, rows, ring.axis) for x in (q_at, dout_at, out_at))
        k_at, v_at = (half_of(x, columns, ring.axis) for x in (k_at, v_at))
        dq, dk, dv = fa_numba.attention_backward(
            dout_at, q_at, k_at, v_at, out_at, half_of(lse_at, rows, 2),
            causal=causal, **ring.options, **ring.backward,
        )  # fmt: skip
        of_q = Part((dq,), None, rows, ring.layout)
        of_kv = Part((dk, dv), None, columns, ring.layout)
        return (of_kv, of_q) if queries else (of_q, of_kv)

    operands = (q, dout, out, lse) if queries else (k, v)
    staying, travelling = _around(ring, operands, step, q.dtype)
    assert staying is not None and travelling is not None
    of_q, of_kv = (travelling, staying) if queries else (staying, travelling)
    return of_q.tensors[0], *of_kv.tensors


def _around(
    ring: Ring, operands: Sequence[Any], step: Step, dtype: Any
) -> tuple[Part | None, Part | None]:
    """Every step: the results of what stays here and of this rank's own travelling part."""
    link = ring.link
    ranks = link.ranks
    held: Sequence[Any] = [x.contiguous() for x in operands]
    coming: Exchange | None = None  # what travels, for the next step
    sums: Exchange | None = None  # results of what travels, of the step before
    staying = home = None
    for n in range(ranks):
        if coming is not None:
            held = coming.wait()
        if n < ranks - 1:
            coming = link.exchange(held, [_empty(x, x.shape, x.dtype) for x in held])
        ours, theirs = step(held, *work_at(link.rank, n, ranks, ring.travels, ring.causal))
        if n == 0:
            # More than one sum is to come: in float32.
            staying = ours if ours is None or ranks <= 2 else ours.widened()
            home = theirs
            continue
        if ours is not None and staying is not None:
            staying = joined(staying, ours)
        if theirs is not None and home is not None:
            if sums is not None:
                theirs = joined(theirs.widened(), _arrived(sums, ring, home, n - 1))
            sums = link.exchange(theirs.message, _room(ring, home, n).message)
    if sums is not None and home is not None:
        home = joined(home, _arrived(sums, ring, home, ranks - 1))
    return (
        None if staying is None else staying.rounded(dtype),
        None if home is None else home.rounded(dtype),
    )


def _empty(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def _room(ring: Ring, home: Part, step: int) -> Part:
    """Memory for what the rank before sends after ``step``, of a part like the one at home: as its
    kernel left it after step 1, then a sum in float32.
    """
    link = ring.link
    half = travelled(link.before, step, link.ranks, ring.travels, ring.causal)
    torch = sys.modules["torch"]
    tensors = []
    for x in home.tensors:
        rows = half_of(x, half, home.axis)
        tensors.append(_empty(x, rows.shape, x.dtype if step == 1 else torch.float32))
    lse = home.lse
    if lse is not None:
        lse = _empty(lse, half_of(lse, half, 2).shape, lse.dtype)
    return Part(tuple(tensors), lse, half, home.layout)


def _arrived(sums: Exchange, ring: Ring, home: Part, step: int) -> Part:
    """What the rank before has sent after ``step``."""
    came = sums.wait()
    half = travelled(ring.link.before, step, ring.link.ranks, ring.travels, ring.causal)
    lse = None if home.lse is None else came[-1]
    return Part(tuple(came[: len(home.tensors)]), lse, half, home.layout)
