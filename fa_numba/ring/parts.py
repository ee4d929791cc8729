"""Sums of results over parts of the columns or rows.

A kernel rounds its result to q's dtype, such as float16. Several results are added in float32, and
only the last sum is rounded to q's dtype. Each result is therefore rounded once, and the sum is
rounded once. If there are only two results, as with two ranks, the second result is added to the
first result in q's dtype. The number of roundings is then the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from fa_numba.host import merging
from fa_numba.ring.visible import Span


class Part(NamedTuple):
    """A result over a part of the columns or rows: gradients, or O with L.

    A part without tensors stands for no result.

    Attributes
    ----------
    tensors : sequence of torch.Tensor
        The gradients, or O.
    lse : torch.Tensor or None
        L, if the result is O.
    """

    tensors: Sequence[Any] = ()
    lse: Any = None

    @property
    def message(self) -> list[Any]:
        """The tensors that are sent to another rank: the gradients, or O and L."""
        return [*self.tensors] if self.lse is None else [*self.tensors, self.lse]

    def beside(self, other: Part, axis: int) -> Part:
        """Return the heads of this part followed by the heads of ``other``, for the same rows.

        ``axis`` is the axis of the heads. Normally, the tensors of the two parts are concatenated.
        If a tensor of this part is the same object as the tensor of ``other``, it is returned
        unchanged: both calls have written their heads to it.
        """
        cat = sys.modules["torch"].cat
        pairs = zip(self.tensors, other.tensors, strict=True)
        tensors = [x if x is y else cat([x, y], axis) for x, y in pairs]
        return Part(tensors, None if self.lse is None else cat([self.lse, other.lse], 1))


class Kind:
    """The shape and dtype of parts.

    Parameters
    ----------
    layout : {"bhnd", "bnhd"}
        Order of the axes of q.
    like : sequence of torch.Tensor
        Tensors of this rank, such as (k, v). A part has one tensor for each tensor in ``like``,
        such as (dK, dV). The two tensors have the same shape, apart from the number of rows.
    lse : bool, default False
        Whether the parts have an L, (batch, heads, rows).
    columns : int, optional
        Length of the last axis, if it differs from ``like``.
    """

    def __init__(
        self, layout: str, like: Sequence[Any], lse: bool = False, columns: int | None = None
    ):
        self.axis, self.layout = 1 if layout == "bnhd" else 2, layout
        self.like, self.lse, self.columns = like, lse, columns

    def dtype(self, wide: bool) -> Any:
        """Return the dtype of a sum: float32 if ``wide``, and otherwise the dtype of q."""
        return sys.modules["torch"].float32 if wide else self.like[0].dtype

    def part(self, span: Span, wide: bool, empty: bool = False) -> Part:
        """Return a new part for the rows from ``span[0]`` to ``span[1]``, initialised.

        The initial values are 0, and -inf for L. They are the results of a row that sees no column.
        With ``empty``, the memory is not initialised. The matrices are float32 if ``wide`` is True.
        Otherwise, they have the dtype of q.
        """
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
    """The sum of the parts for the rows ``span``, added in the order in which the parts arrive.

    If ``wide``, the sum is in float32. Otherwise the sum is in the dtype of q, and is rounded after
    each addition.
    """

    def __init__(self, kind: Kind, span: Span, wide: bool):
        self.kind, self.span, self.wide = kind, span, wide
        self.found: Part | None = None

    def take(self, more: Part, rows: Span, entries: Span | None = None) -> None:
        """Add the part ``more``, which contains the rows ``rows`` of the batch entries ``entries``.

        If ``entries`` is None, the part contains all batch entries. The sum may keep the memory of
        the part.
        """
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
        # All threads of a row read the old L, so the new L is written to other memory.
        merging.merge(mine[0], lse.clone(), more.tensors[0], more.lse, lse, kind.layout)

    def whole(self) -> Part:
        """Return the sum so far."""
        return self.kind.part(self.span, self.wide) if self.found is None else self.found

    def rounded(self) -> Part:
        """Return the sum so far, rounded to q's dtype."""
        return self._to(self.whole(), False)

    def _to(self, part: Part, wide: bool) -> Part:
        return part._replace(tensors=[x.to(self.kind.dtype(wide)) for x in part.tensors])


def cut(x: Any, entries: Span, rows: Span, begin: int, axis: int) -> Any:
    """Return a view of some batch entries and rows of a tensor.

    ``entries`` and ``rows`` are pairs (begin, end). ``begin`` is the number of the tensor's first
    row, and ``axis`` is the axis of the rows.
    """
    some = x.narrow(0, entries[0], entries[1] - entries[0])
    return some.narrow(axis, rows[0] - begin, rows[1] - rows[0])


def with_rows(x: Any, axis: int, rows: int, columns: int | None = None) -> tuple[int, ...]:
    """Return the shape of a tensor with ``rows`` rows along ``axis``, and ``columns`` columns if
    given.
    """
    shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
    return shape if columns is None else (*shape[:-1], columns)
