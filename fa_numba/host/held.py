"""Arrays that a caller's function captures, kept with the values that they had at the first call.

A block mask or a backward pass calls a ``score_mod`` or ``mask_mod`` again later. The caller may
have changed a captured array in place since then. This module therefore copies or watches each
captured array:

- An array of at most 1 MiB is copied.
- A larger array is watched: a call raises an error if the array has changed.
- A larger array is copied too if changes cannot be detected quickly. These are GPU arrays of other
  libraries than torch, and torch tensors for which torch does not count changes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fa_numba import device, mods
from fa_numba.host.arrays import CAPTURED, HOST, Operand, operand
from fa_numba.mods.blocks import BlockMask

COPIED_BYTES = 1 << 20  # arrays of at most this size are copied, larger arrays are watched


@dataclass(frozen=True)
class Watched:
    """A captured array that must not change between calls.

    ``name`` is the text for messages. ``state`` returns a value that differs after a change of the
    array. ``given`` is the value that ``state`` returned when ``holding`` copied the function.
    """

    name: str
    state: Callable[[], Any]
    given: Any


_watched: WeakKeyDictionary[FunctionType, tuple[Watched, ...]] = WeakKeyDictionary()


def holding(option: str, function: Any, *, tensors: bool = True) -> FunctionType:
    """Return a copy of a caller's function that keeps the values that the function captures now.

    ``option`` is the name of the argument, such as "score_mod". Captured arrays are copied or
    watched, as the docstring of the module says: ``check`` raises an error if a watched array has
    changed. With ``tensors=False``, torch tensors are neither copied nor watched.
    """
    mod, values = mods.captured(option, function)
    held, watched = dict(values), []
    for name, value in values:
        if not mods.is_array(value):
            continue
        of_torch = _is_tensor(value)
        if of_torch and not tensors:
            continue
        found = operand(f"{name} in {option}, {mod},", value, CAPTURED)
        if found.library == "jax":  # JAX arrays cannot be changed
            continue
        state = _state(found, value, of_torch)
        if state is None:
            held[name] = _copy(found)
        else:
            watched.append(Watched(found.name, state, state()))
    made = mods.holding(function, held)
    _watched[made] = tuple(watched)
    return made


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError if a watched array has changed.

    The arrays are those of the functions in ``options``, the options of a call: ``score_mod``,
    ``score_mod_grad``, ``mask_mod`` and the function of ``block_mask``.
    """
    mask = options.get("block_mask")
    of_mask = mask.mask_mod if isinstance(mask, BlockMask) else None
    for function in (*map(options.get, mods.PARAMETERS), of_mask):
        if not isinstance(function, FunctionType):
            continue
        for array in _watched.get(function, ()):
            if array.state() != array.given:
                raise ValueError(
                    f"{array.name} must still have the values that create_block_mask or the "
                    "forward pass read, got values that were changed in place; call "
                    "create_block_mask or the forward pass again, or change a copy of the array"
                )


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _state(found: Operand, value: Any, of_torch: bool) -> Callable[[], Any] | None:
    """Return a function by which changes of a captured array are detected.

    The function takes no arguments. It returns a value, such as a hash of the array, that differs
    after each change of the array. Return None in place of the function if the array must be
    copied, because it is small or its changes cannot be detected quickly. ``found`` is the operand
    of the array ``value``. ``of_torch`` says whether ``value`` is a torch tensor.
    """
    if _nbytes(found) <= COPIED_BYTES:
        return None
    if of_torch:
        # A tensor that was made under torch.inference_mode does not count its changes.
        return None if value.is_inference() else lambda: value._version
    if found.host is None:  # to copy the array to the host in each call would take too long
        return None
    stored = _stored(found.host)
    return lambda: hashlib.blake2b(np.ascontiguousarray(stored).data).digest()


def _stored(array: np.ndarray) -> np.ndarray:
    """Return a view of an array without the elements that broadcasting repeats.

    Axes with a stride of 0 get the length 1.
    """
    return array[tuple(slice(1 if step == 0 else None) for step in array.strides)]


def _nbytes(found: Operand) -> int:
    """Return the size of an array in bytes, without the elements that broadcasting repeats."""
    if found.host is not None:
        return _stored(found.host).nbytes
    size = 1
    for n, step in zip(found.shape, found.strides, strict=True):
        size *= n if step else 1
    return size * np.dtype(found.dtype).itemsize


def _copy(found: Operand) -> Any:
    """Return a copy of an array on the same device.

    In host memory, the copy is a NumPy array. On a GPU, the copy of a torch tensor is a torch
    tensor, and the copy of any other array is an array of Numba.
    """
    if found.library == "torch" and found.ordinal != HOST:
        return found.owner.detach().clone()
    if found.host is not None:
        return np.broadcast_to(_stored(found.host).copy(), found.shape)
    source = found.owner
    if not hasattr(source, "__cuda_array_interface__"):  # it has only DLPack
        source = SimpleNamespace(__cuda_array_interface__=_interface(found))
    with device.on_device(found.ordinal):
        made = device.to_gpu(device.copied_to_host(source))
        device.synchronize()
    return made


def _interface(found: Operand) -> dict[str, object]:
    """Return the ``__cuda_array_interface__`` of an array on a GPU."""
    layout = {"shape": found.shape, "strides": found.strides, "data": (found.pointer, True)}
    return layout | {"typestr": np.dtype(found.dtype).str, "version": 3}
