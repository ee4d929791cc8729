"""Clocks, power and temperature of the GPU during a measurement, by nvidia-smi."""

from __future__ import annotations

import contextlib
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
FIELDS = (*NUMBERS, "utilization.gpu", "clocks_event_reasons.active")
# Percent of the time before a sample in which the GPU worked: below, its clock says nothing.
LEAST_BUSY = 50
# A bit for each reason why clocks are below their most.
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
    """A context manager that samples clocks, power and temperature once per second."""

    def __enter__(self) -> Sampling:
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by __exit__
        self._process: subprocess.Popen | None = None
        if shutil.which("nvidia-smi"):
            # Lines must be in the file as they come: what is buffered dies with the process.
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
        """Return the summary of the samples so far; see `summarize`."""
        at = os.fstat(self._file.fileno()).st_size
        return summarize(os.pread(self._file.fileno(), at, 0).decode())


def summarize(text: str) -> dict[str, Any]:
    """Summarise the lines that nvidia-smi printed.

    Only samples in which the GPU was busy count. If it never was, all samples count.

    Parameters
    ----------
    text : str
        Lines of numbers. Lines that cannot be read are left out.

    Returns
    -------
    dict
        "samples" and "busy": their number. For each value of `NUMBERS`: [least, median, most].
        "held by": number of samples by the reason for a lower clock. Empty without a sample.
    """
    samples = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # one that is cut off, or says something else
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
