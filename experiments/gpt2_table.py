"""Compares FLOPs, accesses and time of a GPT-2 layer (FlashAttention-1 paper, Fig. 2 left).

The sizes are N=1024, d=64, 16 heads and batch size 64, forward and backward, in fp16 and fp32. The
table has the FLOPs as published and as corrected, accesses, L2 and DRAM bytes. The steps of
standard attention are timed one by one, with torch and with our kernels (Fig. 1 right). The fused
kernels are timed too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from .beside import unfused_steps
from .lab.measure import counters, counts, peers, variants
from .lab.measure.series import algorithm, columns, plan, row_fields
from .lab.measure.speeds import PASSES
from .lab.measure.timing import attempt
from .lab.measure.workloads import Inputs, one_head
from .lab.record import EMULATOR, MODEL, Bench, Options, Row, published_numbers
from .lab.show import style, tables

NAME = "gpt2_table"
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    f"the steps with a causal mask and dropout of {unfused_steps.DROPOUT:g}: torch's each timed "
    "alone, those of our kernels by Nsight Compute's gpu__time_duration, one launch of each"
)

BATCH, HEADS, SEQLEN, HEAD_DIM = 64, 16, 1024, 64
QUICK_BATCH, QUICK_SEQLEN = 4, 512
SERIES = {
    "float16": ("standard-mma", "fa1-mma", "fa2-mma"),
    "float32": ("standard-simt", "fa1-simt", "fa2-simt"),
}
PEERS = {"float16": peers.HALF, "float32": peers.FLOAT32}
# The emulator counts one head of this length in seconds. N=1024 backward would take too long.
COUNTED_SEQLEN, QUICK_COUNTED = 256, 128
SECONDS = 0.2  # for the timed calls of a series, if 20 calls would take longer


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the layer's accesses and, on a GPU, its times and bytes in every pass.

    On a GPU, the steps of standard attention are timed one by one too.
    """
    sizes = (QUICK_BATCH, QUICK_SEQLEN) if options.quick else (BATCH, SEQLEN)
    problems = [setting(*sizes, dtype) for dtype in SERIES]
    for problem in problems:
        with device.using("emulator"):  # so that the tiles are the same on every machine
            yield from _model(problem, MODEL)
    head = one_head(QUICK_COUNTED if options.quick else COUNTED_SEQLEN, HEAD_DIM, dtype="float16")
    heads = [(head, series) for series in SERIES["float16"]]
    for problem, series in heads:
        yield from _one_head(problem, series)
    inputs = Inputs(gradient=True)
    yield from bench.counted(heads, "counting on the emulator", partial(_count, inputs=inputs))
    if bench.machine is None:
        return
    peers.say_missing(bench.say)
    for problem in problems:
        yield from _model(problem, bench.machine)
    work = [(p, (*SERIES[p.dtype], *PEERS[p.dtype])) for p in problems]
    yield from variants.plain_times(NAME, work, tuple(PASSES), bench, SECONDS)
    hidden = setting(*sizes, "float16", causal=True)
    yield from unfused_steps.measure(NAME, hidden, inputs, bench)
    yield from _traffic(problems, bench)


def setting(batch: int, seqlen: int, dtype: str, causal: bool = False) -> Problem:
    """Return the problem of the attention layer, with HEADS heads of HEAD_DIM columns."""
    sizes = (batch, HEADS, HEADS, seqlen, seqlen, HEAD_DIM)
    return Problem(*sizes, dtype=dtype, causal=causal)


def _plans(problem: Problem, series: str) -> dict[str, fa_numba.Plan]:
    """Return the plans of a training step by pass, "fwd" and "bwd".

    The forward pass stores the logsumexp too, which the backward pass needs.
    """
    return {
        "fwd": plan(series, problem, return_lse=True),
        "bwd": plan(series, problem, passes="bwd"),
    }


def _model(problem: Problem, machine: str) -> Iterator[Row]:
    for series in SERIES[problem.dtype]:
        planned, _ = attempt(_plans, problem, series)
        for pass_, each in (planned or {}).items():
            common = columns(NAME, series, problem, machine, each.tiles, pass_=pass_)
            yield from counters.traffic(None, each, **common)


def _one_head(problem: Problem, series: str) -> Iterator[Row]:
    with device.using("emulator"):
        planned = _plans(problem, series)
    for pass_, each in planned.items():
        common = columns(NAME, series, problem, MODEL, pass_=pass_)
        yield from counts.totals(each.accesses, **common)


def _count(problem: Problem, series: str, inputs: Inputs) -> Iterator[Row]:
    q, k, v, dout = (x.astype(problem.dtype) for x in inputs(problem))
    options: dict[str, Any] = {"algorithm": algorithm(series), "causal": problem.causal}
    with fa_numba.count_accesses() as forward:
        kept = fa_numba.attention(q, k, v, return_lse=True, **options)
    with fa_numba.count_accesses() as backward:
        fa_numba.attention_backward(dout, q, k, v, *kept, **options)
    for pass_, counted in (("fwd", forward), ("bwd", backward)):
        yield from counts.totals(counted, **columns(NAME, series, problem, EMULATOR, pass_=pass_))


def _traffic(problems: Sequence[Problem], bench: Bench) -> Iterator[Row]:
    work = [
        (problem, series, pass_)
        for problem in problems
        for series in SERIES[problem.dtype]
        for pass_ in ("fwd", "bwd")
    ]
    cases = [counters.Case(s, p, pass_=pass_) for p, s, pass_ in work]
    results = counters.count_or_say(cases, counters.TRAFFIC, bench.say)
    for (problem, series, pass_), result in zip(work, results or (), strict=results is not None):
        common = columns(NAME, series, problem, bench.machine, pass_=pass_)
        yield from counters.traffic(result, **common)


# Matrix products of a training step. FlashAttention computes S again in the backward pass.
PRODUCTS = {"Standard": 6, "FlashAttention": 7}
# Our backward passes compute S again, standard attention's too. torch's unfused attention keeps P.
OUR_PRODUCTS = {"torch-unfused": 6}


def gflop(problem: Problem, products: int) -> float:
    """Return the GFLOP (10^9 FLOPs) of `products` matrix products in every head.

    A product takes 2 N^2 d FLOPs. The numbers that the paper printed are different, because the
    paper did not count all heads (see `printed_gflop`).
    """
    heads = problem.batch * problem.heads_q
    return 2 * products * heads * problem.seqlen_q * problem.seqlen_k * problem.head_dim / 1e9


def printed_gflop(problem: Problem, products: int) -> float:
    """Return the GFLOP (10^9 FLOPs) as the paper printed them.

    The printed number is the sum of two parts. The first part is the FLOPs of matrix products, but
    only of one head per batch entry, although there are more heads. The second part is 14 FLOPs for
    each score (element of S) of all heads.
    """
    scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return gflop(problem, products) / problem.heads_q + 14 * scores / 1e9


def paper(method: str, metric: str, item: str = "Fig. 2 left") -> float:
    """Return the number that the paper prints for a method, "Standard" or "FlashAttention".

    `metric` names the number, such as "runtime", and `item` the figure.
    """
    return published_numbers.value(paper="fa1", item=item, method=method, metric=metric)


CORRECTED = "Fig. 2 left corrected (flash-attention issue 741)"
SETTING = setting(BATCH, SEQLEN, "float16")

Found = dict[tuple[str, str, str], float]


def whole(rows: Iterable[Row], problem: Problem) -> Found:
    """Return the numbers of a problem as {(series, source, quantity): number}.

    | source | quantity | number |
    |---|---|---|
    | "measured" | a pass, such as "fwd+bwd" | time in ms |
    | "model", "l2", "dram" | "GB" | bytes of forward plus backward in GB |

    Rows may contain the closed form ("model") twice: for the tiles of the plan on the emulated
    device, and for the tiles of the plan on a GPU. The result then contains the closed form for the
    GPU's tiles.
    """
    found: Found = {}
    wanted = row_fields(problem)
    sums: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row.machine != MODEL):
        if row.value is None or row.place or not wanted.items() <= vars(row).items():
            continue
        if row.metric == "time":
            found[row.series, "measured", row.pass_] = row.value
        elif row.metric == "traffic":
            sums.setdefault((row.series, row.source, "GB"), {})[row.pass_] = row.value / 1e9
    found |= {key: sum(parts.values()) for key, parts in sums.items() if len(parts) == 2}
    return found


_GROUPS = {
    "standard\nattention": ("standard-mma", "Standard"),
    "FA-1\n(K/V outer)": ("fa1-mma", "FlashAttention"),
    "FA-2\n(Q outer)": ("fa2-mma", None),
}
_BARS = (
    ("model", "accesses (model)", 1.0, None),
    ("l2", "L2 (measured)", 0.6, None),
    ("dram", "DRAM (measured)", 0.3, "///"),
)


def draw(rows: Sequence[Row]) -> Any:
    """Draw FLOPs, bytes and times next to the paper's numbers. Return None without rows."""
    sizes = [(r.batch, r.seqlen_q) for r in rows if r.heads_q == HEADS and not r.place]
    if not sizes:
        return None
    problem = setting(*max(sizes), "float16")
    figure, _ = style.new(1, 1, 7.4)
    figure.clear()
    panels = figure.subplot_mosaic([["steps", "steps"], ["GB", "time"]], height_ratios=[1.15, 1.0])
    unfused_steps.draw(panels["steps"], rows)
    found = whole(rows, problem)
    in_paper = problem == SETTING
    _draw_bytes(panels["GB"], found, in_paper)
    panels["GB"].set_title("global memory of a training step")
    _draw_times(panels["time"], found, in_paper)
    panels["time"].set_title("time of a training step")
    heads = problem.batch * problem.heads_q
    for name in ("GB", "time"):
        what = f"fp16, N={problem.seqlen_q}, d={HEAD_DIM}, batch x heads = {heads}"
        panels[name].set_xlabel(what)
        panels[name].grid(False, axis="x")
    counts.annotate(panels["GB"], rows, 0.55)
    moved = [found.get((f"{name}-mma", "dram", "GB")) for name in ("standard", "fa2")]
    if moved[0] and moved[1]:
        many = moved[0] / moved[1]
        message = f"Standard attention moves {many:.0f} times FA-2's DRAM bytes in training"
        figure.suptitle(message, fontsize=12)
    return figure


def _bar(ax: Any, at: float, value: float, width: float, form: str, **looks: Any) -> None:
    ax.bar(at, value, width, **looks)
    ax.text(at, value, format(value, form), ha="center", va="bottom", fontsize=7.5)


HOLLOW: dict[str, Any] = {"facecolor": "none", "edgecolor": "#CC79A7", "linewidth": 1.4}


def _draw_bytes(ax: Any, found: Found, in_paper: bool) -> None:
    for at, (series, method) in enumerate(_GROUPS.values()):
        for n, (source, _, alpha, hatch) in enumerate(_BARS):
            value = found.get((series, source, "GB"))
            if value is not None:
                looks = {"color": style.COLOURS[series], "alpha": alpha, "hatch": hatch}
                _bar(ax, at - 0.12 + 0.24 * n, value, 0.23, ".3g", **looks)
        if in_paper and method is not None:
            _bar(ax, at - 0.36, paper(method, "hbm_accesses"), 0.21, ".3g", **HOLLOW)
    ax.set_xticks(range(len(_GROUPS)), list(_GROUPS))
    ax.set_ylabel("bytes (GB)")
    ax.margins(y=0.12)
    sources = {source for _, source, _ in found}
    grey = [
        style.patch(name, color="#444444", alpha=alpha, hatch=hatch)
        for source, name, alpha, hatch in _BARS
        if source in sources
    ]
    if in_paper:
        grey.insert(0, style.patch("accesses (published)", **HOLLOW))
    ax.legend(handles=grey, loc="upper right")


def _draw_times(ax: Any, found: Found, in_paper: bool) -> None:
    names = ("standard", "torch's\nunfused", "FA-1", "FA-2", "torch's\nFA-2", "cuDNN")
    shown = dict(zip(_COLUMNS, names, strict=False)) | {peers.CUDNN: names[-1]}
    times = {series: found.get((series, "measured", "fwd+bwd")) for series in shown}
    bars = [(shown[series], time, series) for series, time in times.items() if time is not None]
    if not bars:
        style.empty(ax, "not recorded yet")
        return
    for at, (_, value, series) in enumerate(bars):
        _bar(ax, at, value, 0.7, ".3g", color=style.COLOURS[series])
    ax.set_xticks(range(len(bars)), [label for label, *_ in bars], fontsize=9)
    ax.set_ylabel("time (ms)")
    ax.margins(y=0.12)
    if in_paper:
        ratio = paper("Standard", "runtime") / paper("FlashAttention", "runtime")
        words = f"published, A100:\nstandard takes {ratio:.1f} times\nas long as FA-1"
        ax.text(0.97, 0.95, words, transform=ax.transAxes, ha="right", va="top", fontsize=9)


_COLUMNS = ("standard-mma", peers.UNFUSED, "fa1-mma", "fa2-mma", peers.FLASH)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the paper's figure with our numbers, or None without rows in fp16."""
    half, single = whole(rows, SETTING), whole(rows, replace(SETTING, dtype="float32"))
    if not half:
        return None

    def line(name: str, metric: str, cells: Sequence[str], item: str = "Fig. 2 left") -> list[str]:
        theirs = ["-", "-"]
        if metric:
            theirs = [f"{paper(method, metric, item):g}" for method in PRODUCTS]
        return [name, theirs[0], *cells[:2], theirs[1], *cells[2:]]

    printed = [f"{printed_gflop(SETTING, PRODUCTS[m]):.1f}" for m in PRODUCTS]
    products = [OUR_PRODUCTS.get(series, 7) for series in _COLUMNS]
    lines = [
        line("GFLOP, as printed", "work", [printed[0], "-", printed[1], printed[1], "-"]),
        line("GFLOP, corrected", "work", [f"{gflop(SETTING, n):.0f}" for n in products], CORRECTED),
    ]
    for source, name in (("model", "GB accessed"), ("l2", "GB, L2"), ("dram", "GB, DRAM")):
        cells = [tables.number(half, (s, source, "GB"), ".1f") for s in _COLUMNS]
        lines.append(line(name, "hbm_accesses" if source == "model" else "", cells))
    for pass_, name in PASSES.items():
        cells = [tables.number(half, (s, "measured", pass_), ".2f") for s in _COLUMNS]
        lines.append(line(f"ms, {name}", "runtime" if pass_ == "fwd+bwd" else "", cells))
    names = [s.replace("-mma", "-simt").replace(peers.FLASH, peers.EFFICIENT) for s in _COLUMNS]
    cells = [tables.number(single, (s, "measured", "fwd+bwd"), ".1f") for s in names]
    lines.append(line("ms, forward + backward, fp32", "", cells))
    header = [
        "forward + backward",
        "standard, published (A100)",
        "standard",
        "torch's unfused attention",
    ]
    header += ["FlashAttention, published (A100)", "FA-1", "FA-2", "torch's FlashAttention-2"]
    caption = (
        "The GPT-2 table is about one attention layer of GPT-2, in fp16 with N=1024, d=64, 16 "
        "heads and batch 64. The row *GFLOP, as printed* counts FLOPs in the same way as the "
        "table in FlashAttention's Figure 2. The row *GFLOP, corrected* counts the FLOPs of all "
        "matrix products in attention. In the row *GFLOP, corrected*, the numbers of our kernels "
        "include the matrix product that computes S again in the backward pass. In the fp32 row "
        "of the GPT-2 table, our kernels run on CUDA cores. In the fp32 row of the GPT-2 table, "
        "the last column contains the time of torch's memory-efficient attention."
    )
    return tables.of(caption, header, lines)


TABLES = {"gpt2_steps": unfused_steps.table}
