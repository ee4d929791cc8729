"""Where a thread is in its block, on CUDA cores."""

from fa_numba.device import cuda, uint32
from fa_numba.parts.grid import *  # noqa: F403
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Thread


@part
def make_thread(spec):
    """``thread()``: place tx of the TX threads that share rows ty + i TY."""
    TX = spec.tx_count

    def thread():
        tx = uint32(cuda.threadIdx.x) % uint32(TX)
        ty = uint32(cuda.threadIdx.x) // uint32(TX)
        return Thread(ty, tx)

    return thread
