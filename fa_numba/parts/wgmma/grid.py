"""Where a thread is in its block, on Hopper's tensor cores."""

from fa_numba.device import cuda, int32, uint32
from fa_numba.parts.grid import make_query_rows as make_query_rows
from fa_numba.parts.grid import member as member
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.namespace import part
from fa_numba.parts.records import GroupThread
from fa_numba.tiling.wgmma import GROUP


@part
def make_thread(spec):
    """``thread()``: a consumer's warpgroup, and where in its 64 rows this thread's part begins."""

    def thread():
        own = uint32(uint32(cuda.threadIdx.x) - GROUP)
        within = uint32(own % uint32(GROUP))
        lane = uint32(own % uint32(32))
        ty = uint32(within // uint32(32) * 16 + lane // uint32(4))
        w = uint32(own // uint32(GROUP))
        return GroupThread(ty, uint32(lane % uint32(4)), w)

    return thread


@part
def make_transposed_thread(spec):
    """``transposed_thread()``: ``thread`` of ST: where in 64 columns of S, and in their rows.

    The warpgroup is by a shuffle: the assembler sees that it is one for a warp, and computes
    operands' places once, in uniform registers. Not so where consumers share columns: it was timed.
    """
    thread, SHUFFLED = make_thread(spec), not spec.wide

    def transposed_thread():
        own = thread()
        w = uint32(cuda.shfl_sync(FULL_WARP, int32(own.w), 0)) if SHUFFLED else own.w
        return GroupThread(own.tx, own.ty, w)

    return transposed_thread
