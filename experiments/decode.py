"""Measures decoding: a few rows of Q attend to a long K/V cache (claim C21).

The setting is Flash-Decoding's micro-benchmark, with forward calls in fp16. The calls have 1 to 16
rows of Q, 256 to 128k keys and batch size 1 to 256. Each K/V head has one to eight query heads. The
series are: one thread block per row tile, columns split over several thread blocks, and torch's
kernels. The speed is the bytes of K and V, read once, divided by the time. A kernel that only reads
gives the upper limit of the speed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import bandwidth, calls, check, peers
from .lab.measure.series import HOPPER, LABELS, columns, plan, unit
from .lab.measure.timing import FEWEST, Timing, attempt, number, shuffled, time_call
from .lab.measure.workloads import DECODING, DECODING_HEADS, Inputs
from .lab.record import Bench, Options, Row
from .lab.show import style, tables

NAME = "decode"
NEEDS = ("GPU",)
TAKES = ()
REPEATS, SECONDS = 20, 0.1
PROTOCOL = (
    f"{REPEATS} repeats, cut to {SECONDS:g} s, {FEWEST} at least; bandwidth: bytes of K and V once "
    "over the median time; read: what a kernel reads of 4 GiB, larger than the caches; K and V "
    "of all heads are those of two, again and again, queries are all drawn; not causal"
)

HEADS = 32
GROUPS = (1, 4, 8)
TOKENS = 65536  # batch times keys
# (batch, keys) with TOKENS keys together; then the keys of one sequence alone.
CACHES = tuple((TOKENS // N, N) for N in (1024, 4096, 16384, 65536))
ALONE = (1024, 4096, 16384, 131072)
ROWS, ROWS_AT = (1, 2, 4, 8, 16), (4, 16384)
SPLITS = {"fa2-mma": "fa2-mma-splits", HOPPER: "fa2-wgmma-splits"}
OURS = tuple(itertools.chain(*SPLITS.items()))
PEERS = (peers.FLASH, peers.CUDNN, peers.FA4)
READ, READ_BYTES = "read", 2**32
# If K and V have at least this size, they do not fit into the L2 cache, and a call takes longer
# than launching its kernels.
LARGE_BYTES = 64 * 2**20


def _problem(
    batch: int, group: int, rows: int, keys: int, d: int = 128, heads: int = HEADS
) -> Problem:
    return Problem(batch, heads, heads // group, rows, keys, d, dtype="float16")


def problems(options: Options) -> list[Problem]:
    """Return the problems to measure; for a quick run only two.

    | problems | batch | rows of Q | keys |
    |---|---|---|---|
    | caches of equal size | 65536 / keys | 1 | 1024 to 65536 |
    | one sequence | 1 | 1 | 1024 to 131072 |
    | more rows of Q | 4 | 1 to 16 | 16384 |
    | caches of equal size, d=64 | 65536 / keys | 1 | 1024 to 65536 |
    | Flash-Decoding's own setting (DECODING) | 1 to 256 | 1 | 256 to 131072 |
    """
    if options.quick:
        return [_problem(2, group, 1, 2048) for group in (1, 8)]
    found = [_problem(B, group, 1, N) for group in GROUPS for B, N in CACHES]
    found += [_problem(1, group, 1, N) for group in GROUPS for N in ALONE]
    found += [_problem(ROWS_AT[0], 4, rows, ROWS_AT[1]) for rows in ROWS]
    found += [_problem(B, 4, 1, N, 64) for B, N in CACHES]
    heads, shared = DECODING_HEADS
    found += [_problem(B, heads // shared, 1, N, heads=heads) for B, N in DECODING]
    return list(dict.fromkeys(found))


def cache_bytes(row: Row | Problem) -> int:
    """Return the bytes of K and V together, with 2 bytes per element.

    `row` is a row of data or a problem.
    """
    return 4 * row.batch * row.heads_k * row.seqlen_k * row.head_dim


def _own(series: str) -> dict[str, Any]:
    return {"kv_splits": "auto" if series in SPLITS.values() else 1}


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Yield times of calls with few rows of Q, and the bandwidth of a kernel that only reads."""
    peers.say_missing(bench.say)
    every = problems(options)
    hopper = device.compute_capability() == (9, 0)
    ours = [s for s in OURS if hopper or unit(s) != "wgmma"]
    yield _read(options, bench.machine)
    inputs = Inputs()
    for problem in bench.each(every, "timing"):
        arrays = _arrays(problem, inputs)
        gate, failure = attempt(check.gate, problem, "fwd", *arrays)
        for series in shuffled((*ours, *peers.here(compared(problem))), problem):
            yield from _timed(series, problem, arrays, gate, failure, bench.machine)
        device.release_memory()
        peers.release()


def compared(problem: Problem) -> tuple[str, ...]:
    """Return the series of other libraries that are measured for a problem.

    torch's unfused attention is included if every query head has a K/V head of its own. Otherwise
    it would read copies of K and V.
    """
    return (*PEERS, peers.UNFUSED) if problem.group == 1 else PEERS


def sweep_of(row: Row) -> str:
    """Return the name of a row's sweep: the part of the experiment in which one quantity varies.

    The name of the sweep contains the quantity that varies, and which other quantities are fixed.
    """
    if row.series == READ:
        return "read"
    at = row.batch, row.seqlen_k
    if row.heads_q != HEADS:
        return "batch, Flash-Decoding's setting"
    if row.seqlen_q > 1:
        return "rows"
    if row.head_dim == 64:
        return "seqlen_k, equal tokens, head_dim 64"
    return "seqlen_k, equal tokens" if at in CACHES else "seqlen_k, one sequence"


def _read(options: Options, machine: str) -> Row:
    def work() -> Timing:
        nbytes = READ_BYTES // (8 if options.quick else 1)
        return bandwidth.measure_global(bandwidth.ones(nbytes), nbytes, REPEATS // 2)

    speed, failure = attempt(work)
    # The row has sizes of 1, because reading has no problem.
    common = columns(NAME, READ, _problem(1, 1, 1, 1), machine, note=failure)
    return Row(metric="bandwidth", unit="TB/s", **number(speed), **common)


def _arrays(problem: Problem, inputs: Inputs) -> tuple[Any, ...]:
    """Return q, k and v on the GPU.

    Every row of q is random. k and v are two random heads, repeated over all heads and sequences.
    """
    heads = min(2, problem.heads_k)
    (q, _, _) = inputs(replace(problem, heads_k=problem.heads_q, seqlen_k=1))
    (_, k, v) = inputs(replace(problem, batch=1, heads_q=heads, heads_k=heads))
    k, v = peers.repeated((k, v), problem.dtype, problem.heads_k // heads, axis=1)
    if peers.available():
        k, v = (x.repeat(problem.batch, 1, 1, 1) for x in (k, v))
    else:
        k, v = peers.repeated(tuple(x.copy_to_host() for x in (k, v)), problem.dtype, problem.batch)
    return *peers.on_device((q,), problem.dtype), k, v


def _timed(
    series: str, problem: Problem, arrays: tuple, gate: Any, failure: str, machine: str
) -> Iterator[Row]:
    common = columns(NAME, series, problem, machine)
    note, timing = "", None
    theirs = calls.theirs(series)
    if not theirs:
        planned, failure = attempt(plan, series, problem, **_own(series))
        if planned is not None:
            note = f"kv_splits={planned.kv_splits}"
            common |= {"Br": planned.tiles.Br, "Bc": planned.tiles.Bc}

    def work() -> Any:
        run = calls.make(series, "fwd", problem, arrays, **_own(series))
        return time_call(run, gate.peer if theirs else gate, REPEATS, SECONDS)

    if not failure:
        timing, failure = attempt(work)
    yield calls.time_row(timing, failure, note, **common)
    value = None if timing is None else cache_bytes(problem) / timing.median / 1e9
    note = f"{note}; {failure}" if failure else note
    yield Row(metric="bandwidth", unit="TB/s", value=value, note=note, **common)


Place = tuple[int, int, int, int, int, int]  # batch, Hq, Hk, rows of Q, keys, head dimension
place: Callable[[Row], Place] = attrgetter(
    "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim"
)


def read_bandwidth(rows: Sequence[Row]) -> float | None:
    """Return the bandwidth of the kernel that only reads, in TB/s; None if it was not measured."""
    found = [row.value for row in rows if row.series == READ and row.value]
    return found[-1] if found else None


def by_place(rows: Sequence[Row], metric: str) -> dict[Place, dict[str, Row]]:
    """Return the measured rows of a metric, as {sizes of the problem: {series: row}}.

    The sizes are (batch, heads of Q, heads of K, rows of Q, keys, head dimension).
    """
    found: dict[Place, dict[str, Row]] = {}
    for row in rows:
        if row.metric == metric and row.source == "measured" and row.series != READ:
            found.setdefault(place(row), {})[row.series] = row
    return found


# Labels that contain the unit, as all labels of this figure do.
NAMES = {"fa2-mma": "FA-2 (mma)", "fa2-mma-splits": "FA-2 (mma), key splits"}
ABOUT = (
    "Key splits: several thread blocks share the keys of a row tile. One query per sequence, fp16, "
    f"d=128.\n"
    f"Hq/Hk: query heads per K/V head; Hq={HEADS}. Upper row: batch x keys = 64k. "
    "Title: at 128k keys."
)


def draw(rows: Sequence[Row]) -> Any:
    """Draw the bandwidth at which K and V are read, over the number of keys.

    Return None without rows.
    """
    found, read = by_place(rows, "bandwidth"), read_bandwidth(rows)
    lines = (
        (f"{TOKENS // 1024}k keys in all", lambda p: p[0] * p[4] == TOKENS),
        ("one sequence", lambda p: p[0] == 1),
    )
    mine = {p: x for p, x in found.items() if p[1] == HEADS and p[3] == 1 and p[5] == 128}
    groups = sorted({p[1] // p[2] for p in mine})
    if not groups:
        return None
    figure, axes = style.new(len(lines), len(groups), 7.0, sharey=True)
    for across, (title, belongs) in zip(axes, lines, strict=True):
        for group, ax in zip(groups, across, strict=True):
            here = {p: x for p, x in mine.items() if belongs(p) and p[1] // p[2] == group}
            ax.set_title(f"{title}, Hq/Hk={group}")
            if not here:
                style.empty(ax, "not measured")
                continue
            for series in (*OURS, *PEERS):
                there = [(p[4], x[series]) for p, x in here.items() if series in x]
                points = sorted((N, row.number) for N, row in there if not row.failed)
                ls = "--" if series in SPLITS else "-"
                style.line(ax, points, series, ls=ls, label=NAMES.get(series, LABELS[series]))
            if read:
                ax.axhline(read, color="#555555", lw=0.9, ls=":", label="kernel that only reads")
            style.sizes(ax, sorted({p[4] for p in here}), "keys per sequence")
            ax.set_ylim(bottom=0)
        across[0].set_ylabel("K and V read (TB/s)")
    style.legend(figure, list(style.handles(axes).values()), _message(mine), about=ABOUT)
    return figure


def _message(found: dict[tuple, dict[str, Row]]) -> str:
    alone = {p: x for p, x in found.items() if p[0] == 1}
    longest = max((p[4] for p in alone), default=0)
    gains = [
        x[shared].number / x[series].number
        for p, x in alone.items()
        if p[4] == longest
        for series, shared in SPLITS.items()
        if all(s in x and not x[s].failed for s in (series, shared))
    ]
    if not gains:
        return "One query reads all of K and V"
    return f"With key splits, one query is up to {max(gains):.1f} times as fast"


# The problems that the page shows: (batch, query heads per K/V head, rows of Q, keys, d). The data
# file contains all problems.
SHOWN = (
    *((B, 4, 1, N, 128) for B, N in CACHES),
    *((1, 4, 1, N, 128) for N in (4096, 131072)),
    *((4, group, rows, 16384, d) for group, rows, d in ((1, 1, 128), (4, 16, 128), (4, 1, 64))),
)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of times in microseconds for the problems in SHOWN.

    The table also contains the share of the read bandwidth, and torch's best time divided by our
    best time. The caption is about all problems.
    """
    times, read = by_place(rows, "time"), read_bandwidth(rows)
    series = [s for s in (*OURS, *PEERS) if any(s in found for found in times.values())]
    lines, gains = [], []
    for at in sorted(times, key=lambda p: (p[5], p[1] // p[2], p[3], p[4], p[0])):
        found = times[at]
        batch, heads_q, heads_k, Nq, Nk, d = at
        moved = 4 * batch * heads_k * Nk * d
        best, theirs = (
            min((found[s].number for s in of if s in found and found[s].value), default=None)
            for of in (OURS, PEERS)
        )
        if best and theirs and moved >= LARGE_BYTES:
            gains.append(theirs / best)
        if heads_q != HEADS or (batch, heads_q // heads_k, Nq, Nk, d) not in SHOWN:
            continue
        cells = [tables.cell(found.get(s), lambda t: f"{1e3 * t:.0f}") for s in series]
        share = f"{moved / best / 1e9 / read:.2f}" if best and read else tables.MISSING
        gain = f"{theirs / best:.2f}" if best and theirs else tables.MISSING
        split = {found[s].note.partition(";")[0] for s in SPLITS.values() if s in found}
        splits = ", ".join(sorted(n.removeprefix("kv_splits=") for n in split)) or tables.MISSING
        sizes = [f"{batch}", f"{heads_q}/{heads_k}", f"{Nq}", f"{Nk}", f"{d}"]
        lines.append([*sizes, f"{moved / 2**20:.0f}", *cells, splits, share, gain])
    header = ["batch", "heads of Q/K", "rows of Q", "keys", "d", "K and V, MiB"]
    header += [LABELS[s] for s in series]
    header += [
        "key splits",
        "our best, share of read bandwidth",
        "torch's best time / our best time",
    ]
    caption = (
        "The table of decoding times contains the times of forward calls in fp16, in "
        "microseconds. The column *share of read bandwidth* contains the bytes of K and V per "
        "second / the bandwidth of a kernel that only "
        f"reads{f' ({read:.2f} TB/s)' if read else ' (not measured)'}. If K and V together "
        f"have less than {LARGE_BYTES >> 20} MiB, launching the kernels takes longer than reading "
        "K and V. The column *key splits* lists how many thread blocks share the columns of a row "
        "tile in the calls of FA-2 with key splits."
    )
    if gains:
        caption += (
            f" For the {len(gains)} measured decoding problems with K and V of at least "
            f"{LARGE_BYTES >> 20} MiB, torch's "
            f"best time / our best time is {min(gains):.2f} to {max(gains):.2f} "
            f"(median {median(gains):.2f})."
        )
    return tables.of(caption, header, lines)
