"""Backward speed over the sequence length in FA-2's setting, alone and with the forward pass."""

from collections.abc import Iterator, Sequence
from typing import Any

from .lab.measure import peers, speeds
from .lab.measure.series import DETERMINISTIC, HOPPER_PLANES, PLANES
from .lab.record.options import Bench, Options
from .lab.record.store import Row
from .lab.show import speed_figures
from .lab.show.tables import Table

NAME = "speed_backward"
TITLE = "TFLOP/s of the backward pass over the sequence length, both loop orders and torch"
DESCRIPTION = (
    "Backward and forward + backward TFLOP/s over N in the FA-2 paper's setting (16k tokens, "
    "hidden dimension 2048), fp32: both loop orders, FA-2 with a deterministic dQ and by planes of "
    "16 bits on tensor cores, standard attention, and torch's kernels where torch is installed."
)
NEEDS_GPU = True
STUDY = speeds.Study(
    NAME,
    dtype="float32",
    passes=("bwd", "fwd+bwd"),
    ours=("standard-simt", "fa1-simt", "fa2-simt", DETERMINISTIC, *PLANES, *HOPPER_PLANES),
    theirs=peers.FLOAT32,
    # FA-1 has one thread block a head: beyond this few blocks are left, and a call takes seconds.
    fa1_longest=8192,
)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time and speed of every series and pass, checked before they are timed."""
    yield from speeds.measure(STUDY, options, bench)


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels for each pass and head dimension, a column for each mask."""
    return speed_figures.draw(STUDY, rows)


def table(rows: Sequence[Row]) -> Table | None:
    """TFLOP/s of the backward pass, alone and with the forward one, and FA-2 over torch's."""
    return speed_figures.table(STUDY, rows, "TFLOP/s, fp32.")
