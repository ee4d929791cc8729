"""Messages of a ring, which each rank sends to a later rank and receives from an earlier rank.

The messages are sent by torch.distributed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass
class LinkBytes:
    """Number of bytes that a rank has sent and received.

    Attributes
    ----------
    sent : int
        Number of bytes sent.
    received : int
        Number of bytes received.
    """

    sent: int = 0
    received: int = 0


# Number of one-element fills between the start of a copy between GPUs and the next kernel. They
# take some microseconds, in which the copy starts.
FILLS = 8

_counted: ContextVar[LinkBytes | None] = ContextVar("fa_numba_link_bytes", default=None)


@contextlib.contextmanager
def count_link() -> Iterator[LinkBytes]:
    """Count the bytes that this rank sends and receives in a ``with`` block.

    It is a context manager around calls of ``ring_attention``. A call in the block also counts the
    bytes of its backward pass, even if the backward pass runs after the block. The comparison of
    arguments before each call, some dozens of bytes, is not counted.

    Yields
    ------
    LinkBytes
        Numbers of bytes that were sent and received so far. They grow with each call.

    See Also
    --------
    fa_numba.io_model.ring : Return the bytes in closed form.

    Examples
    --------
    >>> from fa_numba.ring import count_link
    >>> with count_link() as counted:
    ...     pass  # calls of fa_numba.torch.ring_attention
    >>> counted
    LinkBytes(sent=0, received=0)
    """
    counted = LinkBytes()
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def counter() -> LinkBytes | None:
    """Return the counter of the enclosing ``count_link``, or None."""
    return _counted.get()


@dataclass
class Exchange:
    """A message that is being sent and a message that is being received.

    ``works`` are the running operations of torch.distributed. ``sent`` and ``received`` are the
    tensors of the two messages. ``hop`` is the distance in the ring to the other rank of each
    message. ``wait`` returns the received tensors.
    """

    link: Link
    hop: int  # distance of both ranks in the ring, see ``Link.exchange``
    works: Sequence[Any]  # the running operations of torch.distributed
    sent: tuple[Any, ...] = ()
    received: tuple[Any, ...] = ()

    def wait(self) -> tuple[Any, ...]:
        """Wait for both messages, and return the received tensors.

        On a GPU, the current stream waits. On a CPU, the caller waits. RuntimeError is raised after
        the timeout of the group.
        """
        try:
            for each in self.works:
                each.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.link.rank} of {self.link.ranks}: the exchange with ranks "
                f"{self.link.at(-self.hop)} and {self.link.at(self.hop)} of the ring did not "
                f"complete in time; another rank has failed or is late ({error})"
            ) from error
        # The tensors are kept until here, so that their memory is not reused during the exchange.
        self.sent, self.works = (), ()
        return self.received


class Link:
    """The ring of a process group, seen from this rank.

    ``counted`` counts the bytes that this rank sends and receives, unless it is None.
    """

    def __init__(self, group: Any, counted: LinkBytes | None = None):
        dist = sys.modules["torch"].distributed
        self.group, self.counted = group, counted
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.before = self.at(-1)

    def at(self, hop: int) -> int:
        """Return the rank that is ``hop`` positions further in the ring."""
        return (self.rank + hop) % self.ranks

    def exchange(self, sent: Sequence[Any], received: Sequence[Any], hop: int = 1) -> Exchange:
        """Start to send tensors to a later rank and to receive tensors from an earlier rank.

        The ranks are ``hop`` positions after and before this rank in the ring. ``received`` are the
        tensors to which the message is written. All tensors must be contiguous. Either list may be
        empty.

        On a GPU, the exchange runs on a second stream. It starts after the work that is already in
        the current stream. Kernels that are launched after this call run at the same time as the
        exchange, but should start a little later. Otherwise a kernel could take all
        multiprocessors, and leave none for the exchange. CUDA does not report that the exchange has
        started. The current stream therefore waits for a few small operations, which fill one
        element in the second stream and take some microseconds each.
        """
        torch = sys.modules["torch"]
        dist = torch.distributed
        if not sent and not received:
            return Exchange(self, hop, ())
        after, before = (self.at(n) for n in (hop, -hop))
        if self.group is not None:
            after, before = (dist.get_global_rank(self.group, rank) for rank in (after, before))
        operations = [dist.P2POp(dist.isend, x, after, self.group) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, before, self.group) for x in received]
        if self.counted is not None:
            self.counted.sent += sum(x.numel() * x.element_size() for x in sent)
            self.counted.received += sum(x.numel() * x.element_size() for x in received)
        given = tuple(sent), tuple(received)
        any_of_them = (*sent, *received)[0]
        if not any_of_them.is_cuda:
            return Exchange(self, hop, dist.batch_isend_irecv(operations), *given)
        device = any_of_them.device
        current, (side, element) = torch.cuda.current_stream(device), _side_of(torch, device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            works = dist.batch_isend_irecv(operations)
            for _ in range(FILLS):
                element.zero_()
        current.wait_stream(side)
        return Exchange(self, hop, works, *given)

    def connect(self, like: Any) -> None:
        """Run one small collective operation of NCCL, once per group.

        The first operation of NCCL needs all ranks. With a mask, some ranks send no message and
        would not take part. ``like`` is a tensor on the device of this rank. For a tensor on a CPU,
        this method does nothing.
        """
        torch = sys.modules["torch"]
        dist = torch.distributed
        key = self.group if self.group is not None else dist.group.WORLD
        if like.is_cuda and self.ranks > 1 and key not in _connected:
            dist.all_reduce(torch.zeros((1,), dtype=torch.float32, device=like.device), group=key)
            _connected.add(key)


_connected: set[Any] = set()
_side: dict[Any, tuple[Any, Any]] = {}


def _side_of(torch: Any, device: Any) -> tuple[Any, Any]:
    """Return the CUDA stream for the messages of a GPU, and a tensor with one element.

    ``Link.exchange`` sends messages on this stream. It also fills the tensor a few times, which
    gives a copy the time to start. Each GPU has one such stream and one such tensor. They are made
    at the first call.
    """
    if device not in _side:
        _side[device] = torch.cuda.Stream(device), torch.empty(1, device=device)
    return _side[device]
