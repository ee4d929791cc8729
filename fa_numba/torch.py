"""Attention for torch, with gradients: fa_numba's two passes as one differentiable function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import numpy as np

import fa_numba
from fa_numba import mods
from fa_numba.checks import as_flag, as_splits, check_alone
from fa_numba.host import placement
from fa_numba.host.arrays import MASKS, added_mask, check_tensor, on_host, operand
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import AttentionOptions, check_names, documents_options
from fa_numba.ring import call as ring_call
from fa_numba.ring import passes as ring_passes
from fa_numba.ring.schedule import rows_of
from fa_numba.tiling import Tiles

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "fa_numba.torch needs PyTorch 2.5 or newer, which is not installed: "
        "pip install 'torch>=2.5'",
        name="torch",
    ) from error

__all__ = ["attention", "merge", "ring_attention", "ring_join", "ring_split"]

# Read to the host once, and kept for the backward pass as they were.
_ON_HOST = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_mask")
_Function = TypeVar("_Function", bound=Callable)


def _untraced(function: _Function) -> _Function:
    """``function``, at a call of which torch.compile breaks its graph."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch's compiler takes seconds to import: who does not compile does without.
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(function))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@_untraced
@documents_options
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, algorithm: str = "fa2",
    return_lse: bool = False, deterministic: bool | None = False, tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None, kv_splits: int | str = "auto",
    group_splits: int | str = "auto", **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``fa_numba.attention`` of torch tensors, differentiable in q, k, v, ``bias``, ``sinks`` and
    the float32 tensors that ``score_mod`` takes from outside.

    q is (B, Hq, Nq, d), k and v (B, Hk, Nk, d), all float32, float16 or bfloat16, any strides, on
    one device; with ``layout="bnhd"`` (B, Nq, Hq, d) and (B, Nk, Hk, d); with ``cu_seqlens_q`` and
    ``cu_seqlens_k`` (total, Hq, d) and (total, Hk, d). Nothing is copied on a GPU, and everything
    runs on torch's current stream. CPU tensors go through the GPU, or the emulator where there is
    none.

    ``options`` as listed below, but that ``bias``, ``alibi_slopes``, ``sinks`` and ``attn_mask``
    are tensors, a mask of numbers is differentiated too, functions keep for the backward pass what
    they captured as they were given, and without a ``seed`` dropout draws one from torch's default
    CPU generator, which torch.manual_seed sets; the backward pass drops the same elements.
    ``tiles`` are the forward pass's block sizes, threads and stages, ``backward_tiles`` the
    backward pass's, which are those of ``tiles`` unless given; its kernels have no choice of
    stages. With a ``block_mask`` both have its blocks. ``kv_splits`` is the forward pass's,
    ``group_splits`` the backward pass's, both of "fa2" alone.

    ``deterministic`` is about the backward pass of "fa2" alone: True sums dq in a fixed order, as
    the other algorithms always do, None asks torch.are_deterministic_algorithms_enabled(). The
    gradient of a bias has no fixed order over the axes that the bias repeats, and that of what
    ``score_mod`` captures has none.

    Returns O, in q's shape and dtype; with ``return_lse`` (O, L), L float32 (B, Hq, Nq), or (Hq,
    total), the natural logarithm of the rows' sums of exponentials, differentiable too.

    Over pages of a cache (``block_table``) there are no gradients: tensors that require one are
    refused.

    Raises ValueError or TypeError, before anything runs, as ``fa_numba.attention`` and, where a
    gradient is wanted, ``fa_numba.attention_backward`` do, for tensors with a tangent (forward
    mode), and for those that torch.vmap and the transforms of torch.func hand on. Gradients of the
    gradients are refused, as they are computed, by a RuntimeError. torch.compile leaves its graph
    for the call.

    >>> import torch, fa_numba.torch
    >>> q, k, v = (torch.ones(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    >>> fa_numba.torch.attention(q, k, v, causal=True).sum().backward()
    >>> round(v.grad.sum().item(), 3)
    64.0
    """
    check_names(options)
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    bias, slopes, sinks = (given.pop(name, None) for name in ("bias", "alibi_slopes", "sinks"))
    mask = given.pop("attn_mask", None)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": slopes, "attn_mask": mask}
    tensors["sinks"] = sinks
    for name, x in tensors.items():
        if x is not None or name in "qkv":
            check_tensor(name, x)
    if mask is not None:
        bias = _bias_of(mask, bias)
    return_lse = as_flag("return_lse", return_lse)
    strict = deterministic is None and torch.are_deterministic_algorithms_enabled()
    if deterministic is None:
        deterministic = strict and algorithm == "fa2"
    backward = ring_call.backward_options(algorithm, deterministic, tiles, backward_tiles)
    if as_splits("group_splits", group_splits) != "auto":
        backward["group_splits"] = group_splits
    wanted = torch.is_grad_enabled()
    if wanted and slopes is not None and slopes.requires_grad:
        raise ValueError(
            "alibi_slopes requires a gradient and attention computes none: allowed is a tensor "
            "that requires none, such as alibi_slopes.detach()"
        )
    paged = "block_table" in given
    if paged and wanted:
        for name, x in {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient and attention over pages (block_table) computes "
                    f"none: allowed is a tensor that requires none, such as {name}.detach(), or a "
                    "call under torch.no_grad()"
                )
    captured: dict[str, torch.Tensor] = {}  # what gradients are wanted of, by score_mod's names
    others: list[torch.Tensor] = []
    for name in mods.PARAMETERS:
        if name in given:
            given[name] = _held(name, given[name], wanted, captured, others)
    for name in _ON_HOST:
        if isinstance(given.get(name), BlockMask):
            continue
        if name in given and not paged:
            given[name] = np.array(on_host(name, given[name]))
    given |= {"algorithm": algorithm, "tiles": tiles}
    added = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
    learnt = (q, k, v, bias, sinks, *captured.values())
    differentiable = wanted and any(x is not None and x.requires_grad for x in learnt)
    if differentiable:
        own = backward, bool(captured), strict, backward_tiles is not None
        _check_backward(q, k, v, added, given, *own)
    if given.get("seed") is None:
        # Drawn only where it is used: a call without dropout leaves the generator alone.
        drawn = {"dtype": torch.int64, "device": "cpu"}
        given["seed"] = int(torch.randint(2**63 - 1, (), **drawn)) if given.get("dropout_p") else 0
    ahead = {"kv_splits": kv_splits} if kv_splits != "auto" else {}
    if not differentiable:
        given |= added | ahead
        return fa_numba.attention(q, k, v, return_lse=return_lse, **given)
    taken = (*added.values(), given, ahead, backward, tuple(captured), others, *captured.values())
    out, lse = _Attention.apply(q, k, v, *taken)
    return (out, lse) if return_lse else out


def _held(
    option: str,
    function: Any,
    wanted: bool,
    learnt: dict[str, torch.Tensor],
    others: list[torch.Tensor],
) -> Any:
    """A caller's function as it is now, for the backward pass too; of the tensors that it captures
    those of a score_mod which require a gradient go to ``learnt``, and the rest to ``others``.
    """
    mod, values = mods.captured(option, function)
    for name, value in values:
        if not isinstance(value, torch.Tensor):
            continue
        check_tensor(f"{name} of {option}", value)
        if not (wanted and value.requires_grad):
            others.append(value)
            continue
        if option != "score_mod":
            raise ValueError(
                f"{name} of {option} {mod} requires a gradient and attention computes none: "
                f"allowed is a tensor that requires none, such as {name}.detach()"
            )
        learnt[name] = value
    return mods.holding(function, dict(values))


def _bias_of(mask: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What ``attn_mask`` adds to the scores, differentiable in a mask of numbers."""
    check_alone(mask.shape, bias)
    kind = str(mask.dtype).removeprefix("torch.")
    if kind not in MASKS:
        raise TypeError(f"attn_mask has dtype {kind}: allowed is {' or '.join(MASKS)}")
    return added_mask(mask)


def _check_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: dict[str, Any], given: dict,
    own: dict[str, Any], dcaptured: bool, strict: bool, own_tiles: bool,
) -> None:  # fmt: skip
    """Raise as the backward pass would, with its ``own`` options beside those of the forward pass,
    and ``strict`` where torch was told to be deterministic.
    """
    bias, *_, sinks = added.values()
    dbias, dsinks = (x is not None and x.requires_grad for x in (bias, sinks))
    first = operand("q", q.detach())
    asked = {"dtype": first.dtype, "passes": "bwd", "return_dbias": dbias, **given, **own}
    asked |= {"return_dsinks": dsinks, "return_dcaptured": dcaptured}
    with placement.placed(first):
        try:
            plan = fa_numba.plan(q.shape, k.shape, v.shape, **added, **asked)
        except ValueError as error:
            if not own_tiles or not str(error).startswith("tiles:"):
                raise
            raise ValueError(f"backward_{error}") from error
        placement.check_size(plan)
    if strict and dbias and plan.problem.bias != plan.problem.score_shape:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} and requires a gradient, and torch was told to be "
            "deterministic: its gradient is summed in no fixed order, allowed is "
            f"{plan.problem.score_shape}"
        )
    if strict and dcaptured:
        raise ValueError(
            f"{plan.problem.score_mod}, the score_mod, takes tensors that require a gradient, and "
            "torch was told to be deterministic: these are summed in no fixed order, allowed are "
            "tensors that require none"
        )


class _Once(torch.autograd.Function):
    """The gradients ``computed(*tensors)``, which have none themselves. Not by torch's
    ``once_differentiable``: where O's own gradient requires none, it takes them for constants.
    """

    @staticmethod
    def forward(ctx, computed, *tensors):
        ctx.set_materialize_grads(False)
        return computed(*tensors)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "attention computes no gradients of its gradients: allowed is a loss in which none of "
            "these occurs"
        )


class _Attention(torch.autograd.Function):
    """(O, L) of q, k, v, bias, slopes and sinks; ``common`` is for both passes, ``ahead`` for
    forward, ``own`` for backward. ``captured`` are what score_mod captures by these ``names``;
    ``others`` are saved too, so that torch notices when one has changed before the backward pass.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, slopes, sinks, common, ahead, own, names, others, *captured):
        added = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
        out, lse = fa_numba.attention(q, k, v, return_lse=True, **added, **common, **ahead)
        ctx.save_for_backward(q, k, v, bias, slopes, sinks, out, lse, *captured, *others)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.names = common | own, names
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        names = ctx.names
        if dout is None and dlse is None:
            return (None,) * (11 + len(names))
        *_, wants_bias, _, wants_sinks = ctx.needs_input_grad[:6]

        def computed(dout, dlse, q, k, v, bias, slopes, sinks, out, lse, *captured):
            given = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks, "dlse": dlse}
            given |= {"return_dbias": wants_bias, "return_dsinks": wants_sinks, **ctx.options}
            dout = torch.zeros_like(out) if dout is None else dout
            if not names:
                return fa_numba.attention_backward(dout, q, k, v, out, lse, **given)
            values = dict(zip(names, captured, strict=True))
            given |= {"score_mod": mods.holding(given["score_mod"], values)}
            given["return_dcaptured"] = True
            *found, by_name = fa_numba.attention_backward(dout, q, k, v, out, lse, **given)
            return *found, *(by_name[name] for name in names)

        saved = ctx.saved_tensors[: 8 + len(names)]
        found = _Once.apply(computed, dout, dlse, *saved)
        found, of_captured = found[: len(found) - len(names)], found[len(found) - len(names) :]
        needed = zip(found[:3], ctx.needs_input_grad, strict=False)
        dq, dk, dv = (gradient if need else None for gradient, need in needed)
        dbias, dsinks = found[3] if wants_bias else None, found[-1] if wants_sinks else None
        return dq, dk, dv, dbias, None, dsinks, *(None,) * 5, *of_captured


@_untraced
def merge(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, layout: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fa_numba.merge`` of torch tensors, differentiable in all of them.

    ``outputs`` and ``lses`` are O and L of the same rows over parts of the columns, as
    ``attention`` gives them with ``return_lse``; the result is (O, L) over all columns. Shapes,
    dtypes and errors are those of ``fa_numba.merge``; tangents and gradients of the gradients are
    refused as by ``attention``.

    >>> import torch, fa_numba.torch
    >>> q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    >>> parts = [fa_numba.torch.attention(q, k[:, :, n::2], v[:, :, n::2], return_lse=True)
    ...          for n in range(2)]
    >>> o, lse = fa_numba.torch.merge(*zip(*parts))
    >>> (o.sum() + lse.sum()).backward()
    """
    for name, parts in (("outputs", outputs), ("lses", lses)):
        for n, x in enumerate(parts):
            check_tensor(f"{name}[{n}]", x)
    tensors = (*outputs, *lses)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Merge.apply(layout, len(outputs), *tensors)
    return fa_numba.merge(outputs, lses, layout=layout)


class _Merge(torch.autograd.Function):
    """(O, L) of ``tensors``, outputs and then as many lses."""

    @staticmethod
    def forward(ctx, layout, parts, *tensors):
        out, lse = fa_numba.merge(tensors[:parts], tensors[parts:], layout=layout)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.parts = layout, parts
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * (2 + 2 * ctx.parts)

        def computed(dout, dlse, out, lse, *tensors):
            dout = torch.zeros_like(out) if dout is None else dout
            parts = tensors[: ctx.parts], tensors[ctx.parts :]
            how = {"dlse": dlse, "layout": ctx.layout}
            douts, dlses = fa_numba.merge_backward(dout, *parts, out, lse, **how)
            return *douts, *dlses

        return None, None, *_Once.apply(computed, dout, dlse, *ctx.saved_tensors)


@_untraced
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, travels: str = "kv",
    causal: bool = False, window: tuple[int | None, int | None] | None = None, q_lens: Any = None,
    kv_lens: Any = None, scale: float | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, layout: str | None = None, algorithm: str = "fa2",
    return_lse: bool = False, deterministic: bool | None = False, tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over a sequence that the ranks of ``group`` share, differentiable in q, k, v and
    ``sinks``.

    Called by all ranks at once, each with its part: q (B, Hq, Nq, d), k and v (B, Hk, Nk, d), of
    equal shapes on all ranks, float32, float16 or bfloat16; with ``layout="bnhd"`` (B, N, H, d).
    Without a mask a part is the rank's share of neighbouring rows. With ``causal`` (Nq = Nk, even)
    the sequence is cut into 2P chunks for P ranks and rank r holds chunk r and then chunk
    2P - 1 - r, so that all ranks have equal work: ``ring_split`` gives that part and ``ring_join``
    makes a sequence of all parts.

    ``group``: a group of torch.distributed, the default one for None: of NCCL for tensors on GPUs,
        one for each rank, of gloo for those of the host.
    ``travels``: "kv" sends K and V round the ring while Q, O and L stay (ring attention, arXiv
        2310.01889), and dK and dV after them in the backward pass. "q" sends Q round, O and L
        after it, while K and V stay; in the backward pass Q, dO, O and L, and dQ after them. "q"
        sends less where K and V are more than what goes with Q: ``fa_numba.io_model.ring`` has the
        bytes.
    ``window``, ``q_lens``, ``kv_lens``: as for ``attention``, of the whole sequence and the same on
        all ranks: (left, right) columns about the bottom right diagonal, and the valid rows of each
        batch entry, at most those of all ranks together. They go with ``causal``, whose diagonal is
        then that of the lengths. Chunks that do not see each other are not computed with, and only
        what a later rank sees travels, past ranks that see none of it. Without ``causal`` the
        window (left, 0) hides the same where Nq = Nk, and sends less: a part's columns go no
        further than the ranks just after it. Neighbouring batch entries of equal lengths are one
        call of a kernel, others one each.
    ``sinks``: float32 (Hq,), as for ``attention``, the same on all ranks; once in each row's sum.
        A rank's gradient is of its own rows: their sum over the ranks is the whole, as of other
        weights that all ranks have.
    ``scale``, ``softcap``, ``layout``, ``algorithm``, ``return_lse``, ``deterministic``, ``tiles``,
        ``backward_tiles``: as for ``attention``. There are no other options.

    While a part is computed with, the next is on its way, on a stream of torch.distributed's own.
    The parts' results become one by their logsumexp, in float32 and in a fixed order: equal calls
    give equal bits where those of ``attention`` do. A part's own result is rounded to q's dtype.
    Everything that a rank sends, it sends to the next one of the group, or, with a window or
    lengths, to the next that sees it and at last to its owner.

    The backward pass sends too, so all ranks have to come to it: a rank whose loss does not use O
    is never asked for its gradient, and leaves the others waiting until the group's timeout. Adding
    ``0 * O.sum()`` to that loss is enough.

    Returns O of this rank's rows, in q's shape and dtype; with ``return_lse`` (O, L), L float32
    (B, Hq, Nq), differentiable too: with Q on its way its gradient goes with it.

    Raises ValueError or TypeError, on every rank and before anything is sent, where a rank has a
    wrong argument, or another shape or option than the others, which the message names, or fails
    otherwise while they are checked. The ranks ask each other in every call, over gloo, and from
    the second call of a kind on compute some of their own part meanwhile, unless there is a window
    or a length. Raises RuntimeError where a rank has failed or does not come within the group's
    timeout; on GPUs NCCL ends the process of a rank that has waited so long.

    >>> import torch, torch.distributed as dist, fa_numba.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = torch.ones(1, 2, 8, 4)
    >>> o = fa_numba.torch.ring_attention(q, q, q, causal=True)
    >>> bool((o == fa_numba.torch.attention(q, q, q, causal=True)).all())
    True
    >>> dist.destroy_process_group()
    """
    wanted = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v, sinks)
    )
    if deterministic is None:
        deterministic = algorithm == "fa2" and torch.are_deterministic_algorithms_enabled()
    ring, agreement = ring_call.prepared(
        q, k, v, sinks, group, wanted, return_lse, travels=travels, causal=causal, layout=layout,
        deterministic=deterministic, tiles=tiles, backward_tiles=backward_tiles, window=window,
        q_lens=q_lens, kv_lens=kv_lens, scale=scale, softcap=softcap, algorithm=algorithm,
    )  # fmt: skip
    if wanted:
        out, lse = _RingAttention.apply(q, k, v, sinks, ring, agreement)
    else:
        out, lse = ring_passes.forward(ring, q, k, v, sinks, agreement)
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    """(O, L) of this rank's rows; ``ring`` is the call, ``agreement`` of its ranks."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, ring, agreement):
        O, L = ring_passes.forward(ring, q, k, v, sinks, agreement)
        ctx.save_for_backward(q, k, v, O, L, sinks)
        ctx.set_materialize_grads(False)
        ctx.ring = ring
        return O, L

    @staticmethod
    def backward(ctx, dO, dL):
        if dO is None and dL is None:
            return (None,) * 6
        ring, wanted = ctx.ring, ctx.needs_input_grad[:4]

        def computed(dO, dL, q, k, v, O, L, sinks):
            dO = torch.zeros_like(O) if dO is None else dO
            if dL is None and ring.dlse and ring.travels == "q":  # others may have one
                dL = torch.zeros_like(L)
            return ring_passes.backward(ring, dO, q, k, v, O, L, dL, sinks if wanted[3] else None)

        *found, dsinks = (*_Once.apply(computed, dO, dL, *ctx.saved_tensors), None)[:4]
        dq, dk, dv = (x if wants else None for x, wants in zip(found, wanted[:3], strict=True))
        return dq, dk, dv, dsinks, None, None


def ring_split(
    x: torch.Tensor, rank: int, ranks: int, *, causal: bool = False, dim: int = -2
) -> torch.Tensor:
    """The part of a whole sequence that a rank holds in ``ring_attention``.

    ``x``: any tensor whose axis ``dim`` is the sequence, of a multiple of ``ranks`` rows, with
    ``causal`` of 2 ``ranks``. Returns the rank's rows: neighbours, or with ``causal`` chunk
    ``rank`` and chunk 2 ``ranks`` - 1 - ``rank`` of 2 ``ranks``, in this order (zigzag).
    Raises ValueError for other sizes and ranks.

    >>> import torch, fa_numba.torch
    >>> fa_numba.torch.ring_split(torch.arange(8), 0, 2, causal=True, dim=0)
    tensor([0, 1, 6, 7])
    """
    held = rows_of(rank, ranks, x.shape[dim], as_flag("causal", causal))
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in held], dim)


def ring_join(parts: Any, *, causal: bool = False, dim: int = -2) -> torch.Tensor:
    """The whole sequence of all ranks' parts, in the order of the ranks: undoes ``ring_split``.

    Raises ValueError for no parts, and for parts of unequal lengths along ``dim``.

    >>> import torch, fa_numba.torch
    >>> fa_numba.torch.ring_join([torch.tensor([0, 3]), torch.tensor([1, 2])], causal=True, dim=0)
    tensor([0, 1, 2, 3])
    """
    parts, pieces = list(parts), []
    sizes = [x.shape[dim] for x in parts]
    if len(set(sizes)) != 1:
        raise ValueError(f"parts have {sizes} rows: allowed is one length, of one part or more")
    size = sum(sizes)
    for rank, x in enumerate(parts):
        at = 0
        for begin, end in rows_of(rank, len(parts), size, as_flag("causal", causal)):
            pieces.append((begin, x.narrow(dim, at, end - begin)))
            at += end - begin
    return torch.cat([x for _, x in sorted(pieces, key=lambda each: each[0])], dim)
