"""The tables of paper_repro.md, made from stored rows between markers.

<!-- table: NAME -->
...
<!-- end: NAME -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fa_numba import io_model
from fa_numba.problem import Problem

from . import peers, published, speeds, timing, variants
from .options import FIGURES, REPOSITORY
from .provenance import when_and_where
from .series import BACKWARD_LABELS, LABELS
from .store import MODEL, PUBLISHED, Row, Store

PAGE = REPOSITORY / "paper_repro.md"
# The GPU of the page's numbers: whatever else is recorded, the page stays as it is.
MACHINE = "nvidia-h200"
NO_RECORDING = "no recording yet"
_BLOCK = re.compile(
    r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<end><!-- end: (?P=name) -->)",
    re.DOTALL,
)


def _gpu_rows(store: Store, experiment: str) -> tuple[list[Row], str]:
    """The recording of MACHINE and a line that says what it is."""
    if MACHINE not in store.machines(experiment):
        return [], ""
    about = store.provenance(experiment, MACHINE)
    name = (about.get("device") or {}).get("name", MACHINE)
    line = f"{when_and_where(about, name)}; figures/data/{experiment}/{MACHINE}.csv"
    return store.read(experiment, MACHINE), line


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _value(row: Row | None, shown: Callable[[float], str]) -> str:
    if row is None:
        return "-"
    return "failed" if row.value is None else shown(row.value)


def speed(store: Store) -> str:
    """TFLOP/s of every series, and FA-2 over torch's memory-efficient kernel."""
    from experiments.speed import STUDY

    shown = ("fa1-simt", "fa1-simt-splits", "fa2-simt", "standard-simt", *STUDY.theirs)
    return _speeds(store, STUDY, shown, LABELS, "TFLOP/s, forward, fp32.")


def speed_backward(store: Store) -> str:
    """TFLOP/s of the backward pass, alone and with the forward one, as `speed` gives them."""
    from experiments.speed_backward import STUDY

    return _speeds(store, STUDY, STUDY.series, BACKWARD_LABELS, "TFLOP/s, fp32.")


def speed_fp16(store: Store) -> str:
    """fp16 TFLOP/s of every pass and series, and FA-2 over torch's."""
    from experiments.speed_fp16 import STUDY

    return _speeds(store, STUDY, STUDY.series, LABELS, "TFLOP/s, fp16.")


def speed_bf16(store: Store) -> str:
    """bf16 TFLOP/s of FA-2 and torch's."""
    from experiments.speed_bf16 import STUDY

    return _speeds(store, STUDY, STUDY.series, LABELS, "TFLOP/s, forward + backward, bf16.")


def _speeds(
    store: Store,
    study: Any,
    shown: Sequence[str],
    labels: Mapping[str, str],
    text: str,
) -> str:
    """TFLOP/s of the series, and our FA-2 over torch's first kernel."""
    rows, source = _gpu_rows(store, study.name)
    found = {
        (r.pass_, r.head_dim, r.causal, r.seqlen_q, r.series): r
        for r in rows
        if r.metric == "speed"
    }
    if not found:
        return NO_RECORDING + "\n"
    ours, peer = next(s for s in shown if s in ("fa2-simt", "fa2-mma")), study.theirs[0]
    several = len(study.passes) > 1
    lines = []
    for pass_, d, causal, N in sorted({key[:4] for key in found}):
        cells = {series: found.get((pass_, d, causal, N, series)) for series in shown}
        numbers = [_value(cell, lambda v: f"{v:.1f}") for cell in cells.values()]
        pair = [cell.value if cell else None for cell in (cells[ours], cells[peer])]
        ratio = f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else "-"
        place = [str(d), "yes" if causal else "no", str(N)]
        lines.append([*([pass_] if several else []), *place, *numbers, ratio])
    header = ["d", "causal", "N", *(labels[s] for s in shown), f"FA-2 / {labels[peer]}"]
    if several:
        header.insert(0, "pass")
    return f"{text} {source}\n\n" + _markdown(header, lines)


def fa2_figures(store: Store) -> str:
    """What the FA-2 paper's Figs. 4 to 7 say of the three algorithms, beside ours at each size."""
    from experiments.speed_fp16 import STUDY

    rows, source = _gpu_rows(store, STUDY.name)
    speed = {
        (r.pass_, r.head_dim, r.causal, r.seqlen_q, r.series): r.value
        for r in rows
        if r.metric == "speed" and r.value is not None
    }
    if not speed:
        return NO_RECORDING + "\n"
    lines = []
    for item in STUDY.figures:
        about = published.lookup(paper="fa2", item=item)[0]
        gpu, pass_ = about["hardware"].split("-")[0], about["pass"]
        for d, causal in sorted({key[1:3] for key in speed}):
            theirs = speeds.published_speeds((item,), pass_, d, causal)
            paper = [
                theirs.get((name, gpu), {})
                for name in ("FlashAttention-2", "FlashAttention", "PyTorch")
            ]
            here: list[dict[int, float]] = [{}, {}, {}]
            for (*place, N, series), value in speed.items():
                if place == [pass_, d, causal] and series in _KINDS:
                    kind = here[_KINDS[series]]
                    kind[N] = max(value, kind.get(N, 0.0))
            both = sorted(set.intersection(*map(set, (*paper, *here))))
            same = sum(_order(paper, N) == _order(here, N) for N in both)
            lines.append(
                [
                    item,
                    gpu,
                    pass_,
                    str(d),
                    "yes" if causal else "no",
                    *(_range(x[0], x[1]) for x in (paper, here)),
                    *(_range(x[0], x[2]) for x in (paper, here)),
                    _range(here[0], paper[0]),
                    f"{same} of {len(both)}",
                ]
            )
    header = [
        *("figure", "GPU", "pass", "d", "causal"),
        *("FA-2 / FA-1, published", "ours"),
        *("FA-2 / standard, published", "ours"),
        "our FA-2 / published FA-2",
        "sizes with the published order",
    ]
    return (
        "Ratios of TFLOP/s, the smallest and the largest over N; of our FA-1 the faster grid at "
        f"each N. {source}\n\n" + _markdown(header, lines)
    )


# Series that stand for FA-2, FA-1 and standard attention in the paper's figures.
_KINDS = {"fa2-mma": 0, "fa1-mma": 1, "fa1-mma-splits": 1, "standard-mma": 2}


def _order(curves: Sequence[Mapping[int, float]], N: int) -> list[int]:
    """The curves from the fastest at N to the slowest."""
    return sorted(range(len(curves)), key=lambda n: -curves[n][N])


def _range(over: Mapping[int, float], under: Mapping[int, float]) -> str:
    """The smallest and the largest ratio at the sizes that both have."""
    ratios = [over[N] / under[N] for N in over if N in under]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def errors(store: Store) -> str:
    """The largest error of each series in 16 bits, and how far it is beyond torch's FA-2."""
    lines, sources = [], []
    for study in _half_studies():
        rows, source = _gpu_rows(store, study.name)
        found = worst_errors(rows)
        if found:
            sources.append(source)
        for (pass_, series), (largest, excess) in sorted(found.items()):
            more = "-" if excess is None else f"{excess:.2f}"
            name = LABELS[series]
            lines.append([speeds.DTYPES[study.dtype], pass_, name, f"{largest:.2e}", more])
    if not lines:
        return NO_RECORDING + "\n"
    header = ["dtype", "pass", "series", "largest error", "largest excess over torch FA-2"]
    return (
        "Relative to float64 of the same inputs, over all problems checked; the excess is in "
        f"roundings of the result. {'; '.join(sources)}\n\n" + _markdown(header, lines)
    )


def _half_studies() -> list[Any]:
    from experiments import speed_bf16, speed_fp16

    return [speed_fp16.STUDY, speed_bf16.STUDY]


def worst_errors(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """(pass, series) -> the largest error, and the largest excess over torch's FA-2 at one problem
    in roundings of the dtype; None where torch's was not measured."""
    found: dict[tuple[str, str], dict[tuple, float]] = {}
    roundings = {}
    for row in rows:
        if row.metric == "error" and row.value is not None:
            place = (row.dtype, *_sizes(row), row.batch)
            found.setdefault((row.pass_, row.series), {})[place] = row.value
            roundings[place] = timing.ROUNDING[row.dtype]
    worst: dict[tuple[str, str], tuple[float, float | None]] = {}
    for (pass_, series), values in found.items():
        theirs = found.get((pass_, peers.FLASH), {})
        excess = [(values[at] - theirs[at]) / roundings[at] for at in values if at in theirs]
        worst[pass_, series] = max(values.values()), max(excess) if excess else None
    return worst


def memory(store: Store) -> str:
    """Peak memory beside inputs and outputs, in MiB."""
    rows, source = _gpu_rows(store, "speed")
    found = {(r.head_dim, r.causal, r.seqlen_q, r.series): r for r in rows if r.metric == "memory"}
    if not found:
        return NO_RECORDING + "\n"
    shown = ("fa1-simt", "fa2-simt", "standard-simt", "torch-efficient", "torch-unfused")
    lines = []
    for d, causal, N in sorted({key[:3] for key in found}):
        cells = [found.get((d, causal, N, series)) for series in shown]
        numbers = [_value(cell, lambda v: f"{v:.4g}") for cell in cells]
        lines.append([str(d), "yes" if causal else "no", str(N), *numbers])
    header = ["d", "causal", "N", *(LABELS[s] for s in shown)]
    return f"MiB beside inputs and outputs. {source}\n\n" + _markdown(header, lines)


def block_size(store: Store) -> str:
    """Accesses and runtime over the block size, the paper's beside ours."""
    from experiments import block_size as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    published = {(r.Bc, r.metric): r.value for r in experiment.published_rows()}
    times = {
        (r.series, r.Br, r.Bc): r
        for r in rows
        if r.metric == "time"
        and (r.seqlen_q, r.head_dim, r.causal) == (experiment.SEQLEN, experiment.HEAD_DIM, False)
    }
    model: dict[tuple[str, int | None, int | None], float] = {}
    for r in store.read(experiment.NAME, MODEL):
        of_the_paper = (r.batch, r.seqlen_q, r.head_dim, r.causal) == (
            experiment.BATCH,
            experiment.SEQLEN,
            experiment.HEAD_DIM,
            False,
        )
        if of_the_paper and r.unit == "elements" and r.value is not None:
            key = (r.series, r.Br, r.Bc)
            model[key] = model.get(key, 0) + r.value * io_model.ELEMENT_BYTES / 1e9
    if not model:
        return NO_RECORDING + "\n"
    heads = experiment.HEADS
    N, d = experiment.SEQLEN, experiment.HEAD_DIM
    problem = Problem(experiment.BATCH, heads, heads, N, N, d)
    lines = []
    for size in experiment.SIZES:
        fixed = experiment.FIXED
        k_outer, q_outer = ("fa1-simt", fixed, size), ("fa2-simt", size, fixed)
        paper_gb, paper_ms = published.get((size, "traffic")), published.get((size, "time"))
        lines.append(
            [
                str(size),
                "-" if paper_gb is None else f"{paper_gb / 1e9:.2f}",
                f"{io_model.fa1_paper_gb(problem, size):.2f}",
                *(f"{model[s]:.2f}" if s in model else "-" for s in (k_outer, q_outer)),
                "-" if paper_ms is None else f"{paper_ms:.1f}",
                _value(times.get(k_outer), lambda v: f"{v:.1f}"),
                _value(times.get(q_outer), lambda v: f"{v:.1f}"),
            ]
        )
    header = [
        "block size",
        "paper, GB (2 B)",
        "its formula, GB (2 B)",
        "K/V outer over B_c, GB (4 B)",
        "Q outer over B_r, GB (4 B)",
        "paper, ms (A100, fp16)",
        "K/V outer, ms",
        "Q outer, ms",
    ]
    note = source or f"runtime of ours: {NO_RECORDING}"
    return f"The other block size is {experiment.FIXED}. {note}\n\n" + _markdown(header, lines)


def io_vs_seqlen(store: Store) -> str:
    """Model, L2 and DRAM bytes of a call."""
    rows, source = _gpu_rows(store, "io_vs_seqlen")
    found = {
        (r.head_dim, r.seqlen_q, r.series, r.source): r
        for r in rows
        if r.metric == "traffic" and not r.causal
    }
    if not found:
        return NO_RECORDING + "\n"
    lines = []
    for d, N, series in sorted({key[:3] for key in found}):
        cells = [found.get((d, N, series, kind)) for kind in ("model", "l2", "dram")]
        numbers = [_value(cell, lambda v: f"{v / 1e9:.3g}") for cell in cells]
        lines.append([str(d), str(N), LABELS[series], *numbers])
    header = ["d", "N", "algorithm", "model, GB", "L2, GB", "DRAM, GB"]
    return f"Forward, fp32, 16k tokens, hidden dimension 2048. {source}\n\n" + _markdown(
        header, lines
    )


def loop_cost(store: Store) -> str:
    """The factor of every step from FA-1's grid to FA-2, and what was measured of each."""
    from experiments import loop_cost as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    if not rows:
        return NO_RECORDING + "\n"
    measured: dict[str, tuple[str, Callable[[float], str]]] = {
        "time": ("ms", lambda v: f"{v:.2f}"),
        "speed": ("TFLOP/s", lambda v: f"{v:.1f}"),
        "instructions": ("warp instructions, 10^9", lambda v: f"{v / 1e9:.2f}"),
        "issue": ("issue, active cycles", lambda v: f"{v:.3f}"),
        "issue_elapsed": ("issue, all cycles", lambda v: f"{v:.3f}"),
        "stall_global": ("warps waiting for global memory per issue", lambda v: f"{v:.2f}"),
    }
    traffic = {"model": "model, GB", "l2": "L2, GB", "dram": "DRAM, GB"}
    gains = {
        "total": "FA-1 / FA-2",
        "grid": "grid",
        "order": "loop order",
        "instructions": "its instructions",
        "waiting": "its waiting",
        "rest": "its rest",
        "tiles": "tiles",
    }
    gain_lines, step_lines = [], []
    for problem, mine in variants.problems_of(rows).items():
        sizes = [str(problem.head_dim), "yes" if problem.causal else "no", str(problem.seqlen_q)]
        factors = experiment.factors(variants.values(mine))
        gain_lines.append(
            [*sizes, *("-" if factors[n] is None else f"{factors[n]:.2f}" for n in gains)]
        )
        found = {(r.series, r.source, r.metric): r for r in mine}
        for series, name in experiment.STEPS.items():
            cells = [
                _value(found.get((series, "measured", metric)), shown)
                for metric, (_, shown) in measured.items()
            ]
            cells += [
                _value(found.get((series, kind, "traffic")), experiment.gigabytes)
                for kind in traffic
            ]
            step_lines.append([*sizes, name, *cells])
    sizes = ["d", "causal", "N"]
    step_header = [*sizes, "step", *(name for name, _ in measured.values()), *traffic.values()]
    return (
        "How many times faster each step is: FA-1 / FA-2 = grid x loop order x tiles, and loop "
        f"order = instructions x waiting x rest. Forward, fp32, 16k tokens, hidden dimension "
        f"2048. {source}\n\n{_markdown([*sizes, *gains.values()], gain_lines)}\n"
        f"What was measured of each step:\n\n{_markdown(step_header, step_lines)}"
    )


def ladder(store: Store) -> str:
    """The speed of every step, its gain, what was predicted of it, and what was counted."""
    from experiments import ladder as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    if not rows:
        return NO_RECORDING + "\n"
    predicted = experiment.predictions()
    measured: dict[str, Callable[[float], str]] = {
        "speed": lambda v: f"{v:.1f}",
        "instructions": lambda v: f"{v / 1e9:.2f}",
        "wavefronts": lambda v: f"{v / 1e9:.2f}",
        "conflicts": lambda v: f"{v / 1e9:.3f}",
    }
    lines = []
    for problem, mine in variants.problems_of(rows).items():
        sizes = [str(problem.head_dim), "yes" if problem.causal else "no", str(problem.seqlen_q)]
        found = {(r.series, r.metric): r for r in mine if r.source == "measured"}
        gains = experiment.gains(mine)
        for series, label in experiment.LABELS.items():
            speed, *counted = (
                _value(found.get((series, metric)), shown) for metric, shown in measured.items()
            )
            tiles = found.get((series, "speed"))
            block = f"{tiles.Br} x {tiles.Bc}" if tiles is not None and tiles.Br else "-"
            pair = [_cell(values, series, ".2f") for values in (gains, predicted)]
            lines.append([*sizes, label, block, speed, *pair, *counted])
    header = ["d", "causal", "N", "step", "Br x Bc", "TFLOP/s", "gain", "predicted"]
    header += ["warp instructions, 10^9", "shared-memory wavefronts, 10^9", "bank conflicts, 10^9"]
    return (
        "Forward, fp16, 16k tokens, hidden dimension 2048. A gain is over the step before; of two "
        "stages it is over one, of FA-1's rows over its keys at the same block sizes. "
        f"{source}\n\n{_markdown(header, lines)}"
    )


def loop_order(store: Store) -> str:
    """Both orders' times and occupancy at the same tiles, and FA-1 over FA-2 of times and bytes."""
    from experiments import loop_order as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    if not rows:
        return NO_RECORDING + "\n"
    ratio_names = {
        "grid": "time, paper's grid",
        "splits": "time, query splits",
        "model": "bytes, model",
        "l2": "L2 bytes",
        "dram": "DRAM bytes",
    }
    lines = []
    for problem, mine in variants.problems_of(rows).items():
        found = {(r.series, r.source, r.metric): r for r in mine}
        names = experiment.series_of(problem.dtype)
        times = [found.get((name, "measured", "time")) for name in names]
        warps = [found.get((name, "measured", "occupancy_elapsed")) for name in names]
        ratios = experiment.ratios(mine)
        lines.append(
            [
                speeds.DTYPES[problem.dtype],
                str(problem.head_dim),
                "yes" if problem.causal else "no",
                str(problem.seqlen_q),
                str(problem.batch * problem.heads_q),
                *(_value(row, lambda v: f"{v:.3g}") for row in times),
                *(_cell(ratios, name, ".2f") for name in ratio_names),
                *(_value(row, lambda v: f"{v:.2f}") for row in warps),
            ]
        )
    calls = ("FA-1", "FA-1, query splits", "FA-2")
    header = ["dtype", "d", "causal", "N", "batch x heads", *(f"{name}, ms" for name in calls)]
    header += [f"FA-1 / FA-2: {name}" for name in ratio_names.values()]
    header += [f"{name}, occupancy" for name in calls]
    return (
        "Forward, FA-2 at FA-1's tiles; bytes are those with query splits over FA-2's; occupancy "
        f"is over the whole call and all multiprocessors. {source}\n\n" + _markdown(header, lines)
    )


def host_cost(store: Store) -> str:
    """The host's microseconds of each call."""
    from experiments import host_cost as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    lines = [
        [
            experiment.label(row),
            row.pass_,
            *(str(n) for n in (row.seqlen_q, row.head_dim)),
            "yes" if row.causal else "no",
            _value(row, lambda ms: f"{1e3 * ms:.1f}"),
            *("-" if ms is None else f"{1e3 * ms:.1f}" for ms in (row.p20, row.p80)),
        ]
        for row in experiment.shown(rows)
    ]
    if not lines:
        return NO_RECORDING + "\n"
    header = ["call", "pass", "N", "d", "causal", "median, us", "p20", "p80"]
    return f"One head, arrays on the GPU. {source}\n\n" + _markdown(header, lines)


def block_sparse(store: Store) -> str:
    """Time, and time and accesses over those without a mask, over the share of blocks."""
    from experiments import block_sparse as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    if not rows:
        return NO_RECORDING + "\n"
    setting = experiment.setting(experiment.SEQLEN, experiment.HEAD_DIM)
    of_setting = (setting.batch, setting.seqlen_q, setting.head_dim, False)
    curves = [experiment.curve(experiment.published_rows(), PUBLISHED, ("time",))]
    for pass_ in experiment.PASSES:
        for series in experiment.SERIES:
            mine = [r for r in rows if r.pass_ == pass_ and (r.batch, *_sizes(r)) == of_setting]
            curves.append(experiment.curve(mine, series, ("time",)))
    moved = [
        experiment.relative(
            experiment.curve(
                [
                    r
                    for r in store.read(experiment.NAME, MODEL)
                    if r.pass_ == "fwd+bwd" and (r.batch, *_sizes(r)) == of_setting
                ],
                series,
                ("loads", "stores"),
            )
        )
        for series in experiment.SERIES
    ]
    lines = []
    for share in (*experiment.SHARES, None):
        cells = ["no mask" if share is None else str(share)]
        for points in curves:
            cells += _cell(points, share, ".1f"), _cell(experiment.relative(points), share, ".2f")
        lines.append(cells + [_cell(points, share, ".2f") for points in moved])
    names = [LABELS[series] for series in experiment.SERIES]
    columns = ["paper"]
    columns += [f"{name}, {pass_}" for pass_ in experiment.PASSES for name in names]
    header = ["non-zero blocks, %"]
    header += [each for name in columns for each in (f"{name}, ms", "over no mask")]
    header += [f"{name}, accesses over no mask" for name in names]
    return (
        f"N={experiment.SEQLEN}, d={experiment.HEAD_DIM}, {setting.heads_q} heads, batch "
        f"{setting.batch}, fp32, blocks of {experiment.SIZE}; the paper (fwd+bwd, A100, fp16) does "
        f"not say batch and heads. {source}\n\n" + _markdown(header, lines)
    )


def char_model(store: Store) -> str:
    """Held-out loss after training: each series' mean, spread over seeds, distance to torch's."""
    from experiments import char_model as experiment

    rows, source = _gpu_rows(store, experiment.NAME)
    of_setting = (experiment.CONTEXT, experiment.HEAD_DIM, True)
    found = experiment.summaries([row for row in rows if _sizes(row) == of_setting])
    if not found:
        return NO_RECORDING + "\n"
    lines = [
        [
            LABELS[series],
            str(each.seeds),
            f"{each.loss:.4f}",
            f"{each.spread:.4f}",
            "-" if each.difference is None else f"{each.difference:.1e}",
        ]
        for series, each in found.items()
    ]
    reference = LABELS[experiment.REFERENCE]
    header = [
        "attention",
        "seeds",
        "held-out loss, nats a character",
        "spread over seeds",
        f"largest distance to {reference}, same seed",
    ]
    return (
        f"{experiment.STEPS} steps, {experiment.LAYERS} layers of width {experiment.D_MODEL}, "
        f"context {experiment.CONTEXT}, batch {experiment.BATCH}, fp32. {source}\n\n"
    ) + _markdown(header, lines)


def _sizes(row: Row) -> tuple[int, int, bool]:
    return row.seqlen_q, row.head_dim, row.causal


def _cell(points: Mapping[Any, float], key: Any, form: str) -> str:
    return format(points[key], form) if key in points else "-"


TABLES: dict[str, Callable[[Store], str]] = {
    "speed": speed,
    "speed_backward": speed_backward,
    "speed_fp16": speed_fp16,
    "speed_bf16": speed_bf16,
    "fa2_figures": fa2_figures,
    "errors": errors,
    "memory": memory,
    "block_size": block_size,
    "block_sparse": block_sparse,
    "char_model": char_model,
    "host_cost": host_cost,
    "io_vs_seqlen": io_vs_seqlen,
    "ladder": ladder,
    "loop_cost": loop_cost,
    "loop_order": loop_order,
}


def render(page: str, store: Store) -> str:
    """The page with every marked table made anew. Raises ValueError for an unknown table."""

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise ValueError(f"no table named {name!r}: known are {', '.join(TABLES)}")
        return f"{found['start']}{TABLES[name](store)}{found['end']}"

    return _BLOCK.sub(table, page)


def tables(page: str) -> dict[str, str]:
    """Name -> text of the marked tables. Raises ValueError for a marker without its end."""
    found = {block["name"]: block["body"] for block in _BLOCK.finditer(page)}
    for name in re.findall(r"<!-- table: ([\w-]+) -->", page):
        if name not in found:
            raise ValueError(f"table {name!r} has no end marker")
    return found


def check(path: Path = PAGE, store: Store | None = None) -> list[str]:
    """Names of the tables on the page that differ from what the stored rows give."""
    page = path.read_text()
    now, new = tables(page), tables(render(page, store or Store(FIGURES)))
    return [name for name in now if now[name] != new[name]]


def update(path: Path = PAGE, store: Store | None = None) -> list[str]:
    """Write the tables anew; gives the names of those that changed."""
    stale = check(path, store)
    if stale:
        path.write_text(render(path.read_text(), store or Store(FIGURES)))
    return stale
