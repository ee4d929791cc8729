"""The position of a thread in its block on tensor cores. The module also exports functions of
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
from fa_numba.parts.grid import make_rows_of_values as make_rows_of_values
from fa_numba.parts.namespace import part
from fa_numba.parts.records import Thread


@part
def make_thread(spec):
    """Make ``thread()``, which returns the first row of this warp in a tile of S, and the thread's
    position.

    The position is a ``Thread`` record. Its field ``ty`` is the thread's first row. Four lanes
    share a row, and the field ``tx`` is the number of the thread among these lanes.
    """
    ROWS = spec.warp_rows

    def thread():
        tx = uint32(cuda.threadIdx.x) % uint32(4)
        warp_row = uint32(uint32(cuda.threadIdx.x) // uint32(32) * ROWS)
        ty = uint32(warp_row + uint32(cuda.threadIdx.x) % uint32(32) // uint32(4))
        return warp_row, Thread(ty, tx)

    return thread
