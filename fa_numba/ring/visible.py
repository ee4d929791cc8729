"""Which rows see which columns if the sequence has a window or lengths. torch is not used here.

The window is given in positions of the complete sequence. Row i sees the columns from i + D - left
to i + D + right. D is the number of valid columns minus the number of valid rows. ``attention``
aligns windows in the same way.

A call of attention computes a chunk of rows with a chunk of columns, at any positions in the
sequence. Rows that see no column of the chunk are left out of the call. Columns that no row of the
chunk sees are left out too. The last row of the call then sees the last column of the call. This
fits the function ``attention``, which aligns a window to the last row and the last column. A window
with two sides of 0 or more therefore describes the mask of the call.

A step is skipped if no rank computes anything in it. The remaining steps are called stops. The
travelling operands go from one stop to the next stop. Results for the travelling operands follow
the operands from stop to stop. After the last stop, the results are sent to the owner of the
operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fa_numba.ring.schedule import owner_at, rows_of, span, work

Span = tuple[int, int]  # begin and end


class Entries(NamedTuple):
    """Batch entries ``begin`` to ``end - 1``, with equal numbers of valid rows and columns."""

    begin: int
    end: int
    rows: int  # number of valid rows of the complete sequence
    columns: int  # number of valid columns of the complete sequence


@dataclass(frozen=True)
class Mask:
    """The window and the valid lengths of the complete sequence.

    Row i has the diagonal column i + D, where D is the number of valid columns minus the number of
    valid rows.

    Attributes
    ----------
    left : int or None
        Number of columns that a row sees before its diagonal column. None means all columns.
    right : int or None
        Number of columns that a row sees after its diagonal column. None means all columns.
    entries : tuple of Entries
        Numbers of valid rows and columns of the batch entries.
    """

    left: int | None
    right: int | None
    entries: tuple[Entries, ...]


class Piece(NamedTuple):
    """One call of attention on a rank.

    Attributes
    ----------
    entries : tuple of int
        (begin, end) of the batch entries.
    rows : tuple of int
        (begin, end) of the rows, counted from the start of the rank's part of Q.
    columns : tuple of int
        (begin, end) of the columns, counted from the start of the rank's part of K and V.
    causal : bool
        Option ``causal`` of the call.
    window : tuple of int
        Option ``window`` of the call.
    """

    entries: Span
    rows: Span
    columns: Span
    causal: bool
    window: tuple[int, int]


def mask_of(
    window: tuple[int, int], q_lens: Sequence[int] | None, kv_lens: Sequence[int] | None, *,
    causal: bool, batch: int, rows: int, columns: int,
) -> Mask | None:  # fmt: skip
    """Return the mask of a sequence with ``rows`` rows and ``columns`` columns.

    Return None if ``causal`` alone describes the mask: the window hides nothing else, and all rows
    and columns are valid.
    """
    left, right = (None if side < 0 else side for side in window)
    every = zip(q_lens or batch * [rows], kv_lens or batch * [columns], strict=True)
    found: list[Entries] = []
    for n, (valid_rows, valid_columns) in enumerate(every):
        if found and found[-1][2:] == (valid_rows, valid_columns):
            found[-1] = found[-1]._replace(end=n + 1)
        else:
            found.append(Entries(n, n + 1, valid_rows, valid_columns))
    right = 0 if causal else right
    if left is None and (causal or right is None) and found == [Entries(0, batch, rows, columns)]:
        return None
    return Mask(left, right, tuple(found))


def visible(
    rows: Span, columns: Span, diagonal: int, left: int | None, right: int | None
) -> tuple[Span, Span, bool, tuple[int, int]] | None:
    """Return which rows of a chunk see which columns of a chunk, or None if no row sees any.

    ``rows`` and ``columns`` are the two chunks, as positions (begin, end) in the complete sequence.
    Row i sees the columns from i + ``diagonal`` - ``left`` to i + ``diagonal`` + ``right``. None
    means no limit on this side.

    The result is (rows, columns, causal, window): the rows that see any of the columns, the columns
    that any row sees, and the options of a call of attention on them. Positions are again those of
    the complete sequence.

    >>> visible((8, 16), (0, 8), 0, 3, 0)  # row 8 sees columns 5 to 7, row 10 sees column 7
    ((8, 11), (5, 8), False, (0, -1))
    >>> visible((8, 16), (0, 8), 0, None, 0)
    ((8, 16), (0, 8), False, (-1, -1))
    """
    (a, b), (c, d) = rows, columns
    if left is not None:
        b, c = min(b, d - diagonal + left), max(c, a + diagonal - left)
    if right is not None:
        a, d = max(a, c - diagonal - right), min(d, b + diagonal + right)
    if a >= b or c >= d:
        return None
    further = d - b - diagonal  # columns from the last row's diagonal column to the last column
    before = -1 if left is None or left >= b - 1 + diagonal - c else left + further
    after = -1 if right is None or right >= d - 1 - a - diagonal else right - further
    if after == 0:
        return (a, b), (c, d), True, (before, -1)
    return (a, b), (c, d), False, (before, after)


@dataclass(frozen=True, eq=False)
class Course:
    """The way of K and V, or of Q, round the ring: the stops, and the rows that are sent.

    The operands that are sent round the ring are called the travelling operands. Each rank owns a
    part of them. A part is sent from rank to rank. A step in which at least one rank computes is
    called a stop. Step 0 is always a stop. Without a ``mask``, every step is a stop, and all rows
    are sent. With a ``mask``, steps without work are skipped, and only the needed rows are sent.

    Attributes
    ----------
    mask : Mask or None
        Window or lengths of the complete sequence.
    ranks : int
        Number of ranks.
    batch : int
        Number of batch entries.
    rows : int
        Number of rows of one rank's part.
    columns : int
        Number of columns of one rank's part.
    causal : bool
        Whether the sequence has a causal mask.
    travels : {"kv", "q"}
        Operands that are sent.
    """

    mask: Mask | None
    ranks: int
    batch: int
    rows: int
    columns: int
    causal: bool
    travels: str

    @property
    def stops(self) -> tuple[int, ...]:
        """Numbers of the steps that are stops: 0, and each step in which any rank computes."""
        return _stops(self)

    def pieces(self, owner: int, step: int) -> tuple[Piece, ...]:
        """Return the calls of attention that use one rank's travelling operands in one step.

        The travelling operands of the rank ``owner`` are its rows of K and V, or its rows of Q. In
        the step number ``step``, they are on the rank ``(owner + step) % ranks``. That rank makes
        the returned calls. The result is empty if the mask hides everything.
        """
        return _pieces(self, owner, step)

    def valid(self, rank: int) -> Iterator[tuple[Span, Span]]:
        """Yield pairs (batch entries, valid rows) of a rank's part of Q.

        Both are spans (begin, end). Rows are counted from the start of the rank's part.
        """
        if self.mask is None:
            yield (0, self.batch), (0, self.rows)
            return
        for entries in self.mask.entries:
            for (begin, end), i in _chunks(self, rank, self.rows):
                if begin < entries.rows:
                    yield entries[:2], (begin - i, min(end, entries.rows) - i)

    def operands(self, owner: int, stop: int) -> Span:
        """Return the rows (begin, end) of the travelling part of ``owner`` that are sent to a stop.

        These are the rows that the stop ``stop`` or a later stop needs. Rows are counted from the
        start of the part. (0, 0) means no rows.
        """
        if self.mask is None:
            return 0, self.rows if self.travels == "q" else self.columns
        return _enclosing(self._moving(owner, stop, len(self.stops)))

    def results(self, owner: int, stop: int) -> Span:
        """Return the rows (begin, end) of the results that a rank sends after a stop.

        The results are for the travelling part of ``owner``. They are sums over the stops 1 to
        ``stop``. The results of stop 0 are not sent, because they are already on the owner. Rows
        are counted from the start of the part. (0, 0) means that nothing is sent.
        """
        return _enclosing(self._moving(owner, 1, stop + 1))

    def calls(self, owner: int, stop: int) -> int:
        """Return how many calls of attention contribute to the results that are sent after a stop.

        These are the calls of the stops 1 to ``stop`` with the travelling part of ``owner``.
        """
        return sum(1 for _ in self._moving(owner, 1, stop + 1))

    def hop(self, stop: int) -> int:
        """Return the distance in ranks from a stop to the next stop.

        For the last stop, return the distance to the owner.
        """
        after = [*self.stops[1:], self.ranks]
        return after[stop] - self.stops[stop]

    def at(self, rank: int, stop: int) -> int:
        """Return the owner of the travelling part that is at ``rank`` at a stop.

        ``stop`` is the number of the stop, from 0. The number after the last stop is allowed too:
        the results for each part are then back at its owner, and ``rank`` is returned.
        """
        return owner_at(rank, [*self.stops, 0][stop], self.ranks)

    def _moving(self, owner: int, begin: int, end: int) -> Iterator[Span]:
        for step in self.stops[begin:end]:
            for piece in self.pieces(owner, step):
                yield piece.rows if self.travels == "q" else piece.columns


course_of = lru_cache(maxsize=64)(Course)


def _enclosing(spans: Iterator[Span]) -> Span:
    """Return the smallest span that contains all ``spans``, or (0, 0) if there are none."""
    found = list(spans)
    return min((b for b, _ in found), default=0), max((e for _, e in found), default=0)


@lru_cache(maxsize=64)
def _stops(course: Course) -> tuple[int, ...]:
    ranks = range(course.ranks)
    return (0, *(s for s in ranks[1:] if any(course.pieces(owner, s) for owner in ranks)))


@lru_cache(maxsize=4096)
def _pieces(course: Course, owner: int, step: int) -> tuple[Piece, ...]:
    other = (owner + step) % course.ranks
    q_rank, k_rank = (owner, other) if course.travels == "q" else (other, owner)
    found, mask = [], course.mask
    if mask is None:
        halves = work(q_rank, k_rank, course.causal)
        spans = span(halves.rows, course.rows), span(halves.columns, course.columns)
        return (Piece((0, course.batch), *spans, halves.causal, (-1, -1)),)
    for entries in mask.entries:
        diagonal = entries.columns - entries.rows
        for (rows, i), (columns, j) in itertools.product(
            _chunks(course, q_rank, course.rows), _chunks(course, k_rank, course.columns)
        ):
            rows = rows[0], min(rows[1], entries.rows)
            columns = columns[0], min(columns[1], entries.columns)
            seen = visible(rows, columns, diagonal, mask.left, mask.right)
            if seen is not None:
                (a, b), (c, d), causal, window = seen
                own = (a - i, b - i), (c - j, d - j)
                found.append(Piece(entries[:2], *own, causal, window))
    return tuple(found)


def _chunks(course: Course, rank: int, size: int) -> list[tuple[Span, int]]:
    """Return the chunks of the sequence that a rank has, as pairs (chunk, offset).

    A chunk is (begin, end) in the complete sequence. The offset is the position of a row in the
    complete sequence minus its position in the rank's part. ``size`` is the number of rows of the
    rank's part.
    """
    held = rows_of(rank, course.ranks, course.ranks * size, course.causal)
    return [(chunk, chunk[0] - n * (chunk[1] - chunk[0])) for n, chunk in enumerate(held)]
