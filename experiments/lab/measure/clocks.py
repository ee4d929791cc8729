"""Samples clocks, power and temperature of the GPU with nvidia-smi during a measurement."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
from typing import Any

PERIOD = 1000  # milliseconds
# nvidia-smi's name of a number -> the name in the summary, with the unit.
NUMBERS = {
    "clocks.sm": "SM clock, MHz",
    "clocks.mem": "memory clock, MHz",
    "power.draw": "power, W",
    "temperature.gpu": "temperature, C",
}
FIELDS = (*NUMBERS, "utilization.gpu", "clocks_event_reasons.active")
# The GPU counts as busy in a sample if it worked in at least this percentage of the time before the
# sample. The clock of an idle GPU is not of interest.
LEAST_BUSY = 50
# Bits of clocks_event_reasons.active: each bit is a reason why clocks are below their maximum.
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
    """A context manager that samples clocks, power and temperature of the GPU once per second.

    Without nvidia-smi there are no samples.
    """

    def __enter__(self) -> Sampling:
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by __exit__
        self._process: subprocess.Popen | None = None
        if shutil.which("nvidia-smi"):
            # Each line must reach the file at once: buffered lines are lost with the process.
            by_line = ("stdbuf", "-oL") if shutil.which("stdbuf") else ()
            # The first GPU that CUDA is allowed to see is the one that experiments run on.
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
            which, query = f"--id={visible or '0'}", f"--query-gpu={','.join(FIELDS)}"
            how = ("--format=csv,noheader,nounits", f"--loop-ms={PERIOD}")
            self._process = subprocess.Popen(
                (*by_line, "nvidia-smi", which, query, *how),
                stdout=self._file,
                stderr=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._file.close()

    def summary(self) -> dict[str, Any]:
        """Return the summary of the samples that were taken so far; see `summarize`."""
        at = os.fstat(self._file.fileno()).st_size
        return summarize(os.pread(self._file.fileno(), at, 0).decode())


def summarize(text: str) -> dict[str, Any]:
    """Return a summary of the lines that nvidia-smi printed.

    The summary is about the samples in which the GPU was busy. If the GPU was never busy, it is
    about all samples.

    Parameters
    ----------
    text : str
        One line per sample, with the numbers `FIELDS`. Lines that cannot be read are left out.

    Returns
    -------
    dict
        The dictionary has these entries. It is empty if there are no samples.

        | key | value |
        |---|---|
        | "samples" | number of all samples |
        | "busy" | number of samples in which the GPU was busy |
        | each value of `NUMBERS`, such as "power, W" | [minimum, median, maximum] |
        | "held by" | {reason why the GPU lowered its clock: number of samples} |
    """
    samples = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the line is cut off, or is no line of numbers
            *numbers, busy, reasons = line.split(",")
            of = dict(zip(NUMBERS.values(), map(float, numbers), strict=True))
            samples.append((of, float(busy) >= LEAST_BUSY, int(reasons, 16)))
    if not samples:
        return {}
    busy_ones = [sample for sample in samples if sample[1]]
    found: dict[str, Any] = {"samples": len(samples), "busy": len(busy_ones)}
    for name in NUMBERS.values():
        values = [numbers[name] for numbers, _, _ in busy_ones or samples]
        found[name] = [min(values), statistics.median(values), max(values)]
    held = [[name for bit, name in BITS.items() if x & bit] for _, _, x in busy_ones or samples]
    found["held by"] = {name: n for name in BITS.values() if (n := sum(name in x for x in held))}
    return found
