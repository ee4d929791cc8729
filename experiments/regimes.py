"""Measures in which situations FlashAttention is worth it: prefill, decoding and training.

A lesson lists regimes of attention: a long prefill, a short prefill, decoding and training. Each
regime is one problem here. Standard attention, both loop orders and kernels of other libraries are
timed. The hardware counters give the DRAM bytes of our kernels. The time, the FLOPs and the bytes
say whether computing, DRAM or neither limits the speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa_numba import io_model
from fa_numba.problem import Problem

from .lab.measure import bandwidth, calls, peers, variants
from .lab.measure.series import (
    HOPPER,
    HOPPER_FA1,
    LABELS,
    columns,
    query_splits,
    row_fields,
)
from .lab.measure.timing import SECONDS, attempt, number
from .lab.measure.variants import Variant
from .lab.record import Bench, Options, Row, select, values
from .lab.show import style, tables

NAME = "regimes"
NEEDS = ("GPU",)
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    "read: what a kernel reads of 4 GiB; its row has sizes of 1; the bytes of fwd+bwd are those of "
    "fwd and of bwd"
)

HEADS, SHARED, DIM = 16, 8, 128


def _square(batch: int, N: int) -> Problem:
    return Problem(batch, HEADS, HEADS, N, N, DIM, dtype="float16", causal=True)


def _step(batch: int, keys: int) -> Problem:
    return Problem(batch, 4 * SHARED, SHARED, 1, keys, DIM, dtype="float16")


# Name of a regime -> problem and pass. The last two names begin with "decoding".
REGIMES: dict[str, tuple[Problem, str]] = {
    "long prefill": (_square(1, 16384), "fwd"),
    "short prefill": (_square(1, 256), "fwd"),
    "training": (_square(8, 2048), "fwd+bwd"),
    "decoding, long cache": (_step(1, 65536), "fwd"),
    "decoding, short cache": (_step(1, 1024), "fwd"),
}
QUICK = ("short prefill", "decoding, short cache")
OTHERS = (peers.UNFUSED, peers.FLASH, peers.CUDNN, peers.FA4)
READ, READ_BYTES, READ_REPEATS = "read", 2**32, 10
# If no share of a limit is at least this large, neither computing nor DRAM limits the speed.
LEAST = 1 / 3


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield the limits of the GPU, the times of all calls, and the bytes of our calls."""
    shown = [REGIMES[name] for name in (QUICK if options.quick else REGIMES)]
    peers.say_missing(bench.say)
    if peers.available():
        yield from bandwidth.matmul_peak(NAME, "float16", bench.machine)
    yield _read(options, bench.machine)
    ours = [(problem, list(variants_of(problem, pass_, bench))) for problem, pass_ in shown]
    others = {problem: [Variant(s, passes=pass_) for s in peers.here(OTHERS)]
              for problem, pass_ in shown}  # fmt: skip
    timed = [(problem, [*mine, *others[problem]]) for problem, mine in ours]
    yield from variants.times(NAME, timed, bench, SECONDS)
    counted = []
    for problem, pass_ in shown:
        parts = pass_.split("+")
        counted += [(problem, list(variants_of(problem, part, bench))) for part in parts]
    yield from variants.hardware(NAME, counted, bench)


def _read(options: Options, machine: str | None) -> Row:
    nbytes = READ_BYTES // (8 if options.quick else 1)
    speed, why = attempt(
        lambda: bandwidth.measure_global(bandwidth.ones(nbytes), nbytes, READ_REPEATS)
    )
    one = Problem(1, 1, 1, 1, 1, DIM, dtype="float16")
    return Row(metric="bandwidth", unit="TB/s", **number(speed),
               **columns(NAME, READ, one, machine, note=why))  # fmt: skip


def variants_of(problem: Problem, pass_: str, bench: Bench) -> Iterator[Variant]:
    """Yield our calls of a problem in a pass.

    FA-1 has one thread block per head and, if it is better, query splits. With one row of Q, FA-2
    also has key splits, and FA-1 runs on mma only.
    """
    hopper = bench.describe.get("compute_capability", "9.0") == "9.0"
    step = problem.seqlen_q == 1
    yield Variant("standard-mma", passes=pass_)
    for fa1 in ("fa1-mma", *([HOPPER_FA1] if hopper and not step else [])):
        yield Variant(fa1, passes=pass_)
        if step:
            continue
        of = "fwd" if pass_ == "fwd" else "bwd"
        multiprocessors = bench.describe["multiprocessors"]
        splits, why = attempt(query_splits, problem, multiprocessors, fa1, of)
        if not why and splits > 1:
            yield variants.splits_of(fa1, splits, pass_)
    for fa2 in ("fa2-mma", *([HOPPER] if hopper else [])):
        yield Variant(fa2, passes=pass_)
        if step:
            yield Variant(f"{fa2}-splits", {"kv_splits": "auto"}, passes=pass_)


@dataclass(frozen=True)
class Regime:
    """What was measured in a regime.

    Parameters
    ----------
    ms : mapping
        Milliseconds of the fastest call: maps "standard", "FA-1", "FA-2" and "others" to (series,
        time). Algorithms without a time are missing.
    flops : float
        FLOPs of the problem in the pass.
    bytes : float or None
        DRAM bytes of the fastest call of FA-2. None if they were not counted.
    peak, read : float or None
        The GPU's speed of multiplying matrices in TFLOP/s, and its bandwidth of reading in TB/s.
    """

    ms: Mapping[str, tuple[str, float]]
    flops: float
    bytes: float | None
    peak: float | None
    read: float | None

    @property
    def shares(self) -> dict[str, float]:
        """Return FA-2's shares of two limits: {"computing": share, "DRAM": share}."""
        found, time = {}, self.ms["FA-2"][1]
        if self.peak:
            found["computing"] = self.flops / time / 1e9 / self.peak
        if self.read and self.bytes:
            found["DRAM"] = self.bytes / time / 1e9 / self.read
        return found

    @property
    def limit(self) -> str:
        """Return what limits FA-2: "computing", "DRAM", or "latency" if both shares are small."""
        if len(self.shares) < 2:
            return tables.MISSING
        name = max(self.shares, key=lambda limit: self.shares[limit])
        return name if self.shares[name] >= LEAST else "latency"


ALGORITHMS = {"standard": "standard", "fa1": "FA-1", "fa2": "FA-2"}


def found(rows: Sequence[Row]) -> dict[str, Regime]:
    """Return what was measured in each regime, by the name of the regime."""
    peak = values(rows, "series", metric="speed").get(peers.MATMUL)
    read = values(rows, "series", metric="bandwidth").get(READ)
    result = {}
    for name, (problem, pass_) in REGIMES.items():
        of: dict[str, Any] = row_fields(problem)
        ms: dict[str, tuple[str, float]] = {}
        for row in select(rows, metric="time", pass_=pass_, **of):
            kind = "others" if calls.theirs(row.series) else ALGORITHMS[row.series.split("-")[0]]
            if not row.failed and row.number < ms.get(kind, ("", float("inf")))[1]:
                ms[kind] = row.series, row.number
        if "FA-2" not in ms:
            continue
        moved = [
            row.number
            for row in select(rows, source="dram", metric="traffic", series=ms["FA-2"][0], **of)
            if not row.failed and row.pass_ in pass_.split("+")
        ]
        complete = len(moved) == len(pass_.split("+"))
        nbytes = sum(moved) if complete else None
        result[name] = Regime(ms, io_model.flops(problem, pass_), nbytes, peak, read)
    return result


def shape(problem: Problem) -> str:
    """Return the sizes of a problem as text."""
    if problem.seqlen_q == 1:
        heads = f"{problem.heads_q} heads on {problem.heads_k}"
        return f"batch {problem.batch}, {heads}, 1 row, {problem.seqlen_k} keys"
    return f"batch {problem.batch}, {problem.heads_q} heads, N={problem.seqlen_q}, causal"


def draw(rows: Sequence[Row]) -> Any:
    """Draw the speed of each algorithm / the speed of standard attention. None without rows."""
    shown = {name: regime for name, regime in found(rows).items() if "standard" in regime.ms}
    if not shown:
        return None
    figure, ((ax,),) = style.new(1, 1, 1.4 + 0.75 * len(shown))
    looks = {"FA-1": "fa1-mma", "FA-2": "fa2-mma", "others": "torch-cudnn"}
    labels = {"others": "fastest other library"}
    for at, regime in enumerate(shown.values()):
        for n, (kind, like) in enumerate(looks.items()):
            if kind in regime.ms:
                ratio = regime.ms["standard"][1] / regime.ms[kind][1]
                label = labels.get(kind, kind) if at == 0 else None
                place = at + 0.26 * (n - 1)
                ax.barh(place, ratio, height=0.24, color=style.COLOURS[like], label=label)
                ax.text(ratio, place, f" {ratio:.1f}", va="center", fontsize=9)
    names = [f"{name} ({regime.limit})" for name, regime in shown.items()]
    ax.set_yticks(range(len(shown)), names)
    ax.invert_yaxis()
    style.log(ax.xaxis)
    ax.axvline(1.0, color="#555555", lw=1.0)
    ax.set(xlabel="speed / our standard attention's speed")
    most = max(regime.ms["standard"][1] / regime.ms["FA-2"][1] for regime in shown.values())
    message = f"FA-2 is up to {most:.1f} times as fast as standard attention"
    style.legend(figure, list(style.handles([ax]).values()), message, 3, ABOUT)
    return figure


ABOUT = "In brackets: what limits FA-2. The fastest kernel of each kind counts."


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of regimes, or None without rows."""
    lines = []
    for name, regime in found(rows).items():
        series, time = regime.ms["FA-2"]
        over = [
            f"{regime.ms[kind][1] / time:.2f}" if kind in regime.ms else tables.MISSING
            for kind in ("FA-1", "standard", "others")
        ]
        percent = {limit: f"{100 * share:.0f} %" for limit, share in regime.shares.items()}
        intensity = speed = tables.MISSING
        if regime.bytes:
            per_byte = regime.flops / regime.bytes
            intensity = f"{per_byte:.0f}" if per_byte >= 100 else f"{per_byte:.2g}"
            speed = f"{regime.bytes / time / 1e9:.2f}"
        lines.append(
            [
                *(name, shape(REGIMES[name][0]), REGIMES[name][1], LABELS[series], f"{time:.3g}"),
                *(intensity, f"{regime.flops / time / 1e9:.1f}"),
                *(percent.get("computing", tables.MISSING), speed),
                *(percent.get("DRAM", tables.MISSING), regime.limit, *over),
            ]
        )
    if not lines:
        return None
    header = ["regime", "shape", "pass", "fastest FA-2", "time, ms", "FLOP / byte of DRAM"]
    header += ["TFLOP/s", "share of torch's matrix product", "TB/s of DRAM", "share of reading"]
    header += ["limited by", "FA-1's time / FA-2's", "standard's time / FA-2's"]
    header += ["fastest other library's time / FA-2's"]
    caption = (
        f"The table of regimes is about attention in fp16 with d={DIM}. For FA-1, FA-2, standard "
        "attention and other libraries, the fastest measured call counts. DRAM bytes were read by "
        "hardware counters. *Limited by* names the larger of the two shares. If both shares are "
        "below 33 %, it says *latency*: the call is too short or has too few thread blocks to "
        "reach a limit."
    )
    return tables.of(caption, header, lines)
