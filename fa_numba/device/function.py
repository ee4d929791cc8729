"""Functions that kernels call."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numba import cuda


class DeviceFunction:
    """A function that kernels call, inlined into the kernel.

    For Numba it is the result of ``numba.cuda.jit(device=True, inline="always")``. This result is
    made when Numba first needs it, because it is slow to make and a kernel calls about a hundred
    device functions. The emulator uses only ``py_func``. Numba's inliner also uses
    ``targetoptions``.
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
