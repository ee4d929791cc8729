"""Makes an interactive page of both loop orders, the softmax, tiles and memory traffic.

The page is figures/explore.html. Scripts in the page compute the memory traffic and the order of
the tiles for any size. This experiment records traces, with which tests compare the scripts' order
of tiles. `python -m experiments explore` serves the page and lets readers type masks.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import fa_numba
from fa_numba.problem import Problem

from .beside.traced_calls import UNITS, planned, problem_of, trace
from .lab.measure.moves import Move, Trace
from .lab.measure.series import LABELS, columns, unit
from .lab.measure.workloads import Inputs
from .lab.record import EMULATOR, MODEL, Bench, Options, Row
from .lab.show import film, tables

NAME = "explore"
TAKES = ()

_WORD = re.compile(r"(?P<kind>[<>])(?P<array>[QKVOlmL])(?P<tile>\d+)(:(?P<bytes>\d+))?")
SEQLENS, HEAD_DIMS, BLOCKS, WINDOWS = (64, 128, 256), (16, 32), (16, 32, 64), (0, 24)


def traced(N: int, d: int, Br: int, Bc: int, window: int, on: str) -> bool:
    """Return whether the experiment records the trace of a call with these sizes.

    `on` is the unit ("simt", "mma" or "wgmma"). The experiment records a selection of calls, so
    that the stored traces stay short: calls with few tiles, and windows at some sizes only.
    """
    tiles = N // Br * (N // Bc)
    if on == "wgmma":
        return Br == 64 and 4 <= tiles <= 16 and (window == 0 or d == 16)
    if max(Br, Bc) == 64:
        return min(Br, Bc) > 16 and 4 <= tiles <= 16 and window == 0 and d == 16
    masked = window == 0 or (N, d) == (64, 16)
    return tiles <= 32 and masked and (N == 64 or d == 16)


def measure(options: Options, bench: Bench) -> Iterator[Row | Sequence[Row]]:
    """Yield the bytes of each call by closed forms, and then the traced calls."""
    few = 1 if options.quick else None
    work = [
        (f"{algorithm}-{on}", problem_of(N, d, causal, window, on), fa_numba.Tiles(Br, Bc))
        for on in UNITS
        for N, d in itertools.product(SEQLENS[:few], HEAD_DIMS[:few])
        for Br, Bc in itertools.product(BLOCKS, BLOCKS)
        for causal, window in itertools.product((False, True), WINDOWS)
        if traced(N, d, Br, Bc, window, on)
        for algorithm in ("fa1", "fa2")
    ]
    for call in work:
        yield _row(*call, planned(*call).accesses.bytes, MODEL)
    yield from bench.counted(work, "tracing on the emulator", partial(_traced, inputs=Inputs()))


def _row(
    series: str, problem: Problem, tiles: fa_numba.Tiles, moved: int, machine: str, said: str = ""
) -> Row:
    note = f"window {max(problem.window[0], 0)}; {said}"
    common = columns(NAME, series, problem, machine, tiles, note=note)
    return Row(metric="traffic", unit="bytes", value=moved, **common)


def _traced(series: str, problem: Problem, tiles: fa_numba.Tiles, inputs: Inputs) -> Iterator[Row]:
    found = trace(inputs, series, problem, tiles)
    yield _row(series, problem, tiles, found.bytes, EMULATOR, pack(found))


def pack(found: Trace) -> str:
    """Return the moves of a trace as text, with a blank between two moves.

    <Q0:1024   load 1024 bytes of Q's tile 0
    >O0        store tile 0 of O; the number of bytes is the same as in the last move of O
    |          the moves of the next thread block follow
    """
    words, block, last = [], 0, dict[str, int]()
    for move in found.moves:
        if move.block != block:
            words.append("|")
            block = move.block
        word = f"{'<' if move.kind == 'load' else '>'}{move.array}{found.tile(move)}"
        words.append(word if last.get(move.array) == move.bytes else f"{word}:{move.bytes}")
        last[move.array] = move.bytes
    return " ".join(words)


def unpack(row: Row) -> Trace:
    """Return the trace whose moves `pack` wrote into the note of a row.

    Raise ValueError if the note is not the text of a trace, or if the row has no tiles.
    """
    if row.Br is None or row.Bc is None:
        raise ValueError(f"a row of a trace must have tiles, got none for series {row.series}")
    moves: list[Move] = []
    clock, block, last = 0, 0, dict[str, int]()
    for word in row.note.partition("; ")[2].split():
        if word == "|":
            block += 1
            continue
        said = _WORD.fullmatch(word)
        if said is None or not (said["bytes"] or said["array"] in last):
            raise ValueError(
                f"the note of a trace must consist of moves such as '<Q0:1024', got {word!r} in "
                f"{row.note!r}"
            )
        array, tile = said["array"], int(said["tile"])
        last[array] = int(said["bytes"] or last[array])
        rows = row.Br if array in "QOlmL" else row.Bc
        ends = tile * rows, min((tile + 1) * rows, row.seqlen_q)
        kind = "load" if said["kind"] == "<" else "store"
        moves.append(Move(array, kind, *ends, block, last[array], clock, ""))
        clock += last[array]
    shape = row.seqlen_q, row.head_dim, row.causal, row.Br, row.Bc
    return Trace(row.series, *shape, tuple(moves), setting(row)[5])


def setting(row: Row) -> tuple[Any, ...]:
    """Return the sizes and options of a row's call, without the loop order.

    They are (sequence length, head dimension, Br, Bc, "yes" or "no" for causal, window, unit). A
    row of FA-1 and a row of FA-2 are compared if their sizes and options are equal.
    """
    window = int(row.place.removeprefix("window "))
    causal = "yes" if row.causal else "no"
    return row.seqlen_q, row.head_dim, row.Br, row.Bc, causal, window, unit(row.series)


def _counted(rows: Iterable[Row], source: str = "counted") -> dict[tuple[Any, ...], dict[str, Row]]:
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.source == source and not row.failed:
            found.setdefault(setting(row), {})[row.series.split("-")[0]] = row
    return found


def page(rows: Sequence[Row], note: str) -> str | None:
    """Return the page as the text of an HTML file that needs no other file; None without traces.

    `note` is a text that the page shows.
    """
    from .beside import explore_page

    return explore_page.html(explore_page.PANELS, note) if _counted(rows) else None


def draw(rows: Sequence[Row]) -> Any:
    """Draw one recorded call in both loop orders, as the page's first panel does.

    Return None without traces.
    """
    found = _counted(rows)
    if not found:
        return None
    plain = {key: both for key, both in found.items() if key[4:6] == ("no", 0)} or found
    most = max(plain, key=lambda key: (key[0] ** 2 // (key[2] * key[3]), -key[1], key))
    return film.draw([unpack(row) for row in plain[most].values()])


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of bytes by loop order, for the calls that are traced."""
    model = _counted(rows, "model")
    lines = []
    for key, both in sorted(_counted(rows).items()):
        N, d, Br, Bc, causal, window, on = key
        cells = [on, str(N), str(d), f"{Br} x {Bc}", causal, str(window or "-")]
        for name in ("fa1", "fa2"):
            row, form = both.get(name), model.get(key, {}).get(name)
            counted = "-" if row is None else str(int(row.number))
            cells += [counted, "-" if form is None else str(int(form.number))]
        lines.append(cells)
    header = ["unit", "N", "d", "tiles", "causal", "window"]
    header += [
        f"{LABELS[f'{n}-simt']}, {what}"
        for n in ("fa1", "fa2")
        for what in ("traced, bytes", "closed form, bytes")
    ]
    caption = (
        "The table of traced calls contains the bytes that a forward call of one head loads and "
        "stores. A column *traced* contains the bytes of all loads and stores in the emulator's "
        "trace of the call. With a window of w, row i of S sees the columns i - w to i + w."
    )
    return tables.of(caption, header, lines)
