"""The threads and warps of a block, and the named barriers that warps come to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import greenlet

from .errors import Index3
from .shared_memory import SharedArray

FULL = 0xFFFFFFFF
WARP = 32

READY, AT_BARRIER, AT_NAMED, AT_WARP, DONE = range(5)
Site = tuple[int, int]  # a call in kernel code: id of the code object, offset of the instruction


class Warp:
    """32 threads of a block, their clock and the collectives that some of them wait in.

    What warp w did at stamps below `seen[w]` happened before the present of this one.
    """

    __slots__ = ("index", "lanes", "mask", "start", "several", "seen", "groups")

    def __init__(self, index: int) -> None:
        self.index = index
        self.lanes: list[Thread] = []
        self.mask = 0
        self.start = self.several = 0
        self.seen: list[int] = []
        self.groups: dict[tuple[str, int, Site], dict[int, Any]] = {}


class Thread:
    """One CUDA thread: its place, what it waits for, and its copies in flight."""

    __slots__ = (
        "x", "y", "z", "tid", "lane", "warp", "state", "site", "operation", "value", "run",
        "open", "groups",
    )  # fmt: skip

    def __init__(self, tid: int, block: Index3, warp: Warp) -> None:
        self.x = tid % block[0]
        self.y = tid // block[0] % block[1]
        self.z = tid // (block[0] * block[1])
        self.tid, self.lane, self.warp = tid, tid % WARP, warp
        self.state = READY
        self.site: Site = (0, 0)
        self.operation = ""
        self.value: Any = None
        self.run: greenlet
        self.open: list[tuple[SharedArray, int, int, Callable[[], list[Any]]]] = []
        self.groups: deque[list[tuple[SharedArray, int, int, Callable[[], list[Any]]]]] = deque()


class NamedBarrier:
    """A named barrier of `threads` threads from its first arrival until it opens.

    What warp w did at stamps below `seen[w]` happened before an arrival.
    """

    __slots__ = ("threads", "site", "arrived", "synced", "waiting", "seen", "opened")

    def __init__(self, threads: int, site: Site, seen: list[int]) -> None:
        self.threads, self.site, self.seen = threads, site, seen
        self.arrived: list[Warp] = []
        self.synced: list[Warp] = []  # those of them that wait
        self.waiting: list[Thread] = []
        self.opened = False
