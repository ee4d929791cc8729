"""The experiments that there are, and what a module must have to be one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import experiments

from .options import Bench, Options
from .store import Row
from .tables import Make


class Experiment(Protocol):
    """A module of `experiments`, which is found by its file alone.

    It may also have `NEEDS_TORCH` (bool), `SWEPT` (columns that it varies, see `store.Recorder`),
    `PROTOCOL` (how it measures, kept with its rows), `table` (its table in paper_repro.md, under
    the experiment's name) and `TABLES` (further ones, by name).
    """

    TITLE: str
    DESCRIPTION: str
    NEEDS_GPU: bool

    def measure(self, options: Options, bench: Bench) -> Iterator[Row]:
        """The rows, as they are measured."""

    def draw(self, rows: Sequence[Row]) -> Any:
        """A matplotlib figure of stored rows, None where they hold nothing to draw."""


def names() -> list[str]:
    """Every experiment, by its module's name."""
    found = pkgutil.iter_modules(experiments.__path__)
    return sorted(m.name for m in found if not m.ispkg and not m.name.startswith("_"))


def load(name: str) -> Experiment:
    return cast(Experiment, importlib.import_module(f"experiments.{name}"))


def needs_torch(experiment: Experiment) -> bool:
    return bool(getattr(experiment, "NEEDS_TORCH", False))


def swept(experiment: Experiment) -> Sequence[str]:
    return tuple(getattr(experiment, "SWEPT", ()))


def protocol(name: str, experiment: Experiment) -> dict[str, str]:
    """What the experiment says of how it measures, under its name."""
    own = getattr(experiment, "PROTOCOL", "")
    return {name: own} if own else {}


def tables(name: str) -> Mapping[str, Make]:
    """The experiment's tables by the names that the page has for them."""
    module = load(name)
    own = {name: module.table} if hasattr(module, "table") else {}
    return own | getattr(module, "TABLES", {})
