"""The part of torch.distributed that fa_numba asks for: ranks are threads, of which one runs at a
time, messages go through queues in memory.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from contextvars import copy_context
from types import SimpleNamespace

import numpy as np


class Waiting(RuntimeError):
    """What torch raises where nobody comes within the group's timeout: here, where all who are
    left wait for each other.
    """


class Distributed:
    """``torch.distributed`` for ``ranks`` threads, made by ``run``.

    ``sent`` has (rank, to, bytes) of every ``isend``, ``asked`` how often ranks agreed on the host.
    ``beside`` has the groups of backend gloo that were made, by the group with the same ranks.
    """

    def __init__(self, ranks, backend="gloo"):
        self.ranks, self.backend = ranks, backend
        self.own, self.sent, self.asked = threading.local(), [], 0
        self.turn = threading.Condition()
        self.messages, self.gathered, self.failed = {}, {}, False
        self.left, self.waits, self.beside = ranks, {}, {}
        self.group = SimpleNamespace(WORLD=object())
        self.ReduceOp = SimpleNamespace(MAX=lambda every: np.max(every, axis=0))

    def is_available(self):
        return True

    def is_initialized(self):
        return hasattr(self.own, "rank")

    def get_rank(self, group=None):
        return self.own.rank

    def get_world_size(self, group=None):
        return self.ranks

    def get_backend(self, group=None):
        return "gloo" if group in self.beside.values() else self.backend

    def get_process_group_ranks(self, group):
        assert group is not None
        return [group, *range(self.ranks)]

    def new_group(self, ranks, *, backend, timeout, use_local_synchronization):
        assert (backend, timeout, use_local_synchronization) == ("gloo", None, True)
        return self.beside.setdefault(ranks[0], f"gloo group {len(self.beside)}")

    def P2POp(self, operation, tensor, peer, group):
        return operation, tensor, peer

    def isend(self, tensor, to):
        assert tensor.values.flags.c_contiguous and to != self.own.rank
        self.sent.append((self.own.rank, to, tensor.values.nbytes))
        box = self.messages.setdefault((self.own.rank, to), [])
        box.append((tensor.values, tensor.values.copy()))
        self.turn.notify_all()
        return lambda: None

    def irecv(self, tensor, source):
        assert tensor.values.flags.c_contiguous and source != self.own.rank
        box, rank = self.messages.setdefault((source, self.own.rank), []), self.own.rank
        at = self.own.received.setdefault(source, 0)
        self.own.received[source] += 1

        def wait():
            self._until(lambda: len(box) > at, f"rank {rank} waits for {source}")
            memory, values = box[at]
            assert values.shape == tensor.values.shape and values.dtype == tensor.values.dtype
            assert np.array_equal(memory, values, equal_nan=True), "changed while it was sent"
            tensor.values[...] = values

        return wait

    def batch_isend_irecv(self, operations):
        return [SimpleNamespace(wait=how(x, peer)) for how, x, peer in operations]

    def all_reduce(self, own, op, group=None, async_op=False):
        assert self.get_backend(group) == "gloo"

        def wait():
            own.values[...] = op(everyone())

        everyone = self._asked(own.values.copy())
        return SimpleNamespace(wait=wait) if async_op else wait()

    def all_gather_object(self, every, own, group=None):
        assert self.get_backend(group) == "gloo"
        every[:] = self._asked(copy.deepcopy(own))()

    def _asked(self, own):
        """Says ``own``; gives a function that waits for what all say."""
        self.asked += 1
        turn, rank = self.own.gathered, self.own.rank
        self.own.gathered += 1
        found = self.gathered.setdefault(turn, {})
        found[rank] = own
        self.turn.notify_all()

        def everyone():
            self._until(lambda: len(found) == self.ranks, f"rank {rank} waits for all")
            return [found[n] for n in range(self.ranks)]

        return everyone

    def _until(self, done, what):
        self.waits[self.own.rank] = done
        self._look_for_one_who_works()
        self.turn.wait_for(lambda: done() or self.failed)
        del self.waits[self.own.rank]
        if not done():
            raise Waiting(f"timed out: {what}")

    def _look_for_one_who_works(self):
        """A rank that has failed sends nothing more, and none does where all wait."""
        if len(self.waits) == self.left and not any(done() for done in self.waits.values()):
            self.failed = True
        if self.failed:
            self.turn.notify_all()

    def run(self, work):
        """``work(rank)`` in every rank: what each has returned, or the exception it raised."""
        results = [None] * self.ranks

        def rank_thread(rank):
            with self.turn:
                self.own.rank, self.own.received, self.own.gathered = rank, {}, 0
                try:
                    results[rank] = work(rank)
                except Exception as error:
                    results[rank], self.failed = error, True
                self.left -= 1
                self._look_for_one_who_works()

        contexts = [copy_context() for _ in results]
        threads = [
            threading.Thread(target=context.run, args=(rank_thread, rank), daemon=True)
            for rank, context in enumerate(contexts)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
            assert not each.is_alive(), "a rank hangs"
        return results


@contextlib.contextmanager
def ranks_of(torch, ranks, **facts):
    """``torch.distributed`` of the stand-in for torch inside; yields it."""
    torch.distributed = Distributed(ranks, **facts)
    try:
        yield torch.distributed
    finally:
        del torch.distributed
