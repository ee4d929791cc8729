"""The launch cache: repeats the launches of an earlier equal call with the addresses of new arrays.

The first call checks its arguments, makes a plan, and records its launches. The recording is stored
under a key that contains everything on which the launches depend. A later call with an equal key
replays the recording with its own addresses, without checks and planning. Calls that raised an
error are not stored. Calls with host arrays or JAX arrays are not stored either. The key contains:

=============================  =====================================================================
argument of the call           contribution to the key
=============================  =====================================================================
choices, scalar options        type and value
array on a GPU                 library, GPU, dtype, shape, strides and alignment
lengths, ``block_mask``        dtype, shape and values of the array. Each call copies an array on
                               a GPU to the host, to read the values
``block_table``, ``kv_lens``   with a ``block_table``: as for arrays on a GPU. If one of the two
                               arrays is on the host, the call is not stored
``score_mod``, ``mask_mod``    code, captured numbers, and captured arrays as for arrays on a GPU
``BlockMask``                  its function, its sizes and its tiles
=============================  =====================================================================

Inside ``device.planning_for``, the limits of the planned GPU are a part of the key too.
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

KEPT = 1024  # number of stored calls; the oldest call is removed first
_NO_SEED = seed_words(0, 0)
_NO_ARRAYS = (None,) * len(ARRAYS)
_SCALARS = frozenset((bool, int, float, str, type(None), np.bool_, np.float32, np.float64))


class Call(NamedTuple):
    """A call on GPU arrays: its key in the launch cache, and the values for replayed launches.

    field        meaning
    key          all values on which the launches depend
    pointers     addresses of the inputs, of arrays among the options, and of ``out``
    seeds        seed and offset of dropout as 32-bit words
    block_mask   the ``BlockMask`` of the call, or None
    ordinal      number of the GPU
    slot         index in ``pointers`` at which ``with_blocks`` inserts the addresses of the block
                 mask's arrays. There are arrays for each tile size, and only the recorded launches
                 say which tile size they need
    """

    key: tuple
    pointers: list[int]
    seeds: tuple[int, int, int]
    block_mask: BlockMask | None = None
    ordinal: int = HOST
    slot: int = 0

    def with_blocks(self, tile: BlockSize | None) -> Call:
        """Return the call with the addresses of the block mask's arrays inserted in ``pointers``.

        ``tile`` is the tile size for which kernels read the arrays. None means the block size with
        which the mask was made.
        """
        if self.block_mask is None:
            return self
        arrays = self.block_mask.lists.at(self.ordinal, tile)
        own = [x.pointer for x in arrays.values()]
        pointers = [*self.pointers[: self.slot], *own, *self.pointers[self.slot :]]
        return self._replace(pointers=pointers, block_mask=None)


@dataclass(frozen=True)
class KeptCall:
    """The recorded launches of a call that succeeded, and the facts for replaying the launches.

    field       meaning
    recording   the recorded launches
    library     library of the results
    ordinal     number of the GPU
    context     CUDA context of the call, as ``device.current_context`` returns it
    makers      one function for each new result. The function allocates the array of the result
    extents     (begin, end) of the bytes that each array of ``Call.pointers`` covers, relative to
                the address of the array
    written     indices in ``Call.pointers`` of the arrays to which kernels write
    checked     the field ``pointers`` of the recorded call. Its checks have found that no written
                array overlaps another array
    tile        tile size of the launches; None for a call that has no tiles. If the call has a
                ``BlockMask``, kernels read the mask's arrays for this tile size
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
        """Launch the kernels for ``call`` on the stream ``handle``, and return the results.

        ``out`` is the caller's array for the first result, or None. The GPU ``ordinal`` must be the
        current GPU.
        """
        made = [make() for make in self.makers]
        addresses = [pointer_of(self.library, x) for x in made]
        values = [*call.pointers, *addresses, *call.seeds]
        device.replay(self.recording, values, handle, self.ordinal)
        return made if out is None else [out, *made]

    def may_overlap(self, pointers: Sequence[int]) -> bool:
        """Return whether an array that the kernels write may share memory with another array.

        ``pointers`` are the addresses of the arrays in the new call. Two arrays share no memory if
        they cover different ranges of addresses. They also share no memory if the distance between
        their addresses is the same as in the first call, which checked the arrays. Interleaved
        pages of K and V, for example, pass this second test.
        """
        if not self.written:
            return False
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
    """Return the key and the addresses of a call, or None for a call that is never stored.

    ``arrays`` contains the inputs, and ``out`` is the caller's array for the result. ``choices``
    contains the arguments of the call that are neither arrays nor ``options``. This function checks
    no values, so that it is fast.
    """
    if not device.on_gpu():
        return None
    key: list[Any] = [choices, device.planned_limits()]
    pointers: list[int] = []
    if not options:  # most calls: the loops below would find nothing
        found = _add_arrays((*arrays, *_NO_ARRAYS, out), key, pointers)
        return found and Call(tuple(key), pointers, _NO_SEED, None, *found)
    if options.get("check_table"):
        return None
    paged = options.get("block_table") is not None
    named = (*ARRAYS, *PAGING, "new_lens") if paged else tuple(ARRAYS)
    captured: list[Any] = []
    mask = options.get("block_mask")
    blocks = (mask,) if isinstance(mask, BlockMask) else ()
    for name in mods.PARAMETERS:
        if options.get(name) is not None and not _add_function(name, options[name], key, captured):
            return None
        if blocks and name == "mask_mod":  # ``mask_mod`` and a ``BlockMask`` are never both given
            _add_captured(blocks[0].captured, key, captured)
    others = map(options.get, named[len(ARRAYS) :])
    # Scales can be numbers. The loop below adds these to the key.
    of_options = (None if type(x) in _SCALARS else x for x in map(options.get, ARRAYS))
    every = (*arrays, *of_options, *captured, *others, *blocks, out)
    found = _add_arrays(every, key, pointers)
    if found is None:
        return None
    ordinal, slot = found
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


def _add_arrays(
    arrays: Sequence[Any], key: list[Any], pointers: list[int]
) -> tuple[int, int] | None:
    """Add the kind of each array to ``key``, and the address of each array to ``pointers``.

    The kind is described in ``arrays.address_and_kind``. ``arrays`` may also contain None or a
    ``BlockMask``. ``Call.with_blocks`` inserts the addresses of the mask's arrays later.

    Return a pair: the number of the GPU, and the index in ``pointers`` for the arrays of the
    ``BlockMask``. Return None if an array is not on a GPU, or if only the checks of a first call
    can decide whether it is valid.
    """
    ordinal, slot = HOST, 0
    for array in arrays:
        if array is None:
            key.append(None)
            continue
        if isinstance(array, BlockMask):
            slot = len(pointers)
            key += (array.shape, array.seqlen_q, array.seqlen_k, array.block_size, array.tiles)
            continue
        found = address_and_kind(array)
        if found is None:
            return None
        ordinal = found[1][1]
        pointers.append(found[0])
        key.append(found[1])
    return ordinal, slot


def _add_function(name: str, function: Any, key: list[Any], arrays: list[Any]) -> bool:
    """Add a caller's function and its captured numbers to ``key``.

    The arrays that the function captures are added to ``arrays``. ``name`` is the option that takes
    the function, such as "score_mod". Return False if the function is invalid. The caller then runs
    the checks of the call, which raise the error.
    """
    try:
        found = mods.captured(name, function)
    except (TypeError, ValueError):
        return False
    _add_captured(found, key, arrays)
    return True


def _add_captured(found: mods.Captured, key: list[Any], arrays: list[Any]) -> None:
    """Add a translated ``score_mod`` or ``mask_mod``, and its captured numbers, to ``key``.

    The arrays that the function captures are added to ``arrays``. ``found`` contains the translated
    function and its captured values.
    """
    mod, values = found
    key += (mod.option, mod)
    for _, value in values:
        if mods.is_array(value):
            arrays.append(value)
        else:
            key += (type(value), value)


def _content(name: str, value: Any) -> tuple | None:
    """Return the part of the key for an array on whose values the launches depend.

    The part contains the dtype, the shape and the content of the array. ``name`` is the option:
    "block_mask", or an option that takes lengths. Return None if the array may be invalid, so that
    the checks of the call must decide.
    """
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
    """Repeat the launches of an equal earlier call, and return the results of ``call``.

    Return None if no equal call is stored, or if an array that the kernels write may share memory
    with another array. Raises the errors of ``placement.stream_handle``.
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
    if found.may_overlap(call.pointers):
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
    run: Callable[[dict[str, object], Any], None],
    target: Operand | None = None,
    words: Mapping[str, int] | None = None,
) -> list[Any]:
    """Execute a plan on the current device, store its launches, and return the results.

    The results are new arrays of the inputs' library. If ``target`` is not None, it is the first
    result. On a GPU, the launches are recorded first and then replayed. The recording is stored for
    later calls that are equal to ``call``. Nothing is stored if ``call`` is None, or if the inputs
    are host arrays. If a GPU runs the call, host arrays are copied to the GPU. The results and the
    inputs that the plan updates are then copied back.

    ``inputs`` maps the names in the plan's launches to the inputs. ``words`` maps names to integers
    that are not part of the key of the launch cache, such as the seed of dropout. The function
    ``run(arrays, stream)`` launches the kernels, where ``arrays`` maps names to the inputs, the
    outputs and ``words``.
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
