"""A small language model: trained in NumPy on the host, run with NumPy or torch and any attention,
and its text, character by character, with a cache of keys and values or none.

Pre-norm by root mean squares, without parameters; ReLU; no vectors of places, but ALiBi: each head
takes off its slope times the distance, so that a text may be longer than those that were learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import fa_numba

from ..lab.measure.workloads import SEED

Weights = Mapping[str, Any]
# attend(layer, q, k, v): (B, H, N, d) each.
Attend = Callable[[int, Any, Any, Any], Any]

EPSILON = 1e-5
LEARNING_RATE, WARMUP = 3e-3, 20
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Sizes:
    """Of a model: characters of the alphabet, heads of `head_dim` columns, layers."""

    alphabet: int
    heads: int
    head_dim: int
    layers: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def slopes(self) -> np.ndarray:
        """ALiBi's, of half a head's distance each time (Press et al. 2022)."""
        return (2.0 ** -np.arange(1, self.heads + 1)).astype(np.float32)


def logits(w: Weights, sizes: Sizes, characters: Any, attend: Attend) -> Any:
    """(B, N, alphabet) of characters (B, N), NumPy arrays or torch tensors like the weights."""
    x = w["characters"][characters]
    for layer in range(sizes.layers):
        q, k, v = _heads(_norm(x) @ w[f"{layer}.qkv"], sizes)
        x = x + _joined(attend(layer, q, k, v)) @ w[f"{layer}.out"]
        hidden = _norm(x) @ w[f"{layer}.up"]
        x = x + (hidden * (hidden > 0)) @ w[f"{layer}.down"]
    return _norm(x) @ w["head"]


def _norm(x: Any) -> Any:
    return x * ((x * x).mean(-1, keepdims=True) + EPSILON) ** -0.5


def _heads(qkv: Any, sizes: Sizes) -> list[Any]:
    """(B, N, 3 H d) as three of (B, H, N, d)."""
    D = sizes.width
    return [_apart(qkv[:, :, n * D : (n + 1) * D], sizes) for n in range(3)]


def _apart(x: Any, sizes: Sizes) -> Any:
    """(B, N, H d) as (B, H, N, d)."""
    B, N, _ = x.shape
    return x.reshape(B, N, sizes.heads, sizes.head_dim).swapaxes(1, 2)


def _joined(x: Any) -> Any:
    """(B, H, N, d) as (B, N, H d)."""
    B, H, N, d = x.shape
    return x.swapaxes(1, 2).reshape(B, N, H * d)


def weights(sizes: Sizes, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal, of deviation 1 over the root of what is summed; the last of a layer less."""
    D = sizes.width
    shapes = {"characters": (sizes.alphabet, D), "head": (D, sizes.alphabet)}
    for layer in range(sizes.layers):
        shapes |= {f"{layer}.qkv": (D, 3 * D), f"{layer}.out": (D, D)}
        shapes |= {f"{layer}.up": (D, 4 * D), f"{layer}.down": (4 * D, D)}
    return {
        name: (draw.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def train(
    sizes: Sizes, text: np.ndarray, steps: int, batch: int, context: int, seed: int
) -> Iterator[tuple[float, dict[str, np.ndarray]]]:
    """After each step by Adam: the loss of its batch, in nats a character, and the weights, which
    the next step changes. `text`: characters as numbers.
    """
    draw = np.random.default_rng(seed)
    w = weights(sizes, draw)
    means = {name: np.zeros_like(x) for name, x in w.items()}
    squares = {name: np.zeros_like(x) for name, x in w.items()}
    for step in range(1, steps + 1):
        starts = draw.integers(0, len(text) - context, (batch, 1))
        window = text[starts + np.arange(context + 1)]
        loss, gradients = loss_and_gradients(w, sizes, window)
        rate = LEARNING_RATE * min(1.0, step / WARMUP)
        for name, g in gradients.items():
            means[name] += (1 - BETAS[0]) * (g - means[name])
            squares[name] += (1 - BETAS[1]) * (g * g - squares[name])
            mean, square = means[name] / (1 - BETAS[0] ** step), squares[name]
            w[name] -= rate * mean / (np.sqrt(square / (1 - BETAS[1] ** step)) + 1e-8)
        yield loss, w


def loss_and_gradients(
    w: Weights, sizes: Sizes, window: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean cross entropy of windows (B, context + 1), in nats, and its gradient by each weight."""
    characters, wanted = window[:, :-1], window[:, 1:]
    B, N = characters.shape
    bias = _bias(sizes, N)
    x = w["characters"][characters]
    kept = []
    for layer in range(sizes.layers):
        y = _norm(x)
        q, k, v = _heads(y @ w[f"{layer}.qkv"], sizes)
        P = _softmax(q @ k.swapaxes(2, 3) * sizes.head_dim**-0.5 + bias)
        heads = _joined(P @ v)
        middle = x + heads @ w[f"{layer}.out"]
        z = _norm(middle)
        hidden = z @ w[f"{layer}.up"]
        kept.append((x, y, q, k, v, P, heads, middle, z, hidden))
        x = middle + np.maximum(hidden, 0) @ w[f"{layer}.down"]
    last = _norm(x)
    chances = _softmax(last @ w["head"])
    at = (*np.indices((B, N)), wanted)
    loss = -np.log(chances[at]).mean()

    chances[at] -= 1
    dlogits = chances / (B * N)
    found = {"head": _by_weight(last, dlogits)}
    dx = _norm_backward(x, dlogits @ w["head"].T)
    for layer in reversed(range(sizes.layers)):
        x, y, q, k, v, P, heads, middle, z, hidden = kept[layer]
        found[f"{layer}.down"] = _by_weight(np.maximum(hidden, 0), dx)
        dhidden = (dx @ w[f"{layer}.down"].T) * (hidden > 0)
        found[f"{layer}.up"] = _by_weight(z, dhidden)
        dx = dx + _norm_backward(middle, dhidden @ w[f"{layer}.up"].T)
        found[f"{layer}.out"] = _by_weight(heads, dx)
        dO = _apart(dx @ w[f"{layer}.out"].T, sizes)
        dP = dO @ v.swapaxes(2, 3)
        dS = P * (dP - (P * dP).sum(-1, keepdims=True)) * sizes.head_dim**-0.5
        parts = (dS @ k, dS.swapaxes(2, 3) @ q, P.swapaxes(2, 3) @ dO)
        dqkv = np.concatenate([_joined(part) for part in parts], -1)
        found[f"{layer}.qkv"] = _by_weight(y, dqkv)
        dx = dx + _norm_backward(x, dqkv @ w[f"{layer}.qkv"].T)
    found["characters"] = np.zeros_like(w["characters"])
    np.add.at(found["characters"], characters, dx)
    return float(loss), found


def _bias(sizes: Sizes, N: int) -> np.ndarray:
    """(H, N, N): ALiBi, and -inf above the diagonal."""
    distance = np.arange(N)[:, None] - np.arange(N)
    bias = -sizes.slopes[:, None, None] * np.abs(distance)
    return np.where(distance < 0, np.float32(-np.inf), bias.astype(np.float32))


def _softmax(S: np.ndarray) -> np.ndarray:
    P = np.exp(S - S.max(-1, keepdims=True))
    return P / P.sum(-1, keepdims=True)


def _by_weight(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def _norm_backward(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    factor = ((x * x).mean(-1, keepdims=True) + EPSILON) ** -0.5
    y = x * factor
    return factor * (dy - y * (dy * y).mean(-1, keepdims=True))


def _like(x: Any, other: Any) -> Any:
    """`x` in the dtype of `other`."""
    return x.to(other.dtype) if hasattr(x, "to") else x.astype(other.dtype)


@dataclass
class Cache:
    """Keys and values of every layer in pages, a block table, lengths `kv_lens` and `then`."""

    pages: list[tuple[Any, Any]]
    block_table: Any
    kv_lens: Any
    then: Any
    options: dict[str, Any]

    @classmethod
    def of(
        cls, sizes: Sizes, sequences: int, length: int, page_size: int,
        put: Callable[[np.ndarray, str], Any], dtype: str, **options: Any,
    ) -> Cache:  # fmt: skip
        """An empty one for `length` rows a sequence; `put(array, dtype)` brings an array to where
        the model runs. `options` are those of flash_attention_2.
        """
        each = -(-length // page_size)
        order = np.random.default_rng(SEED).permutation(sequences * each)
        shape = (sequences * each, sizes.heads, page_size, sizes.head_dim)
        pages = [
            (put(np.zeros(shape, np.float32), dtype), put(np.zeros(shape, np.float32), dtype))
            for _ in range(sizes.layers)
        ]
        table = put(order.reshape(sequences, each), "int32")
        before, then = (put(np.zeros(sequences, np.int32), "int32") for _ in range(2))
        return cls(pages, table, before, then, options)

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Attention of the new rows to all rows, which the new ones are put to."""
        k_pages, v_pages = self.pages[layer]
        if layer == 0:
            self.kv_lens[:] = self.then
            self.then += k.shape[2]
        new = (_like(k, k_pages), _like(v, v_pages))
        fa_numba.append_kv(k_pages, v_pages, *new, self.block_table, self.kv_lens)
        found = fa_numba.flash_attention_2(
            _like(q, k_pages),
            k_pages,
            v_pages,
            block_table=self.block_table,
            kv_lens=self.then,
            causal=True,
            **self.options,
        )
        return _like(found, q)


def whole(dtype: Any, **options: Any) -> Attend:
    """Attention without a cache, in the dtype that the array `dtype` has."""

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        arrays = (_like(x, dtype) for x in (q, k, v))
        return _like(fa_numba.flash_attention_2(*arrays, causal=True, **options), q)

    return attend


def steps(
    w: Weights, sizes: Sizes, characters: Any, attend: Attend,
    *, first: int, cached: bool,
) -> Iterator[int]:  # fmt: skip
    """Put the likeliest character at each place of (sequences, length) from `first` on; yields how
    many there are then. If `cached`, `attend` is given the rows that are new since the last step.
    """
    begin = 0
    for n in range(first, characters.shape[1]):
        found = logits(w, sizes, characters[:, begin:n], attend)
        characters[:, n] = found[:, -1].argmax(-1)
        begin = n if cached else 0
        yield n + 1
