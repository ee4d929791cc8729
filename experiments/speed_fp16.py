"""fp16 speed on tensor cores over the sequence length: the FA-2 paper's Figs. 4 to 7."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .lab import peers, published, speed_figures, speeds, tables
from .lab.options import Bench, Options
from .lab.series import LABELS, MMA_SPLITS
from .lab.store import Row
from .lab.tables import Across, Table
from .lab.timing import ROUNDING

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
    forward_dims=(256,),
    figures=("Fig. 4", "Fig. 5", "Fig. 6", "Fig. 7"),
)


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Time, speed and error of every series and pass, checked before they are timed."""
    yield from speeds.measure(STUDY, options, bench)


def draw(rows: Sequence[Row]) -> Any:
    """TFLOP/s over N: a row of panels for each pass and head dimension, a column for each mask."""
    return speed_figures.draw(STUDY, rows)


def table(rows: Sequence[Row]) -> Table | None:
    """TFLOP/s of every pass and series, and FA-2 over torch's."""
    return speed_figures.table(STUDY, rows, "TFLOP/s, fp16.")


# Series that stand for FA-2, FA-1 and standard attention in the paper's figures.
_KINDS = {"fa2-mma": 0, "fa1-mma": 1, MMA_SPLITS: 1, "standard-mma": 2}
_METHODS = ("FlashAttention-2", "FlashAttention", "PyTorch")


def paper_figures(rows: Sequence[Row]) -> Table | None:
    """What the FA-2 paper's Figs. 4 to 7 say of the three algorithms, beside ours at each size."""
    speed = {
        (r.pass_, r.head_dim, r.causal, r.seqlen_q, r.series): r.value
        for r in rows
        if r.metric == "speed" and r.value is not None
    }
    if not speed:
        return None
    lines = []
    for item in STUDY.figures:
        about = published.lookup(paper="fa2", item=item)[0]
        gpu, pass_ = about["hardware"].split("-")[0], about["pass"]
        for d, causal in sorted({key[1:3] for key in speed}):
            theirs = speed_figures.published_speeds((item,), pass_, d, causal)
            paper = [theirs.get((name, gpu), {}) for name in _METHODS]
            here: list[dict[int, float]] = [{}, {}, {}]
            for (*place, N, series), value in speed.items():
                if place == [pass_, d, causal] and series in _KINDS:
                    kind = here[_KINDS[series]]
                    kind[N] = max(value, kind.get(N, 0.0))
            both = sorted(set.intersection(*map(set, (*paper, *here))))
            same = sum(_order(paper, N) == _order(here, N) for N in both)
            lines.append(
                [
                    *(item, gpu, pass_, str(d), tables.yes_no(causal)),
                    *(_range(x[0], x[1]) for x in (paper, here)),
                    *(_range(x[0], x[2]) for x in (paper, here)),
                    _range(here[0], paper[0]),
                    f"{same} of {len(both)}",
                ]
            )
    header = [
        *("figure", "GPU", "pass", "d", "causal"),
        *("FA-2 / FA-1, published", "ours"),
        *("FA-2 / standard, published", "ours"),
        "our FA-2 / published FA-2",
        "sizes with the published order",
    ]
    caption = (
        "Ratios of TFLOP/s, the smallest and the largest over N; of our FA-1 the faster grid at "
        "each N."
    )
    return Table(caption, tables.markdown(header, lines))


def _order(curves: Sequence[Mapping[int, float]], N: int) -> list[int]:
    """The curves from the fastest at N to the slowest."""
    return sorted(range(len(curves)), key=lambda n: -curves[n][N])


def _range(over: Mapping[int, float], under: Mapping[int, float]) -> str:
    """The smallest and the largest ratio at the sizes that both have."""
    ratios = [over[N] / under[N] for N in over if N in under]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else tables.MISSING


def errors(rows: Sequence[Row]) -> Table | None:
    """The largest error of each series in 16 bits, and how far it is beyond torch's FA-2."""
    lines = []
    for dtype in ("float16", "bfloat16"):
        found = worst_errors(r for r in rows if r.dtype == dtype)
        for (pass_, series), (largest, excess) in sorted(found.items()):
            more = tables.MISSING if excess is None else f"{excess:.2f}"
            lines.append([speeds.DTYPES[dtype], pass_, LABELS[series], f"{largest:.2e}", more])
    if not lines:
        return None
    header = ["dtype", "pass", "series", "largest error", "largest excess over torch FA-2"]
    caption = (
        "Relative to float64 of the same inputs, over all problems checked; the excess is in "
        "roundings of the result."
    )
    return Table(caption, tables.markdown(header, lines))


def worst_errors(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """(pass, series) -> the largest error, and the largest excess over torch's FA-2.

    The excess is that at one problem, in roundings of the dtype; None where torch's FA-2 was not
    measured.
    """
    found: dict[tuple[str, str], dict[tuple, float]] = {}
    roundings = {}
    for row in rows:
        if row.metric == "error" and row.value is not None:
            place = (row.dtype, *tables.sizes(row), row.batch)
            found.setdefault((row.pass_, row.series), {})[place] = row.value
            roundings[place] = ROUNDING[row.dtype]
    worst: dict[tuple[str, str], tuple[float, float | None]] = {}
    for (pass_, series), values in found.items():
        theirs = found.get((pass_, peers.FLASH), {})
        excess = [(values[at] - theirs[at]) / roundings[at] for at in values if at in theirs]
        worst[pass_, series] = max(values.values()), max(excess) if excess else None
    return worst


TABLES = {
    "fa2_figures": paper_figures,
    "errors": Across(errors, ("speed_fp16", "speed_bf16")),
}
