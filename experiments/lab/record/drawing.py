"""Figures drawn by other processes, while the next experiment is counted."""

import io
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

from .options import Options
from .runner import Report, Runner

# A child that is forked has matplotlib and the experiments already.
START = "fork"


class Drawing:
    """Draws each named figure once its data is stored: at once, or in a pool of processes, whose
    words `wait` prints; `missing` names those that were not drawn.
    """

    def __init__(self, runner: Any, pool: ProcessPoolExecutor | None) -> None:
        self._runner, self._pool = runner, pool
        self._running: dict[str, Future] = {}
        self.missing: list[str] = []

    def draw(self, name: str) -> None:
        if self._pool is not None:
            console = self._runner.console
            look = {"width": console.width, "force_terminal": console.is_terminal}
            with suppress(BrokenProcessPool):
                self._running[name] = self._pool.submit(_draw, self._runner.options, name, look)
                return
        self._take(name, self._runner.draw(name))

    def wait(self) -> None:
        for name, future in self._running.items():
            try:
                drawn, report, said = future.result()
            except BrokenProcessPool:  # killed, for want of memory for one
                self._take(name, self._runner.draw(name))
                continue
            self._runner.console.out(said, end="", highlight=False)
            mine = self._runner.reports.setdefault(name, Report())
            mine.drawn_from, mine.recorded = report.drawn_from, report.recorded
            mine.error = report.error or mine.error
            self._take(name, drawn)

    def _take(self, name: str, drawn: bool) -> None:
        self.missing += [] if drawn else [name]


@contextmanager
def side_by_side(runner: Any, names: Sequence[str]) -> Iterator[Drawing]:
    """A `Drawing` with a process a core, all drawn at the end; none beside a GPU or for one."""
    count = min(len(names), os.cpu_count() or 1)
    starts = multiprocessing.get_all_start_methods()
    if count == 1 or runner.machine is not None or START not in starts:
        yield Drawing(runner, None)
        return
    with suppress(ModuleNotFoundError):  # which is said as a figure is drawn
        from matplotlib import figure, ticker  # noqa: F401  once, not in every process
    context = multiprocessing.get_context(START)
    with ProcessPoolExecutor(count, context, _leave_interrupts_to_the_parent) as pool:
        drawing = Drawing(runner, pool)
        try:
            yield drawing
            drawing.wait()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _draw(options: Options, name: str, look: dict[str, Any]) -> tuple[bool, Report, str]:
    """Whether a figure was drawn, its report and what was said, in a process of its own."""
    said = io.StringIO()
    runner = Runner(options, [], Console(file=said, **look))
    drawn = runner.draw(name)
    return drawn, runner.reports[name], said.getvalue()
