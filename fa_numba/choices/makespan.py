"""When the last of some blocks ends, which multiprocessors take as they become free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def makespan(blocks: Iterable[tuple[int, float]], places: int) -> float:
    """When the last block ends, if each begins in its turn at the first place that is free.

    ``blocks`` are (how many, how long each takes) in the order in which they begin; a
    multiprocessor has one place or several.
    """
    free = [0.0] * places
    for count, each in blocks:
        if count > places and free[0] == max(free):  # rounds of all places
            free = [free[0] + count // places * each] * places
            count %= places
        for _ in range(count):
            heapq.heapreplace(free, free[0] + each)
    return max(free)
