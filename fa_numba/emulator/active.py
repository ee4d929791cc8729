"""Questions about the lanes of the running group: which take part, and whether they agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .exits import Exits
from .flow import Flow
from .groups import WARP, Group, OneByOne, Parting
from .lanes import FromEnd, Mask, every, select, some, truth

MOST_KNOWN = 256  # entries of a cache


class Active(Flow):
    """Methods of a running launch that answer questions about lanes.

    The class `Launch` inherits these methods. Most of them are about the lanes that take part in
    the current statement.

    `group` contains the running lanes. `mask` has one bool per lane, which says whether the lane
    takes part. If `mask` is None, all lanes of `group` take part. `several` says whether the lanes
    belong to several thread blocks. `at_once` is the greatest number of thread blocks that run at
    the same time, and `threads` is the number of threads of a thread block.
    """

    __slots__ = ("threads", "at_once", "several", "group", "_inside", "_known", "wraparound")

    def __init__(self, threads: int, at_once: int) -> None:
        super().__init__()
        self.threads, self.at_once, self.several = threads, at_once, False
        self.group: Group
        self.wraparound = False
        # Caches. They use the ids of arrays and groups, which are never changed.
        self._inside: dict[int, tuple[np.ndarray, int, Any]] = {}  # indices that are in bounds
        self._known: dict[tuple[int, int], tuple[Any, Any, bool]] = {}

    def active(self) -> np.ndarray:
        """Return which lanes of the group take part, as one bool per lane."""
        return self.group.everyone if self.mask is None else self.mask

    def active_lanes(self) -> np.ndarray:
        """Return the numbers of the lanes that take part."""
        return self.active().nonzero()[0]

    def whole_warps(self) -> bool:
        """Return whether all 32 lanes or no lanes of each warp take part.

        If the group contains only some lanes of a warp, the result is False.
        """
        group, mask = self.group, self.mask
        if mask is None or not group.whole:
            return group.whole
        known = self._known.get((id(group), id(mask)))
        if known is None or known[0] is not group or known[1] is not mask:
            warps = mask.reshape(-1, WARP)
            whole = bool(mask.any() and (warps.all(axis=1) == warps.any(axis=1)).all())
            known = self._know(group, mask, whole)
        return known[2]

    def first_lane(self) -> int:
        """Return the first lane that takes part; 0 if no lane takes part."""
        return 0 if self.mask is None else int(self.mask.argmax())

    def first_lane_where(self, values: Any) -> int:
        """Return the first lane that takes part and whose value is true.

        Return -1 if there is no such lane.
        """
        if values.__class__ is not np.ndarray:
            return self.first_lane() if values else -1
        values = truth(values)
        return (values if self.mask is None else values & self.mask).tobytes().find(1)

    def first_outside(self, index: Any, extent: Any) -> int:
        """Return the first lane that takes part and whose index is outside 0 .. extent - 1.

        Return -1 if there is no such lane.
        """
        if extent.__class__ is np.ndarray:  # it differs between thread blocks
            return self.first_lane_where(np.asarray((index < 0) | (index >= extent)))
        if index.__class__ is np.ndarray:
            # An index is often used again: look up whether it was in bounds before.
            known = self._inside.get(id(index))
            if (
                known is not None
                and known[0] is index
                and known[1] <= extent
                and known[2] is self.mask
            ):
                return -1
            lane = checks.outside(index, extent, self.active())
            if lane < 0:
                if len(self._inside) > MOST_KNOWN:
                    self._inside.clear()
                self._inside[id(index)] = (index, extent, self.mask)
            return lane
        return -1 if 0 <= index < extent else self.first_lane()

    def from_start(self, index: Any, extent: Any) -> Any:
        """Replace the negative numbers in an index, which count from the end of the axis.

        Return the index with numbers that count from the start. `extent` is the length of the axis.
        With ``wraparound=False``, only literal negative numbers are replaced, such as -1 in
        ``x[-1]``. Other negative numbers are returned unchanged.
        """
        if not self.wraparound and index.__class__ is not FromEnd:
            return index
        if index.__class__ is np.ndarray:
            return select(index < 0, index + extent, index)
        return index + extent if index < 0 else index

    def of_lane(self, index: Any, lane: int, as_tuple: bool = False) -> Any:
        """Return the value that an index has in one lane.

        If the index is a tuple, return a tuple with the value of each of its entries. If `as_tuple`
        is set, return a tuple in every case.
        """
        axes = index if index.__class__ is tuple else (index,)
        found = tuple(i[lane].item() if i.__class__ is np.ndarray else i for i in axes)
        return found if as_tuple or index.__class__ is tuple else found[0]

    def uniform(self, value: Any) -> Any:
        """Return the value that all lanes which take part share, as a number.

        Raise Parting if the lanes have different values. The thread block then begins again, and
        lanes with different values run in different groups.
        """
        if value.__class__ is not np.ndarray:
            return value
        lanes = self.active()
        first = value[self.first_lane()]
        same = (value == first) & lanes
        if same.tobytes() != lanes.tobytes():
            raise Parting(same)
        return first.item()

    def uniform_in_block(self, value: Any) -> Any:
        """Return the value that all lanes of a thread block share.

        The result is a number, or an array over the lanes if thread blocks have different values.
        """
        if value.__class__ is not np.ndarray or not self.several:
            return self.uniform(value)
        blocks, lanes = self.group.blocks, self.active_lanes()
        of_block = np.zeros(self.at_once, value.dtype)
        of_block[blocks[lanes]] = value[lanes]
        if some(of_block[blocks[lanes]] != value[lanes]):
            raise OneByOne
        taken = value[lanes]
        return taken[0].item() if every(taken == taken[0]) else of_block[blocks]

    def whole_blocks(self, lanes: np.ndarray) -> np.ndarray:
        """Return `lanes` unchanged if it contains all lanes of each of its thread blocks.

        `lanes` has one bool per lane. Raise OneByOne if it contains only a part of a thread block.
        """
        if (self.by_block(lanes) % self.threads).any():
            raise OneByOne
        return lanes

    def by_block(self, lanes: np.ndarray) -> np.ndarray:
        """Return the number of lanes in `lanes` for each thread block that runs.

        `lanes` has one bool per lane.
        """
        return np.bincount(self.group.blocks[lanes], minlength=self.at_once)

    def covers(self, lanes: np.ndarray, mask: Mask) -> bool:
        """Return whether `lanes` includes all lanes of `mask`.

        Both have one bool per lane. The result is cached.
        """
        if lanes is mask:
            return True
        if mask is None:
            return every(lanes)
        known = self._known.get((id(lanes), id(mask)))
        if known is None or known[0] is not lanes or known[1] is not mask:
            known = self._know(lanes, mask, not some(mask & ~lanes))
        return known[2]

    def _know(self, one: Any, other: Any, fact: bool) -> tuple[Any, Any, bool]:
        """Store a fact about two objects in the cache, and return the cache entry.

        The entry is the tuple ``(one, other, fact)``.
        """
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        known = self._known[id(one), id(other)] = (one, other, fact)
        return known

    def exits(self) -> Exits:
        """Return a new record of the lanes that leave a function early.

        A rewritten function calls this method when it begins.
        """
        exits = Exits(self)
        if self.group.exits is None:
            self.group.exits = exits
        return exits

    def show(self, *values: Any, **options: Any) -> None:
        """Print values, one line for each lane that takes part."""
        for lane in self.active_lanes().tolist():
            print(*(x[lane] if x.__class__ is np.ndarray else x for x in values), **options)

    def under(self, condition: Any, function: Any, *args: Any) -> Any:
        """Call a function under the mask of the lanes whose condition is true.

        Return the function's result; None if no lane has a true condition.
        """
        if condition.__class__ is not np.ndarray:
            return function(*args) if condition else None
        if not self.only(condition):
            self.mask = self._outer.pop()
            return None
        result = function(*args)
        self.mask = self._outer.pop()
        return result
