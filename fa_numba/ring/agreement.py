"""Whether all ranks mean the same call: asked before anything else is sent."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any


def agree(group: Any, call: Mapping[str, Any], failure: Exception | None) -> None:
    """Raise on every rank unless all have made the same ``call``, none with a ``failure``.

    The ranks compare a digest of 62 bits on the host, over gloo, so that no GPU waits: its largest
    value is its smallest where all have the same. Only where they differ are they asked what they
    mean. ValueError names what differs, on which ranks; where all fail alike each raises its own
    failure. RuntimeError where a rank does not come within the group's timeout.
    """
    torch = sys.modules["torch"]
    dist = torch.distributed
    said = dict(call) if failure is None else {"error": f"{type(failure).__name__}: {failure}"}
    digest = hashlib.sha256(repr(sorted(said.items())).encode()).digest()
    word = int.from_bytes(digest[:8], "big") >> 2
    ranks = dist.get_world_size(group)
    most = torch.tensor([word, -word], dtype=torch.int64, device="cpu")
    try:
        beside = _on_host(dist, group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=beside)
        alike = most.tolist() == [word, -word]
        if not alike:
            means: list[Any] = [None] * ranks
            dist.all_gather_object(means, said, group=beside)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {ranks}: not all ranks of the group have come to this "
            f"call of ring_attention; one of them has failed or is late ({error})"
        ) from error
    if not alike:
        raise ValueError(_difference(means))
    if failure is not None:
        raise failure


def _difference(means: list[Mapping[str, Any]]) -> str:
    """What the ranks say otherwise than rank 0, each with the ranks that say so."""
    errors = {n: x["error"] for n, x in enumerate(means) if "error" in x}
    if errors:
        return "ring_attention was refused: " + "; ".join(
            f"rank {n}: {error}" for n, error in errors.items()
        )
    found = []
    for name in means[0]:
        values: dict[str, list[int]] = {}
        for n, said in enumerate(means):
            values.setdefault(repr(said[name]), []).append(n)
        if len(values) > 1:
            each = ", ".join(f"{value} on rank {_ranks(at)}" for value, at in values.items())
            found.append(f"{name} is {each}")
    return f"{'; '.join(found)}: allowed is one for all ranks of the group"


def _ranks(found: list[int]) -> str:
    return " and ".join(map(str, found))


_hosts: dict[Any, Any] = {}


def _on_host(dist: Any, group: Any) -> Any:
    """The group itself where it is of gloo, else one of gloo with the same ranks, made once."""
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
    """The group's, where torch tells it; else None, torch's default."""
    torch = sys.modules["torch"]
    try:
        return group._get_backend(torch.device("cuda")).options._timeout
    except (AttributeError, RuntimeError):
        return None
