"""Results of part of the columns, or rows, and how several of them become one.

A part as a kernel leaves it is in q's dtype, rounded once; a sum of several is in float32, until
the last one has come: then it is rounded to q's dtype. So a result is off by one rounding for each
part, of that part's weight, and by one of its own. Where only two parts meet, as between two ranks,
the second is added to the first in its own dtype, which rounds as often.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from fa_numba.host import merging
from fa_numba.ring.schedule import ALL, span


@dataclass(frozen=True)
class Part:
    """Gradients, or O with its L: ``tensors`` of ``half`` of some rank's rows, ``lse`` or None.

    ``axis`` is that of the rows in ``tensors``; in ``lse`` it is the last.
    """

    tensors: tuple[Any, ...]
    lse: Any
    half: str
    layout: str

    @property
    def axis(self) -> int:
        return 1 if self.layout == "bnhd" else 2

    @property
    def message(self) -> tuple[Any, ...]:
        """What is sent of it."""
        return self.tensors if self.lse is None else (*self.tensors, self.lse)

    def widened(self) -> Part:
        """The same in float32, to take sums."""
        return replace(self, tensors=tuple(x.float() for x in self.tensors))

    def shape_of(self, x: Any, half: str, axis: int) -> tuple[int, ...]:
        """The shape of ``x``, one of these, if it had that half of the rows."""
        rows = x.shape[axis] * (1 if self.half == ALL else 2)
        return (*x.shape[:axis], span(half, rows)[1], *x.shape[axis + 1 :])

    def nothing(self) -> Part:
        """Zeros of all rows in float32, to take sums of gradients."""
        torch = sys.modules["torch"]
        made = (
            torch.zeros(self.shape_of(x, ALL, self.axis), dtype=torch.float32, device=x.device)
            for x in self.tensors
        )
        return replace(self, tensors=tuple(made), half=ALL)

    def beside(self, other: Part) -> Part:
        """These heads and then those of ``other``, of the same rows; tensors that both have were
        made for the heads of both.
        """
        cat = sys.modules["torch"].cat
        pairs = zip(self.tensors, other.tensors, strict=True)
        lse = None if self.lse is None else cat([self.lse, other.lse], 1)
        return replace(
            self,
            tensors=tuple(x[0] if x[0] is x[1] else cat(x, 3 - self.axis) for x in pairs),
            lse=lse,
        )

    def rounded(self, dtype: Any) -> Part:
        """The same in ``dtype``."""
        return replace(self, tensors=tuple(x.to(dtype) for x in self.tensors))


def half_of(x: Any, half: str, axis: int) -> Any:
    """A view of that half of the rows of ``x``."""
    return x if half == ALL else x.narrow(axis, *span(half, x.shape[axis]))


def joined(into: Part, part: Part) -> Part:
    """Both, in the memory of ``into``, which has all rows that ``part`` has."""
    half = ALL if into.half == part.half else part.half
    rows = [half_of(x, half, into.axis) for x in into.tensors]
    if into.lse is None:
        for x, y in zip(rows, part.tensors, strict=True):
            merging.add(x, y, into.layout)
        return into
    lse = into.lse.clone()
    # The kernel's threads of a row all read its L: the new one goes elsewhere.
    x_lse, new = half_of(into.lse, half, 2), half_of(lse, half, 2)
    merging.merge(rows[0], x_lse, part.tensors[0], part.lse, new, into.layout)
    return replace(into, lse=lse)
