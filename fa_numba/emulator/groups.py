"""Groups of threads that run together, and what they wait for.

A thread block begins as one group. Several thread blocks that run at the same time also begin as
one group. Sometimes lanes of a group must wait for other lanes of the group. They then become a
group of their own, and the thread block begins again; see run.py. While a thread block runs, each
group keeps its lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import greenlet

from .checks import PITCH, SHIFT, WARP
from .errors import Index3
from .lanes import Mask, every

FULL = 0xFFFFFFFF  # the mask of all lanes of a warp

# States of a group: it can run, waits, or has returned.
READY, AT_BARRIER, AT_NAMED, AT_MBARRIER, AT_WARP, DONE, AT_GRID = range(7)
Site = tuple[int, int]  # a call in kernel code: id of the code object, offset of the instruction


class OneByOne(BaseException):
    """Raised if several thread blocks cannot run at the same time any longer.

    The thread blocks then begin again, and run one by one.
    """


class Parting(BaseException):
    """Raised if lanes would wait for other lanes of their group.

    The thread block then begins again, with these lanes in a group of their own. `lanes` says which
    lanes of the group these are.
    """

    def __init__(self, lanes: np.ndarray) -> None:
        self.lanes = lanes  # one bool per lane of the group


def alike(values: np.ndarray) -> Any:
    """Return one number if all values are equal, else the array of values."""
    return int(values[0]) if every(values == values[0]) else values


def warps_of(tids: np.ndarray) -> np.ndarray:
    """Return the numbers of the warps of threads. The threads must be in ascending order."""
    warps = tids // WARP
    first = np.ones(warps.size, bool)
    np.not_equal(warps[1:], warps[:-1], out=first[1:])
    return warps[first]


class Group:
    """Lanes that run together.

    A lane is a thread, and arrays over the lanes have one element per lane. Attributes:

        tids         number of each lane's thread in its thread block, in ascending order. If
                     several thread blocks run at the same time, n * PITCH is added for block n.
        blocks       number of each lane's thread block among those that run, from 0
        x, y, z      `threadIdx` of each lane; a number if it is equal in all lanes
        warp_of      number of each lane's warp
        warps        numbers of all warps with lanes in the group
        slot         position of each lane in a flattened array (warps, 32)
        present      which positions of such an array belong to a lane
        whole        whether the group has all 32 lanes of each of its warps
        state, site, operation, value    what the group waits for, and where; see waiting.py
        mask, outer  the masks of flow.py while the group waits
        run          the greenlet of the group; None for the only group of a thread block
        committed    number of closed groups of asynchronous copies, by lane
        copies       asynchronous copies in flight
    """

    __slots__ = (
        "tids", "blocks", "count", "everyone", "x", "y", "z", "laneid", "warp_of", "warps", "slot",
        "whole", "state", "site", "operation", "value", "mask", "outer",
        "run", "committed", "copies", "full_arrays", "present", "exits", "_crossed",
    )  # fmt: skip

    def __init__(self, tids: np.ndarray, block: Index3) -> None:
        self.tids, self.blocks, self.count = tids, tids >> SHIFT, tids.size
        self.everyone = np.ones(tids.size, bool)
        threads = tids % PITCH
        self.x = alike(threads % block[0])
        self.y = alike(threads // block[0] % block[1])
        self.z = alike(threads // (block[0] * block[1]))
        self.laneid = alike(tids % WARP)
        self.warp_of = tids // WARP
        self.warps, place = np.unique(self.warp_of, return_inverse=True)
        self.slot = place * WARP + tids % WARP
        self.whole = self.count == WARP * self.warps.size
        self.present = np.zeros(WARP * self.warps.size, bool)
        self.present[self.slot] = True
        self.full_arrays: dict[Any, np.ndarray] = {}
        self._crossed: dict[int, np.ndarray] = {}
        self.begin()

    def begin(self) -> None:
        """Reset the state of the lanes at the beginning of a thread block."""
        self.state = READY
        self.site: Site = (0, 0)
        self.operation = ""
        self.value: Any = None
        self.mask: Mask = None
        self.outer: list[Mask] = []
        self.run: greenlet | None = None
        self.exits: Any = None  # the `Exits` of the kernel's own function
        self.committed = np.zeros(self.count, np.int64)
        self.copies: list[Copy] = []

    def full(self, value: int) -> np.ndarray:
        """Return a cached array with `value` for every lane."""
        known = self.full_arrays.get(value)
        if known is None:
            if len(self.full_arrays) > 4096:
                self.full_arrays.clear()
            known = self.full_arrays[value] = np.full(self.count, value, np.int64)
        return known

    def crossed(self, bits: int) -> np.ndarray:
        """Return the array ``lane ^ bits`` for all lanes of the group. The array is cached."""
        known = self._crossed.get(bits)
        if known is None:
            known = self._crossed[bits] = np.arange(self.count) ^ bits
        return known

    def lanes(self, value: Any) -> np.ndarray:
        """Return a value as an array over the lanes. A number becomes an array of equal numbers."""
        return value if value.__class__ is np.ndarray else self.full(int(value))

    def in_warps(self, value: Any, fill: Any = 0) -> np.ndarray:
        """Return a value of every lane as an array of shape (warps, 32).

        Positions without a lane have the value `fill`.
        """
        if value.__class__ is not np.ndarray:
            value = np.full(self.count, value)
        if not self.whole:
            padded = np.full(self.present.size, fill, value.dtype)
            padded[self.slot] = value
            value = padded
        return value.reshape(-1, WARP)

    def of_warps(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the group's lanes from an array of shape (warps, 32)."""
        flat = values.reshape(-1)
        return flat if self.whole else flat[self.slot]


@dataclass(slots=True, eq=False)
class Copy:
    """An asynchronous copy (cp.async) that several lanes started at the same instruction.

    dst       shared array to which the lanes copy
    e         first element in `dst` to which each lane copies
    n         number of elements that each lane copies
    read      function that returns the values for some lanes; see `GlobalArray.source`
    pending   lanes that have not waited for the copy yet
    number    for each lane, the number of the group (cp.async.commit_group) of the lane's copy
    """

    dst: Any
    e: np.ndarray
    n: int
    read: Callable[[np.ndarray], np.ndarray]
    pending: np.ndarray
    number: np.ndarray


@dataclass(slots=True, eq=False)
class NamedBarrier:
    """A named barrier from its first arrival until it opens.

    threads   number of threads that must arrive before the barrier opens
    site      instruction of the first arrival
    seen      one stamp per warp of the thread block. Accesses of the warp with a lower stamp
              happened before one of the arrivals.
    known     what single threads that arrived knew in addition to `seen` (knowledge.py)
    arrived   the warps that have arrived
    synced    the warps that have arrived and wait
    waiting   the groups of lanes that wait
    opened    whether the barrier has opened
    """

    threads: int
    site: Site
    seen: np.ndarray
    arrived: list[int] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)
    waiting: list[Group] = field(default_factory=list)
    opened: bool = False
    known: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Meeting:
    """A warp collective whose lanes are in several groups, until all lanes have arrived.

    lanes     which of the 32 lanes of the warp have arrived
    values    the operands, one array of shape (32,) per operand
    groups    the groups of the lanes that have arrived
    results   the results; None until the last lane arrives
    """

    lanes: np.ndarray = field(default_factory=lambda: np.zeros(WARP, bool))
    values: list[np.ndarray] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    results: Any = None
