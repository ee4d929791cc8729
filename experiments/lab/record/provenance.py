"""Where numbers are from: commit, machine, date and counters of stored runs, as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .store import EMULATOR, MODEL, Row


def of_rows(runs: Sequence[Mapping[str, Any]], rows: Iterable[Row]) -> list[Mapping[str, Any]]:
    """Return the runs that the rows are from."""
    named = {row.run for row in rows}
    return [run for run in runs if run.get("id", "") in named]


def when(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the date and the commits of runs as text.

    A "+" means that code differed from the commit.
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
    """Return the name of the runs' device, or `otherwise` if there is none."""
    return next((run["device"]["name"] for run in runs if run.get("device")), otherwise)


def clocks(run: Mapping[str, Any]) -> str:
    """Return sentences on the GPU's clock during a run, without the last full stop."""
    found = run.get("clocks")
    if not found:
        return "The GPU's clocks were not sampled"
    if not found["busy"]:
        return (
            "The SM clock during the calls is not known, because the GPU was not busy in any "
            "sample of its clock (one sample per second)"
        )
    low, middle, high = (f"{x:.0f}" for x in found["SM clock, MHz"])
    span = f"was {low} MHz" if low == high else f"was {low} to {high} MHz (median {middle} MHz)"
    samples = "1 sample" if found["busy"] == 1 else f"{found['busy']} samples"
    held = "".join(
        f". In {n} of {samples} of the SM clock, the {name} limited the clock"
        for name, n in found["held by"].items()
    )
    return f"While the GPU was busy, the SM clock {span} in {samples} (one per second){held}"


def l2_counter(runs: Sequence[Mapping[str, Any]], rows: Iterable[Row]) -> str:
    """Return which hardware counter gave the rows' L2 bytes; empty if no row has L2 bytes."""
    names = l2_names(runs, rows)
    return f"L2 is {' and '.join(sorted(names))}" if names else ""


def l2_names(runs: Sequence[Mapping[str, Any]], rows: Iterable[Row]) -> set[str]:
    """Return the names of the hardware counters that gave the rows' L2 bytes."""
    counted = of_rows(runs, (row for row in rows if row.source == "l2"))
    return {run["l2_counter"] for run in counted if "l2_counter" in run}


def footnote(recorded: Mapping[str, Sequence[Mapping[str, Any]]], rows: Sequence[Row]) -> str:
    """Return machine, date and commit of a figure's rows as text, GPUs first.

    It also says which counter gave L2 bytes. `recorded` has the runs of each machine.
    """
    gpus, others, l2 = [], [], []
    for machine in sorted({row.machine for row in rows}):
        mine = [row for row in rows if row.machine == machine]
        runs = of_rows(recorded.get(machine, ()), mine)
        if machine in (EMULATOR, MODEL):
            label = {MODEL: "closed forms", EMULATOR: "counted on the emulator"}[machine]
            others.append(f"{label}, {when(runs)}")
        else:
            gpus.append(f"recorded on {device_name(runs, machine)}, {when(runs)}")
            by = l2_counter(runs, mine)
            l2 += [by] if by else []
    return "\n".join("; ".join(line) for line in (gpus, l2, others) if line)
