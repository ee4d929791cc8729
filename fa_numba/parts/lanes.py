"""What lanes of a warp have between them: so many ``lanes``, ``step`` apart; each gets it."""

from fa_numba.device import cuda, device_function
from fa_numba.intrinsics.arithmetic import maximum

FULL_WARP = 0xFFFFFFFF


@device_function
def sum_of_lanes(x, lanes, step):
    lane = lanes // 2 * step
    while lane >= step:
        x += cuda.shfl_xor_sync(FULL_WARP, x, lane)
        lane //= 2
    return x


@device_function
def max_of_lanes(x, lanes, step):
    lane = lanes // 2 * step
    while lane >= step:
        x = maximum(x, cuda.shfl_xor_sync(FULL_WARP, x, lane))
        lane //= 2
    return x
