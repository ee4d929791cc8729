"""What the emulator counts of single accesses, against the rules and against recorded hardware."""

import csv

import pytest
from access_patterns import (
    ACCESSES,
    MEASURED,
    OUT,
    emulated,
    patterns,
    sectors,
    uncounted,
    wavefronts,
)

from experiments.beside import profiler

PATTERNS = patterns()


def of(access):
    return [pattern for pattern in PATTERNS if pattern.access == access]


@pytest.mark.parametrize("access", ACCESSES)
def test_each_access_is_counted_by_the_rules(access):
    for pattern in of(access):
        what, counts = pattern.what, emulated(pattern)
        if what.space == "shared":
            found = counts.total(space="shared", kind=what.kind)
            assert (found.wavefronts, found.conflicts) == wavefronts(pattern), pattern.name
        if what.space == "global" or what.kind == "copy":
            found = counts.total(space="global", kind=what.kind, array="X")
            assert found.requests == 1, pattern.name
            assert found.sectors == sectors(pattern), pattern.name


def test_the_rules_by_hand():
    """Some patterns whose numbers are in the CUDA C++ Programming Guide or follow from it."""
    known = {
        ("load_4", "neighbours"): (1, 0),
        ("load_4", "stride 2"): (2, 1),
        ("load_4", "stride 8"): (8, 7),
        ("load_4", "one unit"): (1, 0),
        ("load_4", "stride 9"): (1, 0),  # odd: each bank once
        ("load_2", "neighbours"): (1, 0),  # two lanes a word
        ("load_16", "neighbours"): (4, 0),
        ("load_16", "stride 8"): (32, 28),
        ("load_matrix", "stride 8"): (32, 28),  # rows of 128 bytes without padding
        ("load_matrix", "stride 9"): (4, 0),  # and with
        ("store_16", "rows of 8, pitch 9"): (4, 0),
    }
    found = {(p.access, p.name): wavefronts(p) for p in PATTERNS}
    assert {key: found[key] for key in known} == known
    read = {(p.access, p.name): sectors(p) for p in PATTERNS}
    assert read["read_4", "neighbours"] == 4 and read["read_4", "stride 8"] == 32
    assert read["read_16", "neighbours"] == 16 and read["read_16", "one unit"] == 1
    assert read["copy_16", "neighbours"] == 16
    assert read["copy_16", "rows of 8, pitch 9"] == 24  # half of the rows askew: 8 for 4


def test_patterns_are_what_their_names_say():
    assert len({(p.access, p.name) for p in PATTERNS}) == len(PATTERNS)
    for pattern in PATTERNS:
        taking = [e for e in pattern.at if e != OUT]
        assert taking
        if pattern.what.kind in ("store", "copy", "atomic"):
            assert len(set(taking)) == len(taking), "two lanes would write one place"


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
