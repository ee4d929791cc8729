"""Groups of threads that run together, and what they wait for.

A thread block begins as one group. Several thread blocks that run at once also begin as one group.
If lanes have to wait for other lanes of their group, they become a group of their own and the
thread block begins again; see run.py. The warps and lanes of a group do not change while a thread
block runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import greenlet

from .checks import PITCH, SHIFT, WARP
from .errors import Index3
from .lanes import Mask

FULL = 0xFFFFFFFF

READY, AT_BARRIER, AT_NAMED, AT_MBARRIER, AT_WARP, DONE, AT_GRID = range(7)
Site = tuple[int, int]  # a call in kernel code: id of the code object, offset of the instruction


class OneByOne(BaseException):
    """Raised if thread blocks that run at once need to run alone: they begin again one by one."""


class Parting(BaseException):
    """Raised if lanes wait for others of their group: the thread block then begins again."""

    def __init__(self, lanes: np.ndarray) -> None:
        self.lanes = lanes  # bool a lane of the group


def alike(values: np.ndarray) -> Any:
    """Return one number if all values are the same, else the values."""
    return int(values[0]) if (values == values[0]).all() else values


def warps_of(tids: np.ndarray) -> np.ndarray:
    """Return the warps of threads, which must be in ascending order."""
    warps = tids // WARP
    first = np.ones(warps.size, bool)
    np.not_equal(warps[1:], warps[:-1], out=first[1:])
    return warps[first]


class Group:
    """Lanes that run together. `tids` are their threads, in ascending order.

    If several thread blocks run at once, `blocks` is the number of each lane's thread block, from
    0. A thread's number is its number in the thread block plus `PITCH` for each thread block
    before.
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
        # Where lanes stand in arrays of whole warps, and whether they are whole.
        self.slot = place * WARP + tids % WARP
        self.whole = self.count == WARP * self.warps.size
        self.present = np.zeros(WARP * self.warps.size, bool)
        self.present[self.slot] = True
        self.full_arrays: dict[Any, np.ndarray] = {}
        self._crossed: dict[int, np.ndarray] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the state of the lanes, as a new thread block begins."""
        self.state = READY
        self.site: Site = (0, 0)
        self.operation = ""
        self.value: Any = None
        self.mask: Mask = None
        self.outer: list[Mask] = []
        self.run: greenlet | None = None
        self.exits: Any = None  # of the kernel itself
        self.committed = np.zeros(self.count, np.int64)
        self.copies: list[Copy] = []

    def full(self, value: int) -> np.ndarray:
        """Return an array with `value` for every lane; it is cached."""
        known = self.full_arrays.get(value)
        if known is None:
            if len(self.full_arrays) > 4096:
                self.full_arrays.clear()
            known = self.full_arrays[value] = np.full(self.count, value, np.int64)
        return known

    def crossed(self, bits: int) -> np.ndarray:
        """Return for each lane the lane whose number differs in these bits; it is cached."""
        known = self._crossed.get(bits)
        if known is None:
            known = self._crossed[bits] = np.arange(self.count) ^ bits
        return known

    def lanes(self, value: Any) -> np.ndarray:
        """Return an integer as an array over the lanes."""
        return value if value.__class__ is np.ndarray else self.full(int(value))

    def in_warps(self, value: Any, fill: Any = 0) -> np.ndarray:
        """Return a value of every lane as an array (warps, 32)."""
        if value.__class__ is not np.ndarray:
            value = np.full(self.count, value)
        if not self.whole:
            padded = np.full(self.present.size, fill, value.dtype)
            padded[self.slot] = value
            value = padded
        return value.reshape(-1, WARP)

    def of_warps(self, values: np.ndarray) -> np.ndarray:
        """Return an array (warps, 32) as an array over the lanes."""
        flat = values.reshape(-1)
        return flat if self.whole else flat[self.slot]


@dataclass(slots=True, eq=False)
class Copy:
    """An asynchronous copy of every lane in `pending`, in the lane's group of copies `number`."""

    dst: Any
    e: np.ndarray
    n: int
    read: Callable[[np.ndarray], np.ndarray]
    pending: np.ndarray
    number: np.ndarray


@dataclass(slots=True, eq=False)
class NamedBarrier:
    """A named barrier of `threads` threads, from its first arrival until it opens.

    What warp w did at stamps below `seen[w]` happened before an arrival. `known` is what single
    threads that arrived knew in addition (mbarriers.py).
    """

    threads: int
    site: Site
    seen: np.ndarray
    arrived: list[int] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)  # those of them that wait
    waiting: list[Group] = field(default_factory=list)
    opened: bool = False
    known: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Meeting:
    """Lanes of a warp, in several groups, that have come to one collective."""

    lanes: np.ndarray = field(default_factory=lambda: np.zeros(WARP, bool))
    values: list[np.ndarray] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    results: Any = None
