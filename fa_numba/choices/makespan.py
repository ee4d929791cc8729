"""The makespan of a launch: the time until its last thread block ends."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def makespan(blocks: Iterable[tuple[int, float]], resident: int) -> float:
    """Return the time until the last of several thread blocks ends.

    Thread blocks begin in order, and each begins as soon as fewer than ``resident`` others run.
    ``blocks`` yields pairs (number of equal thread blocks, time of each) in the order in which they
    begin. The unit of time is the caller's.
    """
    free = [0.0] * resident
    for count, each in blocks:
        if count > resident and free[0] == max(free):  # complete rounds of resident blocks
            free = [free[0] + count // resident * each] * resident
            count %= resident
        for _ in range(count):
            heapq.heapreplace(free, free[0] + each)
    return max(free)
