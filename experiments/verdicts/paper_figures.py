"""For each published figure or table, our quantity and the published quantity."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments import (
    fa4_softmax,
    fp8_errors,
    io_vs_head_dim,
    io_vs_sram,
    ladder,
    numerics,
    runtime_memory,
    speed_fp8,
)
from experiments.beside import softmax_top_k, unfused_steps
from experiments.lab.measure.series import HOPPER
from experiments.lab.record import Row
from fa_numba.dtypes import E4M3

from .evidence import Quantity, paper, rows
from .questions import Pair, Pairs, declared, table
from .rule import MOST, Bounds

TIMES: dict[str, Any] = {"metric": "time", "source": "measured"}

DRAM: dict[str, Any] = {"series": "read-global", "place": "4096 MiB"}


def memory(metric: str, **of: Any) -> Quantity:
    """Return numbers of a metric from the experiment `memory_hierarchy`."""
    return rows("memory_hierarchy", metric=metric, **of)


MEMORIES = {
    "times faster": memory("bandwidth", series="read-shared") / memory("bandwidth", **DRAM),
    "times smaller": memory("capacity", series="read-global")
    / memory("capacity", series="read-shared"),
}
of_fa1 = partial(paper, paper="fa1")
memory_there = partial(of_fa1, item="Fig. 1 left")


def layer(series: str, **fields: Any) -> Quantity:
    """Return numbers of a series from the experiment `gpt2_table`, for fp16, N=1024 and no mask.

    `fields` are columns that select rows, such as `metric`.
    """
    return rows("gpt2_table", series=series, dtype="float16", causal=False, seqlen_q=1024,
                place="", **fields)  # fmt: skip


def step(series: str, *names: str) -> Quantity:
    """Return the sum of the times of several steps of standard attention.

    `names` are the names of the steps. If the series is a fused kernel, its only step is "fused".
    """
    return rows("gpt2_table", metric="time", dtype="float16", causal=True, series=series,
                place=names)  # fmt: skip


def training(series: str, name: str, metric: str, *by: str, **fields: Any) -> Quantity:
    """Return numbers of one series from the experiment `runtime_memory`, by sequence length.

    `name` is a setting, one of runtime_memory.SETTINGS. There is one number for each
    sequence length and each combination of values in the further columns `by`. `fields` are columns
    that select rows.
    """
    return rows("runtime_memory", *by, "seqlen_q", series=series, metric=metric, source="measured",
                place=runtime_memory.places_of(series, name), value=runtime_memory.shown,
                **fields)  # fmt: skip


def of_tables(name: str, method: str, metric: str, *by: str) -> Quantity:
    """Return the numbers of the FA-1 paper's Tables 9 to 21, by sequence length.

    `name` is a setting, one of runtime_memory.SETTINGS. `method` is one of runtime_memory.METHODS,
    or runtime_memory.SPARSE_METHOD. `metric` is "time" or "memory". There is one number for each
    sequence length and each combination of values in the further columns `by`.
    """
    metric = runtime_memory.PAPER_METRICS[metric]
    return of_fa1(*by, "seqlen_q", method=method, metric=metric, **runtime_memory.SETTINGS[name][0])


def slower(name: str) -> Pairs:
    """Return the time of torch's unfused attention / the time of FA-1, and the published ratio.

    `name` is a setting, one of runtime_memory.SETTINGS.
    """
    how = name, "time", "pass_"
    theirs = [of_tables(name, method, "time", "pass_") for method in runtime_memory.METHODS]
    ours = training("torch-unfused", *how) / training("fa1-mma", *how)
    return {"torch's unfused / FA-1": (ours, theirs[0] / theirs[1])}


SPARSE_SETTINGS = {
    runtime_memory.PLAIN: "no mask or dropout",
    runtime_memory.BOTH: "padding mask and dropout",
}


def sparse(metric: str, *names: str, holds: Callable[[int], bool], **fields: Any) -> Pairs:
    """Return block-sparse FA-1 / dense FA-1, ours and published, with a pair for each setting.

    `metric` is "time" or "memory", and `names` are keys of SPARSE_SETTINGS. `holds` takes a
    sequence length and returns whether the numbers at this length are compared. `fields` are
    columns that select our rows.
    """
    found = {}
    for name in names:
        by = name, metric, *(() if "pass_" in fields else ("pass_",))
        ours = training("fa1-mma-sparse", *by, **fields) / training("fa1-mma", *by, **fields)
        theirs = of_tables(name, runtime_memory.SPARSE_METHOD, *by[1:])
        theirs = theirs / of_tables(name, "FlashAttention", *by[1:])
        found[f"block-sparse / dense, {SPARSE_SETTINGS[name]}"] = (
            ours.where(lambda *place: holds(place[-1])), theirs)  # fmt: skip
    return found


def over_bc(series: str, dtype: str, **fields: Any) -> Quantity:
    """Return numbers of a series by Bc, from the experiment `block_size`.

    `fields` are columns that select rows, such as `metric`.
    """
    return rows("block_size", "Bc", series=series, dtype=dtype, head_dim=64, seqlen_q=1024, Br=64,
                batch=64, heads_q=16, Bc=(64, 128, 256, 512), **fields)  # fmt: skip


def share(of: Any) -> int:
    """Return how many percent of the blocks are computed.

    `of` is a row of ours or a line of published.csv. Without a block mask, the result is 100.
    """
    found = re.search(r"\d+", of.place if isinstance(of, Row) else of["metric"])
    return int(found[0]) if found else 100


def over_memory(series: str, pass_: str = "fwd") -> Quantity:
    """Return the accesses of a series by on-chip memory M, from closed forms of `io_vs_sram`."""
    return rows("io_vs_sram", io_vs_sram.memory, series=series, source="model", unit="elements",
                seqlen_q=io_vs_sram.SEQLEN, causal=False, pass_=pass_,
                head_dim=io_vs_sram.HEAD_DIM)  # fmt: skip


LINE_1 = "fa1-simt-rule"  # FA-1 with the tiles that line 1 of FlashAttention's Algorithm 1 computes
MODEL: dict[str, Any] = {"source": "model", "unit": "elements", "causal": False}
ABOVE_D2 = io_vs_sram.above_d2(io_vs_sram.SEQLEN)


def exponents(pass_: str) -> Pairs:
    """Return the exponents with which FA-1's accesses grow, and the theorem's exponents.

    The exponents of N, d and M are fitted to closed forms. FA-1 has the tiles that line 1 of its
    algorithm gives for an on-chip memory of M floats. The fits cover the same ranges of N, d and M
    as the tables of `io_vs_head_dim` and `io_vs_sram`.
    """
    of = partial(rows, "io_vs_head_dim", series=LINE_1, pass_=pass_, **MODEL)
    lengths = of("seqlen_q", head_dim=io_vs_head_dim.OF_N, seqlen_q=io_vs_head_dim.SEQLENS)
    dims = of("head_dim", seqlen_q=io_vs_head_dim.SEQLEN)
    memories = over_memory(LINE_1, pass_).where(lambda M: ABOVE_D2[0] <= M <= ABOVE_D2[1])
    return {
        "N": (lengths.power(), 2.0),
        "d": (dims.power(), 2.0),
        "M": (memories.power(), -1.0),
    }


def blocks_over_flash(pass_: str) -> Pairs:
    """Return the accesses of standard attention / the accesses of FA-1, and the theorems' bounds.

    Both are closed forms, for several sizes M of the on-chip memory. Standard attention multiplies
    matrices in square blocks. By the theorems, standard attention needs at most as many accesses as
    FA-1 if M is below d^2. From M = d^2 on, FA-1 needs at most as many accesses.
    """
    return {
        "square blocks / FA-1 at each M": (
            over_memory(io_vs_sram.BLOCKED, pass_) / over_memory(LINE_1, pass_),
            lambda M: Bounds(0, 1) if M < io_vs_sram.HEAD_DIM**2 else Bounds(1, float("inf")),
        )
    }


NO_MASK = (*(f"{share} % of blocks" for share in range(10, 100, 10)), "no mask")
STEPS = ("Matmul QK^T", "Mask", "Softmax", "Dropout", "Matmul PV")
UNFUSED = step(unfused_steps.THEIRS, *unfused_steps.STEPS)
FIGURE_2 = partial(of_fa1, item="Fig. 2 left")
accessed = partial(layer, source="model", metric="traffic", pass_=("fwd", "bwd"))
FIGURE_1 = partial(of_fa1, item="Fig. 1 right")
PAIRS: dict[str, Pairs] = {
    "fa1-fig1-left": {
        how: (MEMORIES[how], memory_there(method=a, metric=what)
              / memory_there(method=b, metric=what))
        for how, what, a, b in (("times faster", "bandwidth", "SRAM", "HBM"),
                                ("times smaller", "capacity", "HBM", "SRAM"))
    },
    "fa1-fig1-right": {
        "torch's steps / FA-1": (
            UNFUSED / step("fa1-mma", unfused_steps.FUSED),
            FIGURE_1(method=STEPS) / FIGURE_1(method="FlashAttention fused"),
        )
    },
    "fa1-fig2-left-accesses": {"standard / FA-1": (
        accessed("standard-mma") / accessed("fa1-mma"),
        FIGURE_2(method="Standard", metric="hbm_accesses")
        / FIGURE_2(method="FlashAttention", metric="hbm_accesses"))},
    "fa1-fig2-left-runtime": {"torch's unfused / FA-1": (
        layer("torch-unfused", metric="time", pass_="fwd+bwd")
        / layer("fa1-mma", metric="time", pass_="fwd+bwd"),
        FIGURE_2(method="Standard", metric="runtime")
        / FIGURE_2(method="FlashAttention", metric="runtime"))},
    "fa1-fig2-middle-accesses": {
        "GB at 2 bytes per element": (
            over_bc("fa1-simt", "float32", source="model", unit="elements",
                    value=lambda row: 2e-9 * row.number),
            of_fa1("Bc", item="Fig. 2 middle", metric="hbm_accesses"),
        )
    },
    "fa1-fig2-middle-runtime": {
        "FA-1": (
            over_bc("fa1-mma", "float16", **TIMES).over(0),
            of_fa1("Bc", item="Fig. 2 middle", metric="runtime").over(0),
        )
    },
    "fa1-fig2-right": {
        "FA-1, time / time without a mask": (
            rows("block_sparse", share, series="fa1-mma", pass_="fwd+bwd", dtype="float16",
                 seqlen_q=4096, causal=False, place=NO_MASK, **TIMES).over(-1),
            of_fa1(share, item="Fig. 2 right").over(-1),
        )
    },
    "fa1-fig3-plain": slower(runtime_memory.PLAIN),
    "fa1-fig3-dropout": slower(runtime_memory.DROPPED),
    "fa1-fig3-mask": slower(runtime_memory.MASKED),
    "fa1-fig3-both": slower(runtime_memory.BOTH),
    "fa1-table21": {
        label: (training(series, "plain", "memory", pass_="fwd+bwd"),
                of_tables("plain", method, "memory"))
        for label, series, method in (
            ("FA-1, MiB", "fa1-mma", "FlashAttention"),
            ("torch's unfused, MiB", "torch-unfused", "PyTorch Attention"),
        )
    },
    "fa1-sparse, short": sparse("time", *SPARSE_SETTINGS, holds=lambda N: N < 2048),
    "fa1-sparse, long": sparse("time", *SPARSE_SETTINGS, holds=lambda N: N >= 2048),
    "fa1-sparse, memory": sparse("memory", runtime_memory.PLAIN, holds=bool, pass_="fwd+bwd"),
    "fa1-theorem-2": exponents("fwd"),
    "fa1-theorem-5": exponents("bwd"),
    "saha-ye": blocks_over_flash("fwd"),
    "li-liang": blocks_over_flash("bwd"),
}  # fmt: skip

AT = ("head_dim", "causal", "seqlen_q")


def speed(series: str | tuple[str, ...], pass_: str) -> Quantity:
    """Return the speed in fp16, in TFLOP/s, by head dimension, mask and length.

    If there are several series, the fastest series counts.
    """
    return rows("speed_fp16", *AT, series=series, pass_=pass_, fold=max, metric="speed")


def lead(ours: str, of: str, item: str, method: str, peer: str, pass_: str, series: Any) -> Pairs:
    """Return two ratios to compare: how much faster one kernel is than another, ours and published.

    Our ratio is the speed of `ours` / the speed of `series`. The published ratio is the speed of
    `method` / the speed of `peer`, from a figure of a paper.

    | argument | meaning |
    |---|---|
    | ours | our numerator: a series, such as "fa2-mma" |
    | of | the paper, such as "fa2" |
    | item | the figure of the paper, such as "Fig. 5" |
    | method | the paper's numerator, such as "FlashAttention-2" |
    | peer | the paper's divisor, such as "PyTorch" |
    | pass_ | "fwd", "bwd" or "fwd+bwd" |
    | series | our divisor: a series, or several series of which the fastest counts |
    """
    bars = partial(paper, *AT, paper=of, item=item)
    label = "wgmma" if ours == "fa2-wgmma" else "FA-2"
    return {
        f"{label} / {peer}": (speed(ours, pass_) / speed(series, pass_),
                         bars(method=method) / bars(method=peer))
    }  # fmt: skip


def divisor(of: str, item: str, peer: str, pass_: str, series: Any) -> Pairs:
    """Return the speeds of the two divisors in the ratios that `lead` returns, to compare them.

    The first speed is our speed of `series`. The second speed is the published speed of the kernel
    `peer`, from the figure `item` of the paper `of`. The figure was measured on an H100. The ratios
    of `lead` are comparable only if both speeds are about equal (see `Question.control`).
    """
    names = {"fa2": "FA-2", "fa3": "FA-3"}
    return {
        f"{DIVISORS[series]} has {{}} times the speed of {peer} in {names[of]} {item}": (
            speed(series, pass_), paper(*AT, paper=of, item=item, method=peer))
    }  # fmt: skip


FASTER_FA1 = ("fa1-mma", "fa1-mma-splits")
FA1_OF_FA2 = {"FlashAttention": ("fa1", FASTER_FA1), "PyTorch": ("pytorch", "torch-unfused")}
PEERS = {"FA-2": "torch-fa2", "cuDNN": "torch-cudnn", "Standard": "torch-unfused"}
DIVISORS = {
    FASTER_FA1: "our FA-1",
    "torch-unfused": "torch's unfused attention",
    "torch-fa2": "torch's FA-2",
    "torch-cudnn": "torch's cuDNN",
}
CONTROL: dict[str, Pairs] = {}
for item, pass_ in (("4", "fwd+bwd"), ("5", "fwd"), ("6", "bwd"), ("7", "fwd+bwd")):
    for peer, (short, series) in FA1_OF_FA2.items():
        key, figure = f"fa2-fig{item}-{short}", f"Fig. {item}"
        PAIRS[key] = lead("fa2-mma", "fa2", figure, "FlashAttention-2", peer, pass_, series)
        # Figures 4 to 6 were measured on an A100, and Figure 7 on an H100.
        CONTROL[key] = divisor("fa2", "Fig. 7", peer, "fwd+bwd", series)
PAIRS["fa2-fig7-speed"] = {
    "FA-2": (
        speed("fa2-mma", "fwd+bwd"),
        paper(*AT, paper="fa2", item="Fig. 7", method="FlashAttention-2"),
    )
}
for item, pass_, words in (("5", "fwd", (1.5, 2.0)), ("6", "bwd", (1.5, 1.75))):
    ours, figure = speed("fa2-wgmma", pass_), f"Fig. {item}"
    PAIRS[f"fa3-fig{item}-speed"] = {
        "wgmma": (ours, paper(*AT, paper="fa3", item=figure, method="FA-3"))
    }
    for peer, series in PEERS.items():
        key = f"fa3-fig{item}-{peer.lower().replace('-', '')}"
        PAIRS[key] = lead("fa2-wgmma", "fa3", figure, "FA-3", peer, pass_, series)
        CONTROL[key] = divisor("fa3", figure, peer, pass_, series)
    PAIRS[f"fa3-words-{pass_}"] = {
        "wgmma / FA-2": (ours / speed("torch-fa2", pass_), Bounds(*words))
    }
    CONTROL[f"fa3-words-{pass_}"] = divisor("fa3", figure, "FA-2", pass_, "torch-fa2")


def rmse(over: str, under: str) -> Pair:
    """Return two ratios of root mean square errors: ours, and the ratio in the FA-3 paper.

    Our ratio is the error of the series `over` / the error of the series `under`, for inputs with
    outliers. The FA-3 paper's ratio is standard attention / FlashAttention-2.
    """
    ours = partial(rows, "numerics", metric="rmse", dtype="float16", source="measured",
                   causal=False, place="outliers", seqlen_q=max(numerics.SEQLENS))  # fmt: skip
    theirs = partial(paper, paper="fa3", item="Table 3")
    return (ours(series=over) / ours(series=under),
            theirs(method="Standard") / theirs(method="FlashAttention-2"))  # fmt: skip


# FA-2's abstract says that FA-2 is around 2 times as fast as FA-1. Every pass is compared.
PAIRS["fa2-words"] = {
    f"FA-2 / FA-1, {words}": (speed("fa2-mma", pass_) / speed(FASTER_FA1, pass_), 2.0)
    for words, pass_ in (("forward", "fwd"), ("backward", "bwd"), ("both", "fwd+bwd"))
}
# FA-1's paper does not give PyTorch's speed on an H100. FA-2's Figure 7 does.
CONTROL["fa1-fig3-plain"] = divisor("fa2", "Fig. 7", "PyTorch", "fwd+bwd", "torch-unfused")
CONTROL["fa2-words"] = divisor("fa2", "Fig. 7", "FlashAttention", "fwd+bwd", FASTER_FA1)
# FA-3's abstract says that FA-3 reaches up to 740 TFLOP/s in fp16. The largest speed counts.
PAIRS["fa3-words-speed"] = {
    "our FA-2 on wgmma, largest speed": (
        rows("speed_fp16", "head_dim", series=HOPPER, pass_="fwd", metric="speed",
             fold=max).most(), 740.0)
}  # fmt: skip


FP8_GAIN, FP8_SPEED = 2.6, 1200.0  # said in the FA-3 paper's abstract; TFLOP/s


def fp8_rmse(series: str, variant: str) -> Quantity:
    """Return RMSEs with e4m3 inputs that have outliers, by head dimension, at N=16k.

    `variant` says how the inputs are quantised.
    """
    return rows(fp8_errors.NAME, "head_dim", series=series, metric="rmse", dtype=E4M3.name,
                source="measured", place=f"{numerics.OUTLIERS}, {variant}",
                seqlen_q=max(numerics.SEQLENS))  # fmt: skip


def decoding(experiment: str, series: str, method: str, first: int, last: int) -> Pair:
    """Return how decoding times grow with the number of keys: our times and published times.

    The calls have one query row. Each time is divided by the time with `first` keys of the same
    series. Times with more than `last` keys are left out.
    """

    def part(times: Quantity) -> Quantity:
        return times.where(lambda keys: first <= keys <= last).over(0)

    ours = rows(experiment, "seqlen_k", series=series, heads_q=16, heads_k=2, head_dim=128,
                seqlen_q=1, dtype="float16", **TIMES)  # fmt: skip
    theirs = paper("seqlen_k", paper="flash-decoding", item="micro-benchmark", method=method)
    return part(ours), part(theirs)


WHOLE = "decode", "fa2-mma", "FlashAttention v2.0.9"
SPLIT = "decode", "fa2-mma-splits", "Flash-Decoding"


def tokens(series: str) -> Quantity:
    """Return the tokens per second of a complete model by the length of its K/V cache."""
    return rows("decode_model", "seqlen_k", series=series, metric="tokens")


def softmax(name: str) -> Quantity:
    """Return the counted accesses per element of a softmax: "naive", "safe" or "online"."""
    return rows("online_softmax", "seqlen_q", series=f"softmax-{name}", source="counted",
                metric=("loads", "stores"),
                value=lambda row: row.number / (row.batch * row.seqlen_q))  # fmt: skip


def softmax_over_online(series: str) -> Quantity:
    """Return the time of a softmax / the time of the online softmax."""
    times = partial(rows, "online_softmax", "batch", "seqlen_q", **TIMES)
    return times(series=series) / times(series="softmax-online")


def top_k_over_fused(*by: str, **fields: Any) -> Quantity:
    """Return the time of safe softmax and then top-k / the time of the fused kernel.

    There is one number for each combination of values in the columns `by`. `fields` select rows.
    """
    times = partial(rows, "online_softmax", *by, **TIMES, **fields)
    return times(series="safe-top-k") / times(series=softmax_top_k.FUSED)


def accesses_with_top_k(series: str) -> Quantity:
    """Return the counted accesses per element of a softmax with top-k, from 1000 elements on."""
    of = rows("online_softmax", "seqlen_q", series=series, source="counted",
              metric=("loads", "stores"),
              value=lambda row: row.number / (row.batch * row.seqlen_q))  # fmt: skip
    return of.where(lambda V: V >= 1000)


# K -> how many times as fast as safe softmax and then top-k the fused kernel is said to be.
SAID_OF_TOP_K = {5: 5.0, 10: 3.5, 15: 2.0, 30: 1.4}
LONG_VECTORS = {"batch": softmax_top_k.BATCH_OF_PAPER, "seqlen_q": softmax_top_k.V_OF_PAPER}


def ablated(series: str) -> Pairs:
    """Return the gain of an optimisation of the forward kernel on wgmma, and the published gain.

    A gain is the speed with all optimisations / the speed of `series`, a key of ladder.ABLATIONS.
    The published speeds are from Table 2 of the FA-3 paper.
    """
    all_on, without = (ladder.ABLATIONS[name].published for name in (ladder.HOPPER, series))
    assert all_on and without
    speeds = partial(rows, ladder.NAME, metric="speed", seqlen_q=ladder.ABLATED.seqlen_q)
    return {"gain": (speeds(series=ladder.HOPPER) / speeds(series=series), all_on / without)}


def without(series: str) -> Pairs:
    """Return the speeds of the divisors in the ratios that `ablated` returns, to compare them."""
    said = ladder.ABLATIONS[series].published
    assert said
    speeds = rows(ladder.NAME, metric="speed", seqlen_q=ladder.ABLATED.seqlen_q, series=series)
    return {"our kernel without the optimisation has {} times the speed of FA-3's": (speeds, said)}


ACCESSES = partial(paper, paper="online-softmax", item="text")
SOFTMAXES: Pairs = {
    name: (softmax(name), ACCESSES(method=name)) for name in ("naive", "safe", "online")
}
PAIRS |= {
    "fa3-table3": {
        "our kernels": rmse("standard-mma", "fa2-mma"),
        "torch's kernels": rmse("torch-unfused", "torch-fa2"),
    },
    "fa3-table3-fp8": {"our kernels": (
        fp8_rmse(fp8_errors.STANDARD, fp8_errors.TENSOR)
        / fp8_rmse(fp8_errors.FA2, fp8_errors.BOTH), FP8_GAIN)},
    "fa3-words-fp8": {"our FA-2": (
        rows(speed_fp8.NAME, "head_dim", "seqlen_q", series=HOPPER, metric="speed",
             dtype=E4M3.name, causal=False, source="measured").most().most(), FP8_SPEED)},
    "fa3-table2, pipelining": ablated(ladder.NO_OVERLAP),
    "fa3-table2, specialisation": ablated(ladder.NO_PRODUCER),
    "decoding-whole, flat": {"FA-2": decoding(*WHOLE, 256, 4096)},
    "decoding-whole, growing": {"FA-2": decoding(*WHOLE, 4096, 131072)},
    "decoding-split, flat": {"FA-2 with key splits": decoding(*SPLIT, 256, 65536)},
    "decoding-split, growing": {"FA-2 with key splits": decoding(*SPLIT, 65536, 131072)},
    "decoding-model": {"largest ratio, with / without key splits": (
        (tokens("fa2-auto-splits") / tokens("fa2-auto")).most(), 8.0)},
    "softmax-accesses": SOFTMAXES,
    "softmax-top-k-accesses": {
        label: (accesses_with_top_k(series), ACCESSES(method=method))
        for label, series, method in (
            ("safe, then top-k", "safe-top-k", "safe softmax then TopK"),
            ("online, then top-k", "online-top-k", "online softmax then TopK"),
            ("fused", softmax_top_k.FUSED, "online softmax+TopK fused"))},
    **{f"softmax-top-k-lengths, {part}": {"K=5, safe and then top-k / fused": (
        top_k_over_fused("batch", "seqlen_q", place="K=5").where(
            lambda _, V, part=part: (V < 2048) == (part == "short")), Bounds(1.5, 5))}
       for part in ("long", "short")},
    "softmax-top-k-speed": {
        f"K={k}, safe and then top-k / fused": (
            top_k_over_fused(place=f"K={k}", **LONG_VECTORS), said)
        for k, said in SAID_OF_TOP_K.items()},
    "softmax-speed": {"largest ratio, safe / online": (
        softmax_over_online("softmax-safe").most().most(),
        paper(paper="online-softmax", item="abstract"))},
}  # fmt: skip


def rescalings(series: str) -> Quantity:
    """Return how often warps rescale O, by the standard deviation of the scores and by N."""
    return rows(fa4_softmax.NAME, fa4_softmax.deviation, "seqlen_k", series=series,
                metric="rescalings")  # fmt: skip


def share_of(metric: str) -> Quantity:
    """Return the share of the results of FA-4's polynomial that are correct in bf16.

    With the metric "identical", a result is correct if it equals the exact value of 2^x, rounded to
    bf16. With the metric "within_one", it may differ by one unit in the last place.
    """
    series = f"exp2-degree-{fa4_softmax.FA4_DEGREE}"
    return rows(fa4_softmax.NAME, series=series, metric=metric)


KEPT = rescalings("rescale-threshold") / rescalings("rescale-always")
NEARLY_ALL, TENTH = Bounds(MOST, 1), Bounds(0, 0.1)
PAIRS |= {
    "fa4-exp2": {
        "share of results equal to the hardware's": (
            rows(fa4_softmax.NAME, series="exp2-hardware", metric="identical"),
            NEARLY_ALL,
        ),
        "share of equal results": (share_of("identical"), NEARLY_ALL),
        "share of results at most one unit off": (share_of("within_one"), NEARLY_ALL),
    },
    "fa4-rescale, small scores": {
        "rescalings with / without the threshold": (KEPT.where(lambda size, N: size <= 2), TENTH)
    },
    "fa4-rescale, large scores": {
        "rescalings with / without the threshold": (KEPT.where(lambda size, N: size > 2), TENTH)
    },
}
CONTROL |= {f"fa3-table2, {name}": without(series) for name, series in (
    ("pipelining", ladder.NO_OVERLAP), ("specialisation", ladder.NO_PRODUCER))}  # fmt: skip
QUESTIONS = declared(PAIRS, {}, CONTROL)
TABLE = table(QUESTIONS, "figure or table", "published figures")
