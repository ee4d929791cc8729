"""A call of ``ring_attention`` before anything is sent: checked, and agreed with the others."""

from __future__ import annotations

import sys
from typing import Any

import fa_numba
from fa_numba import device
from fa_numba.checks import as_flag, as_layout, kind_of
from fa_numba.host import placement
from fa_numba.host.arrays import operand
from fa_numba.host.launch_cache import KEPT
from fa_numba.host.planning import check_algorithm
from fa_numba.ring.agreement import agree
from fa_numba.ring.link import Link, counter
from fa_numba.ring.passes import Ring
from fa_numba.ring.schedule import TRAVELS
from fa_numba.tiling import Tiles


def prepared(
    q: Any,
    k: Any,
    v: Any,
    group: Any,
    travels: Any,
    causal: Any,
    layout: Any,
    deterministic: Any,
    tiles: Any,
    backward_tiles: Any,
    differentiable: bool,
    return_lse: Any,
    **options: Any,
) -> Ring:
    """The ring of a call, on every rank or on none.

    Raises on all ranks what any of them refuses; see ``agree``.
    """
    dist = sys.modules["torch"].distributed
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group is None and torch.distributed has no process group: allowed is a call after "
            "torch.distributed.init_process_group, in every process of the group"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("group does not have this process: allowed is a group that it belongs to")
    ring, failure = None, None
    try:
        as_flag("return_lse", return_lse)
        ring = _checked(
            q, k, v, group, travels, causal, layout, deterministic, tiles, backward_tiles,
            differentiable, options,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        failure = error
    call = {
        "q": _seen(q), "k": _seen(k), "v": _seen(v), "travels": travels, "causal": causal,
        "layout": layout, "deterministic": deterministic, "tiles": tiles,
        "backward_tiles": backward_tiles, "gradients": differentiable, **options,
    }  # fmt: skip
    agree(group, call, failure)
    assert ring is not None
    return ring


def _seen(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if hasattr(x, "shape") else kind_of(x)


def _checked(
    q, k, v, group, travels, causal, layout, deterministic, tiles, backward_tiles,
    differentiable, options,
) -> Ring:  # fmt: skip
    torch = sys.modules["torch"]
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {kind_of(x)}: allowed is a torch tensor")
    if not isinstance(travels, str) or travels not in TRAVELS:
        raise ValueError(f"travels is {travels!r}: allowed is {' or '.join(map(repr, TRAVELS))}")
    causal, layout = as_flag("causal", causal), as_layout(layout)
    check_algorithm(options["algorithm"])
    link = Link(group, counter())
    for name, x in {"k": k, "v": v}.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: allowed is one device")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, q {q.dtype}: allowed is one dtype")
    if tuple(v.shape) != tuple(k.shape):
        raise ValueError(f"v has shape {tuple(v.shape)}: allowed is {tuple(k.shape)}, as k")
    _check_backend(torch.distributed, group, q)
    if causal:
        axis = 1 if layout == "bnhd" else 2
        rows, columns = (x.shape[axis] if len(x.shape) == 4 else 0 for x in (q, k))
        if rows != columns:
            raise ValueError(
                f"q has {rows} rows and k {columns} with causal: allowed are as many, those of one "
                "zigzag part"
            )
        if link.ranks > 1 and rows % 2:
            raise ValueError(
                f"q has {rows} rows with causal over {link.ranks} ranks: allowed is an even "
                "number, two chunks of a zigzag part"
            )
    options = {name: x for name, x in options.items() if x is not None}
    backward = _backward_options(options["algorithm"], deterministic, tiles, backward_tiles)
    asked = repr((causal, layout, differentiable, options, tiles, backward))
    _check_plans(
        (*map(tuple, (q.shape, k.shape)), str(q.dtype), str(q.device), asked),
        q,
        k,
        {"causal": causal, "layout": layout, **options},
        {"tiles": tiles},
        backward if differentiable else None,
    )
    options |= {"layout": layout}
    return Ring(link, travels, causal, layout, options, {"tiles": tiles}, backward)


_planned: set[tuple] = set()  # calls whose plans were checked


def _check_plans(
    key: tuple, q: Any, k: Any, options: dict, ahead: dict, backward: dict | None
) -> None:
    """Raise as the rank's own part by itself would, of a kind of call that was not checked yet."""
    if key in _planned:
        return
    first = operand("q", q.detach())
    with placement.placed(first):
        for passes, own in (("fwd", ahead), ("bwd", backward)):
            if own is not None:
                asked = {"dtype": first.dtype, **options, **own}
                placement.check_size(fa_numba.plan(q.shape, k.shape, passes=passes, **asked))
    if len(_planned) >= KEPT:
        _planned.clear()
    if device.on_gpu():  # the emulator's limits are set by whoever runs it
        _planned.add(key)


def _backward_options(algorithm: str, deterministic: Any, tiles: Any, own: Any) -> dict[str, Any]:
    """Those of backward steps alone; raises for what they do not have."""
    if own is not None and not isinstance(own, Tiles):
        raise TypeError(f"backward_tiles is {own!r}: allowed is a Tiles(Br=..., Bc=...) or None")
    deterministic = as_flag("deterministic", deterministic)
    if deterministic and algorithm != "fa2":
        raise ValueError(
            f"deterministic is True with algorithm {algorithm!r}: only fa2 has a choice, the "
            "others' sums always have one order"
        )
    found: dict[str, Any] = {"deterministic": True} if deterministic else {}
    if own is None and isinstance(tiles, Tiles):
        own = tiles.for_backward()
    return found | {"tiles": own}


def _check_backend(dist: Any, group: Any, q: Any) -> None:
    backend = str(dist.get_backend(group))
    allowed = {"nccl": "cuda", "gloo": "cpu"}.get(backend, q.device.type)
    if q.device.type != allowed:
        raise ValueError(
            f"q is on {q.device} and the group is of {backend}: allowed are tensors on {allowed}, "
            f"or a group of {'nccl' if allowed == 'cpu' else 'gloo'}"
        )
