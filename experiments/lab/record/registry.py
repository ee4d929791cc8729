"""The list of experiments, and the functions and constants that a module of an experiment has."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from .code_digest import PACKAGE
from .options import CHOICES, Bench, Options
from .store import Row


class Experiment(Protocol):
    """What a module of `experiments` must contain. The command line finds the module by its file.

    The first paragraph of the module's docstring is its title, a sentence of at most 15 words. The
    command `list` prints the title, and `list NAME` the complete docstring. Besides `measure` and
    `draw`, a module may have:

        table(rows)          makes the table, a `tables.Table`, for the page of the experiment
        animate(rows, note)  makes the figure as an animated GIF, in bytes; `note` says the origin
        page(rows, note)     makes the figure as an HTML page, a str; `note` says the origin
        FIGURES              further figures: {name of the file: function of the rows, like `draw`}
        TABLES               further tables: {name: function of the rows, like `table`}
        NEEDS                ("GPU",) or ("GPU", "torch"): requirements for measuring
        TAKES                the options that `measure` supports, among the names in
                             `options.LIMITED`. Default: all but "tiles" and "seconds"
        PROTOCOL             a sentence on how the experiment measures, stored with the rows
        sweep_of(row)        name of the sweep that a row belongs to, if the experiment has several
        peer_calls(options)  yields groups of calls of other libraries that compile for seconds.
                             Several processes run the groups before `measure`. A group is a list
                             of (series, pass, Problem)
        make(series, pass_, problem, arrays)
                             returns a function that runs such a call. Default: `calls.make`
        ALSO_DRAWN           other experiments whose rows the figures contain, for the footnote
    """

    def measure(self, options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
        """Measure and yield rows. Each row is recorded as soon as it is yielded.

        Parameters
        ----------
        options : Options
            What the user chose.
        bench : Bench
            Where the experiment runs.

        Yields
        ------
        Row or sequence of Row
            One number, or several numbers that only make sense together. The latter are stored
            together.
        """

    def draw(self, rows: Sequence[Row]) -> Any:
        """Draw the figure from stored rows. The rows may be from this run or from an earlier run.

        Parameters
        ----------
        rows : sequence of Row
            The rows of this experiment.

        Returns
        -------
        matplotlib figure or None
            The figure. None if there are no rows to draw.
        """


def names() -> list[str]:
    """Return the names of all experiments, sorted.

    Returns
    -------
    list of str
        Names of modules.
    """
    return sorted(m.name for m in _found() if not m.ispkg and not m.name.startswith("_"))


def packages() -> list[ModuleType]:
    """Import the packages in the folder of the experiments, such as `verdicts`.

    Returns
    -------
    list of module
        The packages, sorted by name.
    """
    return [importlib.import_module(f"{PACKAGE}.{m.name}") for m in _found() if m.ispkg]


def _found() -> Iterator[pkgutil.ModuleInfo]:
    """Yield the modules and packages in the folder of the package `experiments`."""
    return pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__)


def load(name: str) -> Experiment:
    """Import the module of an experiment.

    Parameters
    ----------
    name : str
        Name of the module.

    Returns
    -------
    Experiment
        The module.
    """
    return cast(Experiment, importlib.import_module(f"{PACKAGE}.{name}"))


def words(experiment: Experiment) -> tuple[str, str]:
    """Return the first two paragraphs of an experiment's docstring.

    Parameters
    ----------
    experiment : Experiment
        The module.

    Returns
    -------
    title : str
        First paragraph of the docstring, in one line, without the last full stop.
    about : str
        Second paragraph, in one line. It may be empty.
    """
    title, about, *_ = [*(experiment.__doc__ or "").split("\n\n"), ""]
    return " ".join(title.split()).rstrip("."), " ".join(about.split())


def needs(experiment: Experiment) -> Sequence[str]:
    """Return the requirements of an experiment for measuring: some of "GPU" and "torch".

    Parameters
    ----------
    experiment : Experiment
        The module.

    Returns
    -------
    sequence of str
        The names. Empty if the experiment runs on any machine.
    """
    return tuple(getattr(experiment, "NEEDS", ()))


def sweeps(experiment: Experiment) -> Callable[[Row], str]:
    """Return the function that returns the name of the sweep to which a row belongs.

    Parameters
    ----------
    experiment : Experiment
        The module.

    Returns
    -------
    callable
        The experiment's function `sweep_of`. If there is no such function, the name of the sweep is
        the name of the experiment.
    """
    name = getattr(experiment, "__name__", "").rpartition(".")[2]
    own: Callable[[Row], str] | None = getattr(experiment, "sweep_of", None)
    return own or (lambda _: name)


def takes(experiment: Experiment) -> set[str]:
    """Return the options of the command line that an experiment takes.

    Parameters
    ----------
    experiment : Experiment
        The module.

    Returns
    -------
    set of str
        Some of the names in `options.LIMITED`.
    """
    return set(getattr(experiment, "TAKES", set(CHOICES) - {"tiles"}))
