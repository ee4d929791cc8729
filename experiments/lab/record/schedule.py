"""What `experiments all` measures on a GPU: what changed since its recording, in a few minutes."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import recorder
from .provenance import of_rows
from .store import EMULATOR, MODEL, Store

# Six minutes in all: what is measured ends after five, the rest is for drawing.
SECONDS, ALL_MINUTES = 300.0, 6


class OutOfTime(BaseException):
    """The time for measuring is spent. As an interruption it is no Exception."""


@dataclass(frozen=True)
class Due:
    """An experiment to be measured, why, the date of its recording or "", how long that took, if
    known, and how long it has been measured without coming to its end.
    """

    name: str
    why: str
    since: str = ""
    seconds: float | None = None
    spent: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.why}, {duration(self.seconds)})"


def duration(seconds: float | None) -> str:
    """Seconds in words: "unknown", "40 s", "4 min 10 s"."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def due(name: str, store: Store, machine: str, of: dict[str, Any], begun: Path) -> Due | None:
    """Why the experiment is measured on this machine; None where its recording is of the same
    sources. `of` describes a run of now, `begun` has the rows of one that did not end.
    """
    rows = store.read(name, machine)
    runs = of_rows(store.runs(name, machine), rows)
    spent = recorder.spent(begun, of)
    if spent is None and runs and all(run.get("sources") == of["sources"] for run in runs):
        return None
    counted = [run for other in (EMULATOR, MODEL) for run in store.runs(name, other)]
    took = [run["seconds"] for run in runs or counted[:1] if "seconds" in run]
    seconds = sum(took) if took else None
    since = max((run.get("date") or "" for run in runs), default="")
    if spent is None:
        return Due(name, "its sources changed" if runs else "not recorded here", since, seconds)
    left = None if seconds is None else max(0.0, seconds - spent)
    return Due(name, f"{duration(spent)} of it done", since, left, spent)


def in_order(every: Sequence[Due]) -> list[Due]:
    """Those that no time was spent on first, so that none keeps the others from their turn; then
    the most out of date: never recorded, then by date; of these the shortest.
    """
    unknown = float("inf")
    return sorted(
        every, key=lambda d: (d.spent, d.since, unknown if d.seconds is None else d.seconds)
    )


def said(every: Sequence[Due], same: Sequence[str], limit: float | None) -> Iterator[str]:
    if same:
        yield f"as recorded, from the same sources: {', '.join(same)}"
    if not every:
        yield "nothing to measure"
        return
    known = [each.seconds for each in every if each.seconds is not None]
    parts = [duration(sum(known))] if known else []
    parts += [f"{len(every) - len(known)} of unknown length"] if len(known) < len(every) else []
    yield f"to measure, {' and '.join(parts)}: {', '.join(map(str, every))}"
    if limit is not None:
        yield (
            f"measuring ends after {duration(limit)}, the command after {ALL_MINUTES} min; what is "
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
