"""A function that kernels call."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numba import cuda


class DeviceFunction:
    """What ``numba.cuda.jit(device=True, inline="always")`` gives, made when Numba asks for it.

    The emulator needs ``py_func`` alone, Numba's inliner ``targetoptions`` too. A kernel has a
    hundred of these, of which a dispatcher each costs more than the rest of making it.
    """

    targetoptions = {"device": True, "inline": "always"}

    def __init__(self, py_func: Any) -> None:
        self.py_func = self.__wrapped__ = py_func
        self.__name__, self.__doc__ = py_func.__name__, py_func.__doc__

    @cached_property
    def _dispatcher(self) -> Any:
        return cuda.jit(**self.targetoptions)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        return self._dispatcher._numba_type_


# What decorates a function that kernels call; inlined, so that register tiles stay in registers.
device_function: Any = DeviceFunction
