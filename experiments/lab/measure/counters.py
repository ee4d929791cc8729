"""Hardware counters from Nsight Compute (`ncu`), which runs `counter_target` under it."""

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

from ..record import REPOSITORY, Row

# Reads and writes of device memory.
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# What passes between the multiprocessors' L1 and L2, in sectors, counted at L1. Those counted at L2
# (lts__t_sectors_srcunit_tex) are up to 15 percent fewer, and differ from run to run.
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
# Executed warp instructions by opcode, such as LDSM.16.M88.4: its instances.
OPCODES = "sass__inst_executed_per_opcode_with_modifier_all"
_INSTANCES = ("--page=raw", "--print-metric-instances=details")
# ncu's base units -> what a value is multiplied by.
_UNITS = {
    **dict.fromkeys(("", "byte", "sector", "inst", "request", "cycle", "ns", "nsecond"), 1.0),
    **{"%": 0.01, "s": 1e9, "second": 1e9},
}


class CountersError(Exception):
    """ncu is missing, or did not give what was asked of it."""


@dataclass(frozen=True)
class Case:
    """One call to be counted: of a series in a pass, "fwd" or "bwd", with options."""

    series: str
    problem: Problem
    options: Mapping[str, Any] = field(default_factory=dict)
    pass_: str = "fwd"


def available() -> bool:
    return shutil.which("ncu") is not None


def l2_bytes(counted: Mapping[str, float]) -> float:
    return SECTOR_BYTES * sum(counted[name] for name in L2)


def dram_bytes(counted: Mapping[str, float]) -> float:
    return sum(counted[name] for name in DRAM)


# Sources of the data store's rows of traffic.
BYTES: dict[str, Callable[[Mapping[str, float]], float]] = {"l2": l2_bytes, "dram": dram_bytes}


def read(
    result: Mapping[str, float] | str, number: Callable[[Mapping[str, float]], float]
) -> tuple[float | None, str]:
    """(the number of a counted call, "") or, of one that failed, (None, why)."""
    return (None, result) if isinstance(result, str) else (number(result), "")


def traffic(
    result: Mapping[str, float] | str | None, planned: Any = None, calls: int = 1, note: str = "",
    **common: Any,
) -> Iterator[Row]:  # fmt: skip
    """Rows of the bytes that a plan has in closed form, and of those through L2 and of DRAM of so
    many calls as the one counted, where one was. Why it failed stands behind the note.
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
    """ncu's CSV as metric -> value of each launch, in order: counts and ratios as they are, ns,
    fractions of 1. Raises CountersError for any other unit and a metric that a launch lacks.
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
            raise CountersError(f"launch {launch} has no {', '.join(missing)}")
    return [launches[launch] for launch in sorted(launches)]


def _lines(text: str) -> Iterator[dict[str, str]]:
    """The lines of the table that ncu prints, by column. Raises CountersError without one."""
    start = re.search(r'^"ID",', text, re.MULTILINE)
    if start is None:
        raise CountersError(f"ncu printed no table: {_tail(text)}")
    yield from csv.DictReader(io.StringIO(text[start.start() :]))


def parse_opcodes(text: str) -> list[dict[str, float]]:
    """ncu's raw page as opcode -> warp instructions of each launch. Raises CountersError."""
    found: dict[int, dict[str, float]] = {}
    for line in _lines(text):
        if not (line["ID"] or "").isdecimal():  # the line of the units
            continue
        cell = line.get(OPCODES) or ""
        pairs = re.findall(r"([A-Z][\w.]*): ([\d,]+)", cell)
        if not pairs:
            raise CountersError(f"ncu's instances of {OPCODES} are {cell!r}: no opcodes")
        found[int(line["ID"])] = {opcode: float(n.replace(",", "")) for opcode, n in pairs}
    return [found[identity] for identity in sorted(found)]


def _number(name: str, value: str, unit: str) -> float:
    if unit not in _UNITS:
        known = ", ".join(each or "none" for each in _UNITS)
        raise CountersError(f"ncu gives {name} in {unit!r}: known are {known}")
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise CountersError(f"ncu's value of {name} is {value!r}, no number")
    return number * _UNITS[unit]


def by_case(
    launches: Sequence[dict[str, float]], kernels: Sequence[int | str]
) -> list[list[dict[str, float]] | str]:
    """Each call's launches, in order, or why it failed; `kernels` has how many each call made."""
    expected = sum(count for count in kernels if isinstance(count, int))
    if expected != len(launches):
        raise CountersError(f"ncu saw {len(launches)} kernels where {expected} were launched")
    left = iter(launches)
    return [n if isinstance(n, str) else [next(left) for _ in range(n)] for n in kernels]


def total(launches: Sequence[dict[str, float]] | str) -> dict[str, float] | str:
    """A call's values, or why it failed: totals (.sum) are added up, a ratio only a call of one
    kernel has.
    """
    if isinstance(launches, str):
        return launches
    names = launches[0] if launches else ()
    ratios = [name for name in names if not name.endswith(".sum")]
    if ratios and len(launches) > 1:
        return f"failed: {', '.join(ratios)} of {len(launches)} kernels cannot be added up"
    return {name: sum(launch[name] for launch in launches) for name in names}


def count(cases: Sequence[Case], metrics: Sequence[str]) -> list[dict[str, float] | str]:
    """Run the cases under ncu, in one process: metric -> value of each, or why it failed. Raises
    CountersError without ncu, and where ncu itself fails.
    """
    return [total(launches) for launches in count_kernels(cases, metrics)]


def count_kernels(
    cases: Sequence[Case], metrics: Sequence[str]
) -> list[list[dict[str, float]] | str]:
    """The same for each kernel of a case by itself, in launch order; ratios too."""
    table, kernels = _run(cases, metrics)
    return by_case(parse(table, metrics), kernels)


def count_opcodes(cases: Sequence[Case]) -> list[dict[str, float] | str]:
    """The same with opcode -> executed warp instructions, of all kernels of a case together."""
    table, kernels = _run(cases, (OPCODES,), _INSTANCES)
    launches = parse_opcodes(table)
    every = sorted(set().union(*launches))
    return [
        mine if isinstance(mine, str) else {op: sum(x.get(op, 0.0) for x in mine) for op in every}
        for mine in by_case(launches, kernels)
    ]


def available_metrics() -> set[str] | None:
    """The metrics that this GPU has, without suffixes such as .sum; None where ncu cannot say."""
    status, said = _with_children(("ncu", "--query-metrics")) if available() else (1, "")
    found = set(re.findall(r"^\s*(\w+__\w+)\b", said, re.MULTILINE))
    return found if status == 0 and found else None


def _run(
    cases: Sequence[Case], metrics: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, list[int | str]]:
    """(the table that ncu prints, what counter_target says of each case's kernels)."""
    if not available():
        raise CountersError("ncu is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        wanted, done = Path(folder) / "cases.pickle", Path(folder) / "kernels.json"
        wanted.write_bytes(pickle.dumps(list(cases)))
        log = Path(folder) / "ncu.csv"
        command = (*COMMAND, *options, f"--metrics={','.join(metrics)}", "--log-file", str(log))
        target = (sys.executable, "-m", "experiments.lab.measure.counter_target")
        status, said = _with_children((*command, *target, str(wanted), str(done)))
        table = log.read_text("utf-8") if log.exists() else ""
        if status or not done.exists():
            raise CountersError(f"ncu ended with {status}: {_tail(table + said)}")
        return table, json.loads(done.read_text("utf-8"))


def _with_children(command: Sequence[str]) -> tuple[int, str]:
    """(exit status, output) of a command. Raises CountersError after TIMEOUT."""
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
    """What `count` gives, with messages for exceptions; None without ncu, which is said."""
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
