"""Figures drawn by other processes."""

import io
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console

from .options import Options
from .runner import Report, Runner

# A child that is forked has matplotlib and the experiments already.
START = "fork"


def side_by_side(runner: Any, names: Sequence[str]) -> None:
    """Draw the named figures, a process a core; none beside a GPU's, or for one figure."""
    count, left = min(len(names), os.cpu_count() or 1), list(names)
    starts = multiprocessing.get_all_start_methods()
    if count > 1 and runner.machine is None and START in starts:
        with suppress(ModuleNotFoundError):  # which is said as a figure is drawn
            from matplotlib import figure, ticker  # noqa: F401  once, not in every process
        console = runner.console
        look = {"width": console.width, "force_terminal": console.is_terminal}
        context = multiprocessing.get_context(START)
        pool = ProcessPoolExecutor(count, context, _leave_interrupts_to_the_parent)
        with pool, suppress(BrokenProcessPool):  # one was killed, for want of memory
            for report, said in pool.map(partial(_draw, runner.options, look), names):
                console.out(said, end="", highlight=False)
                mine = runner.reports.setdefault(left.pop(0), Report())
                mine.drawn_from, mine.error = report.drawn_from, report.error or mine.error
    for name in left:
        runner.draw(name)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _draw(options: Options, look: dict[str, Any], name: str) -> tuple[Report, str]:
    """The figure's report and what was said, in a process of its own."""
    said = io.StringIO()
    runner = Runner(options, [], Console(file=said, **look))
    runner.draw(name)
    return runner.reports[name], said.getvalue()
