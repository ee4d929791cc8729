"""Writes the page that says for each recording whether its kernels and its code have changed."""

from collections.abc import Iterable
from pathlib import Path

from ..record import EMULATOR, Store, outdated
from ..record.provenance import dates_and_commits, device_name
from .report import TABLES
from .tables import MISSING, markdown

PAGE = TABLES / "recordings.md"
HEAD = """\
# Recordings, and what has changed since

Each figure and each table is made from recordings, which are in the folder [data](../data). A
recording names the commit that was measured. The column *state* says whether a run today would use
the kernels and the code of the recording:

| state | meaning |
| --- | --- |
| current | the kernels that the run launched and the code of the experiment are unchanged |
| outdated | a kernel or the code of the experiment has changed; the last column says which |
| unknown | the run is so old that the recording does not name its kernels |

The command `python -m experiments outdated --write` writes this page. Closed forms are left out,
because every run computes them again.

"""


def text(found: Iterable[outdated.State], store: Store) -> str:
    """Return the text of the page.

    Parameters
    ----------
    found : iterable of State
        The states of the recordings.
    store : Store
        The recordings.

    Returns
    -------
    str
        The page, with one line for each recording.
    """
    lines = []
    for each in found:
        name = f"`{each.experiment}/{each.machine}.csv`"
        why = ", ".join(each.why) or MISSING
        lines.append([name, *origin(store, each.experiment, each.machine), each.state, why])
    header = ["recording", "where", "date and commit", "state", "changed since"]
    return HEAD + markdown(header, lines).replace("---:", "---")


def origin(store: Store, experiment: str, machine: str) -> tuple[str, str]:
    """Return the GPU or the emulator of a recording, and the date and the commit.

    Parameters
    ----------
    store : Store
        The recordings.
    experiment, machine : str
        Names of the experiment and of the machine.

    Returns
    -------
    tuple of str
        Two texts.
    """
    runs = store.recorded(experiment, machine)[1]
    where = "emulator" if machine == EMULATOR else device_name(runs, machine)
    return where, dates_and_commits(runs)


def write(found: Iterable[outdated.State], store: Store, path: Path | None = None) -> None:
    """Write the page.

    Parameters
    ----------
    found : iterable of State
        The states of the recordings.
    store : Store
        The recordings.
    path : Path, optional
        The file. Default: PAGE.
    """
    (path or PAGE).write_text(text(found, store), "utf-8")
