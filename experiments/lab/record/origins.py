"""Finds recordings whose commit is not in this history, or whose working tree may have differed."""

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
    """Find recordings whose origin is not known.

    Parameters
    ----------
    store : Store
        The recordings.
    known : collection of str
        Full hashes of known commits.

    Yields
    ------
    what : str
        The recording, and what is not known of it.
    lost : bool
        Whether its commit is none of the known commits.
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
