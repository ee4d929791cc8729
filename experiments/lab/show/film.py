"""A picture and a film that show both loop orders at the same moment, tile by tile."""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..measure.moves import IN_REGISTERS, Trace, events, size, steps
from ..measure.series import LABELS
from . import style

MOMENT = 0.9  # the picture's moment: fraction of the bytes of the order that moves fewer bytes
INPUT, AGAIN, WRITTEN = "#4A5A6A", "#E69F00", "#D55E00"
SHARED, REGISTERS, LANE, SEEN, NOW = "#AAB8C5", "#F3D39C", "#EDEDED", "#CFE3D9", "#009E73"
LEGEND = {
    INPUT: "load of Q, K or V",
    AGAIN: "load of O, l and m again",
    WRITTEN: "store of O, l, m or L",
    SHARED: "held in shared memory",
    REGISTERS: "held in registers",
    SEEN: "tile of S: computed",
    NOW: "tile of S: being computed",
}
# Left edge and width of the arrays to the left and right of S. S takes x from 0 to 1.
BESIDE = {
    "Q": (-0.27, 0.2),
    "O": (1.07, 0.2),
    "l": (1.32, 0.06),
    "m": (1.42, 0.06),
    "L": (1.32, 0.06),
}
ABOVE = {"K": 1.24, "V": 1.07}
# Of a film: milliseconds of a frame, milliseconds of the last frame, greatest number of frames.
FRAME, END, MOST_FRAMES = 200, 4000, 240


class Side:
    """The panel of one loop order in the film, with a box for each tile of each array.

    The colour of a box says what happens to the tile at a moment, such as that it is on the chip.
    """

    def __init__(self, ax: Any, trace: Trace) -> None:
        self.ax, self.trace, self.steps = ax, trace, steps(trace)
        self.boxes: dict[str, Any] = {}
        Tr, Tc = trace.row_tiles, trace.column_tiles
        for i in range(Tr):
            y = 1 - (i + 1) / Tr
            for name, (x, width) in BESIDE.items():
                if name in (("Q", "O", "l", "m") if trace.algorithm == "fa1" else ("Q", "O", "L")):
                    self._box(f"{name}{i}", x, y, width, 1 / Tr)
                    if i == 0:
                        ax.text(x + width / 2, 1.02, name, ha="center", weight="bold")
            for j in range(Tc):
                self._box(f"S{i},{j}", j / Tc, y, 1 / Tc, 1 / Tr)
        ax.text(0.5, 1.02, "S", ha="center", weight="bold")
        for name, y in ABOVE.items():
            ax.text(-0.05, y + 0.03, name, ha="center", weight="bold")
            for j in range(Tc):
                self._box(f"{name}{j}", j / Tc, y, 1 / Tc, 0.12)
        ax.set(xlim=(-0.3, 1.52), ylim=(-0.02, 1.4))
        ax.set_axis_off()

    def _box(self, key: str, x: float, y: float, width: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        self.boxes[key] = Rectangle((x, y), width, height, edgecolor="white")
        self.ax.add_patch(self.boxes[key])

    def at(self, clock: float) -> int:
        """Colour the boxes for a moment, and return the number of the step at this moment.

        Parameters
        ----------
        clock : float
            The moment: bytes moved so far.

        Returns
        -------
        int
            Number of the step, from 0. After the last step it is the number of steps.
        """
        ends, said = self.steps["bytes"], [step.split("|") for step in self.steps["steps"]]
        at = next((n for n, end in enumerate(ends) if end > clock), len(ends))
        shades = {f"S{visit}": SEEN for _, _, visit, *_ in said[:at] if visit}
        if at < len(said):
            moves, held, visit, *_ = said[at]
            shades |= {key: REGISTERS if key[0] in IN_REGISTERS else SHARED for key in held.split()}
            for move in moves.split():
                again = AGAIN if move[1] in IN_REGISTERS else INPUT
                shades[move[1:]] = WRITTEN if move[0] == ">" else again
            shades |= {f"S{visit}": NOW} if visit else {}
        for key, box in self.boxes.items():
            box.set_facecolor(shades.get(key, LANE))
        self.ax.set_title(
            f"{LABELS[self.trace.series]}: {size(ends[at - 1] if at else 0)} of "
            f"{size(self.trace.bytes)}",
            color=style.COLOURS[self.trace.series],
            weight="bold",
        )
        return at

    def said(self, at: int) -> str:
        """Return text about step `at`: the paper's line, its moves, and the moves of O so far."""
        found = events(self.trace)
        moved = [move for event in found[: at + 1] for move in event if move.array == "O"]
        times = [sum(move.kind == kind for move in moved) for kind in ("load", "store")]
        if at == len(found):
            what = "Done."
        else:
            moves = found[at]
            tiles = ", ".join(f"{move.array}{self.trace.tile(move)}" for move in moves)
            what = f"Algorithm 1, {self.trace.lines(moves)}: {moves[0].kind} {tiles}"
        return f"{what}\nTiles of O so far: {times[0]} loads, {times[1]} stores"


def title(traces: Sequence[Trace]) -> str:
    """Return the figure's title, which compares how often the two orders move tiles of O."""
    moved = {trace.algorithm: len([m for m in trace.moves if m.array == "O"]) for trace in traces}
    if moved.keys() != {"fa1", "fa2"}:
        return "Tiles that move between global memory and the chip"
    times = moved["fa1"] / moved["fa2"]
    return f"FA-1 moves tiles of O {times:.3g} times as often as FA-2"


def _sides(traces: Sequence[Trace]) -> tuple[Any, list[Side]]:
    figure, (axes,) = style.new(1, len(traces), 5.9)
    handles = [style.patch(label, color=shade) for shade, label in LEGEND.items()]
    style.legend(figure, handles, title(traces), ncols=4)
    return figure, [Side(ax, trace) for trace, ax in zip(traces, axes, strict=True)]


def draw(traces: Sequence[Trace]) -> Any:
    """Draw both loop orders at one moment, after both have moved the same number of bytes.

    The number is MOMENT times the bytes of the loop order that moves fewer bytes in total.

    Parameters
    ----------
    traces : sequence of Trace
        The traces from left to right.

    Returns
    -------
    Figure
        The picture.
    """
    figure, sides = _sides(traces)
    for side in sides:
        side.at(MOMENT * min(trace.bytes for trace in traces))
    return figure


def clocks(traces: Sequence[Trace]) -> list[int]:
    """Return the moments of the film's frames, in bytes moved so far. The last moment is the end.

    Each event of either order has a frame. Two events that are close together share a frame. If
    there are too many events, only every n-th event has a frame.
    """
    found = [event for trace in traces for event in events(trace)]
    starts = np.unique([event[0].start for event in found])
    apart = min(event[-1].stop - event[0].start for event in found) / 2
    starts = starts[np.append(np.diff(starts) >= apart, True)]
    return [*starts[:: -(-len(starts) // MOST_FRAMES)], max(trace.bytes for trace in traces)]


def frames(traces: Sequence[Trace], note: str) -> Iterator[Any]:
    """Yield the film's frames, one for each moment that `clocks` returns.

    Parameters
    ----------
    traces : sequence of Trace
        The traces from left to right.
    note : str
        Text about the origin of the traces. It is written below the picture.

    Yields
    ------
    Image
        A frame, as an image of PIL.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # matplotlib brings it

    figure, sides = _sides(traces)
    figure.text(0.008, 0.01, note, fontsize=8.5, color="#555555")
    texts = [side.ax.text(0, -0.05, "\n", va="top") for side in sides]
    for side in sides:  # the layout needs the titles of the panels
        side.at(0)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # computes the layout
    figure.set_layout_engine("none")
    changing = [*texts, *(x for side in sides for x in (side.ax.title, *side.boxes.values()))]
    for artist in changing:
        artist.set_animated(True)
    canvas.draw()
    rest = canvas.copy_from_bbox(figure.bbox)
    for clock in clocks(traces):
        for side, text in zip(sides, texts, strict=True):
            text.set_text(side.said(side.at(clock)))
        canvas.restore_region(rest)
        for artist in changing:
            figure.draw_artist(artist)
        yield Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def gif(problems: Sequence[Sequence[Trace]], note: str) -> bytes:
    """Return the film of several problems, one after the other, as a GIF file.

    Parameters
    ----------
    problems : sequence of sequence of Trace
        For each problem the traces from left to right.
    note : str
        Text about the origin of the traces. It is written below the pictures.

    Returns
    -------
    bytes
        Content of the GIF file.
    """
    films = [list(frames(traces, note)) for traces in problems]
    pictures = [picture for film in films for picture in film]
    lasting = [time for film in films for time in [FRAME] * (len(film) - 1) + [END]]
    palette = _palette([film[-1] for film in films])
    first, *rest = (_with_palette(picture, palette) for picture in pictures)
    data = io.BytesIO()
    first.save(data, "GIF", save_all=True, append_images=rest, duration=lasting, loop=0)
    return data.getvalue()


def _palette(pictures: Sequence[Any]) -> Any:
    """Return an image whose palette contains the 255 most frequent colours of the pictures.

    The remaining colour of the 256 marks pixels that do not change between frames. This makes the
    file a third as large.
    """
    from PIL import Image

    found: Counter[tuple[int, ...]] = Counter()
    for picture in pictures:
        counts = picture.getcolors(picture.width * picture.height)
        found.update({colour: count for count, colour in counts})
    colours = sorted(found, key=lambda colour: (-found[colour], colour))[:255]
    palette = Image.new("P", (1, 1))
    palette.putpalette([level for colour in colours for level in colour])
    return palette


def _with_palette(picture: Any, palette: Any) -> Any:
    """Return a picture in the colours of a palette.

    A colour that the palette contains stays as it is. Other colours become a similar colour.
    """
    near = picture.quantize(palette=palette, dither=0)
    weights = np.array([1 << 16, 1 << 8, 1])
    known = np.reshape(palette.getpalette(), (-1, 3)) @ weights
    pixels = np.asarray(picture) @ weights
    order = np.argsort(known, kind="stable")
    at = order[np.searchsorted(known, pixels, sorter=order).clip(max=len(known) - 1)]
    exact = np.where(known[at] == pixels, at, np.asarray(near)).astype(np.uint8)
    near.frombytes(exact.tobytes())
    return near
