"""The place of a thread in its block, on CUDA cores."""

from functools import cache

from fa_numba.device import cuda, device_function, uint32


@cache
def make_thread(spec):
    """``thread()``: (tx, ty), place tx of the TX threads that share rows ty + i TY."""
    TX = spec.tx_count

    @device_function
    def thread():
        tx = uint32(cuda.threadIdx.x) % uint32(TX)
        ty = uint32(cuda.threadIdx.x) // uint32(TX)
        return tx, ty

    return thread
