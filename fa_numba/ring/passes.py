"""The forward and the backward pass of a rank.

The travelling operands stop at ranks that compute something with them (``visible.Course``). At a
stop, a rank computes two results: one for the operands that stay, and one for the travelling
operands.

- Results for the operands that stay are summed on their rank.
- Results for the travelling operands are summed in a message. The first stop after the owner starts
  the message. Each later stop receives the message, adds a result to it, and sends it to the next
  stop. The last stop sends it back to the owner. The owner keeps the result of its own part, and
  adds the message to it at the end.

With travels="kv", O and dQ stay, and dK and dV are sent. With travels="q", O and dQ are sent, and
dK and dV stay.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import fa_numba
from fa_numba.ring.agreement import Agreement
from fa_numba.ring.link import Exchange, Link
from fa_numba.ring.parts import Kind, Part, Sum, cut, with_rows
from fa_numba.ring.visible import Course, Mask, Piece, Span, course_of

T = TypeVar("T")

# A GPU computes EARLY multiplications and additions in about the time that the ranks need to agree.
# A part with more than LONG times this number gains nothing from an early start.
EARLY, LONG = 2**38, 16


@dataclass(frozen=True)
class Heads:
    """The K/V heads ``first`` to ``first + count - 1``, and the query heads that read them.

    ``of`` is the number of all K/V heads.
    """

    first: int
    count: int
    of: int

    def among(self, x: Any, axis: int) -> Any:
        """Return a view of these heads of a tensor.

        ``axis`` is the axis of the heads, which are K/V heads or query heads.
        """
        group = x.shape[axis] // self.of
        return x.narrow(axis, self.first * group, self.count * group)


# A function that computes a piece. Its arguments are the piece, the K/V heads (None for all), q
# with the other tensors of the piece's rows, and (k, v) of the piece's columns. It returns the
# results for the rows and for the columns.
Call = Callable[[Piece, Heads | None, Sequence[Any], Sequence[Any]], tuple[Part, Part]]


@dataclass(frozen=True)
class Ring:
    """A call of ``ring_attention`` on this rank.

    Attributes
    ----------
    link : Link
        The ring of the process group.
    travels : {"kv", "q"}
        Operands that are sent round the ring.
    causal : bool
        Whether the sequence has a causal mask.
    layout : {"bhnd", "bnhd"}
        Order of the axes of q, k and v.
    options : dict
        Options of the call of every step.
    ahead : dict
        Options of the forward steps only.
    backward : dict
        Options of the backward steps only.
    mask : Mask or None
        Window or lengths of the complete sequence.
    dlse : bool
        Whether a gradient of L is sent with the rows that travel in the backward pass.
    """

    link: Link
    travels: str
    causal: bool
    layout: str
    options: dict[str, Any]
    ahead: dict[str, Any]
    backward: dict[str, Any]
    mask: Mask | None = None
    dlse: bool = False

    @property
    def axis(self) -> int:
        """Axis of the rows in q, k and v."""
        return 1 if self.layout == "bnhd" else 2

    def course(self, q: Any, k: Any) -> Course:
        """Return the stops of the operands that are sent, in a call with these q and k."""
        rows, columns = (x.shape[self.axis] for x in (q, k))
        return course_of(
            self.mask, self.link.ranks, q.shape[0], rows, columns, self.causal, self.travels
        )

    def turned(self, of_rows: T, of_columns: T) -> tuple[T, T]:
        """Swap two values if K and V travel. Return the two values unchanged if Q travels.

        The first value belongs to rows of Q, and the second value to columns (rows of K and V). In
        the result, the first value belongs to the operands that travel, and the second value to the
        operands that stay. A second call with the result restores the original order.
        """
        return (of_rows, of_columns) if self.travels == "q" else (of_columns, of_rows)

    def rows(
        self,
        x: Any,
        rows: Span,
        begin: int,
        entries: Span | None = None,
        heads: Heads | None = None,
    ) -> Any:
        """Return a view of the rows ``rows`` of an operand.

        ``begin`` is the number of the operand's first row. ``entries`` are the batch entries, and
        ``heads`` the heads. None means all of them.
        """
        x = cut(x, (0, x.shape[0]) if entries is None else entries, rows, begin, self._axis(x))
        return x if heads is None else heads.among(x, 3 - self._axis(x))

    def new_tensor(self, like: Any, span: Span, columns: int | None = None) -> Any:
        """Return an uninitialised tensor for the rows ``span`` of an operand.

        The other axes, the dtype and the device are those of ``like``. ``columns``, if given, is
        the length of the last axis.
        """
        shape = with_rows(like, self._axis(like), span[1] - span[0], columns)
        return sys.modules["torch"].empty(shape, dtype=like.dtype, device=like.device)

    def _axis(self, x: Any) -> int:
        """Return the axis of the rows in an operand: the last axis for L, (batch, heads, rows)."""
        return self.axis if len(x.shape) == 4 else 2


def forward(
    ring: Ring, q: Any, k: Any, v: Any, sinks: Any = None, agreement: Agreement | None = None
) -> tuple[Any, Any]:
    """Return (O, L) of this rank's rows.

    The function waits for ``agreement`` before anything is sent: all ranks must have passed equal
    arguments. ``sinks`` contains a logit for each head. The softmax sum of each row starts with
    exp(sink), and O starts with 0. The results of all steps are then merged into these values.
    """
    # ``whole`` is O of all heads, if a call computes only some heads.
    whole, columns = None, v.shape[-1]

    def call(piece: Piece, heads: Heads | None, of_q: Sequence, of_kv: Sequence) -> tuple:
        nonlocal whole
        (q_at,), (k_at, v_at) = of_q, of_kv
        out = None
        if heads is not None:
            rows = 0, q.shape[ring.axis]
            whole = ring.new_tensor(q, rows, columns) if whole is None else whole
            out = heads.among(whole, 3 - ring.axis)
        out, lse = fa_numba.attention(
            q_at, k_at, v_at, causal=piece.causal, window=piece.window, return_lse=True, out=out,
            **ring.options, **ring.ahead,
        )  # fmt: skip
        return Part([out if heads is None else whole], lse), Part()

    kinds = Kind(ring.layout, (q,), lse=True, columns=columns), Kind(ring.layout, ())
    first = None
    if sinks is not None:
        first = kinds[0].part((0, q.shape[ring.axis]), wide=True)
        for entries, rows in ring.course(q, k).valid(ring.link.rank):
            cut(first.lse, entries, rows, 0, 2).copy_(sinks.reshape(1, -1, 1))
    found, _ = _around(ring, (q,), (k, v), call, kinds, agreement, first)
    return found.tensors[0], found.lse


def backward(
    ring: Ring, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None,
    sinks: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return (dQ, dK, dV) for this rank's rows and columns.

    With ``sinks``, return also the part of the gradient of the sinks that comes from this rank's
    rows. ``out`` and ``lse`` are O and L of the forward pass over the complete sequence, not over
    this rank's columns alone. The gradients from different parts of the columns can therefore be
    added.
    """

    def call(piece: Piece, heads: Heads | None, of_q: Sequence, of_kv: Sequence) -> tuple:
        (q_at, dout_at, out_at, lse_at, *of_lse), (k_at, v_at) = of_q, of_kv
        dq, dk, dv = fa_numba.attention_backward(
            dout_at, q_at, k_at, v_at, out_at, lse_at, dlse=of_lse[0] if of_lse else None,
            causal=piece.causal, window=piece.window, **ring.options, **ring.backward,
        )  # fmt: skip
        return Part([dq]), Part([dk, dv])

    kinds = Kind(ring.layout, (q,)), Kind(ring.layout, (k, v))
    of_q = (q, dout, out, lse) if dlse is None else (q, dout, out, lse, dlse)
    of_rows, of_columns = _around(ring, of_q, (k, v), call, kinds)
    found = of_rows.tensors[0], *of_columns.tensors
    if sinks is None:
        return found
    # dsinks needs only L and D of all rows, so a call over one column is enough.
    one_k, one_v = (x.narrow(ring.axis, 0, 1) for x in (k, v))
    *_, dsinks = fa_numba.attention_backward(
        dout, q, one_k, one_v, out, lse, dlse=dlse, sinks=sinks, return_dsinks=True,
        **ring.options, **ring.backward,
    )  # fmt: skip
    return *found, dsinks


def _around(
    ring: Ring, of_q: Sequence[Any], of_kv: Sequence[Any], call: Call, kinds: tuple[Kind, Kind],
    agreement: Agreement | None = None, first: Part | None = None,
) -> tuple[Part, Part]:  # fmt: skip
    """Run all stops of a pass on this rank, and return the results for the rank's rows and columns.

    Each result is a sum over all stops. ``of_q`` are q and other tensors with the same rows, and
    ``of_kv`` are k and v. ``call`` is a function that makes one call of attention. ``kinds`` are
    the shapes and dtypes of the results for rows and for columns. ``first``, if given, is the first
    summand for the rows, and the sum is then in float32.

    Without a mask, the attention of the rank's own rows and columns is computed in up to three
    groups of heads. The first group is computed before the ranks have compared their arguments, so
    that the GPU does not wait for the comparison. The last group is computed at the end, while the
    last results are being sent. If no results are sent, there is no last group.
    """
    link, turned, course = ring.link, ring.turned, ring.course(of_q[0], of_kv[0])
    last, rank = len(course.stops) - 1, link.rank
    travelling, staying = turned(of_q, of_kv)
    follows, remains = turned(*kinds)
    moving_rows, still_rows = turned(course.rows, course.columns)
    pieces = [course.pieces(course.at(rank, n), step) for n, step in enumerate(course.stops)]
    come_home = course.results(rank, last)
    several = first is not None
    ours = Sum(remains, (0, still_rows), several or sum(map(len, pieces)) > 2)
    theirs = Sum(follows, (0, moving_rows), several or len(pieces[0]) + any(come_home) > 2)
    if first is not None:
        of_rows, _ = turned(theirs, ours)
        of_rows.take(first, of_rows.span)
    early, now, later = _shares(ring, of_q[0], of_kv[0], agreement is not None, bool(follows.like))
    own: dict[Piece, tuple[Part, Part]] = {}

    def computed(
        piece: Piece, held: Sequence[Any], begin: int, heads: Heads | None = None
    ) -> tuple[Part, Part]:
        """Compute one call of attention, and return two results.

        The first result is for the operands that are sent round the ring. If K and V are sent, it
        contains dK and dV in the backward pass, and nothing in the forward pass. The second result
        is for the operands that stay on this rank: dQ, or O and L. If Q is sent, the two results
        contain the same arrays in the other order.

        ``piece`` contains the rows, the columns and the mask of the call. ``held`` are the sent
        operands that are now on this rank, and ``begin`` is the number of their first row.
        ``heads`` are the K/V heads to compute. None means all K/V heads.
        """
        moving, still = turned(piece.rows, piece.columns)
        there = [ring.rows(x, moving, begin, piece.entries, heads) for x in held]
        here = [ring.rows(x, still, 0, piece.entries, heads) for x in staying]
        return turned(*call(piece, heads, *turned(there, here)))

    def compute_own(shares: list[Heads | None], done: bool) -> None:
        """Compute the attention of this rank's own rows and columns, for some groups of heads.

        ``shares`` are the groups of heads. ``done`` says whether these are the last groups. If
        ``done`` is set, the results of all groups are added to the sums.
        """
        for piece in pieces[0]:
            for heads in shares:
                more = computed(piece, travelling, 0, heads)
                before = own.pop(piece, None)
                if before is not None:
                    axis = 3 - ring.axis
                    more = before[0].beside(more[0], axis), before[1].beside(more[1], axis)
                own[piece] = more
            if done:
                moving, still = turned(piece.rows, piece.columns)
                of_moving, of_still = own.pop(piece)
                theirs.take(of_moving, moving, piece.entries)
                ours.take(of_still, still, piece.entries)

    compute_own(early, False)
    if agreement is not None:
        agreement.wait()
    held, begin = travelling, 0  # the travelling operands on this rank, and their first row
    coming: Exchange | None = None  # the travelling operands of the next stop
    sums: Exchange | None = None  # results of the travelling operands from the stop before
    behind: list[tuple[Part, Span, Span]] = []  # results that are added after the own part
    for n in range(last + 1):
        owner, arrives = course.at(rank, n), course.at(rank, n + 1)
        if coming is not None:
            held, begin = coming.wait(), course.operands(owner, n)[0]
        if n < last:
            goes, comes = course.operands(owner, n + 1), course.operands(arrives, n + 1)
            coming = link.exchange(
                [ring.rows(x, goes, begin).contiguous() for x in held] if any(goes) else [],
                [ring.new_tensor(x, comes) for x in travelling] if any(comes) else [],
                course.hop(n),
            )
        if n == 0:
            compute_own(now, not later)
            continue
        goes, comes = course.results(owner, n), course.results(arrives, n)
        into = Sum(follows, goes, course.calls(owner, n) > 1)
        for piece in pieces[n]:
            moving, still = turned(piece.rows, piece.columns)
            of_moving, of_still = computed(piece, held, begin)
            into.take(of_moving, moving, piece.entries)
            if last == 1:
                behind.append((of_still, still, piece.entries))
            else:
                ours.take(of_still, still, piece.entries)
        if sums is not None:
            _take(into, sums, course.results(owner, n - 1))
        sums = link.exchange(
            into.whole().message if any(goes) else [],
            follows.part(comes, course.calls(arrives, n) > 1, empty=True).message
            if any(comes)
            else [],
            course.hop(n),
        )
    if later:
        compute_own(later, True)
    for each in behind:  # after the own part, which has all rows
        ours.take(*each)
    if sums is not None:
        _take(theirs, sums, come_home)
    return turned(theirs.rounded(), ours.rounded())


def _take(into: Sum, sums: Exchange, rows: Span) -> None:
    """Wait for results of these rows from the previous stop, and add them to ``into``."""
    came = sums.wait()
    if came:
        into.take(Part(came[:-1], came[-1]) if into.kind.lse else Part(came), rows)


def _shares(ring: Ring, q: Any, k: Any, early: bool, last: bool) -> list[list[Heads | None]]:
    """Divide the K/V heads of a call into three groups, by the time at which they are computed.

    This is for the attention of a rank's own rows and own columns. The result has one list for each
    group. A list contains the ``Heads`` of the group, or None if the group contains all heads. It
    is empty if the group contains no heads.

    | list | computed |
    |---|---|
    | first | before the ranks have compared their arguments; empty unless ``early`` |
    | second | after the comparison |
    | third | at the end of the call, while results are being sent; empty unless ``last`` |

    The groups depend only on the call, so equal calls give equal bits.
    """
    heads = k.shape[3 - ring.axis]
    if ring.link.ranks == 1 or heads == 1 or ring.mask is not None:
        return [[], [None], []]
    operations = 4 * q.numel() * k.shape[ring.axis] // (2 if ring.causal else 1)
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
