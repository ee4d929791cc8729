"""Measures the backward speed in fp32 over the sequence length, next to torch's kernels.

The backward pass is measured alone and with the forward pass. The setting is FA-2's: 16k tokens and
hidden dimension 2048. The series are both loop orders, FA-2 with a deterministic dQ and by planes
of 16 bits on tensor cores, and standard attention.
"""

from functools import partial

from .lab.measure import peers, speeds
from .lab.measure.series import DETERMINISTIC, HOPPER_PLANES, PLANES
from .lab.show import speed_figures

NAME = "speed_backward"
NEEDS = ("GPU",)
STUDY = speeds.Study(
    NAME,
    dtype="float32",
    passes=("bwd", "fwd+bwd"),
    ours=("standard-simt", "fa1-simt", "fa2-simt", DETERMINISTIC, *PLANES, *HOPPER_PLANES),
    theirs=peers.FLOAT32,
    # FA-1 has batch x heads thread blocks. Longer sequences have too few, and calls take seconds.
    fa1_longest=8192,
)

measure = partial(speeds.measure, STUDY)
draw = partial(speed_figures.draw, STUDY)
table = partial(
    speed_figures.table,
    STUDY,
    caption="The table of fp32 speeds contains TFLOP/s in fp32 at the longest measured N.",
)
