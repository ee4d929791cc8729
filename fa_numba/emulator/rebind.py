"""Replaces the names of numba.cuda in a kernel's function by the emulator's names."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator
from functools import partial, reduce
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np

from . import lanes
from .flow import Split
from .local_memory import LocalArray
from .namespace import CASTS, MATH, NUMPY_CASTS, Missing
from .rewrite import rewritten
from .simulator import cuda
from .syntax import PREFIX

_BUILTINS: dict[str, Any] = vars(builtins) | {
    "min": lanes.minimum,
    "max": lanes.maximum,
    "int": lanes.to_int,
    "float": lanes.to_float,
    "bool": lanes.to_bool,
    "complex": lanes.to_complex,
    "round": lanes.to_round,
}


# Code of functions whose lanes have disagreed on a return, break or continue (exits.py).
diverging: set[CodeType] = set()

_PLAIN = frozenset((int, float, bool, str, type(None)))  # classes whose values stay as they are


def _multiply_add(target: Any, *terms: Any) -> None:
    """Compute target[index] += a * b for the triples (index, a, b) in `terms`."""
    if target.__class__ is LocalArray:
        target.multiply_add(terms)
        return
    for n in range(0, len(terms), 3):
        target[terms[n]] = lanes.fma(terms[n + 1], terms[n + 2], target[terms[n]])


def _replacements(original: Any, emulated: Any) -> Iterator[tuple[Any, str]]:
    """Yield the objects of a module that the emulator replaces, as pairs (object, name).

    `original` is a module such as `numba.cuda`, and `emulated` is the emulator's version of it. A
    kernel's file may give an object another name by ``from ... import ... as ...``. The emulator
    therefore finds the objects in a kernel by identity, not by name.
    """
    for name in dir(emulated):
        if name in original.__dict__ and not name.startswith("_") and name != "laneid":
            yield original.__dict__[name], name


_REPLACED: dict[int, Any] = NUMPY_CASTS | {id(math): MATH}
_REPLACED |= {id(value): getattr(MATH, name) for value, name in _replacements(math, MATH)}


# Objects of numba.cuda that the emulator replaces, by id: the object, and its path in `cuda`, such
# as ("atomic", "add").
_in_cuda: dict[int, tuple[Any, tuple[str, ...]]] = {}


def _note_names(namespace: Any) -> None:
    """Fill the table `_in_cuda` of the objects of `numba.cuda` that the emulator replaces.

    `namespace` is the emulator's `cuda` of any launch.
    """
    for value, name in _replacements(cuda, namespace):
        _in_cuda[id(value)] = value, (name,)
    for name in ("shared", "local", "const", "atomic", "cg"):  # for `cuda.atomic.add`
        part = getattr(namespace, name)
        for function in dir(part):
            original = getattr(getattr(cuda, name), function, None)
            if not function.startswith("_") and original is not None:
                _in_cuda[id(original)] = original, (name, function)
    _in_cuda[id(cuda)] = cuda, ()


class Rebinder:
    """Rewrites a kernel and all functions that it calls, and replaces their global values.

    The statements of the functions are rewritten by rewrite.py. The values of their globals and
    closure variables are replaced:

        value                                          replacement
        numba.cuda and its parts                       the launch's `cuda`
        device functions                               rewritten copies
        functions of this package or of the module     rewritten copies
        that contains the kernel
        intrinsics                                     the Python function in `emulation`
        numba types                                    casts
        math                                           a version that returns inf and NaN where
                                                       Python raises an error

    `codes` maps the id of a rewritten function's code object to the code object. `originals` maps
    the same id to the code object before rewriting.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        # The dictionaries of the launch itself: they also get functions that are rewritten later,
        # when the running kernel reads them from a module.
        self.codes: dict[int, CodeType] = context._codes
        self.originals: dict[int, CodeType] = context.originals
        self._modules: set[str] = set()
        self._functions: dict[int, FunctionType] = {}
        if not _in_cuda:
            _note_names(context._cuda)
        # Replaced values of this launch, by id: the value, and its replacement.
        self._known: dict[int, tuple[Any, Any]] = {}
        names = {
            "C": context, "Split": Split, "array": np.ndarray, "LocalArray": LocalArray,
            "undefined": lanes.undefined, "merge": lanes.merge, "where": lanes.where,
            "both": lanes.both, "any": lanes.any_, "negation": lanes.negation,
            "number": lanes.number,
            "from_end": lanes.FromEnd,
            "divide": lanes.divide,
            "floor_divide": partial(lanes.floor_divide, context),
            "modulo": partial(lanes.modulo, context),
            "multiply_add": _multiply_add, "double": np.float64,
        }  # fmt: skip
        self._builtins = _BUILTINS | {PREFIX + name: value for name, value in names.items()}
        self._builtins |= {"range": context.range, "print": context.show}

    def function(self, function: Any) -> Any:
        """Return a function rewritten, with its globals and closure variables replaced."""
        done = self._functions.get(id(function))
        if done is not None:
            return done
        code, taken = rewritten(function.__code__, function.__code__ in diverging)
        names: dict[str, Any] = {"__builtins__": self._builtins, "__name__": function.__module__}
        done = FunctionType(code, names, function.__name__, function.__defaults__)
        done.__kwdefaults__ = function.__kwdefaults__
        done.__module__, done.__qualname__ = function.__module__, function.__qualname__
        self._functions[id(function)] = done  # before its globals, which may refer to it
        self.codes[id(code)] = code
        self.originals[id(code)] = function.__code__
        self._modules.add(function.__module__)
        outside = function.__globals__
        for name in taken:
            if name in outside:
                value = outside[name]
                names[name] = value if value.__class__ is int else self.value(value, name)
        free = function.__code__.co_freevars
        for name, cell in zip(free, function.__closure__ or (), strict=True):
            try:
                names[name] = self.value(cell.cell_contents, name)
            except ValueError:  # a cell that has no value yet
                continue
        return done

    def release(self) -> None:
        """Forget all values, so that the functions and the launch no longer refer to each other."""
        for function in self._functions.values():
            function.__globals__.clear()
        self._known.clear()

    def value(self, value: Any, name: str = "") -> Any:
        """Return the replacement of `value`, a global or closure variable `name` of a kernel."""
        if value.__class__ in _PLAIN:
            return np.float64(value) if value.__class__ is float else value
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        found = self._replaced(value, name)
        if found is not value and not isinstance(value, (tuple, np.ndarray, np.generic)):
            self._known[id(value)] = value, found
        return found

    def _replaced(self, value: Any, name: str) -> Any:
        """Return the replacement of a global or closure variable that is not in the cache yet.

        `value` is the variable's value, and `name` its name. The method `value` has already handled
        the classes in `_PLAIN`.
        """
        if id(value) in _REPLACED:
            return _REPLACED[id(value)]
        if id(value) in _in_cuda:
            return reduce(getattr, _in_cuda[id(value)][1], self._context._cuda)
        if isinstance(value, ModuleType):
            if value == cuda:
                return self._context._cuda
            return _Module(value, self)
        if isinstance(value, np.generic):
            return value if isinstance(value, np.inexact) else value.item()
        if isinstance(value, np.ndarray):
            return self._context.constant(value, name)
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
        home = str(getattr(value, "__module__", "")).split(".")
        of_numpy = home[0] == "numpy" and not isinstance(value, (np.ufunc, type))
        if home[:2] == ["numba", "cuda"] or (of_numpy and callable(value)):
            return Missing(self._context, f"{'.'.join(home)}.{getattr(value, '__name__', name)}")
        return self.function(value) if self._is_ours(value) else value

    def _is_ours(self, value: Any) -> bool:
        """Return whether a value is a Python function that must be rewritten.

        Functions of this package and of the module that contains a kernel are rewritten. Functions
        of the emulator are not.
        """
        if not isinstance(value, FunctionType):
            return False
        module = value.__module__ or ""
        ours = module.split(".")[0] == "fa_numba" and not module.startswith("fa_numba.emulator")
        return ours or module in self._modules


class _Module:
    """A module from which a kernel reads attributes, such as a module of device functions.

    Each attribute is replaced when the kernel first reads it.
    """

    def __init__(self, module: ModuleType, rebinder: Rebinder) -> None:
        self._module, self._rebinder = module, rebinder

    def __getattr__(self, name: str) -> Any:
        value = self._rebinder.value(getattr(self._module, name), name)
        setattr(self, name, value)
        return value
