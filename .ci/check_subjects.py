"""Check that commit subjects have at most 72 characters: python .ci/check_subjects.py

The script checks all commits after the commit that added this file, except merges. Some older
subjects are longer, and history is not rewritten. The script does not use a tag as the beginning,
because some clones contain no tags. Without git or without a repository, as in a source
distribution, the script checks nothing.

Prints one line for each subject that is too long and exits with 1 if there is one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ".ci/check_subjects.py"
MOST = 72


def too_long(root: Path = ROOT) -> list[str]:
    """Return one line for each subject that is too long."""
    # A repository that contains this folder as a part does not count.
    if not (root / ".git").exists():
        return []
    added = _git(root, "log", "--diff-filter=A", "--format=%H", "--", HERE).split()
    if not added:
        return []
    log = _git(root, "log", "--no-merges", "--format=%h %s", f"{added[-1]}..HEAD")
    found = []
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > MOST:
            found.append(
                f"{commit}: the subject must have at most {MOST} characters, got {len(subject)}: "
                f"{subject!r}; put the reason into the body (git commit --amend, git rebase -i)"
            )
    return found


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command; "" if it fails or git is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8"
        )
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def main() -> int:
    """Print the subjects that are too long; return the exit status."""
    found = too_long()
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
