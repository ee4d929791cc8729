"""What `experiments all` measures on a GPU: what changed since its recording, in a few minutes."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import recorder
from .provenance import of_rows
from .store import Store

# Six minutes in all: what is measured ends after five, the rest is for drawing.
SECONDS, ALL_MINUTES = 300.0, 6


class OutOfTime(BaseException):
    """The time for measuring is spent. As an interruption it is no Exception."""


@dataclass(frozen=True)
class Due:
    """An experiment to be measured, why, the date of its recording or "", and for how many seconds
    it has been measured without coming to its end.
    """

    name: str
    why: str
    since: str = ""
    spent: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def due(name: str, store: Store, machine: str, of: dict[str, Any], begun: Path) -> Due | None:
    """Why the experiment is measured on this machine; None where its recording is of the same
    sources. `of` describes a run of now, `begun` has the rows of one that did not end.
    """
    runs = of_rows(store.runs(name, machine), store.read(name, machine))
    since = max((run.get("date") or "" for run in runs), default="")
    spent = recorder.spent(begun, of)
    if spent is not None:
        return Due(name, f"begun, {spent:.0f} s so far", since, spent)
    if runs and all(run.get("sources") == of["sources"] for run in runs):
        return None
    return Due(name, "its sources changed" if runs else "not recorded here", since)


def in_order(every: Sequence[Due]) -> list[Due]:
    """Those that no time was spent on first, so that none keeps the others from their turn; then
    the most out of date: never recorded, then by date.
    """
    return sorted(every, key=lambda each: (each.spent, each.since))


def said(every: Sequence[Due], same: Sequence[str], limit: float | None) -> Iterator[str]:
    if same:
        yield f"as recorded, from the same sources: {', '.join(same)}"
    yield f"to measure: {', '.join(map(str, every)) or 'nothing'}"
    if every and limit is not None:
        yield (
            f"measuring ends after {limit:.0f} s, the command after {ALL_MINUTES} min; what is "
            "left is for the next time, --full has no limit"
        )


@contextlib.contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime in the block every ten seconds once they are spent; None is no limit."""
    if seconds is None or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
