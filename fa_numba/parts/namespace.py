"""The device functions of a kernel under one name: ``p = parts(spec)``, then ``p.scores(...)``."""

from types import ModuleType
from typing import NamedTuple

from fa_numba.options import Features


class RowFacts(NamedTuple):
    """The ``spec`` of a kernel that goes by rows, not by tiles."""

    features: Features
    head_dim: int = 0
    dtype: str = "float32"
    aligned: bool = True


class Parts(ModuleType):
    """``p.NAME`` is ``make_NAME(spec)`` of the first of these modules that has it.

    Numba reads attributes of a module while it compiles, and of nothing else that is as short: the
    calls compile to what calls of closure variables do. Integers that shape arrays lose that they
    are constants here, so kernels close over those themselves.
    """

    def __init__(self, spec, modules):
        super().__init__("fa_numba.parts.namespace")
        self._spec, self._modules = spec, modules

    def __getattr__(self, name):
        for module in self._modules:
            make = getattr(module, f"make_{name}", None)
            if make is not None:
                part = make(self._spec)
                setattr(self, name, part)
                return part
        places = ", ".join(module.__name__ for module in self._modules)
        raise AttributeError(f"no make_{name} in {places}")
