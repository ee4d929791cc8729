"""The forward and the backward pass of a rank where the sequence has a window or lengths.

As in ``passes``, but that what travels stops where somebody sees it and goes home from the last
stop; of it only those rows travel that are seen there or later, and of its results those that there
are. A step is a call for each pair of chunks that see each other, without one where none do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import fa_numba
from fa_numba.host import merging
from fa_numba.ring.agreement import Agreement
from fa_numba.ring.link import Exchange
from fa_numba.ring.visible import Piece, Span, course_of

if TYPE_CHECKING:
    from fa_numba.ring.passes import Ring

T = TypeVar("T")


class Found(NamedTuple):
    """Gradients, or O with its L; no tensors where a pass has nothing of a kind."""

    tensors: Sequence[Any] = ()
    lse: Any = None

    @property
    def message(self) -> list[Any]:
        """What is sent of it."""
        return [*self.tensors] if self.lse is None else [*self.tensors, self.lse]


# What a call finds of its rows and of its columns, given q and what goes with it, k and v.
Call = Callable[[Piece, Sequence[Any], Sequence[Any]], tuple[Found, Found]]


class Kind:
    """Results with tensors like these of a rank's part, and with L or without."""

    def __init__(self, ring: Ring, like: Sequence[Any], lse: bool = False):
        self.axis, self.layout = ring.axis, ring.layout
        self.like, self.lse = like, lse

    def dtype(self, calls: int) -> Any:
        """That of the sum of so many calls."""
        return self.like[0].dtype if self.like and calls == 1 else sys.modules["torch"].float32

    def nothing(self, span: Span, calls: int) -> Found:
        """Results of rows that see nothing: 0 and, of L, -inf."""
        torch = sys.modules["torch"]
        rows, at, dtype = span[1] - span[0], self.axis, self.dtype(calls)
        tensors = [
            torch.zeros((*x.shape[:at], rows, *x.shape[at + 1 :]), dtype=dtype, device=x.device)
            for x in self.like
        ]
        if not self.lse:
            return Found(tensors)
        x, empty = self.like[0], -float("inf")
        shape = x.shape[0], x.shape[3 - at], rows
        return Found(tensors, torch.full(shape, empty, dtype=torch.float32, device=x.device))


class Sum:
    """Results of the rows ``span``, the sum of so many calls, which are added in one order.

    In float32, or as its kernel left it where there is one call's alone.
    """

    def __init__(self, kind: Kind, span: Span, calls: int):
        self.kind, self.span, self.calls = kind, span, calls
        self.found: Found | None = None

    def take(self, more: Found, rows: Span, entries: Span | None = None) -> None:
        """Add results of these rows and batch entries, None for all; their memory may be kept."""
        kind, begin = self.kind, self.span[0]
        if not kind.like or rows[0] == rows[1]:
            return
        every = 0, kind.like[0].shape[0]
        entries = every if entries is None else entries
        if self.found is None and (entries, rows) == (every, self.span):
            dtype = kind.dtype(self.calls)
            self.found = more._replace(tensors=[x.to(dtype) for x in more.tensors])
            return
        self.found = into = self.whole()
        mine = [cut(x, entries, rows, begin, kind.axis) for x in into.tensors]
        if not kind.lse:
            for x, y in zip(mine, more.tensors, strict=True):
                merging.add(x, y, kind.layout)
            return
        lse = cut(into.lse, entries, rows, begin, 2)
        # The kernel's threads of a row all read its L: the old one is elsewhere.
        merging.merge(mine[0], lse.clone(), more.tensors[0], more.lse, lse, kind.layout)

    def whole(self) -> Found:
        """What was added so far."""
        return self.kind.nothing(self.span, self.calls) if self.found is None else self.found

    def rounded(self) -> Found:
        """The same in the dtype of the rank's part."""
        found, dtype = self.whole(), self.kind.dtype(1)
        return found._replace(tensors=[x.to(dtype) for x in found.tensors])


def forward(ring: Ring, q: Any, k: Any, v: Any, agreement: Agreement | None) -> tuple[Any, Any]:
    """(O, L) of this rank's rows; nothing runs before ``agreement`` has answered."""
    if agreement is not None:
        agreement.wait()

    def call(piece: Piece, of_q: Sequence[Any], of_kv: Sequence[Any]) -> tuple[Found, Found]:
        (q_at,), (k_at, v_at) = of_q, of_kv
        out, lse = fa_numba.attention(
            q_at, k_at, v_at, causal=piece.causal, window=piece.window, return_lse=True,
            **ring.options, **ring.ahead,
        )  # fmt: skip
        return Found([out], lse), Found()

    of_rows, of_columns = Kind(ring, (q,), lse=True), Kind(ring, ())
    found, _ = _around(ring, (q,), (k, v), call, of_rows, of_columns)
    return found.tensors[0], found.lse


def backward(
    ring: Ring, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any
) -> tuple[Any, Any, Any]:
    """(dQ, dK, dV) of this rank's rows and columns."""

    def call(piece: Piece, of_q: Sequence[Any], of_kv: Sequence[Any]) -> tuple[Found, Found]:
        (q_at, dout_at, out_at, lse_at), (k_at, v_at) = of_q, of_kv
        dq, dk, dv = fa_numba.attention_backward(
            dout_at, q_at, k_at, v_at, out_at, lse_at, causal=piece.causal, window=piece.window,
            **ring.options, **ring.backward,
        )  # fmt: skip
        return Found([dq]), Found([dk, dv])

    kinds = Kind(ring, (q,)), Kind(ring, (k, v))
    of_rows, of_columns = _around(ring, (q, dout, out, lse), (k, v), call, *kinds)
    return of_rows.tensors[0], *of_columns.tensors


def _around(
    ring: Ring,
    of_q: Sequence[Any],
    of_kv: Sequence[Any],
    call: Call,
    of_rows: Kind,
    of_columns: Kind,
) -> tuple[Found, Found]:
    """What all stops find of this rank's rows and of its columns."""
    link, (rows, columns) = ring.link, (x[0].shape[ring.axis] for x in (of_q, of_kv))
    assert ring.mask is not None
    course = course_of(ring.mask, link.ranks, rows, columns, ring.causal, ring.travels)
    last = len(course.stops) - 1

    def turned(of_rows: T, of_columns: T) -> tuple[T, T]:
        """Of what travels and of what stays; back again as well."""
        return (of_rows, of_columns) if ring.travels == "q" else (of_columns, of_rows)

    travelling, staying = turned(of_q, of_kv)
    follows, remains = turned(of_rows, of_columns)
    pieces = [course.pieces(course.at(link.rank, n), step) for n, step in enumerate(course.stops)]
    travels, stays = turned(rows, columns)
    ours = Sum(remains, (0, stays), sum(map(len, pieces)))
    theirs = Sum(follows, (0, travels), len(pieces[0]) + course.calls(link.rank, last))

    held, begin = travelling, 0  # what travels as it is here, and its first row
    coming: Exchange | None = None  # the same for the next stop
    sums: Exchange | None = None  # results of what travels, of the stop before
    for n in range(last + 1):
        owner, arrives = course.at(link.rank, n), course.at(link.rank, n + 1)
        if coming is not None:
            held, begin = coming.wait(), course.operands(owner, n)[0]
        if n < last:
            goes, comes = course.operands(owner, n + 1), course.operands(arrives, n + 1)
            coming = link.exchange(
                [_rows(ring, x, goes, begin).contiguous() for x in held] if any(goes) else [],
                [_room(ring, x, comes) for x in travelling] if any(comes) else [],
                course.hop(n),
            )
        into = theirs
        if n:  # the owner's own part waits at home
            into = Sum(follows, course.results(owner, n), course.calls(owner, n))
        for piece in pieces[n]:
            moving, still = turned(piece.rows, piece.columns)
            there = [_rows(ring, x, moving, begin, piece.entries) for x in held]
            here = [_rows(ring, x, still, 0, piece.entries) for x in staying]
            of_moving, of_still = turned(*call(piece, *turned(there, here)))
            into.take(of_moving, moving, piece.entries)
            ours.take(of_still, still, piece.entries)
        if sums is not None:
            _take(into, sums, course.results(owner, n - 1))
        if n:
            comes = course.results(arrives, n)
            sums = link.exchange(
                into.whole().message if any(into.span) else [],
                follows.nothing(comes, course.calls(arrives, n)).message if any(comes) else [],
                course.hop(n),
            )
    if sums is not None:
        _take(theirs, sums, course.results(link.rank, last))
    return turned(theirs.rounded(), ours.rounded())


def cut(x: Any, entries: Span, rows: Span, begin: int, axis: int) -> Any:
    """A view of these batch entries and rows of a tensor whose first row is ``begin``."""
    some = x.narrow(0, entries[0], entries[1] - entries[0])
    return some.narrow(axis, rows[0] - begin, rows[1] - rows[0])


def _axis(ring: Ring, x: Any) -> int:
    """That of the rows in an operand: L has them last."""
    return ring.axis if len(x.shape) == 4 else 2


def _rows(ring: Ring, x: Any, rows: Span, begin: int, entries: Span | None = None) -> Any:
    return cut(x, (0, x.shape[0]) if entries is None else entries, rows, begin, _axis(ring, x))


def _room(ring: Ring, like: Any, rows: Span) -> Any:
    """Memory for so many rows of an operand."""
    torch, at = sys.modules["torch"], _axis(ring, like)
    shape = (*like.shape[:at], rows[1] - rows[0], *like.shape[at + 1 :])
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _take(into: Sum, sums: Exchange, rows: Span) -> None:
    """Wait for the results that a rank before has sent, of these rows, and add them."""
    came = sums.wait()
    if came:
        found = Found(came[:-1], came[-1]) if into.kind.lse else Found(came)
        into.take(found, rows)
