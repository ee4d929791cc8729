"""bf16 speed on tensor cores, forward + backward, beside torch's FlashAttention-2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lab import peers, speed_figures, speeds
from .lab.options import Bench, Options
from .lab.store import Row
from .lab.tables import Table

NAME = "speed_bf16"
TITLE = "bf16 TFLOP/s over the sequence length, forward + backward, FA-2 and torch's"
DESCRIPTION = (
    "Forward + backward TFLOP/s over N in the FA-2 paper's setting (16k tokens, hidden dimension "
    "2048), bf16: FA-2 on tensor cores beside torch's FlashAttention-2."
)
NEEDS_GPU = True
# NumPy has no bfloat16 arrays to put on a GPU.
NEEDS_TORCH = True
STUDY = speeds.Study(
    NAME,
    dtype="bfloat16",
    passes=("fwd+bwd",),
    ours=("fa2-mma",),
    theirs=(peers.FLASH,),
)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed and error of both, checked before they are timed."""
    yield from speeds.measure(STUDY, options, bench)


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels for each head dimension, a column for each mask."""
    return speed_figures.draw(STUDY, rows)


def table(rows: Sequence[Row]) -> Table | None:
    """TFLOP/s of FA-2 and of torch's, and their ratio."""
    return speed_figures.table(STUDY, rows, "TFLOP/s, forward + backward, bf16.")
