"""Ring attention: one sequence over several devices, which send K and V, or Q, round a ring.

Each rank of a process group has a part of the sequence: rows of Q, and columns (rows of K and V).
One part stays, and the other part travels. In every step, a rank computes attention of the rows and
columns that it has, while the travelling part goes to the next rank.
``fa_numba.torch.ring_attention`` is the public function. ``fa_numba.io_model.ring`` returns the
number of bytes that are sent.

============== =====================================================================================
travels        what moves
============== =====================================================================================
"kv"           K and V move; Q, O and L stay (ring attention, arXiv 2310.01889). This is
               FlashAttention-2's order: an output is finished on its own rank
"q"            Q moves, followed by O and L; K and V stay. This is FlashAttention-1's order
============== =====================================================================================

============== =====================================================================================
module         what it contains
============== =====================================================================================
``schedule``   which rank holds and computes what, in plain Python
``visible``    which rows see which columns with a window or lengths, and where parts stop
``parts``      sums of the results over several parts
``link``       messages over torch.distributed
``passes``     the forward and the backward pass
``agreement``  comparison of the ranks' arguments before a call
``call``       checks of a call
============== =====================================================================================

This package does not import torch. The caller has imported torch, and the package takes it from
``sys.modules``.
"""

from fa_numba.ring.link import LinkBytes, count_link
from fa_numba.ring.schedule import TRAVELS, Work, owner_at, rows_of, work

__all__ = ["TRAVELS", "LinkBytes", "Work", "count_link", "owner_at", "rows_of", "work"]
