"""Time over the share of non-zero blocks: FlashAttention-1 paper, Fig. 2 right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device, io_model, reference
from fa_numba.problem import Problem

from .lab import counts, peers, published, tables
from .lab.options import Bench, Options
from .lab.series import LABELS, call, gradients, row_fields
from .lab.store import EMULATOR, MODEL, PUBLISHED, Row
from .lab.tables import Table
from .lab.timing import SECONDS, WrongResult, attempt, time_call, to_host
from .lab.workloads import SEED, Inputs, one_head

NAME = "block_sparse"
TITLE = "time over the share of non-zero blocks (FA-1 Fig. 2 right)"
DESCRIPTION = (
    "FA-1 paper, Fig. 2 right (N=4096, forward + backward): time of block-sparse FlashAttention "
    "over the share of blocks that its mask keeps, in both loop orders, the published points "
    "beside ours; the accesses from the model, counted on the emulator at a small size."
)
NEEDS_GPU = False
# A row's share of blocks stands in its note.
SWEPT = ("note",)
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
SERIES = ("fa1-simt", "fa2-simt")
# Checked against float64, and counted where the emulator takes a second.
CHECKED_SEQLEN = 1024
SMALL_SEQLEN, SMALL_HEAD_DIM, SMALL_SIZE, SMALL_SHARES = 96, 16, 16, (20, 60)
NO_MASK = "no mask"


def setting(seqlen: int, head_dim: int, causal: bool = False) -> Problem:
    """The problem at a length; batch times length is the same for all lengths."""
    batch = max(1, TOKENS // seqlen)
    return Problem(batch, HEADS, HEADS, seqlen, seqlen, head_dim, causal=causal)


def block_mask(seqlen: int, size: int, share: int) -> np.ndarray | None:
    """A mask that keeps `share` percent of the blocks: the diagonal, and others drawn at random.

    A bool array of shape (T, T) with T blocks of `size` along the length, True for a kept block.

    The blocks of a smaller share are among those of a larger one. None where the diagonal alone has
    more than the share.
    """
    T = -(-seqlen // size)
    wanted = round(share / 100 * T * T) - T
    if wanted < 0:
        return None
    mask = np.eye(T, dtype=bool)
    others = np.random.default_rng([SEED, T]).permutation(np.flatnonzero(~mask))
    mask.flat[others[:wanted]] = True
    return mask


def place(share: int | None) -> str:
    """How the note of a row begins at this share in percent; None is the call without a mask."""
    return NO_MASK if share is None else f"{share} % of blocks"


def share_of(row: Row) -> int | None:
    return None if row.place == NO_MASK else int(row.place.split()[0])


def _given(problem: Problem, size: int, share: int | None) -> dict[str, Any]:
    """The options of a call: its tiles and, unless `share` is None, its block mask."""
    tiles = {"tiles": fa_numba.Tiles(size, size)}
    if share is None:
        return tiles
    return tiles | {"block_mask": block_mask(problem.seqlen_q, size, share)}


def _shares(bench: Bench, problem: Problem, size: int, shares: Sequence[int]) -> list[int | None]:
    """None for the call without a mask, then the shares that are no smaller than the diagonal's.

    Says which are smaller.
    """
    found = [share for share in shares if block_mask(problem.seqlen_q, size, share) is not None]
    if len(found) < len(shares):
        bench.say(
            f"  N={problem.seqlen_q}, blocks of {size}: the diagonal is more than "
            f"{max(set(shares) - set(found))} % of the blocks"
        )
    return [None, *found]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Accesses from the model and counted; times where there is a GPU."""
    lengths = options.seqlens or ((QUICK_SEQLEN,) if options.quick else (SEQLEN,))
    head_dims, masks = options.head_dims or (HEAD_DIM,), options.causal or (False,)
    shares = QUICK_SHARES if options.quick else SHARES
    problems = [setting(N, d, mask) for d in head_dims for mask in masks for N in lengths]
    cases = [
        (problem, series, share)
        for problem in problems
        for share in _shares(bench, problem, SIZE, shares)
        for series in SERIES
    ]
    for problem, series, share in bench.track(cases, "closed forms"):
        yield from _model(problem, series, SIZE, share)

    few = SMALL_SHARES[:1] if options.quick else SMALL_SHARES
    wanted = [
        one_head(N, d, mask)
        for N in options.seqlens or (SMALL_SEQLEN,)
        for d in options.head_dims or (SMALL_HEAD_DIM,)
        for mask in masks
    ]
    counted = [
        (problem, series, share)
        for problem in counts.countable(wanted, bench)
        for share in _shares(bench, problem, SMALL_SIZE, few)
        for series in SERIES
    ]
    inputs = Inputs(gradient=True)
    for problem, series, share in counted:
        yield from _model(problem, series, SMALL_SIZE, share)
    yield from bench.counted(
        [(problem, series, SMALL_SIZE, share) for problem, series, share in counted],
        "counting on the emulator",
        partial(_count, inputs=inputs),
    )

    if bench.machine is None:
        return
    checks = Checks(inputs)
    arrays: dict[Problem, tuple] = {}
    for problem, series, share in bench.each(cases, "timing"):
        if problem not in arrays:
            arrays.clear()
            arrays[problem] = peers.on_device(inputs(problem))
        for pass_ in PASSES:
            yield _time(problem, series, pass_, share, arrays[problem], checks, bench.machine)
            device.release_memory()
            peers.release()


def _fields(problem: Problem, series: str, pass_: str, size: int, share: int | None) -> dict:
    return {
        "experiment": NAME,
        "series": series,
        "pass_": pass_,
        "Br": size,
        "Bc": size,
        "note": place(share),
        **row_fields(problem),
    }


def _model(problem: Problem, series: str, size: int, share: int | None) -> Iterator[Row]:
    tiles, mask = fa_numba.Tiles(size, size), None
    if share is not None:
        mask = block_mask(problem.seqlen_q, size, share)
    sparse = replace(problem, sparse=share is not None)
    if series == "fa1-simt":
        forward = io_model.fa1(sparse, tiles, return_lse=True, block_mask=mask)
        backward = io_model.fa1_backward(sparse, tiles, block_mask=mask)
    else:
        forward = io_model.fa2(sparse, tiles, block_mask=mask)
        backward = io_model.fa2_backward(sparse, tiles, block_mask=mask)
    for pass_, parts in (("fwd", [forward]), ("fwd+bwd", [forward, backward])):
        fields = _fields(problem, series, pass_, size, share)
        yield from counts.totals(*parts, machine=MODEL, source="model", **fields)


def _count(
    problem: Problem, series: str, size: int, share: int | None, inputs: Inputs
) -> Iterator[Row]:
    arrays = inputs(problem)
    for pass_ in PASSES:
        with fa_numba.count_accesses() as counted:
            _run(series, problem, pass_, arrays, _given(problem, size, share))()
        fields = _fields(problem, series, pass_, size, share)
        yield from counts.totals(counted, machine=EMULATOR, source="counted", **fields)


def _run(
    series: str, problem: Problem, pass_: str, arrays: Sequence[Any], given: dict[str, Any]
) -> Callable[..., Any]:
    """A function that gives O, or dq, dk and dv; either way the logsumexp is computed too."""
    if pass_ == "fwd":
        forward = call(series, problem, *arrays[:3], return_lse=True, **given)
        return lambda out=None: forward(out=out)[0]
    return gradients(series, problem, pass_, *arrays, **given)


class Checks:
    """Checks results of each series, pass and share, at CHECKED_SEQLEN or less.

    O, or dq, dk and dv, of the last head must not differ from float64 by more than twice what the
    unfused float32 computation does, plus a rounding; else WrongResult is raised.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._expected: dict[tuple, list[tuple[str, np.ndarray, float]]] = {}

    def __call__(self, series: str, pass_: str, problem: Problem, share: int | None) -> None:
        N = min(CHECKED_SEQLEN, problem.seqlen_q)
        small = replace(problem, batch=1, heads_q=2, heads_k=2, seqlen_q=N, seqlen_k=N)
        arrays, given = self.inputs(small), _given(small, SIZE, share)
        found = _run(series, small, pass_, peers.on_device(arrays), given)()
        device.synchronize()
        found = (found,) if pass_ == "fwd" else found
        wanted = self._of(small, pass_, share, arrays, given)
        for got, (name, expected, bound) in zip(found, wanted, strict=True):
            error = float(reference.relative_error(to_host(got[0, 1]), expected))
            if not error <= bound:
                raise WrongResult(
                    f"{name} at N={N}: error {error:.2e} against float64, allowed {bound:.2e}"
                )

    def _of(
        self, problem: Problem, pass_: str, share: int | None, arrays: Sequence[Any], given: dict
    ) -> list[tuple[str, np.ndarray, float]]:
        key = (problem, pass_, share)
        if key not in self._expected:
            q, k, v, dout = (x[:1, 1:2] for x in arrays)
            options = {"causal": problem.causal, "scale": problem.scale, **given}
            exact: Sequence[Any]
            unfused: Sequence[Any]
            if pass_ == "fwd":
                names = ["O"]
                exact = [reference.attention(q, k, v, **options)]
                unfused = [reference.unfused(q, k, v, **options)]
            else:
                names = ["dq", "dk", "dv"]
                exact = reference.attention_backward(dout, q, k, v, **options)
                unfused = reference.unfused_backward(dout, q, k, v, **options)
            rounding = float(np.finfo(np.float32).eps)
            self._expected[key] = [
                (name, e[0, 0], 2 * float(reference.relative_error(u, e)) + rounding)
                for name, e, u in zip(names, exact, unfused, strict=True)
            ]
        return self._expected[key]


def _time(
    problem: Problem,
    series: str,
    pass_: str,
    share: int | None,
    arrays: Sequence[Any],
    checks: Checks,
    machine: str,
) -> Row:
    def work() -> Any:
        checks(series, pass_, problem, share)
        run = _run(series, problem, pass_, arrays, _given(problem, SIZE, share))
        return time_call(run, lambda result: float("nan"), seconds=SECONDS)

    timing, failure = attempt(work)
    fields = _fields(problem, series, pass_, SIZE, share)
    if failure:
        fields["note"] += f"; {failure}"
    return Row(
        machine=machine,
        source="measured",
        metric="time",
        unit="ms",
        value=None if timing is None else timing.median,
        **({} if timing is None else timing.spread),
        **fields,
    )


def published_rows() -> list[Row]:
    """The paper's points: fp16 on an A100; batch, heads and head dimension are not given there."""
    problem = setting(SEQLEN, HEAD_DIM)
    rows = []
    for line in published.lookup(paper="fa1", item="Fig. 2 right"):
        share = int(line["metric"].removeprefix("runtime at ").partition("%")[0])
        dense = line["method"] == "FlashAttention"
        fields = _fields(problem, PUBLISHED, line["pass"], SIZE, None if dense else share)
        rows.append(
            Row(
                machine=PUBLISHED,
                source=PUBLISHED,
                metric="time",
                unit="ms",
                value=float(line["value"]),
                **fields | {"dtype": "float16", "Br": None, "Bc": None},
            )
        )
    return rows


def curve(rows: Sequence[Row], series: str, metrics: Sequence[str]) -> dict[int | None, float]:
    """Share in percent (None: without a mask) -> the sum of the series' rows of these metrics.

    `rows` are of one source and problem.
    """
    points: dict[int | None, float] = {}
    for row in rows:
        if row.series == series and row.metric in metrics and row.value is not None:
            points[share_of(row)] = points.get(share_of(row), 0) + row.value
    return points


def relative(points: dict[int | None, float]) -> dict[int | None, float]:
    """A `curve` divided by its value without a mask; empty where that is missing."""
    dense = points.get(None)
    return {share: value / dense for share, value in points.items()} if dense else {}


def draw(rows: Sequence[Row]) -> Any:
    """Time, and time and accesses over those of the dense call; each pass has a row of panels."""
    from matplotlib.lines import Line2D

    from .lab import style

    large = [row for row in rows if row.heads_q == HEADS]
    panels = sorted(
        {(r.pass_, r.head_dim, r.causal, r.seqlen_q) for r in large},
        key=lambda panel: (list(PASSES).index(panel[0]), panel[1:]),
    )
    if not panels:
        return None
    figure, axes = style.new(len(panels), 2, 1.1 + 3.1 * len(panels))
    for (pass_, d, mask, N), (left, right) in zip(panels, axes, strict=True):
        mine = [
            r for r in large if (r.pass_, r.head_dim, r.causal, r.seqlen_q) == (pass_, d, mask, N)
        ]
        paper = []
        if (d, mask, N) == (HEAD_DIM, False, SEQLEN):
            paper = [r for r in published_rows() if r.pass_ == pass_]
        what = f"{PASSES[pass_]}, N={N}, d={d}{', causal' if mask else ''}"
        left.set_title(what)
        right.set_title("over the call without a mask")
        times = [r for r in mine if r.source == "measured"] + paper
        model = [r for r in mine if r.source == "model"]
        _time_panel(left, times, style)
        _relative_panel(right, times, model, style)
    counts.annotate(axes[0][1], rows, 0.05)
    shown = style.handles(axes)
    if shown:
        shown["without a mask (open, or large)"] = Line2D([], [], **_UNMASKED)
        figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=2)
    return figure


_STYLES = {
    **{series: {"label": f"{LABELS[series]}, fp32", "ls": "-"} for series in SERIES},
    PUBLISHED: {"label": "FA-1 paper, A100, fp16; batch and heads not given", "ls": "--"},
}
_UNMASKED: dict[str, Any] = {"color": "#444444", "ls": "", "marker": "o", "mfc": "none", "ms": 11}
# FA-1's accesses are seen beneath FA-2's.
_WIDTHS = {"fa1-simt": 3.6, "fa2-simt": 1.8}


def _line(ax: Any, points: dict[int | None, float], **look: Any) -> None:
    """A line over the share; the call without a mask is an open marker at 100 %."""
    x = sorted(share for share in points if share is not None)
    if x:
        ax.plot(x, [points[share] for share in x], **look)
    if None in points and look["marker"]:
        apart = {"ls": "", "mfc": "none", "ms": 11, "label": None}
        ax.plot([100], [points[None]], **look | apart)


def _look(series: str, style: Any) -> dict[str, Any]:
    return {"color": style.COLOURS[series], "marker": style.MARKERS.get(series, "x")}


def _axes(ax: Any) -> None:
    ax.set_xlim(0, 105)
    ax.set_xlabel("non-zero blocks (%)")
    ax.set_ylim(bottom=0)


def _time_panel(ax: Any, times: Sequence[Row], style: Any) -> None:
    found = {series: curve(times, series, ("time",)) for series in _STYLES}
    for series, points in found.items():
        _line(ax, points, **_look(series, style) | _STYLES[series])
    if not any(found.values()):
        style.empty(ax, "not recorded yet")
        return
    ax.set_ylabel("ms")
    _axes(ax)


def _relative_panel(ax: Any, times: Sequence[Row], model: Sequence[Row], style: Any) -> None:
    found = {series: relative(curve(times, series, ("time",))) for series in _STYLES}
    moved = {series: relative(curve(model, series, ("loads", "stores"))) for series in SERIES}
    for series, points in moved.items():
        look = {"label": f"{LABELS[series]}: accesses (model)", "ls": ":", "marker": ""}
        _line(ax, points, color=style.COLOURS[series], lw=_WIDTHS[series], **look)
    for series, points in found.items():
        _line(ax, points, **_look(series, style) | _STYLES[series])
    if not any([*found.values(), *moved.values()]):
        style.empty(ax, "no call without a mask")
        return
    ax.plot([0, 100], [0, 1], color="#B0B0B0", lw=1, zorder=1, label="proportional to the share")
    _axes(ax)


def table(rows: Sequence[Row]) -> Table | None:
    """Time, and time and accesses over those without a mask, over the share of blocks."""
    problem = setting(SEQLEN, HEAD_DIM)
    wanted = (problem.batch, SEQLEN, HEAD_DIM, False)
    here = [r for r in rows if (r.batch, *tables.sizes(r)) == wanted]
    measured = [r for r in here if r.source == "measured"]
    if not measured:
        return None
    curves = [curve(published_rows(), PUBLISHED, ("time",))]
    for pass_ in PASSES:
        mine = [r for r in measured if r.pass_ == pass_]
        curves += [curve(mine, series, ("time",)) for series in SERIES]
    model = [r for r in here if r.source == "model" and r.pass_ == "fwd+bwd"]
    moved = [relative(curve(model, series, ("loads", "stores"))) for series in SERIES]
    lines = []
    for share in (*SHARES, None):
        cells = [NO_MASK if share is None else str(share)]
        for points in curves:
            cells.append(tables.number(points, share, ".1f"))
            cells.append(tables.number(relative(points), share, ".2f"))
        lines.append(cells + [tables.number(points, share, ".2f") for points in moved])
    names = [LABELS[series] for series in SERIES]
    header = ["non-zero blocks, %"]
    for name in ("paper", *(f"{name}, {pass_}" for pass_ in PASSES for name in names)):
        header += [f"{name}, ms", "over no mask"]
    header += [f"{name}, accesses over no mask" for name in names]
    caption = (
        f"N={SEQLEN}, d={HEAD_DIM}, {problem.heads_q} heads, batch {problem.batch}, fp32, blocks "
        f"of {SIZE}; the paper (fwd+bwd, A100, fp16) does not say batch and heads."
    )
    return Table(caption, tables.markdown(header, lines))
