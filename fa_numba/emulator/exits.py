"""Lanes that leave a function or a loop before other lanes do: return, break and continue.

A lane that has left is masked out for some time: after `return` until the function returns, after
`break` until the loop ends, and after `continue` until the next iteration begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from .lanes import Mask, merge, undefined

if TYPE_CHECKING:
    from .active import Active


class Leaving(BaseException):
    """Raised if lanes disagree on a return, break or continue of a function.

    The emulator then rewrites the function a second time, so that lanes that have left are masked
    out. `code` is the code object of the first rewritten version, which was running.
    """

    def __init__(self, code: CodeType) -> None:
        self.code = code


@dataclass(slots=True)
class _Loop:
    """A running loop, and the lanes that have left the loop or the current iteration."""

    mask: Mask = None  # lanes that began the current turn
    broken: np.ndarray | None = None  # lanes that have left the loop by `break`
    continued: np.ndarray | None = None  # lanes that have left the current turn by `continue`


class Exits:
    """A record of the lanes that have left one call of a function, or a loop of the function.

    entry    the mask when the function was called
    gone     all lanes that have left the function, a loop or the current iteration of a loop
    result   the value of the function, in the lanes that have returned
    loops    the loops that are running; the last entry is the innermost loop
    """

    __slots__ = ("context", "entry", "gone", "result", "loops", "_checked", "_every")

    def __init__(self, context: Active) -> None:
        self.context, self.entry = context, context.mask
        self.gone: np.ndarray | None = None
        self.result: Any = undefined
        self.loops: list[_Loop] = []
        self._checked: Mask = None  # the last mask for which `everyone` computed `_every`
        self._every = True

    def _leave(self) -> np.ndarray:
        """Mask out the lanes that take part, and return them as one bool per lane."""
        lanes = self.context.active()
        self.gone = _union(self.gone, lanes)
        self.context.mask = np.zeros_like(lanes)
        return lanes

    def returns(self, value: Any = None) -> None:
        """Emulate `return value` for the lanes that take part."""
        lanes = self._leave()
        self.result = value if self.result is undefined else merge(lanes, self.result, value)

    def breaks(self) -> None:
        """Emulate `break` for the lanes that take part."""
        loop = self.loops[-1]
        loop.broken = _union(loop.broken, self._leave())

    def continues(self) -> None:
        """Emulate `continue` for the lanes that take part."""
        loop = self.loops[-1]
        loop.continued = _union(loop.continued, self._leave())

    def settle(self, mask: Mask) -> bool:
        """Continue with the lanes of `mask` that have not left; return whether there are any."""
        if self.gone is None:
            self.context.mask = mask
            return True
        here = ~self.gone if mask is None else mask & ~self.gone
        self.context.mask = here
        return bool(here.any())

    def everyone(self) -> bool:
        """Return whether all lanes of the call take part, except for lanes that have returned.

        The lanes of the call are the lanes that called the function.
        """
        mask = self.context.mask
        if mask is self.entry or self.gone is None or mask is None:
            return mask is self.entry
        if mask is not self._checked:
            live, returned = self.context.group.everyone, self.returned()
            live = live if self.entry is None else self.entry
            live = live if returned is None else live & ~returned
            self._checked, self._every = mask, not (live & ~mask).any()
        return self._every

    def returned(self) -> np.ndarray | None:
        """Return the lanes that have returned from the function; None if no lane has returned."""
        lanes = self.gone
        for loop in self.loops:
            for left in (loop.broken, loop.continued):
                lanes = lanes if lanes is None or left is None else lanes & ~left
        return lanes

    def loop(self) -> None:
        """Begin a loop. Later calls of `breaks` and `continues` refer to this loop."""
        self.loops.append(_Loop())

    def enter(self) -> None:
        """Begin an iteration of the innermost loop with the lanes that take part."""
        self.loops[-1].mask = self.context.mask

    def again(self) -> bool:
        """End an iteration of the innermost loop; return whether any lane continues the loop."""
        loop = self.loops[-1]
        self._back(loop.continued)
        loop.continued = None
        return self.settle(loop.mask)

    def ended(self, mask: Mask) -> None:
        """End the innermost loop, and continue with the lanes of `mask` that have not returned.

        `mask` are the lanes that entered the loop.
        """
        self._back(self.loops.pop().broken)
        self.settle(mask)

    def _back(self, lanes: np.ndarray | None) -> None:
        """Let `lanes`, which have left a loop or an iteration, take part again."""
        if lanes is not None and self.gone is not None:
            left = self.gone & ~lanes
            self.gone = left if left.any() else None

    def done(self) -> Any:
        """End the call of the function, and return its result for all lanes that called it."""
        self.context.mask = self.entry
        return None if self.result is undefined else self.result


def _union(lanes: np.ndarray | None, more: np.ndarray) -> np.ndarray:
    return more if lanes is None else lanes | more
