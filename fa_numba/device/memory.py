"""Memory of the GPU: arrays, copies to and from it, and the workspace of calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from fa_numba.device import select
from fa_numba.device.launch_record import DeviceArray
from fa_numba.dtypes import DTYPES


class MemoryTrace:
    """GPU memory that calls inside ``track_memory`` took beside their inputs and outputs, bytes."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


traces: list[MemoryTrace] = []


@contextlib.contextmanager
def track_memory() -> Iterator[MemoryTrace]:
    """Record the scratch memory that calls inside take: every byte goes through ``replay``."""
    trace = MemoryTrace()
    traces.append(trace)
    try:
        yield trace
    finally:
        traces.remove(trace)


@functools.cache
def pool(ordinal: int):
    """A pool of GPU memory of our own that keeps what it has, as caching allocators do."""
    from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions

    Device(ordinal).set_current()
    pool = DeviceMemoryResource(ordinal, DeviceMemoryResourceOptions())
    keep = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool.handle, keep, driver.cuuint64_t(2**63))
    return pool


_NOT_A_NUMBER = {dtype.host: dtype.nan for dtype in DTYPES.values()}


@contextlib.contextmanager
def scratch(stream: Any) -> Iterator[Callable[..., Any]]:
    """A context that gives ``allocate(shape, dtype)``, for the workspace of a call's launches.

    ``stream`` is the ``LaunchRecord`` that takes them on a GPU, and is not used on the emulator.
    ``dtype`` is float32, uint16 for the bits of 16-bit floats, or int32. On the emulator it gives
    NumPy arrays, NaN or -1 until written.
    """
    if select.on_gpu():
        yield stream.allocate
    else:
        yield lambda shape, dtype="float32": np.full(shape, _NOT_A_NUMBER.get(dtype, -1), dtype)


def release_memory() -> None:
    """Give back to the GPU what the pool keeps of workspace, and arrays that Numba has yet to free:
    it frees ten together, and those that L2 is flushed with have a GiB each.
    """
    synchronize()
    cuda.current_context().deallocations.clear()
    driver.cuMemPoolTrimTo(pool(cuda.get_current_device().id).handle, 0)


def empty(shape: tuple[int, ...], dtype: str = "float32"):
    """An uninitialised array on the current GPU, with ``__cuda_array_interface__``."""
    return cuda.device_array(shape, dtype)


def argument(array: Any) -> DeviceArray:
    """A launch argument from an array that ``empty`` or ``to_gpu`` has made."""
    pointer, _ = array.__cuda_array_interface__["data"]
    return DeviceArray(pointer, array.shape, array.strides, array, array.dtype.itemsize)


def to_gpu(array: np.ndarray, stream: int = 0):
    """A copy of a NumPy array on the current GPU, with ``__cuda_array_interface__``."""
    return cuda.to_device(np.ascontiguousarray(array), stream=_numba_stream(stream))


def copied_to_host(array: Any) -> np.ndarray:
    """What an array with ``__cuda_array_interface__`` holds, once all that was begun is done."""
    synchronize()
    return cuda.as_cuda_array(array).copy_to_host()


def to_host(array, out: np.ndarray, stream: int = 0) -> None:
    """Copy a contiguous GPU array made here into ``out``, of any strides, and wait for it."""
    copy = array.copy_to_host(stream=_numba_stream(stream))
    synchronize(stream)
    out[...] = copy


def _numba_stream(stream: int):
    return cuda.external_stream(stream) if stream else 0


def synchronize(stream: int | None = None) -> None:
    """Wait for ``stream``, or for the whole GPU."""
    if stream:
        cuda.external_stream(stream).synchronize()
    else:
        cuda.synchronize()
