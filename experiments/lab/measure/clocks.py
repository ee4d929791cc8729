"""Clocks, power and temperature of the GPU while something is measured, from nvidia-smi."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from typing import Any

PERIOD = 1000  # milliseconds
# What nvidia-smi calls it -> what the summary does, with the unit.
NUMBERS = {
    "clocks.sm": "SM clock, MHz",
    "clocks.mem": "memory clock, MHz",
    "power.draw": "power, W",
    "temperature.gpu": "temperature, C",
}
BUSY = "utilization.gpu"
# Percent of the time before a sample in which the GPU worked: below, its clock says nothing.
LEAST_BUSY = 50
# One name or the other, by the driver's age; a bit for each reason why clocks are below their most.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
BITS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown, software",
    0x40: "thermal slowdown, hardware",
    0x80: "power brake",
    0x100: "display clocks",
}


class Sampling:
    """Samples once a second between `with` and its end; `summary` is of the samples so far."""

    def __enter__(self) -> Sampling:
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by __exit__
        self._process: subprocess.Popen | None = None
        fields = next((f for f in map(_fields, REASONS) if _query(f) is not None), None)
        if fields is not None:
            # Lines must be in the file as they come: what is buffered dies with the process.
            by_line = ("stdbuf", "-oL") if shutil.which("stdbuf") else ()
            command = (*by_line, *_command(fields), f"--loop-ms={PERIOD}")
            self._process = subprocess.Popen(
                command, stdout=self._file, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._file.close()

    def summary(self) -> dict[str, Any]:
        at = os.fstat(self._file.fileno()).st_size
        return summarize(os.pread(self._file.fileno(), at, 0).decode())


def summarize(text: str) -> dict[str, Any]:
    """[least, median, most] of each number, and in how many samples what held the clocks: of the
    lines in which the GPU was busy, or of all where it never was. Empty without a sample.
    """
    samples = [cells for cells in map(_cells, text.splitlines()) if cells]
    busy = [cells for cells in samples if cells[BUSY] >= LEAST_BUSY]
    if not samples:
        return {}
    found: dict[str, Any] = {"samples": len(samples), "busy": len(busy)}
    for name in NUMBERS.values():
        values = [cells[name] for cells in busy or samples]
        found[name] = [min(values), statistics.median(values), max(values)]
    reasons = [cells[REASONS[0]] for cells in busy or samples]
    counts = {name: sum(bool(each & bit) for each in reasons) for bit, name in BITS.items()}
    found["held by"] = {name: count for name, count in counts.items() if count}
    return found


def _cells(line: str) -> dict[str, Any] | None:
    """A sample's numbers by name; None for a line that is cut off or has something else."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(NUMBERS) + 2:
        return None
    try:
        *numbers, busy = map(float, cells[:-1])
        reasons = int(cells[-1], 16)
    except ValueError:
        return None
    return dict(zip(NUMBERS.values(), numbers, strict=True), **{BUSY: busy, REASONS[0]: reasons})


def _fields(reasons: str) -> str:
    return ",".join((*NUMBERS, BUSY, reasons))


def _command(fields: str) -> tuple[str, ...]:
    """The first GPU that CUDA is allowed to see is the one that experiments run on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    query = f"--query-gpu={fields}"
    return "nvidia-smi", f"--id={visible or '0'}", query, "--format=csv,noheader,nounits"


def _query(fields: str) -> str | None:
    """What nvidia-smi says once; None where it is not there or does not know a field."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(_command(fields), capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
