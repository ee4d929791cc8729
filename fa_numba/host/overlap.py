"""Functions that find out whether two arrays share memory, such as ``out`` and an input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_numba.dtypes import STORED

if TYPE_CHECKING:
    from fa_numba.host.arrays import Operand

# Limit for the work of NumPy's search. Beyond it, two arrays count as overlapping.
_OVERLAP_WORK: Any = 100_000


def _addresses(memory: Operand) -> np.ndarray:
    """Return a NumPy array that has the address, shape and strides of ``memory``.

    ``memory`` may be on a GPU. Only the layout of the result may be used: its elements must not be
    read.
    """
    interface: dict[str, object] = {"data": (memory.pointer, True), "version": 3}
    interface |= {"shape": memory.shape, "strides": memory.strides}
    interface["typestr"] = f"|V{STORED[memory.dtype].bytes}"
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def extent(a: Operand) -> tuple[int, int]:
    """Return (begin, end) of the bytes that ``a`` covers, relative to the address of ``a``.

    ``begin`` is negative if an axis of ``a`` has a negative stride.
    """
    reach = [(n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)]
    first, last = sum(min(0, n) for n in reach), sum(max(0, n) for n in reach)
    return first, last + STORED[a.dtype].bytes


def overlaps_itself(a: Operand) -> bool:
    """Return whether two elements of ``a`` may have the same address."""
    axes = sorted((abs(stride), n) for n, stride in zip(a.shape, a.strides, strict=True) if n > 1)
    end = 0  # bytes from the first to the last element of the axes so far
    for stride, n in axes:
        if stride <= end:
            return True
        end += (n - 1) * stride
    return False


def overlap(a: Operand, b: Operand) -> bool:
    """Return whether two arrays share a byte. Return True if this takes too long to find out."""
    try:
        return bool(np.shares_memory(_addresses(a), _addresses(b), max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True
