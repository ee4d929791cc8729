"""Finds from which sequence length FlashAttention is faster than standard attention (claim C9).

The figure shows two ratios: the time of standard attention over the time of each loop order, and
the time of torch's unfused attention over the time of torch's fused kernel. N takes the powers of
two from 64 to 4096, and the lengths half-way between them. The calls are in fp16 and fp32, with few
and with many heads. The bytes are from the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import calls, peers, variants
from .lab.measure.series import LABELS, columns, plan
from .lab.measure.speeds import DTYPES, PASSES
from .lab.measure.timing import FEWEST
from .lab.record import MODEL, Bench, Options, Row, nested
from .lab.show import style, tables

NAME = "crossover"
TAKES: tuple[str, ...] = ()
SECONDS = 0.05
PROTOCOL = f"repeats cut to {SECONDS:g} s of calls, {FEWEST} at least"

# Every power of two, and the length half-way to the next power of two.
SEQLENS = tuple(sorted([64 << n for n in range(7)] + [96 << n for n in range(6)]))
QUICK_SEQLENS = (64, 256, 1024)
PASS_NAMES = ("fwd", "fwd+bwd")
# (dtype, head dimension, batch, heads), with few heads or with enough heads to fill a large GPU.
CASES: tuple[tuple[str, int, int, int], ...] = (
    ("float16", 64, 16, 8),
    ("float16", 64, 1, 8),
    ("float16", 128, 16, 8),
    ("float32", 64, 16, 8),
    ("float32", 64, 1, 8),
)
# Fused series -> the unfused series with which it is compared.
OVER = {
    "float16": {"fa1-mma": "standard-mma", "fa2-mma": "standard-mma", peers.FLASH: peers.UNFUSED},
    "float32": {
        "fa1-simt": "standard-simt",
        "fa2-simt": "standard-simt",
        peers.EFFICIENT: peers.UNFUSED,
    },
}
# The claim says that the gain begins between these sequence lengths.
CLAIMED = (1024, 2048)
FEW = 64  # With fewer heads (batch x heads), a part of a large GPU is idle.


def series_of(dtype: str) -> tuple[str, ...]:
    """Return the series for a dtype: unfused attention first, then the fused series."""
    over = OVER[dtype]
    return tuple(dict.fromkeys((*over.values(), *over)))


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield bytes by closed forms over the sequence length; on a GPU also times."""
    problems = [
        Problem(batch, heads, heads, N, N, d, dtype=dtype)
        for dtype, d, batch, heads in (CASES[::3] if options.quick else CASES)
        for N in (QUICK_SEQLENS if options.quick else SEQLENS)
    ]
    with device.using("emulator"):  # so that the tiles are the same on every machine
        for problem in bench.track(problems, "closed forms"):
            yield from _model(problem)
    if bench.machine is None:
        return
    peers.say_missing(bench.say)
    work = [(problem, series_of(problem.dtype)) for problem in problems]
    yield from variants.plain_times(NAME, work, PASS_NAMES, bench, SECONDS)


def _model(problem: Problem) -> Iterator[Row]:
    for series in series_of(problem.dtype):
        if calls.theirs(series):
            continue
        forward = plan(series, problem).accesses.bytes
        both = plan(series, problem, return_lse=True).accesses.bytes
        both += plan(series, problem, passes="bwd").accesses.bytes
        for pass_, value in zip(PASS_NAMES, (forward, both), strict=True):
            common = columns(NAME, series, problem, MODEL, pass_=pass_)
            yield Row(metric="traffic", unit="bytes", value=value, **common)


def sweep_of(row: Row) -> str:
    """Return the name of a row's sweep: the part of the experiment in which one quantity varies.

    The sequence length varies in both sweeps. The sweeps differ in the number of heads: few or
    many.
    """
    return "seqlen, few heads" if row.batch * row.heads_q < FEW else "seqlen, many heads"


# (dtype, head dimension, batch x heads, pass)
Case = tuple[str, int, int, str]
Curves = dict[str, dict[int, float]]


def gains(rows: Sequence[Row], source: str = "measured") -> dict[Case, Curves]:
    """Return how much faster fused attention is, as {case: {fused series: {N: ratio}}}.

    A ratio is the time of unfused attention (see OVER) divided by the time of the fused series.
    With the source "model", bytes are divided instead of times. A case is (dtype, head dimension,
    batch x heads, pass).
    """
    metric = "traffic" if source == "model" else "time"

    def case_of(row: Row) -> Case:
        return row.dtype, row.head_dim, row.batch * row.heads_q, row.pass_

    found: dict[Case, Curves] = {}
    values = nested(rows, case_of, "series", "seqlen_q", source=source, metric=metric)
    for case, series in values.items():
        for flash, over in OVER[case[0]].items():
            slow = series.get(over, {})
            times = sorted(series.get(flash, {}).items())
            if curve := {N: slow[N] / t for N, t in times if N in slow}:
                found.setdefault(case, {})[flash] = curve
    return found


def crossing(gain: Mapping[int, float]) -> int | None:
    """Return the shortest N from which the gain is above 1 at every measured N; None without one.

    `gain` maps N to a ratio.
    """
    last = max((N for N in gain if gain[N] <= 1), default=0)
    return min((N for N in gain if N > last), default=None)


def in_words(gain: Mapping[int, float] | None) -> str:
    """Return the text of a table cell that says from which N the gain is above 1.

    `gain` maps N to a ratio.

    | ratios | text |
    |---|---|
    | above 1 at every N | like "all, from 64" |
    | not above 1 at the longest N | like "none to 4096" |
    | other ratios | the N that `crossing` returns |
    | no ratios | a dash |
    """
    if not gain:
        return tables.MISSING
    won = crossing(gain)
    if won is None:
        return f"none to {max(gain)}"
    return f"all, from {won}" if won == min(gain) else str(won)


BAND = "#F3EBD8"
_NAMES = {
    **{
        f"{series}-{unit}": f"{LABELS[f'{series}-{unit}']} over standard attention"
        for series in ("fa1", "fa2")
        for unit in ("simt", "mma")
    },
    peers.FLASH: f"{LABELS[peers.FLASH]} over its unfused attention (fp16)",
    peers.EFFICIENT: f"{LABELS[peers.EFFICIENT]} over its unfused one (fp32)",
}


def _look(heads: int) -> dict[str, Any]:
    if heads < FEW:
        return {"ls": "--", "lw": 1.2, "ms": 5, "mfc": "white"}
    return {"ls": "-", "lw": 1.8, "ms": 5}


def draw(rows: Sequence[Row]) -> Any:
    """Draw the ratios over the sequence length. Return None without times."""
    timed = gains(rows)
    if not timed:
        return None
    dtypes = [dtype for dtype in OVER if any(case[0] == dtype for case in timed)]
    d = min(case[1] for case in timed)
    figure, axes = style.new(len(dtypes), 2, 1.3 + 3.2 * len(dtypes), sharey="row", sharex=True)
    for dtype, across in zip(dtypes, axes, strict=True):
        for pass_, ax in zip(PASS_NAMES, across, strict=True):
            mine = [case for case in timed if (case[0], case[1], case[3]) == (dtype, d, pass_)]
            for case in sorted(mine, key=lambda case: -case[2]):
                for series, gain in timed[case].items():
                    style.line(ax, gain, series, label=_NAMES[series], **_look(case[2]))
            ax.axhline(1, color="#555555", lw=0.9, zorder=1)
            ax.axvspan(*CLAIMED, color=BAND, zorder=0)
            style.log(ax.yaxis, 2)
            ax.set_title(f"{PASSES[pass_]}, {DTYPES[dtype]}, d={d}")
        across[0].set_ylabel("speed over unfused (ratio)")
    shown = [curves for case, curves in timed.items() if case[1] == d]
    every = [(series, gain) for curves in shown for series, gain in curves.items()]
    lengths = sorted({N for _, gain in every for N in gain})
    for ax in axes[-1]:
        style.sizes(
            ax, [N for N in lengths if N & (N - 1) == 0] or lengths, "sequence length N (tokens)"
        )
    ahead = [x > 1 for series, gain in every if series.startswith("fa2") for x in gain.values()]
    low, high = (style.short(N) for N in CLAIMED)
    handles = [
        *style.handles(axes).values(),
        *(style.key(f"batch x heads = {heads}", marker="o", **_look(heads))
          for heads in sorted({case[2] for case in timed}, reverse=True)),
        style.patch(f"claimed: the gain begins at N={low} to {high}", color=BAND),
    ]  # fmt: skip
    points = f"all {len(ahead)}" if all(ahead) else f"{sum(ahead)} of {len(ahead)}"
    message = f"FA-2 is faster than standard attention at {points} points drawn"
    style.legend(figure, handles, message, ncols=2)
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of sequence lengths from which fused attention is faster."""
    timed, moved = gains(rows), gains(rows, "model")
    lines = []
    for case in sorted({**moved, **timed}, key=lambda c: (c[0], c[1], -c[2], c[3])):
        dtype, d, heads, pass_ = case
        curves, bytes_ = timed.get(case, {}), moved.get(case, {})
        flash = list(OVER[dtype])
        cells = [in_words(curves.get(series)) for series in flash]
        second = flash[1]
        cells += [tables.number(curves.get(second, {}), N, ".2f") for N in (2 * d, 1024, 4096)]
        cells += [in_words(bytes_.get(second)), tables.number(bytes_.get(second, {}), 2 * d, ".2f")]
        lines.append([DTYPES[dtype], str(d), str(heads), pass_, *cells])
    header = ["dtype", "d", "batch x heads", "pass", "FA-1 wins from N", "FA-2 wins from N"]
    header += ["torch's fused kernel wins from N", "time, standard / FA-2, N=2d"]
    header += ["time, standard / FA-2, N=1024", "time, standard / FA-2, N=4096"]
    header += ["FA-2 accesses fewer bytes from N", "bytes, standard / FA-2, N=2d"]
    caption = (
        "A column *X wins from N* contains the sequence length from which kernel X takes less "
        "time than standard attention, at every measured length up to 4096. In fp16, *torch's "
        "fused kernel* is FlashAttention-2, and in fp32, *torch's fused kernel* is torch's "
        "memory-efficient attention. The table of crossover lengths compares torch's fused kernel "
        "with torch's unfused attention, and our kernels with our standard attention. The columns "
        "*bytes* in the table of crossover lengths are computed by closed forms (the access "
        "model)."
    )
    return tables.of(caption, header, lines)
