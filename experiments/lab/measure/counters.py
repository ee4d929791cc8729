"""Reads hardware counters with Nsight Compute (`ncu`), which profiles `counter_target`."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa_numba.problem import Problem

from ..record import REPOSITORY, Row, ran

# Reads and writes of device memory.
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# Sectors that move between L1 and L2, counted at the multiprocessors' L1. The counter at L2
# (lts__t_sectors_srcunit_tex) gives up to 15 percent fewer sectors, and differs from run to run.
L2_READ, L2_WRITE = "l1tex__m_xbar2l1tex_read_sectors.sum", "l1tex__m_l1tex2xbar_write_sectors.sum"
L2 = (L2_READ, L2_WRITE)
L2_NAME = " + ".join(name.removesuffix(".sum") for name in L2)
SECTOR_BYTES = 32
TRAFFIC = DRAM + L2
TIMEOUT = 540  # seconds
PROTOCOL = (
    "Nsight Compute around one call after a warm-up, caches emptied before every kernel, clocks "
    f"left alone; L2 is the traffic between the multiprocessors and L2, {L2_NAME}, 32-byte sectors"
)
COMMAND = (
    "ncu",
    "--csv",
    "--print-units=base",
    "--profile-from-start=off",
    "--clock-control=none",
    "--cache-control=all",
)
# A counter of executed warp instructions. Its instances are opcodes, such as LDSM.16.M88.4.
OPCODES = "sass__inst_executed_per_opcode_with_modifier_all"
_INSTANCES = ("--page=raw", "--print-metric-instances=details")
# ncu's base units -> factor by which a value is multiplied. Times become ns, percent fractions.
_UNITS = {
    **dict.fromkeys(("", "byte", "sector", "inst", "request", "cycle", "ns", "nsecond"), 1.0),
    **{"%": 0.01, "s": 1e9, "second": 1e9},
}


class CountersError(Exception):
    """Raised if Nsight Compute is missing, or did not return the requested numbers."""


@dataclass(frozen=True)
class Case:
    """One call whose hardware counters are read.

    Parameters
    ----------
    series : str
        Name of the series.
    problem : Problem
        The problem.
    options : mapping, default {}
        Further options of the call.
    pass_ : str, default "fwd"
        "fwd" or "bwd".
    """

    series: str
    problem: Problem
    options: Mapping[str, Any] = field(default_factory=dict)
    pass_: str = "fwd"


def available() -> bool:
    """Return whether Nsight Compute is on the PATH."""
    return shutil.which("ncu") is not None


def l2_bytes(counted: Mapping[str, float]) -> float:
    """Return the bytes that move between the multiprocessors and L2.

    Parameters
    ----------
    counted : mapping of str to float
        Maps the name of each counter to its value.

    Returns
    -------
    float
        Bytes.
    """
    return SECTOR_BYTES * sum(counted[name] for name in L2)


def dram_bytes(counted: Mapping[str, float]) -> float:
    """Return the bytes read from and written to device memory.

    Parameters
    ----------
    counted : mapping of str to float
        Maps the name of each counter to its value.

    Returns
    -------
    float
        Bytes.
    """
    return sum(counted[name] for name in DRAM)


# Source of a row of traffic -> function that computes its bytes from the counters.
BYTES: dict[str, Callable[[Mapping[str, float]], float]] = {"l2": l2_bytes, "dram": dram_bytes}


def read(
    result: Mapping[str, float] | str, number: Callable[[Mapping[str, float]], float]
) -> tuple[float | None, str]:
    """Return a number computed from the counters of a call, or the reason why the call failed.

    Parameters
    ----------
    result : mapping or str
        Maps the name of each counter to its value. A text is the reason why the call failed.
    number : callable
        Takes the mapping and returns the number.

    Returns
    -------
    value : float or None
        The number; None if the call failed.
    failure : str
        The reason; an empty text if the call did not fail.
    """
    return (None, result) if isinstance(result, str) else (number(result), "")


def traffic(
    result: Mapping[str, float] | str | None, planned: Any = None, calls: int = 1, note: str = "",
    **common: Any,
) -> Iterator[Row]:  # fmt: skip
    """Yield rows with the bytes that a call moves, from up to three sources.

    The sources are the closed form, and the hardware counters of L2 and of DRAM.

    Parameters
    ----------
    result : mapping, str or None
        Maps the name of each counter to its value. A text is the reason why the call failed. None:
        no counters were read.
    planned : Plan, optional
        The plan whose accesses the closed form's row contains. Without a plan there is no such row.
    calls : int, default 1
        Number of equal calls. The counters were read for one call. The rows contain their values
        times this number.
    note : str, default ""
        Beginning of the rows' note. The reason of a failure follows it.
    **common
        The other columns of the rows.

    Yields
    ------
    Row
        Up to three rows, with sources "model", "l2" and "dram".
    """
    common |= {"metric": "traffic", "unit": "bytes"}
    if planned is not None:
        model = common | {"source": "model", "note": note}
        yield Row(value=planned.accesses.bytes, **model)
    if result is None:
        return
    for source, in_bytes in BYTES.items():
        value, why = read(result, in_bytes)
        value = None if value is None else calls * value
        told = f"{note}; {why}" if why else note
        yield Row(value=value, **common | {"source": source, "note": told})


def parse(text: str, metrics: Sequence[str]) -> list[dict[str, float]]:
    """Return the counters of each kernel launch, read from the CSV text that ncu prints.

    Counts and ratios are unchanged. Times are in ns. Percentages become fractions of 1.

    Parameters
    ----------
    text : str
        What ncu printed.
    metrics : sequence of str
        Names of the counters.

    Returns
    -------
    list of dict of str to float
        One dictionary per launch, in order. It maps the name of each counter to its value.

    Raises
    ------
    CountersError
        If there is no table, a unit is unknown, or a launch lacks a counter.
    """
    launches: dict[int, dict[str, float]] = {}
    for line in _lines(text):
        identity, name = line["ID"], line["Metric Name"]
        # The program's own output may follow the table.
        if not identity.isdecimal() or name not in metrics:
            continue
        launches.setdefault(int(identity), {})[name] = _number(
            name, line["Metric Value"], line["Metric Unit"]
        )
    for launch, values in launches.items():
        missing = [name for name in metrics if name not in values]
        if missing:
            raise CountersError(f"ncu reported no {', '.join(missing)} for launch {launch}")
    return [launches[launch] for launch in sorted(launches)]


def _lines(text: str) -> Iterator[dict[str, str]]:
    """Yield the lines of the table that ncu prints, each as a dictionary {column: text}.

    Raise CountersError if there is no table.
    """
    start = re.search(r'^"ID",', text, re.MULTILINE)
    if start is None:
        raise CountersError(f"ncu printed no table. Its output ends with: {_tail(text)}")
    yield from csv.DictReader(io.StringIO(text[start.start() :]))


def parse_opcodes(text: str) -> list[dict[str, float]]:
    """Return the number of executed warp instructions of each kernel launch, by opcode.

    Parameters
    ----------
    text : str
        The page "raw" that ncu printed, as CSV text.

    Returns
    -------
    list of dict of str to float
        One dictionary per launch. It maps an opcode to the number of instructions.

    Raises
    ------
    CountersError
        If there is no table, or a launch has no opcodes.
    """
    found: dict[int, dict[str, float]] = {}
    for line in _lines(text):
        if not (line["ID"] or "").isdecimal():  # the line of the units
            continue
        cell = line.get(OPCODES) or ""
        pairs = re.findall(r"([A-Z][\w.]*): ([\d,]+)", cell)
        if not pairs:
            raise CountersError(f"ncu's instances of {OPCODES} must name opcodes, got {cell!r}")
        found[int(line["ID"])] = {opcode: float(n.replace(",", "")) for opcode, n in pairs}
    return [found[identity] for identity in sorted(found)]


def _number(name: str, value: str, unit: str) -> float:
    if unit not in _UNITS:
        known = ", ".join(each or "none" for each in _UNITS)
        raise CountersError(f"ncu's unit of {name} must be one of {known}, got {unit!r}")
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise CountersError(f"ncu's value of {name} must be a number, got {value!r}")
    return number * _UNITS[unit]


def by_case(
    launches: Sequence[dict[str, float]], kernels: Sequence[int | str]
) -> list[list[dict[str, float]] | str]:
    """Assign the launches to the calls that made them.

    Parameters
    ----------
    launches : sequence of dict
        Counters of the launches of all calls, in order.
    kernels : sequence of int or str
        Number of launches of each call, or why the call failed.

    Returns
    -------
    list of (list of dict) or str
        For each call, the counters of its launches, or the reason why the call failed.

    Raises
    ------
    CountersError
        If the sum of `kernels` is not the number of launches.
    """
    expected = sum(count for count in kernels if isinstance(count, int))
    if expected != len(launches):
        raise CountersError(f"ncu must report {expected} launched kernels, got {len(launches)}")
    left = iter(launches)
    return [n if isinstance(n, str) else [next(left) for _ in range(n)] for n in kernels]


def total(launches: Sequence[dict[str, float]] | str) -> dict[str, float] | str:
    """Add up the counters of all kernels of a call.

    Parameters
    ----------
    launches : sequence of dict, or str
        Counters of each launch, or the reason why the call failed.

    Returns
    -------
    dict or str
        Maps the name of each counter to the sum over all launches. If the call failed, the result
        is text with the reason. The result is also such a text if the call has several launches and
        a counter is a ratio, because ratios cannot be added. A counter whose name does not end in
        ".sum" is a ratio.
    """
    if isinstance(launches, str):
        return launches
    names = launches[0] if launches else ()
    ratios = [name for name in names if not name.endswith(".sum")]
    if ratios and len(launches) > 1:
        return f"failed: {', '.join(ratios)} of {len(launches)} kernels cannot be added up"
    return {name: sum(launch[name] for launch in launches) for name in names}


def count(cases: Sequence[Case], metrics: Sequence[str]) -> list[dict[str, float] | str]:
    """Read the hardware counters of several calls with Nsight Compute, in one process.

    Parameters
    ----------
    cases : sequence of Case
        The calls.
    metrics : sequence of str
        Names of the counters.

    Returns
    -------
    list of dict or str
        For each call a dictionary {counter: value}, or the reason why the call failed.

    Raises
    ------
    CountersError
        If ncu is missing or fails.
    """
    return [total(launches) for launches in count_kernels(cases, metrics)]


def count_kernels(
    cases: Sequence[Case], metrics: Sequence[str]
) -> list[list[dict[str, float]] | str]:
    """Read the hardware counters of each kernel of several calls separately.

    Counters that are ratios are allowed, because nothing is added up.

    Parameters
    ----------
    cases : sequence of Case
        The calls.
    metrics : sequence of str
        Names of the counters.

    Returns
    -------
    list of (list of dict) or str
        For each call a list with one dictionary {counter: value} per kernel, in launch order, or
        the reason why the call failed.

    Raises
    ------
    CountersError
        If ncu is missing or fails.
    """
    table, kernels = _run(cases, metrics)
    return by_case(parse(table, metrics), kernels)


def count_opcodes(cases: Sequence[Case]) -> list[dict[str, float] | str]:
    """Count the executed warp instructions of each call by opcode, summed over its kernels.

    Parameters
    ----------
    cases : sequence of Case
        The calls.

    Returns
    -------
    list of dict or str
        For each call a dictionary {opcode: instructions}, or the reason why the call failed.

    Raises
    ------
    CountersError
        If ncu is missing or fails.
    """
    table, kernels = _run(cases, (OPCODES,), _INSTANCES)
    launches = parse_opcodes(table)
    every = sorted(set().union(*launches))
    return [
        mine if isinstance(mine, str) else {op: sum(x.get(op, 0.0) for x in mine) for op in every}
        for mine in by_case(launches, kernels)
    ]


def available_metrics() -> set[str] | None:
    """Return the names of the hardware counters that this GPU has.

    Returns
    -------
    set of str or None
        Names without suffixes such as ".sum". None if ncu is missing or fails.
    """
    status, said = _with_children(("ncu", "--query-metrics")) if available() else (1, "")
    found = set(re.findall(r"^\s*(\w+__\w+)\b", said, re.MULTILINE))
    return found if status == 0 and found else None


def _run(
    cases: Sequence[Case], metrics: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, list[int | str]]:
    """Profile the cases. Return the table that ncu prints, and the number of kernels of each case.

    For a case that failed, the reason replaces the number. `options` are further options of ncu.
    """
    if not available():
        raise CountersError("ncu (Nsight Compute) was not found. Install it and add it to PATH")
    with tempfile.TemporaryDirectory() as folder:
        wanted, done = Path(folder) / "cases.pickle", Path(folder) / "kernels.json"
        wanted.write_bytes(pickle.dumps(list(cases)))
        log = Path(folder) / "ncu.csv"
        command = (*COMMAND, *options, f"--metrics={','.join(metrics)}", "--log-file", str(log))
        target = (sys.executable, "-m", "experiments.lab.measure.counter_target")
        status, said = _with_children((*command, *target, str(wanted), str(done)))
        table = log.read_text("utf-8") if log.exists() else ""
        if status or not done.exists():
            raise CountersError(f"ncu failed with exit status {status}: {_tail(table + said)}")
        told = json.loads(done.read_text("utf-8"))
        ran.tell(told["ran"])
        return table, told["counts"]


def _with_children(command: Sequence[str]) -> tuple[int, str]:
    """Run a command with a time limit, and return its exit status and its output.

    After TIMEOUT seconds, kill the command and its child processes, and raise CountersError.
    """
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=TIMEOUT)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CountersError(f"ncu took more than {TIMEOUT} s") from None
            raise
        return process.returncode, said


def count_or_say(
    cases: Sequence[Case], metrics: Sequence[str], say: Callable[[str], None]
) -> list[dict[str, float] | str] | None:
    """Read hardware counters like `count`, but return the reason of an error instead of raising it.

    Parameters
    ----------
    cases : sequence of Case
        The calls.
    metrics : sequence of str
        Names of the counters.
    say : callable
        Prints a line.

    Returns
    -------
    list of dict or str, or None
        The result of `count`. If ncu failed, the reason for each call. None if ncu is missing.
    """
    if not available():
        say("  no Nsight Compute (ncu) here: hardware counters are not read")
        return None
    say(f"  Nsight Compute: {len(cases)} calls")
    try:
        return count(cases, metrics)
    except CountersError as error:
        say(f"  {error}")
        return [f"failed: {error}"] * len(cases)


def _tail(text: str, length: int = 300) -> str:
    return " ".join(text.split())[-length:] or "(nothing)"
