"""Attention for torch with gradients: differentiable functions that call the passes of fa_numba."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import numpy as np

import fa_numba
from fa_numba import mods
from fa_numba.checks import as_flag, as_splits, check_alone
from fa_numba.host import held, placement
from fa_numba.host.arrays import MASKS, added_mask, check_dtype, check_tensor, on_host, operand
from fa_numba.mods.blocks import BlockMask
from fa_numba.options import AttentionOptions, check_names, documents_options
from fa_numba.ring import call as ring_call
from fa_numba.ring import passes as ring_passes
from fa_numba.ring.schedule import rows_of
from fa_numba.tiling import Tiles
from fa_numba.typing import Algorithm, Layout, Splits

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "fa_numba.torch needs PyTorch 2.5 or newer, which is not installed; install it with "
        "pip install 'torch>=2.5'",
        name="torch",
    ) from error

__all__ = ["attention", "merge", "ring_attention", "ring_join", "ring_split"]

# Read to the host once, and kept for the backward pass as they were.
_ON_HOST = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_mask")
_Function = TypeVar("_Function", bound=Callable)


def _untraced(function: _Function) -> _Function:
    """Return ``function`` in a form that torch.compile does not trace: a call breaks the graph."""
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch's compiler takes seconds to import, so it is not imported if nobody compiles.
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(function))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, algorithm: Algorithm = "fa2",
    return_lse: Literal[False] = False, deterministic: bool | None = False,
    tiles: Tiles | None = None, backward_tiles: Tiles | None = None, kv_splits: Splits = "auto",
    group_splits: Splits = "auto", **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, algorithm: Algorithm = "fa2",
    return_lse: Literal[True], deterministic: bool | None = False,
    tiles: Tiles | None = None, backward_tiles: Tiles | None = None, kv_splits: Splits = "auto",
    group_splits: Splits = "auto", **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, algorithm: Algorithm = "fa2",
    return_lse: bool = False, deterministic: bool | None = False,
    tiles: Tiles | None = None, backward_tiles: Tiles | None = None, kv_splits: Splits = "auto",
    group_splits: Splits = "auto", **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@_untraced
@documents_options
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, algorithm: Algorithm = "fa2",
    return_lse: bool = False, deterministic: bool | None = False, tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None, kv_splits: Splits = "auto",
    group_splits: Splits = "auto", **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention of torch tensors, differentiable by torch's automatic differentiation.

    The result is that of ``fa_numba.attention``. The function is differentiable in q, k, v,
    ``bias``, ``sinks`` and an ``attn_mask`` of numbers. With "fa1" and "fa2" it is also
    differentiable in the float32 tensors that ``score_mod`` uses. It runs on torch's current
    stream. Tensors on a GPU are used in place. Tensors on the CPU are copied to a GPU, and the
    result is copied back. Without a GPU, the call runs on the emulator.

    Parameters
    ----------
    q : torch.Tensor
        Queries, shape (batch, heads_q, seqlen_q, head_dim), float32, float16 or bfloat16, any
        strides.
    k : torch.Tensor
        Keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. heads_k must divide
        heads_q.
    v : torch.Tensor
        Values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q.
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        Algorithm of both passes. "fa2" has Q outer, "fa1" has K/V outer, and "standard" stores S
        and P in global memory.
    return_lse : bool, default False
        Whether the logsumexp is returned too. It is differentiable.
    deterministic : bool or None, default False
        Whether the backward pass of "fa2" sums dq in a fixed order. The other algorithms always sum
        dq in a fixed order, and refuse True. For "fa2", None means the value of
        ``torch.are_deterministic_algorithms_enabled()``.
    tiles : Tiles, optional
        Block sizes, threads and pipeline slots of the forward pass. None chooses them.
    backward_tiles : Tiles, optional
        Block sizes and threads of the backward pass; ``stages`` must be 1. None takes Br, Bc and
        threads of ``tiles`` if ``tiles`` is given. If neither is given, the function chooses.
    kv_splits : int or "auto", default "auto"
        Number of thread blocks that share the columns of a row tile in the forward pass. "fa2"
        only.
    group_splits : int or "auto", default "auto"
        Number of thread blocks that share a column tile of a K/V head in the backward pass. "fa2"
        only.

    Returns
    -------
    out : torch.Tensor
        Output, shape (batch, heads_q, seqlen_q, head_dim_v), for packed sequences (total_q,
        heads_q, head_dim_v), with the dtype, layout and device of q.
    lse : torch.Tensor
        Logsumexp, only returned with ``return_lse=True``, as the tuple ``(out, lse)``. It is
        float32, (batch, heads_q, seqlen_q), for packed sequences (heads_q, total_q). It is the
        natural logarithm of each row's sum of exponentials of the scaled and masked scores.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or an unknown name. Also for tensors without
        values, which ``torch.vmap`` and the transforms of ``torch.func`` pass.
    ValueError
        If a value, a shape or a combination of arguments is not allowed. If a tensor requires a
        gradient, the rules of the backward pass apply too. Also for tensors with a tangent
        (forward-mode differentiation). Also if a tensor requires a gradient that this function does
        not compute: ``alibi_slopes``, a tensor that ``mask_mod`` or ``score_mod_grad`` uses, or any
        tensor of a call with ``block_table``. All these errors are raised before anything runs.
    RuntimeError
        If gradients of the gradients are computed. Also if a tensor was changed in place before
        the backward pass.

    See Also
    --------
    fa_numba.attention : Attention of arrays of any library, without gradients.
    ring_attention : Attention over a sequence that several devices share.
    merge : Combine attention over parts of the keys.

    Notes
    -----
    The options differ from those of ``fa_numba.attention`` in two ways. ``bias``, ``alibi_slopes``,
    ``sinks`` and ``attn_mask`` must be torch tensors. Without a ``seed``, dropout draws a seed from
    torch's default CPU generator, which ``torch.manual_seed`` sets. The backward pass drops the
    same elements as the forward pass.

    The backward pass uses the values that ``score_mod`` and ``mask_mod`` used in the forward pass.
    NumPy arrays of up to 1 MiB are copied. If a larger NumPy array or a torch tensor is changed in
    place between the passes, the backward pass raises ValueError or RuntimeError.

    Two kinds of gradients are summed in no fixed order: those of a bias over axes that are
    broadcast, and those of tensors that ``score_mod`` uses. ``torch.compile`` breaks its graph at
    the call.

    Examples
    --------
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
            "alibi_slopes requires a gradient, which attention does not compute; pass "
            "alibi_slopes.detach() instead"
        )
    paged = "block_table" in given
    if paged and wanted:
        for name, x in {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, which attention with a block_table does not "
                    f"compute; pass {name}.detach() or call attention under torch.no_grad()"
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
        for name in mods.PARAMETERS:
            if name in given:  # torch watches the tensors itself
                given[name] = held.holding(name, given[name], tensors=False)
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
    """Return a copy of a caller's function that keeps the values that the function captures now.

    The backward pass calls this copy. If gradients are ``wanted``, captured tensors of a
    ``score_mod`` that require a gradient are added to ``learnt``. All other captured tensors are
    added to ``others``. Raises ValueError if a tensor in another function requires a gradient.
    """
    mod, values = mods.captured(option, function)
    for name, value in values:
        if not isinstance(value, torch.Tensor):
            continue
        check_tensor(f"{name} in {option}, {mod},", value)
        if not (wanted and value.requires_grad):
            others.append(value)
            continue
        if option != "score_mod":
            raise ValueError(
                f"the tensor {name!r} that {option} uses ({mod}) requires a gradient, but "
                "attention computes gradients only for tensors in score_mod; use "
                f"{name}.detach() in {option}"
            )
        learnt[name] = value
    return mods.holding(function, dict(values))


def _bias_of(mask: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the float tensor that ``attn_mask`` adds to the scores.

    The result is differentiable with respect to a mask of numbers.
    """
    check_alone(mask.shape, bias)
    kind = str(mask.dtype).removeprefix("torch.")
    check_dtype("attn_mask", kind, "torch", MASKS)
    return added_mask(mask)


def _check_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: dict[str, Any], given: dict,
    own: dict[str, Any], dcaptured: bool, strict: bool, own_tiles: bool,
) -> None:  # fmt: skip
    """Raise the errors that the backward pass would raise.

    ``added`` contains the bias, the ALiBi slopes and the sinks, ``given`` contains the other
    options of both passes, and ``own`` contains the options of the backward pass only.
    ``dcaptured`` says whether tensors in ``score_mod`` need gradients. ``strict`` says whether
    torch must be deterministic, and ``own_tiles`` says whether ``backward_tiles`` were given.
    """
    bias, *_, sinks = added.values()
    dbias, dsinks = (x is not None and x.requires_grad for x in (bias, sinks))
    first = operand("q", q.detach())
    asked = {"dtype": first.dtype, "passes": "bwd", "return_dbias": dbias, **given, **own}
    asked |= {"return_dsinks": dsinks, "return_dcaptured": dcaptured}
    mask = asked.get("block_mask")
    if isinstance(mask, BlockMask):  # whose blocks stay on the GPU: accesses are not asked for
        asked["block_mask"] = mask.without_blocks()
    with placement.placed(first):
        try:
            plan = fa_numba.plan(q.shape, k.shape, v.shape, **added, **asked)
        except ValueError as error:
            if not own_tiles or not str(error).startswith("tiles"):
                raise
            raise ValueError(f"backward_{error}") from error
        placement.check_size(plan)
    if strict and dbias and plan.problem.bias != plan.problem.score_shape:
        raise ValueError(
            f"bias must have the full shape {plan.problem.score_shape} to have a gradient with "
            "torch.use_deterministic_algorithms(True), because the gradient of a broadcast bias is "
            f"summed in no fixed order, got {tuple(bias.shape)}; pass bias.expand("
            f"{', '.join(map(str, plan.problem.score_shape))})"
        )
    if strict and dcaptured:
        raise ValueError(
            "tensors in score_mod must not require a gradient with "
            "torch.use_deterministic_algorithms(True), because this gradient is summed in no fixed "
            f"order, got tensors with requires_grad=True in {plan.problem.score_mod}; detach them"
        )


class _Once(torch.autograd.Function):
    """A function that returns the gradients ``computed(*tensors)``, for use in a backward pass.

    An attempt to differentiate these gradients raises RuntimeError. torch's ``once_differentiable``
    would treat them as constants, without an error, if the gradient of O requires no gradient.
    """

    @staticmethod
    def forward(ctx, computed, *tensors):
        ctx.set_materialize_grads(False)
        return computed(*tensors)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "fa_numba.torch does not compute gradients of its gradients (double backward); use a "
            "loss that does not depend on the gradients of attention or merge"
        )


class _Attention(torch.autograd.Function):
    """The differentiable function that maps q, k, v, bias, slopes and sinks to (O, L).

    ``common`` contains options of both passes. ``ahead`` contains options of the forward pass only,
    and ``own`` contains options of the backward pass only. ``captured`` are the tensors that
    ``score_mod`` uses, and ``names`` are their names. ``others`` are tensors that get no gradient.
    They are saved too, so that torch notices if such a tensor has changed before the backward pass.
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
            held.check(given)  # which does not know the function that is made now
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
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], *, layout: Layout | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over parts of the keys, differentiable in all parts.

    The result is that of ``fa_numba.merge``, for torch tensors.

    Parameters
    ----------
    outputs : sequence of torch.Tensor
        Two or more outputs of ``attention`` for the same queries over different keys. Each is
        (batch, heads, seqlen, head_dim), for packed sequences (total, heads, head_dim). All must
        have the same shape and dtype.
    lses : sequence of torch.Tensor
        The logsumexp of each output, float32, (batch, heads, seqlen), for packed sequences (heads,
        total).
    layout : {"bhnd", "bnhd"}, optional
        "bnhd" if outputs are (batch, seqlen, heads, head_dim). None means "bhnd" for tensors of
        four axes, and packed sequences for tensors of three axes.

    Returns
    -------
    out : torch.Tensor
        Output over all keys, with the shape, dtype and device of ``outputs[0]``.
    lse : torch.Tensor
        Logsumexp over all keys, float32, with the shape of ``lses[0]``.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype.
    ValueError
        If there are fewer than two outputs, if the numbers of ``outputs`` and ``lses`` differ, or
        if shapes or devices differ. Also for tensors with a tangent (forward-mode differentiation).
    RuntimeError
        If gradients of the gradients are computed.

    See Also
    --------
    fa_numba.merge : The formulas.
    attention : Compute the parts.

    Examples
    --------
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
    """The differentiable function that merges results over parts of the keys to (O, L).

    Its ``tensors`` are the outputs of the parts, followed by the logsumexps of the parts.
    """

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
    sinks: torch.Tensor | None = None, layout: Layout | None = None, algorithm: Algorithm = "fa2",
    return_lse: bool = False, deterministic: bool | None = False, tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention over a sequence that several processes share, with gradients.

    All ranks of a process group must call this function together, each with its own part of the
    sequence. The parts of k and v, or of q, travel from rank to rank in a ring. The function is
    differentiable in q, k, v and ``sinks``. ``ring_split`` returns the part of a rank, and
    ``ring_join`` puts the parts together. With ``causal``, a part is not contiguous: each rank has
    two chunks of the sequence (zigzag order).

    Parameters
    ----------
    q : torch.Tensor
        This rank's queries, shape (batch, heads_q, seqlen_q, head_dim), float32, float16 or
        bfloat16. The shape must be the same on all ranks.
    k : torch.Tensor
        This rank's keys, shape (batch, heads_k, seqlen_k, head_dim), dtype and device of q. With
        ``causal``, seqlen_k must equal seqlen_q. With ``causal`` and more than one rank, seqlen_q
        must also be an even number.
    v : torch.Tensor
        This rank's values, shape (batch, heads_k, seqlen_k, head_dim_v), dtype and device of q.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share the sequence. None takes the default group. It must be a group of NCCL
        for tensors on GPUs, with one GPU per rank, and of gloo for tensors on the CPU.
    travels : {"kv", "q"}, default "kv"
        What is sent round the ring. "kv" sends K and V, while Q, the output and the logsumexp stay
        (ring attention, arXiv 2310.01889). "q" sends Q, followed by the output and the logsumexp,
        while K and V stay. ``fa_numba.io_model.ring`` returns the bytes that each choice sends.
    causal : bool, default False
        Whether row i of the complete sequence sees only the columns up to i. The sequence is then
        cut into 2P chunks for P ranks, and rank r must hold chunk r followed by chunk 2P - 1 - r.
        All ranks then have equal work.
    window : tuple (left, right) of int, optional
        Sliding window over the complete sequence, as for ``attention``. Rows and columns that no
        other rank needs are not sent.
    q_lens : sequence or array of int, optional
        Number of valid rows of each batch entry in the complete sequence, shape (batch,), the same
        on all ranks.
    kv_lens : sequence or array of int, optional
        Number of valid keys of each batch entry in the complete sequence, shape (batch,), the same
        on all ranks.
    scale : float, default 1 / sqrt(head_dim)
        Factor of the scores.
    softcap : float, optional
        Cap c of the scores: a score s becomes ``c * tanh(s / c)``.
    sinks : torch.Tensor, optional
        Attention sinks, float32, shape (heads_q,), the same on all ranks. Each rank computes the
        gradient from its own rows. The sum over the ranks is the complete gradient.
    layout : {"bhnd", "bnhd"}, default "bhnd"
        "bnhd" if q is (batch, seqlen_q, heads_q, head_dim) and k and v are (batch, seqlen_k,
        heads_k, head_dim).
    algorithm : {"fa2", "fa1", "standard"}, default "fa2"
        Algorithm on each rank.
    return_lse : bool, default False
        Whether the logsumexp is returned too. It is differentiable.
    deterministic : bool or None, default False
        Whether the backward pass of "fa2" sums dq in a fixed order, as for
        ``fa_numba.torch.attention``. For "fa2", None means the value of
        ``torch.are_deterministic_algorithms_enabled()``.
    tiles : Tiles, optional
        Block sizes of the forward pass. None chooses the block sizes.
    backward_tiles : Tiles, optional
        Block sizes of the backward pass. None takes the block sizes of ``tiles`` if ``tiles`` is
        given. If neither is given, the function chooses.

    Returns
    -------
    out : torch.Tensor
        Output of this rank's rows, shape (batch, heads_q, seqlen_q, head_dim_v), dtype and layout
        of q.
    lse : torch.Tensor
        Logsumexp of this rank's rows, float32, (batch, heads_q, seqlen_q). It is only returned with
        ``return_lse=True``, as the tuple ``(out, lse)``.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype on all ranks.
    ValueError
        If an argument is not allowed, if only some ranks refuse the call, if an argument differs
        between the ranks, or if there is no process group. TypeError and ValueError are raised on
        every rank, before any part is sent.
    RuntimeError
        If a rank has failed, or does not call the function within the timeout of the group. On
        GPUs, NCCL ends the process of a rank that has waited too long. Also if gradients of the
        gradients are computed.

    See Also
    --------
    ring_split : Return the part of a sequence that a rank holds.
    ring_join : Join the parts of all ranks.
    attention : Attention on one device, with more options.

    Notes
    -----
    A rank computes with one part while the next part is being sent. The results of the parts are
    merged by their logsumexps, in float32 and in a fixed order.

    The ranks also send in the backward pass, so all ranks must run it. If the loss of a rank does
    not use the output, the other ranks wait until the timeout. Adding ``0 * out.sum()`` to that
    loss avoids this.

    The ranks compare their arguments in every call, over gloo.

    If seqlen_q equals seqlen_k, ``window=(left, 0)`` hides the same columns with and without
    ``causal``. Without ``causal``, less is sent: the part of a rank is then contiguous, and only a
    few other ranks need it.

    Examples
    --------
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
    """The differentiable function that maps this rank's q, k, v and sinks to (O, L) of its rows.

    ``ring`` describes the call, and ``agreement`` compares the arguments of all ranks.
    """

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
    """Return the part of a sequence that a rank holds in ``ring_attention``.

    Parameters
    ----------
    x : torch.Tensor
        Tensor of the complete sequence, such as q. Its number of rows along ``dim`` must be a
        multiple of ``ranks``. With ``causal`` and more than one rank, it must be a multiple of ``2
        * ranks``.
    rank : int
        Number of the rank, from 0 to ranks - 1.
    ranks : int
        Number of ranks.
    causal : bool, default False
        Whether the parts are for ``ring_attention`` with ``causal=True``.
    dim : int, default -2
        Axis of the sequence. -2 is for (batch, heads, seqlen, head_dim).

    Returns
    -------
    torch.Tensor
        The rows of the rank. Without ``causal``, they are contiguous. With ``causal``, they are
        chunk ``rank`` followed by chunk ``2 * ranks - 1 - rank`` of ``2 * ranks`` chunks (zigzag).

    Raises
    ------
    TypeError
        If ``causal`` is no bool.
    ValueError
        If ``rank`` is out of range, or the rows cannot be divided evenly.

    See Also
    --------
    ring_join : Join the parts of all ranks.

    Examples
    --------
    >>> import torch, fa_numba.torch
    >>> fa_numba.torch.ring_split(torch.arange(8), 0, 2, causal=True, dim=0)
    tensor([0, 1, 6, 7])
    """
    held = rows_of(rank, ranks, x.shape[dim], as_flag("causal", causal))
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in held], dim)


def ring_join(parts: Any, *, causal: bool = False, dim: int = -2) -> torch.Tensor:
    """Return the complete sequence from the parts of all ranks, the inverse of ``ring_split``.

    Parameters
    ----------
    parts : iterable of torch.Tensor
        One tensor per rank, in the order of the ranks. All must have the same length along ``dim``.
    causal : bool, default False
        Whether the parts are in the zigzag order of ``causal=True``.
    dim : int, default -2
        Axis of the sequence. -2 is for (batch, heads, seqlen, head_dim).

    Returns
    -------
    torch.Tensor
        The rows of all parts, in the order of the sequence.

    Raises
    ------
    TypeError
        If ``causal`` is no bool.
    ValueError
        If there are no parts, or if their lengths along ``dim`` differ. With ``causal`` and more
        than one part, also if that length is odd.

    See Also
    --------
    ring_split : Return the part of a sequence that a rank holds.

    Examples
    --------
    >>> import torch, fa_numba.torch
    >>> fa_numba.torch.ring_join([torch.tensor([0, 3]), torch.tensor([1, 2])], causal=True, dim=0)
    tensor([0, 1, 2, 3])
    """
    parts, pieces = list(parts), {}
    sizes = [x.shape[dim] for x in parts]
    if len(set(sizes)) != 1:
        raise ValueError(
            f"parts must contain one or more tensors of one size along axis dim={dim}, got sizes "
            f"{sizes}"
        )
    size = sum(sizes)
    for rank, x in enumerate(parts):
        at = 0
        for begin, end in rows_of(rank, len(parts), size, as_flag("causal", causal)):
            pieces[begin] = x.narrow(dim, at, end - begin)
            at += end - begin
    return torch.cat([pieces[begin] for begin in sorted(pieces)], dim)
