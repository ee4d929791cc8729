"""One question for each published figure or table."""

from __future__ import annotations

from experiments import gpt2_table, io_vs_sram
from experiments.lab import published, unfused_steps
from experiments.lab.workloads import SEQLENS
from fa_numba import io_model
from fa_numba.problem import Problem

from . import claims
from .evidence import (
    REFUTED,
    REPRODUCED,
    TREND,
    Evidence,
    Finding,
    MissingRows,
    Question,
    question_table,
    span,
)

FA1 = "[FA-1](https://arxiv.org/abs/2205.14135)"
FA2 = "[FA-2](https://arxiv.org/abs/2307.08691)"
FA3 = "[FA-3](https://arxiv.org/abs/2407.08608)"
SETTING = Problem(64, 16, 16, 1024, 1024, 64)
FA2_THERE = "A100, 16k tokens, hidden 2048, fp16"
HERE = "the same on an H200"


def _published(**wanted: str) -> dict[int, float]:
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
    printed = _published(paper="fa1", item="Fig. 2 middle", metric="hbm_accesses")
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
    printed = _published(paper="fa1", item="Fig. 2 middle", metric="runtime")
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


def fa2_speed(pass_: str, item: str) -> Question:
    """FA-2 Figs. 4 to 6: the order of the three, and by how much FA-2 leads."""

    def decide(data: Evidence) -> Finding:
        return _order(data, pass_, item)

    words = {"fwd+bwd": "fwd + bwd", "fwd": "forward", "bwd": "backward"}[pass_]
    there = FA2_THERE.replace("A100", "H100") if item == "Fig. 7" else FA2_THERE
    return Question(f"{FA2} {item}", f"speed, {words}: FA-2 ahead of FA-1 ahead of standard",
                    there, HERE, ("speed_fp16",), decide)  # fmt: skip


def _order(data: Evidence, pass_: str, item: str) -> Finding:
    over_fa1, over_theirs, unfused, kept, calibration = [], [], [], [], []
    for d in (64, 128):
        for causal in (False, True):
            theirs = {
                name: _published(
                    paper="fa2",
                    item=item,
                    method=method,
                    head_dim=str(d),
                    causal=str(causal).lower(),
                )
                for name, method in METHODS.items()
            }
            ours = {
                name: {
                    row.seqlen_q: row.number
                    for row in data.rows(
                        "speed_fp16",
                        series=name,
                        metric="speed",
                        pass_=pass_,
                        head_dim=d,
                        causal=causal,
                    )
                }
                for name in ("fa1-mma", "fa1-mma-splits", "fa2-mma", "torch-unfused", "torch-fa2")
            }
            for N in SEQLENS:
                if any(N not in found for found in ours.values()):
                    continue
                fa1 = max(ours["fa1-mma"][N], ours["fa1-mma-splits"][N])
                over_fa1.append(ours["fa2-mma"][N] / fa1)
                unfused.append(ours["fa2-mma"][N] / ours["torch-unfused"][N])
                kept.append(ours["fa2-mma"][N] > fa1 > ours["torch-unfused"][N])
                if N in theirs["fa2"]:
                    over_theirs.append(ours["fa2-mma"][N] / theirs["fa2"][N])
                    calibration.append(ours["torch-fa2"][N] / theirs["fa2"][N])
    number = (
        f"published order at {sum(kept)} of {len(kept)} sizes; FA-2 over FA-1 {span(over_fa1)}, "
        f"over torch's unfused {span(unfused, '.1f')}; our FA-2 over the published "
        f"{span(over_theirs)}, torch's FA-2 here over it {span(calibration)}"
    )
    if item == "Fig. 7" and all(0.85 <= r <= 1.15 for r in over_theirs) and all(kept):
        return Finding(number, REPRODUCED)
    leads = sum(kept) >= 0.75 * len(kept)
    reason = "a newer GPU" if item != "Fig. 7" else "d=128 stays below"
    return Finding(number, TREND if leads else REFUTED, reason)


def softmax_accesses(data: Evidence) -> Finding:
    names = ("naive", "safe", "online")
    printed = {
        line["method"]: float(line["value"])
        for line in published.lookup(paper="online-softmax", item="text")
        if line["method"] in names
    }
    ours = {name: claims.per_element(data, f"softmax-{name}") for name in names}
    number = ", ".join(f"{name} {ours[name]:g} (published {printed[name]:g})" for name in names)
    return Finding(number, REPRODUCED if ours == printed else REFUTED)


METHODS = {"fa2": "FlashAttention-2"}
# Of FA-3's figures, the kernels that torch has too.
PEERS = {"FA-2": "torch-fa2", "cuDNN": "torch-cudnn"}


def _hopper(data: Evidence, pass_: str, item: str) -> Finding:
    found: dict[str, list[float]] = {method: [] for method in PEERS}
    ahead = []
    for d in (64, 128):
        for causal in (False, True):
            where = {"head_dim": str(d), "causal": str(causal).lower()}

            def speeds(series: str, d: int = d, causal: bool = causal) -> dict[int, float]:
                rows = data.rows(
                    "speed_fp16", series=series, metric="speed", pass_=pass_, head_dim=d,
                    causal=causal,
                )  # fmt: skip
                return {row.seqlen_q: row.number for row in rows}

            for method, series in PEERS.items():
                theirs, ours = _published(paper="fa3", item=item, method=method, **where), {}
                if theirs:
                    ours = speeds(series)
                found[method] += [ours[N] / theirs[N] for N in theirs if N in ours]
            best, ours = _published(paper="fa3", item=item, method="FA-3", **where), {}
            if best:
                ours = speeds("fa2-mma")
            ahead += [best[N] / ours[N] for N in best if N in ours]
    words = "; ".join(
        f"torch's {method} over the published {method} {span(ratios)}"
        for method, ratios in found.items()
    )
    number = f"{words}; the published FA-3 over our FA-2 {span(ahead)}"
    near = all(0.8 <= ratio <= 1.25 for ratio in sum(found.values(), []))
    reason = "the peers; no kernel here has FA-3's instructions, wgmma and TMA"
    return Finding(number, TREND if near else REFUTED, reason if near else "")


def fa3_speed(pass_: str, item: str) -> Question:
    """FA-3 Figs. 5 and 6: its peers here and there, and how far FA-3 is ahead of our FA-2."""
    words = {"fwd": "forward", "bwd": "backward"}[pass_]
    return Question(f"{FA3} {item}", f"speed, {words}: FA-3 1.5 to 2 times FA-2",
                    "H100, 16k tokens, hidden 2048, fp16", "H200, d=64 and 128", ("speed_fp16",),
                    lambda data: _hopper(data, pass_, item))  # fmt: skip


GPT2 = "A100, N=1024, d=64, 16 heads, batch 64"
ITEMS = (
    Question(f"{FA1} Fig. 1 right", "time of each step of attention", "A100, GPT-2 (not said which "
             "layer)", f"H200, {GPT2[6:]}, fp16, causal, dropout", ("gpt2_table",), steps),
    Question(f"{FA1} Fig. 2 left", "GFLOPs, HBM accesses, runtime", f"{GPT2}, fwd+bwd",
             "the same on an H200, fp16", ("gpt2_table",), layer),
    Question(f"{FA1} Theorems 2 and 5", "accesses N² d² / M", "any", "closed form that the counts "
             "equal, forward", ("io_vs_seqlen", "io_vs_head_dim", "io_vs_sram"), claims.theorem),
    Question("[Saha and Ye](https://arxiv.org/abs/2402.07443), Theorem 3.1",
             "FlashAttention is optimal from M = d² on", "any", "closed forms, d=64",
             ("io_vs_sram",), regimes),
    Question(f"{FA1} Fig. 2 middle", "HBM accesses over B_c", "A100, N=1024, d=64, 16 heads, "
             "batch 64, forward", "the same, counted", ("block_size",), block_accesses),
    Question(f"{FA1} Fig. 2 middle", "runtime over B_c", "the same", "the same on an H200, fp32",
             ("block_size",), block_runtime),
    Question(f"{FA1} Fig. 2 right", "runtime over the share of non-zero blocks",
             "A100, N=4096, fwd+bwd", "H200, the same, batch 8, 16 heads, d=64, fp32",
             ("block_sparse",), sparse),
    fa2_speed("fwd+bwd", "Fig. 4"),
    fa2_speed("fwd", "Fig. 5"),
    fa2_speed("bwd", "Fig. 6"),
    fa2_speed("fwd+bwd", "Fig. 7"),
    fa3_speed("fwd", "Fig. 5"),
    fa3_speed("bwd", "Fig. 6"),
    Question("[Online softmax](https://arxiv.org/abs/1805.02867), section 3",
             "memory accesses an element", "any", "emulator, 10 vectors of 256 to 4096",
             ("online_softmax",), softmax_accesses),
)  # fmt: skip
TABLE = question_table(ITEMS, "figure or table")
