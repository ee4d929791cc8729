"""Shows how accesses grow with head dimension and length (FlashAttention's Theorems 2 and 5).

There are two choices of tiles: by line 1 of FlashAttention's Algorithm 1 for an on-chip memory of M
floats, and by fa_numba's planner. The accesses are computed by closed forms and counted on the
emulator. On a GPU the L2 and DRAM bytes are measured too. The exponents of N and d are fitted to
each series.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from fa_numba import device
from fa_numba.problem import Problem

from .lab.measure import scaling
from .lab.measure.scaling import FLOAT, PLANNED, RULED, Setting
from .lab.measure.workloads import Inputs, fa2_setting, one_head
from .lab.record import Bench, Options, Row
from .lab.show import scaling_figures, style, tables
from .lab.show.tables import Across

NAME = "io_vs_head_dim"
TAKES: tuple[str, ...] = ()

HEAD_DIMS = (16, 32, 64, 128, 256)
# The on-chip memory in floats, for which line 1 computes tiles. M = d^2 is between d = 64 and 128.
M = 8192
SEQLEN, QUICK_SEQLEN = 4096, 512
COUNTED_SEQLEN, COUNTED_HEAD_DIMS = 144, HEAD_DIMS[:4]
# The sequence lengths and the head dimension for the exponent of N.
SEQLENS, OF_N = tuple(1 << n for n in range(9, 17)), 64


def settings(problem: Problem) -> list[Setting]:
    """Return the calls to measure for a problem. Each call has a series and tile sizes.

    Every series has a call with the tiles that fa_numba's planner chooses for the emulated device
    (an H100). FA-1 and FA-2 also have a call with the tiles that line 1 of FlashAttention's
    Algorithm 1 gives for an on-chip memory of M floats. M is a constant of this module.
    """
    with device.using("emulator"):
        limit = device.shared_bytes_limit() // FLOAT
    found = [scaling.for_memory(name, problem, limit) for name in PLANNED]
    return found + [scaling.ruled(name, problem, M, f"M={M}") for name in RULED]


def backward(problem: Problem) -> list[Setting]:
    """Return the backward calls of a problem: one call for each loop order.

    The tile sizes are those that line 1 of FlashAttention's Algorithm 4 gives for an on-chip memory
    of `M` floats. `M` is a constant of this module.
    """
    return [scaling.ruled(name, problem, M, f"M={M}", "bwd") for name in RULED]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield accesses, both computed by closed forms and counted on the emulator.

    On a GPU, also yield L2 and DRAM bytes. Backward calls are computed by closed forms only. The
    experiment `io_vs_sram` counts backward calls.
    """
    head_dims = HEAD_DIMS[: 3 if options.quick else None]
    problems = [one_head(SEQLEN, d) for d in head_dims] + [one_head(N, OF_N) for N in SEQLENS]
    for problem in dict.fromkeys(problems):
        for setting in settings(problem) + backward(problem):
            yield from scaling.model(NAME, setting)

    few = COUNTED_HEAD_DIMS[: 2 if options.quick else None]
    problems = [one_head(COUNTED_SEQLEN // (3 if options.quick else 1), d) for d in few]
    work = [s for problem in problems for s in settings(problem) if scaling.made(s)]
    yield from scaling.counted(NAME, work, bench, Inputs())

    if bench.machine is not None:
        problems = [fa2_setting(QUICK_SEQLEN if options.quick else SEQLEN, d) for d in head_dims]
        work = [s for problem in problems for s in settings(problem) if scaling.made(s)]
        yield from scaling.hardware(NAME, work, bench)


ABOUT = (
    "Line 1's tiles: as line 1 of FlashAttention's Algorithm 1 chooses them for "
    f"M = {M} floats.\n"
    "Planner's tiles: fa_numba's choice. An access is a load or a store of one element."
)


def _over_d(rows: Sequence[Row], source: str) -> list[Row]:
    """Return the rows of one source, such as "model", at a single sequence length.

    The sequence length is the one for which there are rows with the most head dimensions. Rows of
    closed forms (source "model") whose unit is bytes are left out.
    """
    mine = [r for r in rows if r.source == source and not r.failed]
    mine = [r for r in mine if source != "model" or r.unit == "elements"]
    dims: dict[int, set[int]] = {}
    for row in mine:
        dims.setdefault(row.seqlen_q, set()).add(row.head_dim)
    best = max(dims, key=lambda N: (len(dims[N]), N), default=None)
    return [r for r in mine if r.seqlen_q == best]


def draw(rows: Sequence[Row]) -> Any:
    """Draw the accesses over the head dimension. Return None without rows."""
    rows = [row for row in rows if row.pass_ == "fwd"]
    if not rows:
        return None
    figure, (axes,) = style.new(1, 2, 4.8)
    drawn: set[tuple[str, str]] = set()
    gpu = [row for source in ("l2", "dram") for row in _over_d(rows, source)]
    for ax, shown, what in (
        (axes[0], _over_d(rows, "counted"), "counted, one head"),
        (axes[1], gpu, "measured"),
    ):
        if not shown:
            style.empty(ax, "nothing recorded yet")
            continue
        at = ("model", shown[0].unit, shown[0].seqlen_q)
        forms = [r for r in rows if (r.source, r.unit, r.seqlen_q) == at]
        found = scaling.per_score([*forms, *shown], lambda row: row.head_dim)
        scaling_figures.draw(ax, found, tuple(scaling.KINDS))
        drawn |= set(found)
        ax.set_title(f"{what}, fp32, N={shown[0].seqlen_q}")
        head_dims = sorted({d for points in found.values() for d in points})
        style.sizes(ax, head_dims, "head dimension d")
        style.log(ax.yaxis)
        ax.set_ylabel("accesses per element of S")
    (fit, *_) = _fits(rows, "d", RULED[0])
    message = "Accesses per element of S over the head dimension"
    if fit is not None:
        exponent = f"$d^{{{fit.exponent:.2f}}}$"
        message = f"With line 1's tiles, FA-1's accesses are proportional to {exponent}"
    style.legend(figure, scaling_figures.handles(drawn), message, about=ABOUT)
    return figure


def _fits(
    rows: Sequence[Row], over: str, series: str, pass_: str = "fwd"
) -> list[scaling.Fit | None]:
    """Return the fitted power laws of one series, in the order of the sources in scaling.FITTED.

    `over` is "N" or "d", the size with which the accesses grow. An entry is None if there are too
    few points.
    """
    fits = []
    for source in scaling.FITTED:
        of = (series, source, pass_)
        mine = [r for r in rows if (r.series, r.source, r.pass_) == of]
        mine = _over_d(mine, source) if over == "d" else [r for r in mine if r.head_dim == OF_N]
        size = attrgetter("head_dim" if over == "d" else "seqlen_q")
        points = scaling.per_score(mine, size).get((series, source), {})
        if over == "N":
            points = {N: y * N * N for N, y in points.items()}
        fits.append(scaling.fit(points, 0 if over == "d" else SEQLENS[0]))
    return fits


def _table(rows: Sequence[Row]) -> tables.Table | None:
    own = [row for row in rows if row.experiment == NAME]
    # Closed forms are taken from this experiment only: both experiments have the same lengths.
    of_n = [r for r in rows if r.experiment != NAME and r.source in ("l2", "dram")]
    of_n += [r for r in own if (r.source, r.unit) == ("model", "elements")]
    if not own:
        return None
    lines = []
    for over, theorem, mine in (
        ("N", {"standard-simt": "2"}, of_n),
        ("d", {"standard-simt": "0 (N > d)"}, own),
    ):
        shown = [(series, "fwd") for series in (*PLANNED, *RULED)]
        for series, pass_ in shown + [(series, "bwd") for series in RULED]:
            fits = _fits(mine, over, series, pass_)
            if any(fits):
                said = theorem.get(series, "2")
                exponents = (str(found or tables.MISSING) for found in fits)
                name = scaling.label(series, pass_)
                lines.append([over, name, said, *exponents])
    header = ["grows with", "algorithm", "exponent in the theorem", *scaling.FITTED.values()]
    caption = (
        "The table shows how accesses grow: as N^a (one head, d=64) and as d^b. Each exponent is "
        "followed by its standard error, and by the fitted range of N or d in brackets. Line 1 of "
        f"FlashAttention's Algorithm 1 computes tiles for an on-chip memory of M={M} floats. The "
        "tiles that fa_numba's planner chooses have at most 128 columns, even if more columns "
        f"would fit on the chip.{scaling.agreement(own)}"
    )
    return tables.of(caption, header, lines)


table = Across(_table, (NAME, "io_vs_seqlen"))
