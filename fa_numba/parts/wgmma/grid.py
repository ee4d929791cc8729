"""The position of a thread in its block on Hopper's tensor cores. The module also exports functions
of ``parts.grid``.
"""

from fa_numba.device import cuda, int32, uint32
from fa_numba.parts.grid import make_query_rows as make_query_rows
from fa_numba.parts.grid import member as member
from fa_numba.parts.lanes import FULL_WARP
from fa_numba.parts.namespace import part
from fa_numba.parts.records import GroupThread
from fa_numba.tiling.wgmma import GROUP


@part
def make_thread(spec):
    """Make ``thread()``, which returns the position of a consumer thread as a ``GroupThread``.

    ``w`` is the consumer warpgroup. ``ty`` is the thread's first row among the warpgroup's 64 rows,
    and ``tx`` is the number of the thread among the 4 threads of a row.
    """
    return _position(spec.first_consumer, shuffled=True)


@part
def make_transposed_thread(spec):
    """Make ``transposed_thread()``, which returns the position of a consumer thread in the
    transposed S, as a ``GroupThread``.

    ``w`` is the consumer warpgroup. ``tx`` is the thread's first column among the 64 columns of S
    that a warpgroup computes, and ``ty`` decides its rows. ``_position`` explains how ``w`` is
    computed. In kernels whose two consumers share their columns, ``w`` does not pass through a
    shuffle, because these kernels were faster without it.
    """
    position = _position(GROUP, shuffled=not spec.wide)

    def transposed_thread():
        own = position()
        return GroupThread(own.tx, own.ty, own.w)

    return transposed_thread


@part
def _position(first, shuffled):
    """Make ``position()``, which returns the position of a consumer thread as a ``GroupThread``.

    ``make_thread`` explains the fields. ``first`` is the number of the first consumer thread. If
    ``shuffled`` is true, the number of the warpgroup passes through a warp shuffle. The shuffle
    does not change the number, but tells the assembler that the number is equal in all lanes of a
    warp. The assembler then computes the addresses of operands in uniform registers, and starts the
    products without copies between registers. The forward kernel of FA-2 takes 1.05 times as long
    without it (tests/data/h200_trials.csv).
    """

    def position():
        own = uint32(uint32(cuda.threadIdx.x) - first)
        within = uint32(own % uint32(GROUP))
        lane = uint32(own % uint32(32))
        ty = uint32(within // uint32(32) * 16 + lane // uint32(4))
        w = uint32(own // uint32(GROUP))
        if shuffled:
            w = uint32(cuda.shfl_sync(FULL_WARP, int32(w), 0))
        return GroupThread(ty, uint32(lane % uint32(4)), w)

    return position
