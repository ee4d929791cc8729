"""One question for each published figure or table."""

from __future__ import annotations

import contextlib
import statistics

from experiments import numerics
from experiments.lab import published
from experiments.lab.series import HOPPER
from experiments.lab.store import EMULATOR
from experiments.lab.workloads import SEQLENS

from . import accesses, claims
from . import fa1 as of_fa1
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
FA2_THERE = "A100, 16k tokens, hidden 2048, fp16"
HERE = "the same on an H200"
# Times as long, up to which a time counts as the same over lengths.
FLAT = 1.2


def fa2_speed(pass_: str, item: str) -> Question:
    """FA-2 Figs. 4 to 6: the order of the three, and by how much FA-2 leads."""

    def decide(data: Evidence) -> Finding:
        return _order(data, pass_, item)

    words = {"fwd+bwd": "fwd + bwd", "fwd": "forward", "bwd": "backward"}[pass_]
    there = FA2_THERE.replace("A100", "H100") if item == "Fig. 7" else FA2_THERE
    return Question(f"{FA2} {item}", f"speed, {words}: FA-2 ahead of FA-1 ahead of standard",
                    there, HERE, ("speed_fp16",), decide)  # fmt: skip


# How far from the published speeds ours may be where the GPU is nearly the papers'.
NEAR = 0.15


def _speeds(
    data: Evidence, series: str, pass_: str, head_dim: int, causal: bool
) -> dict[int, float]:
    """Length -> TFLOP/s in fp16."""
    rows = data.rows(
        "speed_fp16", series=series, metric="speed", pass_=pass_, head_dim=head_dim, causal=causal
    )
    return {row.seqlen_q: row.number for row in rows}


def _order(data: Evidence, pass_: str, item: str) -> Finding:
    over_fa1, over_theirs, unfused, kept, calibration = [], [], [], [], []
    for d in (64, 128):
        for causal in (False, True):
            theirs = of_fa1.numbers(
                paper="fa2",
                item=item,
                method="FlashAttention-2",
                head_dim=str(d),
                causal=str(causal).lower(),
            )
            ours = {
                name: _speeds(data, name, pass_, d, causal)
                for name in ("fa1-mma", "fa1-mma-splits", "fa2-mma", "torch-unfused", "torch-fa2")
            }
            for N in SEQLENS:
                if any(N not in found for found in ours.values()):
                    continue
                fa1 = max(ours["fa1-mma"][N], ours["fa1-mma-splits"][N])
                over_fa1.append(ours["fa2-mma"][N] / fa1)
                unfused.append(ours["fa2-mma"][N] / ours["torch-unfused"][N])
                kept.append(ours["fa2-mma"][N] > fa1 > ours["torch-unfused"][N])
                if N in theirs:
                    over_theirs.append(ours["fa2-mma"][N] / theirs[N])
                    calibration.append(ours["torch-fa2"][N] / theirs[N])
    number = (
        f"published order at {sum(kept)} of {len(kept)} sizes; FA-2 over FA-1 {span(over_fa1)}, "
        f"over torch's unfused {span(unfused, '.1f')}; our FA-2 over the published "
        f"{span(over_theirs)}, torch's FA-2 here over it {span(calibration)}"
    )
    reason = "a newer GPU"
    if item == "Fig. 7":
        off = [r for r in over_theirs if not 1 - NEAR <= r <= 1 + NEAR]
        if all(kept) and not off:
            return Finding(number, REPRODUCED)
        reason = f"{len(off)} of {len(over_theirs)} speeds are more than {NEAR:.0%} off"
    leads = sum(kept) >= 0.75 * len(kept)
    return Finding(number, TREND if leads else REFUTED, reason)


def softmax_accesses(data: Evidence) -> Finding:
    names = ("naive", "safe", "online")
    printed = {
        line["method"]: float(line["value"])
        for line in published.lookup(paper="online-softmax", item="text")
        if line["method"] in names
    }
    ours = {name: accesses.per_element(data, f"softmax-{name}") for name in names}
    number = ", ".join(f"{name} {ours[name]:g} (published {printed[name]:g})" for name in names)
    return Finding(number, REPRODUCED if ours == printed else REFUTED)


def outliers(data: Evidence) -> Finding:
    """FA-3 Table 3: RMSE of standard attention over FA-2's, fp16, inputs with outliers."""
    found = {}
    for series in ("standard-mma", "fa2-mma", "torch-unfused", "torch-fa2"):
        rows = data.rows("numerics", series=series, metric="rmse", dtype="float16", causal=False)
        mine = [row for row in rows if row.place == "outliers" and row.machine != EMULATOR]
        if not mine:
            raise MissingRows("numerics: outliers on a GPU")
        found[series] = max(mine, key=lambda row: row.seqlen_q).number
    ours = found["standard-mma"] / found["fa2-mma"]
    torchs = found["torch-unfused"] / found["torch-fa2"]
    printed = numerics.paper_ratio()
    number = f"standard over FA-2: ours {ours:.2f}, torch's {torchs:.2f}, published {printed:.2f}"
    near = all(abs(ratio / printed - 1) < 0.25 for ratio in (ours, torchs))
    more = "S and P in fp16 cost more here than the paper's baseline lost"
    if near:
        return Finding(number, REPRODUCED)
    return Finding(number, TREND, more) if min(ours, torchs) > 1 else Finding(number, REFUTED)


def decoding(data: Evidence) -> Finding:
    """Flash-Decoding's micro-benchmark: time from many short caches to one long one of as many keys
    in all, with each row tile's keys in one block and with these split.
    """
    printed = {
        method: {
            (int(line["batch"]), int(line["seqlen"])): float(line["value"])
            for line in published.lookup(paper="flash-decoding", item="micro-benchmark")
            if line["method"].startswith(method)
        }
        for method in ("FlashAttention", "Flash-Decoding")
    }
    times = {
        "FlashAttention": _by_place(data, "claims", "fa2-mma", 16, 2),
        "Flash-Decoding": _by_place(data, "decode", "fa2-mma-splits", 32, 4),
    }
    ends = {
        "FlashAttention": ((256, 256), (1, 131072)),
        "Flash-Decoding": ((64, 1024), (1, 65536)),
    }
    grows = {}
    for method, (many, one) in ends.items():
        if not {many, one} <= times[method].keys():
            raise MissingRows(f"decoding: {method} at batch and N of {many} and {one}")
        both = times[method], printed[method]
        grows[method] = [found[one] / found[many] for found in both]
    (whole, whole_there), (split, split_there) = grows.values()
    number = (
        "with each row tile's keys in one block our FA-2 takes "
        f"{whole:.1f} times as long at batch 1, N=128k as at batch 256, N=256 (published "
        f"{whole_there:.1f}); with the keys split, 32 heads on 4, at batch 1, N=64k {split:.2f} "
        f"times as long as at batch 64, N=1k (published {split_there:.2f})"
    )
    if whole < FLAT or split > FLAT:
        return Finding(number, REFUTED)
    return Finding(number, REPRODUCED, "a newer GPU has more to lose where few blocks run")


def _by_place(
    data: Evidence, experiment: str, series: str, heads_q: int, heads_k: int
) -> dict[tuple[int, int], float]:
    """(batch, N) -> time."""
    rows = data.rows(experiment, series=series, metric="time", heads_q=heads_q, heads_k=heads_k)
    return {(row.batch, row.seqlen_k): row.number for row in rows}


# Of FA-3's figures, the kernels that torch has too.
PEERS = {"FA-2": "torch-fa2", "cuDNN": "torch-cudnn"}


def _hopper(data: Evidence, pass_: str, item: str) -> Finding:
    found: dict[str, list[float]] = {method: [] for method in PEERS}
    ahead: list[float] = []
    level: list[float] = []
    gains: list[tuple[float, float]] = []
    for d in (64, 128):
        for causal in (False, True):

            def published_here(
                method: str, series: str, d: int = d, causal: bool = causal
            ) -> dict[int, tuple[float, float]]:
                """N -> (ours, theirs) at the lengths of both; nothing where the paper has no
                bars.
                """
                theirs = of_fa1.numbers(
                    paper="fa3",
                    item=item,
                    method=method,
                    head_dim=str(d),
                    causal=str(causal).lower(),
                )
                ours = _speeds(data, series, pass_, d, causal) if theirs else {}
                return {N: (ours[N], theirs[N]) for N in theirs if N in ours}

            peers = {method: published_here(method, series) for method, series in PEERS.items()}
            for method, pairs in peers.items():
                found[method] += [here / there for here, there in pairs.values()]
            ahead += [there / here for here, there in published_here("FA-3", "fa2-mma").values()]
            with contextlib.suppress(MissingRows):  # a pass that this unit does not have
                for N, (here, there) in published_here("FA-3", HOPPER).items():
                    level.append(here / there)
                    if N in peers["FA-2"]:
                        gains.append((here / peers["FA-2"][N][0], there / peers["FA-2"][N][1]))
    words = "; ".join(
        f"torch's {method} over the published {method} {span(ratios)}"
        for method, ratios in found.items()
    )
    number = f"{words}; the published FA-3 over our FA-2 on mma.sync {span(ahead)}"
    near = all(0.8 <= ratio <= 1.25 for ratio in sum(found.values(), []))
    if not gains:
        reason = "the peers; no kernel of this pass here has FA-3's instructions, wgmma and TMA"
        return Finding(number, TREND if near else REFUTED, reason if near else "")
    ours, theirs = (list(each) for each in zip(*gains, strict=True))
    number += (
        f"; our FA-2 on wgmma over torch's FA-2 {span(ours)} (the published FA-3 over the "
        f"published FA-2 {span(theirs)}), over the published FA-3 {span(level)}"
    )
    alike = near and 0.8 <= statistics.median(ours) / statistics.median(theirs) <= 1.25
    reason = "" if alike else "the gain over FA-2 is another"
    return Finding(number, REPRODUCED if alike else TREND, reason)


def fa3_speed(pass_: str, item: str) -> Question:
    """FA-3 Figs. 5 and 6: its peers here and there, and how far FA-3 is ahead of our FA-2."""
    words = {"fwd": "forward", "bwd": "backward"}[pass_]
    return Question(f"{FA3} {item}", f"speed, {words}: FA-3 1.5 to 2 times FA-2",
                    "H100, 16k tokens, hidden 2048, fp16", "H200, d=64 and 128", ("speed_fp16",),
                    lambda data: _hopper(data, pass_, item))  # fmt: skip


GPT2 = "A100, N=1024, d=64, 16 heads, batch 64"
ITEMS = (
    Question(f"{FA1} Fig. 1 left", "bandwidth and size of SRAM and HBM", "A100", "H200",
             ("memory_hierarchy",), claims.hierarchy),
    Question(f"{FA1} Fig. 1 right", "time of each step of attention", "A100, GPT-2 (not said which "
             "layer)", f"H200, {GPT2[6:]}, fp16, causal, dropout", ("gpt2_table",), of_fa1.steps),
    Question(f"{FA1} Fig. 2 left", "GFLOPs, HBM accesses, runtime", f"{GPT2}, fwd+bwd",
             "the same on an H200, fp16", ("gpt2_table",), of_fa1.layer),
    Question(f"{FA1} Fig. 3 left, Tables 9 to 20", "runtime, with and without dropout and padding",
             "A100, batch 16, 8 heads, d=64, fp16", "the same on an H200, N=1k to 8k",
             ("runtime_memory",), of_fa1.runtimes),
    Question(f"{FA1} Fig. 3 right, Table 21", "memory of a training step", "the same", "the same, "
             "inputs included as there", ("runtime_memory",), of_fa1.memory),
    Question(f"{FA1} Theorems 2 and 5", "accesses N² d² / M", "any", "closed form that the counts "
             "equal, forward", ("io_vs_seqlen", "io_vs_head_dim", "io_vs_sram"), accesses.theorem),
    Question("[Saha and Ye](https://arxiv.org/abs/2402.07443), Theorem 3.1",
             "FlashAttention is optimal from M = d² on", "any", "closed forms, d=64",
             ("io_vs_sram",), of_fa1.regimes),
    Question(f"{FA1} Fig. 2 middle", "HBM accesses over B_c", "A100, N=1024, d=64, 16 heads, "
             "batch 64, forward", "the same, counted", ("block_size",), of_fa1.block_accesses),
    Question(f"{FA1} Fig. 2 middle", "runtime over B_c", "the same", "the same on an H200, fp32",
             ("block_size",), of_fa1.block_runtime),
    Question(f"{FA1} Fig. 2 right", "runtime over the share of non-zero blocks",
             "A100, N=4096, fwd+bwd", "H200, the same, batch 8, 16 heads, d=64, fp32",
             ("block_sparse",), of_fa1.sparse),
    fa2_speed("fwd+bwd", "Fig. 4"),
    fa2_speed("fwd", "Fig. 5"),
    fa2_speed("bwd", "Fig. 6"),
    fa2_speed("fwd+bwd", "Fig. 7"),
    fa3_speed("fwd", "Fig. 5"),
    fa3_speed("bwd", "Fig. 6"),
    Question(f"{FA3} Table 3", "RMSE in fp16 with outliers: standard over FA-2", "H100",
             "H200, 4 heads, N=16k, d=64", ("numerics",), outliers),
    Question("[Flash-Decoding](https://pytorch.org/blog/flash-decoding/)",
             "decoding: FA-2 slows with N, split keys do not",
             "A100, fp16, one query, 16 heads on 2",
             "the same on an H200", ("claims", "decode"), decoding),
    Question("[Online softmax](https://arxiv.org/abs/1805.02867), section 3",
             "memory accesses an element", "any", "emulator, 10 vectors of 256 to 4096",
             ("online_softmax",), softmax_accesses),
)  # fmt: skip
TABLE = question_table(ITEMS, "figure or table")
