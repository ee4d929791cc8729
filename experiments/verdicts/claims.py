"""Claims C1 to C25 about FlashAttention, as documents about it make them.

Several contradict each other. A claim is reproduced when it holds in our numbers as it is worded,
"trend only" when it holds in direction, or not everywhere, and refuted otherwise.
"""

from __future__ import annotations

import math

from experiments import claims as measured
from experiments import crossover, decode, memory_hierarchy, paged, runtime_memory
from experiments.lab.series import LABELS
from experiments.lab.store import EMULATOR

from . import accesses, kv_cache
from .evidence import (
    REFUTED,
    REPRODUCED,
    TREND,
    Evidence,
    Finding,
    MissingRows,
    Question,
    doubling,
    question_table,
    span,
)

OWN = (measured.NAME,)
ON_EMULATOR = "emulator, one head, N=128, d=64, blocks of 32, fp32"
LAYER = "H200, the same"
LONG = "H200, 16k tokens, hidden 2048, fp16"


def bit_identical(data: Evidence) -> Finding:
    """The measured rows where there are any, else those of NumPy, step by step in float32."""
    words, every = [], []
    for series, what in (
        ("softmax-online", "softmax, online and safe"),
        ("fa1-simt", "O, FA-1 and standard"),
        ("fa2-simt", "O, FA-2 and standard"),
    ):
        rows = data.rows("numerics", series=series, metric="identical", dtype="float32")
        rows = [row for row in rows if row.machine != EMULATOR] or rows
        shares = [100 * row.number for row in rows]
        every += shares
        words.append(f"{what}: {span(shares, '.1f')} % of elements")
    number = f"bit for bit equal in fp32, over N and inputs: {'; '.join(words)}"
    if min(every) == 100:
        return Finding(number, REPRODUCED)
    return Finding(number, REFUTED, "equal in exact arithmetic; in float32 rounding differs")


def near_standard(data: Evidence) -> Finding:
    worst = {}
    for dtype, series in (
        ("float32", ("fa1-simt", "fa2-simt")),
        ("float16", ("fa1-mma", "fa2-mma")),
        ("bfloat16", ("fa1-mma", "fa2-mma")),
    ):
        rows = data.rows("numerics", series=series, metric="max_error", dtype=dtype)
        mine = [row for row in rows if row.place == "normal" and row.machine != EMULATOR]
        if not mine:
            raise MissingRows(f"numerics: {dtype} on a GPU")
        worst[dtype] = max(row.number for row in mine)
    number = "largest error over N=128 to 16k: " + ", ".join(
        f"{value:.1e} in {dtype}" for dtype, value in worst.items()
    )
    return Finding(number, REPRODUCED if worst["float32"] < 1e-5 else REFUTED)


def opens_at(data: Evidence) -> Finding:
    """From which length FA-2 is ahead of standard attention, in every case measured."""
    found = crossover.gains(data.rows("crossover", source="measured", metric="time", causal=False))
    lengths = [
        crossover.crossing(gain) or 2 * max(gain)
        for curves in found.values()
        for series, gain in curves.items()
        if series.startswith("fa2")
    ]
    if not lengths:
        raise MissingRows("crossover: FA-2 and standard")
    number = (
        f"FA-2 is ahead of our standard from N = {span(lengths, 'd')} on, in {len(lengths)} cases "
        "of dtype, head dimension, pass and batch x heads"
    )
    low, high = crossover.CLAIMED
    if all(low <= N <= high for N in lengths):
        return Finding(number, REPRODUCED)
    if max(lengths) < low:
        return Finding(number, REFUTED, "the gain is there long before")
    return Finding(number, TREND)


def hierarchy(data: Evidence) -> Finding:
    rows = data.rows("memory_hierarchy")
    speeds, room = memory_hierarchy.bandwidths(rows), memory_hierarchy.capacities(rows)
    if not {"shared", "DRAM"} <= speeds.keys() & room.keys():
        raise MissingRows("memory_hierarchy: shared memory and DRAM")
    faster, smaller = speeds["shared"] / speeds["DRAM"], room["DRAM"] / room["shared"]
    number = (
        f"shared memory {speeds['shared']:.1f} TB/s, DRAM {speeds['DRAM']:.2f}: {faster:.1f} times "
        f"faster, {smaller:.0f} times smaller"
    )
    if abs(faster / 6 - 1) < 0.25 and abs(smaller / 4000 - 1) < 0.25:
        return Finding(number, REPRODUCED)
    reason = "the A100's own 19 and 1.5 TB/s are 12.7 times apart, not 6"
    return Finding(number, TREND if faster > 2 else REFUTED, reason)


def bound_by_memory(data: Evidence) -> Finding:
    rows = data.rows("memory_hierarchy")
    speeds, peaks = memory_hierarchy.bandwidths(rows), memory_hierarchy.products(rows)
    calls = {
        place: of for found in memory_hierarchy.points(rows).values() for place, of in found.items()
    }
    wanted = {name: (name, "fwd", "float16") for name in ("standard-mma", "fa1-mma", "fa2-mma")}
    if "DRAM" not in speeds or "float16" not in peaks:
        raise MissingRows("memory_hierarchy: ceilings")
    if any("DRAM" not in calls.get(place, {}) for place in wanted.values()):
        raise MissingRows("memory_hierarchy: kernels")
    balance = peaks["float16"] / speeds["DRAM"]
    intensity = {name: calls[place]["DRAM"] for name, place in wanted.items()}
    number = f"an H200 needs {balance:.0f} FLOP/B; " + ", ".join(
        f"{LABELS[name]} has {value:.0f}" for name, value in intensity.items()
    )
    bound = {name for name, value in intensity.items() if value < balance}
    if bound == set(wanted):
        return Finding(number, REPRODUCED)
    reason = "standard attention is; Q outer is not" if "standard-mma" in bound else ""
    return Finding(number, TREND if reason else REFUTED, reason)


def layer_bytes(data: Evidence, series: str, source: str) -> float:
    return data.value(
        measured.NAME,
        series=series,
        source=source,
        metric="traffic",
        dtype="float16",
        seqlen_q=measured.LAYER.seqlen_q,
    )


def once(data: Evidence) -> Finding:
    layer = measured.LAYER
    claimed = 8 * layer.heads_q * layer.seqlen_q * layer.head_dim
    found = {source: layer_bytes(data, "fa2-mma", source) for source in ("model", "l2", "dram")}
    number = (
        f"claimed {claimed / 1e9:.3f} GB; FA-2 accesses {found['model'] / 1e9:.1f} GB, L2 moves "
        f"{found['l2'] / 1e9:.1f}, DRAM {found['dram'] / 1e9:.3f}"
    )
    if abs(found["model"] / claimed - 1) < 0.01:
        return Finding(number, REPRODUCED)
    return Finding(
        number, REFUTED, "what is read once is DRAM, where L2 is large enough to serve the rest"
    )


def saving(data: Evidence) -> Finding:
    layer = measured.LAYER
    scores = 2 * layer.heads_q * layer.seqlen_q**2
    pairs = {
        source: [layer_bytes(data, series, source) for series in ("standard-mma", "fa2-mma")]
        for source in ("model", "dram")
    }
    words = [
        f"{label} {standard / 1e9:.1f} GB against {flash / 1e9:.2f}, {standard / flash:.1f} times"
        for label, (standard, flash) in zip(("accesses", "DRAM"), pairs.values(), strict=True)
    ]
    ratios = {source: standard / flash for source, (standard, flash) in pairs.items()}
    number = f"P {scores / 1e9:.2f} GB; {'; '.join(words)}"
    if abs(ratios["model"] / 65 - 1) < 0.1:
        return Finding(number, REPRODUCED)
    reason = "of DRAM it is near, of accesses it is not" if ratios["dram"] > 30 else ""
    return Finding(number, TREND if ratios["dram"] > 30 else REFUTED, reason)


def faster(data: Evidence) -> Finding:
    words: list[str] = []
    every: list[float] = []
    for series, name in (("standard-mma", "our standard"), ("torch-unfused", "torch's unfused")):
        for pass_ in ("fwd", "fwd+bwd"):
            found = data.ratios(
                "speed_fp16",
                "fa2-mma",
                series,
                metric="speed",
                pass_=pass_,
                causal=False,
                seqlen_q=(4096, 8192, 16384),
            )
            every += found.values()
            words.append(f"{span(found.values(), '.1f')} {name}, {pass_}")
    number = f"FA-2 over {'; '.join(words)} (N from 4k, not causal)"
    if all(2 <= ratio <= 4 for ratio in every):
        return Finding(number, REPRODUCED)
    if all(ratio > 1 for ratio in every):
        return Finding(number, TREND, f"{span(every, '.1f')} in all")
    return Finding(number, REFUTED)


def causal_tiles(data: Evidence) -> Finding:
    tiles = accesses.visited(data, True)
    times = [
        next(iter(data.rows("speed_fp16", series="fa2-mma", metric="time", pass_="fwd",
                            seqlen_q=16384, head_dim=d, causal=True))).number
        / next(iter(data.rows("speed_fp16", series="fa2-mma", metric="time", pass_="fwd",
                              seqlen_q=16384, head_dim=d, causal=False))).number
        for d in (64, 128)
    ]  # fmt: skip
    number = (
        f"{tiles:g} of {accesses.TILES**2} tiles visited; at N=16k the causal call takes "
        f"{span(times)} of the other's time"
    )
    holds = tiles == accesses.TILES * (accesses.TILES + 1) / 2 and max(times) < 0.6
    return Finding(number, REPRODUCED if holds else REFUTED)


def recomputed(data: Evidence) -> Finding:
    """Memory of a forward and a backward pass from one length to the next, over that of N."""
    rows = data.rows("runtime_memory", metric="memory")
    growth: list[float] = []
    for series in ("fa1-mma", "fa2-mma"):
        found = runtime_memory.curve(rows, series, "memory", "fwd+bwd", runtime_memory.PLAIN)
        growth += doubling(found)
    if not growth:
        raise MissingRows("runtime_memory: two lengths")
    number = f"doubling N doubles the memory of a training step, times {span(growth, '.3f')}"
    return Finding(number, REPRODUCED if all(abs(g - 1) < 0.02 for g in growth) else REFUTED)


def head_dims(data: Evidence) -> Finding:
    tiles, speeds = {}, {}
    for d in (64, 128):
        (row,) = data.rows(
            "speed_fp16", series="fa2-mma", metric="speed", pass_="fwd",
            seqlen_q=16384, head_dim=d, causal=False,
        )  # fmt: skip
        tiles[d], speeds[d] = (row.Br or 0, row.Bc or 0), row.number
    number = "; ".join(
        f"d={d}: {tiles[d][0]} x {tiles[d][1]}, {speeds[d]:.0f} TFLOP/s" for d in tiles
    )
    smaller = math.prod(tiles[128]) < math.prod(tiles[64])
    if smaller and speeds[128] < speeds[64]:
        return Finding(number, REPRODUCED)
    reason = "blocks are smaller, but at equal hidden dimension the time is not longer"
    return Finding(number, TREND if smaller else REFUTED, reason if smaller else "")


def block_sizes(data: Evidence) -> Finding:
    common = {"series": "fa1-simt", "dtype": "float32", "head_dim": 64, "seqlen_q": 1024, "Br": 64}
    times = {
        row.Bc or 0: row.number
        for row in data.rows("block_size", source="measured", metric="time", **common)
    }
    moved: dict[int, float] = {}
    for row in data.rows("block_size", source="model", unit="elements", **common):
        if row.Bc in times:
            moved[row.Bc] = moved.get(row.Bc, 0) + row.number / (row.batch * row.heads_q)
    sizes = sorted(times)
    fastest = min(times, key=lambda size: times[size])
    number = (
        f"from B_c={sizes[0]} to {sizes[-1]} accesses fall "
        f"{moved[sizes[0]] / moved[sizes[-1]]:.1f} times, time "
        f"{times[sizes[0]] / times[fastest]:.2f} times, at its least at B_c={fastest}; 512 does "
        "not fit"
    )
    falls = all(moved[a] > moved[b] for a, b in zip(sizes, sizes[1:], strict=False))
    return Finding(number, REPRODUCED if falls else REFUTED)


def long_context(data: Evidence) -> Finding:
    memory = {
        series: data.value(measured.NAME, series=series, metric="memory", seqlen_q=measured.LONG)
        for series in ("standard-mma", "fa1-mma", "fa2-mma")
    }
    number = "; ".join(f"{LABELS[series]} {mib:,.0f} MiB" for series, mib in memory.items())
    holds = memory["standard-mma"] > 25e9 / 2**20 and memory["fa2-mma"] < 64
    return Finding(f"one head: {number}", REPRODUCED if holds else REFUTED)


def more_flops(data: Evidence) -> Finding:
    work = {}
    for series in measured.SIMT:
        found = {
            name: data.value(
                measured.NAME, series=series, metric=name, dtype="float32", seqlen_q=1024
            )
            for name in measured.OPERATIONS
        }
        work[series] = 2 * found["ffma"] + found["fmul"] + found["fadd"]
    moved = {
        series: data.value(
            measured.NAME, series=series, source="dram", metric="traffic", seqlen_q=1024
        )
        for series in work
    }
    ratios = {name: work[name] / work["standard-simt"] for name in ("fa1-simt", "fa2-simt")}
    less = {name: moved["standard-simt"] / moved[name] for name in ratios}
    number = "; ".join(
        f"{LABELS[name]}: {ratios[name]:.3f} times standard's FLOPs, {less[name]:.1f} times less "
        "DRAM traffic"
        for name in ratios
    )
    holds = all(1 < r < 1.25 for r in ratios.values()) and all(r > 1 for r in less.values())
    trend = all(r < 1.25 for r in ratios.values()) and all(r > 1 for r in less.values())
    return Finding(number, REPRODUCED if holds else TREND if trend else REFUTED)


CLAIMS = (
    Question("C1", "online softmax equals ordinary softmax, bit for bit", "any",
             "H200, fp32, N=128 to 16k, with and without outliers", ("numerics",), bit_identical),
    Question("C2", "the output matches standard attention to about 1e-5 in fp32", "any",
             "H200, against float64, N=128 to 16k, d=64", ("numerics",), near_standard),
    Question("C3", "standard makes 3 round trips to HBM, flash 1; N x N never reaches HBM",
             "any", ON_EMULATOR, OWN, accesses.round_trips),
    Question("C4", "standard: 8 matrix reads or writes, Θ(Nd + N²)", "any", ON_EMULATOR, OWN,
             accesses.matrices),
    Question("C5", "flash moves exactly Q, K, V and O once: 8 h T d bytes", "fp16", LAYER +
             ": 32 heads, N=8192, d=128", OWN, once),
    Question("C6", "flash accesses grow as N² d² / M", "any", "closed form that the counts equal",
             ("io_vs_seqlen", "io_vs_head_dim", "io_vs_sram"), accesses.theorem),
    Question("C7", "the bound is O(n d √d) to O(n d tile)", "any", "closed form that the counts "
             "equal", ("io_vs_seqlen",), accesses.growth),
    Question("C8", "P is 4.3 GB; standard moves 17.4-17.8 GB, flash 0.27, 65 times less",
             "fp16, T=8192, h=32, d=128", LAYER, OWN, saving),
    Question("C9", "the gain opens at N = 1024 to 2048; below nothing is won", "any", "H200, N=64 "
             "to 4096", ("crossover",), opens_at),
    Question("C10", "2-4x faster than standard at long context", "any GPU", LONG,
             ("speed_fp16",), faster),
    Question("C11", "softmax accesses an element: naive 3, safe 4, online 3", "any",
             "emulator, 10 vectors of 256 to 4096", ("online_softmax",), accesses.softmax_accesses),
    Question("C12", "two-pass attention needs the whole row twice, one-pass once", "any",
             "emulator, one head, N=128 and 256, d=64, fp32", ("online_softmax",),
             accesses.passes_over_scores),
    Question("C13", "SRAM is 6 times faster than HBM and 4000 times smaller", "A100: 19 TB/s, "
             "1.5 to 2.0 TB/s", "H200, read bandwidth", ("memory_hierarchy",), hierarchy),
    Question("C14", "attention is memory-bound: an A100 needs 201 FLOP/B", "A100",
             "H200, N=2048, d=64, fp16, forward, DRAM bytes", ("memory_hierarchy",),
             bound_by_memory),
    Question("C15", "Q inside K/V: O through HBM in every pass; Q outside: O written once", "any",
             ON_EMULATOR, OWN, accesses.o_in_every_pass),
    Question("C16", "causal tiles above the diagonal are skipped", "any", ON_EMULATOR + "; " + LONG,
             (*OWN, "speed_fp16"), causal_tiles),
    Question("C17", "backward recomputes from stored statistics: workspace linear in n d", "any",
             "batch 16, 8 heads, d=64, fp16, N=128 to 64k", ("runtime_memory",), recomputed),
    Question("C18", "the generator's state replaces the dropout mask", "any", ON_EMULATOR, OWN,
             accesses.dropout),
    Question("C19", "larger d: smaller blocks and more time", "any", LONG, ("speed_fp16",),
             head_dims),
    Question("C20", "larger blocks reduce accesses until registers and shared memory run out",
             "any", "H200, N=1024, d=64, fp32", ("block_size",), block_sizes),
    Question("C21", "decode at long context is a K/V-cache read", "any",
             "H200, one row of Q, 1k to 128k keys, batch 1 to 64, fp16", (decode.NAME,),
             kv_cache.decoding),
    Question("C22", "tiling composes with a paged cache: same result page by page", "any",
             "emulator, 2 heads, 5 pages of 32 keys, d=64; pages of 16 to 256",
             (*OWN, paged.NAME), kv_cache.over_pages),
    Question("C23", "tiles processed = ceil(n/tq) ceil(n/tk)", "any", ON_EMULATOR, OWN,
             accesses.tiles_processed),
    Question("C24", "128K context: some 30 GB of scores, next to nothing for flash", "one head, "
             "2 bytes", "H200, one head, d=128, fp16", OWN, long_context),
    Question("C25", "flash does slightly more FLOPs, much less traffic", "any",
             "H200, N=1024, 16k tokens, d=64, fp32", OWN, more_flops),
)  # fmt: skip
TABLE = question_table(CLAIMS, "claim")
