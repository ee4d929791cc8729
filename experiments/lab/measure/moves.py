"""Traces of calls: which tiles a thread block loads and stores, in which order.

A move is one traced access: a thread block loads or stores some rows of one array. `notes` writes
the moves of a trace into rows of data, and `traces` makes traces from such rows.

A trace contains no times in seconds. In place of the time, it uses the number of bytes that have
been moved so far, as if thread blocks ran one after the other. This number is called the clock.
`Trace.held` says when each tile is on the chip, and `Trace.visits` says when each tile of S is
computed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..record import Row

# The note of a row of a trace. The part before the first semicolon is `Row.place`.
_NOTE = re.compile(
    r"(?P<order>\d+) (?P<kind>\w+) (?P<array>\w+) (?P<first>\d+):(?P<end>\d+); "
    r"block (?P<block>\d+); (?P<line>.*)"
)
# The lines of the papers' Algorithms 1 that move a tile.
LINES = {
    "fa1": {
        **dict.fromkeys([("K", "load"), ("V", "load")], 6),
        **dict.fromkeys([(array, "load") for array in "QOlm"], 8),
        ("O", "store"): 12,
        **dict.fromkeys([("l", "store"), ("m", "store")], 13),
    },
    "fa2": {
        ("Q", "load"): 4,
        **dict.fromkeys([("K", "load"), ("V", "load")], 7),
        ("O", "store"): 14,
        ("L", "store"): 15,
    },
}
# Lines of the computations that belong to a move, in addition to the line of the move itself.
COMPUTED = {("fa1", "O", "store"): (9, 10, 11, 12), ("fa2", "V", "load"): (8, 9, 10)}
# Arrays whose tiles are row tiles. The tiles of K and V are column tiles.
ROW_TILES = ("Q", "O", "l", "m", "L")
# Arrays whose tiles the CUDA-core kernels keep in registers. The others are in shared memory.
IN_REGISTERS = ("O", "l", "m", "L")


@dataclass(frozen=True)
class Move:
    """One load or store of some rows of an array by a thread block.

    Parameters
    ----------
    array : str
        Name of the array.
    kind : str
        "load" or "store".
    first, end : int
        First row, and one past the last.
    block : int
        Number of the thread block.
    bytes : int
        Bytes that are moved.
    start : int
        Number of bytes that all earlier moves have moved. Traces use it in place of the time.
    line : str
        The line of the paper's algorithm, as the comment in the kernel names it.
    """

    array: str
    kind: str
    first: int
    end: int
    block: int
    bytes: int
    start: int
    line: str

    @property
    def stop(self) -> int:
        """Return the number of bytes that all moves up to this move have moved, this move included.

        Traces use this number in place of the time.
        """
        return self.start + self.bytes


@dataclass(frozen=True)
class Held:
    """A tile that is on chip during an interval.

    The interval is given in bytes: the bytes that have been moved so far replace the time.

    Parameters
    ----------
    array : str
        Name of the array.
    tile : int
        Number of the tile.
    block : int
        Number of the thread block.
    start, stop : int
        Bytes that have been moved when the interval begins, and when it ends.
    """

    array: str
    tile: int
    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Visit:
    """The computation of tile (i, j) of S, and the interval in which it happens.

    The interval is given in bytes: the bytes that have been moved so far replace the time.

    Parameters
    ----------
    i, j : int
        Number of the row tile, and number of the column tile.
    start, stop : int
        Bytes that have been moved when the interval begins, and when it ends.
    """

    i: int
    j: int
    start: int
    stop: int


def notes(accesses: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Yield a text and the number of bytes for each traced access.

    The text is the note of the row of data that describes the access.

    Parameters
    ----------
    accesses : iterable of TileAccess
        The trace of a call.

    Yields
    ------
    note : str
        Text with order, kind, array, rows, thread block and line. `traces` reads this text.
    bytes : int
        Bytes that are moved.
    """
    in_order = sorted(accesses, key=lambda access: (access.block[::-1], access.step))
    for order, access in enumerate(in_order):
        first, end = access.rows
        what = f"{order:05d} {access.kind} {access.array} {first}:{end}"
        yield f"{what}; block {access.block[0]}; {access.line}", access.bytes


@dataclass(frozen=True)
class Trace:
    """The moves of one call of one series, with tiles on chip and visits derived from the moves.

    Parameters
    ----------
    series : str
        Name of the series.
    seqlen, head_dim : int
        Sequence length and head dimension.
    causal : bool
        Whether the mask is causal.
    Br, Bc : int
        Tile sizes.
    moves : tuple of Move
        The moves, in order.
    window : int, default 0
        Number of columns to the left of the diagonal that a row sees; 0 means all columns.
    blocks_seen : ndarray of bool, optional
        Block mask, shape (Tr, Tc). None: no block mask.
    """

    series: str
    seqlen: int
    head_dim: int
    causal: bool
    Br: int
    Bc: int
    moves: tuple[Move, ...]
    window: int = 0
    blocks_seen: Any = None  # block mask, bool (Tr, Tc)

    @property
    def algorithm(self) -> str:
        """Return the algorithm of the traced call: "fa1" or "fa2"."""
        return self.series.split("-")[0]

    @property
    def slots(self) -> int:
        """Return the number of slots in shared memory for tiles of each of Q, K and V.

        The number is 2 for the series "fa1-wgmma", which loads one tile ahead. For all other series
        it is 1, because calls with more pipeline stages are not traced.
        """
        return 2 if self.series == "fa1-wgmma" else 1

    @property
    def problem(self) -> tuple[int, int, bool, int, int]:
        """Return (head_dim, seqlen, causal, Br, Bc). Traces that are compared have equal values."""
        return self.head_dim, self.seqlen, self.causal, self.Br, self.Bc

    @property
    def bytes(self) -> int:
        """Return the number of bytes that all moves together move."""
        return sum(move.bytes for move in self.moves)

    @property
    def row_tiles(self) -> int:
        """Return the number of row tiles."""
        return -(-self.seqlen // self.Br)

    @property
    def column_tiles(self) -> int:
        """Return the number of column tiles."""
        return -(-self.seqlen // self.Bc)

    def tiles(self, array: str) -> int:
        """Return the number of tiles of an array."""
        return self.row_tiles if array in ROW_TILES else self.column_tiles

    def tile(self, move: Move) -> int:
        """Return the number of the tile that a move loads or stores."""
        return move.first // (self.Br if move.array in ROW_TILES else self.Bc)

    def select(self, arrays: Sequence[str], kind: str) -> list[Move]:
        """Return the moves of one kind ("load" or "store") that move one of the given arrays."""
        return [m for m in self.moves if m.array in arrays and m.kind == kind]

    def lines(self, moves: Iterable[Move]) -> str:
        """Return the algorithm's lines of the given moves, as "line 8" or "lines 8, 12"."""
        known = LINES[self.algorithm]
        found = {known[m.array, m.kind] for m in moves if (m.array, m.kind) in known}
        return f"line{'s'[: len(found) > 1]} {', '.join(map(str, sorted(found)))}" if found else ""

    @cached_property
    def blocks(self) -> dict[int, list[Move]]:
        """Map the number of each thread block to its moves, in order."""
        found: dict[int, list[Move]] = {}
        for move in self.moves:
            found.setdefault(move.block, []).append(move)
        return found

    @cached_property
    def held(self) -> list[Held]:
        """Return the intervals in which tiles are on chip.

        Begin and end of an interval are numbers of bytes; see the docstring of the module.

        | tile | begin of the interval | end of the interval |
        |---|---|---|
        | Q, K or V (in shared memory) | its load | another load into its slot, or the last move |
        | O, l, m or L (in registers), loaded | its load | its store |
        | O, l, m or L, not loaded | see below | its store |

        A kernel may compute a tile of O, l, m or L without loading it. The interval of the tile
        then begins when two moves are complete: the load of the tile of Q with the same rows, and
        the last store of the row tile before.
        """
        return [held for moves in self.blocks.values() for held in self._held_by(moves)]

    def _held_by(self, moves: Sequence[Move]) -> Iterator[Held]:
        """Yield the intervals in which tiles of one thread block are on chip; see `held`.

        `moves` contains the moves of the thread block, in order.
        """
        end = moves[-1].stop
        shared: dict[tuple[str, int], Move] = {}
        brought = Counter[str]()
        there: dict[int, int] = {}  # row tile: the clock when its tile of Q has been loaded
        loaded: dict[tuple[str, int], int] = {}
        tile, started, stored = -1, 0, moves[0].start  # the row tile in registers
        for move in moves:
            key = move.array, self.tile(move)
            if move.array not in IN_REGISTERS:
                slot = move.array, brought[move.array] % self.slots
                brought[move.array] += 1
                before = shared.get(slot)
                if before is not None:
                    yield Held(
                        before.array, self.tile(before), move.block, before.start, move.start
                    )
                shared[slot] = move
                if move.array == "Q":
                    there[key[1]] = move.stop
            elif move.kind == "load":
                loaded[key] = move.start
            else:
                if tile != key[1] or key in loaded:
                    tile, started = key[1], max(stored, there.get(key[1], stored))
                yield Held(*key, move.block, loaded.pop(key, started), move.stop)
                stored = move.stop
        for move in shared.values():
            yield Held(move.array, self.tile(move), move.block, move.start, end)

    @cached_property
    def visits(self) -> list[Visit]:
        """Return the visits of all tiles of S in the order in which they are computed.

        FA-1: the visit of tile (i, j) takes the interval in which Oi is on chip. FA-2: the visit
        takes the interval from the load of Vj to the next load of V, or to the store of O.
        """
        return [visit for moves in self.blocks.values() for visit in self._visited_by(moves)]

    def _visited_by(self, moves: Sequence[Move]) -> Iterator[Visit]:
        """Yield the visits of one thread block, whose moves are given; see `visits`."""
        if self.algorithm == "fa1":
            taken = {(h.tile, h.stop): h.start for h in self._held_by(moves) if h.array == "O"}
            j, stored = 0, Counter[int]()
            for move in moves:
                if move.array == "K":
                    j = self.tile(move)
                elif (move.array, move.kind) == ("O", "store"):
                    i = self.tile(move)
                    if self.slots > 1:
                        j = self._columns_of(i)[stored[move.first]]
                        stored[move.first] += 1
                    yield Visit(i, j, taken[i, move.stop], move.stop)
            return
        i = next((self.tile(move) for move in moves if move.array in ROW_TILES), 0)
        columns = [move for move in moves if move.array == "V"]
        last = next((move.start for move in moves if move.array == "O"), moves[-1].stop)
        for move, end in zip(columns, [*(m.start for m in columns[1:]), last], strict=False):
            yield Visit(i, self.tile(move), move.start, end)

    def _columns_of(self, i: int) -> list[int]:
        """Return the numbers of the column tiles that row tile i visits, in order.

        The window and the block mask are taken into account. A causal mask is not.
        """
        first = max(0, i * self.Br - self.window) // self.Bc if self.window else 0
        tiles = range(first, self.column_tiles)
        return [j for j in tiles if self.blocks_seen is None or self.blocks_seen[i, j]]


def events(trace: Trace) -> list[list[Move]]:
    """Return the moves of a trace, grouped into the events that a figure shows.

    A tile of O and the tiles of l, m or L of the same rows are one event. Any other move is an
    event of its own.

    Parameters
    ----------
    trace : Trace
        The trace.

    Returns
    -------
    list of list of Move
        The moves of each event.
    """
    found: list[list[Move]] = []
    for move in trace.moves:
        last = found[-1][-1] if found else None
        together = (
            last is not None
            and {move.array, last.array} <= set(IN_REGISTERS)
            and (move.kind, move.first, move.block) == (last.kind, last.first, last.block)
        )
        if together:
            found[-1].append(move)
        else:
            found.append([move])
    return found


def passes(trace: Trace) -> Trace:
    """Return a trace without the stores before the first load of Q, which initialise O, l and m.

    Parameters
    ----------
    trace : Trace
        The trace.

    Returns
    -------
    Trace
        The trace without these stores. All loads are kept.
    """
    first = next(n for n, m in enumerate(trace.moves) if m.array == "Q")
    loads = tuple(m for m in trace.moves[:first] if m.kind == "load")
    return replace(trace, moves=loads + trace.moves[first:])


def steps(trace: Trace) -> dict[str, list[Any]]:
    """Return the trace as text for the page explore.html.

    Parameters
    ----------
    trace : Trace
        The trace.

    Returns
    -------
    dict
        Two lists with one entry for each event (see `events`). "steps" contains texts, in which
        "|" separates five parts: the moves, the tiles on the chip, the tile of S that is computed,
        the numbers of the paper's lines, and the number of the thread block. "bytes" contains the
        number of bytes that have been moved after each event.
    """
    clean = passes(trace)
    fills = {*trace.moves} - {*clean.moves}
    known = LINES[trace.algorithm]
    said, clock = [], []
    for event in events(trace):
        start, stop = event[0].start, event[-1].stop
        held = [h for h in clean.held if h.start < stop and start < h.stop]
        visits = [v for v in clean.visits if v.start <= start < v.stop]
        lines = {2} if event[0] in fills else {
            line for m in event for line in (
                known[m.array, m.kind], *COMPUTED.get((trace.algorithm, m.array, m.kind), ())
            )
        }  # fmt: skip
        moves = (f"{'<' if m.kind == 'load' else '>'}{m.array}{trace.tile(m)}" for m in event)
        parts = (
            " ".join(moves),
            " ".join(dict.fromkeys(f"{h.array}{h.tile}" for h in held)),
            f"{visits[0].i},{visits[0].j}" if visits else "",
            ",".join(map(str, sorted(lines))),
            str(event[0].block),
        )
        said.append("|".join(parts))
        clock.append(stop)
    return {"steps": said, "bytes": clock}


def traces(rows: Iterable[Row]) -> list[Trace]:
    """Return the traces of all traced calls whose moves are among the given rows.

    Parameters
    ----------
    rows : iterable of Row
        Rows of data. The used rows have the source "counted" and the metric "traffic". Their notes
        must be notes that `notes` has written. All other rows and failed rows are ignored.

    Returns
    -------
    list of Trace
        One trace per call, sorted by head dimension, length, mask, tiles and series.

    Raises
    ------
    ValueError
        If the note of a row of counted traffic does not describe a move, or the row has no tiles.
    """
    calls: dict[tuple[Any, ...], list[tuple[int, Row, re.Match[str]]]] = {}
    for row in rows:
        if row.source != "counted" or row.metric != "traffic" or row.failed:
            continue
        found = _NOTE.fullmatch(row.note)
        if found is None or row.Br is None or row.Bc is None:
            raise ValueError(
                f"the row of a move must have tiles and a note with the move, got Br {row.Br}, Bc "
                f"{row.Bc} and note {row.note!r}"
            )
        key = row.head_dim, row.seqlen_q, row.causal, row.Br, row.Bc, row.series
        calls.setdefault(key, []).append((int(found["order"]), row, found))
    made = []
    for (d, N, causal, Br, Bc, series), call in sorted(calls.items()):
        moves, clock = [], 0
        for _, row, note in sorted(call, key=lambda entry: entry[0]):
            first, end, block = (int(note[name]) for name in ("first", "end", "block"))
            at = first, end, block, int(row.number), clock
            moves.append(Move(note["array"], note["kind"], *at, note["line"]))
            clock += int(row.number)
        made.append(Trace(series, N, d, causal, Br, Bc, tuple(moves)))
    return made


def size(moved: int) -> str:
    """Return a number of bytes as text in kB, or from 10 MB on in MB.

    Parameters
    ----------
    moved : int
        Bytes.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> size(1500), size(20_000_000)
    ('1.5 kB', '20.0 MB')
    """
    if moved >= 1e7:
        return f"{moved / 1e6:.1f} MB"
    return f"{moved / 1e3:.{0 if moved >= 1e4 else 1}f} kB"
