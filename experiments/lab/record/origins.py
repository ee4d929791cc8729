"""Recordings of a commit that this history has not, or of a tree that may have differed."""

import subprocess
from collections.abc import Collection, Iterator

from . import registry
from .options import REPOSITORY
from .store import Store


def history() -> set[str]:
    """The commits that HEAD comes from. Raises OSError or CalledProcessError without git."""
    command = ("git", "rev-list", "HEAD")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def unknown(store: Store, known: Collection[str]) -> Iterator[tuple[str, bool]]:
    """(what is not known of which recording, whether its commit is none of those `known`)."""
    for name in (*registry.names(), "tune"):
        for machine in store.machines(name):
            for run in store.runs(name, machine):
                commit = run.get("commit") or ""
                place = f"{name}/{machine}.csv, {commit[:7] or 'no commit'}"
                if not any(each.startswith(commit) for each in known if commit):
                    yield f"{place}: in no history", True
                elif run.get("dirty") is None:
                    yield f"{place}: whether the tree was dirty is not known", False
