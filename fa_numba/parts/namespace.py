"""Parts, the device functions that kernels share, and how a kernel names those of a module."""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, overload

from fa_numba.device import device_function
from fa_numba.device.function import DeviceFunction
from fa_numba.options import Features


def part(factory: Callable[..., Any]) -> Any:
    """A factory of one device function, made once for the same facts: what it returns is inlined in
    kernels.
    """

    @cache
    @wraps(factory)
    def make(*facts: Any, **named: Any) -> Any:
        made = factory(*facts, **named)
        return device_function(made) if isinstance(made, FunctionType) else made

    return make


class RowFacts(NamedTuple):
    """The ``spec`` of a kernel that goes by rows, not by tiles."""

    features: Features
    head_dim: int = 0
    dtype: str = "float32"
    aligned: bool = True


class Parts(ModuleType):
    """``load.q`` is ``make_q(spec)`` of the module that ``load`` was bound to, or ``q`` of it.

    Numba reads attributes of a module while it compiles, and of nothing else that is as short: the
    calls compile to what calls of closure variables do. Integers that shape arrays lose that they
    are constants here, so kernels close over those themselves.
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
    """Return whether a factory can be called with nothing but a ``spec``."""
    required = [p for p in signature(make).parameters.values() if p.default is p.empty]
    return len(required) == 1


@cache
def _bound(spec: Any, module: ModuleType) -> Parts:
    return Parts(spec, module)


_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")


# Editors and mypy see the classes of the packages' ``__init__.pyi`` in place of modules, where each
# part has the name that it has in kernels (.ci/part_names.py): what goes in comes out.
@overload
def bind(spec: Any, one: _A, /) -> tuple[_A]: ...
@overload
def bind(spec: Any, one: _A, two: _B, /) -> tuple[_A, _B]: ...
@overload
def bind(spec: Any, one: _A, two: _B, three: _C, /) -> tuple[_A, _B, _C]: ...
def bind(spec: Any, *modules: Any) -> tuple[Any, ...]:
    """The parts of each of ``modules`` for ``spec``, an idea each: ``load, scores = bind(spec,
    simt.load, simt.scores)``, then ``load.q(...)``.
    """
    return tuple(_bound(spec, module) for module in modules)
