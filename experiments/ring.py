"""Compares which operand should travel when one sequence is spread over several GPUs.

This choice is the loop order of a cluster: K and V travel round the ring (FA-2's order), or Q
travels with its results (FA-1's order). Sequences of 8k to 1M rows run on all GPUs of this host, in
fp16 with 16 heads at d=128. One GPU alone, torch's context parallelism and the all-to-all of
Ulysses are measured too. The bytes between GPUs are counted, and computed by closed forms. A model
gives the time on up to 1,024 GPUs.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from fa_numba import io_model

from .beside import ring_fit, ring_ranks, ring_rows, ring_tasks
from .beside.ring_ranks import HEAD_DIM, KV, OURS, SERIES, Q, Task
from .beside.ring_tasks import FILLS, GOAL, PASSES, SHORTEST
from .lab.measure import peers, speeds
from .lab.measure.series import columns
from .lab.measure.timing import Timing, number
from .lab.record import MODEL, Bench, Options, Row, nested, select
from .lab.show import style, tables

NAME = "ring"
TAKES = ("seconds",)
PROTOCOL = (
    "one process a GPU, all begin together; the time of the slowest rank; bytes are those given "
    "to send; memory is a rank's peak with its inputs; inputs are normal, drawn on the GPU; every "
    f"kind of call is checked against float64 at {ring_ranks.CHECKED} rows per GPU first; "
    "20 repeats to N=16k, 2 from N=128k on, 1 at N=1M, but 5 of rings, torch's with cuDNN and one "
    "GPU at N=128k"
)

MODEL_RANKS = (2, 4, 8, 16, 64, 256, 1024)
MODEL_SEQLEN, SHORTER = 2**26, 2**22
SHOWN_RANKS = (16, 64, 256, 1024)
# Bytes per second in one direction of one GPU's link: 400 Gb/s, NDR InfiniBand.
INFINIBAND = 50e9
# Series -> (name in figures and tables, colour, mark).
LOOKS = dict(
    zip(
        SERIES,
        (
            ("one GPU", "#BABABA", "."),
            ("K, V travel (Q outer)", "#009E73", "h"),
            ("Q, O, L travel (K/V outer)", "#0072B2", "o"),
            ("all-to-all (Ulysses)", "#CC79A7", "^"),
            ("torch's ring, FA-2", "#000000", "v"),
            ("torch's ring, cuDNN", "#E69F00", "X"),
        ),
        strict=True,
    )
)


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the sent bytes by closed forms; with several GPUs also times, memory and sent bytes."""
    yield list(_modelled())
    if bench.machine is None:
        return
    gpus = _gpus()
    if gpus < 2:
        bench.say("  one GPU, or no torch with NCCL: times over several are not measured")
        return
    asked = ring_tasks.tasks(options, gpus)
    left = ring_tasks.missing(asked, bench.stored)
    bench.say(f"  {len(left)} of {len(asked)} calls over at most {gpus} GPUs are to be measured")
    for group in ring_tasks.groups(left):
        yield from _measured(group, bench)
    if bench.over():
        bench.say("  the time limit has passed; the same command measures what is missing")


def _measured(group: ring_tasks.Group, bench: Bench) -> Iterator[Sequence[Row]]:
    """Yield the rows of each task of a group, until the time of the run is over."""
    named = bench.left(group.tasks, f"{group.ranks} GPUs")
    if not named or bench.over():
        return
    ranks = ring_ranks.run([task for _, task in named], group.ranks)
    with contextlib.closing(ranks):
        for task in bench.unfinished(named, f"{group.ranks} GPUs"):
            found = next(ranks)
            if found.slow:
                bench.say(f"  {found.slow}")
            yield list(_rows(task, found, bench.machine))


def _gpus() -> int:
    """Return the number of GPUs of this host that torch can use together.

    Return 0 without torch or without NCCL.
    """
    if not peers.available() or not peers.torch.distributed.is_nccl_available():
        return 0
    return peers.torch.cuda.device_count()


def _rows(task: Task, found: ring_ranks.Found, machine: str) -> Iterator[Row]:
    problem = ring_rows.whole(max(1, task.seqlen), task.causal)
    at = ring_tasks.place(task.ranks)
    note = "; ".join(text for text in (at, found.failure or found.slow) if text)
    common = columns(NAME, task.series, problem, machine, pass_=task.pass_, note=note)
    if task.profiled:
        share = min(found.hidden, default=None)
        yield Row(metric="hidden_copies", unit="1", value=share, **common)
        for rank, milliseconds in enumerate(found.busy):
            own = common | {"note": f"{at}, rank {rank}"}
            yield Row(metric="computing", unit="ms", value=milliseconds, **own)
        return
    timing = Timing.of(found.samples) if found.samples else None
    yield Row(metric="time", unit="ms", **number(timing), **common)
    if timing is None:
        return
    if task.series in SERIES:
        yield Row(metric="memory", unit="MiB", value=found.memory, **common)
    if task.series in OURS:
        yield Row(metric="sent", unit="bytes", value=found.sent, **common)


def _modelled() -> Iterator[Row]:
    choices = itertools.product((False, True), PASSES, MODEL_RANKS, OURS)
    for causal, pass_, ranks, series in choices:
        problem = ring_rows.whole(MODEL_SEQLEN, causal)
        common = columns(NAME, series, problem, MODEL, pass_=pass_, note=ring_tasks.place(ranks))
        value = ring_rows.sent_bytes(problem, ranks, series, pass_)
        yield Row(metric="sent", unit="bytes", value=value, **common)


def draw(rows: Sequence[Row]) -> Any:
    """Draw the gains over one GPU, the sent bytes, and the model. Return None without rows."""
    if not rows:
        return None
    figure, axes = style.new(2, 3, 7.4)
    ranks, fit = _ranks(rows), ring_fit.fit(rows)
    gained = ring_rows.gains(ring_rows.over(rows, ranks))
    panels = (("fwd", False), ("fwd", True), ("fwd+bwd", True))
    for ax, (pass_, causal) in zip(axes[0], panels, strict=True):
        ax.set_title(f"{speeds.PASSES[pass_]}, {'causal' if causal else 'not causal'}")
        here = {k: x for k, x in gained.items() if k[1:3] == (pass_, causal)}
        if not here:
            style.empty(ax, "not measured")
            continue
        for series in SERIES[1:]:
            points = sorted((k[3], x) for k, x in here.items() if k[0] == series)
            style.line(ax, points, label=LOOKS[series][0], **_look(series))
        ax.axhline(ranks, color="#555555", lw=0.9, ls=":")
        lengths = sorted({k[3] for k in here})
        style.sizes(ax, lengths, "sequence length N (tokens)", 1 + len(lengths) // 6)
        ax.set_ylim(0, 1.15 * ranks)
    axes[0][0].set_ylabel(f"speed on {ranks} GPUs / on one GPU")
    _draw_bytes(axes[1][0], rows)
    _draw_scaling(axes[1][1], rows, fit)
    _draw_model(axes[1][2], fit, "fwd+bwd")
    handles = list(style.handles(axes[0]).values())
    style.legend(figure, handles, _message(gained, ranks), about=ABOUT)
    return figure


def _ranks(rows: Sequence[Row]) -> int:
    """Return the largest number of GPUs with measured times; 0 without such times."""
    return max(ring_fit.sizes(rows), default=0)


def _look(series: str) -> dict[str, Any]:
    _, colour, marker = LOOKS[series]
    return {"color": colour, "marker": marker}


ABOUT = (
    "Each GPU holds a part of the sequence. Q outer: K and V travel. K/V outer: Q, "
    "O and L travel.\nBottom row: bytes by a closed form; measured marks and the model's lines; "
    "the model's share of the time that is spent on computing."
)


def _message(gained: Mapping[ring_rows.Key, float], ranks: int) -> str:
    long = {k: x for k, x in gained.items() if k[0] in OURS and k[3] >= FILLS}
    if not long:
        return "Which operand travels is the loop order of the GPUs together"
    times = tables.between([*long.values()])
    return f"From N={style.short(FILLS)} on, {ranks} GPUs are {times} times as fast"


def _draw_bytes(ax: Any, rows: Sequence[Row]) -> None:
    ax.set_title(f"bytes sent, N={MODEL_SEQLEN >> 20}M")
    ax.set_ylabel("bytes that one GPU sends")
    wanted: dict[str, Any] = {"metric": "sent", "source": "model", "causal": False}
    found = nested(rows, attrgetter("series", "pass_"), ring_rows.ranks_of, **wanted)
    # The marks of one series are larger, so that both are visible where they have equal values.
    for (series, pass_), points in sorted(found.items(), reverse=True):
        hollow = {"mfc": "white"} if pass_ == "fwd+bwd" else {}
        ms = 9 if series == Q else 5
        style.line(ax, sorted(points.items()), ms=ms, **_look(series), **hollow)
    keys = [style.key("forward", marker="o"),
            style.key("forward + backward", marker="o", mfc="white")]  # fmt: skip
    ax.legend(handles=keys, loc=(0.26, 0.46))
    style.sizes(ax, MODEL_RANKS, "GPUs")
    ax.set_ylim(bottom=0)
    style.byte_axis(ax.yaxis)


def _draw_scaling(ax: Any, rows: Sequence[Row], fit: ring_fit.Fit | None) -> None:
    """Draw gain / number of GPUs at one length: marks for measured calls, lines for the model."""
    ax.set_title(f"fwd, not causal, N={style.short(GOAL)}")
    at = "fwd", False, GOAL
    if fit is None or at not in fit.machine.times:
        style.empty(ax, "not measured")
        return
    alone = fit.machine.times[at]
    problem = ring_rows.whole(GOAL, causal=False)
    for series in OURS:
        times = [
            (P, ring_rows.milliseconds(fit.machine, problem, P, series, "fwd")) for P in MODEL_RANKS
        ]
        points = [(1, 1.0), *((P, alone / time / P) for P, time in times if time is not None)]
        style.line(ax, points, **_look(series) | {"marker": ""})
    for series in SERIES[1:]:
        gained = {P: ring_rows.gains(ring_rows.over(rows, P)) for P in ring_fit.sizes(rows)}
        points = [(P, x[series, *at] / P) for P, x in gained.items() if (series, *at) in x]
        style.line(ax, points, ls="", **_look(series))
    ax.legend(
        handles=[style.key("measured", ls="", marker="o"), style.key("model")], loc="lower left"
    )
    style.sizes(ax, (1, *(P for P in MODEL_RANKS if GOAL // P >= SHORTEST)), "GPUs")
    ax.set(ylim=(0, 1.3), ylabel="gain / number of GPUs")


def _draw_model(ax: Any, fit: ring_fit.Fit | None, pass_: str) -> None:
    ax.set_title(f"{pass_}, causal, N={SHORTER >> 20}M")
    if fit is None:
        style.empty(ax, "not measured")
        return
    machine = fit.machine
    links = {"measured link": (machine, "-"), "InfiniBand": (_infiniband(machine), "--")}
    # Only the shorter length is drawn: at the longer length all shares are nearly 1.
    for series, (at, ls) in itertools.product(reversed(OURS), links.values()):
        found = [
            (P, ring_rows.efficiency(at, SHORTER, P, series, True, pass_)) for P in MODEL_RANKS
        ]
        points = [(P, x) for P, x in found if x is not None]
        style.line(ax, points, ls=ls, ms=8 if series == Q else 5, **_look(series))
    keys = [style.key(label, ls=ls) for label, (_, ls) in links.items()]
    ax.legend(handles=keys, loc="lower left")
    style.sizes(ax, MODEL_RANKS, "GPUs")
    ax.set(ylim=(0, 1.05), ylabel="computing time / all time")


def _infiniband(machine: ring_rows.Measured) -> ring_rows.Measured:
    return replace(machine, link=INFINIBAND / 1e3)


# Lengths in the table of the page. The data file contains all lengths.
SHOWN = (2**13, 2**15, 2**17, 2**20)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of times, gains and sent bytes, or None without measured calls."""
    ranks = ring_fit.sizes(rows)
    if not ranks:
        return None
    lines = [line for P in ranks for line in _lines(ring_rows.over(rows, P), P)]
    machine = ring_rows.measured(ring_rows.over(rows, ranks[-1]))
    header = ["GPUs", "pass", "causal", "N", *(f"{LOOKS[s][0]}, ms" for s in SERIES)]
    header += ["K, V travel: gain", "Q travels: gain"]
    header += ["K, V travel: model / time", "Q travels: model / time"]
    header += ["K, V travel: sent, MB", "Q travels: sent, MB", "K, V travel: memory per GPU, MiB"]
    link = ""
    if machine:
        link = (
            f" The measured bandwidth of the link between two GPUs is {machine.link / 1e6:.0f} "
            "GB/s in each direction."
        )
    equal, number = _equal_bytes(rows)
    caption = (
        "The table of calls over several GPUs shows calls with one sequence of N rows over "
        f"{tables.listed([*map(str, ranks)])} GPUs, in fp16 with {ring_ranks.HEADS} heads and "
        f"d={HEAD_DIM}.{link} The time of a call over several GPUs is the time of the slowest GPU. "
        "A *gain* from several GPUs is the ratio *measured time on one GPU / measured time on the "
        "GPUs of the first column*. A column *model / "
        "time* contains the ratio *time that a model predicts / measured time*. A column *sent* "
        "contains the number of bytes that the GPU with the most traffic sends. We counted the "
        f"sent bytes of {number} calls over several GPUs, and {equal} of the {number} counts "
        "equal the number that a closed form predicts. In a call over several GPUs, *memory per "
        "GPU* is the measured peak memory of one GPU, including the inputs."
    )
    return tables.of(caption, header, lines)


def _lines(rows: Sequence[Row], ranks: int) -> Iterator[list[str]]:
    """Yield the lines of the table for the calls over a number of GPUs."""
    times, gained = ring_rows.by_key(rows, "time"), ring_rows.gains(rows)
    right = {key: time / times[key] for key, time in ring_rows.predicted(rows).items()}
    sent = {key: moved / 1e6 for key, moved in ring_rows.by_key(rows, "sent").items()}
    memory = ring_rows.by_key(rows, "memory")
    for at in sorted({k[1:] for k in times if k[0] in OURS and k[3] in SHOWN}):
        pass_, causal, N = at
        cells = [tables.number(times, (s, *at), ".4g") for s in SERIES]
        for values, form in ((gained, ".2f"), (right, ".3f"), (sent, ".0f")):
            cells += [tables.number(values, (s, *at), form) for s in OURS]
        peak = tables.number(memory, (KV, *at), ".0f")
        yield [str(ranks), pass_, tables.yes_no(causal), _length(N), *cells, peak]


def _length(N: int) -> str:
    return f"{N >> 20}M" if N >= 2**20 else f"{N >> 10}k"


def check_table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table that compares the model with measured calls; None without measured calls.

    The table also shows how evenly the GPUs are busy, and how much of the copying is hidden.
    """
    fit = ring_fit.fit(rows)
    if fit is None:
        return None
    lines = []
    for ranks, pass_, causal in itertools.product(ring_fit.sizes(rows), PASSES, (False, True)):
        plain = ring_rows.measured(ring_rows.over(rows, ranks))
        if plain is None:
            continue
        off, refitted = (
            [x for key, x in ring_fit.errors(rows, machine, ranks).items()
             if key[1:3] == (pass_, causal)]
            for machine in (plain, fit.machine)
        )  # fmt: skip
        close = sum(abs(x) <= ring_fit.CLOSE for x in off)
        cells = [f"{close} of {len(off)}", f"{100 * ring_fit.worst(off):.1f}"]
        cells.append(tables.MISSING if fit.held else f"{100 * ring_fit.worst(refitted):.1f}")
        for series in OURS:
            ahead = ring_fit.leads(rows, ranks, series, ring_ranks.CP_CUDNN)
            least = min((x for k, x in ahead.items() if k[1:3] == (pass_, causal)), default=None)
            cells.append(tables.MISSING if least is None else f"{least:.2f}")
        balances = ring_fit.balances(rows, ranks)
        for name, form in (("busiest", ".3f"), ("hidden", ".2f")):
            values = {key: getattr(each, name) for key, each in balances.items()}
            cells += [tables.number(values, (s, pass_, causal, GOAL), form) for s in OURS]
        lines.append([str(ranks), pass_, tables.yes_no(causal), *cells])
    header = ["GPUs", "pass", "causal", f"within {ring_fit.CLOSE:.0%}".replace("%", " %")]
    header += ["largest error, %", "after the fit, %"]
    header += ["cuDNN / K, V travel: least", "cuDNN / Q travels: least"]
    header += ["K, V travel: busiest / least busy GPU", "Q travels: busiest / least busy GPU"]
    header += ["K, V travel: hidden copies", "Q travels: hidden copies"]
    equal, number = _equal_bytes(rows)
    caption = (
        "The table of the model's errors compares the modelled with the measured times of calls "
        f"over several GPUs from N={style.short(FILLS)} on, if the length of one GPU's part was "
        f"measured on one GPU. {fit} Of {number} counts of sent "
        f"bytes, {equal} equal the closed form. A column *cuDNN / ...: least* contains the "
        "smallest ratio *time of torch's ring with cuDNN / time of our call*. A ratio above 1 "
        "means that our call is faster at all these lengths. The last four columns are for N="
        f"{style.short(GOAL)}, from a profiler. A column *busiest / least busy GPU* contains the "
        "ratio of the times in which the two GPUs compute. A column *hidden copies* contains the "
        "share of the copying time in which the GPU computes too, for the GPU with the smallest "
        "share. A copy also includes the time in which a GPU waits for the other GPU."
    )
    return tables.of(caption, header, lines)


def _equal_bytes(rows: Sequence[Row]) -> tuple[int, int]:
    """Return how many measured numbers of sent bytes equal the closed form.

    The second result is how many measured numbers there are.
    """
    found = select(rows, source="measured", metric="sent")
    same = [
        row.value == ring_rows.sent_bytes(
            ring_rows.whole(row.seqlen_q, row.causal), ring_rows.ranks_of(row), row.series,
            row.pass_,
        )
        for row in found
    ]  # fmt: skip
    return sum(same), len(same)


def break_even_table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the ratio of keys to queries at which both loop orders send equally much.

    Return None without rows.
    """
    if not rows:
        return None
    by_ranks = []
    for ranks in MODEL_RANKS:
        ratio = partial(io_model.ring_break_even, ranks, head_dim=HEAD_DIM)
        by_ranks.append([str(ranks), *(f"{ratio(passes=each):.3f}" for each in ("fwd", "bwd"))])
    header = ["GPUs", "forward, Hk Nk / (Hq Nq)", "backward, Hk Nk / (Hq Nq)"]
    caption = (
        "The table of equal traffic shows the ratio Hk Nk / (Hq Nq) at which sending Q and "
        "sending K and V take equally many bytes. If a call's ratio Hk Nk / (Hq Nq) is larger "
        "than the ratio for equal traffic, sending Q takes fewer bytes than sending K and V. In "
        "the ratio Hk Nk / (Hq Nq), Hk and Hq are the numbers of heads of K and of Q. In the "
        "ratio Hk Nk / (Hq Nq), Nk and Nq are the numbers of rows of K and of Q. The ratios in "
        "the table of equal traffic are not measured, but computed from closed forms, for calls "
        f"without a mask, with 16-bit inputs and d={HEAD_DIM}."
    )
    return tables.of(caption, header, by_ranks)


def model_table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the share of the time in which GPUs compute, by the model.

    Return None if the link between the GPUs was not measured.
    """
    fit = ring_fit.fit(rows)
    if fit is None:
        return None
    machine = fit.machine
    lines = []
    for N, ranks in itertools.product((SHORTER, MODEL_SEQLEN), SHOWN_RANKS):
        cells = []
        for at, series, pass_ in itertools.product((machine, _infiniband(machine)), OURS, PASSES):
            share = ring_rows.efficiency(at, N, ranks, series, True, pass_)
            cells.append(tables.MISSING if share is None else f"{share:.3f}")
        lines.append([f"{N >> 20}M", str(ranks), *cells])
    names = [
        f"{link}, {LOOKS[series][0]}, {pass_}"
        for link, series, pass_ in itertools.product(("measured link", "InfiniBand"), OURS, PASSES)
    ]
    caption = (
        "The table of computing shares shows during which share of a call the GPUs compute "
        "attention, for calls with a causal mask. The shares in the table of computing shares "
        "come from a model and are not measured. The model of the computing shares uses the "
        "measured duration of attention calls on one GPU. For sequences longer than the longest "
        "measured sequence, the model of the computing shares extrapolates the measured duration "
        "in proportion to the work. The columns *measured link* use the measured bandwidth of the "
        f"link between the GPUs. {fit} The columns *InfiniBand* assume that the link between the "
        f"GPUs has a bandwidth of {INFINIBAND / 1e9:.0f} GB/s."
    )
    return tables.of(caption, ["N", "GPUs", *names], lines)


TABLES = {
    "ring_bytes": tables.Across(break_even_table, (NAME,), cites=False),
    "ring_check": check_table,
    "ring_model": model_table,
}
