"""Which rows see which columns where the sequence has a window or lengths; nothing knows of torch.

A window is told in positions of the whole sequence: row i sees the columns from i + D - left to
i + D + right, D = columns - rows, the valid ones, as ``attention`` aligns it. Of a chunk of rows
and a chunk of columns, which lie anywhere, those rows that see no column and those columns that no
row sees are cut off. What is left has in its last row the last column: so the window of a call,
which is aligned to that corner, can say it, with sides of 0 or more.

What travels skips the ranks at which no rank computes anything: from stop to stop, then home.
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
    """Batch entries ``begin`` to ``end`` - 1, each of so many valid rows and columns."""

    begin: int
    end: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Mask:
    """Columns that a row sees before and after the diagonal one, None for all; lengths."""

    left: int | None
    right: int | None
    entries: tuple[Entries, ...]


class Piece(NamedTuple):
    """One call: batch entries, rows and columns of the parts at hand, and its own mask."""

    entries: Span
    rows: Span
    columns: Span
    causal: bool
    window: tuple[int, int]


def mask_of(
    window: tuple[int, int], q_lens: Sequence[int] | None, kv_lens: Sequence[int] | None, *,
    causal: bool, batch: int, rows: int, columns: int,
) -> Mask | None:  # fmt: skip
    """The mask of so many rows and columns; None where it hides no more than ``causal``."""
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
    """The rows that see any of the columns, the columns that any row sees, and the mask of a call
    on these two, as its ``causal`` and ``window``; None where there are none.

    Positions are those of the whole sequence.

    >>> visible((8, 16), (0, 8), 0, 3, 0)  # row 8 sees columns 5 to 7, row 10 column 7 alone
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
    further = d - b - diagonal  # the corner's column beyond the diagonal one of its row
    before = -1 if left is None or left >= b - 1 + diagonal - c else left + further
    after = -1 if right is None or right >= d - 1 - a - diagonal else right - further
    if after == 0:
        return (a, b), (c, d), True, (before, -1)
    return (a, b), (c, d), False, (before, after)


@dataclass(frozen=True, eq=False)
class Course:
    """Where what travels stops, who computes what there, and what is on the way.

    ``rows`` and ``columns`` are those of one rank's part; ``travels`` and ``causal`` as for
    ``ring_attention``. Without a ``mask`` it stops at every rank, and travels as a whole.
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
        """The steps at which any rank computes something, and step 0."""
        return _stops(self)

    def pieces(self, owner: int, step: int) -> tuple[Piece, ...]:
        """The calls at ``step`` with what travels of ``owner``, in the order of their rows."""
        return _pieces(self, owner, step)

    def valid(self, rank: int) -> Iterator[tuple[Span, Span]]:
        """The rows of a rank's part that its sequences have, those of some batch entries each."""
        if self.mask is None:
            yield (0, self.batch), (0, self.rows)
            return
        for entries in self.mask.entries:
            for (begin, end), i in _chunks(self, rank, self.rows):
                if begin < entries.rows:
                    yield entries[:2], (begin - i, min(end, entries.rows) - i)

    def operands(self, owner: int, stop: int) -> Span:
        """The rows of what travels of ``owner`` that are on the way to the stop of this number:
        what this and later ones compute with, (0, 0) for nothing.
        """
        if self.mask is None:
            return 0, self.rows if self.travels == "q" else self.columns
        return _around(self._moving(owner, stop, len(self.stops)))

    def results(self, owner: int, stop: int) -> Span:
        """The rows that the results have which leave that stop, of it and those before it."""
        return _around(self._moving(owner, 1, stop + 1))

    def calls(self, owner: int, stop: int) -> int:
        """How many calls have made these results."""
        return sum(1 for _ in self._moving(owner, 1, stop + 1))

    def hop(self, stop: int) -> int:
        """Ranks from the stop of this number to the next one, from the last one home."""
        after = [*self.stops[1:], self.ranks]
        return after[stop] - self.stops[stop]

    def at(self, rank: int, stop: int) -> int:
        """Whose part is at ``rank`` at that stop; at the one past the last its own."""
        return owner_at(rank, [*self.stops, 0][stop], self.ranks)

    def _moving(self, owner: int, begin: int, end: int) -> Iterator[Span]:
        for step in self.stops[begin:end]:
            for piece in self.pieces(owner, step):
                yield piece.rows if self.travels == "q" else piece.columns


course_of = lru_cache(maxsize=64)(Course)


def _around(spans: Iterator[Span]) -> Span:
    """The least span that has all of these."""
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
    """The chunks of the sequence that a rank holds, and how much further there than in its part."""
    held = rows_of(rank, course.ranks, course.ranks * size, course.causal)
    return [(chunk, chunk[0] - n * (chunk[1] - chunk[0])) for n, chunk in enumerate(held)]
