"""The arguments of a launch, converted to the objects with which the kernel computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from .boxed_arrays import Boxed, BoxedArray
from .global_memory import GlobalArray
from .records import Records

if TYPE_CHECKING:
    from .run import Launch


# Cache of the parameter names of each kernel: `inspect.signature` is slow.
_parameters: WeakKeyDictionary[Callable[..., None], list[str]] = WeakKeyDictionary()


def passed(context: Launch, function: Callable[..., None], args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a launch as the objects with which the kernel computes.

    A NumPy array becomes a `GlobalArray`, which is added to ``context.arrays``. A structured array
    becomes `Records`, with a `GlobalArray` for each field. An array without axes becomes a number.
    Raise TypeError for a wrong number of arguments, and for lists, sets, dictionaries, ranges and
    arrays of other libraries.
    """
    names = _parameters.get(function)
    if names is None:
        names = _parameters[function] = list(inspect.signature(function).parameters)
    if len(names) != len(args):
        hint = ""
        if len(args) == 1 and isinstance(args[0], (tuple, list)) and len(args[0]) == len(names):
            hint = "; pass the arguments one by one: launch(kernel, grid, block, a, b)"
        raise TypeError(
            f"kernel {function.__name__} takes {len(names)} arguments ({', '.join(names)}), got "
            f"{len(args)}{hint}"
        )
    return [_passed(context, name, value) for name, value in zip(names, args, strict=True)]


def _passed(context: Launch, name: str, value: Any) -> Any:
    """Return one argument as the object with which the kernel computes; `name` is its parameter."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.generic):
        return value if isinstance(value, np.inexact) else value.item()
    if isinstance(value, Boxed):
        return BoxedArray(_passed(context, name, value.array), value.layout)
    if isinstance(value, np.ndarray) and value.dtype.names:
        return Records(name, value, lambda field, part: _passed(context, field, part))
    if isinstance(value, np.ndarray):
        context.arrays.append(GlobalArray(context, name, value))
        return context.arrays[-1]
    if hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return type(value)(*(_passed(context, *field) for field in fields))
    if isinstance(value, tuple):
        return tuple(_passed(context, f"{name}[{n}]", each) for n, each in enumerate(value))
    _refuse(name, value)
    return np.float64(value) if value.__class__ is float else value


def _refuse(name: str, value: Any) -> None:
    """Raise TypeError for arrays of other libraries, and for lists, sets, dicts and ranges."""
    instead = ""
    if isinstance(value, (list, set, dict, range)):
        instead = f"np.asarray({name})"
    elif hasattr(value, "copy_to_host"):
        instead = f"{name}.copy_to_host()"
    elif hasattr(value, "__cuda_array_interface__"):
        instead = f"a copy of {name} in CPU memory, as a NumPy array"
    elif hasattr(value, "__dlpack__") or hasattr(value, "__array__"):
        instead = f"np.asarray({name}), which shares the memory if {name} is in CPU memory"
    if instead:
        kind = type(value)
        raise TypeError(
            f"{name} must be a NumPy array, a number or a tuple of these, got "
            f"{kind.__module__}.{kind.__qualname__}. Pass {instead}"
        )
