"""The experiments that there are, and what a module must have to be one."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import experiments

from ..show import thumbs
from ..show.tables import Across, Make
from .options import CHOICES, Bench, Options
from .store import Row


class Experiment(Protocol):
    """What a module of `experiments` must have; it is found by its file alone.

    The first paragraph of its docstring is its title, the second what the command `list` says of
    it. A module may have more:

    `table(rows)`   its table, a `tables.Table`, on the page under the experiment's name
    `animate(rows, note)`   its figure as an animated GIF, bytes; the note says where rows are from
    `page(rows, note)`   its figure as a page, HTML; the note as above
    FIGURES         further figures: name of the file -> function of the rows, as `draw`
    TABLES          further tables: name -> function of the rows
    NEEDS           ("GPU",) or ("GPU", "torch"), without which nothing is measured
    TAKES           which of `options.CHOICES` it takes; all but tiles without it
    PROTOCOL        a sentence on how it measures, kept with its rows
    """

    def measure(self, options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
        """The rows as they are measured, each stored at once; rows of one whole as one sequence."""

    def draw(self, rows: Sequence[Row]) -> Any:
        """A matplotlib figure of stored rows, measured now or before; None without rows to draw."""


def names() -> list[str]:
    found = pkgutil.iter_modules(experiments.__path__)
    return sorted(m.name for m in found if not m.ispkg and not m.name.startswith("_"))


def shared_tables() -> dict[str, Across]:
    """Tables of several experiments' rows, by name: what the packages' functions `tables` give."""
    found: dict[str, Across] = {}
    for each in pkgutil.iter_modules(experiments.__path__):
        if each.ispkg:
            package = importlib.import_module(f"experiments.{each.name}")
            found |= getattr(package, "tables", dict)()
    return found


def load(name: str) -> Experiment:
    return cast(Experiment, importlib.import_module(f"experiments.{name}"))


def words(experiment: Experiment) -> tuple[str, str]:
    title, about, *_ = [*(experiment.__doc__ or "").split("\n\n"), ""]
    return " ".join(title.split()).rstrip("."), " ".join(about.split())


def needs(experiment: Experiment) -> Sequence[str]:
    return tuple(getattr(experiment, "NEEDS", ()))


def figures(experiment: Experiment) -> Mapping[str, Callable[[Sequence[Row]], Any]]:
    """The experiment's figures beside the one under its own name, a small one for README too."""
    name = getattr(experiment, "__name__", "").rpartition(".")[2]
    return {**getattr(experiment, "FIGURES", {}), **thumbs.figures(name)}


def takes(experiment: Experiment) -> set[str]:
    """The choices of the command line that it takes."""
    return set(getattr(experiment, "TAKES", set(CHOICES) - {"tiles"}))


def tables(name: str) -> Mapping[str, Make]:
    """The experiment's tables by the names that the page has for them."""
    module = load(name)
    own = {name: module.table} if hasattr(module, "table") else {}
    return own | getattr(module, "TABLES", {})
