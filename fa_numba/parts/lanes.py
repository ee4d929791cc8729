"""Sums and maxima over several lanes of a warp.

The functions combine the values of ``lanes`` lanes, a power of two. Neighbours among these lanes
have lane numbers that differ by ``step``. Every lane gets the result. All lanes of the warp must
call the function together.
"""

from fa_numba.device import cuda, device_function
from fa_numba.intrinsics.arithmetic import maximum

FULL_WARP = 0xFFFFFFFF


@device_function
def sum_of_lanes(x, lanes, step):
    """Return the sum of x over ``lanes`` lanes of the warp that are ``step`` lanes apart."""
    lane = lanes // 2 * step
    while lane >= step:
        x += cuda.shfl_xor_sync(FULL_WARP, x, lane)
        lane //= 2
    return x


@device_function
def max_of_lanes(x, lanes, step):
    """Return the maximum of x over ``lanes`` lanes of the warp that are ``step`` lanes apart."""
    lane = lanes // 2 * step
    while lane >= step:
        x = maximum(x, cuda.shfl_xor_sync(FULL_WARP, x, lane))
        lane //= 2
    return x
