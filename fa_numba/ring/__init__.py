"""A sequence over several devices: attention whose keys and values, or queries, travel.

Each rank of a group holds its rows of Q and its columns of K and V, and the ranks stand in a ring.
In every step a rank computes attention of the rows and columns that it has at hand, while what
travels goes on to the next rank.

    travels="kv"   K and V go round, Q, O and L stay: FlashAttention-2's order, an output finished
                   where it lies (ring attention, arXiv 2310.01889)
    travels="q"    Q goes round and O, L follow it, K and V stay: FlashAttention-1's order

``schedule`` says which rank holds and computes what, in plain Python; ``visible`` who sees what
where the sequence has a window or lengths, and from that where what travels stops; ``parts`` makes
one result of several; ``link`` sends and receives over torch.distributed; ``passes`` are the
forward and the backward pass; ``agreement`` asks first whether all ranks mean the same call.
``fa_numba.torch.ring_attention`` is the public function, ``fa_numba.io_model.ring`` has the bytes
in closed form.

torch is not imported here: it is the caller's, in ``sys.modules``.
"""

from fa_numba.ring.link import LinkBytes, count_link
from fa_numba.ring.schedule import TRAVELS, Work, owner_at, rows_of, work

__all__ = ["TRAVELS", "LinkBytes", "Work", "count_link", "owner_at", "rows_of", "work"]
