"""Forward speed over the sequence length in FA-2's setting, beside torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lab import peers, speeds
from .lab.options import Bench, Options
from .lab.series import SPLITS
from .lab.store import Row

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
    """TFLOP/s over N: a row of panels a head dimension, a column a mask."""
    return speeds.draw(STUDY, rows)
