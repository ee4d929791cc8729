"""Several thread blocks of a launch at the same time, statement by statement.

An operation on an array takes about the same time for 32 lanes and for 1,000 lanes. Thread blocks
of few lanes therefore run in batches. Each thread block has its own shared memory, barriers and
stamps. Faults are therefore found for each thread block separately. If all lanes of a thread block
have ended or take another branch, they are masked out. Atomic additions to global memory are made
when all thread blocks of the batch have ended, one thread block after the other.

Some operations need a thread block that runs alone. They raise `OneByOne`, and a fault of the
kernel raises an error. In both cases the batch is undone, and its thread blocks run one by one.
Results, counts and errors are therefore the same as without batches.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import checks
from .errors import Index3
from .groups import WARP

if TYPE_CHECKING:
    from .run import Launch

LANES = 2048  # most lanes of a batch with more than one thread block
MOST_BLOCKS = 64


def blocks_at_once(grid: Index3, block: Index3) -> int:
    """Return how many thread blocks of a launch the emulator runs at the same time.

    `grid` and `block` are the (x, y, z) sizes of the grid and of a thread block.
    """
    lanes = -(-prod(block) // WARP) * WARP
    return max(1, min(LANES // lanes, MOST_BLOCKS, prod(grid)))


def add_in_turn(additions: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """Make the atomic additions of a batch, one thread block after the other.

    Each entry of `additions` is a tuple of four arrays. The first array is the memory that is
    changed, as a flat array. The other three arrays have one element per addition: the number of
    the thread block, the position in the memory, and the value to add.
    """
    by_memory: dict[int, Any] = {}
    for memory, *what in additions:
        by_memory.setdefault(memory.ctypes.data, (memory, []))[1].append(what)
    for memory, made in by_memory.values():
        blocks, at, values = (np.concatenate(each) for each in zip(*made, strict=True))
        order = np.argsort(blocks, kind="stable")
        checks.add_in_turn(memory, at[order], values[order])


class Kept:
    """The state of a launch at one time, to which the launch can be restored.

    `owners` says whether the state includes the records of the thread blocks that accessed each
    element.
    """

    def __init__(self, launch: Launch, owners: bool = True) -> None:
        self.launch = launch
        launch.journal = []
        self.tallies = [(a.tally, a.tally.loads, a.tally.stores) for a in launch.arrays]
        self.rows, self.instructions = launch._rows.copy(), dict(launch._instructions)
        self.mark = None if launch.trace is None else launch.trace.mark()
        self.owners = []
        if owners:
            for a in launch.arrays:
                self.owners += [(of, of.copy()) for of in a.owners.blocks]

    def restore(self) -> None:
        """Restore memory, counts and records of the launch to the kept state."""
        launch = self.launch
        for memory, at, old in reversed(launch.journal):
            memory[at] = old
        for tally, loads, stores in self.tallies:
            tally.loads, tally.stores = loads, stores
        launch._rows[: len(self.rows)], launch._rows[len(self.rows) :] = self.rows, 0
        launch._instructions = self.instructions
        if launch.trace is not None and self.mark is not None:
            launch.trace.back_to(self.mark)
        for of, before in self.owners:
            of[:] = before
