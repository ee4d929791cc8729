"""Comparison of the arguments with which the ranks call ``ring_attention``.

The ranks compare their arguments before they send anything else.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any


class Meant:
    """The message of a rank about its call: the arguments, or the error that its checks raised.

    ``call`` maps the names of the arguments to their values. ``failure`` is the error that the
    checks of this rank raised, or None. From these two parameters, two attributes are made. The
    dictionary ``said`` is the message: a copy of ``call``, or the text of the error. The number
    ``word`` is a hash of ``said`` with 62 bits. Ranks compare these hashes first.
    """

    def __init__(self, call: Mapping[str, Any], failure: Exception | None = None):
        self.failure = failure
        self.said = {"error": f"{type(failure).__name__}: {failure}"} if failure else dict(call)
        digest = hashlib.sha256(repr(sorted(self.said.items())).encode()).digest()
        self.word = int.from_bytes(digest[:8], "big") >> 2


class Agreement:
    """A running comparison of the arguments of all ranks.

    Each rank computes a hash of its arguments. One all-reduce on the host, over gloo, computes the
    largest and the smallest hash. If these two are equal, the arguments of all ranks are equal. If
    they differ, the ranks exchange their arguments, and raise an error that names the difference.

    The comparison starts when the object is made, and ends in ``wait``. In the meantime, a rank can
    compute everything that needs no other rank. No GPU waits for the comparison. Every call of
    ``ring_attention`` makes a comparison, because another rank may make a different call than
    before.
    """

    def __init__(self, group: Any, meant: Meant):
        torch = sys.modules["torch"]
        dist = torch.distributed
        self.group, self.meant, self.answered = group, meant, False
        self.most = torch.tensor([meant.word, -meant.word], dtype=torch.int64, device="cpu")
        try:
            self.beside = _on_host(dist, group)
            self.asked = dist.all_reduce(
                self.most, op=dist.ReduceOp.MAX, group=self.beside, async_op=True
            )
        except RuntimeError as error:
            raise self._late(error) from error

    def wait(self) -> None:
        """Wait for the comparison. Raise an error on all ranks if arguments differ, or if checks
        failed on any rank.

        Normally the error is a ValueError. It names the arguments that differ or the checks that
        failed, and the ranks. If the checks of all ranks raised equal errors, each rank raises its
        own error. RuntimeError is raised if a rank does not arrive within the timeout of the group.
        """
        if self.answered:
            return
        dist = sys.modules["torch"].distributed
        word, said = self.meant.word, self.meant.said
        try:
            self.asked.wait()
            if self.most.tolist() == [word, -word]:
                if self.meant.failure is not None:
                    raise self.meant.failure
                self.answered = True
                return
            means: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(means, said, group=self.beside)
        except RuntimeError as error:
            if error is self.meant.failure:
                raise
            raise self._late(error) from error
        raise ValueError(_difference(means)) from self.meant.failure

    def _late(self, error: RuntimeError) -> RuntimeError:
        dist = sys.modules["torch"].distributed
        return RuntimeError(
            f"rank {dist.get_rank(self.group)} of {dist.get_world_size(self.group)}: not all ranks "
            "of the group have called ring_attention in time; another rank has failed or is late "
            f"({error})"
        )


def _difference(means: list[Mapping[str, Any]]) -> str:
    """Return a message that names what differs between the ranks, and on which ranks."""
    errors = {n: x["error"] for n, x in enumerate(means) if "error" in x}
    if errors:
        return "ring_attention failed on some ranks: " + "; ".join(
            f"rank {n}: {error}" for n, error in errors.items()
        )
    found = []
    for name in means[0]:
        values: dict[str, list[int]] = {}
        for n, said in enumerate(means):
            values.setdefault(repr(said[name]), []).append(n)
        if len(values) > 1:
            where = {value: " and ".join(map(str, ranks)) for value, ranks in values.items()}
            each = ", ".join(f"{value} on rank {ranks}" for value, ranks in where.items())
            found.append(f"{name} must be equal on all ranks of the group, got {each}")
    return "; ".join(found)


_hosts: dict[Any, Any] = {}


def _on_host(dist: Any, group: Any) -> Any:
    """Return the group if its backend is gloo, or else a new gloo group with the same ranks.

    The new group is made only once for each group.
    """
    if dist.get_backend(group) == "gloo":
        return group
    key = group if group is not None else dist.group.WORLD
    if key not in _hosts:
        ranks = dist.get_process_group_ranks(key)
        _hosts[key] = dist.new_group(
            ranks, backend="gloo", timeout=_timeout(key), use_local_synchronization=True
        )
    return _hosts[key]


def _timeout(group: Any) -> Any:
    """Return the timeout of a group if torch has it, else None, which means torch's default."""
    torch = sys.modules["torch"]
    try:
        return group._get_backend(torch.device("cuda")).options._timeout
    except (AttributeError, RuntimeError):
        return None
