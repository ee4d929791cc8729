"""Attention for torch, with gradients: fa_numba's two passes as one differentiable function."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

import fa_numba
from fa_numba.checks import as_flag, kind_of
from fa_numba.host import placement
from fa_numba.host.arrays import MASKS, added_mask, on_host, operand
from fa_numba.host.planning import check_algorithm
from fa_numba.options import AttentionOptions, check_names, documents_options
from fa_numba.tiling import Tiles

try:
    import torch
    from torch.autograd.function import once_differentiable
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "fa_numba.torch needs PyTorch 2.5 or newer, which is not installed: "
        "pip install 'torch>=2.5'",
        name="torch",
    ) from error

__all__ = ["attention"]

# Read to the host once, and kept for the backward pass as they were.
_ON_HOST = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "block_mask")


@documents_options
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    algorithm: str = "fa2",
    return_lse: bool = False,
    deterministic: bool | None = False,
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    kv_splits: int | str = "auto",
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``fa_numba.attention`` of torch tensors, differentiable in q, k, v and ``bias``.

    q is (B, Hq, Nq, d), k and v (B, Hk, Nk, d), all float32, float16 or bfloat16, any strides, on
    one device; with ``layout="bnhd"`` (B, Nq, Hq, d) and (B, Nk, Hk, d); with ``cu_seqlens_q`` and
    ``cu_seqlens_k`` (total, Hq, d) and (total, Hk, d). Nothing is copied on a GPU, and everything
    runs on torch's current stream. CPU tensors go through the GPU, or the emulator where there is
    none.

    ``options`` as listed below, but that ``bias``, ``alibi_slopes`` and ``attn_mask`` are tensors,
    a mask of numbers is differentiated too, and without a ``seed`` dropout draws one from torch's
    default CPU generator, which torch.manual_seed sets; the backward pass drops the same elements.
    ``tiles`` are the forward pass's block sizes, threads and stages, ``backward_tiles`` the
    backward pass's, which are those of ``tiles`` unless given; its kernels have no choice of
    stages. With a ``block_mask`` both have its blocks. ``kv_splits`` is the forward pass's, of
    "fa2" alone.

    ``deterministic`` is about the backward pass of "fa2" alone: True sums dq in a fixed order, as
    the other algorithms always do, None asks torch.are_deterministic_algorithms_enabled(). The
    gradient of a bias has no fixed order over the axes that the bias repeats.

    Returns O, in q's shape and dtype; with ``return_lse`` (O, L), L float32 (B, Hq, Nq), or (Hq,
    total), the natural logarithm of the rows' sums of exponentials, through which no gradient
    flows.

    Over pages of a cache (``block_table``) there are no gradients: tensors that require one are
    refused.

    Raises ValueError or TypeError, before anything runs, as ``fa_numba.attention`` and, where a
    gradient is wanted, ``fa_numba.attention_backward`` do. Gradients of the gradients are refused,
    in the backward pass, by a RuntimeError.

    >>> import torch, fa_numba.torch
    >>> q, k, v = (torch.ones(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    >>> fa_numba.torch.attention(q, k, v, causal=True).sum().backward()
    >>> v.grad.sum().item()
    64.0
    """
    check_names(options)
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    bias, slopes = given.pop("bias", None), given.pop("alibi_slopes", None)
    mask = given.pop("attn_mask", None)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "alibi_slopes": slopes, "attn_mask": mask}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name in "qkv"):
            raise TypeError(f"{name} is {kind_of(x)}: allowed is a torch tensor")
    check_algorithm(algorithm)
    if mask is not None:
        bias = _bias_of(mask, bias)
    return_lse = as_flag("return_lse", return_lse)
    if backward_tiles is not None and not isinstance(backward_tiles, Tiles):
        raise TypeError(
            f"backward_tiles is {backward_tiles!r}: allowed is a Tiles(Br=..., Bc=...) or None"
        )
    if deterministic is not None and not isinstance(deterministic, (bool, np.bool_)):
        raise TypeError(f"deterministic is {deterministic!r}: allowed is True or False, or None")
    if deterministic and algorithm != "fa2":
        raise ValueError(
            f"deterministic is True with algorithm {algorithm!r}: only fa2 has a choice, the "
            "others' sums always have one order"
        )
    wanted = torch.is_grad_enabled()
    if wanted and slopes is not None and slopes.requires_grad:
        raise ValueError(
            "alibi_slopes requires a gradient and attention computes none: allowed is a tensor "
            "that requires none, such as alibi_slopes.detach()"
        )
    paged = "block_table" in given
    if paged and wanted:
        for name, x in {"q": q, "k": k, "v": v, "bias": bias}.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient and attention over pages (block_table) computes "
                    f"none: allowed is a tensor that requires none, such as {name}.detach(), or a "
                    "call under torch.no_grad()"
                )
    for name in _ON_HOST:
        if name in given and not (paged and name == "kv_lens"):
            given[name] = np.array(on_host(name, given[name]))
    given |= {"algorithm": algorithm, "tiles": tiles}
    differentiable = wanted and any(x is not None and x.requires_grad for x in (q, k, v, bias))
    backward = {}
    if differentiable:
        backward = _check_backward(q, k, bias, slopes, deterministic, given, backward_tiles)
    if given.get("seed") is None:
        # Drawn only where it is used: a call without dropout leaves the generator alone.
        given["seed"] = _drawn_seed() if given.get("dropout_p") else 0
    ahead = {"kv_splits": kv_splits} if algorithm == "fa2" or kv_splits != "auto" else {}
    if not differentiable:
        given |= {"bias": bias, "alibi_slopes": slopes, **ahead}
        return fa_numba.attention(q, k, v, return_lse=return_lse, **given)
    out, lse = _Attention.apply(q, k, v, bias, slopes, given, ahead, backward)
    return (out, lse) if return_lse else out


def _bias_of(mask: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What ``attn_mask`` adds to the scores, differentiable in a mask of numbers."""
    if bias is not None:
        raise ValueError(
            f"attn_mask is given, of shape {tuple(mask.shape)}, with a bias: allowed is one of the "
            "two, and numbers in attn_mask are added as a bias is"
        )
    kind = str(mask.dtype).removeprefix("torch.")
    if kind not in MASKS:
        raise TypeError(f"attn_mask has dtype {kind}: allowed is {' or '.join(MASKS)}")
    return added_mask(mask)


def _check_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: Any,
    slopes: Any,
    deterministic: Any,
    given: dict,
    tiles: Tiles | None,
) -> dict[str, Any]:
    """What the backward pass takes beside the forward's options; raises as that pass would."""
    algorithm, strict = given["algorithm"], deterministic is None
    dbias = bias is not None and bias.requires_grad
    if strict:
        deterministic = torch.are_deterministic_algorithms_enabled()
    own: dict[str, Any] = {"deterministic": deterministic} if algorithm == "fa2" else {}
    if tiles is not None:
        own["tiles"] = tiles
    elif isinstance(given["tiles"], Tiles):
        own["tiles"] = given["tiles"].for_backward()
    first = operand("q", q.detach())
    asked = {"dtype": first.dtype, "passes": "bwd", "return_dbias": dbias, **given, **own}
    with placement.placed(first):
        try:
            plan = fa_numba.plan(q.shape, k.shape, bias=bias, alibi_slopes=slopes, **asked)
        except ValueError as error:
            if tiles is None or not str(error).startswith("tiles:"):
                raise
            raise ValueError(f"backward_{error}") from error
        placement.check_size(plan)
    if strict and deterministic and dbias and plan.problem.bias != plan.problem.score_shape:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} and requires a gradient, and torch was told to be "
            "deterministic: its gradient is summed in no fixed order, allowed is "
            f"{plan.problem.score_shape}"
        )
    return own


def _drawn_seed() -> int:
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


class _Attention(torch.autograd.Function):
    """(O, L) of q, k, v, bias and slopes; ``common`` is for both passes, ``ahead`` for forward,
    ``own`` for backward.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, slopes, common, ahead, own):
        out, lse = fa_numba.attention(
            q, k, v, return_lse=True, bias=bias, alibi_slopes=slopes, **common, **ahead
        )
        ctx.save_for_backward(q, k, v, bias, slopes, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.options = common | own
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse):
        nothing = (None,) * 8
        if dout is None:
            return nothing
        q, k, v, bias, slopes, out, lse = ctx.saved_tensors
        found = fa_numba.attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            return_dbias=ctx.needs_input_grad[3],
            bias=bias,
            alibi_slopes=slopes,
            **ctx.options,
        )
        needed = zip(found, ctx.needs_input_grad, strict=False)
        gradients = tuple(gradient if need else None for gradient, need in needed)
        return gradients + nothing[len(gradients) :]
