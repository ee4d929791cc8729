"""L2 and DRAM traffic from Nsight Compute (`ncu`), which runs `counter_target` under it."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .options import REPOSITORY

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = ("lts__t_bytes.sum",)
METRICS = DRAM + L2
TIMEOUT = 540  # seconds
# ncu empties the caches before every kernel and leaves the clocks alone.
COMMAND = (
    "ncu",
    "--csv",
    "--print-units=base",
    "--profile-from-start=off",
    "--clock-control=none",
    "--cache-control=all",
    f"--metrics={','.join(METRICS)}",
)
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


class CountersError(Exception):
    """ncu is missing, or did not give what was asked of it."""


@dataclass(frozen=True)
class Case:
    """One call to be counted."""

    algorithm: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool


@dataclass(frozen=True)
class Traffic:
    """Bytes that one call moved, over all its kernels."""

    l2: float
    dram: float


def available() -> bool:
    return shutil.which("ncu") is not None


def parse(text: str) -> list[dict[str, float]]:
    """ncu's CSV as one dict of metric -> bytes for each kernel launch, in launch order."""
    start = re.search(r'^"ID",', text, re.MULTILINE)
    if start is None:
        raise CountersError(f"ncu printed no table: {_tail(text)}")
    launches: dict[int, dict[str, float]] = {}
    for line in csv.DictReader(io.StringIO(text[start.start() :])):
        identity, name = line["ID"], line["Metric Name"]
        # The program's own output may follow the table.
        if not identity.isdecimal() or name not in METRICS:
            continue
        launches.setdefault(int(identity), {})[name] = _bytes(
            line["Metric Value"], line["Metric Unit"]
        )
    for identity, metrics in launches.items():
        missing = [name for name in METRICS if name not in metrics]
        if missing:
            raise CountersError(f"launch {identity} has no {', '.join(missing)}")
    return [launches[identity] for identity in sorted(launches)]


def _bytes(value: str, unit: str) -> float:
    known = re.fullmatch(r"([KMGTP]?)byte", unit)
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = None
    if known is None or number is None:
        raise CountersError(f"ncu's value {value!r} {unit!r} is not a number of bytes")
    return number * _PREFIX[known[1]]


def assign(launches: Sequence[dict[str, float]], kernels: Sequence[int | str]) -> list:
    """Launches dealt out to calls: `kernels` has each call's kernel count, or why it failed.

    Gives a Traffic, or the reason, for each call.
    """
    expected = sum(count for count in kernels if isinstance(count, int))
    if expected != len(launches):
        raise CountersError(f"ncu saw {len(launches)} kernels where {expected} were launched")
    results: list[Traffic | str] = []
    at = 0
    for count in kernels:
        if isinstance(count, str):
            results.append(count)
            continue
        mine = launches[at : at + count]
        at += count
        results.append(
            Traffic(
                l2=sum(launch[name] for launch in mine for name in L2),
                dram=sum(launch[name] for launch in mine for name in DRAM),
            )
        )
    return results


def count(cases: Sequence[Case]) -> list[Traffic | str]:
    """The traffic of every case, or why it failed; one process for all. Raises CountersError."""
    if not available():
        raise CountersError("ncu is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        wanted, done = Path(folder) / "cases.json", Path(folder) / "kernels.json"
        wanted.write_text(json.dumps([vars(case) for case in cases]))
        log = Path(folder) / "ncu.csv"
        target = (sys.executable, "-m", "experiments.lab.counter_target")
        files = ("--cases", str(wanted), "--kernels", str(done))
        try:
            run = subprocess.run(
                (*COMMAND, "--log-file", str(log), *target, *files),
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise CountersError(f"ncu took more than {TIMEOUT} s") from None
        table = log.read_text() if log.exists() else ""
        if run.returncode or not done.exists():
            raise CountersError(
                f"ncu ended with {run.returncode}: {_tail(table + run.stdout + run.stderr)}"
            )
        return assign(parse(table), json.loads(done.read_text()))


def _tail(text: str, length: int = 300) -> str:
    return " ".join(text.split())[-length:] or "(nothing)"
