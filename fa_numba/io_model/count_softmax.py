"""Accesses of the softmax of vectors (arXiv 1805.02867)."""

from __future__ import annotations

from fa_numba.checks import as_size, check_name
from fa_numba.io_model.accesses import Accesses

# Passes over a vector that load it; one store more.
_LOADS = {"naive": 2, "safe": 3, "online": 2}


def check_softmax(algorithm: str) -> None:
    """Raise ValueError unless `algorithm` is "naive", "safe" or "online"."""
    check_name("algorithm", algorithm, tuple(_LOADS))


def softmax(batch: int, elements: int, algorithm: str) -> Accesses:
    """Accesses of the softmax of `batch` vectors X of so many `elements`, float32.

    The result is Y. Per element, as the paper counts (its sections 2 and 3):
        naive   loads X 2 (the sum; the result)             stores Y 1    3 in all
        safe    loads X 3 (the maximum; the sum; the result) stores Y 1    4 in all
        online  loads X 2 (both at once; the result)         stores Y 1    3 in all
    """
    check_softmax(algorithm)
    count = as_size("batch", batch) * as_size("elements", elements)
    return Accesses({"X": _LOADS[algorithm] * count}, {"Y": count})
