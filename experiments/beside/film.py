"""Traces as an animated GIF: the matrices of attention, and which of their tiles are where."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont  # matplotlib brings it

from experiments import timeline

from ..lab.measure.moves import IN_REGISTERS, ROW_TILES, Event, Move, Trace, events, size
from ..lab.measure.series import LABELS
from ..lab.show.style import COLOURS

WIDTH, HEIGHT = 1120, 704
SQUARE, THICK, THIN, SPACE = 248, 66, 14, 12  # S, a matrix N x d, one value a row, between them
MOST_FRAMES = 240
# Milliseconds: a frame, the first and the last, and all of them where there are many.
FRAME, START, END, LONGEST = 200, 800, 4000, 30000
STEPS = 4  # of letters' edges
BAR = 420  # a full bar of bytes
LOOPS = {
    "fa1": "for each column tile j: for each row tile i",
    "fa2": "for each row tile i: for each column tile j",
}
BLACK, QUIET, EMPTY, WHITE = "#111111", "#555555", "#EDEDED", "#FFFFFF"
Corners = tuple[int, int, int, int]


def ticks(traces: Sequence[Trace], most: int = MOST_FRAMES) -> list[int]:
    """The clocks at which a frame starts: at every event of either order; those closer than half of
    the smallest share one, and so do more where there would be more than `most`.
    """
    found = [event for trace in traces for event in events(trace)]
    starts = sorted({event.start for event in found})
    apart = min((event.stop - event.start for event in found), default=0) / 2
    while True:
        first = 0
        kept: list[int] = []
        for start in starts:
            if kept and start - first < apart:
                kept[-1] = start
            else:
                first = start
                kept.append(start)
        if len(kept) <= most:
            return kept
        apart = max(1.0, 2 * apart)


def gif(problems: Sequence[Sequence[Trace]], note: str) -> bytes:
    """The problems one after the other, each with its traces from left to right, as a GIF file."""
    inks = _Inks()
    frames: list[Image.Image] = []
    lasting: list[int] = []
    for pair in problems:
        clocks, end = ticks(pair), max(trace.bytes for trace in pair)
        sides = [_Side(trace, n * WIDTH // 2, end) for n, trace in enumerate(pair)]
        background = _background(inks, pair[0], note)
        for side in sides:
            side.rest(background)
        frames.append(background.im)
        lasting.append(START)
        total, before = min(FRAME * len(clocks), LONGEST), -1
        for clock, following in zip([*clocks, end], [*clocks[1:], end, end], strict=True):
            frame = background.copy()
            for side in sides:
                side.at(frame, before, clock)
            frames.append(frame.im)
            lasting.append(max(20, round(total * (following - clock) / (10 * end)) * 10))
            before = clock
        lasting[-1] = END
    for picture in frames:
        picture.putpalette(b"".join(bytes(_rgb(shade)) for shade in inks))
    data = io.BytesIO()
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:], duration=lasting, loop=0)
    return data.getvalue()


class _Inks(dict[str, int]):
    """The colours of a GIF, 256 at most, each by its number from its first use on."""

    def __call__(self, shade: str) -> int:
        return self.setdefault(shade.lower(), len(self))


class _Sheet:
    """A picture to draw on, in numbered colours: a frame of a GIF as it is stored."""

    def __init__(self, inks: _Inks, im: Image.Image) -> None:
        self.inks, self.im, self._draw = inks, im, ImageDraw.Draw(im)

    def copy(self) -> _Sheet:
        return _Sheet(self.inks, self.im.copy())

    def box(self, corners: Corners, shade: str) -> None:
        self._draw.rectangle(corners, self.inks(shade))

    def text(
        self, at: tuple[float, float], text: str, points: int, shade: str, *, ground: str = WHITE,
        anchor: str = "ls", bold: bool = False,
    ) -> None:  # fmt: skip
        """Text on a `ground` of one colour; `at` is where its baseline starts, or its `anchor`."""
        left, top, masks = _letters(text, points, anchor, bold)
        place = round(at[0]) + left, round(at[1]) + top
        for step, mask in enumerate(masks, 1):
            self.im.paste(self.inks(_mix(ground, shade, step / STEPS)), place, mask)


@cache
def _letters(
    text: str, points: int, anchor: str, bold: bool
) -> tuple[int, int, tuple[Image.Image, ...]]:
    """A text's offset right and down of its anchor, and its pixels by how many STEPS cover them."""
    font = _font(points, bold)
    left, top, right, bottom = font.getbbox(text, anchor=anchor)
    shape = max(1, math.ceil(right - left)), max(1, math.ceil(bottom - top))
    covered = Image.new("L", shape)
    ImageDraw.Draw(covered).text((-left, -top), text, 255, font, anchor=anchor)
    parts = np.rint(np.asarray(covered) / 255 * STEPS)
    masks = [Image.fromarray(parts == step) for step in range(1, STEPS + 1)]
    return math.floor(left), math.floor(top), tuple(masks)


def _background(inks: _Inks, trace: Trace, note: str) -> _Sheet:
    sheet = _Sheet(inks, Image.new("P", (WIDTH, HEIGHT), inks(WHITE)))
    masked = ", causal" if trace.causal else ""
    sizes = f"N={trace.seqlen}, d={trace.head_dim}, Br={trace.Br}, Bc={trace.Bc}{masked}"
    sheet.text((WIDTH / 2, 24), f"One head, forward, fp32: {sizes}", 15, QUIET, anchor="ms")
    x = 60
    for shade, name in timeline.LEGEND.items():
        sheet.box((x, HEIGHT - 56, x + 19, HEIGHT - 43), shade)
        sheet.text((x + 27, HEIGHT - 44), name, 15, BLACK)
        x += 52 + round(_font(15, False).getlength(name))
    sheet.text((x, HEIGHT - 44), "2×", 15, BLACK, bold=True)
    sheet.text((x + 27, HEIGHT - 44), "stored so often", 15, BLACK)
    sheet.text((8, HEIGHT - 10), note, 12, QUIET)
    return sheet


class _Side:
    """One order's half of the picture: S in the middle, the row tiles of Q left and of O, l and m
    right of it, the column tiles of K above and of V below. `longest` is the bytes of a full bar.
    """

    def __init__(self, trace: Trace, left: int, longest: int) -> None:
        self.trace, self.longest = trace, longest
        self.events = events(trace)
        self.colour = COLOURS[trace.series]
        self.left = left + 60
        self.x, self.y = self.left + THICK + SPACE, 202
        right = self.x + SQUARE + SPACE
        narrow = right + THICK + SPACE
        # Where an array starts across S, and how thick it is.
        self.across = {
            "Q": (self.left, THICK),
            "O": (right, THICK),
            "l": (narrow, THIN),
            "m": (narrow + THIN + 6, THIN),
            "L": (narrow + 2 * (THIN + 6), THIN),
            "K": (self.y - SPACE - THICK, THICK),
            "V": (self.y + SQUARE + SPACE, THICK),
        }
        # Of l, m and L those that global memory has.
        moved = {move.array for move in trace.moves}
        self.arrays = [array for array in self.across if array not in "lmL" or array in moved]

    def _along(self, tile: int, block: int) -> tuple[int, int]:
        """The first and last pixel of a tile along S, which leave a gap to the next one."""
        N = self.trace.seqlen
        first, end = (round(SQUARE * min(n * block, N) / N) for n in (tile, tile + 1))
        gap = 3 if end - first > 24 else 1
        return first, max(first, end - 1 - gap)

    def _tile(self, array: str, tile: int) -> Corners:
        at, thick = self.across[array]
        if array in ROW_TILES:
            first, last = self._along(tile, self.trace.Br)
            return at, self.y + first, at + thick - 1, self.y + last
        first, last = self._along(tile, self.trace.Bc)
        return self.x + first, at, self.x + last, at + thick - 1

    def _score(self, i: int, j: int) -> Corners:
        left, right = self._along(j, self.trace.Bc)
        top, bottom = self._along(i, self.trace.Br)
        return self.x + left, self.y + top, self.x + right, self.y + bottom

    def rest(self, sheet: _Sheet) -> None:
        trace, middle = self.trace, self.x + SQUARE / 2
        sheet.text((middle, 66), LABELS[trace.series], 24, self.colour, bold=True, anchor="ms")
        sheet.text((middle, 92), LOOPS[trace.algorithm], 15, QUIET, anchor="ms")
        for array in self.arrays:
            at, thick = self.across[array]
            for tile in range(trace.tiles(array)):
                sheet.box(self._tile(array, tile), EMPTY)
        for array in dict.fromkeys([*self.arrays, "l", "m"]):
            at, thick = self.across[array]
            upright = array in ROW_TILES
            place = (at + thick / 2, self.y - 14) if upright else (self.x - 18, at + thick / 2)
            sheet.text(place, array, 17, BLACK, bold=True, anchor="mm")
        for i in range(trace.row_tiles):
            for j in range(trace.column_tiles):
                sheet.box(self._score(i, j), EMPTY)

    def at(self, sheet: _Sheet, before: int, clock: int) -> None:
        """What is where at the clock, and what has begun to move since the frame before it."""
        trace = self.trace
        moving = [event for event in self.events if before < event.start <= clock]
        # A longer move than the other order's goes on.
        moving = moving or [e for e in self.events if e.start <= clock < e.stop]
        for visit in trace.visits:
            if visit.start <= clock:
                shade = self.colour if clock < visit.stop else _mix(self.colour, WHITE, 0.72)
                sheet.box(self._score(visit.i, visit.j), shade)
        shades: dict[tuple[str, int], str] = {}
        for held in trace.held:
            if held.start <= clock < held.stop:
                registers = held.array in IN_REGISTERS
                shade = timeline.REGISTERS if registers else timeline.SHARED
                arrays = "lm" if held.array == "L" else held.array  # L is made of both
                shades |= {(array, held.tile): shade for array in arrays}
        for move in (move for event in moving for move in event.moves):
            shades[move.array, trace.tile(move)] = timeline.colour(move)
        for (array, tile), shade in shades.items():
            sheet.box(self._tile(array, tile), shade)
        begun = [move for move in trace.moves if move.start <= clock]
        self._count_stores(sheet, begun, shades)
        self._say(sheet, moving[-1] if moving else None)
        self._bar(sheet, begun)

    def _count_stores(
        self, sheet: _Sheet, begun: Sequence[Move], shades: Mapping[tuple[str, int], str]
    ) -> None:
        """How often each tile of O has been stored, on it, where there is room."""
        stored = [self.trace.tile(m) for m in begun if (m.array, m.kind) == ("O", "store")]
        for tile, times in Counter(stored).items():
            left, top, right, bottom = self._tile("O", tile)
            ground = shades.get(("O", tile), EMPTY)
            shade = BLACK if ground in (EMPTY, timeline.REGISTERS) else WHITE
            if bottom - top > 16:
                place = (left + right) / 2, (top + bottom) / 2
                sheet.text(place, f"{times}×", 15, shade, ground=ground, anchor="mm", bold=True)

    def _say(self, sheet: _Sheet, event: Event | None) -> None:
        y = self.y + SQUARE + SPACE + THICK + 30
        if event is None:
            sheet.text((self.left, y), "done", 17, QUIET)
            return
        move = event.moves[0]
        tiles = ", ".join(f"{m.array}{self.trace.tile(m)}" for m in event.moves)
        text = f"{self.trace.lines(event.moves)}: {move.kind} {tiles}"
        sheet.text((self.left, y), text, 17, timeline.colour(move), bold=True)

    def _bar(self, sheet: _Sheet, begun: Sequence[Move]) -> None:
        """Bytes moved so far, by what moved, as a bar; and how often O went by."""
        y, x = self.y + SQUARE + SPACE + THICK + 44, float(self.left)
        moved: dict[str, int] = {}
        for move in begun:
            shade = timeline.colour(move)
            moved[shade] = moved.get(shade, 0) + move.bytes
        for shade in timeline.LEGEND:
            wide = BAR * moved.get(shade, 0) / self.longest
            if wide >= 1:
                sheet.box((round(x), y, round(x + wide) - 1, y + 21), shade)
            x += wide
        text = size(sum(moved.values()))
        sheet.text((x + 8, y + 17), text, 17, BLACK, bold=True)
        tiles = [sum((m.array, m.kind) == ("O", kind) for m in begun) for kind in ("load", "store")]
        text = f"tiles of O: {tiles[0]} read, {tiles[1]} written"
        sheet.text((self.left, y + 44), text, 15, QUIET)


def _rgb(shade: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(shade[1:]))


def _mix(one: str, other: str, share: float) -> str:
    """A colour between two: `share` of the other."""
    parts = (round(a + share * (b - a)) for a, b in zip(_rgb(one), _rgb(other), strict=True))
    return "#" + bytes(parts).hex()


@cache
def _font(points: int, bold: bool) -> Any:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
    return ImageFont.truetype(str(path), points)
