"""The check of commit subjects, .ci/check_subjects.py."""

import importlib.util
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / ".ci" / "check_subjects.py"


def test_long_subjects_after_the_check_was_added_are_found(tmp_path):
    spec = importlib.util.spec_from_file_location("check_subjects", SOURCE)
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    file = tmp_path / check.HERE
    file.parent.mkdir()
    file.write_text("")
    assert check.too_long(tmp_path) == []  # no repository

    def commit(subject, *more):
        one = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        git(*one, "commit", "-q", "--allow-empty", *more, "-m", subject)

    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    commit("x" * 90)
    assert check.too_long(tmp_path) == []  # the check is not in the history
    git("add", ".")
    commit("Add the check", "-a")
    commit("é" * 72)
    assert check.too_long(tmp_path) == []
    commit("y" * 73)
    git("tag", "v1.0")  # tags make no difference
    commit("Fix it")
    (line,) = check.too_long(tmp_path)
    assert "the subject must have at most 72 characters, got 73: 'yyyy" in line
