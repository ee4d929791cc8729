"""Describes the origin of stored numbers as text: machine, date, commit, clocks and counters.

The functions take descriptions of runs, as a recording's JSON file lists them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .store import EMULATOR, MODEL, Row


def of_rows(runs: Sequence[Mapping[str, Any]], rows: Iterable[Row]) -> list[Mapping[str, Any]]:
    """Return the runs that produced at least one of the rows."""
    named = {row.run for row in rows}
    return [run for run in runs if run.get("id", "") in named]


def dates_and_commits(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the dates and the commits of runs as text.

    If all runs have the same commit, the text contains only the last date. A "+" after a commit
    means that the code had uncommitted changes.
    """
    commits = list(dict.fromkeys(map(_commit, runs))) or [_commit({})]
    dates = sorted({run.get("date") or "undated" for run in runs}) or ["undated"]
    if len(commits) == 1:
        return f"{dates[-1]}, commit {commits[0]}"
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{span}, {len(commits)} commits: {', '.join(commits)}"


def _commit(run: Mapping[str, Any]) -> str:
    head = run.get("commit")
    return "unknown" if head is None else f"{head[:7]}{'+' if run.get('dirty') else ''}"


def device_name(runs: Sequence[Mapping[str, Any]], otherwise: str) -> str:
    """Return the name of the runs' GPU, or `otherwise` if no run names a GPU."""
    return next((run["device"]["name"] for run in runs if run.get("device")), otherwise)


def clocks(run: Mapping[str, Any], experiment: str) -> str:
    """Return sentences about the GPU's clock during a run of an experiment.

    The text ends without a full stop.
    """
    found = run.get("clocks")
    if not found:
        return f"The GPU's clocks were not sampled during the experiment `{experiment}`"
    if not found["busy"]:
        return (
            f"The SM clock during `{experiment}` is not known, because the GPU was not busy in any "
            "sample of the clock (one sample per second)"
        )
    low, middle, high = (f"{x:.0f}" for x in found["SM clock, MHz"])
    span = f"was {low} MHz" if low == high else f"was {low} to {high} MHz (median {middle} MHz)"
    samples = "1 sample" if found["busy"] == 1 else f"{found['busy']} samples"
    held = "".join(
        f". In {n} of {samples} of the SM clock during `{experiment}`, the {name} limited the SM "
        "clock"
        for name, n in found["held by"].items()
    )
    return (
        f"While the GPU was busy with the experiment `{experiment}`, the SM clock {span} in "
        f"{samples} (one per second){held}"
    )


def l2_counter(runs: Sequence[Mapping[str, Any]], rows: Iterable[Row]) -> str:
    """Return a text that names the hardware counter of the rows' L2 bytes.

    The text is empty if no row contains L2 bytes.
    """
    names = l2_names(runs, rows)
    return f"L2 is {' and '.join(sorted(names))}" if names else ""


def l2_names(runs: Sequence[Mapping[str, Any]], rows: Iterable[Row]) -> set[str]:
    """Return the names of the hardware counters that gave the rows' L2 bytes."""
    counted = of_rows(runs, (row for row in rows if row.source == "l2"))
    return {run["l2_counter"] for run in counted if "l2_counter" in run}


def footnote(recorded: Mapping[str, Sequence[Mapping[str, Any]]], rows: Sequence[Row]) -> str:
    """Return the footnote of a figure: machine, date and commit of its rows, GPUs first.

    If rows contain L2 bytes, the footnote also names the hardware counter. `recorded` maps a
    machine to its runs.
    """
    gpus, others, l2 = [], [], []
    for machine in sorted({row.machine for row in rows}):
        mine = [row for row in rows if row.machine == machine]
        runs = of_rows(recorded.get(machine, ()), mine)
        if machine in (EMULATOR, MODEL):
            label = {MODEL: "closed forms", EMULATOR: "counted on the emulator"}[machine]
            others.append(f"{label}, {dates_and_commits(runs)}")
        else:
            gpus.append(f"recorded on {device_name(runs, machine)}, {dates_and_commits(runs)}")
            by = l2_counter(runs, mine)
            l2 += [by] if by else []
    return "\n".join("; ".join(line) for line in (gpus, l2, others) if line)
