"""The forward and the backward pass of a rank.

A step's results are of two kinds: those of what stays, which are summed where they are, and those
of what travels, which follow it a step behind and come home after the last. Of these the owner's
own part waits at home: the message begins at the next rank, and has a rank's part more at each.
With K and V on their way O and dQ stay, dK and dV follow; with Q the other way round.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fa_numba
from fa_numba.ring import masked
from fa_numba.ring.agreement import Agreement
from fa_numba.ring.link import Exchange, Link
from fa_numba.ring.parts import Part, half_of, joined
from fa_numba.ring.schedule import Work, travelled, work_at
from fa_numba.ring.visible import Mask

# Of a step: what travels as it is at hand, what is computed of it, which heads (None for all);
# returns the part of what stays and the part of what travels, None for a kind without results.
Step = Callable[[Sequence[Any], Work, "Heads | None"], tuple[Part | None, Part | None]]

# Operations, of multiplications and additions, that take a GPU about as long as its host asks the
# others whether they mean the same call; a part of LONG times as many has nothing to gain there.
EARLY, LONG = 2**38, 16


@dataclass(frozen=True)
class Heads:
    """``count`` K/V heads from ``first`` on, of ``of``, and the query heads that share them."""

    first: int
    count: int
    of: int

    def among(self, x: Any, axis: int) -> Any:
        """A view of these heads of a tensor that has them, or the query heads, along an axis."""
        group = x.shape[axis] // self.of
        return x.narrow(axis, self.first * group, self.count * group)


@dataclass(frozen=True)
class Ring:
    """A call: ``options`` are of every step, ``ahead`` those of forward steps alone, ``backward``
    of backward steps. With a ``mask``, of a window or lengths, ``masked`` has the passes.
    """

    link: Link
    travels: str
    causal: bool
    layout: str
    options: dict[str, Any]
    ahead: dict[str, Any]
    backward: dict[str, Any]
    mask: Mask | None = None

    @property
    def axis(self) -> int:
        """That of the rows in q, k and v."""
        return 1 if self.layout == "bnhd" else 2

    def cut(self, tensors: Sequence[Any], half: str, heads: Heads | None) -> list[Any]:
        """Views of a half of the rows, and of some heads."""
        rows = [half_of(x, half, self.axis) for x in tensors]
        return rows if heads is None else [heads.among(x, 3 - self.axis) for x in rows]


def forward(
    ring: Ring, q: Any, k: Any, v: Any, agreement: Agreement | None = None
) -> tuple[Any, Any]:
    """(O, L) of this rank's rows. What ``agreement`` still has to say is waited for before anything
    is sent.
    """
    if ring.mask is not None:
        return masked.forward(ring, q, k, v, agreement)
    queries = ring.travels == "q"
    whole: Any = None  # O of all heads, where steps are of some

    def step(held: Sequence[Any], work: Work, heads: Heads | None) -> tuple:
        (q_at, k_at, v_at) = (*held, k, v) if queries else (q, *held)
        (q_at,) = ring.cut([q_at], work.rows, heads)
        k_at, v_at = ring.cut([k_at, v_at], work.columns, heads)
        nonlocal whole
        out = None
        if heads is not None:
            whole = _empty(q, q.shape, q.dtype) if whole is None else whole
            out = heads.among(whole, 3 - ring.axis)
        out, lse = fa_numba.attention(
            q_at, k_at, v_at, causal=work.causal, return_lse=True, out=out, **ring.options,
            **ring.ahead,
        )  # fmt: skip
        out = out if heads is None else whole
        part = Part((out,), lse, work.rows, ring.layout)
        return (None, part) if queries else (part, None)

    staying, travelling = _around(ring, (q,) if queries else (k, v), step, q, k, queries, agreement)
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
    if ring.mask is not None:
        return masked.backward(ring, dout, q, k, v, out, lse)
    queries = ring.travels == "q"

    def step(held: Sequence[Any], work: Work, heads: Heads | None) -> tuple:
        q_at, dout_at, out_at, lse_at = held if queries else (q, dout, out, lse)
        k_at, v_at = (k, v) if queries else held
        q_at, dout_at, out_at = ring.cut([q_at, dout_at, out_at], work.rows, heads)
        k_at, v_at = ring.cut([k_at, v_at], work.columns, heads)
        lse_at = half_of(lse_at, work.rows, 2)
        dq, dk, dv = fa_numba.attention_backward(
            dout_at, q_at, k_at, v_at, out_at, lse_at if heads is None else heads.among(lse_at, 1),
            causal=work.causal, **ring.options, **ring.backward,
        )  # fmt: skip
        of_q = Part((dq,), None, work.rows, ring.layout)
        of_kv = Part((dk, dv), None, work.columns, ring.layout)
        return (of_kv, of_q) if queries else (of_q, of_kv)

    operands = (q, dout, out, lse) if queries else (k, v)
    staying, travelling = _around(ring, operands, step, q, k, True)
    assert staying is not None and travelling is not None
    of_q, of_kv = (travelling, staying) if queries else (staying, travelling)
    return of_q.tensors[0], *of_kv.tensors


def _around(
    ring: Ring,
    operands: Sequence[Any],
    step: Step,
    q: Any,
    k: Any,
    results_travel: bool,
    agreement: Agreement | None = None,
) -> tuple[Part | None, Part | None]:
    """Every step: the results of what stays here and of this rank's own travelling part.

    The rank's own part is computed by heads: some before it is known that all ranks mean the same,
    so that its GPU does not wait for that, some after; and where results travel some at the end,
    so that there is something left to do while the last are on their way.
    """
    link, dtype = ring.link, k.dtype
    own: Sequence[Any] = [x.contiguous() for x in operands]
    held, mine = own, work_at(link.rank, 0, link.ranks, ring.travels, ring.causal)
    early, now, later = _shares(ring, q, k, mine, agreement is not None, results_travel)

    def of_own(shares: list[Heads | None], found: tuple | None) -> tuple | None:
        for heads in shares:
            more = step(own, mine, heads)
            found = more if found is None else tuple(map(_beside, found, more))
        return found

    begun = of_own(early, None)
    if agreement is not None:
        agreement.wait()
    coming: Exchange | None = None  # what travels, for the next step
    sums: Exchange | None = None  # results of what travels, of the step before
    ours = theirs = others = None
    for n in range(link.ranks):
        if coming is not None:
            held = coming.wait()
        if n < link.ranks - 1:
            coming = link.exchange(held, [_empty(x, x.shape, x.dtype) for x in held])
        if n == 0:
            ours, theirs = of_own(now, begun) or (None, None)
            if ours is not None and not later and link.ranks > 2:
                ours = ours.widened()  # more than one sum is to come
            continue
        stays, goes = step(held, work_at(link.rank, n, link.ranks, ring.travels, ring.causal), None)
        if ours is not None and stays is not None:
            if not later:
                ours = joined(ours, stays)
            else:
                others = _with(others, stays, link.ranks)
        if goes is not None:
            if sums is not None:
                goes = joined(goes.widened(), _arrived(sums, ring, goes, n - 1))
            sums = link.exchange(goes.message, _room(ring, goes, n, dtype).message)
    ours, theirs = of_own(later, (ours, theirs)) or (None, None)
    if ours is not None and others is not None:
        # The own part has all rows: of two parts it takes the other one.
        ours = joined(ours, others) if link.ranks == 2 else joined(others, ours)
    if theirs is not None and sums is not None:
        theirs = joined(theirs, _arrived(sums, ring, theirs, link.ranks - 1))
    return (
        None if ours is None else ours.rounded(dtype),
        None if theirs is None else theirs.rounded(dtype),
    )


def _shares(
    ring: Ring, q: Any, k: Any, work: Work, early: bool, last: bool
) -> list[list[Heads | None]]:
    """The K/V heads of a rank's own part that are computed before it is known that all ranks mean
    the same, after that, and behind the last results; None stands for all heads.

    They follow from the call alone, so that equal calls have equal bits.
    """
    heads = k.shape[3 - ring.axis]
    if ring.link.ranks == 1 or heads == 1:
        return [[], [None], []]
    operations = 4 * q.numel() * k.shape[ring.axis] // (2 if work.causal else 1)
    first = 0
    if early and 0 < operations < LONG * EARLY:
        first = min(-(-heads * EARLY // operations), heads // (3 if last else 2))
    behind = (heads - first + 1) // 2 if last else 0
    ends = itertools.pairwise((0, first, heads - behind, heads))
    found = [(begin, end - begin) for begin, end in ends]
    return [
        [None if count == heads else Heads(begin, count, heads)] if count else []
        for begin, count in found
    ]


def _beside(part: Part | None, more: Part | None) -> Part | None:
    """The heads of both."""
    return part if part is None or more is None else part.beside(more)


def _with(others: Part | None, part: Part, ranks: int) -> Part:
    """The parts of the steps after the first, in float32 where there are several."""
    if ranks == 2:
        return part
    return joined(part.nothing() if others is None else others, part)


def _empty(like: Any, shape: Sequence[int], dtype: Any) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def _room(ring: Ring, like: Part, step: int, dtype: Any) -> Part:
    """Memory for what the rank before sends after ``step``, of a result like this one: in
    ``dtype``, as its kernel left it, after step 1, then a sum in float32.
    """
    link = ring.link
    half = travelled(link.before, step, link.ranks, ring.travels, ring.causal)
    torch = sys.modules["torch"]
    kind = dtype if step == 1 else torch.float32
    tensors = [_empty(x, like.shape_of(x, half, like.axis), kind) for x in like.tensors]
    lse = like.lse
    if lse is not None:
        lse = _empty(lse, like.shape_of(lse, half, 2), lse.dtype)
    return Part(tuple(tensors), lse, half, like.layout)


def _arrived(sums: Exchange, ring: Ring, like: Part, step: int) -> Part:
    """What the rank before has sent after ``step``."""
    came = sums.wait()
    half = travelled(ring.link.before, step, ring.link.ranks, ring.travels, ring.causal)
    lse = None if like.lse is None else came[-1]
    return Part(tuple(came[: len(like.tensors)]), lse, half, like.layout)
