"""Time over the share of non-zero blocks: FlashAttention-1 paper, Fig. 2 right.

At N=4096, both loop orders, forward and with the backward pass, the published points beside ours;
accesses from the model, counted at a small size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab.measure import counts, peers
from .lab.measure.calls import time_row
from .lab.measure.check import Gate
from .lab.measure.series import LABELS, call, columns, gradients
from .lab.measure.speeds import DTYPES
from .lab.measure.timing import attempt, time_call
from .lab.measure.workloads import SEED, Inputs, one_head
from .lab.record import EMULATOR, MODEL, PUBLISHED, Bench, Options, Row, published
from .lab.show import style, tables

NAME = "block_sparse"
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    "the whole last head of O, or of dq, dk and dv, checked in the same way at N=1024 at most, "
    "with the same share of blocks; gradients and repeats as above"
)

# The paper says N alone. Heads and head dimension are those of its Fig. 2 left and middle, the
# batch an eighth of theirs.
SEQLEN, HEADS, HEAD_DIM, TOKENS = 4096, 16, 64, 8 * 4096
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)  # percent of all blocks
QUICK_SEQLEN, QUICK_SHARES = 1024, (10, 50, 100)
# Block sizes that every kernel takes: one mask for both passes and orders.
SIZE = 64
PASSES = {"fwd+bwd": "forward + backward", "fwd": "forward"}
# On CUDA cores, which the emulator counts, and on tensor cores.
SERIES, HALF = ("fa1-simt", "fa2-simt"), ("fa1-mma", "fa2-mma")
UNITS = {"float32": SERIES, "float16": HALF}
# There are many shares: calls of about so much time of each, or five.
SHARE_SECONDS = 0.2
# Checked against float64, and counted where the emulator takes a second.
CHECKED_SEQLEN = 1024
SMALL_SEQLEN, SMALL_HEAD_DIM, SMALL_SIZE, SMALL_SHARES = 96, 16, 16, (20, 60)


NO_MASK = "no mask"
Points = dict[int | None, float]


def place(share: int | None) -> str:
    """How the note of a row begins at this share in percent; None is the call without a mask."""
    return NO_MASK if share is None else f"{share} % of blocks"


def share_of(row: Row) -> int | None:
    return None if row.place == NO_MASK else int(row.place.split()[0])


def curve(rows: Sequence[Row], series: str, metrics: Sequence[str]) -> Points:
    """Share in percent (None: no mask) -> the sum of these metrics of one source and problem."""
    points: Points = {}
    for row in rows:
        if row.series == series and row.metric in metrics and row.value is not None:
            points[share_of(row)] = points.get(share_of(row), 0) + row.value
    return points


def relative(points: Points) -> Points:
    """A `curve` divided by its value without a mask; empty where that is missing."""
    dense = points.get(None)
    return {share: value / dense for share, value in points.items()} if dense else {}


def deviations(over: Mapping[int | None, float]) -> dict[int, float]:
    """Share -> how far a `relative` curve is above it: 0.03 is 3 % of the call without a mask."""
    return {share: value - share / 100 for share, value in over.items() if share is not None}


def setting(seqlen: int, dtype: str = "float32") -> Problem:
    batch = max(1, TOKENS // seqlen)
    return Problem(batch, HEADS, HEADS, seqlen, seqlen, HEAD_DIM, dtype=dtype)


def block_mask(seqlen: int, size: int, share: int) -> np.ndarray:
    """A bool (T, T) mask of blocks of `size` that keeps `share` percent: the diagonal, and others
    drawn at random, those of a smaller share among them.
    """
    T = -(-seqlen // size)
    mask = np.eye(T, dtype=bool)
    others = np.random.default_rng([SEED, T]).permutation(np.flatnonzero(~mask))
    mask.flat[others[: round(share / 100 * T * T) - T]] = True
    return mask


def _given(problem: Problem, size: int, share: int | None) -> dict[str, Any]:
    """The options of a call: its tiles and, unless `share` is None, its block mask."""
    tiles = {"tiles": fa_numba.Tiles(size, size)}
    if share is None:
        return tiles
    return tiles | {"block_mask": block_mask(problem.seqlen_q, size, share)}


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    N, shares = (QUICK_SEQLEN, QUICK_SHARES) if options.quick else (SEQLEN, SHARES)
    cases = [
        (setting(N, dtype), series, share)
        for dtype, of_dtype in UNITS.items()
        for share in (None, *shares)
        for series in of_dtype
    ]
    for problem, series, share in bench.track(cases, "closed forms"):
        yield from _model(problem, series, SIZE, share)

    problem = one_head(SMALL_SEQLEN, SMALL_HEAD_DIM)
    few = SMALL_SHARES[: 1 if options.quick else None]
    counted = [(problem, series, SMALL_SIZE, share) for share in (None, *few) for series in SERIES]
    inputs = Inputs(gradient=True)
    for each in counted:
        yield from _model(*each)
    count = partial(_count, inputs=inputs)
    yield from bench.counted(counted, "counting on the emulator", count)

    if bench.machine is None:
        return
    checks = Checks(inputs)
    arrays: dict[Problem, tuple] = {}
    for problem, series, share in bench.each(cases, "timing"):
        if problem not in arrays:
            arrays.clear()
            arrays[problem] = peers.on_device(inputs(problem), problem.dtype)
        for pass_ in PASSES:
            yield _time(problem, series, pass_, share, arrays[problem], checks, bench.machine)
            device.release_memory()
            peers.release()


def _fields(
    problem: Problem, series: str, pass_: str, size: int, share: int | None, machine: str
) -> dict[str, Any]:
    own = {"pass_": pass_, "Br": size, "Bc": size, "note": place(share)}
    return columns(NAME, series, problem, machine, **own)


def _model(problem: Problem, series: str, size: int, share: int | None) -> Iterator[Row]:
    tiles, mask = fa_numba.Tiles(size, size), None
    if share is not None:
        mask = block_mask(problem.seqlen_q, size, share)
    sparse = replace(problem, sparse=share is not None)
    if series.startswith("fa1"):
        forward = io_model.fa1(sparse, tiles, return_lse=True, block_mask=mask)
        backward = io_model.fa1_backward(sparse, tiles, block_mask=mask)
    else:
        forward = io_model.fa2(sparse, tiles, block_mask=mask)
        backward = io_model.fa2_backward(sparse, tiles, block_mask=mask)
    for pass_, parts in (("fwd", [forward]), ("fwd+bwd", [forward, backward])):
        fields = _fields(problem, series, pass_, size, share, MODEL)
        yield from counts.totals(*parts, **fields)


def _count(
    problem: Problem, series: str, size: int, share: int | None, inputs: Inputs
) -> Iterator[Row]:
    arrays = inputs(problem)
    for pass_ in PASSES:
        with fa_numba.count_accesses() as counted:
            _run(series, problem, pass_, arrays, _given(problem, size, share))()
        fields = _fields(problem, series, pass_, size, share, EMULATOR)
        yield from counts.totals(counted, **fields)


def _run(
    series: str, problem: Problem, pass_: str, arrays: Sequence[Any], given: dict[str, Any]
) -> Callable[..., Any]:
    """A function that gives O, or dq, dk and dv; either way the logsumexp is computed too."""
    if pass_ == "fwd":
        forward = call(series, problem, *arrays[:3], return_lse=True, **given)
        return lambda out=None: forward(out=out)[0]
    return gradients(series, problem, pass_, *arrays, **given)


class Checks:
    """Checks all of O, or of dq, dk and dv, at CHECKED_SEQLEN at most. Raises WrongResult."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._gates: dict[tuple, Gate] = {}

    def __call__(self, series: str, pass_: str, problem: Problem, share: int | None) -> None:
        N = min(CHECKED_SEQLEN, problem.seqlen_q)
        small = replace(problem, batch=1, heads_q=2, heads_k=2, seqlen_q=N, seqlen_k=N)
        arrays, given = self.inputs(small), _given(small, SIZE, share)
        key = (small, pass_, share)
        if key not in self._gates:
            self._gates[key] = Gate.of_whole(small, pass_, *arrays, **given)
        found = _run(series, small, pass_, peers.on_device(arrays, small.dtype), given)()
        device.synchronize()
        self._gates[key]((found,) if pass_ == "fwd" else found)


def _time(
    problem: Problem, series: str, pass_: str, share: int | None, arrays: Sequence[Any],
    checks: Checks, machine: str,
) -> Row:  # fmt: skip
    def work() -> Any:
        checks(series, pass_, problem, share)
        run = _run(series, problem, pass_, arrays, _given(problem, SIZE, share))
        return time_call(run, lambda result: float("nan"), seconds=SHARE_SECONDS)

    timing, failure = attempt(work)
    fields = _fields(problem, series, pass_, SIZE, share, machine)
    return time_row(timing, failure, fields.pop("note"), **fields)


def published_rows() -> list[Row]:
    """The paper's points: fp16 on an A100; batch, heads and head dimension are not given there."""
    problem = setting(SEQLEN, "float16")
    rows = []
    for line in published.lookup(paper="fa1", item="Fig. 2 right"):
        share = int(line["metric"].removeprefix("runtime at ").partition("%")[0])
        dense = line["method"] == "FlashAttention"
        own = {"pass_": line["pass"], "note": place(None if dense else share)}
        common = columns(NAME, PUBLISHED, problem, PUBLISHED, source=PUBLISHED, **own)
        rows.append(Row(metric="time", unit="ms", value=float(line["value"]), **common))
    return rows


def draw(rows: Sequence[Row]) -> Any:
    """Time, and its deviation from the diagonal, of each pass."""
    large = [row for row in rows if row.heads_q == HEADS]
    if not large:
        return None
    figure, axes = style.new(len(PASSES), 2, 1.1 + 3.1 * len(PASSES))
    N = large[0].seqlen_q
    paper = [row for row in published_rows() if row.seqlen_q == N]
    for (pass_, title), (left, right) in zip(PASSES.items(), axes, strict=True):
        mine = [r for r in (*large, *paper) if r.pass_ == pass_]
        left.set_title(f"{title}, N={N}, d={HEAD_DIM}")
        right.set_title("time over that without a mask, less the share")
        for series in (*_SERIES, PUBLISHED):
            points = curve([r for r in mine if r.source != "model"], series, ("time",))
            _line(left, points, **_look(series))
            _deviations(right, points, **_look(series))
        if left.lines:
            style.log(left.yaxis, 2)
        else:
            style.empty(left, "not recorded yet")
        for series in () if left.lines else SERIES:  # accesses stand where no time does
            points = curve([r for r in mine if r.source == "model"], series, ("loads", "stores"))
            name = f"{LABELS[series]}: accesses (model)"
            look = {"color": style.COLOURS[series], "label": name, "ls": ":", "lw": 3}
            _deviations(right, points, **look)
        right.axhline(0, color="#777777", lw=1, zorder=1)
        left.set_ylabel("ms")
        right.set_ylabel("% of the call without a mask")
        for ax in (left, right):
            ax.set(xlim=(0, 105), xlabel="non-zero blocks (%)")
    title = "Time falls with the share of non-zero blocks; in fp16 few blocks leave some idle"
    checked = counts.said([r for r in rows if r.source in ("counted", "model")])
    title += f"\naccesses {checked}" if checked else ""
    shown = [*style.handles(axes).values()]
    style.legend(figure, [*shown, style.key("without a mask (large, hollow)", **_UNMASKED)], title)
    return figure


_SERIES = {"fa1-simt": "float32", "fa2-simt": "float32", "fa1-mma": "float16", "fa2-mma": "float16"}
_UNMASKED: dict[str, Any] = {"color": "#444444", "ls": "", "marker": "o", "mfc": "none", "ms": 11}


def _look(series: str) -> dict[str, Any]:
    """Full marks and lines are fp32, dashes fp16; hollow marks are published."""
    look = {"color": style.COLOURS[series], "marker": style.MARKERS.get(series, "s")}
    if series == PUBLISHED:
        return look | {"label": "FA-1 paper, A100, fp16", "ls": "--", "mfc": "white"}
    dtype = _SERIES[series]
    dashes = "--" if dtype == "float16" else "-"
    return look | {"label": f"{LABELS[series]}, {DTYPES[dtype]}", "ls": dashes}


def _line(ax: Any, points: Mapping[int | None, float], **look: Any) -> None:
    """A line over the share; the call without a mask is an open marker at 100 %."""
    x = sorted(share for share in points if share is not None)
    if x:
        ax.plot(x, [points[share] for share in x], **look)
    if None in points:
        apart = {"ls": "", "mfc": "none", "ms": 11, "label": None}
        ax.plot([100], [points[None]], **look | apart)


def _deviations(ax: Any, points: Points, **look: Any) -> None:
    """0 is proportional to the share; in percent of the call without a mask."""
    apart = deviations(relative(points))
    _line(ax, {share: 100 * by for share, by in apart.items()}, **look)


def table(rows: Sequence[Row]) -> tables.Table | None:
    problem = setting(SEQLEN)
    wanted = (problem.batch, SEQLEN, HEAD_DIM, False)
    here = [r for r in rows if (r.batch, *tables.sizes(r)) == wanted]
    measured = [r for r in here if r.source == "measured"]
    if not measured:
        return None
    curves = {"paper": curve(published_rows(), PUBLISHED, ("time",))}
    for pass_ in PASSES:
        mine = [r for r in measured if r.pass_ == pass_]
        for dtype, of_dtype in UNITS.items():
            for series in of_dtype:
                if points := curve(mine, series, ("time",)):
                    curves[f"{LABELS[series]}, {DTYPES[dtype]}, {pass_}"] = points
    model = [r for r in here if r.source == "model" and r.pass_ == "fwd+bwd"]
    moved = relative(curve(model, SERIES[0], ("loads", "stores")))
    lines = []
    for share in (*SHARES, None):
        cells = [NO_MASK if share is None else str(share)]
        for points in curves.values():
            cells.append(tables.number(points, share, ".1f"))
            cells.append(tables.number(relative(points), share, ".2f"))
        lines.append([*cells, tables.number(moved, share, ".2f")])
    furthest = ["furthest from the share"]
    for points in curves.values():
        furthest += ["", _furthest(relative(points))]
    lines.append([*furthest, _furthest(moved)])
    header = ["non-zero blocks, %"]
    for name in curves:
        header += [f"{name}, ms", "over no mask"]
    header.append("accesses over no mask, K/V outer, fwd+bwd")
    caption = (
        f"N={SEQLEN}, d={HEAD_DIM}, {problem.heads_q} heads, batch {problem.batch}, blocks of "
        f"{SIZE}; the paper (fwd+bwd, A100, fp16) does not say batch and heads; "
        f"{tables.runs(measured)}."
    )
    return tables.of(caption, header, lines)


def _furthest(over: Mapping[int | None, float]) -> str:
    apart = deviations(over)
    return f"{max(apart.values(), key=abs):+.2f}" if apart else tables.MISSING
