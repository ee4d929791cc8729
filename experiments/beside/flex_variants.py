"""The variants of `experiments.variants` as torch's flex_attention takes them, of tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

Variant = Callable[[int, int], dict[str, Any]]


def given(make: Variant, N: int, H: int, place: str = "cuda") -> dict[str, Any]:
    """What flex_attention takes for one of our variants: its `score_mod` or `mask_mod`.

    Numbers, and arrays at a `place` of torch's, are those that our function takes from outside.
    Raises KeyError for a variant that has no counterpart here.
    """
    ((option, function),) = make(N, H).items()
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells}
    arrays = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
    moved = {name: torch.as_tensor(x, device=place) for name, x in arrays.items()}
    return {option: _MADE[make.__name__](**values | moved)}


def _sliding_window(width: int) -> Callable:
    return lambda b, h, i, j: (i >= j) & (i - j < width)


def _dilated(step: int, width: int) -> Callable:
    return lambda b, h, i, j: (i >= j) & (i - j < width) & ((i - j) % step == 0)


def _prefix_lm(prefix: int) -> Callable:
    return lambda b, h, i, j: (j <= i) | (j < prefix)


def _documents(of: Any) -> Callable:
    return lambda b, h, i, j: (of[i] == of[j]) & (j <= i)


def _alibi(slopes: Any) -> Callable:
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


def _relative_positions(table: Any, N: int) -> Callable:
    return lambda s, b, h, i, j: s + table[h, i - j + N]


def _softcap(cap: float) -> Callable:
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap)


def _sink_tokens(first: int, width: int) -> Callable:
    return lambda b, h, i, j: (j <= i) & ((j < first) | (i - j < width))


def _block_diagonal(size: int) -> Callable:
    return lambda b, h, i, j: i // size == j // size


def _t5_buckets(table: Any, bucket: Any) -> Callable:
    return lambda s, b, h, i, j: s + table[h, bucket[(i - j).abs()]]


def _two_cosines(short: float, far: float) -> Callable:
    return lambda s, b, h, i, j: s + torch.cos(short * (i - j)) + torch.cos(far * (j - i))


def _neighbourhood(side: int, reach: int) -> Callable:
    return lambda b, h, i, j: (
        ((i // side - j // side).abs() <= reach) & ((i % side - j % side).abs() <= reach)
    )


def _random_blocks(kept: Any, size: int) -> Callable:
    return lambda b, h, i, j: kept[i // size, j // size] | (i == j)


_MADE: Mapping[str, Callable[..., Callable]] = {
    "causal": lambda: lambda b, h, i, j: j <= i,
    "sliding_window": _sliding_window,
    "dilated": _dilated,
    "prefix_lm": _prefix_lm,
    "documents": _documents,
    "alibi": _alibi,
    "relative_positions": _relative_positions,
    "softcap": _softcap,
    "sink_tokens": _sink_tokens,
    "speculated_tree": lambda sees: lambda b, h, i, j: sees[i, j],
    "block_diagonal": _block_diagonal,
    "t5_buckets": _t5_buckets,
    "two_cosines": _two_cosines,
    "neighbourhood": _neighbourhood,
    "random_blocks": _random_blocks,
}


def warm() -> None:
    """Have torch load its compilers."""
    double = torch.compile(lambda x: x * 2, dynamic=False)
    double(torch.zeros(64, device="cuda"))
    torch.cuda.synchronize()
