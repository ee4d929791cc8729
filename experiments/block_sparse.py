"""Shows how a block mask shortens the runtime (FlashAttention-1 paper, Fig. 2 right).

A block mask says which blocks (tiles of S) are computed. Both loop orders run at N=4096, forward
alone and forward with backward, with 10 % to 100 % of the blocks. The figure contains the paper's
numbers too. The accesses are from the model, and counted on the emulator at a small size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import fa_numba
from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import calls, counts, peers
from .lab.measure.check import Gate
from .lab.measure.series import LABELS, call, columns, gradients, plan
from .lab.measure.speeds import DTYPES
from .lab.measure.timing import attempt, time_call
from .lab.measure.workloads import SEED, Inputs, one_head
from .lab.record import EMULATOR, MODEL, PUBLISHED, Bench, Options, Row, published_numbers, select
from .lab.show import style, tables

NAME = "block_sparse"
TAKES: tuple[str, ...] = ()
PROTOCOL = (
    "all of O, dq, dk and dv checked at N=1024 at most, with the same share of blocks, before "
    "either pass is timed"
)

# The paper gives N only. The number of heads and the head dimension are as in Fig. 2 left and
# middle of the paper. The batch size is 8, an eighth of the batch size in these figures.
SEQLEN, HEADS, HEAD_DIM, TOKENS = 4096, 16, 64, 8 * 4096
SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)  # percent of all blocks
QUICK_SEQLEN, QUICK_SHARES = 1024, (10, 50, 100)
# Rows and columns of a block. Every kernel supports this size, so that both passes and both loop
# orders use the same mask.
SIZE = 64
PASSES = ("fwd+bwd", "fwd")
# Series on CUDA cores, which the emulator counts too, and on tensor cores.
SERIES, HALF = ("fa1-simt", "fa2-simt"), ("fa1-mma", "fa2-mma")
UNITS = {"float32": SERIES, "float16": HALF}
# Seconds for the timed calls of one share. At least five calls are timed.
SHARE_SECONDS = 0.2
# Longest sequence that is checked against float64, and the problem that the emulator counts.
CHECKED_SEQLEN = 1024
SMALL, SMALL_SIZE, SMALL_SHARES = one_head(96, 16), 16, (20, 60)

NO_MASK = "no mask"
Points = dict[int | None, float]


def share_of(row: Row) -> int | None:
    """Return how many percent of the blocks the call of a row computes; None without a mask."""
    return None if row.place == NO_MASK else int(row.place.split()[0])


def curve(rows: Sequence[Row], series: str, *metrics: str) -> Points:
    """Return the values of a series as {percent of blocks: value}. The key None means no mask.

    If several metrics are named, such as "loads" and "stores", their values are added. All rows
    must be of one source and of one problem.
    """
    points: Points = {}
    for row in select(rows, series=series, metric=metrics):
        points[share_of(row)] = points.get(share_of(row), 0) + row.number
    return points


def relative(points: Points) -> Points:
    """Return the values of a curve divided by the curve's value without a mask.

    Return an empty dictionary if the curve has no value without a mask.
    """
    dense = points.get(None)
    return {share: value / dense for share, value in points.items()} if dense else {}


def deviations(points: Points) -> dict[int, float]:
    """Return how far a curve is above the share of computed blocks, as {percent of blocks: number}.

    The number 0.03 at 50 percent means: the call takes 53 % of the time without a mask.
    """
    over = relative(points).items()
    return {share: value - share / 100 for share, value in over if share is not None}


def setting(seqlen: int, dtype: str = "float32") -> Problem:
    """Return the problem for a sequence length. It has TOKENS tokens (batch x seqlen)."""
    batch = max(1, TOKENS // seqlen)
    return Problem(batch, HEADS, HEADS, seqlen, seqlen, HEAD_DIM, dtype=dtype)


def block_mask(seqlen: int, size: int, share: int) -> np.ndarray:
    """Return a random mask of shape (T, T) that keeps `share` percent of all blocks.

    A block has `size` rows and columns, and T is seqlen / size, rounded up. The mask keeps the
    blocks on the diagonal, and random other blocks. A mask with a larger share keeps all blocks of
    a mask with a smaller share.
    """
    T = -(-seqlen // size)
    mask = np.eye(T, dtype=bool)
    others = np.random.default_rng([SEED, T]).permutation(np.flatnonzero(~mask))
    mask.flat[others[: round(share / 100 * T * T) - T]] = True
    return mask


@dataclass(frozen=True)
class Case:
    """A call of a series, with a block mask or without.

    `share` is the percentage of blocks that the mask keeps; None means no mask. Blocks and tiles
    have `size` rows and `size` columns.
    """

    series: str
    problem: Problem
    share: int | None
    size: int

    @property
    def given(self) -> dict[str, Any]:
        """Return the options of the call: the tiles and, if there is one, the block mask."""
        found: dict[str, Any] = {"tiles": fa_numba.Tiles(self.size, self.size)}
        if self.share is not None:
            found["block_mask"] = block_mask(self.problem.seqlen_q, self.size, self.share)
        return found

    def fields(self, pass_: str, machine: str) -> dict[str, Any]:
        """Return the columns of the rows of this call, except metric, unit and value."""
        note = NO_MASK if self.share is None else f"{self.share} % of blocks"
        own = {"pass_": pass_, "Br": self.size, "Bc": self.size, "note": note}
        return columns(NAME, self.series, self.problem, machine, **own)


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield accesses, both computed by closed forms and counted on the emulator.

    On a GPU, also yield times. All numbers are over the share of computed blocks.
    """
    N, shares = (QUICK_SEQLEN, QUICK_SHARES) if options.quick else (SEQLEN, SHARES)
    cases = [
        Case(series, setting(N, dtype), share, SIZE)
        for dtype, of_dtype in UNITS.items()
        for share in (None, *shares)
        for series in of_dtype
    ]
    few = (None, *SMALL_SHARES[: 1 if options.quick else None])
    small = [Case(series, SMALL, share, SMALL_SIZE) for share in few for series in SERIES]
    for case in bench.track([*cases, *small], "closed forms"):
        yield from _model(case)
    inputs = Inputs(gradient=True)
    yield from bench.counted([(x, inputs) for x in small], "counting on the emulator", _count)

    if bench.machine is None:
        return
    arrays: dict[Problem, tuple] = {}
    for case in bench.each(cases, "timing"):
        if case.problem not in arrays:
            arrays.clear()
            arrays[case.problem] = peers.on_device(inputs(case.problem), case.problem.dtype)
        _, wrong = attempt(_check, case, inputs)
        for pass_ in PASSES:
            yield _time(case, pass_, arrays[case.problem], wrong, bench.machine)
            device.release_memory()
            peers.release()


def _model(case: Case) -> Iterator[Row]:
    with device.using("emulator"):
        planned = partial(plan, case.series, case.problem, **case.given)
        forward, backward = planned(return_lse=True).accesses, planned(passes="bwd").accesses
    yield from counts.totals(forward, **case.fields("fwd", MODEL))
    yield from counts.totals(forward, backward, **case.fields("fwd+bwd", MODEL))


def _count(case: Case, inputs: Inputs) -> Iterator[Row]:
    for pass_ in PASSES:
        with fa_numba.count_accesses() as counted:
            _run(case, pass_, inputs(case.problem))()
        yield from counts.totals(counted, **case.fields(pass_, EMULATOR))


def _run(case: Case, pass_: str, arrays: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs the call of a case once.

    The function returns O for the pass "fwd", and (dq, dk, dv) for the pass "fwd+bwd". In both
    passes, the logsumexp is computed too.
    """
    if pass_ == "fwd":
        forward = call(case.series, case.problem, *arrays[:3], return_lse=True, **case.given)
        return lambda out=None: forward(out=out)[0]
    return gradients(case.series, case.problem, pass_, *arrays, **case.given)


def _check(case: Case, inputs: Inputs) -> None:
    """Compare O and the gradients of a shorter call with float64.

    The call has at most CHECKED_SEQLEN rows, one batch entry and two heads. Raise WrongResult if a
    result is wrong.
    """
    N = min(CHECKED_SEQLEN, case.problem.seqlen_q)
    sizes: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_k": 2, "seqlen_q": N, "seqlen_k": N}
    small = replace(case, problem=replace(case.problem, **sizes))
    host = inputs(small.problem)
    arrays = peers.on_device(host, small.problem.dtype)
    for pass_ in PASSES:
        found = _run(small, pass_, arrays)()
        device.synchronize()
        gate = Gate.of_whole(small.problem, pass_, *host, **small.given)
        gate((found,) if pass_ == "fwd" else found)


def _time(case: Case, pass_: str, arrays: Sequence[Any], wrong: str, machine: str) -> Row:
    timing = None
    if not wrong:
        timing, wrong = attempt(
            lambda: time_call(_run(case, pass_, arrays), lambda out: float("nan"),
                              seconds=SHARE_SECONDS)
        )  # fmt: skip
    fields = case.fields(pass_, machine)
    return calls.time_row(timing, wrong, fields.pop("note"), **fields)


def paper() -> Points:
    """Return the paper's times in ms, as {percent of blocks: time}. The key None means no mask.

    The times are in fp16 on an A100. The paper does not give batch size, heads and head dimension.
    """
    found: Points = {}
    for line in published_numbers.lookup(paper="fa1", item="Fig. 2 right"):
        share = line["metric"].removeprefix("runtime at ").partition("%")[0]
        dense = line["method"] == "FlashAttention"
        found[None if dense else int(share)] = float(line["value"])
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Draw the time of forward plus backward over the share of blocks.

    A second panel shows the difference between the share of time and the share of blocks. Return
    None if there are no times.
    """
    mine = select(rows, heads_q=HEADS, pass_="fwd+bwd", metric="time")
    if not mine:
        return None
    figure, ((left, right),) = style.new(1, 2, 4.6)
    for dtype, of_dtype in UNITS.items():
        for series in of_dtype:
            look = {"marker": style.MARKERS[series], "ls": "--" if dtype == "float16" else "-"}
            look["label"] = f"{LABELS[series]}, {DTYPES[dtype]}"
            _lines(left, right, curve(mine, series, "time"), style.COLOURS[series], **look)
    if mine[0].seqlen_q == SEQLEN:
        look = {"marker": "s", "ls": "--", "mfc": "white", "label": "FA-1 paper, A100, fp16"}
        _lines(left, right, paper(), style.COLOURS[PUBLISHED], **look)
    style.log(left.yaxis, 2)
    left.set(title=f"forward + backward, N={mine[0].seqlen_q}, d={HEAD_DIM}", ylabel="time (ms)")
    right.axhline(0, color="#777777", lw=1, zorder=1)
    right.set(
        title="share of the full time minus share of blocks",
        ylabel="difference (percentage points)",
    )
    for ax in (left, right):
        ax.set(xlim=(0, 105), xlabel="non-zero blocks (%)")
    apart = [deviations(curve(mine, series, "time")) for of in UNITS.values() for series in of]
    most = max((abs(by) for found in apart for by in found.values()), default=0)
    points = f"{100 * most:.1f} percentage points"
    title = f"Time follows the share of non-zero blocks within {points}"
    checked = counts.said([r for r in rows if r.source in ("counted", "model")])
    about = f"Accesses {checked}." if checked else ""
    style.legend(figure, list(style.handles((left, right)).values()), title, about=about)
    return figure


def _lines(left: Any, right: Any, points: Points, color: str, **look: Any) -> None:
    """Draw a curve on two panels, over the percentage of computed blocks.

    The panel `left` shows the values. The panel `right` shows the results of `deviations` in
    percent.
    """
    masked = sorted((share, value) for share, value in points.items() if share is not None)
    style.line(left, masked, color=color, **look)
    above = sorted((share, 100 * by) for share, by in deviations(points).items())
    style.line(right, above, color=color, **look)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of times by share of blocks, or None without measured times."""
    problem = setting(SEQLEN)
    wanted = (problem.batch, SEQLEN, HEAD_DIM, False)
    here = [r for r in rows if (r.batch, *tables.sizes(r)) == wanted]
    measured = [r for r in here if r.source == "measured"]
    if not measured:
        return None
    curves = {"paper": paper()}
    for pass_ in PASSES:
        mine = [r for r in measured if r.pass_ == pass_]
        for dtype, of_dtype in UNITS.items():
            for series in of_dtype:
                if points := curve(mine, series, "time"):
                    curves[f"{LABELS[series]}, {DTYPES[dtype]}, {pass_}"] = points
    of_model = select(here, source="model", pass_="fwd+bwd")
    moved = curve(of_model, SERIES[0], "loads", "stores")
    lines = []
    for share in (*SHARES, None):
        cells = [NO_MASK if share is None else str(share)]
        for points in curves.values():
            cells.append(tables.number(points, share, ".1f"))
            cells.append(tables.number(relative(points), share, ".2f"))
        lines.append([*cells, tables.number(relative(moved), share, ".2f")])
    furthest = [cell for points in curves.values() for cell in ("", _furthest(points))]
    lines.append(
        ["largest difference: *share* - share of non-zero blocks", *furthest, _furthest(moved)]
    )
    header = ["non-zero blocks, %"]
    for name in curves:
        header += [f"{name}, ms", "share"]
    header.append("accesses / accesses without a mask, K/V outer, fwd+bwd")
    caption = (
        "The table of block sparsity contains times of calls with a block mask, for several "
        f"shares of non-zero blocks. Our calls with block masks have N={SEQLEN}, d={HEAD_DIM}, "
        f"{problem.heads_q} heads, batch {problem.batch} and blocks of {SIZE} x {SIZE}. Our times "
        f"with block masks are {tables.runs(measured)}. In the table of block sparsity, a column "
        "*share* contains a kernel's time with the block mask / the kernel's time without a mask. "
        "The published times (Figure 2 right of the FlashAttention paper) are for forward plus "
        "backward in fp16 on an A100. For the times in Figure 2 right, the FlashAttention paper "
        "gives neither the batch size nor the number of heads."
    )
    return tables.of(caption, header, lines)


def _furthest(points: Points) -> str:
    apart = deviations(points)
    return f"{max(apart.values(), key=abs):+.2f}" if apart else tables.MISSING
