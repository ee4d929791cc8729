"""The makespan of a launch: the time until its last thread block ends."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def makespan(blocks: Iterable[tuple[int, float]], resident: int) -> float:
    """Return the time until the last of several thread blocks ends.

    At most ``resident`` thread blocks run at the same time. Thread blocks begin in their order. A
    thread block begins as soon as fewer than ``resident`` thread blocks run. ``blocks`` yields
    pairs in this order: a number of thread blocks that take equally long, and the time of one of
    these thread blocks. The result has the unit of these times.
    """
    free = [0.0] * resident
    for count, each in blocks:
        if count > resident and free[0] == max(free):  # complete rounds of resident blocks
            free = [free[0] + count // resident * each] * resident
            count %= resident
        for _ in range(count):
            heapq.heapreplace(free, free[0] + each)
    return max(free)
