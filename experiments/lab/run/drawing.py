"""Draws several figures at the same time, each in a process of its own."""

import io
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console

from ..record import Options
from .runner import Report, Runner

# A forked process need not import matplotlib and the experiments again.
START = "fork"


def side_by_side(runner: Any, names: Sequence[str]) -> None:
    """Draw the named figures at the same time, in up to as many processes as there are cores.

    This process draws the figures itself, one after the other, in three cases: the machine has a
    GPU, there is only one figure or one core, or the operating system cannot fork processes.

    Parameters
    ----------
    runner : Runner
        The `Runner` of the command. Its reports are updated.
    names : sequence of str
        Names of experiments.
    """
    count, starts = min(len(names), os.cpu_count() or 1), multiprocessing.get_all_start_methods()
    if count < 2 or runner.machine is not None or START not in starts:
        for name in names:
            runner.draw(name)
        return
    with suppress(ModuleNotFoundError):  # drawing a figure prints this error
        from matplotlib import figure, ticker  # noqa: F401  here once instead of in every process
    look = {"width": runner.console.width, "force_terminal": runner.console.is_terminal}
    context, quiet = multiprocessing.get_context(START), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(count, context, signal.signal, quiet) as pool:
        drawn = pool.map(partial(_draw, runner.options, look), names)
        for name, (report, said) in zip(names, drawn, strict=True):
            runner.console.out(said, end="", highlight=False)
            mine = runner.reports.setdefault(name, Report())
            mine.drawn_from, mine.error = report.drawn_from, report.error or mine.error


def _draw(options: Options, look: dict[str, Any], name: str) -> tuple[Report, str]:
    """Draw the figures of the experiment `name` in this process.

    Return the report and the text that was printed. `look` are options of the `Console` object,
    such as its width.
    """
    said = io.StringIO()
    runner = Runner(options, [], Console(file=said, **look))
    runner.draw(name)
    return runner.reports[name], said.getvalue()
