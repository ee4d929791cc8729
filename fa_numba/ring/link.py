"""What a rank sends to the next and receives from the one before, over torch.distributed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass
class LinkBytes:
    """Bytes that a rank has sent and received."""

    sent: int = 0
    received: int = 0


# Fills that a copy between GPUs has ahead of the next kernel.
LEAD = 8

_counted: ContextVar[LinkBytes | None] = ContextVar("fa_numba_link_bytes", default=None)


@contextlib.contextmanager
def count_link() -> Iterator[LinkBytes]:
    """Count the bytes of the tensors that this rank gives to send and to receive inside.

    Yields a ``LinkBytes``. What ranks agree on before a call, some dozens of bytes, is not counted.
    A backward pass counts with its forward pass, whenever it runs.
    """
    counted = LinkBytes()
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def counter() -> LinkBytes | None:
    """The counter of the code around, if there is one."""
    return _counted.get()


@dataclass
class Exchange:
    """A message on its way out and one on its way in; ``wait`` gives the second."""

    link: Link
    hop: int
    works: Sequence[Any]
    sent: tuple[Any, ...] = ()
    received: tuple[Any, ...] = ()

    def wait(self) -> tuple[Any, ...]:
        """What came in; a GPU's stream waits, a CPU's caller. RuntimeError after the timeout."""
        try:
            for each in self.works:
                each.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.link.rank} of {self.link.ranks}: the exchange with ranks "
                f"{self.link.at(-self.hop)} and {self.link.at(self.hop)} of the ring did not come "
                f"to an end; one of them has failed or is late ({error})"
            ) from error
        # Kept until here: memory that is read or written meanwhile belongs to nobody else.
        self.sent, self.works = (), ()
        return self.received


class Link:
    """The ring of a group, seen from this rank; ``counted`` takes the bytes, if given."""

    def __init__(self, group: Any, counted: LinkBytes | None = None):
        dist = sys.modules["torch"].distributed
        self.group, self.counted = group, counted
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.before = self.at(-1)

    def at(self, hop: int) -> int:
        """The rank so many further in the ring."""
        return (self.rank + hop) % self.ranks

    def exchange(self, sent: Sequence[Any], received: Sequence[Any], hop: int = 1) -> Exchange:
        """Send contiguous tensors ``hop`` ranks on, to the next rank, and receive others from as
        many before; either may be none.

        On a GPU what the current stream has begun is done first; what it gets after this call runs
        meanwhile, and begins after the copy has: a kernel that takes every multiprocessor until its
        end would leave it none. Nothing tells that the copy has begun, so a few fills of one
        element, some microseconds each, are waited for beside it.
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
        current, (side, lead) = torch.cuda.current_stream(device), _side_of(torch, device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            works = dist.batch_isend_irecv(operations)
            for _ in range(LEAD):
                lead.zero_()
        current.wait_stream(side)
        return Exchange(self, hop, works, *given)

    def met(self, like: Any) -> None:
        """Bring NCCL's ranks together once: its first messages need all, and some send none."""
        torch = sys.modules["torch"]
        dist = torch.distributed
        key = self.group if self.group is not None else dist.group.WORLD
        if like.is_cuda and self.ranks > 1 and key not in _met:
            dist.all_reduce(torch.zeros((1,), dtype=torch.float32, device=like.device), group=key)
            _met.add(key)


_met: set[Any] = set()
_side: dict[Any, tuple[Any, Any]] = {}


def _side_of(torch: Any, device: Any) -> tuple[Any, Any]:
    """The stream on which exchanges are asked for and the element to fill there, one a GPU."""
    if device not in _side:
        _side[device] = torch.cuda.Stream(device), torch.empty(1, device=device)
    return _side[device]
