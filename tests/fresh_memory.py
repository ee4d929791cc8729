"""Fill new memory on the emulator with values that a GPU's memory may contain.

A kernel must not depend on what an array contains before the kernel writes to it. No single filling
shows every fault: a maximum ignores NaN, and adding -inf to -inf changes nothing. Each launch plan
therefore takes the next one of `FILLINGS`. A test's name decides the first filling of the test, so
that a test that fails once fails again.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fa_numba import device

# NaN in every dtype, large finite numbers, -inf, and what the launch plan before has left.
FILLINGS = ("nan", "large", "-inf", "last")
# Of 16 bits as kernels see them: 60,000, -inf and a small number in float16. In bfloat16 these are
# 1.1e36, -2.7e36 and 1.8e-5.
_HALVES = {"nan": 0x7FC5, "large": 0x7B53, "-inf": 0xFC00, "last": 0x3799}
# NaN that no computation returns.
_FLOATS = {"nan": np.uint32(0x7FC5A5A5).view(np.float32), "large": 1e30, "-inf": -np.inf}
_FLOATS["last"] = 0.375
_INTEGERS = {"nan": -1, "large": 2**30, "-inf": -(2**31), "last": -1}


class _State(threading.local):
    """The number of the next filling, and the last array of each dtype, of one thread."""

    begin = 0

    def __init__(self) -> None:
        self.number, self.only, self.last = _State.begin, False, {}


_state = _State()
_scratch = device.scratch


def begin(name: str) -> None:
    """Take the filling that follows from a test's name, and forget the arrays of other tests."""
    _State.begin = _state.number = zlib.crc32(name.encode())
    _state.last.clear()


@contextlib.contextmanager
def filled(name: str) -> Iterator[None]:
    """Fill all new memory inside the context with the filling of this name."""
    before = vars(_state).copy()
    _state.number, _state.only, _state.last = FILLINGS.index(name), True, {}
    try:
        yield
    finally:
        vars(_state).update(before)


def filling() -> str:
    """Return the name of the current filling."""
    return FILLINGS[_state.number % len(FILLINGS)]


def fill(array: np.ndarray) -> None:
    """Fill an array with the current filling's number, "last" with a small number."""
    name = filling()
    if array.dtype.kind == "f" and array.dtype.itemsize >= 4:
        array[...] = _FLOATS[name]
    elif array.dtype.itemsize == 2:
        array.view(np.uint16)[...] = _HALVES[name]
    elif array.dtype == np.int32:
        array[...] = _INTEGERS[name]


def value() -> float:
    """Return the current filling's float32, "last" a small number."""
    return _FLOATS[filling()]


@contextlib.contextmanager
def scratch(stream: Any) -> Iterator[Callable[..., Any]]:
    """As ``device.scratch``: on the emulator, the workspace has the current filling."""
    made: list[np.ndarray] = []

    def allocate(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        array = new(shape, dtype)
        last = _state.last.get(array.dtype)
        if filling() == "last" and last is not None and last.size:
            array[...] = np.resize(last, array.shape)
        else:
            fill(array)
        made.append(array)
        return array

    with _scratch(stream) as new:
        try:
            yield new if device.on_gpu() else allocate
        finally:
            _state.last |= {array.dtype: array for array in made}
            _state.number += not _state.only


device.scratch = scratch  # for all tests, and commands of this folder
