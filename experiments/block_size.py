"""Shows how the tile size changes accesses and runtime (FlashAttention-1 paper, Fig. 2 middle).

Both loop orders run at the paper's sizes, and at head dimensions from 32 to 256 with an equal
number of elements. The sweeps are over Bc and over Br, in fp32 and fp16. Each point has its
accesses, its L2 and DRAM bytes, and its runtime.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fa_numba import io_model
from fa_numba.problem import Problem

from .lab.measure import counts, scaling, variants
from .lab.measure.scaling import Setting
from .lab.measure.workloads import Inputs, one_head
from .lab.record import PUBLISHED, Bench, Options, Row, published_numbers
from .lab.show import style, tables

NAME = "block_size"
TAKES: tuple[str, ...] = ()

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
SMALL, SMALL_SIZES, SMALL_FIXED = one_head(96, 16), (16, 32, 48, 64), 32
FA1, FA2 = "fa1-simt", "fa2-simt"
# There are many block sizes: about so much time of each, or five calls.
SECONDS = 0.1


def setting(head_dim: int, dtype: str = "float32") -> Problem:
    """Return the paper's problem; for another head dimension a problem with as many elements."""
    batch = WIDTH // head_dim
    return Problem(batch, HEADS, HEADS, SEQLEN, SEQLEN, head_dim, dtype=dtype)


def sweep(sizes: Sequence[int], fixed: int) -> list[tuple[str, int, int]]:
    """Yield calls over block sizes: both loop orders over Bc, Q outer over Br.

    The other size is `fixed`.
    """
    over_bc = [(series, fixed, size) for series in (FA1, FA2) for size in sizes]
    over_br = [(FA2, size, fixed) for size in sizes]
    return list(dict.fromkeys(over_bc + over_br))


def wanted(problem: Problem, quick: bool = False) -> list[Setting]:
    """Return the calls of a problem.

    At the paper's head dimension both loop orders run over both block sizes. At other head
    dimensions each loop order runs over the block size that its accesses depend on.
    """
    if problem.head_dim != HEAD_DIM:
        found = [(FA1, FIXED, n) for n in FEWER_SIZES] + [(FA2, n, FIXED) for n in FEWER_SIZES]
    else:
        sizes = SIZES[1:4] if quick else SIZES
        found = sweep(sizes, FIXED) + [(FA1, n, FIXED) for n in sizes]
    to = UNITS[problem.dtype]
    tiles = dict.fromkeys(found)
    return [Setting(name.replace("simt", to), problem, Br, Bc) for name, Br, Bc in tiles]


def counted(quick: bool) -> list[Setting]:
    """Return the calls that the emulator counts: one head, tiles that fit into shared memory."""
    tiles = {SMALL: sweep(SMALL_SIZES[: 2 if quick else None], SMALL_FIXED)}
    if not quick:
        tiles[one_head(SEQLEN, HEAD_DIM)] = sweep(SIZES, FIXED)
    every = [Setting(name, p, Br, Bc) for p, mine in tiles.items() for name, Br, Bc in mine]
    return [each for each in every if scaling.made(each)]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Measure accesses in closed form and counted; on a GPU time, and L2 and DRAM bytes."""
    head_dims = (HEAD_DIM,) if options.quick else HEAD_DIMS
    problems = [setting(d, dtype) for dtype in UNITS for d in head_dims]
    tiles = {problem: wanted(problem, options.quick) for problem in problems}
    for each in bench.track([x for mine in tiles.values() for x in mine], "closed forms"):
        yield from scaling.model(NAME, each)
    yield from scaling.counted(NAME, counted(options.quick), bench, Inputs())
    if bench.machine is not None:
        calls = [
            (problem, [variants.Variant(each.series, {"tiles": each.tiles}) for each in mine])
            for problem, mine in tiles.items()
        ]
        yield from variants.measure(NAME, calls, bench, {}, seconds=SECONDS)


def sweep_of(row: Row) -> str:
    """Return the sweep of a row: tile sizes on one head, or on enough heads for a GPU."""
    return "tiles, one head" if row.heads_q == 1 else "tiles, full GPU"


# Q, K, V or O of any of the head dimensions: N d of all heads.
ELEMENTS = WIDTH * HEADS * SEQLEN


def paper(metric: str) -> Points:
    """Return the paper's points over Bc, in fp16 on an A100.

    `metric` is "runtime", in ms; or "hbm_accesses", in N d per head as the paper counts.
    """
    unit = {"runtime": 1.0, "hbm_accesses": 2e-9 * ELEMENTS}[metric]  # it says GB
    lines = published_numbers.lookup(paper="fa1", item="Fig. 2 middle", metric=metric)
    return {int(line["block_c"]): float(line["value"]) / unit for line in lines}


def points(rows: Iterable[Row], algorithm: str, varied: str) -> Points:
    """Return the sum of the rows by block size, where the other block size is FIXED."""
    found: Points = {}
    other = "Br" if varied == "Bc" else "Bc"
    for row in rows:
        mine = row.series.startswith(algorithm) and getattr(row, other) == FIXED
        if mine and not row.failed:
            at = getattr(row, varied)
            found[at] = found.get(at, 0) + row.number
    return dict(sorted(found.items()))


def accesses(rows: Iterable[Row], algorithm: str, varied: str) -> Points:
    """Return loads plus stores in closed form by block size, in N d per head.

    The numbers are counted in float32. They are equal in every dtype.
    """
    mine = [r for r in at_papers_size(rows) if (r.source, r.unit) == ("model", "elements")]
    single = [r for r in mine if r.dtype == "float32"]
    return {size: n / ELEMENTS for size, n in points(single, algorithm, varied).items()}


def at_papers_size(rows: Iterable[Row]) -> list[Row]:
    """Return the rows at the paper's head dimension and number of heads."""
    return [r for r in rows if r.heads_q == HEADS and r.head_dim == HEAD_DIM]


def draw(rows: Sequence[Row]) -> Any:
    """Draw accesses and time over the block sizes, with the paper's points; None without rows."""
    if not accesses(rows, *SWEEPS[0][:2]):
        return None
    figure, ((left, right),) = style.new(1, 2, 4.7)
    times = [r for r in at_papers_size(rows) if r.metric == "time"]
    for algorithm, varied, ls, label in SWEEPS:
        look: dict[str, Any] = {"like": f"{algorithm}-simt", "ls": ls, "label": label}
        style.line(left, accesses(rows, algorithm, varied), **look)
        for dtype, filled in (("float32", None), ("float16", "white")):
            mine = [r for r in times if r.dtype == dtype]
            style.line(right, points(mine, algorithm, varied), mfc=filled, **look)
    theirs: dict[str, Any] = {"ls": "--", "marker": "s", "mfc": "white", "zorder": 2, "ms": 8}
    theirs |= {"color": style.COLOURS[PUBLISHED], "label": "FA-1 paper over $B_c$, A100, fp16"}
    panels = (left, "hbm_accesses", "accesses, model"), (right, "runtime", "time")
    for ax, metric, what in panels:
        style.line(ax, paper(metric), **theirs)
        style.sizes(ax, SIZES, "tile size (rows or columns)")
        ax.set_title(f"{what}, N={SEQLEN}, d={HEAD_DIM}")
    style.log(left.yaxis, 2)
    left.set_ylabel("loads + stores per head (N d elements)")
    right.set(ylabel="time (ms)", ylim=(0, None))
    title = "Larger tiles need fewer accesses"
    fa1 = accesses(rows, *SWEEPS[0][:2])
    if len(fa1) > 1:
        few, many = min(fa1), max(fa1)
        fewer = f"{fa1[few] / fa1[many]:.0f} times fewer accesses"
        title = f"FA-1 needs {fewer} with $B_c$={many} than {few}"
    about = f"The tile's other size is {FIXED}. Filled marks: fp32. Hollow marks: fp16."
    if said := counts.said(rows):
        about += f"\nAccesses {said}."
    handles = list(style.handles((left, right)).values())
    style.legend(figure, handles, title, about=about)
    return figure


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of accesses and times at the paper's sizes."""
    moved = [accesses(rows, *swept[:2]) for swept in GOVERNING]
    if not moved[0]:
        return None
    here = [r for r in at_papers_size(rows) if r.metric == "time"]
    times = {(r.dtype, r.series.split("-")[0], r.Br, r.Bc): r for r in here}
    lines = []
    for size in SIZES:
        cells = [
            times.get((dtype, *tile))
            for dtype in UNITS
            for tile in (("fa1", FIXED, size), ("fa2", size, FIXED))
        ]
        lines.append(
            [
                str(size),
                tables.number(paper("hbm_accesses"), size, ".1f"),
                f"{io_model.fa1_paper(setting(HEAD_DIM), size) / ELEMENTS:.1f}",
                *(tables.number(found, size, ".1f") for found in moved),
                tables.number(paper("runtime"), size, ".1f"),
                *(tables.cell(row, lambda v: f"{v:.1f}") for row in cells),
            ]
        )
    header = ["block size", "accesses, published", "accesses, published formula"]
    header += ["accesses, K/V outer, B_c varied", "accesses, Q outer, B_r varied"]
    header += ["published, ms (A100, fp16)"]
    header += [f"{o} outer, ms, {dtype}" for dtype in ("fp32", "fp16") for o in ("K/V", "Q")]
    caption = (
        "The table has accesses and times for several block sizes. The columns *accesses* contain "
        "the number of elements that one head loads and stores, divided by N d. *Block size* is "
        f"B_c for K/V outer and B_r for Q outer. For K/V outer, B_r is always {FIXED}. For Q "
        f"outer, B_c is always {FIXED}. Times are {tables.runs(here)}."
    )
    return tables.of(caption, header, lines)
