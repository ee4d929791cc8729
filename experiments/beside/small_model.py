"""A small language model, run with NumPy or torch and any attention, and its text, character by
character, with a cache of keys and values or none.

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
        heads = attend(layer, q, k, v).swapaxes(1, 2).reshape(*x.shape[:2], sizes.width)
        x = x + heads @ w[f"{layer}.out"]
        hidden = _norm(x) @ w[f"{layer}.up"]
        x = x + (hidden * (hidden > 0)) @ w[f"{layer}.down"]
    return _norm(x) @ w["head"]


def _norm(x: Any) -> Any:
    return x * ((x * x).mean(-1, keepdims=True) + EPSILON) ** -0.5


def _heads(qkv: Any, sizes: Sizes) -> list[Any]:
    """(B, N, 3 H d) as three of (B, H, N, d)."""
    B, N, _ = qkv.shape
    D = sizes.width
    parts = (qkv[:, :, n * D : (n + 1) * D] for n in range(3))
    return [x.reshape(B, N, sizes.heads, sizes.head_dim).swapaxes(1, 2) for x in parts]


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
