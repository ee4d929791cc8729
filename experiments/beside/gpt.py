"""A GPT-style model in torch with random weights, any attention, and timed training steps.

A layer has a norm before attention and before the feed-forward network, whose hidden vectors have 4
times the hidden dimension. The input embedding and the output head share their weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa_numba.typing import Algorithm

from ..lab.measure import peers

try:
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint

    from fa_numba.torch import attention
except ImportError:  # pragma: no cover
    torch = None

VOCABULARY = 50304  # GPT-2's, rounded up to a multiple of 64
WARMUP, STEPS = 3, 10
LEARNING_RATE = 1e-4
# Series -> torch's name of the kernel family.
_BACKENDS = {"torch-fa2": "FLASH_ATTENTION", "torch-cudnn": "CUDNN_ATTENTION"}
_OURS: dict[str, Algorithm] = {"fa1-auto": "fa1", "fa2-auto": "fa2"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: its name, layers, hidden dimension, heads and vocabulary."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int = VOCABULARY

    def parameters(self, context: int) -> int:
        """Return the number of parameters of a model with `context` positions."""
        h = self.hidden
        layer = 4 * h * h + 4 * h + 8 * h * h + 5 * h + 4 * h
        return self.layers * layer + (self.vocabulary + context) * h + 2 * h

    def flops(self, batch: int, context: int) -> int:
        """Return the FLOPs of a training step, by the formula of FA-2's Table 1.

        A sequence of N tokens has 6 N p + 12 l h N^2 FLOPs, where p is the number of parameters, l
        is the number of layers and h is the hidden dimension. The formula does not take into
        account that a causal mask halves the work of attention.
        """
        N = context
        own = 6 * N * self.parameters(N) + 12 * self.layers * self.hidden * N * N
        return batch * own


def causal_attention(series: str) -> Callable[[Any, Any, Any], Any]:
    """Return the function that computes causal attention by a series, with gradients.

    The function takes q, k and v of shape (batch, heads, context, head_dim).
    """
    if series in _OURS:
        return lambda q, k, v: attention(q, k, v, causal=True, algorithm=_OURS[series])
    if series == "torch-unfused":
        return unfused
    backend = getattr(SDPBackend, _BACKENDS[series])

    def fused(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return fused


def unfused(q: Any, k: Any, v: Any) -> Any:
    """Return causal attention, computed in separate steps that store S and P in memory."""
    N = q.shape[-2]
    hidden = torch.ones(N, N, dtype=torch.bool, device=q.device).triu_(1)
    return peers.unfused(q, k, v, q.shape[-1] ** -0.5, hidden)


def model(sizes: Sizes, context: int, device: str, seed: int = 0) -> Any:
    """Return the parameters of a model by name, normal random numbers in float32.

    The standard deviation is 0.02. The weights of norms are 1, and biases are 0.
    """
    h, made = sizes.hidden, {}
    rng = torch.Generator(device).manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"tokens": (sizes.vocabulary, h), "places": (context, h)}
    for n in range(sizes.layers):
        shapes |= {
            f"{n}.norm": (h,), f"{n}.norm.bias": (h,), f"{n}.qkv": (3 * h, h),
            f"{n}.qkv.bias": (3 * h,), f"{n}.out": (h, h), f"{n}.out.bias": (h,),
            f"{n}.norm_mlp": (h,), f"{n}.norm_mlp.bias": (h,), f"{n}.up": (4 * h, h),
            f"{n}.up.bias": (4 * h,), f"{n}.down": (h, 4 * h), f"{n}.down.bias": (h,),
        }  # fmt: skip
    shapes |= {"norm": (h,), "norm.bias": (h,)}
    for name, shape in shapes.items():
        if len(shape) == 2:
            w = 0.02 * torch.randn(shape, generator=rng, device=device)
        else:
            w = torch.full(shape, float("bias" not in name), device=device)
        made[name] = w.requires_grad_()
    return made


def loss(
    w: dict[str, Any], sizes: Sizes, tokens: Any, attend: Callable[..., Any], recompute: bool
) -> Any:
    """Return the cross entropy of the model on tokens (batch, context + 1).

    `w` contains the parameters by name. `attend` computes attention from q, k and v. If `recompute`
    is true, the backward pass computes each layer again instead of keeping the layer's intermediate
    results.
    """
    x = F.embedding(tokens[:, :-1], w["tokens"]) + w["places"]
    for n in range(sizes.layers):
        if recompute:
            x = checkpoint(_layer, w, n, sizes, x, attend, use_reentrant=False)
        else:
            x = _layer(w, n, sizes, x, attend)
    logits = F.linear(_norm(w, "norm", x), w["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _layer(w: dict[str, Any], n: int, sizes: Sizes, x: Any, attend: Callable[..., Any]) -> Any:
    B, N, h = x.shape

    def linear(name: str, x: Any) -> Any:
        return F.linear(x, w[f"{n}.{name}"], w[f"{n}.{name}.bias"])

    qkv = linear("qkv", _norm(w, f"{n}.norm", x))
    q, k, v = qkv.view(B, N, 3, sizes.heads, h // sizes.heads).permute(2, 0, 3, 1, 4)
    x = x + linear("out", attend(q, k, v).transpose(1, 2).reshape(B, N, h))
    return x + linear("down", F.gelu(linear("up", _norm(w, f"{n}.norm_mlp", x))))


def _norm(w: dict[str, Any], name: str, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], w[name], w[f"{name}.bias"])


def train(
    sizes: Sizes, batch: int, context: int, series: str, recompute: bool, device: str = "cuda"
) -> tuple[list[float], float]:
    """Train a model for WARMUP + STEPS steps, in bf16 autocast with AdamW.

    `recompute` is described in `loss`. Return the milliseconds of each of the last STEPS steps, and
    the loss of the last step. Every step trains on the same random tokens, so that the loss must
    fall. Raise ValueError if the loss does not fall.
    """
    w = model(sizes, context, device)
    rng = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(sizes.vocabulary, (batch, context + 1), generator=rng, device=device)
    optimizer = torch.optim.AdamW(w.values(), lr=LEARNING_RATE, fused=device == "cuda")
    attend, samples, losses = causal_attention(series), [], []
    for _ in range(WARMUP + STEPS):
        start = _now(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            found = loss(w, sizes, tokens, attend, recompute)
        found.backward()
        optimizer.step()
        samples.append(1e3 * (_now(device) - start))
        losses.append(float(found.detach()))
    if not losses[-1] < losses[0]:
        raise ValueError(f"the loss must fall, got {losses[0]:.4f} first and {losses[-1]:.4f} last")
    return samples[WARMUP:], losses[-1]


def _now(device: str) -> float:
    """Return the time in seconds after all work of the GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
