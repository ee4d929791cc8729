"""Recordings of launches, which can be repeated with other addresses in little host time.

If ``launch`` gets a ``LaunchRecord`` in place of a stream, nothing is launched. The record writes
the arguments of the kernel to memory, in the form that the driver reads. ``run`` then makes all
recorded launches on a stream.

The addresses of some arrays change from run to run. The record contains the number of a slot for
each of them. ``run`` gets one address for each slot, and writes it into the recorded arguments.
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

from fa_numba.device import mlir
from fa_numba.device.tensor_map import MAP_BYTES, TiledArray, encoded
from fa_numba.integers import round_up

WORKSPACE = -1  # the slot of the workspace: the last one of the values of a run
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_ANYWHERE = 1 << 32  # address in a recorded tensor map, which each run replaces
_ALIGNMENT = 256  # each array of the workspace starts at a multiple of this number of bytes


@dataclass(frozen=True)
class DeviceArray:
    """An array on the GPU as a kernel's argument: the address of its first element, and its layout.

    field      meaning
    pointer    address of the first element. If ``slot`` is set: distance in bytes of the first
               element from the address that ``LaunchRecord.run`` gets for this slot
    shape      lengths of the axes
    strides    distances between neighbouring elements of each axis, in bytes
    owner      object that keeps the memory from being freed, or None
    itemsize   size of an element in bytes
    slot       number of a slot if the address may change from run to run, otherwise None
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
    """A 32-bit integer as a kernel's argument, whose value may change from run to run.

    ``LaunchRecord.run`` gets the value for the slot with the number ``slot``.
    """

    slot: int


def checked(result: tuple, what: str) -> Any:
    """Return the last value that a function of the driver returned.

    Raise RuntimeError if the returned status is an error. ``what`` names the action in the message.
    """
    if result[0] != _SUCCESS:
        raise RuntimeError(
            f"{what} failed: the CUDA driver returned {driver.CUresult(result[0]).name}"
        )
    return result[-1]


class LaunchRecord:
    """The launches of one call on one GPU, and its fills of memory with zeros, in order.

    ``workspace_bytes`` is the size of all arrays that ``allocate`` returned. ``reserved_bytes`` is
    the memory that a run needs for these arrays, with each array rounded up to 256 bytes.
    """

    def __init__(self) -> None:
        self.workspace_bytes = 0
        self.reserved_bytes = 0
        self.kernels: list[Any] = []  # the kernel of each launch
        self.origins: list[Any] = []  # what the launches were planned from
        self.noted: tuple[Any, ...] = ()  # open ``launched_kernels`` that have noted the launches
        self._steps: list[tuple[Callable, str]] = []
        self._varying: dict[tuple[int, int], ctypes.c_int64] = {}
        self._maps: list[tuple[int, int, driver.CUtensorMap]] = []
        self._used: list = []  # memory that the driver reads, and owners of constant arrays
        self._lock = threading.Lock()

    def allocate(self, shape: tuple[int, ...], dtype: str = "float32") -> DeviceArray:
        """Return a new contiguous array of the workspace, as a kernel's argument.

        The memory of the array exists only while ``run`` executes the launches.
        """
        size = np.dtype(dtype).itemsize
        strides = tuple(size * math.prod(shape[n + 1 :]) for n in range(len(shape)))
        array = DeviceArray(self.reserved_bytes, shape, strides, itemsize=size, slot=WORKSPACE)
        self.workspace_bytes += array.nbytes
        self.reserved_bytes += round_up(array.nbytes, _ALIGNMENT)
        return array

    def launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple) -> None:
        """Record a launch of ``kernel``. ``compiled`` is the compiled kernel of ``cuda.core``."""
        words = [
            word
            for ty, x in zip(kernel.argument_types, args, strict=True)
            for word in self._words(ty, x)
        ]
        addresses = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
        self.kernels.append(kernel)
        self._used += [compiled, args, words, addresses]
        function = driver.CUfunction(int(compiled.handle))
        blocks = (*grid, 1, 1)[:3]
        how = (function, *blocks, kernel.threads, 1, 1, kernel.shared_bytes)
        parameters = ctypes.addressof(addresses)

        def step(stream: driver.CUstream) -> tuple:
            return driver.cuLaunchKernel(*how, stream, parameters, 0)

        self._steps.append((step, f"the launch of {kernel.name} over {blocks} blocks"))

    def clear(self, array: DeviceArray) -> None:
        """Record a fill of ``array`` with zeros. The memory of ``array`` must be contiguous."""
        begin, size = self._word(array), array.nbytes

        def step(stream: driver.CUstream) -> tuple:
            return driver.cuMemsetD8Async(begin.value, 0, size, stream)

        self._steps.append((step, f"clearing {size} bytes"))

    def run(self, values: Sequence[int], stream: int) -> None:
        """Make the launches on ``stream``.

        ``values`` contains the address or the 32-bit integer of each slot. If ``reserved_bytes`` is
        not 0, the last value is the address of ``reserved_bytes`` bytes of workspace.
        """
        order = driver.CUstream(stream)
        with self._lock:  # the driver copies the arguments of a launch before it returns
            for (slot, offset), word in self._varying.items():
                word.value = values[slot] + offset
            for slot, offset, tensor_map in self._maps:
                moved = driver.cuTensorMapReplaceAddress(tensor_map, values[slot] + offset)
                checked((*moved, None), "moving a tensor map")
            for step, what in self._steps:
                checked(step(order), what)

    def _word(self, array: DeviceArray) -> ctypes.c_int64:
        """Return the 8 bytes of memory from which the driver reads the address of ``array``.

        If the array has a slot, each run writes the current address to these bytes.
        """
        if array.slot is None:
            return ctypes.c_int64(array.pointer)
        return self._varying.setdefault((array.slot, array.pointer), ctypes.c_int64())

    def _words(self, ty: Any, value: Any) -> tuple:
        """Return an argument of the Numba type ``ty`` as the words that a compiled kernel expects.

        Numba passes a tuple field by field. Numba passes an array as the words meminfo, parent,
        size, itemsize, data, shape and strides, in this order.
        """
        if isinstance(ty, types.NamedTuple):
            pairs = zip(ty.types, value, strict=True)
            return tuple(word for t, x in pairs for word in self._words(t, x))
        if isinstance(value, TiledArray):
            array = value.array
            tensor_map = encoded(value, array.pointer if array.slot is None else _ANYWHERE)
            self._used.append(tensor_map)
            if array.slot is not None:
                self._maps.append((array.slot, array.pointer, tensor_map))
            held = (ctypes.c_uint64 * (MAP_BYTES // 8)).from_address(int(tensor_map.getPtr()))
            return (held, *map(ctypes.c_int64, (*array.shape, *value.layout.steps)))
        if isinstance(value, DeviceArray) and mlir.chosen():
            return mlir.array_words(value, self._word(value))
        if isinstance(value, DeviceArray):
            head = (0, 0, math.prod(value.shape), value.itemsize)
            words = map(ctypes.c_int64, (*head, *value.shape, *value.strides))
            first = tuple(words)
            return (*first[: len(head)], self._word(value), *first[len(head) :])
        if isinstance(value, Word):  # its low half comes first in memory
            return (self._varying.setdefault((value.slot, 0), ctypes.c_int64()),)
        return (ctypes.c_float(value) if ty == types.float32 else ctypes.c_int32(value),)
