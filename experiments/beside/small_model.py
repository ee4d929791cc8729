"""A small language model in NumPy or torch with any attention, with or without a K/V cache.

Each layer normalises by the root mean square, without parameters, and uses ReLU. There are no
position vectors. The model uses ALiBi instead: each head subtracts its slope times the distance
from the scores. A text may therefore be longer than the texts of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import fa_numba

from ..lab.measure.workloads import SEED

Weights = Mapping[str, Any]
# Takes (layer, q, k, v) and returns the output. The arrays have shape (B, H, N, d).
LayerAttention = Callable[[int, Any, Any, Any], Any]

EPSILON = 1e-5


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    `alphabet` is the number of different characters. The model has `layers` layers. Each layer has
    `heads` heads of `head_dim` columns.
    """

    alphabet: int
    heads: int
    head_dim: int
    layers: int

    @property
    def width(self) -> int:
        """Return the number of columns of all heads together."""
        return self.heads * self.head_dim

    @property
    def slopes(self) -> np.ndarray:
        """Return the ALiBi slopes of the heads: 1/2, 1/4, 1/8 ... (Press et al. 2022)."""
        return (2.0 ** -np.arange(1, self.heads + 1)).astype(np.float32)


def logits(w: Weights, sizes: Sizes, characters: Any, layer_attention: LayerAttention) -> Any:
    """Return the logits (B, N, alphabet) for characters (B, N), given as numbers.

    The arrays are NumPy arrays or torch tensors, like the weights `w`. `layer_attention` takes the
    number of a layer, q, k and v, and computes the attention of the layer.
    """
    x = w["characters"][characters]
    for layer in range(sizes.layers):
        q, k, v = _heads(_norm(x) @ w[f"{layer}.qkv"], sizes)
        heads = layer_attention(layer, q, k, v).swapaxes(1, 2).reshape(*x.shape[:2], sizes.width)
        x = x + heads @ w[f"{layer}.out"]
        hidden = _norm(x) @ w[f"{layer}.up"]
        x = x + (hidden * (hidden > 0)) @ w[f"{layer}.down"]
    return _norm(x) @ w["head"]


def _norm(x: Any) -> Any:
    """Return x divided by the root mean square of each row."""
    return x * ((x * x).mean(-1, keepdims=True) + EPSILON) ** -0.5


def _heads(qkv: Any, sizes: Sizes) -> list[Any]:
    """Split an array (B, N, 3 H d) into q, k and v of shape (B, H, N, d)."""
    B, N, _ = qkv.shape
    D = sizes.width
    parts = (qkv[:, :, n * D : (n + 1) * D] for n in range(3))
    return [x.reshape(B, N, sizes.heads, sizes.head_dim).swapaxes(1, 2) for x in parts]


def _like(x: Any, other: Any) -> Any:
    """Return `x` in the dtype of the array `other`."""
    return x.to(other.dtype) if hasattr(x, "to") else x.astype(other.dtype)


@dataclass
class Cache:
    """The keys and values of every layer, in pages.

    | field | meaning |
    |---|---|
    | pages | the pages of K and of V of each layer |
    | block_table | the pages of each sequence |
    | kv_lens | number of keys of each sequence before the current step |
    | then | number of keys of each sequence after the current step |
    | options | further options of `flash_attention_2` |
    """

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
        """Return an empty cache.

        Parameters
        ----------
        sizes : Sizes
            Sizes of the model.
        sequences : int
            Number of sequences.
        length : int
            Largest number of keys of a sequence.
        page_size : int
            Rows of a page.
        put : callable
            Takes a NumPy array and a dtype, and returns the array in memory of the model's device.
        dtype : str
            Dtype of the keys and values.
        **options
            Further options of `flash_attention_2`.

        Returns
        -------
        Cache
            The cache.
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
        """Append k and v to the cache of a layer, and return the attention of q to all keys.

        In each step, the layers must be called in order, beginning with layer 0.
        """
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


def whole(dtype: Any, **options: Any) -> LayerAttention:
    """Return a function that computes the attention of a layer without a cache.

    The function takes (layer, q, k, v) and returns the output, in the dtype of q. For the
    computation, q, k and v are converted to the dtype of `dtype`, which is any array of this dtype.
    `options` are further options of `flash_attention_2`.
    """

    def uncached(layer: int, q: Any, k: Any, v: Any) -> Any:
        arrays = (_like(x, dtype) for x in (q, k, v))
        return _like(fa_numba.flash_attention_2(*arrays, causal=True, **options), q)

    return uncached


def steps(
    w: Weights, sizes: Sizes, characters: Any, layer_attention: LayerAttention,
    *, first: int, cached: bool,
) -> Iterator[int]:  # fmt: skip
    """Write the likeliest next character at each position of `characters`, from `first` on.

    `characters` has the shape (sequences, length), and is changed in place. `layer_attention`
    computes the attention of a layer. After each position, yield the length of the texts so far. If
    `cached` is true, the attention has a K/V cache: the model then gets only the characters that
    are new since the last step.
    """
    begin = 0
    for n in range(first, characters.shape[1]):
        found = logits(w, sizes, characters[:, begin:n], layer_attention)
        characters[:, n] = found[:, -1].argmax(-1)
        begin = n if cached else 0
        yield n + 1
