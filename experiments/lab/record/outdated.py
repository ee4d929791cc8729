"""Finds recordings that a run today might not reproduce, by digests of code and kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

from . import kept, ran, registry
from .store import EMULATOR, MODEL, Store

CURRENT, OUTDATED, UNKNOWN = "current", "outdated", "unknown"
OLD = "recorded before runs named their kernels"
OTHER_ROWS = "the rows are not those that were counted"


@dataclass(frozen=True)
class State:
    """Whether a recording still belongs to today's code and kernels.

    Parameters
    ----------
    experiment, machine : str
        Names of the experiment and of the machine of the recording.
    state : str
        "current" (code and kernels are unchanged), "outdated" (something changed) or "unknown".
    why : tuple of str, default ()
        The kernels and the code that changed, or the reason why the state is not known.
    """

    experiment: str
    machine: str
    state: str
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f": {', '.join(self.why)}" if self.why else ""
        return f"{self.experiment}/{self.machine}.csv: {self.state}{why}"


def state(store: Store, experiment: str, machine: str) -> State:
    """Return whether one recording is current, outdated or unknown, and why.

    The recorded digests of code and kernels are compared with today's. No GPU is needed. Raise
    StoreError if a file is damaged.
    """
    where = experiment, machine
    if machine == EMULATOR:
        entry = store.provenance(*where).get(kept.ENTRY)
        runs = [entry if isinstance(entry, dict) else {}]
    else:
        runs = store.runs(*where)
    made = [run.get("ran") for run in runs]
    found = [ran.changed(each, *where) for each in made]
    why = dict.fromkeys(text for each in found for text in each or ())
    counted = machine == EMULATOR and made[0]
    if counted and runs[0].get("rows") != kept.digest(store.read(*where)):
        why[OTHER_ROWS] = None
    if why:
        return State(*where, OUTDATED, tuple(why))
    if not found or None in found:
        return State(*where, UNKNOWN, (OLD,))
    return State(*where, CURRENT)


def states(store: Store) -> Iterator[State]:
    """Yield the state of every recording, except those of closed forms.

    Every run computes closed forms again.
    """
    for name in (*registry.names(), "tune"):
        for machine in store.machines(name):
            if machine != MODEL:
                yield state(store, name, machine)
