"""Launches taken down once, and made again with other addresses at little cost to the host.

A ``LaunchRecord`` stands where a call's stream would: launches given to it wait, and ``run`` makes
them. What a kernel takes is laid out in memory when it is recorded; a run writes the addresses that
differ from call to call and hands the driver the same memory.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import types

WORKSPACE = -1  # the last of a run's values
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_ALIGNMENT = 256  # bytes, of each array of the workspace


@dataclass(frozen=True)
class DeviceArray:
    """Memory on the GPU as a kernel takes it: address, shape, strides and item size in bytes.

    With a ``slot`` the address counts from where a run says that this slot begins.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any = field(repr=False, default=None)
    itemsize: int = 4
    slot: int | None = None

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Word:
    """A 32-bit integer among launch arguments that a run gives as its value number ``slot``."""

    slot: int


def checked(result: tuple, what: str) -> Any:
    """What a driver's function returned beside its status, or a RuntimeError about ``what``."""
    if result[0] != _SUCCESS:
        raise RuntimeError(f"{what} failed: {driver.CUresult(result[0]).name}")
    return result[-1]


class LaunchRecord:
    """Launches and fills in their order, for one GPU.

    ``workspace_bytes`` is what ``allocate`` was asked for, ``reserved_bytes`` what a run needs.
    """

    def __init__(self) -> None:
        self.workspace_bytes = 0
        self.reserved_bytes = 0
        self._steps: list[tuple[Callable, str]] = []
        self._varying: dict[tuple[int, int], ctypes.c_int64] = {}
        self._used: list = []  # memory that the driver reads, and owners of constant arrays
        self._lock = threading.Lock()

    def allocate(self, shape: tuple[int, ...], dtype: str = "float32") -> DeviceArray:
        """Workspace, there from the first to the last launch of a run."""
        size = np.dtype(dtype).itemsize
        strides = tuple(size * math.prod(shape[n + 1 :]) for n in range(len(shape)))
        array = DeviceArray(self.reserved_bytes, shape, strides, itemsize=size, slot=WORKSPACE)
        self.workspace_bytes += array.nbytes
        self.reserved_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return array

    def launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple) -> None:
        """Take down a launch of ``kernel``, ``compiled`` by ``cuda.core``."""
        words = [
            word
            for ty, x in zip(kernel.argument_types, args, strict=True)
            for word in self._words(ty, x)
        ]
        addresses = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
        self._used += [compiled, args, words, addresses]
        function = driver.CUfunction(int(compiled.handle))
        blocks = (*grid, 1, 1)[:3]
        how = (function, *blocks, kernel.threads, 1, 1, kernel.shared_bytes)
        parameters = ctypes.addressof(addresses)

        def step(stream: driver.CUstream) -> tuple:
            return driver.cuLaunchKernel(*how, stream, parameters, 0)

        self._steps.append((step, f"the launch of {kernel.name} over {blocks} blocks"))

    def clear(self, array: DeviceArray) -> None:
        """Take down that ``array``, whose memory is one piece, is filled with zeros."""
        begin, size = self._word(array), array.nbytes

        def step(stream: driver.CUstream) -> tuple:
            return driver.cuMemsetD8Async(begin.value, 0, size, stream)

        self._steps.append((step, f"clearing {size} bytes"))

    def run(self, values: Sequence[int], stream: int) -> None:
        """Make the launches on ``stream``, with the addresses and words ``values`` by slot.

        The last one is the workspace's address, of ``reserved_bytes`` if there are any.
        """
        order = driver.CUstream(stream)
        with self._lock:  # the driver copies what a kernel takes before it returns
            for (slot, offset), word in self._varying.items():
                word.value = values[slot] + offset
            for step, what in self._steps:
                checked(step(order), what)

    def _word(self, array: DeviceArray) -> ctypes.c_int64:
        """The address of ``array``, in memory that runs write."""
        if array.slot is None:
            return ctypes.c_int64(array.pointer)
        return self._varying.setdefault((array.slot, array.pointer), ctypes.c_int64())

    def _words(self, ty: Any, value: Any) -> tuple:
        """An argument in Numba's ABI.

        Fields of a tuple come one after the other; an array is meminfo, parent, size, itemsize,
        data, shape, strides.
        """
        if isinstance(ty, types.NamedTuple):
            pairs = zip(ty.types, value, strict=True)
            return tuple(word for t, x in pairs for word in self._words(t, x))
        if isinstance(value, DeviceArray):
            head = (0, 0, math.prod(value.shape), value.itemsize)
            words = map(ctypes.c_int64, (*head, *value.shape, *value.strides))
            first = tuple(words)
            return (*first[: len(head)], self._word(value), *first[len(head) :])
        if isinstance(value, Word):  # its low half comes first in memory
            return (self._varying.setdefault((value.slot, 0), ctypes.c_int64()),)
        return (ctypes.c_float(value) if ty == types.float32 else ctypes.c_int32(value),)
