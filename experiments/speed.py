"""Forward speed over the sequence length in FA-2's setting, beside torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lab import peers, speed_figures, speeds, tables
from .lab.options import Bench, Options
from .lab.series import LABELS, SPLITS
from .lab.store import Row
from .lab.tables import Table

NAME = "speed"
TITLE = "TFLOP/s over the sequence length, both loop orders and torch"
DESCRIPTION = (
    "Forward TFLOP/s over N in the FA-2 paper's setting (16k tokens, hidden dimension 2048), fp32: "
    "both loop orders, FA-1 with query splits, standard attention, and torch's kernels where "
    "torch is installed; peak memory beside inputs and outputs."
)
NEEDS_GPU = True
STUDY = speeds.Study(
    NAME,
    dtype="float32",
    passes=("fwd",),
    ours=("standard-simt", "fa1-simt", SPLITS, "fa2-simt"),
    theirs=peers.FLOAT32,
)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed, error and peak memory of every series, checked before they are timed."""
    yield from speeds.measure(STUDY, options, bench)


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels for each head dimension, a column for each mask."""
    return speed_figures.draw(STUDY, rows)


def table(rows: Sequence[Row]) -> Table | None:
    """TFLOP/s of every series, and FA-2 over torch's memory-efficient kernel."""
    shown = ("fa1-simt", SPLITS, "fa2-simt", "standard-simt", *STUDY.theirs)
    return speed_figures.table(STUDY, rows, "TFLOP/s, forward, fp32.", shown)


def memory(rows: Sequence[Row]) -> Table | None:
    """Peak memory beside inputs and outputs, in MiB."""
    found = {(*tables.sizes(r), r.series): r for r in rows if r.metric == "memory"}
    if not found:
        return None
    shown = ("fa1-simt", "fa2-simt", "standard-simt", *STUDY.theirs)
    lines = []
    for d, causal, N in sorted({(d, causal, N) for N, d, causal, _ in found}):
        cells = [found.get((N, d, causal, series)) for series in shown]
        numbers = [tables.cell(row, lambda v: f"{v:.4g}") for row in cells]
        lines.append([str(d), tables.yes_no(causal), str(N), *numbers])
    header = ["d", "causal", "N", *(LABELS[s] for s in shown)]
    return Table("MiB beside inputs and outputs.", tables.markdown(header, lines))


TABLES = {"memory": memory}
