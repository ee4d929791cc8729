"""What the emulator counts of single accesses, against recorded hardware."""

import csv

import pytest
from access_patterns import ACCESSES, MEASURED, emulated, patterns, uncounted, wavefronts

from experiments.beside import profiler

PATTERNS = patterns()


def of(access):
    return [pattern for pattern in PATTERNS if pattern.access == access]


@pytest.mark.parametrize("access", ACCESSES)
def test_each_access_is_counted_as_on_the_recorded_gpu(access):
    """Every counter of every pattern: the hardware's is the emulator's and what that leaves out."""
    with MEASURED.open(newline="") as file:
        measured = {(row["access"], row["pattern"]): row for row in csv.DictReader(file)}
    for pattern in of(access):
        row = measured[access, pattern.name]
        beside = uncounted(pattern)
        counted = profiler.counted(emulated(pattern))
        found = {name: n + beside[name] for name, n in counted.items() if name in row}
        assert found == {name: float(row[name]) for name in found}, pattern.name
        if "matrix" in access:
            own = tuple(float(row[f"matrix {of_what}"]) for of_what in ("wavefronts", "conflicts"))
            assert own == wavefronts(pattern), pattern.name


def test_the_recorded_gpu_gave_every_counter():
    with MEASURED.open(newline="") as file:
        columns = set(csv.DictReader(file).fieldnames)
    wanted = {n for n, counter in profiler.COUNTERS.items() if counter.names}
    assert wanted <= columns
