"""Checks of a call of ``ring_attention``, which run before the ranks send anything."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import fa_numba
from fa_numba import checks, device
from fa_numba.checks import LAYOUTS, as_flag, as_layout, as_lengths, as_sizes, as_window, one_of
from fa_numba.dtypes import E4M3, UNSCALED
from fa_numba.host import placement
from fa_numba.host.arrays import check_tensor, has_tangent, on_host, operand
from fa_numba.host.launch_cache import KEPT
from fa_numba.ring.agreement import Agreement, Meant
from fa_numba.ring.link import Link, counter
from fa_numba.ring.passes import Ring
from fa_numba.ring.schedule import TRAVELS
from fa_numba.ring.visible import Mask, mask_of
from fa_numba.tiling import Tiles

LENGTHS = ("q_lens", "kv_lens")


def prepared(
    q: Any, k: Any, v: Any, sinks: Any, group: Any, differentiable: bool, return_lse: Any,
    **options: Any,
) -> tuple[Ring, Agreement]:  # fmt: skip
    """Check the arguments of a call, and start to compare them with the arguments of other ranks.

    Return two objects: the ``Ring``, which describes the call, and the ``Agreement``, which is the
    running comparison. The caller must call ``Agreement.wait`` before it sends anything.
    ``options`` are all other arguments of ``ring_attention``. If the checks of any rank fail, all
    ranks raise an error, here or in ``Agreement.wait``. If an equal call was checked before, this
    function skips the checks and does not wait for the other ranks.
    """
    dist = sys.modules["torch"].distributed
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group must be a process group of torch.distributed, which is not initialised; call "
            "torch.distributed.init_process_group in every process first"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain this process; call it only in the ranks of the group")
    key: Any = None
    known: Known | None = None
    ring: Ring | None = None
    try:
        options = _read(options)
        whole = group if group is not None else dist.group.WORLD
        own = (whole, return_lse, differentiable, *options.values())
        arrays = (q, k, v) if sinks is None else (q, k, v, sinks)
        key = (*map(_facts, arrays), own, *map(type, own))
        known = _known.get(key)  # raises TypeError if an argument has no hash
        if known is not None and not device.on_gpu():
            # On the emulator, the limit of a call may have been changed since the first call.
            _check_plans(known.ring, q, k, v, differentiable)
    except Exception:
        known, key = None, None
    if known is not None:
        agreement = Agreement(group, known.meant)
        return replace(known.ring, link=Link(group, counter())), agreement
    try:
        as_flag("return_lse", return_lse)
        options = _read(options)
        ring = _checked(q, k, v, group, **options)
        _check_sinks(sinks, q, ring.axis)
        ring = replace(ring, dlse=bool(differentiable and return_lse))
        _check_plans(ring, q, k, v, differentiable)
        parts = {
            name: None if x is None else f"{tuple(x.shape)} {x.dtype}"
            for name, x in {"q": q, "k": k, "v": v, "sinks": sinks}.items()
        }
        meant = Meant(parts | options | {"gradients": differentiable, "dlse": ring.dlse})
    except Exception as error:  # any exception, because the other ranks wait for the comparison
        meant = Meant({}, error)
    agreement = Agreement(group, meant)
    agreement.wait()
    assert ring is not None
    if ring.mask is not None:
        ring.link.connect(q)
    if key is not None:
        if len(_known) >= KEPT:
            _known.clear()
        _known[key] = Known(ring, meant)
    return ring, agreement


class Known(NamedTuple):
    """A call that passed the checks, and that all ranks have made at least once."""

    ring: Ring
    meant: Meant


_known: dict[Any, Known] = {}


def _facts(x: Any) -> tuple:
    """Return all properties of a tensor on which the checks depend."""
    return x.shape, x.dtype, x.device.type, x.device.index, has_tangent(x)


def _read(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the window and the lengths as tuples.

    Only lengths in a one-dimensional array of integers become tuples. Other values of lengths
    become NumPy arrays. A later check raises the error for them.
    """
    found = options | {"window": as_window(options["window"])}
    for name in LENGTHS:
        if found[name] is not None:
            lengths = on_host(name, found[name])
            readable = lengths.ndim == 1 and lengths.dtype.kind in "iu"
            found[name] = tuple(lengths.tolist()) if readable else lengths
    return found


def _checked(
    q, k, v, group, *, travels, causal, layout, deterministic, tiles, backward_tiles, **options
) -> Ring:
    torch = sys.modules["torch"]
    for name, x in {"q": q, "k": k, "v": v}.items():
        check_tensor(name, x)
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype == E4M3.name:
            raise TypeError(f"{name} must be {one_of(UNSCALED)} in ring_attention, got {dtype}")
    checks.check_name("travels", travels, TRAVELS)
    causal, layout = as_flag("causal", causal), as_layout(layout)
    link = Link(group, counter())
    for name, x in {"k": k, "v": v}.items():
        if x.device != q.device:
            raise ValueError(
                f"{name} must be on the device of q ({q.device}), got {x.device}; move it with "
                f"{name}.to(q.device)"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}; convert it with "
                f"{name}.to({q.dtype})"
            )
    if tuple(v.shape[:-1]) != tuple(k.shape[:-1]):
        raise ValueError(
            f"v must have shape {tuple(k.shape)} like k, where only head_dim may differ, got "
            f"{tuple(v.shape)}"
        )
    _check_backend(torch.distributed, group, q)
    if causal:
        axis = 1 if layout == "bnhd" else 2
        rows, columns = (x.shape[axis] if len(x.shape) == 4 else 0 for x in (q, k))
        if rows != columns:
            raise ValueError(
                f"q and k must have the same number of rows with causal=True, got {rows} and "
                f"{columns}; split q and k with ring_split"
            )
        if link.ranks > 1 and rows % 2:
            raise ValueError(
                f"q must have an even number of rows with causal=True, got {rows} rows on each of "
                f"{link.ranks} ranks; split q with ring_split, which gives each rank two chunks "
                "of equal length"
            )
    mask = _mask_of(q, k, causal, layout, link.ranks, options)
    hides = ("window", *LENGTHS)
    backward = backward_options(options["algorithm"], deterministic, tiles, backward_tiles)
    options = {n: x for n, x in options.items() if x is not None and n not in hides}
    options |= {"layout": layout}
    return Ring(link, travels, causal, layout, options, {"tiles": tiles}, backward, mask)


def _check_sinks(sinks: Any, q: Any, axis: int) -> None:
    """Raise an error unless ``sinks`` is None, or a float32 tensor (heads_q,) on the device of q.

    ``axis`` is the axis of the rows in q.
    """
    if sinks is None:
        return
    torch = sys.modules["torch"]
    check_tensor("sinks", sinks)
    if sinks.dtype != torch.float32:
        raise TypeError(
            f"sinks must be torch.float32, got {sinks.dtype}; convert it with "
            "sinks.to(torch.float32)"
        )
    checks.check_heads(q.shape[0], q.shape[3 - axis], sinks=sinks.shape)
    if sinks.device != q.device:
        raise ValueError(
            f"sinks must be on the device of q ({q.device}), got {sinks.device}; move it with "
            "sinks.to(q.device)"
        )


def _mask_of(
    q: Any, k: Any, causal: bool, layout: str, ranks: int, options: dict[str, Any]
) -> Mask | None:
    """Return the mask of the complete sequence, or None without a window and lengths.

    Raise an error for lengths that are longer than the sequence.
    """
    given = {name: options[name] for name in ("window", *LENGTHS)}
    if given["window"] == (-1, -1) and all(given[name] is None for name in LENGTHS):
        return None
    axes, (q_sizes, k_sizes) = LAYOUTS[layout], (tuple(q.shape), tuple(k.shape))
    batch, seqlen = as_sizes("q", q_sizes, axes)[0], axes.index("seqlen")
    as_sizes("k", k_sizes, axes)
    rows, columns = (ranks * sizes[seqlen] for sizes in (q_sizes, k_sizes))
    for name, longest in zip(LENGTHS, (rows, columns), strict=True):
        if given[name] is not None:
            as_lengths(name, given[name], batch, longest, "the rows of all ranks")
    return mask_of(**given, causal=causal, batch=batch, rows=rows, columns=columns)


def _check_plans(ring: Ring, q: Any, k: Any, v: Any, differentiable: bool) -> None:
    """Raise the errors that attention over this rank's part would raise."""
    first, mask = operand("q", q.detach()), ring.mask
    common: dict[str, Any] = {"dtype": first.dtype, "causal": ring.causal, **ring.options}
    if mask is not None:
        sides = mask.left, None if ring.causal else mask.right
        common["window"] = tuple(-1 if side is None else side for side in sides)
    with placement.placed(first):
        of_lse = {"dlse": ring.dlse}
        for passes, own in (("fwd", ring.ahead), ("bwd", ring.backward | of_lse)):
            if passes == "fwd" or differentiable:
                how = {**common, **own, "passes": passes}
                plan = fa_numba.plan(q.shape, k.shape, v.shape, **how)
                placement.check_size(plan)


def backward_options(algorithm: str, deterministic: Any, tiles: Any, own: Any) -> dict[str, Any]:
    """Return the options ``deterministic`` and ``tiles`` of the backward pass.

    ``own`` is the caller's ``backward_tiles``. If it is None, the tiles follow from ``tiles``, the
    tiles of the forward pass. Raise TypeError or ValueError for a value that the backward pass does
    not accept.
    """
    if own is not None and not isinstance(own, Tiles):
        raise TypeError(f"backward_tiles must be a Tiles(Br=..., Bc=...) or None, got {own!r}")
    deterministic = as_flag("deterministic", deterministic)
    if deterministic and algorithm != "fa2":
        raise ValueError(
            f"deterministic must be False with algorithm {algorithm!r}, got True; "
            f"leave it out: {algorithm!r} always sums dq in a fixed order"
        )
    found: dict[str, Any] = {"deterministic": True} if deterministic else {}
    if own is None and isinstance(tiles, Tiles):
        own = tiles.for_backward()
    return found | {"tiles": own}


def _check_backend(dist: Any, group: Any, q: Any) -> None:
    backend = str(dist.get_backend(group))
    allowed = {"nccl": "cuda", "gloo": "cpu"}.get(backend, q.device.type)
    other = "nccl" if allowed == "cpu" else "gloo"
    if q.device.type != allowed:
        raise ValueError(
            f"q must be on {allowed} with a process group of backend {backend!r}, got {q.device}; "
            f"move the tensors, or use a group of backend {other!r}"
        )
