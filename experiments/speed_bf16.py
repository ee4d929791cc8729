"""bf16 speed on tensor cores, all units, orders and passes, and how far it is from fp16's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lab import peers, speed_figures, speeds, tables
from .lab.options import Bench, Options
from .lab.series import HALF, LABELS
from .lab.store import Row
from .lab.tables import Across, Table

NAME = "speed_bf16"
TITLE = "bf16 TFLOP/s over the sequence length, all passes, both loop orders and torch"
DESCRIPTION = (
    "Forward, backward and forward + backward TFLOP/s over N in the FA-2 paper's setting (16k "
    "tokens, hidden dimension 2048), bf16, on tensor cores: both loop orders, FA-1 with query "
    "splits, both on wgmma, standard attention, torch's kernels; and speed over that in fp16."
)
NEEDS_GPU = True
# NumPy has no bfloat16 arrays to put on a GPU.
NEEDS_TORCH = True
STUDY = speeds.Study(
    NAME,
    dtype="bfloat16",
    passes=("fwd", "bwd", "fwd+bwd"),
    ours=HALF,
    theirs=(peers.FLASH, peers.CUDNN),
    # Every second length of fp16's: the question is how far the two are apart.
    seqlens=(512, 2048, 8192),
)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed and error of every series and pass, checked before they are timed."""
    yield from speeds.measure(STUDY, options, bench)


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels for each pass and head dimension, a column for each mask."""
    return speed_figures.draw(STUDY, rows)


def table(rows: Sequence[Row]) -> Table | None:
    """TFLOP/s of every pass and series, and FA-2 over torch's."""
    return speed_figures.table(STUDY, rows, "TFLOP/s, bf16.")


# How far from fp16 bf16 may be, as a share of fp16's speed.
NEAR = 0.03


def over_fp16(rows: Sequence[Row]) -> Table | None:
    """Speed in bf16 over that in fp16 at the same points: smallest, median and largest ratio."""
    speed: dict[str, dict[tuple, float]] = {"bfloat16": {}, "float16": {}}
    for r in rows:
        if r.metric == "speed" and r.value is not None and r.dtype in speed:
            speed[r.dtype][r.series, r.pass_, tables.sizes(r), r.batch] = r.value
    ratios: dict[str, dict[str, list[float]]] = {}
    for at, value in speed["bfloat16"].items():
        series, pass_ = at[:2]
        if series in STUDY.series and at in speed["float16"]:
            of_series = ratios.setdefault(series, {})
            of_series.setdefault(pass_, []).append(value / speed["float16"][at])
    if not ratios:
        return None
    lines = []
    for series in (s for s in STUDY.series if s in ratios):
        found = ratios[series]
        every = [x for of_pass in found.values() for x in of_pass]
        cells = [tables.spread(found.get(p, ())) for p in STUDY.passes]
        lines.append([LABELS[series], *cells, *_judged(every)])
    ours = [x for series in STUDY.ours for of in ratios.get(series, {}).values() for x in of]
    near, slower = _judged(ours)
    caption = (
        "Speed in bf16 over speed in fp16 at the same length, head dimension and mask: the "
        f"smallest, the median and the largest ratio. Of ours {near} are within {NEAR:.0%}, "
        f"{slower} are slower by more."
    )
    header = ["series", *STUDY.passes, f"within {NEAR:.0%}", "slower by more"]
    return Table(caption, tables.markdown(header, lines))


def _judged(ratios: Sequence[float]) -> tuple[str, str]:
    """How many ratios are within NEAR of one, and how many below."""
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    return f"{near} of {len(ratios)}", str(sum(ratio < 1 - NEAR for ratio in ratios))


TABLES = {"bf16_over_fp16": Across(over_fp16, ("speed_fp16", NAME))}
