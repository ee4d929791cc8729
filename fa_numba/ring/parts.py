"""Results of part of the columns, or rows, and how several of them become one.

A part as a kernel leaves it is in q's dtype, rounded once; a sum of several is in float32, until
the last one has come: then it is rounded to q's dtype. So a result is off by one rounding for each
part, of that part's weight, and by one of its own. Where only two parts meet, as between two ranks,
the second is added to the first in its own dtype, which rounds as often.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from fa_numba.host import merging
from fa_numba.ring.visible import Span


class Part(NamedTuple):
    """Gradients, or O with its L; no tensors where a pass has nothing of a kind."""

    tensors: Sequence[Any] = ()
    lse: Any = None

    @property
    def message(self) -> list[Any]:
        """What is sent of it."""
        return [*self.tensors] if self.lse is None else [*self.tensors, self.lse]

    def beside(self, other: Part, axis: int) -> Part:
        """These heads and then those of ``other``, of the same rows, along ``axis`` of the tensors;
        tensors that both have were made for the heads of both.
        """
        cat = sys.modules["torch"].cat
        pairs = zip(self.tensors, other.tensors, strict=True)
        tensors = [x if x is y else cat([x, y], axis) for x, y in pairs]
        return Part(tensors, None if self.lse is None else cat([self.lse, other.lse], 1))


class Kind:
    """Parts with tensors like these of a rank, with rows along ``axis``, and with L or without; of
    so many ``columns`` if given.

    ``layout`` is that of q: 3 - ``axis`` is the axis of heads, and L is (batch, heads, rows).
    """

    def __init__(
        self, layout: str, like: Sequence[Any], lse: bool = False, columns: int | None = None
    ):
        self.axis, self.layout = 1 if layout == "bnhd" else 2, layout
        self.like, self.lse, self.columns = like, lse, columns

    def dtype(self, wide: bool) -> Any:
        """float32 for sums, q's for what a kernel leaves."""
        return sys.modules["torch"].float32 if wide else self.like[0].dtype

    def part(self, span: Span, wide: bool, empty: bool = False) -> Part:
        """A part of rows that see nothing: 0 and, of L, -inf; or if ``empty`` memory for one."""
        if not self.like:
            return Part()
        torch, (begin, end), x = sys.modules["torch"], span, self.like[0]
        tensors = [
            (torch.empty if empty else torch.zeros)(
                with_rows(x, self.axis, end - begin, self.columns),
                dtype=self.dtype(wide),
                device=x.device,
            )
            for x in self.like
        ]
        if not self.lse:
            return Part(tensors)
        shape, facts = (x.shape[0], x.shape[3 - self.axis], end - begin), {"device": x.device}
        facts["dtype"] = torch.float32
        nothing = -float("inf")
        return Part(
            tensors, torch.empty(shape, **facts) if empty else torch.full(shape, nothing, **facts)
        )


class Sum:
    """The sum of parts of the rows ``span``, which are added in the order in which they come.

    In float32 if ``wide``, else in q's dtype, rounded with each part.
    """

    def __init__(self, kind: Kind, span: Span, wide: bool):
        self.kind, self.span, self.wide = kind, span, wide
        self.found: Part | None = None

    def take(self, more: Part, rows: Span, entries: Span | None = None) -> None:
        """Add a part of these rows and batch entries, None for all; its memory may be kept."""
        kind, begin = self.kind, self.span[0]
        if not kind.like:
            return
        every = 0, kind.like[0].shape[0]
        entries = every if entries is None else entries
        if self.found is None and (entries, rows) == (every, self.span):
            self.found = self._to(more, self.wide)
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

    def whole(self) -> Part:
        """What was added so far."""
        return self.kind.part(self.span, self.wide) if self.found is None else self.found

    def rounded(self) -> Part:
        """What was added, rounded to q's dtype."""
        return self._to(self.whole(), False)

    def _to(self, part: Part, wide: bool) -> Part:
        return part._replace(tensors=[x.to(self.kind.dtype(wide)) for x in part.tensors])


def cut(x: Any, entries: Span, rows: Span, begin: int, axis: int) -> Any:
    """A view of these batch entries and rows of a tensor whose first row is ``begin``."""
    some = x.narrow(0, entries[0], entries[1] - entries[0])
    return some.narrow(axis, rows[0] - begin, rows[1] - rows[0])


def with_rows(x: Any, axis: int, rows: int, columns: int | None = None) -> tuple[int, ...]:
    """The shape of a tensor with so many rows along ``axis``, and columns if given."""
    shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
    return shape if columns is None else (*shape[:-1], columns)
