"""Launches of kernels on the GPU or the emulator, or recorded in order to be made later."""

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

# The counts of every ``count_accesses`` context that is open; contexts may be nested.
_counts: ContextVar[tuple[emulator.Counts, ...]] = ContextVar("fa_numba_counts", default=())


@contextlib.contextmanager
def count_accesses() -> Iterator[emulator.Counts]:
    """Return a context manager that runs calls on the emulator and counts their accesses.

    Accesses to global memory are counted. Calls inside run on the emulator even if there is a GPU.
    Their arrays must be in host memory. If one context is inside another context, the outer context
    counts the calls of both.

    Yields
    ------
    Counts
        Counts that grow with each call. ``loads`` and ``stores`` are in elements, ``load_bytes``
        and ``store_bytes`` in bytes. Each of the four maps the name of an array, such as "Q", to a
        number.

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
    """The kernels that were launched, and the requests from which the launches were planned.

    attribute   meaning
    kernels     maps "gpu" and "emulator" to the kernels that were launched there, in the order of
                their first launch
    origins     maps "gpu" and "emulator" to the objects that ``note_origin`` was called with, in
                the order of the calls. Such an object identifies the plan of a launch. Usually it
                is a request for a plan
    """

    def __init__(self) -> None:
        self.kernels: dict[str, dict[Kernel, None]] = {"gpu": {}, "emulator": {}}
        self.origins: dict[str, dict[Hashable, None]] = {"gpu": {}, "emulator": {}}


# One entry for every ``launched_kernels`` context that is open, in any thread: torch computes
# gradients in a thread of its own.
_launched: tuple[Launched, ...] = ()


@contextlib.contextmanager
def launched_kernels() -> Iterator[Launched]:
    """Collect the kernels that are launched inside the context, on the GPU and on the emulator.

    Launches of all threads of this process count. Launches that are made again from a record count
    too. Launches of other processes do not count.
    """
    global _launched
    launched = Launched()
    _launched = (*_launched, launched)
    try:
        yield launched
    finally:
        _launched = tuple(each for each in _launched if each is not launched)


def _note_launched(kernels: Iterable[Kernel], origins: Iterable[Hashable] = ()) -> None:
    """Add kernels and the origins of their launches to every open ``launched_kernels``."""
    if _launched:
        where = "gpu" if select.on_gpu() else "emulator"
        for each in _launched:
            each.kernels[where].update(dict.fromkeys(kernels))
            each.origins[where].update(dict.fromkeys(origins))


def note_origin(origin: Hashable, stream: int | LaunchRecord = 0) -> None:
    """Say which plan the next launches on ``stream`` belong to, for ``launched_kernels``.

    ``origin`` is any hashable object that identifies the plan, such as a request for a plan. It is
    added to ``Launched.origins``.
    """
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
    """Run ``kernel`` over ``grid`` thread blocks on the GPU or on the emulator.

    On the GPU the launch is made on ``stream``. If ``stream`` is a ``LaunchRecord``, the launch is
    recorded and nothing runs.

    An array in ``args`` is a ``DeviceArray`` on the GPU and a ``numpy.ndarray`` on the emulator. It
    may also be a ``TiledArray`` that contains such an array, or a field of a named tuple. The
    emulator does not count accesses to arrays whose names are in ``uncounted``.
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
        *rounded,
        shared_bytes=kernel.shared_bytes,
        time_limit=None,
        wraparound=False,
        uncounted=uncounted,
    )
    for total in _counts.get():
        total.merge(counts)


def _give(stream: int | LaunchRecord, step: Callable[[LaunchRecord], None]) -> None:
    """Record a launch or run it, by calling ``step`` with a record.

    The function ``step`` adds a launch to the record. If ``stream`` is a ``LaunchRecord``, ``step``
    is called with ``stream``, and nothing runs. Otherwise, ``step`` is called with a new record,
    which then runs on the stream.
    """
    if isinstance(stream, LaunchRecord):
        step(stream)
        return
    recording = LaunchRecord()
    step(recording)
    _note_launched(recording.kernels)
    recording.run((), stream)


def replay(recording: LaunchRecord, values: Sequence[int], stream: int, ordinal: int) -> None:
    """Make the recorded launches on ``stream`` of the current GPU, whose ordinal is ``ordinal``.

    ``values`` contains the address or the 32-bit integer for each slot except the workspace's slot.
    This function allocates the workspace in the order of the stream, and frees the workspace after
    the last launch.
    """
    if recording.noted is not _launched:  # only once, because a timed call runs many times
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
    """Return the object that the emulator takes in place of a kernel argument.

    ``ty`` is the Numba type of the argument, and ``value`` is the argument:

    argument                    object for the emulator
    number of the type float32  the number, rounded to float32 as on a GPU
    ``TiledArray``              ``emulator.Boxed``, an array with the layout of its boxes
    named tuple                 a named tuple of the objects for its fields
    all others                  the argument itself
    """
    if isinstance(ty, types.NamedTuple):
        return type(value)(*map(_rounded, ty.types, value))
    if isinstance(value, TiledArray):
        return emulator.Boxed(value.array, value.rows, value.layout)
    return np.float32(value) if ty == types.float32 else value


def clear(array: Any, stream: int | LaunchRecord = 0) -> None:
    """Fill a launch argument with zeros, in the order of the stream.

    The memory of the array must be contiguous.
    """
    if isinstance(array, DeviceArray):
        _give(stream, lambda to: to.clear(array))
    else:
        array[...] = 0


def broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a launch argument broadcast to ``shape``: axes of length 1 get the stride 0."""
    full = (1,) * (len(shape) - len(array.shape)) + tuple(array.shape)
    steps = (0,) * (len(shape) - len(array.shape)) + tuple(array.strides)
    strides = tuple(
        0 if n == 1 and m != 1 else step for n, m, step in zip(full, shape, steps, strict=True)
    )
    return _seen_as(array, shape, strides)


def permuted(array: Any, order: tuple[int, ...]) -> Any:
    """Return a launch argument with its axes in ``order``, without a copy."""
    shape, strides = (tuple(x[n] for n in order) for x in (array.shape, array.strides))
    return _seen_as(array, shape, strides)


def as_halves(array: Any) -> Any:
    """Return a view of a launch argument in which a 16-bit element contains two 8-bit elements.

    The two elements are neighbours in a row. The last axis of the array must have an even length,
    and no gaps.
    """
    if isinstance(array, DeviceArray):
        shape = (*array.shape[:-1], array.shape[-1] // 2)
        return replace(array, shape=shape, strides=(*array.strides[:-1], 2), itemsize=2)
    return array.view(np.uint16)


def transposed(array: Any, order: tuple[int, ...]) -> Any:
    """Return a launch argument with a new first axis of length 1, then its axes in ``order``."""
    turned = permuted(array, order)
    return _seen_as(array, (1, *turned.shape), (0, *turned.strides))


def with_last_axis(array: Any) -> Any:
    """Return a launch argument with a new last axis of length 1, without a copy."""
    return _seen_as(array, (*array.shape, 1), (*array.strides, 0))


def grouped(array: Any, heads: int) -> Any:
    """Return a launch argument with ``heads`` neighbouring heads moved behind the rows.

    The shape (batch, H, rows, ...) becomes (batch, H / heads, rows, heads, ...).
    """
    (batch, all_heads, rows, *last), (b, h, r, *steps) = array.shape, array.strides
    shape = (batch, all_heads // heads, rows, heads, *last)
    return _seen_as(array, shape, (b, h * heads, r, h, *steps))


def as_one(array: Any) -> Any:
    """Return a view of a launch argument in which all rows belong to one batch entry.

    The shape (batch, H, rows, ...) becomes (1, H, batch * rows, ...). The rows of a head must be at
    equal distances in memory, from the first row of the first batch entry to the last row of the
    last batch entry.
    """
    (batch, heads, rows, *last), (b, h, r, *steps) = array.shape, array.strides
    return _seen_as(array, (1, heads, batch * rows, *last), (0, h, r if rows > 1 else b, *steps))


def as_batch(array: Any, batch: int) -> Any:
    """Return a launch argument with its rows divided among ``batch`` batch entries.

    The shape (1, H, batch * rows, ...) becomes (batch, H, rows, ...).
    """
    (_, heads, total, *last), (_, h, r, *steps) = array.shape, array.strides
    rows = total // batch
    return _seen_as(array, (batch, heads, rows, *last), (rows * r, h, r, *steps))


def _seen_as(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if isinstance(array, DeviceArray):
        return replace(array, shape=shape, strides=strides)
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=array.flags.writeable)
