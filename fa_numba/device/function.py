"""The decorator ``device_function``, for functions that kernels call."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numba import cuda


class DeviceFunction:
    """A function that kernels call, inlined into the kernel.

    Numba treats this object like the result of ``numba.cuda.jit(device=True, inline="always")``.
    Calling ``jit`` is slow, and a kernel calls about a hundred device functions. Therefore ``jit``
    is called only when Numba first needs its result. The emulator calls the Python function
    ``py_func`` directly. Numba's inliner reads ``targetoptions``.
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


# The decorator of device functions. They are inlined, so that tiles stay in registers.
device_function: Any = DeviceFunction
