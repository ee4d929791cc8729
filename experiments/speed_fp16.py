"""fp16 speed on tensor cores over the sequence length: the FA-2 paper's Figs. 4 to 7."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lab import peers, speeds
from .lab.options import Bench, Options
from .lab.series import MMA_SPLITS
from .lab.store import Row

NAME = "speed_fp16"
TITLE = "fp16 TFLOP/s over the sequence length, all passes, both loop orders and torch"
DESCRIPTION = (
    "FA-2 paper, Figs. 4 to 7 (16k tokens, hidden dimension 2048, fp16): forward, backward and "
    "forward + backward TFLOP/s over N on tensor cores, both loop orders, FA-1 with query splits, "
    "standard attention, torch's kernels where torch is installed, and the published curves."
)
NEEDS_GPU = True
STUDY = speeds.Study(
    NAME,
    dtype="float16",
    passes=("fwd", "bwd", "fwd+bwd"),
    ours=("standard-mma", "fa1-mma", MMA_SPLITS, "fa2-mma"),
    theirs=peers.HALF,
    figures=("Fig. 4", "Fig. 5", "Fig. 6", "Fig. 7"),
)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed and error of every series and pass, checked before they are timed."""
    yield from speeds.measure(STUDY, options, bench)


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels a pass and head dimension, a column a mask."""
    return speeds.draw(STUDY, rows)
