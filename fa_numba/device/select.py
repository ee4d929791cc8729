"""Selection of the device that runs calls, the GPU or the emulator, and the device's limits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from cuda.bindings import driver
from numba import cuda

from fa_numba.emulator.simulator import ASKED

MIN_COMPUTE_CAPABILITY = (7, 5)
# Limits if there is no GPU: shared memory of a thread block, and multiprocessors, as on an H100.
EMULATED_SHARED_BYTES = 227 * 1024
EMULATED_MULTIPROCESSORS = 132


def gpu_available() -> bool:
    """Return whether this machine has a CUDA GPU on which the kernels can run."""
    return not why_no_gpu()


@functools.cache
def why_no_gpu() -> str:
    """Return the reason why there is no usable GPU, or an empty string if there is a usable GPU."""
    if ASKED:
        return "NUMBA_ENABLE_CUDASIM is set"
    try:
        if not cuda.is_available():
            return "no CUDA GPU or driver was found"
        found = tuple(cuda.get_current_device().compute_capability)
    except Exception as error:  # for example, driver and packages do not fit together
        return f"CUDA could not start: {error}"
    if found < MIN_COMPUTE_CAPABILITY:
        wanted = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
        have = ".".join(map(str, found))
        return f"the compute capability of the GPU must be at least {wanted}, got {have}"
    return ""


_forced: ContextVar[str | None] = ContextVar("fa_numba_device", default=None)


def on_gpu() -> bool:
    """Return whether launches run on the GPU, not on the emulator."""
    forced = _forced.get()
    return gpu_available() if forced is None else forced == "gpu"


@contextlib.contextmanager
def using(device: str) -> Iterator[None]:
    """Run all calls inside the context on ``"gpu"`` or on ``"emulator"``.

    Raise ValueError for another name, and RuntimeError for "gpu" if there is no usable GPU.
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
    """The properties of a GPU on which plans depend.

    ``capability`` is the compute capability (major, minor). ``shared_bytes`` is the largest shared
    memory of a thread block in bytes. ``multiprocessors`` is the number of multiprocessors.
    """

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int


_EMULATED = Limits((9, 0), EMULATED_SHARED_BYTES, EMULATED_MULTIPROCESSORS)
_planned: ContextVar[Limits | None] = ContextVar("fa_numba_planned_device", default=None)


@contextlib.contextmanager
def planning_for(
    capability: tuple[int, int], shared_bytes: int, multiprocessors: int = 132
) -> Iterator[None]:
    """Make all plans inside the context for a GPU with these limits.

    The GPU need not be in this machine. The arguments are the fields of ``Limits``. Only plans are
    affected: calls inside still run on this machine's GPU or on the emulator.
    """
    token = _planned.set(Limits(capability, shared_bytes, multiprocessors))
    try:
        yield
    finally:
        _planned.reset(token)


@functools.cache
def limits_of(ordinal: int) -> Limits:
    """Return the limits of GPU ``ordinal``. The driver is queried once for each GPU."""
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
    """Return the bytes of shared memory that one thread block can have.

    Inside ``planning_for``, this is the limit of the planned GPU, and otherwise the limit of the
    current device.
    """
    return _current().shared_bytes


def multiprocessors() -> int:
    """Return the number of multiprocessors.

    Inside ``planning_for``, this is the number of the planned GPU, and otherwise the number of the
    current device. It is 132 on the emulator.
    """
    return _current().multiprocessors


def compute_capability() -> tuple[int, int]:
    """Return the compute capability (major, minor).

    Inside ``planning_for``, this is the capability of the planned GPU, and otherwise the capability
    of the current device. It is (9, 0) on the emulator.
    """
    return _current().capability


def planned_for_gpu() -> bool:
    """Return whether plans are made for a GPU: of this machine, or of ``planning_for``."""
    return on_gpu() or _planned.get() is not None


def planned_limits() -> Limits | None:
    """Return the limits of the planned GPU inside ``planning_for``, or None outside of it."""
    return _planned.get()


def capability_of(ordinal: int) -> tuple[int, int]:
    """Return the compute capability of GPU ``ordinal``."""
    return limits_of(ordinal).capability


def current_ordinal() -> int:
    """Return the ordinal of the current GPU."""
    return int(cuda.get_current_device().id)


def current_context() -> int:
    """Return the address of the driver's current context, or 0 if there is no context."""
    return int(driver.cuCtxGetCurrent()[1])


def ordinal_of(pointer: int) -> int:
    """Return the ordinal of the GPU that owns the memory at ``pointer``.

    Raise ValueError if the address is not in CUDA memory.
    """
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    cuda.current_context()
    error, ordinal = driver.cuPointerGetAttribute(attribute, pointer)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(
            f"an array's address must be in CUDA memory, got {pointer:#x} ({error.name})"
        )
    return int(ordinal)


def on_device(ordinal: int):
    """Return a context manager that makes GPU ``ordinal`` the current GPU."""
    return cuda.gpus[ordinal]


def limits() -> dict[str, int]:
    """Return the limits of a multiprocessor of the current GPU.

    The keys are "shared_bytes" (of shared memory), "registers", "threads" and "blocks".
    """
    gpu = cuda.get_current_device()
    return {
        "shared_bytes": int(gpu.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        "registers": int(gpu.MAX_REGISTERS_PER_MULTIPROCESSOR),
        "threads": int(gpu.MAX_THREADS_PER_MULTIPROCESSOR),
        "blocks": int(gpu.MAX_BLOCKS_PER_MULTIPROCESSOR),
    }


def describe() -> dict[str, Any]:
    """Return the name, limits and driver of the current device, to be stored with results."""
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
