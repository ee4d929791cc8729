"""Times of calls on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import cuda

from fa_numba.device import select


def time_ms(
    function: Callable[[], object],
    *,
    repeats: int = 20,
    warmup: int = 3,
    flush_l2: bool = True,
) -> list[float]:
    """Return the milliseconds of each of ``repeats`` calls, by events on the default stream.

    ``warmup`` calls are made first and not timed. ``flush_l2`` overwrites an array twice before
    each call, outside the timed interval. The array has four times the size of the L2 cache, and at
    least 1 GiB. During this time the host enqueues the call, so that the time of the call's Python
    code does not count.
    """
    scratch = None
    if flush_l2:
        scratch = cuda.device_array(max(4 * select.describe()["l2_bytes"], 2**30), np.uint8)
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        if scratch is not None:
            for _ in range(2):
                cuda.cudadrv.driver.device_memset(scratch, 0, scratch.size)
        start, stop = cuda.event(), cuda.event()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(float(cuda.event_elapsed_time(start, stop)))
    return times
