"""A model of CodeLlama-34B's shape in torch with random weights, and timed steps of decoding.

A layer has grouped query heads, root mean square norms and a gated feed-forward network. Rotary
positions are left out, because they take no part in the time of attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fa_numba

try:
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # pragma: no cover
    torch = None

WARMUP, STEPS = 3, 10
# Series -> the option `kv_splits` of our call.
_OURS: dict[str, Any] = {"fa2-auto": 1, "fa2-auto-splits": "auto"}
_BACKENDS = {"torch-fa2": "FLASH_ATTENTION", "torch-cudnn": "CUDNN_ATTENTION"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model; `wide` is the width of the feed-forward network."""

    layers: int
    hidden: int
    heads: int
    heads_k: int
    wide: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """Return the columns of a head."""
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of a layer by name."""
        kv = self.heads_k * self.head_dim
        return {
            "qkv": (self.hidden + 2 * kv, self.hidden),
            "out": (self.hidden, self.hidden),
            "gate_up": (2 * self.wide, self.hidden),
            "down": (self.hidden, self.wide),
        }

    def parameters(self) -> int:
        """Return the number of weights, with the embedding and the output head."""
        layer = sum(rows * columns for rows, columns in self.shapes().values()) + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


def attention_of(series: str) -> Callable[[Any, Any, Any], Any]:
    """Return the function that computes the attention of one query row by a series.

    The function takes q of shape (1, heads, 1, head_dim), and k and v of shape (1, heads_k, keys,
    head_dim).
    """
    if series in _OURS:
        splits = _OURS[series]
        return lambda q, k, v: fa_numba.flash_attention_2(q, k, v, kv_splits=splits)
    backend = getattr(SDPBackend, _BACKENDS[series])

    def fused(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return fused


class Decoder:
    """A model with a K/V cache that is full except for the last position.

    Parameters
    ----------
    sizes : Sizes
        The sizes.
    longest : int
        Positions of the cache.
    device : str
        "cuda" or "cpu".
    dtype : str
        Dtype of weights and cache.
    """

    def __init__(
        self, sizes: Sizes, longest: int, device: str = "cuda", dtype: str = "bfloat16"
    ) -> None:
        self.sizes, self.device = sizes, device
        rng = torch.Generator(device).manual_seed(0)
        kind = getattr(torch, dtype)

        def normal(*shape: int) -> Any:
            return torch.empty(shape, device=device, dtype=kind).normal_(0, 0.02, generator=rng)

        self.layers = [
            {name: normal(*shape) for name, shape in sizes.shapes().items()}
            for _ in range(sizes.layers)
        ]
        self.embedding = normal(sizes.vocabulary, sizes.hidden)
        self.head = normal(sizes.vocabulary, sizes.hidden)
        shape = (sizes.layers, 2, 1, sizes.heads_k, longest, sizes.head_dim)
        self.cache = torch.empty(shape, device=device, dtype=kind).normal_(0, 1, generator=rng)

    def step(self, token: Any, keys: int, attend: Callable[[Any, Any, Any], Any]) -> Any:
        """Compute one step of decoding, and return the next token, a tensor (1,).

        `token` is the last token so far. The step writes its key and value to position `keys - 1`
        of the cache, and attends to the first `keys` positions. `attend` computes attention from q,
        k and v.
        """
        of, x = self.sizes, self.embedding[token]
        kv = of.heads_k * of.head_dim
        for w, (k_cache, v_cache) in zip(self.layers, self.cache, strict=True):
            q, k, v = F.linear(_norm(x), w["qkv"]).split([of.hidden, kv, kv], dim=-1)
            k_cache[:, :, keys - 1], v_cache[:, :, keys - 1] = (
                y.view(1, of.heads_k, of.head_dim) for y in (k, v)
            )
            q = q.view(1, of.heads, 1, of.head_dim)
            heads = attend(q, k_cache[:, :, :keys], v_cache[:, :, :keys])
            x = x + F.linear(heads.reshape(1, of.hidden), w["out"])
            gate, up = F.linear(_norm(x), w["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(_norm(x), self.head).argmax(-1)

    def time(self, keys: int, series: str) -> list[float]:
        """Return the milliseconds of STEPS steps with `keys` keys, after WARMUP steps.

        On a GPU, the steps are replays of a CUDA graph. Without the graph, launching the kernels of
        a step takes longer than the kernels.
        """
        samples = []
        with torch.no_grad():
            run = self._stepping(keys, attention_of(series))
            for _ in range(WARMUP + STEPS):
                start = self._now()
                run()
                samples.append(1e3 * (self._now() - start))
        return samples[WARMUP:]

    def _stepping(self, keys: int, attend: Callable[[Any, Any, Any], Any]) -> Callable[[], Any]:
        """Return a function that computes a step, and takes the next token as its next input."""
        token = torch.zeros(1, dtype=torch.long, device=self.device)

        def run() -> None:
            token.copy_(self.step(token, keys, attend))

        if self.device != "cuda":
            return run
        side = torch.cuda.Stream()  # torch wants a warm-up on another stream before a capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _norm(x: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:])
