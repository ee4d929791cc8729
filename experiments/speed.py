"""Measures the forward speed in fp32 over the sequence length, next to torch's kernels.

The setting is FA-2's: 16k tokens and hidden dimension 2048. The series are both loop orders, FA-1
with query splits, standard attention, and FA-2 by planes of 16 bits on tensor cores. The peak
memory in addition to inputs and outputs is measured too.
"""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import numpy as np

from .lab.measure import peers, speeds
from .lab.measure.series import HOPPER_PLANES, LABELS, PLANES, SPLITS, by_planes, precision
from .lab.record import Row, nested
from .lab.show import speed_figures, tables
from .lab.show.tables import Across

NAME = "speed"
NEEDS = ("GPU",)
STUDY = speeds.Study(
    NAME,
    dtype="float32",
    passes=("fwd",),
    ours=("standard-simt", "fa1-simt", SPLITS, "fa2-simt", *PLANES, *HOPPER_PLANES),
    theirs=peers.FLOAT32,
)

measure = partial(speeds.measure, STUDY)
draw = partial(speed_figures.draw, STUDY)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of forward speeds in fp32."""
    shown = ("fa1-simt", SPLITS, "fa2-simt", "standard-simt", *STUDY.theirs)
    return speed_figures.table(
        STUDY,
        rows,
        "The table of fp32 speeds contains the speed of forward calls in fp32, in TFLOP/s.",
        shown,
    )


def memory(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of peak memory in addition to inputs and outputs, or None without rows."""
    found = {
        (r.dtype, r.seqlen_q, r.series): r
        for r in rows
        if r.metric == "memory" and (r.head_dim, r.causal) == (HEAD_DIM, False)
    }
    if not found:
        return None
    lines = []
    shown = list(dict.fromkeys(("fa1", "fa2", "standard", *peers.FLOAT32, *peers.HALF)))
    for dtype, N in sorted({at[:2] for at in found}, key=lambda at: (at[0] != "float32", at[1])):
        if N not in MEMORY_SEQLENS:
            continue
        unit = "simt" if dtype == "float32" else "mma"
        names = [name if "-" in name else f"{name}-{unit}" for name in shown]
        cells = [found.get((dtype, N, series)) for series in names]
        numbers = [tables.cell(row, lambda v: f"{v:.0f}") for row in cells]
        lines.append([speeds.DTYPES[dtype], str(N), *numbers])
    header = ["dtype", "N", *(LABELS[s if "-" in s else f"{s}-simt"] for s in shown)]
    caption = (
        "The table of memory contains the MiB that a forward call uses in addition to inputs and "
        f"outputs. The calls in the table of memory have 16k tokens, d={HEAD_DIM} and no mask."
    )
    return tables.of(caption, header, lines)


def precisions(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of FA-2's speeds in float32 for each value of `precision`."""
    places = nested(rows, attrgetter("pass_", "head_dim", "causal"), "series", "seqlen_q",
                    metric="speed")  # fmt: skip
    places = {at: of for at, of in places.items() if any(map(by_planes, of))}
    hopper = [s for s in HOPPER_PLANES if any(s in of for of in places.values())]
    shown = ("fa2-simt", *PLANES, *hopper)
    lines = []
    for at, of in sorted(places.items(), key=lambda item: (item[0][0] != "fwd", item[0])):
        cells, theirs = [], of.get(peers.EFFICIENT, {})
        for mine in (of.get(series, {}) for series in shown):
            over = [value / theirs[N] for N, value in sorted(mine.items()) if N in theirs]
            spread = f"{np.median(over):.2f} ({tables.between(over)})" if over else tables.MISSING
            cells += [f"{mine[max(mine)]:.0f}" if mine else tables.MISSING, spread]
        lines.append([speeds.PASSES[at[0]], str(at[1]), tables.yes_no(at[2]), *cells])
    names = [*map(precision, shown[: 1 + len(PLANES)]), *(f"{precision(s)}, wgmma" for s in hopper)]
    header = ["pass", "d", "causal"]
    header += [x for name in names for x in (f"{name}, TFLOP/s", f"{name} / torch's")]
    caption = (
        "The table shows the speed of FA-2 in float32 for each value of the option `precision`. "
        "The columns *TFLOP/s* contain speeds at the longest measured N. The ratio *speed of FA-2 "
        "/ speed of torch's memory-efficient attention* is in the column after each speed, for "
        "example in the column *fp16x3 / torch's*. Each ratio is the median over N, followed by "
        "the smallest and the largest ratio in brackets."
    )
    return tables.of(caption, header, lines)


HEAD_DIM, MEMORY_SEQLENS = 64, (1024, 4096, 16384)
TABLES = {
    "memory": Across(memory, ("speed", "speed_fp16")),
    "speed_precision": Across(precisions, ("speed", "speed_backward")),
}
