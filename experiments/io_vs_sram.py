"""Shows how accesses fall with more on-chip memory, and what changes at M = d^2.

M is the size of the on-chip memory in floats. The theory is FlashAttention's Theorem 2, Saha and Ye
(arXiv 2402.07443), and for the backward pass Li et al. (arXiv 2410.09397). There are two choices of
tiles for each M in the forward pass: by line 1 of FlashAttention's Algorithm 1, and by fa_numba's
planner. The figure has closed forms, counts, L2 and DRAM bytes, the published bounds, and the
accesses of standard attention with square blocks. The text above the table names the M from which
FA-1 needs fewer accesses than standard attention.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from fa_numba import io_model
from fa_numba.problem import Problem

from .lab.measure import counts, scaling
from .lab.measure.scaling import FLOAT, PLANNED, RULE, RULED, STEPS, Setting
from .lab.measure.series import columns
from .lab.measure.workloads import Inputs, fa2_setting, one_head
from .lab.record import MODEL, Bench, Options, Row
from .lab.show import scaling_figures, style, tables

NAME = "io_vs_sram"
TAKES: tuple[str, ...] = ()

SEQLEN, HEAD_DIM = 4096, 64
MODEL_EXPONENTS = range(4, 21)
# The M for which kernels support line 1's tiles at d = 64: 8 to 128 rows or columns.
MEMORIES = (2048, 4096, 8192, 16384, 32768)
GPU_SEQLEN, QUICK_SEQLEN = 2048, 512
COUNTED_SEQLEN = 96
FLASH = PLANNED[1:]
BLOCKED = "blocked-standard"
BACKWARD_BOUND = "li-liang"
LINES = (*FLASH, *RULED)
ABOUT = (
    "Line 1's tiles: as line 1 of FlashAttention's Algorithm 1 chooses them for M.\n"
    "Planner's tiles: fa_numba's choice. "
    "d is the head dimension. An access is a load or a store of one element of global memory."
)
# Line styles of the bounds and of standard attention with square blocks.
LOOKS: dict[str, dict[str, Any]] = {
    BLOCKED: {"label": "standard attention, square blocks, $\\sqrt{M/3}$", "lw": 1.8},
    "theta-flash": {"label": "bound $N^2d^2/M$", "ls": "--", "lw": 1.2},
    "saha-ye": {"label": "bound of Saha and Ye", "ls": ":", "lw": 2.2},
    BACKWARD_BOUND: {"label": "bound of Li et al.", "ls": "-.", "lw": 1.5},
}


def blocked_standard(problem: Problem, M: float, pass_: str = "fwd") -> float:
    """Return the accesses of standard attention whose matrix products use square blocks.

    Three blocks fit into M floats. A block has b = sqrt(M / 3) rows and columns. These are the
    elements that one head loads and stores in the forward pass:

        step       loaded elements                           stored elements
        S          2 N^2 d / b of Q and K                    N^2
        softmax    N^2 of S                                  N^2 of P
        O          N^2 max(1, d / b) of P, N^2 d / b of V    N d

    For M far below d^2, the sum is about proportional to N^2 d / sqrt(M), the bound of Saha and Ye.
    In the backward pass (FA-1's Algorithm 3), P is in global memory:

        step       loaded elements                           stored elements
        dP         2 N^2 d / b of dO and V                   N^2
        row sums   2 N d of O and dO                         N
        dS         2 N^2 of P and dP, N row sums             N^2

    Each of dQ, dK and dV takes as many loads and stores as O in the forward pass.
    """
    N, d = problem.seqlen_q, problem.head_dim
    b, heads = math.sqrt(M / 3), problem.batch * problem.heads_q
    if pass_ == "fwd":
        return heads * (N * N * (3 * d / b + max(1.0, d / b) + 3) + N * d)
    return heads * (N * N * (5 * d / b + 3 * max(1.0, d / b) + 4) + 5 * N * d + 2 * N)


# The published bounds by pass.
BOUNDS = {
    "fwd": {"theta-flash": io_model.theta_flash, "saha-ye": io_model.saha_ye},
    "bwd": {BACKWARD_BOUND: io_model.li_liang},
}


def memory(row: Row) -> int:
    """Return the on-chip memory M, in floats, that the note of a row names."""
    return int(row.place.removeprefix("M="))


def above_d2(N: int) -> tuple[float, float]:
    """Return the range of M, as (low, high), in which FA-1's exponent above d^2 is fitted.

    M is the on-chip memory in floats, and N is the sequence length. The range begins at M = d^2. It
    ends at M = N d / 2. There, line 1 of FA-1's Algorithm 1 gives tiles of N / 8 columns, so that
    FA-1 makes 8 passes over the rows of Q.
    """
    return HEAD_DIM**2, N * HEAD_DIM / 2


def fits(setting: Setting, M: int) -> bool:
    """Return whether the call has a plan that needs at most M floats of shared memory."""
    made = scaling.made(setting)
    return made is not None and max(k.shared_bytes for k in made.launched) <= M * FLOAT


def at(problem: Problem, M: int, pass_: str = "fwd") -> list[Setting]:
    """Return the calls of both loop orders for an on-chip memory of M floats.

    There is a call of each loop order with the tiles that line 1 of the paper's algorithm gives for
    M. In the forward pass, there is also a call with the tiles that fa_numba's planner chooses.
    This call is left out in two cases: it needs more shared memory than M floats, or the tiles of
    line 1 have fewer than 8 columns.
    """
    by_rule = [scaling.ruled(name, problem, M, f"M={M}", pass_) for name in RULED]
    if pass_ == "bwd":
        return by_rule
    if by_rule[0].Bc < STEPS[1]:
        return by_rule
    chosen = [scaling.for_memory(name, problem, M, f"M={M}") for name in FLASH]
    return [s for s in chosen if fits(s, M)] + by_rule


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield accesses, both computed by closed forms and counted on the emulator, and the bounds.

    On a GPU, also yield L2 and DRAM bytes.
    """
    for M in [1 << n for n in MODEL_EXPONENTS]:
        for pass_ in BOUNDS:
            yield from _closed_forms(one_head(SEQLEN, HEAD_DIM), M, pass_)
    problem = one_head(COUNTED_SEQLEN // (2 if options.quick else 1), HEAD_DIM)
    work = [setting for pass_ in BOUNDS for setting in _runnable(problem, options, pass_)]
    yield from scaling.counted(NAME, work, bench, Inputs(gradient=True))
    if bench.machine is not None:
        problem = fa2_setting(QUICK_SEQLEN if options.quick else GPU_SEQLEN, HEAD_DIM)
        yield from scaling.hardware(NAME, _runnable(problem, options), bench)


def _runnable(problem: Problem, options: Options, pass_: str = "fwd") -> list[Setting]:
    found: list[Setting] = []
    for M in MEMORIES[2:] if options.quick else MEMORIES:
        both = [s for s in at(problem, M, pass_) if scaling.made(s)]
        by_rule = {(s.series.removesuffix(RULE), s.Br, s.Bc) for s in both if RULE in s.series}
        found += [s for s in both if RULE in s.series or (s.series, s.Br, s.Bc) not in by_rule]
    return found


def _closed_forms(problem: Problem, M: int, pass_: str = "fwd") -> Iterator[Row]:
    for setting in at(problem, M, pass_):
        if not setting.series.endswith(RULE) or M >= 4 * problem.head_dim:
            yield from scaling.model(NAME, setting)
    blocked = partial(blocked_standard, pass_=pass_)
    for series, bound in (BOUNDS[pass_] | {BLOCKED: blocked}).items():
        if series != "theta-flash" or M >= problem.head_dim:
            common = columns(NAME, series, problem, MODEL, note=f"M={M}", pass_=pass_)
            value = bound(problem, M)
            yield Row(metric="accesses", unit="elements", value=value, **common)


def _large(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of accesses by closed forms at a single sequence length, for all M.

    It is the longest sequence length for which `rows` also contains the published bounds.
    """
    models = [row for row in rows if row.source == "model" and row.unit == "elements"]
    bounds = [row.seqlen_q for row in models if row.series in ("theta-flash", BACKWARD_BOUND)]
    return [row for row in models if row.seqlen_q == max(bounds, default=0)]


def draw(rows: Sequence[Row]) -> Any:
    """Draw the accesses over the on-chip memory, with a row of panels per pass.

    Return None without rows.
    """
    rows = [row for row in rows if not row.failed]
    passes = [pass_ for pass_ in BOUNDS if any(row.pass_ == pass_ for row in rows)]
    if not passes:
        return None
    figure, axes = style.new(len(passes), 2, 1.4 + 3.6 * len(passes))
    drawn: set[tuple[str, str]] = set()
    for pass_, (left, right) in zip(passes, axes, strict=True):
        mine = [r for r in rows if r.pass_ == pass_]
        back = ", backward" if pass_ == "bwd" else ""
        gpu = [row for row in mine if row.unit == "bytes"]
        for ax, shown, what in (
            (left, _large(mine), "closed form"),
            (right, gpu or _counted(mine), "measured" if gpu else "counted"),
        ):
            found = scaling.per_score(shown, memory)
            if not found:
                style.empty(ax, "nothing recorded yet")
                continue
            N = max(row.seqlen_q for row in shown)
            ax.set_title(f"{what}, fp32, N={N}, d={HEAD_DIM}{back}")
            ours = {key: points for key, points in found.items() if key[0] in scaling.LABELS}
            scaling_figures.draw(ax, ours, tuple(scaling.KINDS))
            if ax is left:
                for series, look in LOOKS.items():
                    of = style.COLOURS["standard-simt"] if series == BLOCKED else "#777777"
                    style.line(ax, found.get((series, "model"), {}), color=of, **look)
                counts.annotate(ax, mine, 0.98)
            drawn |= set(ours)
            _axes(ax, found)
    handles = [*scaling_figures.handles(drawn), *style.handles(axes).values()]
    style.legend(figure, handles, _message(rows), about=ABOUT)
    return figure


def _message(rows: Sequence[Row]) -> str:
    forms = _large([row for row in rows if row.pass_ == "fwd"])
    points = scaling.per_score(forms, memory).get((RULED[0], "model"), {})
    fitted = scaling.fit(points, *above_d2(max((row.seqlen_q for row in forms), default=0)))
    if fitted is None:
        return "Accesses over the size of on-chip memory"
    return f"For $M > d^2$, FA-1's accesses are proportional to $M^{{{fitted.exponent:.2f}}}$"


def _counted(rows: Sequence[Row]) -> list[Row]:
    counted = [row for row in rows if row.source == "counted"]
    places = {(row.seqlen_q, row.place) for row in counted}
    models = [row for row in rows if row.source == "model" and row.unit == "elements"]
    return counted + [r for r in models if (r.seqlen_q, r.place) in places and r.series in LINES]


def _axes(ax: Any, found: dict[tuple[str, str], dict[int, float]]) -> None:
    memories = sorted({M for points in found.values() for M in points})
    style.sizes(ax, memories[:: 1 + len(memories) // 7], "on-chip memory M (floats)")
    ax.set_xlim(memories[0] / 1.3, memories[-1] * 1.3)
    style.log(ax.yaxis)
    ax.set_ylabel("accesses per element of S")
    if memories[0] < HEAD_DIM**2 < memories[-1]:
        ax.axvline(HEAD_DIM**2, color="#555555", lw=0.8, zorder=1)
        place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(
            "$M=d^2$", (HEAD_DIM**2, 0.97), (-4, 0), va="top", ha="right", fontsize=9, **place
        )


def crossing(rows: Sequence[Row]) -> float | None:
    """Return the M from which FA-1 accesses at most as many elements as standard attention.

    M is the size of the on-chip memory in floats. The accesses are closed forms. FA-1 has the tiles
    that line 1 of its Algorithm 1 gives for M. Standard attention multiplies matrices in square
    blocks, as in `blocked_standard`. Both numbers are known for some sizes M only. Between two
    sizes, the result is interpolated by a power law. Return None if there is no such crossing.
    """
    found = scaling.per_score(_large(rows), memory)
    flash, blocked = found.get((RULED[0], "model"), {}), found.get((BLOCKED, "model"), {})
    ahead = {M: math.log(flash[M] / blocked[M]) for M in sorted(set(flash) & set(blocked))}
    for (low, a), (high, b) in pairwise(ahead.items()):
        if a > 0 >= b:
            return low * (high / low) ** (a / (a - b))
    return None


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the exponents with which accesses and bounds depend on M."""
    d, large = HEAD_DIM, {pass_: _large([r for r in rows if r.pass_ == pass_]) for pass_ in BOUNDS}
    if not large["fwd"]:
        return None
    N, square = large["fwd"][0].seqlen_q, d * d
    above = above_d2(N)
    regimes = (
        (RULED[0], "fwd", "-1", 4 * d, square),
        (RULED[0], "fwd", "-1", *above),
        (RULED[1], "fwd", "-1", *above),
        (FLASH[0], "fwd", "-1", *above),
        (FLASH[1], "fwd", "-1", *above),
        (BLOCKED, "fwd", "-1/2", 1, square),
        ("saha-ye", "fwd", "-1/2", 1, square),
        ("saha-ye", "fwd", "-1", square, N * d),
        (RULED[0], "bwd", "-1", *above),
        (RULED[1], "bwd", "-1", *above),
        (BLOCKED, "bwd", "-1/2", 1, square),
        (BACKWARD_BOUND, "bwd", "-1/2", 1, square),
        (BACKWARD_BOUND, "bwd", "-1", square, N * d),
    )
    lines = []
    for series, pass_, theorem, low, high in regimes:
        fitted = []
        for source in scaling.FITTED:
            measured = [r for r in rows if r.source == source and r.pass_ == pass_]
            mine = large[pass_] if source == "model" else measured
            points = scaling.per_score(mine, memory).get((series, source), {})
            # Measured calls have few values of M: above d^2, all of them are fitted.
            whole = source != "model" and low >= square
            fitted.append(scaling.fit(points, *(() if whole else (low, high))))
        if any(fitted):
            own = LOOKS.get(series, {}).get("label", "").partition(", $")[0]
            name = scaling.label(series, pass_, own)
            side = "below d²" if high <= square else "above d²"
            exponents = (str(found or tables.MISSING) for found in fitted)
            lines.append([f"{name}, {side}", theorem, *exponents])
    where = [f"{at / square:.2f} d²" for at in map(crossing, large.values()) if at is not None]
    said = (
        " By the closed forms, FA-1 (tiles by line 1 of FA-1's Algorithm 1) accesses fewer "
        f"elements than standard attention (square blocks) from M = {where[0]} on. In the backward "
        f"pass, FA-1 accesses fewer elements than standard attention from M = {where[1]} on."
    ) if len(where) == len(large) else ""  # fmt: skip
    caption = (
        "The accesses of each algorithm are about proportional to a power of the on-chip memory "
        f"M. The table shows the exponents of M for head dimension d={d} (d² = {square}). Each "
        "exponent is followed by its standard error, and by the fitted range of M (in floats) in "
        "brackets. The calls use tiles of 8 to 128 rows and 8 to 128 columns. The planner's tiles "
        "have at most 128 rows and 128 columns, because larger tiles do not fit into the "
        f"registers.{said}{scaling.agreement(rows)}"
    )
    header = ["algorithm", "exponent in the theorem", *scaling.FITTED.values()]
    return tables.of(caption, header, lines)
