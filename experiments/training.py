"""Times training steps of GPT-style models with several kinds of attention (FA-2's Table 1).

The models have random weights and learn random tokens, in bf16 autocast with AdamW, on one GPU. The
sizes are those of FlashAttention-2's Table 1 (1.3B and 2.7B parameters) and of GPT-2 small and
medium (FlashAttention's Tables 2 and 4). TFLOP/s follow the formula of FlashAttention-2's paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .beside import gpt
from .beside.gpt import Sizes
from .lab.measure import peers
from .lab.measure.series import LABELS, columns
from .lab.measure.timing import Timing, attempt, number
from .lab.record import Bench, Options, Row, values
from .lab.show import style, tables

NAME = "training"
NEEDS = ("GPU", "torch")
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    f"a training step: forward pass, backward pass and AdamW, bf16 autocast, random tokens; "
    f"{gpt.STEPS} steps after {gpt.WARMUP}; by the host's clock, synchronised after each step"
)

SERIES = ("torch-unfused", "fa1-auto", "fa2-auto", peers.FLASH, peers.CUDNN)
RECOMPUTED = "recomputation"
# The model, the context and the number of sequences of a step.
CASES = tuple(
    (Sizes(name, layers, hidden, heads), N, max(1, tokens // N))
    for name, layers, hidden, heads, tokens, lengths in (
        ("GPT3-1.3B", 24, 2048, 16, 16384, (2048, 8192)),
        ("GPT3-2.7B", 32, 2560, 20, 8192, (2048, 8192)),
        ("GPT-2 small", 12, 768, 12, 32768, (1024, 2048, 4096)),
        ("GPT-2 medium", 24, 1024, 16, 32768, (1024, 2048, 4096)),
    )
    for N in lengths
)
QUICK = (Sizes("quick", 2, 128, 2, 512), 256, 2)
# TFLOP/s per A100 80GB in FA-2's Table 1: (model, context) -> series -> number.
_TABLE_1 = {
    ("GPT3-1.3B", 2048): (142.0, 189.0, 196.0),
    ("GPT3-1.3B", 8192): (72.0, 170.0, 220.0),
    ("GPT3-2.7B", 2048): (149.0, 189.0, 205.0),
    ("GPT3-2.7B", 8192): (80.0, 175.0, 225.0),
}
PUBLISHED = {at: dict(zip(SERIES, numbers, strict=False)) for at, numbers in _TABLE_1.items()}


def problem(sizes: Sizes, context: int, batch: int) -> Problem:
    """Return the attention problem of a layer."""
    d = sizes.hidden // sizes.heads
    return Problem(batch, sizes.heads, sizes.heads, context, context, d, dtype="bfloat16",
                   causal=True)  # fmt: skip


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the time, the speed and the peak memory of a training step of each model and series."""
    work = [(case, series) for case in ((QUICK,) if options.quick else CASES) for series in SERIES]
    for (sizes, context, batch), series in bench.each(work, "training"):
        yield rows_of(sizes, context, batch, series, bench.machine)


def rows_of(
    sizes: Sizes, context: int, batch: int, series: str, machine: str, on: str = "cuda"
) -> list[Row]:
    """Time the training steps of one model with one series, and return the rows.

    If a training step does not fit in the memory of the GPU, it is measured with recomputation: the
    backward pass computes each layer again. The note of the rows says so. `on` is the device.
    """
    note, failure, timing = sizes.name, "", None
    for recompute in (False, True):
        _reset(on)
        found, failure = attempt(gpt.train, sizes, batch, context, series, recompute, on)
        if found is not None:
            timing = Timing.of(found[0], float("nan"))
            note = f"{sizes.name}; {RECOMPUTED}" if recompute else sizes.name
            break
        if "memory" not in failure:
            break
    common = columns(NAME, series, problem(sizes, context, batch), machine, pass_="fwd+bwd")
    if timing is None:
        common["note"] = f"{sizes.name}; {failure}"
        return [Row(metric="time", unit="ms", value=None, **common)]
    common["note"] = note
    work = sizes.flops(batch, context) / 1e9  # TFLOP/s are GFLOP / ms
    rows = [Row(metric="time", unit="ms", **number(timing), **common)]
    speed = Timing(work / timing.median, work / timing.p80, work / timing.p20, timing.n)
    rows.append(Row(metric="speed", unit="TFLOP/s", **number(speed), **common))
    if on == "cuda":
        peak = gpt.torch.cuda.max_memory_allocated() / 2**20
        rows.append(Row(metric="memory", unit="MiB", value=peak, **common))
    return rows


def _reset(on: str) -> None:
    """Release memory, and begin a new count of the peak memory."""
    if on == "cuda":
        device.release_memory()
        peers.release()
        gpt.torch.cuda.reset_peak_memory_stats()


def speeds(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, float]]:
    """Return {(model, context): {series: TFLOP/s}}."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for (model, N, series), value in values(rows, "place", "seqlen_q", "series",
                                            metric="speed").items():  # fmt: skip
        found.setdefault((model, N), {})[series] = value
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Draw the speed of a training step for each model and context. Return None without rows."""
    found = speeds(rows)
    if not found:
        return None
    figure, ((ax,),) = style.new(1, 1, 1.4 + 0.16 * len(SERIES) * len(found) + 0.3 * len(found))
    at, ticks = 0.0, list[tuple[float, str]]()
    for (model, N), numbers in found.items():
        shown = [s for s in SERIES if s in numbers]
        for series in shown:
            ax.barh(at, numbers[series], height=0.8, color=style.COLOURS[series],
                    label=LABELS[series] if not ticks else None)  # fmt: skip
            at += 1
        ticks.append((at - len(shown) / 2 - 0.5, f"{model}\nN={style.short(N)}"))
        at += 0.8
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.invert_yaxis()
    ax.set_xlabel("speed of a training step (TFLOP/s)")
    message = "Training steps of GPT-style models with five kinds of attention"
    style.legend(figure, ax.get_legend_handles_labels()[0], message)
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of speeds and of published speeds, or None without rows."""
    found = speeds(rows)
    recomputed = {(r.place, r.seqlen_q, r.series) for r in rows if r.note.endswith(RECOMPUTED)}
    lines = []
    for (model, N), numbers in found.items():
        cells = []
        for series in SERIES:
            star = "*" if (model, N, series) in recomputed else ""
            cells.append(tables.number(numbers, series, ".0f") + star)
        said = PUBLISHED.get((model, N), {})
        for over, under in (("fa2-auto", "fa1-auto"), ("fa2-auto", "torch-unfused")):
            for of in (numbers, said):
                both = over in of and under in of
                cells.append(f"{of[over] / of[under]:.2f}" if both else tables.MISSING)
        lines.append([model, style.short(N), *cells])
    header = ["model", "context"] + [f"{LABELS[series]}, TFLOP/s" for series in SERIES]
    header += ["FA-2 / FA-1", "published", "FA-2 / unfused", "published"]
    caption = (
        "The table of training steps contains TFLOP/s on one GPU, in bf16 autocast with AdamW, for "
        "random weights and random tokens. FA-1 has one thread block per batch entry and head. "
        "The FLOPs of a step are 6 N params + 12 layers hidden "
        "N² per sequence, as in FA-2's Table 1. A star marks a step that fits in memory only with "
        "recomputation: the backward pass computes each layer again. The FLOPs do not contain the "
        "recomputation. The published ratios are from FA-2's Table 1, measured on 8 A100."
    )
    return tables.of(caption, header, lines)
