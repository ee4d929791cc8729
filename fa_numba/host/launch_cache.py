"""The launch cache: a call like an earlier one makes that one's launches again, at other addresses.

The first call of a kind checks its arguments, plans, and records its launches. The record is kept
under a key of all that these depend on: what was asked for, and of each array the library, GPU,
dtype, shape, strides and alignment. Inside ``planning_for`` the limits that are planned for are
part of the key. A later call with an equal key skips all that and replays the
record with its own addresses. Only calls that succeeded are kept, so what is refused once is
refused again. Lengths are part of the key by their values, read back from a GPU by each call, but
for those beside a block table there, and so are arrays of blocks; of functions the code is, and the
numbers that they capture, of a ``BlockMask`` its function, its sizes and its tiles.
Never kept, and so checked and planned each time, are calls with host arrays or JAX arrays.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa_numba import device, mods
from fa_numba.device.launch_record import DeviceArray, LaunchRecord, Word
from fa_numba.dtypes import STORED
from fa_numba.host import placement
from fa_numba.host.arrays import HOST, Operand, address_and_kind, on_host, operand, pointer_of
from fa_numba.host.binding import ARRAYS, LENGTHS, PAGING, seed_words
from fa_numba.host.overlap import extent
from fa_numba.host.plans import LaunchPlan, Plan
from fa_numba.mods.blocks import BlockMask, BlockSize

KEPT = 1024  # calls; then the oldest goes
_SCALARS = frozenset((bool, int, float, str, type(None), np.bool_, np.float32, np.float64))


class Call(NamedTuple):
    """A call on GPU arrays: ``key`` is all that its launches depend on, the rest is put into them.

    ``pointers`` are the addresses of the inputs, of arrays among the options and of ``out``, in
    this order; ``seeds`` the words that dropout draws from. ``block_mask`` is a ``BlockMask`` on
    the GPU ``ordinal``; the addresses of its arrays depend on the tiles of the launches, and go
    before the pointer with the number ``slot``.
    """

    key: tuple
    pointers: list[int]
    seeds: tuple[int, int, int]
    block_mask: BlockMask | None = None
    ordinal: int = HOST
    slot: int = 0

    def with_blocks(self, tile: BlockSize | None) -> Call:
        """Return the call with the addresses of the block mask's arrays for tiles of a size."""
        if self.block_mask is None:
            return self
        arrays = self.block_mask.lists.at(self.ordinal, tile)
        own = [x.pointer for x in arrays.values()]
        pointers = [*self.pointers[: self.slot], *own, *self.pointers[self.slot :]]
        return self._replace(pointers=pointers, block_mask=None)


@dataclass(frozen=True)
class KeptCall:
    """The launches of a call that succeeded, to be made again.

    ``makers`` make new arrays for the results, but for one that goes to ``out``; ``context`` is the
    driver's. ``extents`` are the bytes that each array of ``Call.pointers`` covers, from its
    address: begin and end. ``written`` are the numbers of those that are written, and ``checked``
    the addresses at which none of these shared memory with another. ``tile`` is the size of the
    tiles for which the launches read a ``BlockMask``.
    """

    recording: LaunchRecord
    library: str
    ordinal: int
    context: int
    makers: tuple[Callable[[], Any], ...]
    extents: tuple[tuple[int, int], ...]
    written: tuple[int, ...]
    checked: tuple[int, ...]
    tile: BlockSize | None = None

    def run(self, call: Call, out: Any, handle: int) -> list[Any]:
        """Make the launches for ``call`` on the stream ``handle`` of the GPU ``ordinal``."""
        made = [make() for make in self.makers]
        addresses = [pointer_of(self.library, x) for x in made]
        values = [*call.pointers, *addresses, *call.seeds]
        device.replay(self.recording, values, handle, self.ordinal)
        return made if out is None else [out, *made]

    def may_overlap(self, pointers: Sequence[int]) -> bool:
        """Whether one that is written may share memory with another of ``pointers``.

        Two as far apart as when they were checked do not, such as K's and V's pages in turn.
        """
        spans = [
            (p + begin, p + end) for p, (begin, end) in zip(pointers, self.extents, strict=True)
        ]
        moved = [now - then for now, then in zip(pointers, self.checked, strict=True)]
        return any(
            spans[n][0] < end and begin < spans[n][1] and moved[n] != moved[m]
            for n in self.written
            for m, (begin, end) in enumerate(spans)
        )


_kept: dict[tuple, KeptCall] = {}
_keeping = threading.Lock()


def describe_call(
    choices: Hashable, arrays: Sequence[Any], options: Mapping[str, Any], out: Any = None
) -> Call | None:
    """The key and addresses of a call, found cheaply; None for a call that is never kept.

    ``choices`` are its arguments beside arrays, options and ``out``, checked. Nothing is checked
    here.
    """
    if not device.on_gpu():
        return None
    key: list[Any] = [choices, device.planned_limits()]
    pointers: list[int] = []
    paged = options.get("block_table") is not None
    if paged and options.get("check_table"):
        return None
    named = (*ARRAYS, *PAGING, "new_lens") if paged else tuple(ARRAYS)
    captured: list[Any] = []
    mask = options.get("block_mask")
    blocks = (mask,) if isinstance(mask, BlockMask) else ()
    for name in mods.PARAMETERS:
        if options.get(name) is not None and not _add_function(name, options[name], key, captured):
            return None
        if blocks and name == "mask_mod":  # refused where it is given too
            _add_captured(blocks[0].captured, key, captured)
    others = map(options.get, named[len(ARRAYS) :])
    ordinal, slot = HOST, 0
    for array in (*arrays, *map(options.get, ARRAYS), *captured, *others, *blocks, out):
        if array is None:
            key.append(None)
            continue
        if isinstance(array, BlockMask):
            slot = len(pointers)
            key += ("block_mask", array.shape, array.seqlen_q, array.seqlen_k)
            key += (array.block_size, array.tiles)
            continue
        found = address_and_kind(array)
        if found is None:
            return None
        ordinal = found[1][1]
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
        elif kind in (tuple, list) and name != "block_mask":
            key += (name, *map(type, value), tuple(value))
        elif name in named or name in mods.PARAMETERS or (blocks and name == "block_mask"):
            continue
        else:
            content = _content(name, value) if name in (*LENGTHS, "block_mask") else None
            if content is None:
                return None
            key += (name, *content)
    words = seed_words(seed, offset)
    return Call(tuple(key), pointers, words, blocks[0] if blocks else None, ordinal, slot)


def _add_function(name: str, function: Any, key: list[Any], arrays: list[Any]) -> bool:
    """Add what a caller's function is and captures; False where only the checks can judge it."""
    try:
        found = mods.captured(name, function)
    except (TypeError, ValueError):
        return False
    _add_captured(found, key, arrays)
    return True


def _add_captured(found: mods.Captured, key: list[Any], arrays: list[Any]) -> None:
    """The same of a function that has been read."""
    mod, values = found
    key += (mod.option, mod)
    for _, value in values:
        if mods.is_array(value) and not isinstance(value, np.generic):
            arrays.append(value)
        else:
            key += (type(value), value)


def _content(name: str, value: Any) -> tuple | None:
    """What a call depends on of lengths or blocks; None where only the checks can judge."""
    kind, torch = type(value), sys.modules.get("torch")
    blocks = name == "block_mask"
    if kind is not np.ndarray and (torch is None or kind is not torch.Tensor):
        return None
    array = on_host(name, value)
    if array.dtype.kind not in ("b" if blocks else "iu"):
        return None
    content = array.tobytes()
    if blocks:
        content = hashlib.blake2b(content).digest()
    return array.dtype.str, array.shape, content


def replay(call: Call | None, out: Any, stream: Any) -> list[Any] | None:
    """The results of ``call`` by the launches of an equal one that was kept.

    None where there is no such one, or where what it writes may share memory with another array.
    Raises as ``placement.stream_handle`` does.
    """
    if call is None:
        return None
    try:
        found = _kept.get(call.key)
    except TypeError:  # an argument without a hash
        return None
    if found is None:
        return None
    call = call.with_blocks(found.tile)
    if found.written and found.may_overlap(call.pointers):
        return None
    handle = placement.stream_handle(stream, found)
    if device.current_context() == found.context:
        return found.run(call, out, handle)
    with device.on_device(found.ordinal):
        return found.run(call, out, handle)


def run_and_keep(
    plan: LaunchPlan,
    inputs: Mapping[str, Operand],
    stream: Any,
    call: Call | None,
    run: Callable[[dict[str, Any], Any], None],
    target: Operand | None = None,
    words: Mapping[str, int] | None = None,
) -> list[Any]:
    """The results of a plan of this device by ``inputs``, which have the names that its launches
    take; its first output goes to ``target`` if that is given.

    ``run(arrays, stream)`` makes the launches, or has them recorded, with all launch arguments by
    name: the inputs, the outputs, which are new arrays of the inputs' library, and ``words``. On a
    GPU the launches are recorded, made, and kept for calls like ``call`` unless that is None; host
    arrays are copied to the GPU, and the results and inputs that are ``updated`` back.
    """
    operands = list(inputs.values())
    library = operands[0]
    handle = placement.stream_handle(stream, library)
    words = words or {}
    names = (*inputs, *(output.name for output in plan.outputs), *words)
    shapes = [inputs[x.like].shape if x.like else x.shape for x in plan.outputs]
    new = [(shape, x.dtype) for shape, x in zip(shapes, plan.outputs, strict=True)]
    targets = [] if target is None else [target]
    new = new[len(targets) :]
    results = [*targets, *(operand("result", library.empty(*x), tuple(STORED)) for x in new)]

    def execute(arrays: Sequence[Any], stream: Any) -> None:
        run(dict(zip(names, arrays, strict=True)), stream)

    def finished() -> list[Any]:
        owners = [x.owner for x in results]
        n = len(targets)
        return owners if library.finish is None else [*owners[:n], *map(library.finish, owners[n:])]

    if not device.on_gpu():
        execute([*(x.argument() for x in (*operands, *results)), *words.values()], handle)
        return finished()
    host = library.ordinal == HOST
    if host:
        sent = [device.to_gpu(x.argument(), handle) for x in operands]
        made = [device.empty(x.shape, x.argument().dtype.name) for x in results]
        given = [device.argument(x) for x in (*sent, *made)]
    else:
        given = [x.argument() for x in (*operands, *results)]
    recording = LaunchRecord()
    slots = [DeviceArray(0, x.shape, x.strides, None, x.itemsize, n) for n, x in enumerate(given)]
    execute([*slots, *(Word(len(slots) + n) for n in range(len(words)))], recording)
    values = [*(x.pointer for x in given), *words.values()]
    device.replay(recording, values, handle, device.current_ordinal())
    updated = [n for n, name in enumerate(inputs) if name in plan.updated]
    if host:
        back = [*zip(made, results, strict=True), *((sent[n], operands[n]) for n in updated)]
        for array, result in back:
            device.to_host(array, result.argument(), handle)
    elif call is not None:
        tile = BlockSize(plan.tiles.Br, plan.tiles.Bc) if isinstance(plan, Plan) else None
        kept = KeptCall(
            recording,
            library.library,
            library.ordinal,
            device.current_context(),
            tuple(functools.partial(library.empty, *x) for x in new),
            tuple(map(extent, (*operands, *targets))),
            (*updated, *range(len(operands), len(operands) + len(targets))),
            tuple(call.with_blocks(tile).pointers),
            tile,
        )
        _keep(call.key, kept)
    return finished()


def _keep(key: tuple, call: KeptCall) -> None:
    with _keeping:
        while len(_kept) >= KEPT:
            del _kept[next(iter(_kept))]
        try:
            _kept[key] = call
        except TypeError:  # an argument without a hash
            return
