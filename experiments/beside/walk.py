"""The order in which the forward kernels move tiles, computed without running a kernel.

The file explore_page/walk.js has the same functions in JavaScript. Tests compare both, and compare
this module with the recorded traces of the emulator.
"""

from collections.abc import Iterator
from dataclasses import replace

from fa_numba.dtypes import DTYPES

from ..lab.measure.moves import ROW_TILES, Move, Trace

# An access: kind ("load" or "store"), array, number of the tile, bytes of a row.
Access = tuple[str, str, int, int]
SUM_BYTES = 4  # bytes of an element of l, m, L and of the float32 sum of O


def column_tiles(i: int, N: int, Br: int, Bc: int, causal: bool, window: int) -> range:
    """Return the numbers of the column tiles that row tile i sees.

    With a window, each row sees `window` columns on either side. A window of 0 hides no column.
    """
    first, last = i * Br, min((i + 1) * Br, N) - 1
    begin = max(0, first - window) if window else 0
    end = min(N, last + window + 1) if window else N
    end = last + 1 if causal else end
    return range(begin // Bc, -(-end // Bc))


def walk(
    series: str, dtype: str, N: int, d: int, Br: int, Bc: int, causal: bool, window: int
) -> Trace:
    """Return the trace of a forward call of one head on the unit "simt" or "mma".

    The thread blocks of FA-2 are in the order of their row tiles. On a GPU they run at the same
    time.
    """
    seen = [column_tiles(i, N, Br, Bc, causal, window) for i in range(-(-N // Br))]
    element = DTYPES[dtype].bytes
    if series.startswith("fa1"):
        blocks = [list(fa1(seen, -(-N // Bc), d, element, window == 0))]
    else:
        blocks = [list(fa2(i, tiles, d, element)) for i, tiles in enumerate(seen)]
    moves, clock = [], 0
    for block, accesses in enumerate(blocks):
        for kind, array, tile, row_bytes in accesses:
            rows = Br if array in ROW_TILES else Bc
            first, end = tile * rows, min((tile + 1) * rows, N)
            moved = (end - first) * row_bytes
            moves.append(Move(array, kind, first, end, block, moved, clock, ""))
            clock += moved
    return Trace(series, N, d, causal, Br, Bc, tuple(moves), window)


def fa1(
    seen: list[range], Tc: int, d: int, element: int, starts_in_first_pass: bool
) -> Iterator[Access]:
    """Yield the accesses of FA-1's thread block in order.

    `seen` contains the column tiles that each row tile sees, and `Tc` is the number of column
    tiles. `element` is the number of bytes of an element of Q, K, V and O. In 16 bits, O is stored
    as a float32 sum until the last visit of a row tile.

    | `starts_in_first_pass` | how O, l and m get their first values |
    |---|---|
    | False | the kernel first stores O = 0, l = 0 and m = -inf in global memory |
    | True | the first pass over the rows computes them without loading them |
    """
    if not starts_in_first_pass:  # line 2: O = 0, l = 0, m = -inf
        for i in range(len(seen)):
            if element < SUM_BYTES:
                yield "store", "O", i, d * element
            yield from state("store", i, d * SUM_BYTES)
    for j in range(Tc):
        rows = [i for i in range(len(seen)) if j in seen[i] or (j == 0 and starts_in_first_pass)]
        if not rows:
            continue
        yield "load", "K", j, d * element
        yield "load", "V", j, d * element
        yield "load", "Q", rows[0], d * element
        for n, i in enumerate(rows):
            if j > 0 or not starts_in_first_pass:
                yield from state("load", i, d * SUM_BYTES)
            if n + 1 < len(rows):  # the next tile of Q, before this row tile is stored
                yield "load", "Q", rows[n + 1], d * element
            is_last = j >= seen[i].stop - 1
            yield from state("store", i, d * (element if is_last else SUM_BYTES))


def state(kind: str, i: int, row_bytes: int) -> Iterator[Access]:
    """Yield the loads or the stores (`kind`) of O, l and m of row tile i.

    `row_bytes` is the number of bytes of a row of O.
    """
    yield kind, "O", i, row_bytes
    yield kind, "l", i, SUM_BYTES
    yield kind, "m", i, SUM_BYTES


def fa2(i: int, seen: range, d: int, element: int) -> Iterator[Access]:
    """Yield the accesses of FA-2's thread block for row tile i in order.

    `seen` contains the column tiles that the row tile sees. `element` is the number of bytes of an
    element of Q, K, V and O.
    """
    yield "load", "Q", i, d * element
    for j in seen:
        yield "load", "K", j, d * element
        yield "load", "V", j, d * element
    yield "store", "O", i, d * element
    yield "store", "L", i, SUM_BYTES


def by_row_tile(trace: Trace) -> Trace:
    """Return FA-2's trace with the thread blocks in the order of their row tiles.

    The kernels number the thread blocks of FA-2 from the last row tile to the first: with a causal
    mask, the last row tile takes longest and must start first. FA-1's trace has one thread block,
    and is returned unchanged.
    """
    blocks = sorted(trace.blocks.values(), key=lambda moves: moves[0].first)
    moves, clock = [], 0
    for block, own in enumerate(blocks):
        for move in own:
            moves.append(replace(move, block=block, start=clock))
            clock += move.bytes
    return replace(trace, moves=tuple(moves))
