"""Calls kept ready: one like an earlier call, but for its addresses, skips what that one passed.

The first call checks, plans and records its launches. It is kept under all that these depend on:
what was asked for, and of each array the library, GPU, dtype, shape, strides and alignment. Only
calls that succeeded are kept, so what is refused once is refused again. Host arrays, block masks
and arrays of lengths are read anew by each call, which is then a first one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa_numba import device
from fa_numba.device.launch_record import DeviceArray, LaunchRecord, Word
from fa_numba.host import placement
from fa_numba.host.arrays import HOST, Operand, extent, glance, operand, pointer_of
from fa_numba.host.binding import seed_words

KEPT = 1024  # calls; then the oldest goes
_SCALARS = frozenset((bool, int, float, str, type(None), np.float32, np.float64))


class Seen(NamedTuple):
    """A call at a glance: ``key`` is what its launches depend on, the rest what they take.

    ``pointers`` are those of the inputs, arrays among the options and ``out``, in this order.
    """

    key: tuple
    pointers: list[int]
    seeds: tuple[int, int, int]


@dataclass(frozen=True)
class Prepared:
    """A call's launches, and how to make its results: ``makers`` without that for ``out``.

    ``extents`` are those of the arrays that ``Seen.pointers`` has.
    """

    recording: LaunchRecord
    library: str
    place: int
    context: int
    makers: tuple[Callable[[], Any], ...]
    extents: tuple[tuple[int, int], ...]

    def run(self, seen: Seen, out: Any, handle: int) -> list[Any]:
        """The results of the call ``seen``; the current GPU is ``place``."""
        made = [make() for make in self.makers]
        addresses = [pointer_of(self.library, x) for x in made]
        values = [*seen.pointers, *addresses, *seen.seeds]
        device.replay(self.recording, values, handle, self.place)
        return made if out is None else [out, *made]

    def may_overlap(self, pointers: Sequence[int]) -> bool:
        """Whether the last of ``pointers``, that of ``out``, may share memory with another."""
        pairs = zip(pointers, self.extents, strict=True)
        *others, (first, end) = [(p + begin, p + last) for p, (begin, last) in pairs]
        return any(first < last and begin < end for begin, last in others)


_kept: dict[tuple, Prepared] = {}
_keeping = threading.Lock()


def seen(
    facts: tuple, arrays: Sequence[Any], options: Mapping[str, Any], out: Any = None
) -> Seen | None:
    """A call on GPU arrays at a glance; None for one that is not kept."""
    if not device.on_gpu():
        return None
    key: list[Any] = [facts, *map(type, facts)]  # with types, since True equals 1
    pointers = []
    for array in (*arrays, options.get("bias"), options.get("alibi_slopes"), out):
        if array is None:
            key.append(None)
            continue
        found = glance(array)
        if found is None:
            return None
        pointers.append(found[0])
        key.append(found[1])
    seed = offset = 0
    for name, value in options.items():
        kind = type(value)
        if name == "seed" and kind is int and 0 <= value < 2**64:
            seed = value
        elif name == "offset" and kind is int and 0 <= value < 2**32:
            offset = value
        elif kind in _SCALARS:
            key += (name, kind, value)
        elif kind is tuple and name != "block_mask":
            key += (name, *map(type, value), value)
        elif name not in ("bias", "alibi_slopes"):
            return None
    return Seen(tuple(key), pointers, seed_words(seed, offset))


def again(seen: Seen | None, out: Any, stream: Any) -> list[Any] | None:
    """The results of a call like one that was kept; None where there is none, or where ``out`` may
    share memory with an input.

    Raises what ``calls.stream_handle`` does.
    """
    if seen is None:
        return None
    try:
        found = _kept.get(seen.key)
    except TypeError:  # an argument without a hash
        return None
    if found is None or (out is not None and found.may_overlap(seen.pointers)):
        return None
    handle = placement.stream_handle(stream, found)
    if device.current_context() == found.context:
        return found.run(seen, out, handle)
    with device.on_device(found.place):
        return found.run(seen, out, handle)


def first(
    execute: Callable[[list[Any], list[Any], Any], None],
    inputs: Sequence[Operand],
    seeds: tuple[int, int, int],
    outputs: Sequence[tuple[tuple[int, ...], str, Operand | None]],
    handle: int,
    seen: Seen | None,
) -> list[Any]:
    """Call ``execute([*inputs, *seeds], outputs, stream)`` with launch arguments; gives the
    outputs' arrays.

    An output is a shape, a dtype and the operand that takes it, or None for a new array of the
    inputs' library. On a GPU the launches are recorded, run, and kept if the call was ``seen``;
    host arrays are copied to the GPU and back.
    """
    library = inputs[0]
    results = [
        target if target is not None else operand("result", library.empty(shape, dtype))
        for shape, dtype, target in outputs
    ]
    if not device.on_gpu():
        execute([*(x.argument() for x in inputs), *seeds], [x.argument() for x in results], handle)
        return [x.owner for x in results]
    host = library.place == HOST
    if host:
        sent = [device.to_gpu(x.argument(), handle) for x in inputs]
        made = [device.empty(x.shape, x.argument().dtype.name) for x in results]
        given, taken = ([device.argument(a) for a in arrays] for arrays in (sent, made))
    else:
        given, taken = ([x.argument() for x in arrays] for arrays in (inputs, results))
    recording = _recorded(execute, given, taken, len(seeds))
    values = [*(x.pointer for x in (*given, *taken)), *seeds]
    device.replay(recording, values, handle, device.current_ordinal())
    if host:
        for array, result in zip(made, results, strict=True):
            device.to_host(array, result.argument(), handle)
    elif seen is not None:
        new = [(shape, dtype) for shape, dtype, target in outputs if target is None]
        targets = [target for *_, target in outputs if target is not None]
        kept = Prepared(
            recording,
            library.library,
            library.place,
            device.current_context(),
            tuple(functools.partial(library.empty, *x) for x in new),
            tuple(map(extent, (*inputs, *targets))),
        )
        _keep(seen.key, kept)
    return [x.owner for x in results]


def _recorded(
    execute: Callable, given: Sequence[DeviceArray], taken: Sequence[DeviceArray], words: int
) -> LaunchRecord:
    """The launches of a call, with a slot for each of its arrays and words."""
    recording = LaunchRecord()
    slots = [
        DeviceArray(0, x.shape, x.strides, None, x.itemsize, n)
        for n, x in enumerate((*given, *taken))
    ]
    seeds = [Word(len(slots) + n) for n in range(words)]
    execute([*slots[: len(given)], *seeds], slots[len(given) :], recording)
    return recording


def _keep(key: tuple, call: Prepared) -> None:
    with _keeping:
        while len(_kept) >= KEPT:
            del _kept[next(iter(_kept))]
        try:
            _kept[key] = call
        except TypeError:  # an argument without a hash
            return
