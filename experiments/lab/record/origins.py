"""Finds recordings whose commit is unknown, or whose code may have differed from their commit."""

import subprocess
from collections.abc import Collection, Iterator

from . import registry
from .options import REPOSITORY
from .store import Store


def history() -> set[str]:
    """Return the commits in the history of HEAD.

    Returns
    -------
    set of str
        Full hashes.

    Raises
    ------
    OSError, CalledProcessError
        If git is missing or fails.
    """
    command = ("git", "rev-list", "HEAD")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def unknown(store: Store, known: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield the runs of recordings whose origin is not completely known.

    Parameters
    ----------
    store : Store
        The recordings.
    known : collection of str
        Full hashes of known commits.

    Yields
    ------
    what : str
        Text that names the recording and the commit, and says what is not known.
    lost : bool
        True if the run's commit is not among the known commits. False if the commit is known, but
        uncommitted changes may have existed.
    """
    for name in (*registry.names(), "tune"):
        for machine in store.machines(name):
            for run in store.runs(name, machine):
                commit = run.get("commit") or ""
                place = f"{name}/{machine}.csv, {commit[:7] or 'no commit'}"
                if not any(each.startswith(commit) for each in known if commit):
                    yield f"{place}: the commit is not in the git history", True
                elif run.get("dirty") is None:
                    yield f"{place}: uncommitted changes may have existed", False
