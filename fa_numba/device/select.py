"""Which device runs what follows: the GPU or the emulator, its limits and its name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from cuda.bindings import driver
from numba import cuda

MIN_COMPUTE_CAPABILITY = (7, 5)
# Shared memory of one block where there is no GPU to ask: an H100's or H200's.
EMULATED_SHARED_BYTES = 227 * 1024


def gpu_available() -> bool:
    """Whether a CUDA GPU that the kernels can run on is present."""
    return not why_no_gpu()


@functools.cache
def why_no_gpu() -> str:
    """Why there is no usable GPU, or an empty string where there is one."""
    try:
        if not cuda.is_available():
            return "no CUDA GPU or driver was found"
        found = tuple(cuda.get_current_device().compute_capability)
    except Exception as error:  # a driver or wheels that do not fit each other
        return f"CUDA could not start: {error}"
    if found < MIN_COMPUTE_CAPABILITY:
        wanted = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
        have = ".".join(map(str, found))
        return f"the compute capability of the GPU must be at least {wanted}, got {have}"
    return ""


_forced: ContextVar[str | None] = ContextVar("fa_numba_device", default=None)


def on_gpu() -> bool:
    """Whether launches go to the GPU in the current context."""
    forced = _forced.get()
    return gpu_available() if forced is None else forced == "gpu"


@contextlib.contextmanager
def using(device: str) -> Iterator[None]:
    """Run everything inside on ``"gpu"`` or ``"emulator"``.

    Raises ValueError for another name and RuntimeError for "gpu" without a usable one.
    """
    if device not in ("gpu", "emulator"):
        raise ValueError(f"device must be 'gpu' or 'emulator', got {device!r}")
    if device == "gpu" and not gpu_available():
        raise RuntimeError(
            f"device 'gpu' cannot be used here: {why_no_gpu()}. Use device 'emulator'"
        )
    token = _forced.set(device)
    try:
        yield
    finally:
        _forced.reset(token)


class Limits(NamedTuple):
    """A GPU to plans: compute capability, bytes of shared memory a block, multiprocessors."""

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int


_EMULATED = Limits((9, 0), EMULATED_SHARED_BYTES, 132)  # an H100 or H200
_planned: ContextVar[Limits | None] = ContextVar("fa_numba_planned_device", default=None)


@contextlib.contextmanager
def planning_for(
    capability: tuple[int, int], shared_bytes: int, multiprocessors: int = 132
) -> Iterator[None]:
    """Make plans inside for a GPU of this compute capability, with so many bytes of shared memory a
    block and so many multiprocessors, which need not be here. It is for plans alone: calls run
    where they always do.
    """
    token = _planned.set(Limits(capability, shared_bytes, multiprocessors))
    try:
        yield
    finally:
        _planned.reset(token)


@functools.cache
def limits_of(ordinal: int) -> Limits:
    """The limits of GPU ``ordinal``, asked for once."""
    gpu = cuda.gpus[ordinal]
    major, minor = gpu.compute_capability
    shared_bytes = int(gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    return Limits((int(major), int(minor)), shared_bytes, int(gpu.MULTIPROCESSOR_COUNT))


def _current() -> Limits:
    planned = _planned.get()
    if planned is not None:
        return planned
    return limits_of(current_ordinal()) if on_gpu() else _EMULATED


def shared_bytes_limit() -> int:
    """Bytes of shared memory one block can have on the current device."""
    return _current().shared_bytes


def multiprocessors() -> int:
    """How many the current GPU has; elsewhere 132, an H100's or H200's."""
    return _current().multiprocessors


def compute_capability() -> tuple[int, int]:
    """The current GPU's, as (major, minor); on the emulator (9, 0), of an H100 or H200."""
    return _current().capability


def planned_for_gpu() -> bool:
    """Whether plans made now are for a GPU, here or elsewhere."""
    return on_gpu() or _planned.get() is not None


def capability_of(ordinal: int) -> tuple[int, int]:
    """The compute capability of GPU ``ordinal``."""
    return limits_of(ordinal).capability


def current_ordinal() -> int:
    """The ordinal of the current GPU."""
    return int(cuda.get_current_device().id)


def current_context() -> int:
    """The address of the driver's current context, 0 where there is none."""
    return int(driver.cuCtxGetCurrent()[1])


def ordinal_of(pointer: int) -> int:
    """The ordinal of the GPU that owns the memory at ``pointer``."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    cuda.current_context()
    error, ordinal = driver.cuPointerGetAttribute(attribute, pointer)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(
            f"an array's address must be in CUDA memory, got {pointer:#x} ({error.name})"
        )
    return int(ordinal)


def on_device(ordinal: int):
    """A context manager that makes GPU ``ordinal`` the current one."""
    return cuda.gpus[ordinal]


def limits() -> dict[str, int]:
    """What a multiprocessor holds: bytes of shared memory, registers, threads and blocks."""
    gpu = cuda.get_current_device()
    return {
        "shared_bytes": int(gpu.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        "registers": int(gpu.MAX_REGISTERS_PER_MULTIPROCESSOR),
        "threads": int(gpu.MAX_THREADS_PER_MULTIPROCESSOR),
        "blocks": int(gpu.MAX_BLOCKS_PER_MULTIPROCESSOR),
    }


def describe() -> dict[str, Any]:
    """What the current device is, for provenance: its name, limits and driver."""
    if not on_gpu():
        return {"name": "emulator", "shared_bytes": EMULATED_SHARED_BYTES}
    gpu = cuda.get_current_device()
    return {
        "name": gpu.name.decode() if isinstance(gpu.name, bytes) else str(gpu.name),
        "compute_capability": ".".join(map(str, gpu.compute_capability)),
        "multiprocessors": int(gpu.MULTIPROCESSOR_COUNT),
        "shared_bytes": shared_bytes_limit(),
        "l2_bytes": int(gpu.L2_CACHE_SIZE),
        "cuda_driver": ".".join(map(str, cuda.cudadrv.driver.get_version())),
    }
