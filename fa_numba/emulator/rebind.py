"""Gives a kernel's function the emulator's names in place of numba.cuda's, its code untouched."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba import cuda

from .namespace import CASTS, LIBDEVICE, MATH


class Rebinder:
    """Rebinds a kernel and the functions it calls; `codes` holds their code objects by id."""

    def __init__(self, namespace: Any) -> None:
        self.codes: dict[int, CodeType] = {}
        self._modules: set[str] = set()
        self._functions: dict[int, FunctionType] = {}
        self._known: dict[int, Any] = {}
        for original, emulated in ((cuda, namespace), (cuda.libdevice, LIBDEVICE), (math, MATH)):
            self._known[id(original)] = emulated
            for name in dir(emulated):  # for `from numba.cuda import shared` and the like
                if name in original.__dict__ and not name.startswith("_") and name != "laneid":
                    self._known[id(original.__dict__[name])] = getattr(emulated, name)

    def function(self, function: Any) -> Any:
        """`function` with its globals and closure rebound, and so on for all that it calls."""
        done = self._functions.get(id(function))
        if done is not None:
            return done
        code = function.__code__
        names: dict[str, Any] = {"__builtins__": __builtins__, "__name__": function.__module__}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        defaults = function.__defaults__
        done = FunctionType(code, names, function.__name__, defaults, cells)
        done.__kwdefaults__ = function.__kwdefaults__
        done.__module__, done.__qualname__ = function.__module__, function.__qualname__
        self._functions[id(function)] = done  # before its globals, which may refer to it
        self.codes[id(code)] = code
        self._modules.add(function.__module__)
        for name in _names(code):
            if name in function.__globals__:
                names[name] = self.value(function.__globals__[name])
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.value(original.cell_contents)
            except ValueError:  # a cell that is empty still
                continue
        return done

    def value(self, value: Any) -> Any:
        """What stands for `value`, a global or closure variable of a kernel."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, ModuleType):
            ours = value.__name__.split(".")[0] == "fa_numba"
            return _Module(value, self) if ours else value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, numba.types.Type):
            cast = CASTS.get(str(value))
            return value if cast is None else cast
        if type(value) is tuple:
            return tuple(self.value(v) for v in value)
        emulation = getattr(value, "emulation", None)
        if emulation is not None:
            return emulation
        inner = getattr(value, "py_func", None)
        if inner is not None:
            return self.function(inner)
        return self.function(value) if self._is_ours(value) else value

    def _is_ours(self, value: Any) -> bool:
        if not isinstance(value, FunctionType):
            return False
        module = value.__module__ or ""
        ours = module.split(".")[0] == "fa_numba" and not module.startswith("fa_numba.emulator")
        return ours or module in self._modules


class _Module:
    """A module of ours that a kernel takes attributes of."""

    def __init__(self, module: ModuleType, rebinder: Rebinder) -> None:
        self._module, self._rebinder = module, rebinder

    def __getattr__(self, name: str) -> Any:
        value = self._rebinder.value(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def rebind(py_func: Callable[..., Any], namespace: Any) -> Callable[..., Any]:
    """A copy of `py_func` whose names lead to `namespace` instead of numba.cuda.

    Globals and closure variables are replaced, in it and in the functions it calls: numba.cuda and
    its parts by `namespace`; device functions (`.py_func`), functions of this package and of the
    kernel's module by rebound copies; intrinsics (`.emulation`) by their emulation; numba types by
    casts; `math` by one that follows the GPU in giving inf and nan where Python raises.
    """
    return Rebinder(namespace).function(getattr(py_func, "py_func", py_func))
