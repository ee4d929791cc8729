"""The position of a thread in its block on CUDA cores. The module also exports functions of
``parts.grid``.
"""

from fa_numba.device import cuda, uint32
from fa_numba.parts.grid import head_after as head_after
from fa_numba.parts.grid import make_head as make_head
from fa_numba.parts.grid import make_heads_of_group as make_heads_of_group
from fa_numba.parts.grid import make_key_rows as make_key_rows
from fa_numba.parts.grid import make_query_head as make_query_head
from fa_numba.parts.grid import make_query_rows as make_query_rows
from fa_numba.parts.grid import make_row_tile as make_row_tile
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Thread


@part
def make_thread(spec):
    """Make ``thread()``, which returns this thread's position (ty, tx) in a tile.

    TX threads share the rows ty + i TY, and tx is the number of a thread among these TX threads. If
    ``spec.lane_step`` is 2, lanes 2 n and 2 n + 1 have equal tx and different ty. Both lanes then
    read the same 16 bytes of K, and the load takes two wavefronts instead of four.
    """
    TX, STEP = spec.tx_count, spec.lane_step

    def thread():
        lane = uint32(cuda.threadIdx.x)
        tx = lane // uint32(STEP) % uint32(TX)
        ty = lane // uint32(STEP * TX) * uint32(STEP) + lane % uint32(STEP)
        return Thread(uint32(ty), uint32(tx))

    return thread
