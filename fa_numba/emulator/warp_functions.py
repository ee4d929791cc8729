"""Shuffles and votes of `numba.cuda`: functions in which lanes of a warp exchange values."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import UninitialisedRead
from .groups import FULL, WARP
from .lanes import number, to_int

BITS = 1 << np.arange(WARP, dtype=np.int64)


class WarpFunctions:
    """Functions of the emulator's `cuda` with which lanes of a warp exchange values.

    The argument `mask` has one bit for each lane of the warp that calls the function.
    """

    _context: Any
    laneid: Any
    warpsize = WARP

    def shfl_sync(self, mask: int, value: Any, src_lane: Any) -> Any:
        """Return the value of lane `src_lane` of the warp."""
        return self._shuffle("shfl_sync", mask, value, to_int(src_lane) % WARP)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: Any) -> Any:
        """Return the value of the lane whose number differs in the bits of `lane_mask`."""
        context = self._context
        plain = value.__class__ is np.ndarray and lane_mask.__class__ is int and mask == FULL
        if plain and 0 <= lane_mask < WARP and context.whole_warps():
            context.instruction("shuffle")  # no lane waits: all lanes of the warp are here
            return value[context.group.crossed(lane_mask)]
        return self._shuffle("shfl_xor_sync", mask, value, self.laneid ^ to_int(lane_mask))

    def shfl_up_sync(self, mask: int, value: Any, delta: Any) -> Any:
        """Return the value of the lane `delta` lanes before this lane.

        If there is no such lane, return the lane's own value.
        """
        source = self._lanes() - to_int(delta)
        return self._shuffle("shfl_up_sync", mask, value, np.where(source < 0, self.laneid, source))

    def shfl_down_sync(self, mask: int, value: Any, delta: Any) -> Any:
        """Return the value of the lane `delta` lanes after this lane.

        If there is no such lane, return the lane's own value.
        """
        source = self._lanes() + to_int(delta)
        inside = np.where(source >= WARP, self.laneid, source)
        return self._shuffle("shfl_down_sync", mask, value, inside)

    def _lanes(self) -> np.ndarray:
        """Return each lane's number in its warp, as an array."""
        return self._context.group.lanes(self.laneid)

    def _shuffle(self, operation: str, mask: int, value: Any, source: Any) -> Any:
        """Return the value of lane `source` of the warp. Raise if that lane does not take part.

        `operation` is the name of the function, for messages.
        """
        context = self._context
        context.instruction("shuffle")

        def resolve(
            values: list[np.ndarray], present: np.ndarray, _: int
        ) -> tuple[np.ndarray, ...]:
            value, source = values
            inside = source & WARP - 1
            there = np.take_along_axis(present, inside, 1) & (inside == source)
            return np.take_along_axis(value, inside, 1), there

        source = np.broadcast_to(source, context.group.count)
        taken, there = context.collective(operation, mask, (value, source), resolve)
        lane = context.first_lane_where(~there)
        if lane >= 0:
            text = (
                f"{operation} reads lane {int(source[lane])}, which does not take part in the "
                "call. Let the lane make the call too, or read another lane"
            )
            raise context.fault(UninitialisedRead, text, None, lane)
        return taken

    # ---- votes

    def all_sync(self, mask: int, predicate: Any) -> Any:
        """Return whether the predicate is true in all lanes of the mask."""
        return self._vote("all_sync", mask, predicate, lambda v, here: (v | ~here).all(axis=1))

    def any_sync(self, mask: int, predicate: Any) -> Any:
        """Return whether the predicate is true in any lane of the mask."""
        return self._vote("any_sync", mask, predicate, lambda v, here: (v & here).any(axis=1))

    def eq_sync(self, mask: int, predicate: Any) -> Any:
        """Return whether the predicate is the same in all lanes of the mask."""
        return self._vote(
            "eq_sync", mask, predicate,
            lambda v, here: (v | ~here).all(axis=1) | ~(v & here).any(axis=1),
        )  # fmt: skip

    def ballot_sync(self, mask: int, predicate: Any) -> Any:
        """Return a number with one bit for each lane whose predicate is true."""
        return self._vote("ballot_sync", mask, predicate, lambda v, here: (v & here) @ BITS)

    def _vote(self, operation: str, mask: int, predicate: Any, count: Any) -> Any:
        """Return a vote over the lanes of `mask`, equal in all lanes of a warp.

        `count` computes the result of each warp. Its arguments are two bool arrays (warps, 32):
        which predicates are true, and which lanes take part.
        """
        context = self._context
        context.instruction("vote")

        def resolve(
            values: list[np.ndarray], present: np.ndarray, mask: int
        ) -> tuple[np.ndarray, ...]:
            here = present & ((mask & BITS) != 0)
            return (np.repeat(count(values[0] != 0, here)[:, None], WARP, 1),)

        (result,) = context.collective(operation, mask, (number(predicate),), resolve)
        return result

    def match_any_sync(self, mask: int, value: Any) -> Any:
        """Return a number with one bit for each lane of `mask` that has this lane's value."""
        return self._match("match_any_sync", mask, value)

    def match_all_sync(self, mask: int, value: Any) -> Any:
        """Return (mask, True) if all lanes of the mask have one value, else (0, False)."""
        equal = self._match("match_all_sync", mask, value)
        everyone = self._context.group.of_warps(
            np.repeat((self._present() @ BITS)[:, None], WARP, 1)
        )
        same = equal == (everyone & mask)
        return np.where(same, equal, 0), same

    def _match(self, operation: str, mask: int, value: Any) -> Any:
        """Return a number with one bit for each lane of `mask` that has this lane's value.

        `operation` is the name of the function, for messages.
        """
        context = self._context
        context.instruction("vote")

        def resolve(
            values: list[np.ndarray], present: np.ndarray, mask: int
        ) -> tuple[np.ndarray, ...]:
            here = present & ((mask & BITS) != 0)
            same = values[0][:, :, None] == values[0][:, None, :]
            return ((same & here[:, None, :]) @ BITS,)

        (result,) = context.collective(operation, mask, (value,), resolve)
        return result

    def _present(self) -> np.ndarray:
        """Return a bool array of shape (warps, 32) that says which lanes of each warp take part."""
        group = self._context.group
        return group.in_warps(self._context.active(), False)

    def activemask(self) -> Any:
        """Return a number with one bit for each lane of the warp that takes part."""
        bits = np.repeat((self._present() @ BITS)[:, None], WARP, 1)
        return self._context.group.of_warps(bits)

    def lanemask_lt(self) -> Any:
        """Return a number with one bit for each lane of the warp that is before this lane."""
        return (1 << self._lanes()) - 1
