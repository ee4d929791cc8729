"""What is said of how a recording was made: its commit, clocks, and how many runs."""

import json
import subprocess

import pytest

from experiments import __main__ as command
from experiments.lab.measure.series import row_fields
from experiments.lab.measure.workloads import one_head
from experiments.lab.record import origins, provenance
from experiments.lab.record.store import Row, Store, dump
from experiments.lab.show import report, tables

CLOCKS = {"SM clock, MHz": [1095.0, 1620.0, 1980.0], "busy": 102, "held by": {"power cap": 94}}


def time(n, N=64, **fields):
    common = {"machine": report.MACHINE, "experiment": "speed", "source": "measured"}
    common |= {"metric": "time", "unit": "ms", "value": 1.0, **row_fields(one_head(N, 64))}
    return Row(n=n, **{"series": "fa2-simt"} | common | fields)


def recorded(folder, runs, rows):
    store = Store(folder)
    path = store.path("speed", report.MACHINE)
    path.parent.mkdir(parents=True)
    path.write_text(dump(rows))
    path.with_suffix(".json").write_text(json.dumps({"runs": runs}))
    return store


def test_recordings_of_lost_commits_are_listed(tmp_path):
    runs = [
        {"id": "a", "commit": "abcdef1", "dirty": False},
        {"id": "b", "commit": "abcdef1", "dirty": None},
        {"id": "c", "commit": "1234567", "dirty": None},
        {"id": "d"},
    ]
    store = recorded(tmp_path, runs, [time(20)])
    assert list(origins.unknown(store, {"abcdef1" + 33 * "0"})) == [
        ("speed/nvidia-h200.csv, abcdef1: uncommitted changes may have existed", False),
        ("speed/nvidia-h200.csv, 1234567: the commit is not in the git history", True),
        ("speed/nvidia-h200.csv, no commit: the commit is not in the git history", True),
    ]


def test_the_command_lists_them_and_fails_for_a_lost_commit(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "FIGURES", tmp_path)
    recorded(tmp_path, [{"commit": "abcdef1", "dirty": None}], [time(20)])
    monkeypatch.setattr(origins, "history", lambda: {"abcdef1"})
    assert command.main(["origins"]) == 0 and "may have existed" in capsys.readouterr().out
    monkeypatch.setattr(origins, "history", set)
    assert command.main(["origins"]) == 1 and "not in the git history" in capsys.readouterr().out


def test_history_has_the_commit_that_is_checked_out():
    try:
        head = subprocess.run(
            ("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git")
    assert head.stdout.strip() in origins.history()


def test_history_is_of_the_repository_wherever_the_process_runs(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(("git", *who, *words), cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.split()

    monkeypatch.setattr(origins, "REPOSITORY", tmp_path)
    try:
        git("init")
    except OSError:
        pytest.skip("no git")
    with pytest.raises(subprocess.CalledProcessError):
        origins.history()
    for message in "ab":
        git("commit", "--allow-empty", "-m", message)
    commits = git("log", "--format=%H")
    assert len(commits) == 2 and origins.history() == set(commits)


def test_clocks_are_said_in_words():
    assert provenance.clocks({"clocks": CLOCKS}, "ring") == (
        "While the GPU was busy with the experiment `ring`, the SM clock was 1095 to 1980 MHz "
        "(median 1620 MHz) in 102 samples (one per second). In 94 of 102 samples of the SM clock "
        "during `ring`, the power cap limited the SM clock"
    )
    steady = {"SM clock, MHz": [1980.0] * 3, "busy": 2, "held by": {}}
    assert provenance.clocks({"clocks": steady}, "ring") == (
        "While the GPU was busy with the experiment `ring`, the SM clock was 1980 MHz in 2 samples "
        "(one per second)"
    )
    assert provenance.clocks({"clocks": steady | {"busy": 1}}, "ring").endswith(
        "1980 MHz in 1 sample (one per second)"
    )
    assert "not busy in any sample" in provenance.clocks({"clocks": CLOCKS | {"busy": 0}}, "ring")
    assert provenance.clocks({}, "ring").endswith("were not sampled during the experiment `ring`")


def test_rows_of_few_runs_are_named():
    rows = [time(20), time(1, 128), time(4, 256, series="fa1-simt"), time(None)]
    assert (
        tables.fewer_runs(rows, "speed")
        == "2 of the 3 recorded times of the experiment `speed` are medians of only 1 to 4 runs. "
        "In the experiment `speed`, the calls with fewer than 5 runs have N=128 to 256 and belong "
        "to the series fa1-simt, fa2-simt"
    )
    said = "1 of the 1 recorded times of the experiment `speed` are medians of only 1 run. In the "
    said += "experiment `speed`, the calls with fewer than 5 runs have N=64 and belong to the "
    said += "series fa2-simt"
    assert tables.fewer_runs([time(1)], "speed") == said
    assert (
        tables.fewer_runs([time(5), time(1, metric="memory"), time(1, value=None)], "speed") == ""
    )
