"""One sequence over several devices: attention whose keys and values, or queries, travel in a ring.

Each rank of a process group holds its rows of Q and its columns of K and V. In every step a rank
computes attention of the rows and columns that it has, while the travelling part goes to the next
rank. ``fa_numba.torch.ring_attention`` is the public function for it, and
``fa_numba.io_model.ring`` returns the bytes in closed form.

============== =====================================================================================
travels        what moves
============== =====================================================================================
"kv"           K and V move; Q, O and L stay. This is FlashAttention-2's order: an output is
               finished where it is (ring attention, arXiv 2310.01889)
"q"            Q moves, followed by O and L; K and V stay. This is FlashAttention-1's order
============== =====================================================================================

============== =====================================================================================
module         what it contains
============== =====================================================================================
``schedule``   which rank holds and computes what, in plain Python
``visible``    which rows see which columns, with a window or lengths, and where the parts stop
``parts``      one result from the results of several parts
``link``       messages over torch.distributed
``passes``     the forward and the backward pass
``agreement``  comparison of the ranks' arguments before a call
``call``       checks of a call
============== =====================================================================================

torch is not imported here. The caller has imported it, and it is taken from ``sys.modules``.
"""

from fa_numba.ring.link import LinkBytes, count_link
from fa_numba.ring.schedule import TRAVELS, Work, owner_at, rows_of, work

__all__ = ["TRAVELS", "LinkBytes", "Work", "count_link", "owner_at", "rows_of", "work"]
