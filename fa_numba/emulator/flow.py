"""Which lanes take part in a statement: masks for branches that lanes take differently.

The mask of a context is None while all lanes of its group take part. Else it is an array with one
bool per lane. A rewritten function (rewrite.py) calls the methods of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .lanes import Mask, array, merge, truth, undefined


class Split:
    """An `if` whose branches are taken by different lanes.

    First the lanes with a true condition run.
    """

    __slots__ = ("flow", "outer", "others")

    def __init__(self, flow: Flow, outer: Mask, condition: np.ndarray) -> None:
        self.flow, self.outer = flow, outer
        self.others = ~condition if outer is None else outer & ~condition

    def turn(self) -> None:
        """Go on with the lanes whose condition is false, as the body has run."""
        self.flow.mask = self.others

    def join(self) -> None:
        """Go on with all lanes, as both branches have run."""
        self.flow.mask = self.outer


class Flow:
    """The part of a context that says which lanes take part in the current statement."""

    __slots__ = ("mask", "_outer")

    def __init__(self) -> None:
        self.mask: Mask = None
        self._outer: list[Mask] = []

    def split(self, condition: np.ndarray) -> bool | Split:
        """Divide the lanes by a condition; return True or False if all lanes agree."""
        condition, outer = truth(condition), self.mask
        if not self.narrow(condition):
            return False
        return self.mask is outer or Split(self, outer, condition)

    def narrow(self, condition: np.ndarray) -> bool:
        """Keep the lanes whose condition is true.

        If there are none, keep all lanes and return False.
        """
        condition = truth(condition)
        mask = self.mask
        here = condition if mask is None else condition & mask
        count = np.count_nonzero(here)
        if not count:
            return False
        if count < (condition.size if mask is None else np.count_nonzero(mask)):
            self.mask = here
        return True

    def range(self, *places: Any) -> Any:
        """Iterate like Python's range; the ends may differ by lane."""
        if not any(place.__class__ is array for place in places):
            return range(*places)
        return self._range(*((0, *places, 1) if len(places) == 1 else (*places, 1)[:3]))

    def _range(self, start: Any, stop: Any, step: Any) -> Iterator[Any]:
        up = step > 0
        while True:
            ahead = np.where(up, start < stop, start > stop)
            if not (self.narrow(ahead) if ahead.ndim else ahead):
                return
            yield start
            start = start + step

    # ---- and, or, a conditional expression, where a side must not run for lanes without use for it

    def only(self, condition: np.ndarray) -> bool:
        """Go on with the lanes whose condition is true; return whether there are any."""
        self._outer.append(self.mask)
        return self.narrow(condition)

    def unless(self, condition: np.ndarray) -> bool:
        """Go on with the lanes whose condition is false; return whether there are any."""
        return self.only(~truth(condition))

    def others(self, condition: np.ndarray) -> bool:
        """Go on with the lanes whose condition is false, after `only`."""
        self.mask = self._outer.pop()
        return self.only(~truth(condition))

    def then(self, joined: Callable[..., Any], condition: np.ndarray, value: Any) -> Any:
        """Go on with all lanes.

        Return the condition and the other operand, combined by `joined`.
        """
        self.mask = self._outer.pop()
        return joined(condition, value)

    def then_none(self, condition: np.ndarray) -> Any:
        """Go on with all lanes, as no lane needed the other operand; return the condition."""
        self.mask = self._outer.pop()
        return condition

    def chosen(self, condition: np.ndarray, one: Any, other: Any) -> Any:
        """Return the value of a conditional expression, for all lanes again."""
        self.mask = self._outer.pop()
        if one is undefined or other is undefined:
            return other if one is undefined else one
        return merge(truth(condition), other, one)
