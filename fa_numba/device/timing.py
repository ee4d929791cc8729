"""Measurement of the time of calls on the GPU."""

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
    """Return the time of each of ``repeats`` calls in milliseconds.

    Events on the default stream measure the time. The first ``warmup`` calls are not timed. With
    ``flush_l2``, an array is overwritten twice before each call, outside of the timed interval. The
    array has four times the size of the L2 cache, and at least 1 GiB. While the GPU overwrites it,
    the host enqueues the call. The time of the call's Python code is therefore not measured.
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
