"""When the last of some blocks ends, which multiprocessors take as they become free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def makespan(blocks: Iterable[tuple[int, float]], resident: int) -> float:
    """When the last block ends, if each begins in its turn as soon as fewer than ``resident`` run.

    ``blocks`` are (how many, how long each takes) in the order in which they begin; a
    multiprocessor holds one or several.
    """
    free = [0.0] * resident
    for count, each in blocks:
        if count > resident and free[0] == max(free):  # rounds of as many as are resident
            free = [free[0] + count // resident * each] * resident
            count %= resident
        for _ in range(count):
            heapq.heapreplace(free, free[0] + each)
    return max(free)
