"""Shows tile by tile what both loop orders move between global memory and the chip.

The kernels compute one head forward in fp32, and are traced on the emulator. In the figure, time
goes down. The figure shows which tile of Q, K, V, O, l and m is on the chip, and where O is loaded
and stored again. Length, head dimension and --tiles can be chosen.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fa_numba
from fa_numba import device, emulator, io_model
from fa_numba.problem import Problem

from .lab.measure.moves import IN_REGISTERS, Move, Trace, notes, size, traces
from .lab.measure.series import LABELS, call, columns, plan
from .lab.measure.workloads import Inputs, one_head
from .lab.record import EMULATOR, MODEL, Bench, Options, Refused, Row
from .lab.show import film, style, tables
from .lab.show.film import AGAIN, INPUT, WRITTEN

NAME = "timeline"
TAKES = ("seqlens", "head_dims", "causal", "tiles")

SERIES = ("fa1-simt", "fa2-simt")
SEQLEN, HEAD_DIM, TILES = 256, 64, (64, 64)
# If there are more tiles of S, they are too small to see.
MOST_TILES = 1024


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the loads and stores of each call by the closed form, and then the moves of its tiles.

    A move is one load or store of some rows of an array by a thread block. The emulator runs the
    call and traces its moves.
    """
    problems = options.grid(one_head, (SEQLEN,), (HEAD_DIM,))
    sizes = itertools.product(problems, options.tiles or (TILES,), SERIES)
    work = [(series, problem, fa_numba.Tiles(*size)) for problem, size, series in sizes]
    for series, problem, tiles in work:
        yield _model(_closed(series, problem, tiles), columns(NAME, series, problem, MODEL, tiles))
    yield from bench.counted(work, "tracing on the emulator", partial(_traced, inputs=Inputs()))


def _closed(series: str, problem: Problem, tiles: fa_numba.Tiles) -> io_model.Accesses:
    """Return the accesses of a call by the closed form.

    Raise Refused if there is no kernel for the tiles, or if there are too many tiles to draw.
    """
    rows, columns = (-(-problem.seqlen_q // block) for block in (tiles.Br, tiles.Bc))
    if rows * columns > MOST_TILES:
        raise Refused(
            f"the figure shows at most {MOST_TILES} tiles of S, got {rows} x {columns} (tiles "
            f"{tiles.Br}x{tiles.Bc} at N={problem.seqlen_q}). Choose larger --tiles or a smaller N"
        )
    try:
        with device.using("emulator"):
            return plan(series, problem, tiles=tiles).accesses
    except ValueError as error:
        raise Refused(str(error)) from None


def _model(closed: io_model.Accesses, common: dict[str, Any]) -> list[Row]:
    found: list[Row] = []
    for metric, arrays in (("loads", closed.loads), ("stores", closed.stores)):
        model = {"metric": metric, "unit": "elements", **common}
        found += [Row(value=n, note=name, **model) for name, n in arrays.items()]
    return found


def _traced(
    series: str, problem: Problem, tiles: fa_numba.Tiles, inputs: Inputs
) -> Iterator[list[Row]]:
    with device.using("emulator"), emulator.trace() as accesses:
        call(series, problem, *inputs(problem), tiles=tiles)()
    common = columns(NAME, series, problem, EMULATOR, tiles)
    common |= {"metric": "traffic", "unit": "bytes"}
    yield [Row(value=moved, note=note, **common) for note, moved in notes(accesses)]


# Groups of arrays. A group has one lane of the figure per tile, and the arrays of a group share the
# lanes.
GROUPS = (("Q",), ("K",), ("V",), ("O",), ("l", "m", "L"))
BLOCKS = {
    "fa1": "One thread block computes the head, one column tile j after another.",
    "fa2": "One thread block computes one row tile i.\n"
    "On a GPU, many blocks run at the same time. The last tile\n"
    "starts first: with a causal mask it has the most work.",
}
READING = (
    "One head, forward pass, float32, CUDA cores. Time runs down: a box is as high as its bytes.\n"
    "Lines are those of Algorithm 1 in each paper. Numbers 0, 1, ... are tiles."
)
# Colours of tiles on the chip, and of empty lanes. Moves have stronger colours.
SHARED, REGISTERS, LANE = "#C3CCD5", "#F8E0BC", "#F4F4F4"
LEGEND = {
    INPUT: "load of Q, K or V",
    AGAIN: "load of O, l and m again",
    WRITTEN: "store of O, l, m or L",
    SHARED: "held in shared memory",
    REGISTERS: "held in registers",
}
GAP, MARGIN = 0.3, 0.08  # distance between groups, and margin of the panel, in widths of a group
WIDE = 0.86  # width of a tile, as a share of its lane
FEW = 8  # up to this number of tiles, each tile is numbered
MANY = 2000  # if there are more rectangles, they are drawn as pixels, in an SVG too
KB = 1e3


def colour(move: Move) -> str:
    """Return the colour of a move in the figure.

    There are three colours: for stores, for loads of what was stored before, and for loads of
    inputs.
    """
    return WRITTEN if move.kind == "store" else AGAIN if move.array in IN_REGISTERS else INPUT


def _pairs(rows: Sequence[Row]) -> list[dict[str, Trace]]:
    problems: dict[tuple, dict[str, Trace]] = {}
    for trace in traces(rows):
        problems.setdefault(trace.problem, {})[trace.series] = trace
    return list(problems.values())


def draw(rows: Sequence[Row]) -> Any:
    """Draw when the tiles of both loop orders are on the chip. Return None without rows."""
    pairs = _pairs(rows)
    if not pairs:
        return None
    figure, axes = style.new(len(pairs), 2, 0.9 + 7.2 * len(pairs))
    for pair, panels in zip(pairs, axes, strict=True):
        longest = max(trace.bytes for trace in pair.values()) / KB
        for series, ax in zip(SERIES, panels, strict=True):
            if series in pair:
                _panel(ax, pair[series], longest, style.COLOURS[series])
            else:
                style.empty(ax, f"{LABELS[series]}: not traced")
    handles = [style.patch(label, color=shade) for shade, label in LEGEND.items()]
    style.legend(figure, handles, film.title([*pairs[0].values()]), len(LEGEND), READING)
    return figure


def _panel(ax: Any, trace: Trace, longest: float, title_colour: str) -> None:
    """Draw when the tiles of one loop order are on the chip, in one vertical strip for each tile.

    Time is the number of bytes moved so far. The vertical axis covers `longest` kB, so that the
    panels of both loop orders have the same scale.
    """
    ax.grid(False)
    ax.spines[["bottom", "left"]].set_visible(False)
    ax.set(xticks=[], yticks=[])
    end, line = trace.bytes / KB, longest / 32  # the height of a line of text
    boxes: list[tuple[Any, str]] = []

    def box(array: str, tile: int, start: float, stop: float, shade: str) -> None:
        n, at = trace.tiles(array), next(x for x, names in enumerate(GROUPS) if array in names)
        left, right = (at * (1 + GAP) + (tile + 0.5 + side * WIDE / 2) / n for side in (-1, 1))
        corners = [(left, start), (right, start), (right, stop), (left, stop)]
        boxes.append((corners, shade))

    for at, arrays in enumerate(GROUPS):
        moves = [move for move in trace.moves if move.array in arrays]
        moved = list(dict.fromkeys(move.array for move in moves))
        x, n = at * (1 + GAP), trace.tiles(arrays[0])
        for t in range(n):
            box(arrays[0], t, 0, end, LANE)
        middle = x + 0.5
        name = "l, m, L" if moved == ["L"] else ", ".join(moved or arrays)
        ax.text(middle, -2.2 * line, name, ha="center", size=13, weight="bold")
        ax.text(middle, -1.3 * line, trace.lines(moves), ha="center", size=8.5, color=style.QUIET)
        for t in range(n) if n <= FEW else (0, n - 1):
            ax.text(
                x + (t + 0.5) / n, -0.4 * line, str(t), ha="center", size=8.5, color=style.QUIET
            )
        for row, kind in enumerate(("load", "store")):
            ours = [move for move in moves if move.kind == kind]
            if ours:
                text = size(sum(move.bytes for move in ours))
                look: dict[str, Any] = {"ha": "center", "color": colour(ours[0]), "weight": "bold"}
                ax.text(middle, end + (1.2 + 0.85 * row) * line, text, size=9.5, **look)
    _add(ax, boxes, 1)
    boxes.clear()
    for held in trace.held:
        shade = REGISTERS if held.array in IN_REGISTERS else SHARED
        box(held.array, held.tile, held.start / KB, held.stop / KB, shade)
    thin = longest / 250  # smallest height of a drawn move
    for move in trace.moves:
        start = min(move.start / KB, move.stop / KB - thin)
        box(move.array, trace.tile(move), start, move.stop / KB, colour(move))
    _add(ax, boxes, 3)
    width = len(GROUPS) * (1 + GAP) - GAP
    _outer_loop(ax, trace, width)
    fate = ax.text(0, end + 2.8 * line, _fate_of_o(trace), size=9.5, color=style.QUIET, va="top")
    fate.set_in_layout(False)
    ax.text(-1.5 * MARGIN, -0.4 * line, "time ↓", ha="right", size=8.5, color=style.QUIET)
    ax.set(xlim=(-MARGIN, width + MARGIN), ylim=(longest + 5.6 * line, -3 * line))
    masked = ", causal" if trace.causal else ""
    setting = f"N={trace.seqlen}, d={trace.head_dim}, $B_r$={trace.Br}, $B_c$={trace.Bc}{masked}"
    title = f"{LABELS[trace.series]}: {size(trace.bytes)}"
    ax.set_title(title, color=title_colour, weight="bold", size=13, pad=24)
    ax.text(0.5, 1.02, setting, ha="center", size=9, color=style.QUIET, transform=ax.transAxes)


def _add(ax: Any, boxes: Sequence[tuple[Any, str]], order: int) -> None:
    from matplotlib.collections import PolyCollection

    corners, shades = zip(*boxes, strict=True)
    drawn = PolyCollection(corners, facecolors=shades, linewidths=0, zorder=order)
    drawn.set_rasterized(len(boxes) > MANY)
    ax.add_collection(drawn)


def _outer_loop(ax: Any, trace: Trace, width: float) -> None:
    array, index = ("K", "j") if trace.algorithm == "fa1" else ("Q", "i")
    turns = [(m.start / KB, trace.tile(m)) for m in trace.select((array,), "load")]
    ends = [*(start for start, _ in turns[1:]), trace.bytes / KB]
    for n, ((start, tile), end) in enumerate(zip(turns, ends, strict=False)):
        if n:
            ax.plot([-MARGIN, width + MARGIN], [start] * 2, color=style.QUIET, lw=0.6, zorder=2)
        if n % -(-len(turns) // FEW) == 0:
            ax.text(
                -1.5 * MARGIN, (start + end) / 2, f"${index}$ = {tile}", ha="right", va="center"
            )


def _fate_of_o(trace: Trace) -> str:
    read, written = (trace.select(("O",), kind) for kind in ("load", "store"))
    times = Counter(move.first for move in written).values()
    each = " to ".join(
        dict.fromkeys(str(n) for n in (min(times, default=0), max(times, default=0)))
    )
    fate = f"stored {'once' if each == '1' else f'{each} times'}"
    if read:
        fate += f".\nAll tiles of O together are loaded {len(read)} times"
    else:
        fate += " and never loaded"
    return f"Each tile of O is {fate}.\n{BLOCKS[trace.algorithm]}"


def animate(rows: Sequence[Row], note: str) -> bytes | None:
    """Return the film of both loop orders as the bytes of a GIF file; None without rows.

    `note` is a text that says where the traces are from.
    """
    pairs = _pairs(rows)
    if not pairs:
        return None
    return film.gif([[*pair.values()] for pair in pairs], note)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of the bytes that each loop order moves, by array."""
    closed: dict[tuple, int] = {}
    for row in rows:
        if row.source == "model" and not row.failed:
            key = row.head_dim, row.seqlen_q, row.causal, row.Br, row.Bc, row.series, row.note
            moved = int(row.number) * io_model.ELEMENT_BYTES
            closed[key] = closed.get(key, 0) + moved
    lines = []
    for trace in traces(rows):
        for array in (array for arrays in GROUPS for array in arrays):
            loads, stores = (trace.select((array,), kind) for kind in ("load", "store"))
            if not loads and not stores:
                continue
            moved = sum(move.bytes for move in (*loads, *stores))
            form = tables.number(closed, (*trace.problem, trace.series, array), "")
            cells = [array, str(len(loads)), str(len(stores)), str(moved), form]
            masked = ", causal" if trace.causal else ""
            sizes = [str(trace.seqlen), str(trace.head_dim), f"{trace.Br} x {trace.Bc}{masked}"]
            lines.append([LABELS[trace.series], *sizes, *cells])
    header = ["algorithm", "N", "d", "tiles", "array", "tiles loaded", "tiles stored"]
    header += ["bytes, traced", "bytes, closed form"]
    caption = (
        "The table counts the moves of tiles between global memory and the chip, in a forward "
        "call of one head in fp32. The columns *bytes* contain the sum over all moves of an "
        "array, by the emulator's trace and by the closed form."
    )
    return tables.of(caption, header, lines)
