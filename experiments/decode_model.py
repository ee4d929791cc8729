"""Times decoding with a model of CodeLlama-34B's shape, with and without key splits.

The experiment repeats the end-to-end measurement of the Flash-Decoding article: batch size 1, and
512 to 64k keys. The weights are random, in bf16. They take 67 GB, so that one GPU needs at least 96
GB of memory. Series are our FA-2 with and without key splits, torch's FlashAttention-2 and cuDNN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fa_numba.problem import Problem

from .beside import llama
from .beside.llama import Sizes
from .lab.measure import peers
from .lab.measure.series import LABELS, columns
from .lab.measure.timing import Timing, attempt, number
from .lab.record import Bench, Options, Row, values
from .lab.show import style, tables

NAME = "decode_model"
NEEDS = ("GPU", "torch")
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    f"a step of decoding of the complete model, batch 1; {llama.STEPS} steps after {llama.WARMUP}; "
    "each step is a replay of a CUDA graph, by the host's clock, synchronised after each step"
)

SPLITS = "fa2-auto-splits"
SERIES = ("fa2-auto", SPLITS, peers.FLASH, peers.CUDNN)
CODELLAMA = Sizes(48, 8192, 64, 8, 22016, 32000)
QUICK = Sizes(2, 256, 4, 2, 512, 512)
KEYS = tuple(1 << n for n in range(9, 17))
QUICK_KEYS = (512, 1024)
# The article says that decoding is up to 8 times as fast with key splits.
SAID = 8.0


def problem(sizes: Sizes, keys: int) -> Problem:
    """Return the attention problem of a layer: one query row and `keys` keys."""
    return Problem(1, sizes.heads, sizes.heads_k, 1, keys, sizes.head_dim, dtype="bfloat16")


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the time of a step of decoding, and tokens per second, for each length and series."""
    sizes, lengths = (QUICK, QUICK_KEYS) if options.quick else (CODELLAMA, KEYS)
    model, failure = attempt(llama.Decoder, sizes, max(lengths))
    work = [(keys, series) for keys in lengths for series in SERIES]
    for keys, series in bench.each(work, "decoding"):
        yield rows_of(model, failure, sizes, keys, series, bench.machine)


def rows_of(
    model: Any, failure: str, sizes: Sizes, keys: int, series: str, machine: str | None
) -> list[Row]:
    """Return the rows of one length and series. `failure` says why there is no model."""
    samples = None
    if not failure:
        samples, failure = attempt(model.time, keys, series)
    common = columns(NAME, series, problem(sizes, keys), machine, note=failure)
    if samples is None:
        return [Row(metric="time", unit="ms", value=None, **common)]
    timing = Timing.of(samples)
    speed = Timing(1e3 / timing.median, 1e3 / timing.p80, 1e3 / timing.p20, timing.n)
    return [
        Row(metric="time", unit="ms", **number(timing), **common),
        Row(metric="tokens", unit="1/s", **number(speed), **common),
    ]


def speeds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return {series: {number of keys: tokens per second}}."""
    found: dict[str, dict[int, float]] = {}
    for (series, keys), value in values(rows, "series", "seqlen_k", metric="tokens").items():
        found.setdefault(series, {})[keys] = value
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Draw tokens per second over the number of keys. Return None without rows."""
    found = speeds(rows)
    if not found:
        return None
    figure, ((ax,),) = style.new(1, 1, 4.4)
    for series in (s for s in SERIES if s in found):
        ls = "--" if series in (peers.FLASH, peers.CUDNN) else "-"
        style.line(ax, dict(sorted(found[series].items())), series, label=LABELS[series], ls=ls)
    style.sizes(ax, sorted({keys for of in found.values() for keys in of}), "keys N")
    ax.set(ylabel="tokens per second", ylim=(0, None))
    gains = gain(found, SERIES[0])
    message = "Decoding with a model of CodeLlama-34B's shape"
    if gains:
        message = f"With key splits, decoding is up to {max(gains.values()):.1f} times as fast"
    style.legend(figure, ax.get_legend_handles_labels()[0], message)
    return figure


def gain(found: dict[str, dict[int, float]], over: str) -> dict[int, float]:
    """Return {number of keys: speed with key splits / speed of the series `over`}."""
    splits, other = found.get(SPLITS, {}), found.get(over, {})
    return {keys: splits[keys] / other[keys] for keys in sorted(splits) if keys in other}


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of tokens per second, or None without rows."""
    found = speeds(rows)
    gains = {over: gain(found, over) for over in (SERIES[0], peers.FLASH)}
    lines = []
    for keys in sorted({keys for of in found.values() for keys in of}):
        cells = [tables.number(found.get(series, {}), keys, ".1f") for series in SERIES]
        cells += [tables.number(of, keys, ".2f") for of in gains.values()]
        lines.append([style.short(keys), *cells])
    header = ["N", *(LABELS[series] for series in SERIES)]
    header += ["with / without key splits", "key splits / torch's FA-2"]
    caption = (
        "The table of decoding contains tokens per second of a complete model of CodeLlama-34B's "
        "shape with random weights in bf16: 48 layers, hidden dimension 8192, 64 query heads on 8 "
        "K/V heads, batch size 1. The Flash-Decoding article says that decoding is up to 8 times "
        "as fast with key splits, on an A100."
    )
    return tables.of(caption, header, lines)
