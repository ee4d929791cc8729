"""Measures the speed in fp16 on tensor cores (FlashAttention-2 paper, Figs. 4 to 7).

All passes are measured over the sequence length. The series are both loop orders, FA-1 with query
splits, both orders on wgmma, standard attention, torch's kernels where torch is installed, and the
published curves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .beside import paper_bars
from .lab.measure import peers, speeds
from .lab.measure.check import ROUNDING
from .lab.measure.series import HALF, HOPPER, LABELS, MMA_SPLITS
from .lab.measure.workloads import HEAD_DIMS
from .lab.record import Row, published_numbers, select, values
from .lab.show import speed_figures, style, tables
from .lab.show.tables import Across

NAME = "speed_fp16"
NEEDS = ("GPU",)
STUDY = speeds.Study(
    NAME,
    dtype="float16",
    passes=("fwd", "bwd", "fwd+bwd"),
    ours=HALF,
    theirs=(*peers.HALF, peers.UNFUSED_MASKED, peers.FA4),
    forward_dims=(256,),
    figures=("Fig. 4", "Fig. 5", "Fig. 6", "Fig. 7"),
    rarely=(peers.EFFICIENT, *peers.FLEX_BACKENDS, peers.PALLAS),
)

measure = partial(speeds.measure, STUDY)
peer_calls = partial(speeds.peer_calls, STUDY)


# The series of the figure: standard attention, FA-1 with query splits, FA-2, and torch's kernels.
DRAWN = ("standard-mma", MMA_SPLITS, "fa2-mma", HOPPER, peers.FLASH, peers.CUDNN, peers.FA4)


def draw(rows: Sequence[Row]) -> Any:
    """Draw the forward speeds over the sequence length. Return None without rows."""
    plain = {"metric": "speed", "causal": False, "pass_": "fwd"}
    speed = values(rows, "series", "seqlen_q", "head_dim", **plain)
    over = [
        value / speed[MMA_SPLITS, N, d]
        for (series, N, d), value in speed.items()
        if series == "fa2-mma" and (MMA_SPLITS, N, d) in speed and d in HEAD_DIMS
    ]
    message = "Q outer (FA-2) is faster than K/V outer (FA-1)"
    if over:
        message = f"Q outer is at least {min(over):.1f} times as fast as K/V outer"
    return speed_figures.forward(rows, DRAWN, message)


# File name of a figure -> (paper, published figure) in this setting and dtype.
PAPERS = {
    **{f"fa2_fig{n}": ("fa2", f"Fig. {n}") for n in (4, 5, 6, 7)},
    **{f"fa3_fig{n}": ("fa3", f"Fig. {n}") for n in (5, 6)},
}
Ratio = tuple[float, float, float]  # median, and the ends of the range


def over_cudnn(rows: Sequence[Row]) -> dict[tuple[str, int, bool], dict[int, Ratio]]:
    """Return {(pass, head dimension, mask): {N: our FA-2's speed on wgmma / cuDNN's speed}}.

    The range of a ratio follows from p20 and p80 of the two speeds. A speed without p20 and p80 has
    no range.
    """
    found: dict[tuple[str, int, bool], dict[int, Ratio]] = {}
    known = {
        (row.series, row.pass_, row.head_dim, row.causal, row.seqlen_q): (
            row.number, row.p20 or row.number, row.p80 or row.number)
        for row in select(rows, metric="speed", series=(HOPPER, peers.CUDNN))
        if not row.failed
    }  # fmt: skip
    for (series, pass_, d, causal, N), (ours, low, high) in known.items():
        theirs = known.get((peers.CUDNN, pass_, d, causal, N))
        if series == HOPPER and theirs is not None:
            ratio = ours / theirs[0], low / theirs[2], high / theirs[1]
            found.setdefault((pass_, d, causal), {})[N] = ratio
    return found


# Colours of the head dimensions.
_OF_DIM = {64: "#0072B2", 128: "#D55E00", 256: "#009E73"}


def cudnn(rows: Sequence[Row]) -> Any:
    """Draw our FA-2's speed on wgmma / cuDNN's speed for every measured call, with ranges.

    Return None without ratios.
    """
    found = over_cudnn(rows)
    passes = [pass_ for pass_ in ("fwd", "bwd") if any(at[0] == pass_ for at in found)]
    if not passes:
        return None
    figure, (axes,) = style.new(1, len(passes), 3.9, sharey=True)
    for pass_, ax in zip(passes, axes, strict=True):
        for (of, d, causal), ratios in sorted(found.items()):
            if of != pass_:
                continue
            lengths, numbers = zip(*sorted(ratios.items()), strict=True)
            middle, low, high = zip(*numbers, strict=True)
            # The median of our speed and of cuDNN's may be outside of the range of the ratio.
            spread = [[max(m - x, 0.0) for m, x in zip(middle, low, strict=True)],
                      [max(x - m, 0.0) for m, x in zip(middle, high, strict=True)]]  # fmt: skip
            look: dict[str, Any] = {"color": _OF_DIM[d], "ls": "--" if causal else "-"}
            label = f"d={d}, causal" if causal else f"d={d}, no mask"
            ax.errorbar(lengths, middle, spread, marker="o", ms=4, capsize=2, label=label, **look)
        ax.axhline(1.0, color="#555555", lw=1.0, zorder=1)
        style.sizes(ax, sorted({N for of in found.values() for N in of}), "sequence length N")
        ax.set_title(speeds.PASSES[pass_])
    axes[0].set_ylabel("FA-2's speed / cuDNN's speed")
    every = [
        ratio for (of, *_), of_n in found.items() if of in passes for ratio, *_ in of_n.values()
    ]
    ahead = sum(ratio > 1 for ratio in every)
    message = f"In {ahead} of {len(every)} cases, FA-2 on wgmma is faster than cuDNN"
    style.legend(figure, list(style.handles(axes).values()), message, 3)
    return figure


FIGURES: dict[str, Callable[..., Any]] = {
    **{name: partial(paper_bars.draw, *item) for name, item in PAPERS.items()},
    "fa2_over_cudnn": cudnn,
}

table = partial(
    speed_figures.table,
    STUDY,
    caption="The table of fp16 speeds contains TFLOP/s in fp16 at the longest measured N.",
)


# Our series -> index in _METHODS of the method with which the series is compared.
_KINDS = {"fa2-mma": 0, "fa1-mma": 1, MMA_SPLITS: 1, peers.UNFUSED: 2}
_METHODS = ("FlashAttention-2", "FlashAttention", "PyTorch")


def paper_figures(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table that compares our ratios of speeds with the FA-2 paper's figures."""
    speed = values(rows, "pass_", "head_dim", "causal", "seqlen_q", "series", metric="speed")
    if not speed:
        return None
    lines = []
    for item in STUDY.figures:
        about = published_numbers.lookup(paper="fa2", item=item)[0]
        gpu, pass_ = about["hardware"].split("-")[0], about["pass"]
        for d in sorted({key[1] for key in speed if key[1] in HEAD_DIMS}):
            ratios: list[list[float]] = [[] for _ in range(5)]
            same = sizes = 0
            for causal in (False, True):
                theirs = speed_figures.published_speeds((item,), pass_, d, causal)
                paper = [theirs.get((name, gpu), {}) for name in _METHODS]
                here: list[dict[int, float]] = [{}, {}, {}]
                for (*place, N, series), value in speed.items():
                    if place == [pass_, d, causal] and series in _KINDS:
                        kind = here[_KINDS[series]]
                        kind[N] = max(value, kind.get(N, 0.0))
                both = sorted(set.intersection(*map(set, (*paper, *here))))
                same += sum(_order(paper, N) == _order(here, N) for N in both)
                sizes += len(both)
                pairs = [(x[0], x[n]) for n in (1, 2) for x in (paper, here)]
                for n, (over, under) in enumerate((*pairs, (here[0], paper[0]))):
                    ratios[n] += [over[N] / under[N] for N in over if N in under]
            cells = [tables.span(found) if found else tables.MISSING for found in ratios]
            lines.append([item, gpu, pass_, str(d), *cells, f"{same} of {sizes}"])
    header = [
        *("figure", "GPU", "pass", "d"),
        *("published FA-2 / FA-1", "our FA-2 / FA-1"),
        *("published FA-2 / PyTorch", "our FA-2 / torch's unfused attention"),
        "our FA-2 / published FA-2",
        "sizes where FA-1, FA-2 and unfused attention rank as published",
    ]
    caption = (
        "The table is for calls in fp16, with 16k tokens (batch x N) and a hidden dimension "
        "(heads x d) of 2048. Each cell contains the smallest and the largest ratio over all N, "
        "with and without a causal mask."
    )
    return tables.of(caption, header, lines)


def _order(curves: Sequence[Mapping[int, float]], N: int) -> list[int]:
    return sorted(range(len(curves)), key=lambda n: -curves[n][N])


def hopper(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the speed of FA-2 on wgmma, divided by the speeds of other kernels."""
    peak = values(rows, "series", metric="speed").get(peers.MATMUL)
    lines = []
    at = values(rows, "pass_", "head_dim", "causal", metric="speed", series=HOPPER)
    for pass_, d, causal in sorted(at):
        where = {"metric": "speed", "pass_": pass_, "head_dim": d, "causal": causal}
        own, *others = (
            values(rows, "seqlen_q", series=series, **where)
            for series in (HOPPER, "torch-cudnn", "torch-fa2", "fa2-mma")
        )
        there = {"pass": pass_, "head_dim": str(d), "causal": str(causal).lower()}
        fa3 = published_numbers.lookup(paper="fa3", method="FA-3", metric="speed", **there)
        others.append({int(line["seqlen"]): float(line["value"]) for line in fa3})
        cells = [tables.spread([own[N] / of[N] for N in own if N in of]) for of in others]
        fastest = max(own.values())
        share = tables.MISSING if peak is None else f"{100 * fastest / peak:.0f} %"
        lines.append([pass_, str(d), tables.yes_no(causal), f"{fastest:.0f}", share, *cells])
    header = [
        *("pass", "d", "causal", "fastest, TFLOP/s", "fastest / torch's matrix product"),
        *("speed / cuDNN", "speed / torch's FlashAttention-2", "speed / our FA-2 on mma"),
        "speed / published FA-3 (H100)",
    ]
    caption = (
        "The table of speeds on wgmma contains the speed of our FA-2 on wgmma in fp16, with 16k "
        "tokens (batch x N). The column *fastest* has the highest speed of our FA-2 on wgmma over "
        "all N. A column *speed / X* shows the speed of our FA-2 on wgmma divided by the speed of "
        "X. Each cell of a column *speed / X* contains the smallest, the median and the largest "
        "ratio over all N."
    )
    return tables.of(caption, header, lines)


def further_peers(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of further peers' forward speeds, or None without such speeds."""
    speed = values(rows, "head_dim", "causal", "seqlen_q", "series", metric="speed", pass_="fwd")
    peer = [s for s in STUDY.rarely if any(key[-1] == s for key in speed)]
    if not peer:
        return None
    shown, lines = (HOPPER, *peer), []
    for at in sorted({key[:-1] for key in speed if key[-1] in peer}):
        of = {series: speed[*at, series] for series in shown if (*at, series) in speed}
        d, causal, N = at
        fastest = max((of[s] for s in peer if s in of), default=None)
        ratio = tables.MISSING
        if fastest is not None and HOPPER in of:
            ratio = f"{of[HOPPER] / fastest:.2f}"
        cells = [tables.number(of, series, ".0f") for series in shown]
        lines.append([str(d), tables.yes_no(causal), str(N), *cells, ratio])
    header = ["d", "causal", "N", *(LABELS[series] for series in shown)]
    header += [f"{LABELS[HOPPER]} / fastest other"]
    caption = (
        "The table of further peers contains forward speeds in fp16 in TFLOP/s, with 16k tokens "
        "and a hidden dimension of 2048. Torch's memory-efficient attention is the kernel that "
        "xformers contributed to torch. torch's flex_attention is compiled for each problem: by "
        "Triton, or with flash-attn-4's kernel (backend FLASH). JAX's Pallas attention is "
        "`jax.experimental.pallas.ops.gpu.attention_mgpu`. A dash means that the series is not "
        "measured or failed."
    )
    return tables.of(caption, header, lines)


def worst_errors(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Return the largest error and the largest excess, by (dtype, series).

    The excess is the series' error minus the error of torch's FlashAttention-2 for the same problem
    and pass. The unit of the excess is one rounding of the dtype. The excess is None if no error of
    torch's FlashAttention-2 was measured.
    """
    found: dict[tuple[str, str], dict[tuple, float]] = {}
    for row in select(rows, metric="error"):
        place = (row.pass_, *tables.sizes(row), row.batch)
        found.setdefault((row.dtype, row.series), {})[place] = row.number
    worst: dict[tuple[str, str], tuple[float, float | None]] = {}
    for (dtype, series), mine in found.items():
        theirs = found.get((dtype, peers.FLASH), {})
        excess = [(mine[at] - theirs[at]) / ROUNDING[dtype] for at in mine if at in theirs]
        worst[dtype, series] = max(mine.values()), max(excess, default=None)
    return worst


def errors(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the largest errors of each series in fp16 and bf16."""
    worst, lines = worst_errors(rows), []
    for dtype, series in sorted(worst, key=lambda at: (at[0] == "bfloat16", at[1])):
        largest, excess = worst[dtype, series]
        more = tables.MISSING if excess is None else f"{excess:.2f}"
        lines.append([speeds.DTYPES[dtype], LABELS[series], f"{largest:.2e}", more])
    header = ["dtype", "series", "largest relative error", "largest excess, roundings"]
    caption = (
        "The table shows the largest relative error of each series over all checked passes and "
        "problems. An error is the difference from a float64 result for equal inputs. The "
        "*excess* of a series is its error minus the error of torch's FlashAttention-2 on the "
        "same problem. The unit of the excess is the error of rounding once to the dtype (fp16 or "
        "bf16)."
    )
    return tables.of(caption, header, lines)


# Figures with a bar of unfused attention on an H100: (paper, figure, pass, name of the bar).
BASELINES = (
    ("fa2", "Fig. 7", "fwd+bwd", "PyTorch"),
    ("fa3", "Fig. 5", "fwd", "Standard"),
    ("fa3", "Fig. 6", "bwd", "Standard"),
)
# Our series without fused attention, which are compared with these bars.
UNFUSED = (peers.UNFUSED, peers.UNFUSED_MASKED, "standard-mma")


def baselines(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of how far unfused attention is from the papers' unfused attention.

    Return None without speeds of our series in UNFUSED.
    """
    of = ("pass_", "head_dim", "causal", "seqlen_q")
    known = {series: values(rows, *of, series=series, metric="speed") for series in UNFUSED}
    lines = []
    for paper, item, pass_, method in BASELINES:
        short = {"fa2": "FA-2", "fa3": "FA-3"}[paper]
        wanted = {"paper": paper, "item": item, "method": method}
        bars = published_numbers.lookup(metric="speed", **wanted)
        places = sorted({(int(bar["head_dim"]), bar["causal"] == "true") for bar in bars})
        for d, causal in places:
            theirs = {
                int(bar["seqlen"]): float(bar["value"])
                for bar in bars
                if (int(bar["head_dim"]), bar["causal"] == "true") == (d, causal)
            }
            cells = []
            for series in UNFUSED:
                ours = {N: known[series].get((pass_, d, causal, N)) for N in theirs}
                ratios = [value / theirs[N] for N, value in ours.items() if value is not None]
                cells.append(tables.spread(ratios) if ratios else tables.MISSING)
            if any(cell != tables.MISSING for cell in cells):
                published = tables.span(list(theirs.values()))
                name = f"{method}, {short} {item}"
                lines.append([name, pass_, str(d), tables.yes_no(causal), published, *cells])
    header = ["published", "pass", "d", "causal", "published TFLOP/s (H100)"]
    header += [f"{LABELS[series]} / published" for series in UNFUSED]
    caption = (
        "The table of baselines shows how fast our three unfused baselines are, compared with the "
        "unfused attention in the papers' figures. A ratio cell has the smallest, the median and "
        "the largest ratio over all published N. All three baselines fold the scale into the "
        "product Q Kᵀ. *Torch's unfused attention* hides scores in a pass of its own, as the "
        "papers' benchmark does. In the other two baselines, a mask costs no pass over S. Memory "
        "bandwidth limits unfused attention, so that a GPU with faster memory than an H100 gives "
        "larger ratios."
    )
    return tables.of(caption, header, lines) if lines else None


TABLES = {
    "baselines": baselines,
    "fa2_figures": paper_figures,
    "hopper": hopper,
    "further_peers": further_peers,
    "errors": Across(errors, ("speed_fp16", "speed_bf16")),
}
