"""Text by a small language model, character by character: a cache of keys and values, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import fa_numba

from ..lab.measure.workloads import SEED
from . import small_model


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
        cls, sizes: small_model.Sizes, sequences: int, length: int, page_size: int,
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


def whole(dtype: Any, **options: Any) -> small_model.Attend:
    """Attention without a cache, in the dtype that the array `dtype` has."""

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        arrays = (_like(x, dtype) for x in (q, k, v))
        return _like(fa_numba.flash_attention_2(*arrays, causal=True, **options), q)

    return attend


def steps(
    w: small_model.Weights, sizes: small_model.Sizes, characters: Any, attend: small_model.Attend,
    *, first: int, cached: bool,
) -> Iterator[int]:  # fmt: skip
    """Put the likeliest character at each place of (sequences, length) from `first` on; yields how
    many there are then. If `cached`, `attend` is given the rows that are new since the last step.
    """
    begin = 0
    for n in range(first, characters.shape[1]):
        found = small_model.logits(w, sizes, characters[:, begin:n], attend)
        characters[:, n] = found[:, -1].argmax(-1)
        begin = n if cached else 0
        yield n + 1
