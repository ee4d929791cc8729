"""Shows how the tile size changes accesses and runtime (FlashAttention-1 paper, Fig. 2 middle).

A tile has Br rows and Bc columns. Both loop orders run with several values of Br and of Bc, in fp32
and fp16. They run at the paper's sizes, and at head dimensions from 32 to 256 with batch sizes that
keep the number of elements equal. Each point has accesses, L2 and DRAM bytes, and a runtime.
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
# Batch size times head dimension: at every head dimension, there are as many elements as in the
# paper, which has batch size 64 and head dimension 64.
WIDTH = 64 * 64
HEAD_DIMS = (32, 64, 128, 256)
UNITS = {"float32": "simt", "float16": "mma"}
SIZES = (16, 32, 64, 128, 256, 512)
# Block sizes at other head dimensions than the paper's.
FEWER_SIZES = (32, 64, 128, 256)
# Br while Bc varies, and Bc while Br varies.
FIXED = 64

# A sweep: algorithm, the block size that varies, line style, label.
SWEEPS = (
    ("fa1", "Bc", "-", "FA-1 (K/V outer) over $B_c$"),
    ("fa1", "Br", ":", "FA-1 over $B_r$"),
    ("fa2", "Br", "-", "FA-2 (Q outer) over $B_r$"),
    ("fa2", "Bc", ":", "FA-2 over $B_c$"),
)
# The sweeps over the block size on which the accesses depend.
GOVERNING = (SWEEPS[0], SWEEPS[2])
Points = dict[int, float]
# A small problem that is counted too. Some block sizes do not divide the sequence length.
SMALL, SMALL_SIZES, SMALL_FIXED = one_head(96, 16), (16, 32, 48, 64), 32
FA1, FA2 = "fa1-simt", "fa2-simt"
# Seconds for the timed calls of one block size. At least five calls are timed.
SECONDS = 0.1


def setting(head_dim: int, dtype: str = "float32") -> Problem:
    """Return the problem with the paper's sizes and the given head dimension.

    The batch size is WIDTH / head_dim. Q, K and V therefore have equally many elements at every
    head dimension.
    """
    batch = WIDTH // head_dim
    return Problem(batch, HEADS, HEADS, SEQLEN, SEQLEN, head_dim, dtype=dtype)


def sweep(sizes: Sequence[int], fixed: int) -> list[tuple[str, int, int]]:
    """Return calls as (series, Br, Bc), in which one of the two block sizes varies over `sizes`.

    The other block size is `fixed`. There are calls with varying Bc for both loop orders, and calls
    with varying Br for FA-2 only.
    """
    over_bc = [(series, fixed, size) for series in (FA1, FA2) for size in sizes]
    over_br = [(FA2, size, fixed) for size in sizes]
    return list(dict.fromkeys(over_bc + over_br))


def wanted(problem: Problem, quick: bool = False) -> list[Setting]:
    """Return the calls to measure for a problem. Each call has a series, Br and Bc.

    At the paper's head dimension, Br varies in some calls and Bc in other calls, for both loop
    orders. At other head dimensions, only the block size on which the accesses depend varies: Bc
    for FA-1, and Br for FA-2.
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
    """Return the calls that the emulator counts. They have one head.

    Block sizes for which there is no kernel are left out, such as tiles too large for shared
    memory.
    """
    tiles = {SMALL: sweep(SMALL_SIZES[: 2 if quick else None], SMALL_FIXED)}
    if not quick:
        tiles[one_head(SEQLEN, HEAD_DIM)] = sweep(SIZES, FIXED)
    every = [Setting(name, p, Br, Bc) for p, mine in tiles.items() for name, Br, Bc in mine]
    return [each for each in every if scaling.made(each)]


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield accesses, both computed by closed forms and counted on the emulator.

    On a GPU, also yield times, L2 bytes and DRAM bytes.
    """
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
    """Return the name of a row's sweep: the part of the experiment in which one quantity varies.

    The name of the sweep is "tiles, one head" or "tiles, full GPU" (several heads).
    """
    return "tiles, one head" if row.heads_q == 1 else "tiles, full GPU"


# Elements of one of Q, K, V and O, over all heads: equal for all head dimensions.
ELEMENTS = WIDTH * HEADS * SEQLEN


def paper(metric: str) -> Points:
    """Return the numbers that the paper published for an A100 in fp16, as {Bc: number}.

    If `metric` is "runtime", the numbers are in ms. If `metric` is "hbm_accesses", they are
    elements per head, divided by N d. The paper gives accesses in GB.
    """
    divisor = {"runtime": 1.0, "hbm_accesses": 2e-9 * ELEMENTS}[metric]  # GB of 2-byte elements
    lines = published_numbers.lookup(paper="fa1", item="Fig. 2 middle", metric=metric)
    return {int(line["block_c"]): float(line["value"]) / divisor for line in lines}


def points(rows: Iterable[Row], algorithm: str, varied: str) -> Points:
    """Return the values of an algorithm over one block size, as {block size: value}.

    `varied` names the block size that varies, "Br" or "Bc". The other block size is FIXED. Values
    of several rows with the same block sizes, such as loads and stores, are added.
    """
    found: Points = {}
    other = "Br" if varied == "Bc" else "Bc"
    for row in rows:
        mine = row.series.startswith(algorithm) and getattr(row, other) == FIXED
        if mine and not row.failed:
            at = getattr(row, varied)
            found[at] = found.get(at, 0) + row.number
    return dict(sorted(found.items()))


def accesses(rows: Iterable[Row], algorithm: str, varied: str) -> Points:
    """Return loads plus stores per head by closed forms, divided by N d, as {block size: number}.

    `algorithm` is "fa1" or "fa2". `varied` names the block size that varies, "Br" or "Bc". The rows
    in float32 are used. The other dtypes have the same numbers.
    """
    mine = [r for r in at_papers_size(rows) if (r.source, r.unit) == ("model", "elements")]
    single = [r for r in mine if r.dtype == "float32"]
    return {size: n / ELEMENTS for size, n in points(single, algorithm, varied).items()}


def at_papers_size(rows: Iterable[Row]) -> list[Row]:
    """Return the rows at the paper's head dimension and number of heads."""
    return [r for r in rows if r.heads_q == HEADS and r.head_dim == HEAD_DIM]


def draw(rows: Sequence[Row]) -> Any:
    """Draw accesses and times over the block size, next to the paper's numbers.

    Return None if there are no accesses to draw.
    """
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
    """Return the table of accesses and times at the paper's sizes, or None without rows."""
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
        "The table shows accesses and times for several block sizes. The columns *accesses* "
        "contain the number of elements that one head loads and stores, divided by N d. The block "
        "size is B_c (columns of a tile) for K/V outer and B_r (rows of a tile) for Q outer. If "
        f"B_c varies, B_r is {FIXED}. If B_r varies, B_c is {FIXED}. The times are "
        f"{tables.runs(here)}."
    )
    return tables.of(caption, header, lines)
