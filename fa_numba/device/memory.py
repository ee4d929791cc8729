"""Memory of the GPU: arrays, copies to and from the GPU, and the workspace of calls."""

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
    """The workspace of calls inside ``track_memory``, in bytes.

    ``live_bytes`` is the workspace in use now, ``peak_bytes`` the greatest ``live_bytes`` so far.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


traces: list[MemoryTrace] = []


@contextlib.contextmanager
def track_memory() -> Iterator[MemoryTrace]:
    """Record how much workspace the calls inside the context use on a GPU.

    ``launching.replay`` allocates the workspace of each call, and adds its size to the trace.
    """
    trace = MemoryTrace()
    traces.append(trace)
    try:
        yield trace
    finally:
        traces.remove(trace)


@functools.cache
def pool(ordinal: int):
    """Return this package's memory pool on the GPU ``ordinal``.

    Like a caching allocator, the pool keeps freed memory for the next allocation.
    """
    from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions

    Device(ordinal).set_current()
    pool = DeviceMemoryResource(ordinal, DeviceMemoryResourceOptions())
    keep = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    driver.cuMemPoolSetAttribute(pool.handle, keep, driver.cuuint64_t(2**63))
    return pool


_NOT_A_NUMBER = {dtype.host: dtype.nan for dtype in DTYPES.values()}


@contextlib.contextmanager
def scratch(stream: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function ``allocate(shape, dtype)`` that allocates workspace for a call's launches.

    On a GPU, ``stream`` is the ``LaunchRecord`` that records the launches. On the emulator,
    ``stream`` is not used, and ``allocate`` returns NumPy arrays that are filled with NaN, or with
    -1 for integers. ``dtype`` is float32, uint16 for the bits of 16-bit floats, or int32.
    """
    if select.on_gpu():
        yield stream.allocate
    else:
        yield lambda shape, dtype="float32": np.full(shape, _NOT_A_NUMBER.get(dtype, -1), dtype)


def release_memory() -> None:
    """Free the memory that the pool keeps, and the arrays that Numba has not freed yet.

    Numba frees arrays in groups of ten. This matters for the arrays that flush the L2 cache, which
    have at least 1 GiB each.
    """
    synchronize()
    cuda.current_context().deallocations.clear()
    driver.cuMemPoolTrimTo(pool(cuda.get_current_device().id).handle, 0)


def empty(shape: tuple[int, ...], dtype: str = "float32"):
    """Return an uninitialised array on the current GPU, with ``__cuda_array_interface__``."""
    return cuda.device_array(shape, dtype)


def argument(array: Any) -> DeviceArray:
    """Return a launch argument for an array that ``empty`` or ``to_gpu`` has made."""
    pointer, _ = array.__cuda_array_interface__["data"]
    return DeviceArray(pointer, array.shape, array.strides, array, array.dtype.itemsize)


def to_gpu(array: np.ndarray, stream: int = 0):
    """Return a copy of a NumPy array on the current GPU, with ``__cuda_array_interface__``."""
    return cuda.to_device(np.ascontiguousarray(array), stream=_numba_stream(stream))


def copied_to_host(array: Any) -> np.ndarray:
    """Return a NumPy copy of an array with ``__cuda_array_interface__``.

    The function first waits for all work of the GPU.
    """
    synchronize()
    return cuda.as_cuda_array(array).copy_to_host()


def to_host(array, out: np.ndarray, stream: int = 0) -> None:
    """Copy a GPU array to ``out`` and wait for the copy.

    The GPU array must be contiguous and made by this module. ``out`` may have any strides.
    """
    copy = array.copy_to_host(stream=_numba_stream(stream))
    synchronize(stream)
    out[...] = copy


def _numba_stream(stream: int):
    return cuda.external_stream(stream) if stream else 0


def synchronize(stream: int | None = None) -> None:
    """Wait for the work on ``stream``, or for all work of the GPU if ``stream`` is None or 0."""
    if stream:
        cuda.external_stream(stream).synchronize()
    else:
        cuda.synchronize()
