"""Launches of kernels: on the GPU, into a record to be made later, or on the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import types

from fa_numba import emulator
from fa_numba.device import memory, select
from fa_numba.device.kernel import Kernel
from fa_numba.device.launch_record import DeviceArray, LaunchRecord, checked
from fa_numba.device.tensor_map import TiledArray

# Those of every ``count_accesses`` that is open, one inside another.
_counts: ContextVar[tuple[emulator.Counts, ...]] = ContextVar("fa_numba_counts", default=())


@contextlib.contextmanager
def count_accesses() -> Iterator[emulator.Counts]:
    """Run everything inside on the emulator, and count the accesses to global memory.

    It is a context manager. Calls inside run on the emulator even if there is a GPU, so their
    arrays must be in host memory. If one is inside another, the outer one counts the calls of both.

    Yields
    ------
    Counts
        Counts that grow with each call. ``loads`` and ``stores`` are in elements, ``load_bytes``
        and ``store_bytes`` in bytes. Each maps the name of an array, such as "Q", to a number.

    See Also
    --------
    fa_numba.plan : Return the accesses in closed form, without running a call.

    Notes
    -----
    Integers and slopes that all threads of a thread block read together, such as lengths, are not
    counted.

    Examples
    --------
    >>> import numpy as np, fa_numba
    >>> q = np.ones((1, 1, 8, 4), np.float32)
    >>> with fa_numba.count_accesses() as counts:
    ...     _ = fa_numba.flash_attention_2(q, q, q)
    >>> counts.loads["Q"], counts.stores["O"]
    (32, 32)
    >>> print(counts)
    array  loads  stores  bytes loaded  bytes stored
    K         32       0           128             0
    L          0       8             0            32
    O          0      32             0           128
    Q         32       0           128             0
    V         32       0           128             0
    all       96      40           384           160
    """
    counts = emulator.Counts()
    token = _counts.set((*_counts.get(), counts))
    try:
        with select.using("emulator"):
            yield counts
    finally:
        _counts.reset(token)


class Launched:
    """What was launched: kernels, and what their launches were planned from.

    ``kernels`` and ``origins`` map "gpu" and "emulator" to those launched there, in the order of
    their first launch. An origin is whatever the caller of ``note_origin`` gives.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, dict[Kernel, None]] = {"gpu": {}, "emulator": {}}
        self.origins: dict[str, dict[Hashable, None]] = {"gpu": {}, "emulator": {}}


# Those of every ``launched_kernels`` that is open, in whatever thread: torch has its own backward.
_launched: tuple[Launched, ...] = ()


@contextlib.contextmanager
def launched_kernels() -> Iterator[Launched]:
    """Collect the kernels that are launched inside, on the GPU and on the emulator.

    Launches of all threads count, and launches that are made again from a record. Launches of
    other processes do not count.
    """
    global _launched
    launched = Launched()
    _launched = (*_launched, launched)
    try:
        yield launched
    finally:
        _launched = tuple(each for each in _launched if each is not launched)


def _note_launched(kernels: Iterable[Kernel], origins: Iterable[Hashable] = ()) -> None:
    """Add kernels, and what they were planned from, to every ``launched_kernels`` that is open."""
    if _launched:
        where = "gpu" if select.on_gpu() else "emulator"
        for each in _launched:
            each.kernels[where].update(dict.fromkeys(kernels))
            each.origins[where].update(dict.fromkeys(origins))


def note_origin(origin: Hashable, stream: int | LaunchRecord = 0) -> None:
    """Say what the next launches on ``stream`` were planned from; see ``launched_kernels``."""
    if isinstance(stream, LaunchRecord):
        stream.origins.append(origin)
    else:
        _note_launched((), (origin,))


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    args: tuple,
    stream: int | LaunchRecord = 0,
    uncounted: Collection[str] = (),
) -> None:
    """Run ``kernel`` over ``grid`` blocks on the GPU stream ``stream`` or on the emulator.

    Arrays among ``args``, or in a named tuple among them, are ``DeviceArray`` on the GPU,
    ``numpy.ndarray`` on the emulator, or a ``TiledArray`` of either; the emulator's counts leave
    out those named ``uncounted``. With a ``LaunchRecord`` in place of the stream the launch is
    recorded, and nothing runs.
    """
    if select.on_gpu():
        _give(stream, lambda to: to.launch(kernel, kernel.compiled(), grid, args))
        return
    _note_launched((kernel,))
    rounded = tuple(map(_rounded, kernel.argument_types, args))
    counts = emulator.launch(
        kernel.function,
        grid,
        kernel.threads,
        rounded,
        shared_bytes=kernel.shared_bytes,
        uncounted=uncounted,
    )
    for total in _counts.get():
        total.merge(counts)


def _give(stream: int | LaunchRecord, step: Callable[[LaunchRecord], None]) -> None:
    """Let ``step`` add to the record that ``stream`` is, or to a new one that runs at once."""
    if isinstance(stream, LaunchRecord):
        step(stream)
        return
    recording = LaunchRecord()
    step(recording)
    _note_launched(recording.kernels)
    recording.run((), stream)


def replay(recording: LaunchRecord, values: Sequence[int], stream: int, ordinal: int) -> None:
    """Make the recorded launches on ``stream`` of the current GPU, whose ordinal is ``ordinal``.

    ``values`` has the address or word of each slot but the workspace's, which is allocated here and
    freed, in the stream's order, after the last launch.
    """
    if recording.noted is not _launched:  # not again for each of many timed calls
        _note_launched(recording.kernels, recording.origins)
        recording.noted = _launched
    if not recording.reserved_bytes:
        recording.run(values, stream)
        return
    order = driver.CUstream(stream)
    size = recording.reserved_bytes
    result = driver.cuMemAllocFromPoolAsync(size, memory.pool(ordinal).handle, order)
    workspace = int(checked(result, f"taking {size} bytes of workspace"))
    for trace in memory.traces:
        trace.add(recording.workspace_bytes)
    try:
        recording.run([*values, workspace], stream)
    finally:
        for trace in memory.traces:
            trace.add(-recording.workspace_bytes)
        checked(driver.cuMemFreeAsync(workspace, order), "freeing the workspace")


def _rounded(ty: Any, value: Any) -> Any:
    """An argument for the emulator: what the GPU would take as float32 is rounded to it."""
    if isinstance(ty, types.NamedTuple):
        return type(value)(*map(_rounded, ty.types, value))
    if isinstance(value, TiledArray):
        return emulator.Boxed(value.array, value.rows, value.layout)
    return np.float32(value) if ty == types.float32 else value


def clear(array: Any, stream: int | LaunchRecord = 0) -> None:
    """Fill a launch argument whose memory is one piece with zeros, in the stream's order."""
    if isinstance(array, DeviceArray):
        _give(stream, lambda to: to.clear(array))
    else:
        array[...] = 0


def broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    """A launch argument as an array of ``shape``: axes of length 1 repeat, by a stride of 0."""
    full = (1,) * (len(shape) - len(array.shape)) + tuple(array.shape)
    steps = (0,) * (len(shape) - len(array.shape)) + tuple(array.strides)
    strides = tuple(
        0 if n == 1 and m != 1 else step for n, m, step in zip(full, shape, steps, strict=True)
    )
    return _seen_as(array, shape, strides)


def permuted(array: Any, order: tuple[int, ...]) -> Any:
    """A launch argument with its axes in ``order``."""
    shape, strides = (tuple(x[n] for n in order) for x in (array.shape, array.strides))
    return _seen_as(array, shape, strides)


def transposed(array: Any, order: tuple[int, ...]) -> Any:
    """A launch argument with its axes in ``order`` behind a new first one of length 1."""
    turned = permuted(array, order)
    return _seen_as(array, (1, *turned.shape), (0, *turned.strides))


def grouped(array: Any, heads: int) -> Any:
    """(batch, H, rows, ...) as (batch, H / heads, rows, heads, ...): a group's heads by rows."""
    (batch, all_heads, rows, *last), (b, h, r, *steps) = array.shape, array.strides
    shape = (batch, all_heads // heads, rows, heads, *last)
    return _seen_as(array, shape, (b, h * heads, r, h, *steps))


def as_one(array: Any) -> Any:
    """A launch argument (batch, H, rows, ...), entry behind entry, as (1, H, batch rows, ...)."""
    (batch, heads, rows, *last), (b, h, r, *steps) = array.shape, array.strides
    return _seen_as(array, (1, heads, batch * rows, *last), (0, h, r if rows > 1 else b, *steps))


def as_batch(array: Any, batch: int) -> Any:
    """A launch argument (1, H, batch rows, ...) as (batch, H, rows, ...)."""
    (_, heads, total, *last), (_, h, r, *steps) = array.shape, array.strides
    rows = total // batch
    return _seen_as(array, (batch, heads, rows, *last), (rows * r, h, r, *steps))


def _seen_as(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if isinstance(array, DeviceArray):
        return replace(array, shape=shape, strides=strides)
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=array.flags.writeable)
