"""Findings on the figures and tables of FlashAttention-1's paper (arXiv 2205.14135)."""

from __future__ import annotations

from experiments import gpt2_table, io_vs_sram, runtime_memory
from experiments.lab import published, unfused_steps
from experiments.lab.series import LABELS
from fa_numba import io_model
from fa_numba.problem import Problem

from .evidence import (
    REFUTED,
    REPRODUCED,
    TREND,
    Evidence,
    Finding,
    MissingRows,
    doubling,
    span,
)

SETTING = Problem(64, 16, 16, 1024, 1024, 64)


def numbers(**wanted: str) -> dict[int, float]:
    """Length or block size -> the published number."""
    size = "block_c" if wanted["item"] == "Fig. 2 middle" else "seqlen"
    return {int(line[size]): float(line["value"]) for line in published.lookup(**wanted)}


def steps(data: Evidence) -> Finding:
    """FA-1 Fig. 1 right: the unfused steps together over the fused kernel."""
    printed = {
        line["method"]: float(line["value"])
        for line in published.lookup(paper="fa1", item="Fig. 1 right")
    }
    fused = printed.pop("FlashAttention fused")
    theirs = sum(printed.values()) / fused
    times = {
        (row.series, row.place): row.number
        for row in data.rows("gpt2_table", metric="time", dtype="float16", causal=True)
    }
    names = (*unfused_steps.STEPS, unfused_steps.FUSED)
    unfused = [times.get((unfused_steps.THEIRS, name)) for name in names[:-1]]
    whole = {name: times.get((name, unfused_steps.FUSED)) for name in ("fa1-mma", "fa2-mma")}
    if None in unfused or None in whole.values():
        raise MissingRows("gpt2_table: steps")
    total = sum(time for time in unfused if time)
    ratios = {name: total / time for name, time in whole.items() if time}
    matmuls = (unfused[0] or 0) + (unfused[-1] or 0)
    number = (
        f"torch's five steps over the fused kernel {ratios['fa1-mma']:.1f} (FA-1), "
        f"{ratios['fa2-mma']:.1f} (FA-2), published {theirs:.1f}; the two matmuls are "
        f"{matmuls / total:.0%} of the steps, published "
        f"{(printed['Matmul QK^T'] + printed['Matmul PV']) / sum(printed.values()):.0%}"
    )
    near = 0.5 < ratios["fa1-mma"] / theirs < 2
    return Finding(number, TREND if near else REFUTED, "a newer GPU" if near else "")


def layer(data: Evidence) -> Finding:
    """FA-1 Fig. 2 left: GFLOPs, accesses and time of standard and flash."""
    rows = data.rows("gpt2_table", dtype="float16", causal=False)
    found = gpt2_table.whole(rows, gpt2_table.SETTING)
    keys = {
        "accesses": ("model", "GB"),
        "time": ("measured", "fwd+bwd"),
    }
    if any((series, *key) not in found for series in OURS for key in keys.values()):
        raise MissingRows("gpt2_table: the layer")
    ratios = {
        word: found["standard-mma", *key] / found["fa1-mma", *key] for word, key in keys.items()
    }
    theirs = {
        word: gpt2_table.paper("Standard", metric) / gpt2_table.paper("FlashAttention", metric)
        for word, metric in (("accesses", "hbm_accesses"), ("time", "runtime"))
    }
    counts = [
        gpt2_table.paper_gb(gpt2_table.SETTING, *arrays) / gpt2_table.paper(method, "hbm_accesses")
        for method, arrays in gpt2_table.ARRAYS.items()
    ]
    number = "; ".join(
        f"{word}, standard over FA-1: {ratios[word]:.1f}, published {theirs[word]:.1f}"
        for word in ratios
    )
    number += (
        f"; the published GB are clean counts of arrays ({span(counts)} of them); GFLOPs as the "
        "author corrected them"
    )
    good = all(ratio > 1 for ratio in ratios.values())
    return Finding(number, TREND if good else REFUTED, "tiles, L2 and GPU differ" if good else "")


OURS = ("standard-mma", "fa1-mma")


def runtimes(data: Evidence) -> Finding:
    """FA-1 Fig. 3 left, Tables 9 to 20: how much longer unfused attention takes, N from 1024.

    Below, what a call of ours costs the host shows: lengths given as lists are copied every time.
    """
    rows = data.rows("runtime_memory", metric="time", source="measured")
    words, lost, apart = [], [], []
    for name in runtime_memory.SETTINGS:
        theirs, ours = [], []
        for pass_ in runtime_memory.PASSES:
            standard, flash = (
                runtime_memory.paper("time", pass_, name, method)
                for method in runtime_memory.METHODS
            )
            unfused, fa1 = (
                runtime_memory.curve(rows, series, "time", pass_, name)
                for series in ("torch-unfused", "fa1-mma")
            )
            both = [N for N in sorted(standard) if N >= 1024 and N in flash and N in unfused]
            theirs += [standard[N] / flash[N] for N in both]
            ours += [unfused[N] / fa1[N] for N in both]
            if both and ours[-1] < 1:
                lost.append(f"{name}, {pass_}")
        if ours:
            words.append(f"{name} {span(ours, '.1f')} (published {span(theirs, '.1f')})")
        apart += [max(a / b, b / a) for a, b in zip(theirs, ours, strict=True)]
    if not apart:
        raise MissingRows("runtime_memory: unfused and FA-1")
    number = f"torch's unfused over our FA-1: {'; '.join(words)}"
    if max(apart) < 1.5:
        return Finding(number, REPRODUCED)
    reason = f"behind at {'; '.join(lost)}" if lost else "a newer GPU"
    return Finding(number, TREND if len(lost) < len(runtime_memory.SETTINGS) else REFUTED, reason)


def memory(data: Evidence) -> Finding:
    """FA-1 Table 21: memory of a training step."""
    rows = data.rows("runtime_memory", metric="memory")
    name = runtime_memory.PLAIN
    words, linear, over = [], [], []
    printed = runtime_memory.paper("memory", "fwd+bwd", name, "FlashAttention")
    for series in ("fa1-mma", "fa2-mma"):
        ours = runtime_memory.curve(rows, series, "memory", "fwd+bwd", name)
        both = sorted(set(ours) & set(printed))
        if len(both) < 2:
            raise MissingRows("runtime_memory: memory")
        ratios = [ours[N] / printed[N] for N in both]
        linear += doubling({N: ours[N] for N in both})
        over += ratios
        words.append(f"{LABELS[series]} {span(ratios)} of the published MiB")
    standard = runtime_memory.paper("memory", "fwd+bwd", name, "PyTorch Attention")
    unfused = runtime_memory.curve(rows, "torch-unfused", "memory", "fwd+bwd", name)
    kept = [unfused[N] / standard[N] for N in standard if N in unfused]
    words += [f"torch's unfused {span(kept)}"] if kept else []
    number = f"{'; '.join(words)}; doubling N doubles it, times {span(linear)}"
    good = all(abs(ratio - 1) < 0.02 for ratio in linear) and max(over) < 1.1
    return Finding(number, REPRODUCED if good else REFUTED, "linear in N" if good else "")


def regimes(data: Evidence) -> Finding:
    """Saha and Ye, Theorem 3.1: from which M on FlashAttention accesses least."""
    rows = data.rows("io_vs_sram", source="model", unit="elements", causal=False, head_dim=64)
    where = io_vs_sram.crossing(rows)
    if where is None:
        raise MissingRows("io_vs_sram: both curves")
    share = where / io_vs_sram.HEAD_DIM**2
    number = (
        f"counting every constant, K/V outer with line 1's tiles accesses less than square blocks "
        f"from M = {share:.2f} d² on"
    )
    return Finding(number, REPRODUCED if 0.5 < share < 2 else REFUTED)


def block_accesses(data: Evidence) -> Finding:
    printed = numbers(paper="fa1", item="Fig. 2 middle", metric="hbm_accesses")
    formula = {size: io_model.fa1_paper_gb(SETTING, size) for size in printed}
    off = max(abs(formula[size] / value - 1) for size, value in printed.items())
    of_ours = []
    for size in printed:
        found = [
            row
            for row in data.rows(
                "block_size", series="fa1-simt", source="model", unit="elements", dtype="float32",
                head_dim=64, seqlen_q=1024, Bc=size,
            )
            if row.batch * row.heads_q == SETTING.batch * SETTING.heads_q
        ]  # fmt: skip
        by_rows = {row.Br: 0.0 for row in found}
        for row in found:
            by_rows[row.Br] += row.number
        of_ours += [total / io_model.fa1_paper(SETTING, size) for total in by_rows.values()]
    number = (
        f"Algorithm 1's count, X (3 N / B_c + 1), is within {off:.1%} of the curve; our kernel's "
        f"elements are {span(of_ours, '.3f')} of it, l and m included"
    )
    return Finding(number, REPRODUCED if off < 0.01 and max(of_ours) < 1.1 else REFUTED)


def block_runtime(data: Evidence) -> Finding:
    printed = numbers(paper="fa1", item="Fig. 2 middle", metric="runtime")
    ours = {
        row.Bc: row.number
        for row in data.rows(
            "block_size", series="fa1-simt", source="measured", metric="time", dtype="float32",
            head_dim=64, seqlen_q=1024, Br=64,
        )
    }  # fmt: skip
    both = sorted(size for size in printed if size in ours)
    first, last = both[0], both[-1]
    least = min(size for size in ours if size)
    number = (
        f"from B_c={first} to {last} the paper's time falls {printed[first] / printed[last]:.2f} "
        f"times, ours {ours[first] / ours[last]:.2f}; ours from {least} to {first} "
        f"{ours[least] / ours[first]:.2f}"
    )
    falls = ours[last] < ours[first]
    reason = "beyond 64 rows accesses no longer bound our fp32 kernel"
    return Finding(number, TREND if falls else REFUTED, reason)


def sparse(data: Evidence) -> Finding:
    printed = {
        int(line["metric"].split()[2].rstrip("%")): float(line["value"])
        for line in published.lookup(paper="fa1", item="Fig. 2 right")
    }
    times = {
        row.place: row.number
        for row in data.rows(
            "block_sparse", series="fa1-simt", source="measured", metric="time", pass_="fwd+bwd",
            dtype="float32", seqlen_q=4096, causal=False,
        )
    }  # fmt: skip
    whole = times["no mask"]
    apart = [
        abs(times[f"{share} % of blocks"] / whole - value / printed[100])
        for share, value in printed.items()
        if share < 100 and f"{share} % of blocks" in times
    ]
    number = f"time over that without a mask: at most {max(apart):.3f} from the published curve"
    return Finding(number, REPRODUCED if max(apart) < 0.05 else TREND)
