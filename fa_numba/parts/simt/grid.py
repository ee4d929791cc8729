"""Where a thread is in its block, on CUDA cores."""

from fa_numba.device import cuda, uint32
from fa_numba.parts.grid import *  # noqa: F403
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Thread


@part
def make_thread(spec):
    """``thread()``: place tx of the TX threads that share rows ty + i TY.

    Lanes 2 n and 2 n + 1 have one tx, 2 n and 2 n + 2 one ty: a 16-byte read of shared memory is
    made in two parts, not in four, where one of the two neighbours reads the same place.
    """
    TX, STEP = spec.tx_count, spec.lane_step

    def thread():
        lane = uint32(cuda.threadIdx.x)
        tx = lane // uint32(STEP) % uint32(TX)
        ty = lane // uint32(STEP * TX) * uint32(STEP) + lane % uint32(STEP)
        return Thread(uint32(ty), uint32(tx))

    return thread
