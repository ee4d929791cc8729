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
    """What flex_attention takes for one of our variants, with what our function takes from outside.
    Raises KeyError for a variant that has no counterpart here.
    """
    ((option, function),) = make(N, H).items()
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells}
    arrays = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
    moved = {name: torch.as_tensor(x, device=place) for name, x in arrays.items()}
    return {option: _MADE[make.__name__](**values | moved)}


# By the variant's name: of what ours takes from outside the function that torch's takes.
_MADE: Mapping[str, Callable[..., Callable]] = {
    "causal": lambda: lambda b, h, i, j: j <= i,
    "sliding_window": lambda width: lambda b, h, i, j: (i >= j) & (i - j < width),
    "dilated": lambda step, width: (
        lambda b, h, i, j: (i >= j) & (i - j < width) & ((i - j) % step == 0)
    ),
    "prefix_lm": lambda prefix: lambda b, h, i, j: (j <= i) | (j < prefix),
    "documents": lambda of: lambda b, h, i, j: (of[i] == of[j]) & (j <= i),
    "alibi": lambda slopes: lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
    "relative_positions": lambda table, N: lambda s, b, h, i, j: s + table[h, i - j + N],
    "softcap": lambda cap: lambda s, b, h, i, j: cap * torch.tanh(s / cap),
    "sink_tokens": lambda first, width: (
        lambda b, h, i, j: (j <= i) & ((j < first) | (i - j < width))
    ),
    "speculated_tree": lambda sees: lambda b, h, i, j: sees[i, j],
    "block_diagonal": lambda size: lambda b, h, i, j: i // size == j // size,
    "t5_buckets": lambda table, bucket: lambda s, b, h, i, j: s + table[h, bucket[(i - j).abs()]],
    "two_cosines": lambda short, far: (
        lambda s, b, h, i, j: s + torch.cos(short * (i - j)) + torch.cos(far * (j - i))
    ),
    "neighbourhood": lambda side, reach: (
        lambda b, h, i, j: (
            ((i // side - j // side).abs() <= reach) & ((i % side - j % side).abs() <= reach)
        )
    ),
    "random_blocks": lambda kept, size: lambda b, h, i, j: kept[i // size, j // size] | (i == j),
}


def warm() -> None:
    double = torch.compile(lambda x: x * 2, dynamic=False)
    double(torch.zeros(64, device="cuda"))
    torch.cuda.synchronize()
