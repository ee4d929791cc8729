"""The only door to ``numba.cuda``: the GPU or the emulator behind one ``launch``.

Kernels and parts take ``cuda``, the scalar types and the decorators from here. A ``Kernel`` is
compiled by Numba when it first runs on a GPU; on the emulator its Python function runs as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda, float32, int32, int64, types, uint32, uint64  # noqa: F401  # for the kernels

from fa_numba import emulator
from fa_numba.device import kernel_cache
from fa_numba.device.launch_record import DeviceArray, LaunchRecord, checked
from fa_numba.dtypes import DTYPES

MIN_COMPUTE_CAPABILITY = (8, 0)
# Shared memory of one block where there is no GPU to ask: an H100's or H200's.
EMULATED_SHARED_BYTES = 227 * 1024


def device_function(function):
    """A function that kernels call; inlined, so that register tiles stay in registers."""
    return cuda.jit(device=True, inline="always")(function)


def array_type(ndim: int, element=types.float32):
    """Numba's type of an array of ``element`` with ``ndim`` axes and any strides."""
    return types.Array(element, ndim, "A")


# --- which device ----------------------------------------------------------------------------


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
        return f"the GPU has compute capability {'.'.join(map(str, found))}, {wanted} is needed"
    return ""


_forced: ContextVar[str | None] = ContextVar("fa_numba_device", default=None)
_counts: ContextVar[emulator.Counts | None] = ContextVar("fa_numba_counts", default=None)


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
        raise ValueError(f"device must be 'gpu' or 'emulator', not {device!r}")
    if device == "gpu" and not gpu_available():
        raise RuntimeError(f"device is 'gpu', but {why_no_gpu()}")
    token = _forced.set(device)
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def count_accesses() -> Iterator[emulator.Counts]:
    """Run everything inside on the emulator and count its accesses to global memory.

    Yields a ``Counts`` with dictionaries ``loads`` and ``stores`` (elements) and ``load_bytes``
    and ``store_bytes``, keyed by the kernels' array names.

    >>> import numpy as np, fa_numba
    >>> q = np.ones((1, 1, 8, 4), np.float32)
    >>> with fa_numba.count_accesses() as counts:
    ...     _ = fa_numba.flash_attention_2(q, q, q)
    >>> counts.loads["Q"], counts.stores["O"]
    (32, 32)
    """
    counts = emulator.Counts()
    token = _counts.set(counts)
    try:
        with using("emulator"):
            yield counts
    finally:
        _counts.reset(token)


def shared_bytes_limit() -> int:
    """Bytes of shared memory one block can have on the current device."""
    return _shared_bytes_limit(cuda.get_current_device().id) if on_gpu() else EMULATED_SHARED_BYTES


@functools.cache
def _shared_bytes_limit(ordinal: int) -> int:
    with cuda.gpus[ordinal]:
        return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def compute_capability() -> tuple[int, int]:
    """That of the current GPU, and without one of those whose shared memory is emulated."""
    return _compute_capability(cuda.get_current_device().id) if on_gpu() else (9, 0)


@functools.cache
def _compute_capability(ordinal: int) -> tuple[int, int]:
    major, minor = cuda.gpus[ordinal].compute_capability
    return int(major), int(minor)


# --- kernels ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel and what its launch needs.

    ``argument_types`` are Numba types; ``threads`` per block and ``shared_bytes`` per block.
    """

    function: Callable
    argument_types: tuple
    threads: int
    shared_bytes: int
    min_blocks: int = 1
    _compiled: dict = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def signature(self):
        return types.void(*self.argument_types)

    def compiled(self):
        """The ``cuda.core`` kernel for the current device, with its shared memory allowed.

        It is compiled where ``kernel_cache`` does not have it.
        """
        from cuda.core import ObjectCode

        device = cuda.get_current_device().id
        if device not in self._compiled:
            cubin, name = self.built(_compute_capability(device))
            cuda.current_context()
            kernel = ObjectCode.from_cubin(cubin).get_kernel(name)
            _allow_shared_memory(kernel, self.shared_bytes, device)
            self._compiled[device] = kernel
        return self._compiled[device]

    def built(self, capability: tuple[int, int]) -> tuple[bytes, str]:
        """The cubin for the current device, of that compute capability, and its entry's name."""
        kept = kernel_cache.read(self, capability)
        if kept is not None:
            return kept
        dispatcher = cuda.jit(launch_bounds=(self.threads, self.min_blocks))(self.function)
        library = dispatcher.compile(self.argument_types)._codelibrary
        cubin, name = bytes(library.get_cubin().code), library._entry_name
        kernel_cache.write(self, capability, cubin, name)
        return cubin, name


def _allow_shared_memory(kernel, size, device):
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    result = driver.cuKernelSetAttribute(attribute, size, handle, driver.CUdevice(device))
    checked(result, f"asking for {size} bytes of shared memory a block")


def broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    """A launch argument seen with ``shape``, its axes of length 1 repeated without a copy."""
    full = (1,) * (len(shape) - len(array.shape)) + tuple(array.shape)
    steps = (0,) * (len(shape) - len(array.shape)) + tuple(array.strides)
    strides = tuple(
        0 if n == 1 and m != 1 else step for n, m, step in zip(full, shape, steps, strict=True)
    )
    return _seen_as(array, shape, strides)


def transposed(array: Any, order: tuple[int, ...]) -> Any:
    """A launch argument with its axes in ``order``, and one of length 1 before them."""
    shape = (1, *(array.shape[n] for n in order))
    return _seen_as(array, shape, (0, *(array.strides[n] for n in order)))


def _seen_as(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if isinstance(array, DeviceArray):
        return replace(array, shape=shape, strides=strides)
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=array.flags.writeable)


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    args: tuple,
    stream: int | LaunchRecord = 0,
    uncounted: Collection[str] = (),
) -> None:
    """Run ``kernel`` over ``grid`` blocks on the GPU stream ``stream`` or on the emulator.

    Arrays among ``args``, or in a named tuple among them, are ``DeviceArray`` on the GPU,
    ``numpy.ndarray`` on the emulator, whose counts leave out those named ``uncounted``. A
    ``LaunchRecord`` for a stream takes the launch down and runs nothing.
    """
    if on_gpu():
        _give(stream, lambda to: to.launch(kernel, kernel.compiled(), grid, args))
        return
    rounded = tuple(map(_rounded, kernel.argument_types, args))
    counts = emulator.launch(
        kernel.function,
        grid,
        kernel.threads,
        rounded,
        shared_bytes=kernel.shared_bytes,
        uncounted=uncounted,
    )
    total = _counts.get()
    if total is not None:
        total.merge(counts)


def _give(stream: int | LaunchRecord, step: Callable[[LaunchRecord], None]) -> None:
    """Record ``step``, and run it at once on a stream that is one."""
    if isinstance(stream, LaunchRecord):
        step(stream)
        return
    recording = LaunchRecord()
    step(recording)
    recording.run((), stream)


def replay(recording: LaunchRecord, values: Sequence[int], stream: int, ordinal: int) -> None:
    """Make the recorded launches on ``stream`` of the current GPU, which is ``ordinal``.

    ``values`` are addresses and words by slot; the workspace is added here, and freed behind the
    last launch.
    """
    if not recording.reserved_bytes:
        recording.run(values, stream)
        return
    order = driver.CUstream(stream)
    size = recording.reserved_bytes
    result = driver.cuMemAllocFromPoolAsync(size, _pool(ordinal).handle, order)
    workspace = int(checked(result, f"taking {size} bytes of workspace"))
    for trace in _traces:
        trace.add(recording.workspace_bytes)
    try:
        recording.run([*values, workspace], stream)
    finally:
        for trace in _traces:
            trace.add(-recording.workspace_bytes)
        checked(driver.cuMemFreeAsync(workspace, order), "freeing the workspace")


def current_context() -> int:
    """The address of the driver's current context, 0 where there is none."""
    return int(driver.cuCtxGetCurrent()[1])


def _rounded(ty: Any, value: Any) -> Any:
    """An argument for the emulator: what the GPU would take as float32 is rounded to it."""
    if isinstance(ty, types.NamedTuple):
        return type(value)(*map(_rounded, ty.types, value))
    return float(np.float32(value)) if ty == types.float32 else value


# --- memory ----------------------------------------------------------------------------------


class MemoryTrace:
    """GPU memory that calls inside ``track_memory`` took beside their inputs and outputs, bytes."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


_traces: list[MemoryTrace] = []


@contextlib.contextmanager
def track_memory() -> Iterator[MemoryTrace]:
    """Record the scratch memory that calls inside take: every byte goes through ``replay``."""
    trace = MemoryTrace()
    _traces.append(trace)
    try:
        yield trace
    finally:
        _traces.remove(trace)


@functools.cache
def _pool(ordinal: int):
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
    """``allocate(shape, dtype)`` for workspace of the launches that ``stream`` records.

    ``dtype`` is float32, or uint16 for the bits of 16-bit floats. On the emulator it gives NumPy
    arrays, NaN until written.
    """
    if on_gpu():
        yield stream.allocate
    else:
        yield lambda shape, dtype="float32": np.full(shape, _NOT_A_NUMBER[dtype], dtype)


def release_memory() -> None:
    """Give the workspace memory that the pool keeps back to the GPU."""
    synchronize()
    driver.cuMemPoolTrimTo(_pool(cuda.get_current_device().id).handle, 0)


def empty(shape: tuple[int, ...], dtype: str = "float32"):
    """An uninitialised array on the current GPU, with ``__cuda_array_interface__``."""
    return cuda.device_array(shape, dtype)


def clear(array: Any, stream: int | LaunchRecord = 0) -> None:
    """Fill a launch argument whose memory is one piece with zeros, in the stream's order."""
    if isinstance(array, DeviceArray):
        _give(stream, lambda to: to.clear(array))
    else:
        array[...] = 0


def current_ordinal() -> int:
    """The ordinal of the current GPU."""
    return int(cuda.get_current_device().id)


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


def ordinal_of(pointer: int) -> int:
    """The ordinal of the GPU that owns the memory at ``pointer``."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    cuda.current_context()
    error, ordinal = driver.cuPointerGetAttribute(attribute, pointer)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"address {pointer:#x} is not CUDA memory: {error.name}")
    return int(ordinal)


def on_device(ordinal: int):
    """A context manager that makes GPU ``ordinal`` the current one."""
    return cuda.gpus[ordinal]


# --- measuring -------------------------------------------------------------------------------


def synchronize(stream: int | None = None) -> None:
    """Wait for ``stream``, or for the whole GPU."""
    if stream:
        cuda.external_stream(stream).synchronize()
    else:
        cuda.synchronize()


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


def time_ms(
    function: Callable[[], object],
    *,
    repeats: int = 20,
    warmup: int = 3,
    flush_l2: bool = True,
) -> list[float]:
    """Milliseconds of each of ``repeats`` calls, by events on the default stream.

    ``warmup`` calls go first and do not count. ``flush_l2`` overwrites four times the L2 cache, and
    at least a GiB, twice before each call and outside the timed interval: long enough for the host
    to enqueue the call meanwhile, so that its Python time does not count.
    """
    scratch = None
    if flush_l2:
        scratch = cuda.device_array(max(4 * describe()["l2_bytes"], 2**30), np.uint8)
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        if scratch is not None:
            for _ in range(2):
                cuda.cudadrv.driver.device_memset(scratch, 0, scratch.size)
        start, stop = cuda.event(), cuda.event()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(float(cuda.event_elapsed_time(start, stop)))
    return times


def profile_start() -> None:
    """Open the range that a profiler started with ``--profile-from-start off`` records."""
    cuda.profile_start()


def profile_stop() -> None:
    """Close the range opened by ``profile_start``."""
    cuda.profile_stop()
