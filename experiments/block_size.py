"""Accesses and runtime over the block size: FlashAttention-1 paper, Fig. 2 middle.

At the paper's sizes, and d=32 to 256 with as many elements: over B_c and B_r, both orders, fp32 and
fp16: accesses, L2 and DRAM bytes, runtime.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import fa_numba
from fa_numba import device, io_model
from fa_numba.problem import Problem

from .lab.measure import counts, variants
from .lab.measure.series import call, columns, plan
from .lab.measure.workloads import Inputs, one_head
from .lab.record import EMULATOR, MODEL, PUBLISHED, Bench, Options, Row, published
from .lab.show import style, tables

NAME = "block_size"

HEADS, SEQLEN, HEAD_DIM = 16, 1024, 64
# Batch times head dimension, so that every head dimension has as many elements as the paper's 64
# sequences of 64 dimensions.
WIDTH = 64 * 64
HEAD_DIMS = (32, 64, 128, 256)
UNITS = {"float32": "simt", "float16": "mma"}
SIZES = (16, 32, 64, 128, 256, 512)
# Of other head dimensions than the paper's, and over the block size that governs the accesses.
FEWER_SIZES = (32, 64, 128, 256)
# The block size that stays while the other one varies.
FIXED = 64

# A sweep: algorithm, the block size that varies, line, what it is called.
SWEEPS = (
    ("fa1", "Bc", "-", "FA-1 (K/V outer) over $B_c$"),
    ("fa1", "Br", ":", "FA-1 over $B_r$"),
    ("fa2", "Br", "-", "FA-2 (Q outer) over $B_r$"),
    ("fa2", "Bc", ":", "FA-2 over $B_c$"),
)
# Those over the block size that governs the accesses.
GOVERNING = (SWEEPS[0], SWEEPS[2])
Points = dict[int, float]
# Counted too: a size where the blocks do not divide the length, nor each other.
SMALL_SEQLEN, SMALL_HEAD_DIM, SMALL_SIZES, SMALL_FIXED = 96, 16, (16, 32, 48, 64), 32
FA1, FA2 = "fa1-simt", "fa2-simt"
# There are many block sizes: about so much time of each, or five calls.
SECONDS = 0.1


def setting(seqlen: int, head_dim: int, causal: bool = False, dtype: str = "float32") -> Problem:
    """The paper's problem, or with another head dimension one with as many elements."""
    batch = max(1, WIDTH // head_dim)
    return Problem(batch, HEADS, HEADS, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)


def sweep(sizes: Sequence[int], fixed: int) -> list[tuple[str, int, int]]:
    """Tiles (series, Br, Bc): both orders over Bc, Q outer over Br, the other one `fixed`."""
    over_bc = [(series, fixed, size) for series in (FA1, FA2) for size in sizes]
    over_br = [(FA2, size, fixed) for size in sizes]
    return list(dict.fromkeys(over_bc + over_br))


def wanted_tiles(problem: Problem, quick: bool = False) -> list[tuple[str, int, int]]:
    """(series, Br, Bc) of a problem: at the paper's head dimension both orders over both block
    sizes, at others each order over the one that governs its accesses.
    """
    if problem.head_dim != HEAD_DIM:
        fewer = SIZES[1:3] if quick else FEWER_SIZES
        found = [(FA1, FIXED, n) for n in fewer] + [(FA2, n, FIXED) for n in fewer]
    else:
        sizes = SIZES[1:4] if quick else SIZES
        found = sweep(sizes, FIXED) + [(FA1, n, FIXED) for n in sizes]
    to = UNITS[problem.dtype]
    return [(name.replace("simt", to), Br, Bc) for name, Br, Bc in dict.fromkeys(found)]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    masks = options.causal or (False,)
    head_dims = (HEAD_DIM,) if options.quick else HEAD_DIMS
    makes = [partial(setting, dtype=dtype) for dtype in UNITS]
    problems = [p for make in makes for p in options.grid(make, (SEQLEN,), head_dims)]
    tiles = {problem: wanted_tiles(problem, options.quick) for problem in problems}
    every = [(problem, *each) for problem in problems for each in tiles[problem]]
    for problem, series, Br, Bc in bench.track(every, "closed forms"):
        yield from _model(problem, series, Br, Bc)

    inputs = Inputs()
    counted = _counted(options, bench, masks)
    for problem, series, Br, Bc in counted:
        yield from _model(problem, series, Br, Bc)
    yield from bench.counted(counted, "counting on the emulator", partial(_count, inputs=inputs))

    if bench.machine is None:
        return

    def variant(series: str, Br: int, Bc: int) -> variants.Variant:
        return variants.Variant(series, {"tiles": fa_numba.Tiles(Br=Br, Bc=Bc)})

    work = [(problem, [variant(*each) for each in mine]) for problem, mine in tiles.items()]
    yield from variants.measure(NAME, work, bench, {}, seconds=SECONDS)


def _counted(
    options: Options, bench: Bench, masks: Sequence[bool]
) -> list[tuple[Problem, str, int, int]]:
    """What the emulator counts, as (problem of one head, series, Br, Bc): tiles that fit it."""
    sizes = [(SMALL_SEQLEN, SMALL_HEAD_DIM)]
    if options.complete:
        sizes.append((SEQLEN, HEAD_DIM))
    elif options.seqlens or options.head_dims:
        lengths = options.seqlens or (SMALL_SEQLEN,)
        sizes = [(N, d) for N in lengths for d in options.head_dims or (SMALL_HEAD_DIM,)]
    small = sweep(SMALL_SIZES[:2] if options.quick else SMALL_SIZES, SMALL_FIXED)
    large = sweep(SIZES[1:4] if options.quick else SIZES, FIXED)
    wanted = [one_head(N, d, mask) for N, d in sizes for mask in masks]
    fitting: list[tuple[Problem, str, int, int]] = []
    beyond: dict[str, None] = {}
    for problem in counts.countable(wanted, bench):
        for series, Br, Bc in small if problem.seqlen_q < SEQLEN else large:
            if _fits(problem, series, Br, Bc):
                fitting.append((problem, series, Br, Bc))
            else:
                beyond[f"{Br}x{Bc}, d={problem.head_dim}"] = None
    if beyond:
        bench.say(f"  not counted, beyond a block's shared memory: {'; '.join(beyond)}")
    return fitting


def _fits(problem: Problem, series: str, Br: int, Bc: int) -> bool:
    """Whether the emulated device has the shared memory for these tiles."""
    try:
        with device.using("emulator"):
            plan(series, problem, tiles=fa_numba.Tiles(Br=Br, Bc=Bc))
    except ValueError:
        return False
    return True


def _model(problem: Problem, series: str, Br: int, Bc: int) -> Iterator[Row]:
    form = io_model.fa1 if series.startswith("fa1") else io_model.fa2
    tiles = fa_numba.Tiles(Br=Br, Bc=Bc)
    yield from counts.totals(form(problem, tiles), **columns(NAME, series, problem, MODEL, tiles))


def _count(problem: Problem, series: str, Br: int, Bc: int, inputs: Inputs) -> Iterator[Row]:
    tiles = fa_numba.Tiles(Br=Br, Bc=Bc)
    with fa_numba.count_accesses() as counted:
        call(series, problem, *inputs(problem), tiles=tiles)()
    yield from counts.totals(counted, **columns(NAME, series, problem, EMULATOR, tiles))


def published_rows() -> list[Row]:
    """The paper's points: fp16 on an A100; accesses in bytes, counted as the paper counts."""
    rows = []
    names = {"hbm_accesses": ("traffic", "bytes", 1e9), "runtime": ("time", "ms", 1.0)}
    problem = setting(SEQLEN, HEAD_DIM, dtype="float16")
    for line in published.lookup(paper="fa1", item="Fig. 2 middle"):
        metric, unit, factor = names[line["metric"]]
        own = {"source": PUBLISHED, "note": f"{line['hardware']}, {line['reading']}"}
        common = columns(NAME, PUBLISHED, problem, PUBLISHED, Bc=int(line["block_c"]), **own)
        value = float(line["value"]) * factor
        rows.append(Row(metric=metric, unit=unit, value=value, **common))
    return rows


def points(rows: Iterable[Row], algorithm: str, varied: str, *metrics: str) -> Points:
    """Block size -> the sum of the rows of these metrics, the other block size at FIXED."""
    found: Points = {}
    other = "Br" if varied == "Bc" else "Bc"
    for row in rows:
        if (
            row.series.startswith(algorithm)
            and getattr(row, other) == FIXED
            and row.metric in metrics
            and row.value is not None
        ):
            at = getattr(row, varied)
            found[at] = found.get(at, 0) + row.value
    return dict(sorted(found.items()))


def in_units(found: Mapping[int, float], row: Row) -> Points:
    """Elements, or bytes, of a call in N d a head; `row` says of which problem and unit."""
    whole = row.batch * row.heads_q * row.seqlen_q * row.head_dim
    if row.unit == "bytes":
        whole *= BYTES[row.dtype]
    return {size: value / whole for size, value in found.items()}


# Of an element of Q, K, V and O.
BYTES = {"float32": 4, "float16": 2}
_FILLED = {"float32": None, "float16": "white"}


def draw(rows: Sequence[Row]) -> Any:
    """Accesses of all head dimensions and the time of one, for each length and mask."""
    large = [row for row in rows if row.heads_q == HEADS]
    problems = sorted({(row.seqlen_q, row.causal) for row in large})
    if not problems:
        return None
    figure, axes = style.new(len(problems), 2, 1.2 + 3.5 * len(problems))
    for (N, mask), (left, right) in zip(problems, axes, strict=True):
        mine = [r for r in large if (r.seqlen_q, r.causal) == (N, mask)]
        head_dims = {r.head_dim for r in mine}
        d = HEAD_DIM if HEAD_DIM in head_dims else min(head_dims)
        theirs = [r for r in published_rows() if tables.sizes(r) == (N, d, mask)]
        what = f"N={N}{', causal' if mask else ''}"
        left.set_title(f"accesses (model), {what}")
        right.set_title(f"runtime, {what}, d={d}")
        _accesses(left, mine, theirs)
        _runtime(right, [r for r in mine if r.head_dim == d], theirs)
    title = (
        "Larger blocks make fewer accesses; time follows until something else bounds it\n"
        f"the other block size {FIXED}; full marks fp32, hollow ones fp16"
    )
    checked = counts.said(rows)
    title += f"; accesses\n{checked}" if checked else ""
    style.legend(figure, list(style.handles(axes).values()), title)
    return figure


def _line(ax: Any, found: Points, like: tuple, dtype: str, **more: Any) -> None:
    algorithm, _, ls, name = like
    look = {"ls": ls, "mfc": _FILLED[dtype], "label": name} | more
    style.line(ax, found, f"{algorithm}-simt", **look)


def _accesses(ax: Any, rows: Sequence[Row], paper: Sequence[Row]) -> None:
    """Loads and stores of every head dimension and dtype, which lie on each other."""
    drawn: set[int] = set()
    model = [r for r in rows if r.source == "model" and r.unit == "elements"]
    for like in SWEEPS:
        for dtype, d in sorted({(r.dtype, r.head_dim) for r in model}, reverse=True):
            mine = [r for r in model if (r.dtype, r.head_dim) == (dtype, d)]
            found = points(mine, like[0], like[1], "loads", "stores")
            found = in_units(found, mine[0])
            drawn |= set(found)
            # Those of float16 are marks about those of float32.
            lone = dtype == max(r.dtype for r in model)
            look = {} if lone else {"label": None, "ls": "", "markersize": 10}
            _line(ax, found, like, dtype, **look)
    if not drawn:
        style.empty(ax, "no model")
        return
    theirs = [r for r in paper if r.metric == "traffic"]
    if theirs:
        found = in_units({r.Bc or 0: r.number for r in theirs}, theirs[0])
        drawn |= set(found)
        _published(ax, found)
    head_dims = sorted({r.head_dim for r in model})
    if len(head_dims) > 1:
        ax.set_title(f"{ax.get_title()}, d={', '.join(map(str, head_dims))}")
    style.sizes(ax, sorted(drawn), "block size")
    style.log(ax.yaxis, 2)
    ax.set_ylabel("loads + stores, in N d a head")


def _published(ax: Any, found: Points) -> None:
    look = {"color": style.COLOURS[PUBLISHED], "ls": "--", "marker": "s", "mfc": "white"}
    name = "FA-1 paper over $B_c$, A100, fp16"
    style.line(ax, found, zorder=2, markersize=8, label=name, **look)


def _runtime(ax: Any, rows: Sequence[Row], paper: Sequence[Row]) -> None:
    drawn: set[int] = set()
    for like in SWEEPS:
        for dtype in BYTES:
            mine = [r for r in rows if r.dtype == dtype]
            if found := points(mine, like[0], like[1], "time"):
                drawn |= set(found)
                _line(ax, found, like, dtype)
    theirs = {r.Bc or 0: r.number for r in paper if r.metric == "time"}
    if not drawn:
        ax.set_title(f"{ax.get_title()}: ours not recorded yet")
    if not drawn and not theirs:
        style.empty(ax, "not recorded yet")
        return
    _published(ax, theirs)
    style.sizes(ax, sorted(drawn | set(theirs)), "block size")
    ax.set(ylabel="ms", ylim=(0, None))


def table(rows: Sequence[Row]) -> tables.Table | None:
    paper = {(r.Bc, r.metric): r.value for r in published_rows()}
    here = [r for r in rows if r.heads_q == HEADS and tables.sizes(r) == (SEQLEN, HEAD_DIM, False)]
    single = [r for r in here if r.dtype == "float32"]
    model = [r for r in single if r.source == "model" and r.unit == "elements"]
    if not model:
        return None
    problem = setting(SEQLEN, HEAD_DIM)
    moved = [in_units(points(model, *sw[:2], "loads", "stores"), model[0]) for sw in GOVERNING]
    times = {(r.dtype, r.series.split("-")[0], r.Br, r.Bc): r for r in here if r.metric == "time"}
    in_nd = problem.batch * HEADS * SEQLEN * HEAD_DIM
    lines = []
    for size in SIZES:
        gb, ms = paper.get((size, "traffic")), paper.get((size, "time"))
        cells = [
            times.get((dtype, *tile))
            for dtype in ("float32", "float16")
            for tile in (("fa1", FIXED, size), ("fa2", size, FIXED))
        ]
        lines.append(
            [
                str(size),
                tables.MISSING if gb is None else f"{gb / 2 / in_nd:.1f}",
                f"{io_model.fa1_paper(problem, size) / in_nd:.1f}",
                *(tables.number(found, size, ".1f") for found in moved),
                tables.MISSING if ms is None else f"{ms:.1f}",
                *(tables.cell(row, lambda v: f"{v:.1f}") for row in cells),
            ]
        )
    header = ["block size", "paper's count", "its formula", "K/V outer over B_c"]
    header += ["Q outer over B_r", "paper, ms (A100, fp16)"]
    header += [f"{o} outer, ms, {dtype}" for dtype in ("fp32", "fp16") for o in ("K/V", "Q")]
    caption = (
        f"Accesses in N d elements a head, whatever the element's size; the other block size is "
        f"{FIXED}; {tables.runs(r for r in here if r.metric == 'time')}."
    )
    return tables.of(caption, header, lines)
