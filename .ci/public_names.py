"""The public names whose docstrings the documentation shows and `make lint` validates."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
# Maps a module to its title in the API reference.
MODULES = {
    "fa_numba": "Attention, plans and counts",
    "fa_numba.torch": "Gradients by torch, and several GPUs",
    "fa_numba.io_model": "The access model",
    "fa_numba.algorithms": "The papers' algorithms in NumPy",
    "fa_numba.reference": "The float64 reference",
    "fa_numba.emulator": "The emulator",
    "fa_numba.bounds": "GPUs and what limits a plan",
    "experiments": "Experiments: recorded numbers",
    "experiments.lab.record": "Experiments: rows and recordings",
    "experiments.lab.measure.series": "Experiments: series and calls",
    "experiments.lab.measure.timing": "Experiments: timing",
    "experiments.lab.measure.workloads": "Experiments: problems and inputs",
    "experiments.lab.show.style": "Experiments: style of figures",
    "experiments.lab.show.tables": "Experiments: tables",
}


def load(name: str) -> ModuleType:
    """Return a module. For fa_numba.torch, a stand-in replaces torch if torch is missing."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    missing = "torch" not in sys.modules and importlib.util.find_spec("torch") is None
    if name == "fa_numba.torch" and missing:
        torch = mock.MagicMock(__spec__=None)
        torch.autograd.Function = type("Function", (), {})
        sys.modules |= {"torch": torch, "torch.distributed": torch.distributed}
    return importlib.import_module(name)


def names(module: ModuleType) -> Iterator[str]:
    """Yield the names of the public functions and classes of a module of `MODULES`.

    The names of a package are the names in its ``__all__``. If it has no ``__all__``, they are the
    names that the package imports from its own modules.
    """
    listed = getattr(module, "__all__", None)
    for name in sorted(listed if listed is not None else vars(module), key=str.lower):
        value = getattr(module, name)
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        home = value.__module__
        if listed is not None or home == module.__name__ or home.startswith(f"{module.__name__}."):
            yield name


def members(cls: type) -> Iterator[str]:
    """Yield the names of a class's own public methods and properties that have a docstring."""
    for name, value in vars(cls).items():
        written = inspect.isfunction(value) or isinstance(value, (property, classmethod))
        if not name.startswith("_") and (written or hasattr(value, "func")) and value.__doc__:
            yield name


def value_of(module: str, name: str) -> object:
    """Return the function, class or member with a dotted name of a module."""
    value: object = load(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def everything() -> Iterator[tuple[str, str]]:
    """Yield (module, name of a function, class or member) for all public names."""
    for title in MODULES:
        module = load(title)
        for name in names(module):
            yield title, name
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from ((title, f"{name}.{member}") for member in members(value))
