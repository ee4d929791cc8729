"""Masks: which lanes take part in a statement, if lanes take different branches.

The mask of a launch is None while all lanes of its group take part. Else it is an array with one
bool per lane. A rewritten function (rewrite.py) calls the methods of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .lanes import Mask, array, merge, select, truth, undefined


class Split:
    """An `if` statement whose branches are taken by different lanes.

    The lanes with a true condition run first. `outer` is the mask before the statement. `others`
    are the lanes with a false condition.
    """

    __slots__ = ("flow", "outer", "others")

    def __init__(self, flow: Flow, outer: Mask, condition: np.ndarray) -> None:
        self.flow, self.outer = flow, outer
        self.others = ~condition if outer is None else outer & ~condition

    def turn(self) -> None:
        """After the body of the `if`, continue with the lanes whose condition is false."""
        self.flow.mask = self.others

    def join(self) -> None:
        """After both branches, continue with all lanes that reached the `if`."""
        self.flow.mask = self.outer


class Flow:
    """Methods of a running launch that say which lanes take part in the current statement.

    The class `Launch` inherits these methods.
    """

    __slots__ = ("mask", "_outer")

    def __init__(self) -> None:
        self.mask: Mask = None
        self._outer: list[Mask] = []  # masks outside of the expressions that are evaluated

    def split(self, condition: np.ndarray) -> bool | Split:
        """Divide the lanes by the condition of an `if`; return True or False if all lanes agree.

        If the lanes disagree, return a `Split`, and continue with the lanes whose condition is
        true.
        """
        condition, outer = truth(condition), self.mask
        if not self.narrow(condition):
            return False
        return self.mask is outer or Split(self, outer, condition)

    def narrow(self, condition: np.ndarray) -> bool:
        """Continue with the lanes whose condition is true; return whether there are such lanes.

        If the condition is false in all lanes, the mask does not change.
        """
        condition = truth(condition)
        mask = self.mask
        here = condition if mask is None else condition & mask
        taken = here.tobytes()  # bytes are searched faster than arrays
        if 1 not in taken:
            return False
        if 0 in taken if mask is None else taken != mask.tobytes():
            self.mask = here
        return True

    def range(self, *places: Any) -> Any:
        """Iterate like Python's `range`. The three arguments may differ by lane.

        A lane is masked out when its own range has ended.
        """
        for place in places:
            if place.__class__ is array:
                break
        else:
            return range(*places)
        return self._range(*((0, *places, 1) if len(places) == 1 else (*places, 1)[:3]))

    def _range(self, start: Any, stop: Any, step: Any) -> Iterator[Any]:
        """Yield the loop variable as an array over the lanes, until the ranges of all lanes end."""
        up = step > 0
        while True:
            ahead = select(up, start < stop, start > stop)
            if not (self.narrow(ahead) if ahead.ndim else ahead):
                return
            yield start
            start = start + step

    # ---- `and`, `or` and conditional expressions with an operand that only some lanes may evaluate

    def only(self, condition: np.ndarray) -> bool:
        """Begin to evaluate an expression that only the lanes with a true condition need.

        The expression is the second operand of `and`, or an operand of a conditional expression.
        Continue with these lanes, and return whether there are any. The mask before the call is
        restored by `then`, `then_none` or `chosen`.
        """
        self._outer.append(self.mask)
        return self.narrow(condition)

    def unless(self, condition: np.ndarray) -> bool:
        """Begin to evaluate an expression that only the lanes with a false condition need.

        The expression is the second operand of `or`. Continue with these lanes, and return whether
        there are any. The mask before the call is restored by `then` or `then_none`.
        """
        return self.only(~truth(condition))

    def others(self, condition: np.ndarray) -> bool:
        """Begin to evaluate the second operand of a conditional expression.

        This is `b` in the expression `a if condition else b`. `only` was called before to evaluate
        the first operand. Only the lanes with a false condition need the second operand. Continue
        with these lanes, and return whether there are any.
        """
        self.mask = self._outer.pop()
        return self.only(~truth(condition))

    def then(self, joined: Callable[..., Any], condition: np.ndarray, value: Any) -> Any:
        """Return the value of `and` or `or`, and restore the mask before the expression.

        `joined` is `lanes.both` for `and`, or `lanes.any_` for `or`. `condition` is the value of
        the first operand, and `value` is the value of the second operand.
        """
        self.mask = self._outer.pop()
        return joined(condition, value)

    def then_none(self, condition: np.ndarray) -> Any:
        """Continue with all lanes, after an `and` or `or` whose second operand no lane needed.

        Return `condition`, the value of the first operand, which is then the result.
        """
        self.mask = self._outer.pop()
        return condition

    def chosen(self, condition: np.ndarray, one: Any, other: Any) -> Any:
        """Return the value of a conditional expression, and set the mask to what it was before.

        `one` is the value where the condition is true, and `other` is the value where the condition
        is false. A value is `undefined` if no lane needed it.
        """
        self.mask = self._outer.pop()
        if one is undefined or other is undefined:
            return other if one is undefined else one
        return merge(truth(condition), other, one)
