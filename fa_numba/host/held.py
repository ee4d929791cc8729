"""Arrays that a caller's function uses, with the values that they had when the function was given.

A block mask and a backward pass use a function again, after its caller may have changed an array in
place. Small arrays are therefore copied. Larger arrays are watched, and a call raises an error if
one has changed.
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

COPIED_BYTES = 1 << 20  # of an array that is copied; a larger one is watched


@dataclass(frozen=True)
class Watched:
    """An array that must not change, and what ``state`` returned when it was given."""

    name: str
    state: Callable[[], Any]
    given: Any


_watched: WeakKeyDictionary[FunctionType, tuple[Watched, ...]] = WeakKeyDictionary()


def holding(option: str, function: Any, *, tensors: bool = True) -> FunctionType:
    """Return a function given as ``option`` with the values that it uses now.

    ``check`` raises an error if an array of the function is not copied, and has changed. Without
    ``tensors``, torch tensors stay as they are, and are not watched.
    """
    mod, values = mods.captured(option, function)
    held, watched = dict(values), []
    for name, value in values:
        if not mods.is_array(value) or isinstance(value, np.generic):
            continue
        of_torch = _is_tensor(value)
        if of_torch and not tensors:
            continue
        found = operand(f"{name} in {option}, {mod},", value, CAPTURED)
        if found.library == "jax":  # nobody can change it
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
    """Raise ValueError if an array has changed that a function among a call's options uses."""
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
    """Return a function of no arguments whose result changes with an array's values.

    Return None for an array that is copied instead.
    """
    if _nbytes(found) <= COPIED_BYTES:
        return None
    if of_torch:
        # A tensor made under torch.inference_mode has no counter of its changes.
        return None if value.is_inference() else lambda: value._version
    if found.host is None:  # reading it back in each call would take too long
        return None
    stored = _stored(found.host)
    return lambda: hashlib.blake2b(np.ascontiguousarray(stored).data).digest()


def _stored(array: np.ndarray) -> np.ndarray:
    """Return the array without repetitions, which broadcasting makes with a stride of 0."""
    return array[tuple(slice(1 if step == 0 else None) for step in array.strides)]


def _nbytes(found: Operand) -> int:
    """Return the bytes of an array without repetitions."""
    if found.host is not None:
        return _stored(found.host).nbytes
    size = 1
    for n, step in zip(found.shape, found.strides, strict=True):
        size *= n if step else 1
    return size * np.dtype(found.dtype).itemsize


def _copy(found: Operand) -> Any:
    """Return a copy on the same device: a NumPy array, a torch tensor, or an array of Numba."""
    if found.library == "torch" and found.ordinal != HOST:
        return found.owner.detach().clone()
    if found.host is not None:
        return np.broadcast_to(_stored(found.host).copy(), found.shape)
    source = found.owner
    if not hasattr(source, "__cuda_array_interface__"):  # DLPack alone
        source = SimpleNamespace(__cuda_array_interface__=_interface(found))
    with device.on_device(found.ordinal):
        made = device.to_gpu(device.copied_to_host(source))
        device.synchronize()
    return made


def _interface(found: Operand) -> dict[str, Any]:
    """Return the ``__cuda_array_interface__`` of an array on a GPU."""
    layout = {"shape": found.shape, "strides": found.strides, "data": (found.pointer, True)}
    return layout | {"typestr": np.dtype(found.dtype).str, "version": 3}
