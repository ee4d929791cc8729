"""What each measure of the tensor-core kernels gains, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fa_numba
from fa_numba.problem import Problem
from fa_numba.tiling import MEASURES

from .lab import peers, tables, variants
from .lab.options import Bench, Options
from .lab.series import plan, row_fields
from .lab.store import Row
from .lab.tables import Table
from .lab.timing import Gate, attempt, time_call, timing_rows
from .lab.workloads import HEAD_DIMS, Inputs, fa2_setting

NAME = "ladder"
TITLE = "what each measure of the tensor-core kernels gains"
DESCRIPTION = (
    "FA-2 forward on tensor cores from a plain kernel in steps (padding, a swizzle in its place, "
    "prefetching, Q in registers, the scale in the exponent, wide stores, 32 rows a warp, two "
    "stages of K and V, measured tiles), and FA-1 with a tile's rows or its keys split over the "
    "warps; FA-2's setting at N=4096, fp16: time, instructions, bank conflicts, sectors from L2, "
    "and torch's FA-2 beside."
)
NEEDS_GPU = True

SEQLEN, QUICK_SEQLEN = 4096, 512
BASE = "fa2-mma"
PEER = "torch-fa2"


@dataclass(frozen=True)
class Step:
    """A rung: its series, what the figure calls it, and the gain that was predicted before the
    first run, over the step before it.

    ``kept`` are the measures that its kernel has, with ``threads`` in a block of TILES and
    ``stages`` of K and V; None for all measures and the plan's tiles.
    """

    series: str
    label: str
    predicted: float | None = None
    kept: tuple[str, ...] | None = None
    threads: int | None = None
    stages: int = 1

    @property
    def tiles(self) -> fa_numba.Tiles:
        return fa_numba.Tiles(*TILES, self.threads, self.stages)


# Br, Bc of the steps before the plan's own.
TILES = (128, 64)
_ORDER = tuple(MEASURES)
LADDER = (
    Step(f"{BASE}-plain", "plain", None, (), 256),
    Step(f"{BASE}-padding", "+ rows padded against bank conflicts", 2.0, _ORDER[:1], 256),
    Step(f"{BASE}-swizzle", "+ rows swizzled, not padded", 1.03, _ORDER[:2], 256),
    Step(f"{BASE}-prefetch", "+ tiles prefetched", 1.15, _ORDER[:3], 256),
    Step(f"{BASE}-q-registers", "+ Q in registers", 1.05, _ORDER[:4], 256),
    Step(f"{BASE}-folded-scale", "+ scale in the exponent", 1.05, _ORDER[:5], 256),
    Step(f"{BASE}-wide-stores", "+ O in 16-byte stores", 1.01, _ORDER, 256),
    Step(f"{BASE}-32-rows", "+ 32 rows a warp", 1.25, _ORDER, 128),
    Step(BASE, "+ tiles of the plan", 1.04),
)
# Beside the step of 32 rows, over which its gain is.
TWO_STAGES = replace(
    LADDER[-2],
    series=f"{BASE}-two-stages",
    label="32 rows a warp, two stages of K and V",
    predicted=1.04,
    stages=2,
)
STEPS = (*LADDER, TWO_STAGES)
# FA-1 at the tiles of its split keys, each warp with keys or with rows of its own, and with rows at
# the plan's tiles.
PARTITIONS = {
    "fa1-mma-keys": "FA-1, keys over the warps",
    "fa1-mma-rows": "FA-1, rows over the warps",
    "fa1-mma": "FA-1, rows, tiles of the plan",
}
PREDICTED_PARTITION = 1.15
LABELS = {step.series: step.label for step in STEPS} | PARTITIONS | {PEER: "torch FA-2"}
PROFILED = {
    "instructions": "smsp__inst_executed.sum",
    # wavefronts of shared memory beyond those that the requests need
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "sectors": "l1tex__m_xbar2l1tex_read_sectors.sum",  # of 32 bytes, read from L2
}


def configurations(problem: Problem) -> list[variants.Variant]:
    """The steps, and FA-1 with both partitions, in the order of LABELS."""
    found = []
    own = plan(BASE, problem).tiles
    for step in STEPS:
        options: dict[str, Any] = {}
        if step.kept is not None:
            options["tiles"] = step.tiles
            options["ablate"] = tuple(name for name in MEASURES if name not in step.kept)
        same = step.kept is None and own == LADDER[-2].tiles
        original = LADDER[-2].series if same else None
        note = "the plan's tiles are those of the step before" if same else ""
        found.append(variants.Variant(step.series, options, same_as=original, note=note))
    keys = plan("fa1-mma-keys", problem, warp_partition="keys").tiles
    tiles = {"tiles": fa_numba.Tiles(keys.Br, keys.Bc)}
    found.append(variants.Variant("fa1-mma-keys", {"warp_partition": "keys"}))
    found.append(variants.Variant("fa1-mma-rows", tiles))
    found.append(variants.Variant("fa1-mma"))
    return found


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Times, checked first, those of torch, and the hardware counters."""
    assert bench.machine is not None
    lengths = options.seqlens or ((QUICK_SEQLEN,) if options.quick else (SEQLEN,))
    head_dims = options.head_dims or (HEAD_DIMS[:1] if options.quick else HEAD_DIMS)
    problems = [
        fa2_setting(N, d, mask, "float16")
        for d in head_dims
        for mask in options.causal or (False,)
        for N in lengths
    ]
    if peers.available():
        yield from _peer(problems, bench)
    else:
        bench.say("  no torch with CUDA here: its kernel is not measured")
    work = [(problem, configurations(problem)) for problem in problems]
    yield from variants.measure(NAME, work, bench, PROFILED)


def _peer(problems: Sequence[Problem], bench: Bench) -> Iterator[Row]:
    inputs = Inputs()
    for problem in bench.each(problems, "timing torch"):
        host = inputs(problem)
        gate = Gate(problem, *host)
        arrays = peers.on_device(host, problem.dtype)
        run = peers.call(PEER, problem, *arrays)
        timing, failure = attempt(time_call, run, gate.peer)
        common: dict[str, Any] = {"machine": bench.machine, "experiment": NAME, "series": PEER}
        common |= {"source": "measured", "note": failure, **row_fields(problem)}
        if timing is None:
            yield Row(metric="time", unit="ms", value=None, **common)
        else:
            yield from timing_rows(timing, problem, **common)
        peers.release()


def gains(rows: Sequence[Row]) -> dict[str, float]:
    """How many times faster each step is than the one before it, two stages than one, and FA-1's
    rows than its keys.
    """
    times = {r.series: r.value for r in rows if r.metric == "time" and r.value is not None}
    pairs = [(a.series, b.series) for a, b in zip(LADDER, LADDER[1:], strict=False)]
    pairs += [(LADDER[-2].series, TWO_STAGES.series), ("fa1-mma-keys", "fa1-mma-rows")]
    return {b: times[a] / times[b] for a, b in pairs if a in times and b in times}


def predictions() -> dict[str, float]:
    """Series -> the gain that was predicted before the first run."""
    found = {step.series: step.predicted for step in STEPS if step.predicted is not None}
    return found | {"fa1-mma-rows": PREDICTED_PARTITION}


def draw(rows: Sequence[Row]) -> Any:
    """Bars of TFLOP/s with the gain over the step before; each problem has a panel."""
    from .lab import style

    problems = list(variants.problems_of(rows).items())
    if not problems:
        return None
    figure, axes = style.new(1, len(problems), 4.6, sharey="row")
    for (problem, mine), ax in zip(problems, axes[0], strict=True):
        speeds = {r.series: r.value for r in mine if r.metric == "speed" and r.value is not None}
        found = gains(mine)
        for at, series in enumerate(LABELS):
            if series not in speeds:
                ax.text(0, at, " no time", va="center", fontsize=9.5)
                continue
            looks = PEER if series == PEER else series[:3] + "-mma"
            ax.barh(at, speeds[series], height=0.62, color=style.COLOURS[looks])
            gain = f"  ×{found[series]:.2f}" if series in found else ""
            ax.text(speeds[series], at, f" {speeds[series]:.0f}{gain}", va="center", fontsize=9.5)
        ax.set_yticks(range(len(LABELS)), list(LABELS.values()))
        ax.set_ylim(len(LABELS) - 0.4, -0.6)
        ax.set_xlim(0, 1.3 * max(speeds.values(), default=1.0))
        ax.grid(False, axis="y")
        ax.set_xlabel("TFLOP/s; × is how many times faster a step is")
        masked = ", causal" if problem.causal else ""
        ax.set_title(f"forward, fp16, N={problem.seqlen_q}, d={problem.head_dim}{masked}")
    return figure


_MEASURED: dict[str, Callable[[float], str]] = {
    "speed": lambda v: f"{v:.1f}",
    "instructions": lambda v: f"{v / 1e9:.2f}",
    "wavefronts": lambda v: f"{v / 1e9:.2f}",
    "conflicts": lambda v: f"{v / 1e9:.3f}",
    "sectors": lambda v: f"{v * 32 / 1e9:.2f}",
}


def table(rows: Sequence[Row]) -> Table | None:
    """The speed of every step, its gain, what was predicted of it, and what was counted."""
    predicted = predictions()
    lines = []
    for problem, mine in variants.problems_of(rows).items():
        found = {(r.series, r.metric): r for r in mine if r.source == "measured"}
        gained = gains(mine)
        for series, label in LABELS.items():
            speed, *counted = (
                tables.cell(found.get((series, metric)), shown)
                for metric, shown in _MEASURED.items()
            )
            at = found.get((series, "speed"))
            block = f"{at.Br} x {at.Bc}" if at is not None and at.Br else tables.MISSING
            pair = [tables.number(values, series, ".2f") for values in (gained, predicted)]
            where = tables.problem_cells(problem)
            lines.append([*where, label, block, speed, *pair, *counted])
    if not lines:
        return None
    header = [*tables.PROBLEM, "step", "Br x Bc", "TFLOP/s", "gain", "predicted"]
    header += ["warp instructions, 10^9", "shared-memory wavefronts, 10^9", "bank conflicts, 10^9"]
    header += ["read from L2, GB"]
    caption = (
        "Forward, fp16, 16k tokens, hidden dimension 2048. A gain is over the step before; of two "
        "stages it is over one, of FA-1's rows over its keys at the same block sizes."
    )
    return Table(caption, tables.markdown(header, lines))
