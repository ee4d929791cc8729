"""Check on the emulator that the arguments of each launch have the types that the kernel declares.

The emulator runs a kernel's Python function with any arrays. A GPU runs code that was compiled for
the declared types. An array with another number of axes or another dtype is then read wrongly, and
no result on the emulator shows that.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from fa_numba import device
from fa_numba.device import TiledArray
from fa_numba.device.signature import tiled_type

_launch = device.launch


@functools.cache
def _tiled(ndim: int, ends: bool) -> Any:
    return tiled_type(ndim, ends)


def wrong_types(declared: Any, value: Any, name: str) -> list[str]:
    """Return one sentence for each part of an argument whose type is not the declared type."""
    if isinstance(declared, types.NamedTuple):
        parts = zip(declared.fields, declared.types, value, strict=True)
        return [x for field, ty, each in parts for x in wrong_types(ty, each, f"{name}.{field}")]
    if isinstance(value, TiledArray):
        axes = value.array.ndim
        fits = declared == _tiled(axes, value.ends)
        got = f"a tensor map of {axes} axes, ends={value.ends}"
    elif isinstance(value, np.ndarray):
        bits = np.dtype(np.uint8) if value.dtype == bool else value.dtype
        fits = isinstance(declared, types.Array) and declared.ndim == value.ndim
        fits = fits and np.dtype(str(declared.dtype)) in (bits, value.dtype)
        got = f"{value.ndim} axes of {value.dtype}"
    else:
        fits = not isinstance(declared, types.Array)
        got = type(value).__name__
    return [] if fits else [f"{name} is declared as {declared}, the launch has {got}"]


def launch(kernel: Any, grid: Any, args: tuple, *others: Any, **named: Any) -> None:
    """As ``device.launch``; raise an AssertionError for arguments of other types."""
    if not device.on_gpu():
        names = kernel.function.__code__.co_varnames
        of_each = zip(kernel.argument_types, args, names, strict=False)
        wrong = [x for ty, value, name in of_each for x in wrong_types(ty, value, name)]
        assert len(args) == len(kernel.argument_types), f"{kernel.name} has {len(args)} arguments"
        assert not wrong, f"types of {kernel.name}: {'; '.join(wrong)}"
    _launch(kernel, grid, args, *others, **named)


device.launch = launch  # for all tests, and commands of this folder
