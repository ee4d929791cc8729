"""Calls of one head whose loads and stores the emulator traces: limits, plans and traces."""

from typing import Any

import fa_numba
from fa_numba import device, emulator
from fa_numba.problem import Problem

from ..lab.measure.moves import Move, Trace
from ..lab.measure.series import algorithm, plan, unit
from ..lab.measure.workloads import Inputs

# Unit -> dtype of the traced calls.
UNITS = {"simt": "float32", "mma": "float16", "wgmma": "float16"}
# The largest number of tiles of S, because more are too small to see, and the largest number of
# multiply-adds of a traced call.
MOST_TILES, MOST_STEPS = 400, 2**26


def check(N: int, d: int, Br: int, Bc: int) -> None:
    """Raise ValueError if there are too many tiles to see, or if the emulator would take long."""
    tiles, taken = -(-N // Br) * -(-N // Bc), 2 * N * N * max(d, 32)
    if tiles > MOST_TILES:
        raise ValueError(
            f"the page shows at most {MOST_TILES} tiles of S, got {tiles} (N={N} in tiles of {Br} "
            f"x {Bc}). Choose larger tiles or a smaller N"
        )
    if taken > MOST_STEPS:
        raise ValueError(
            f"the emulator computes at most {MOST_STEPS:,} multiply-adds here, got {taken:,} "
            f"(N={N} with d={d}). Choose a smaller N or d"
        )


def problem_of(N: int, d: int, causal: bool, window: int, on: str) -> Problem:
    """Return the problem of one head with N rows of Q and K, on the unit `on`.

    A row sees `window` columns on either side. If `window` is 0, a row sees all columns.
    """
    sides = (window, window) if window else (-1, -1)
    return Problem(1, 1, 1, N, N, d, dtype=UNITS[on], causal=causal, window=sides)


def planned(
    series: str, problem: Problem, tiles: fa_numba.Tiles, blocks: Any = None
) -> fa_numba.Plan:
    """Return the plan of a call on the emulated device.

    `blocks` is the block mask of the call, or None. Raise ValueError like `check`.
    """
    check(problem.seqlen_q, problem.head_dim, tiles.Br, tiles.Bc)
    with device.using("emulator"):
        return plan(series, problem, window=problem.window, **sizes(tiles, blocks))


def sizes(tiles: fa_numba.Tiles, blocks: Any = None) -> dict[str, Any]:
    """Return the option of a call that decides the tile sizes, as {name: value}.

    Without a block mask, it is {"tiles": `tiles`}. With a block mask, it is {"block_mask":
    `blocks`}: the blocks of the mask are the tiles.
    """
    return {"tiles": tiles} if blocks is None else {"block_mask": blocks}


def trace(
    inputs: Inputs, series: str, problem: Problem, tiles: fa_numba.Tiles, blocks: Any = None
) -> Trace:
    """Run a call on the emulator and return the trace of its loads and stores.

    `blocks` is the block mask of the call, or None. Raise ValueError like `check`.
    """
    planned(series, problem, tiles, blocks)
    with device.using("emulator"), emulator.trace() as accesses:
        fa_numba.attention(
            *(x.astype(problem.dtype) for x in inputs(problem)),
            algorithm=algorithm(series),
            unit=unit(series),
            causal=problem.causal,
            window=problem.window,
            **sizes(tiles, blocks),
        )
    moves, clock = [], 0
    for access in sorted(accesses, key=lambda access: (access.block[::-1], access.step)):
        # In 16 bits, FA-1 stores the sums of O in a float32 array A. They count as tiles of O.
        array = "O" if access.array == "A" else access.array
        if array not in "QKVOlmL":  # the counter of work tiles of persistent thread blocks
            continue
        block, moved = access.block[0], access.bytes
        moves.append(Move(array, access.kind, *access.rows, block, moved, clock, ""))
        clock += access.bytes
    shape = problem.seqlen_q, problem.head_dim, problem.causal, tiles.Br, tiles.Bc
    seen = None if blocks is None else blocks.visited[0, 0]
    return Trace(series, *shape, tuple(moves), max(problem.window[0], 0), seen)
