"""Parts are the device functions that kernels share. This module makes them available to kernels.

A kernel writes ``load.q(...)``. The name ``load`` is bound to a module of parts and to a spec, and
``load.q`` is the result of ``make_q(spec)`` in that module.
"""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, overload

from fa_numba.device import device_function
from fa_numba.device.function import DeviceFunction
from fa_numba.options import Features


def part(factory: Callable[..., Any]) -> Any:
    """Decorate a factory of a device function.

    The factory runs only once for each set of arguments. The function that the factory returns
    becomes a device function, which Numba inlines in kernels.
    """

    @cache
    @wraps(factory)
    def make(*facts: Any, **named: Any) -> Any:
        made = factory(*facts, **named)
        return device_function(made) if isinstance(made, FunctionType) else made

    return make


class RowFacts(NamedTuple):
    """The spec of a kernel that works on single rows instead of tiles."""

    features: Features
    head_dim: int = 0
    dtype: str = "float32"
    aligned: bool = True


class Parts(ModuleType):
    """The parts of one module for one spec. ``load.q`` is the result of ``make_q(spec)``, or the
    device function ``q``.

    The class is a subclass of ``ModuleType``, because Numba reads attributes of modules while it
    compiles. ``load.q`` is therefore looked up during compilation, which costs no time on the GPU.

    Numba does not treat attributes of a module as compile-time constants. The shape of an array in
    a kernel must be such a constant. Kernels therefore use closure variables for these integers.
    """

    def __init__(self, spec: Any, module: ModuleType) -> None:
        super().__init__("fa_numba.parts.namespace")
        self._spec, self._module = spec, module

    def __getattr__(self, name: str) -> Any:
        make = getattr(self._module, f"make_{name}", None)
        if make is not None and takes_a_spec_alone(make):
            part = make(self._spec)
        else:
            part = getattr(self._module, name, None)
        if not isinstance(part, DeviceFunction):
            raise AttributeError(
                f"module {self._module.__name__} has no make_{name} and no device function {name}"
            )
        setattr(self, name, part)
        return part


@cache
def takes_a_spec_alone(make: Callable[..., Any]) -> bool:
    """Return whether a factory can be called with a ``spec`` as its only argument."""
    required = [p for p in signature(make).parameters.values() if p.default is p.empty]
    return len(required) == 1


@cache
def _bound(spec: Any, module: ModuleType) -> Parts:
    return Parts(spec, module)


_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")


# Editors and mypy see the classes of the packages' ``__init__.pyi`` in place of modules. In these
# classes, each part has the name that kernels use (.ci/part_names.py). For editors and mypy,
# ``bind`` therefore returns its arguments.
@overload
def bind(spec: Any, one: _A, /) -> tuple[_A]: ...
@overload
def bind(spec: Any, one: _A, two: _B, /) -> tuple[_A, _B]: ...
@overload
def bind(spec: Any, one: _A, two: _B, three: _C, /) -> tuple[_A, _B, _C]: ...
def bind(spec: Any, *modules: Any) -> tuple[Any, ...]:
    """Return the parts of each of ``modules`` for ``spec``, one ``Parts`` object per module.

    For example, after ``load, scores = bind(spec, simt.load, simt.scores)`` a kernel can call
    ``load.q(...)``.
    """
    return tuple(_bound(spec, module) for module in modules)
