"""Measures the speed in bf16 on tensor cores and compares it with fp16.

Both loop orders run in FA-2's setting, on mma and wgmma, in all passes. FA-1 with query splits,
standard attention and torch's kernels are measured too.
"""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from .lab.measure import peers, speeds
from .lab.measure.series import HALF, LABELS
from .lab.record import FIGURES as RECORDED
from .lab.record import Row, Store, select
from .lab.show import speed_figures, style, tables
from .lab.show.report import gpu
from .lab.show.tables import Across

NAME = "speed_bf16"
NEEDS = ("GPU", "torch")  # NumPy has no bfloat16 arrays to put on a GPU
ALSO_DRAWN = ("speed_fp16",)  # experiments whose rows the figure contains, too
STUDY = speeds.Study(
    NAME,
    dtype="bfloat16",
    passes=("fwd", "bwd", "fwd+bwd"),
    ours=HALF,
    theirs=(peers.FLASH, peers.CUDNN, peers.FA4),
)

measure = partial(speeds.measure, STUDY)
peer_calls = partial(speeds.peer_calls, STUDY)


def draw(rows: Sequence[Row], half: Sequence[Row] | None = None) -> Any:
    """Draw the ratio of the speed in bf16 to the speed in fp16 for each series.

    `half` are the rows in fp16. Default: the recorded rows. Return None without ratios.
    """
    store = Store(RECORDED)
    half = store.read("speed_fp16", gpu(store, "speed_fp16")) if half is None else half
    found = ratios([*rows, *half])
    if not found:
        return None
    shown = [series for series in reversed(STUDY.series) if series in found]
    passes = [p for p in STUDY.passes if any(p in of for of in found.values())]
    figure, (axes,) = style.new(1, len(passes), 1.6 + 0.36 * len(shown), sharey=True, sharex=True)
    for pass_, ax in zip(passes, axes, strict=True):
        for at, series in enumerate(shown):
            points = [(x, at) for x in found[series].get(pass_, ())]
            style.line(ax, points, series, marker="o", ls="", ms=5, alpha=0.6)
        ax.axvline(1, color="#555555", lw=1, zorder=1)
        ax.set(title=speeds.PASSES[pass_], xlabel="speed, bf16 / fp16 (ratio)")
    place, far, spread = _farthest([*rows, *half])
    if spread and place[0] in shown and place[1] in passes:
        _, pass_, N, d, causal, _ = place
        said = f"N={N}, d={d}{', causal' if causal else ''}:\nfp16 ran at {spread} TFLOP/s"
        look: dict[str, Any] = {"xytext": (-7, 0), "va": "center"}
        look |= {"textcoords": "offset points", "ha": "right" if far > 1 else "left"}
        axes[passes.index(pass_)].annotate(said, (far, shown.index(place[0])), fontsize=8.5, **look)
    axes[0].set_yticks(range(len(shown)), [LABELS[series] for series in shown])
    every = [x for of in found.values() for of_pass in of.values() for x in of_pass]
    figure.suptitle(
        f"In the median bf16 is {statistics.median(every):.2f} times as fast as fp16\n"
        "a mark: one sequence length, head dimension and mask",
        fontsize=12,
    )
    return figure


def _farthest(rows: Sequence[Row]) -> tuple[Any, float, str]:
    """Find the call whose speed in bf16 differs most from the speed in fp16. Return three values.

    - the call, as a key of `_at`,
    - the ratio: the speed in bf16 / the speed in fp16,
    - a text about the repeated measurements in fp16: their range of speeds from p20 to p80, in
      TFLOP/s, such as "300 to 320".

    The text is for ratios that the spread of the measurements explains: the speed in bf16 is in
    this range, or outside of it by at most the share NEAR. For other ratios, and if p20 and p80 are
    equal, the text is empty.
    """
    of = _at(rows)
    place = max(of, key=lambda at: abs(math.log(of[at][0].number / of[at][1].number)))
    brain, half = of[place]
    low, high = half.p20 or half.number, half.p80 or half.number
    reached = low / (1 + NEAR) <= brain.number <= high * (1 + NEAR) and high > low
    return place, brain.number / half.number, f"{low:.0f} to {high:.0f}" if reached else ""


table = partial(
    speed_figures.table,
    STUDY,
    caption="The table of bf16 speeds contains TFLOP/s in bf16 at the longest measured N.",
)


# Speeds in bf16 and fp16 count as equal if they differ by at most this share.
NEAR = 0.03


def _at(rows: Sequence[Row]) -> dict[Any, tuple[Row, Row]]:
    """Return pairs (row in bf16, row in fp16) by (series, pass, N, d, causal, batch)."""
    at = attrgetter("series", "pass_", "seqlen_q", "head_dim", "causal", "batch")
    brain, half = (
        {at(r): r for r in select(rows, metric="speed", dtype=dtype, series=STUDY.series)}
        for dtype in ("bfloat16", "float16")
    )
    return {place: (row, half[place]) for place, row in brain.items() if place in half}


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Return the ratios of the speed in bf16 to the speed in fp16, as {series: {pass: ratios}}.

    There is one ratio for each problem that was measured in both dtypes.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for (series, pass_, *_), (brain, half) in _at(rows).items():
        found.setdefault(series, {}).setdefault(pass_, []).append(brain.number / half.number)
    return found


def over_fp16(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the ratios bf16 / fp16 by series and pass."""
    over = ratios(rows)
    if not over:
        return None
    lines = []
    for series in (s for s in STUDY.series if s in over):
        found = over[series]
        every = [x for of_pass in found.values() for x in of_pass]
        cells = [tables.spread(found.get(p, ())) for p in STUDY.passes]
        lines.append([LABELS[series], *cells, *_judged(every)])
    ours = [x for series in STUDY.ours for of in over.get(series, {}).values() for x in of]
    near, slower = _judged(ours)
    caption = (
        "The table of bf16 and fp16 contains the ratio *speed in bf16 / speed in fp16*, at equal "
        "sequence length, head dimension and mask. Each cell of the table of bf16 and fp16 "
        f"contains the smallest, the median and the largest ratio. For our kernels, {near} ratios "
        f"*speed in bf16 / speed in fp16* are within {NEAR:.0%} of 1. In {slower} of the "
        f"{len(ours)} ratios *speed in bf16 / speed in fp16* of our kernels, bf16 is slower by "
        f"more than {NEAR:.0%}."
    )
    header = ["series", *STUDY.passes, f"ratios within {NEAR:.0%} of 1"]
    header.append(f"ratios where bf16 is slower by more than {NEAR:.0%}")
    return tables.of(caption, header, lines)


def _judged(over: Sequence[float]) -> tuple[str, str]:
    near = sum(abs(ratio - 1) <= NEAR for ratio in over)
    return f"{near} of {len(over)}", str(sum(ratio < 1 - NEAR for ratio in over))


TABLES = {"bf16_over_fp16": Across(over_fp16, ("speed_fp16", NAME))}
