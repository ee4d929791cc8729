"""Which bytes arrays cover, and whether they share any: for an ``out`` beside its inputs."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from fa_numba.dtypes import STORED

# Candidate solutions tried before two interleaved layouts are taken to overlap.
_OVERLAP_WORK: Any = 100_000


class Memory(Protocol):
    """What an ``Operand`` tells of its memory; strides are in bytes."""

    @property
    def pointer(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


class _Addresses:
    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "data": (memory.pointer, True),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": f"|V{STORED[memory.dtype].bytes}",
            "version": 3,
        }


def _addresses(memory: Memory) -> np.ndarray:
    """An array over the same addresses, of the host or of a GPU; its elements are never read."""
    return np.asarray(_Addresses(memory))


def extent(a: Memory) -> tuple[int, int]:
    """Bytes from the address of ``a`` to the lowest one it covers, and past the highest."""
    reach = [(n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)]
    first, last = sum(min(0, n) for n in reach), sum(max(0, n) for n in reach)
    return first, last + STORED[a.dtype].bytes


def overlaps_itself(a: Memory) -> bool:
    """Whether two elements may lie at one address."""
    axes = sorted((abs(stride), n) for n, stride in zip(a.shape, a.strides, strict=True) if n > 1)
    end = 0  # bytes from the first to the last element of the axes so far
    for stride, n in axes:
        if stride <= end:
            return True
        end += (n - 1) * stride
    return False


def overlap(a: Memory, b: Memory) -> bool:
    """Whether two arrays share a byte; True where that takes too long to find out."""
    try:
        return bool(np.shares_memory(_addresses(a), _addresses(b), max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True
