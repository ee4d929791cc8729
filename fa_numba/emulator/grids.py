"""Launches whose thread blocks synchronise with each other: ``cuda.cg.this_grid().sync()``.

All thread blocks of such a launch are in progress at the same time. Each thread block is a
greenlet. A thread block runs until it waits for the others or ends. Then the next thread block
runs. When all wait, the barrier of the grid opens: every earlier access happened before every later
access.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from .errors import Deadlock

if TYPE_CHECKING:
    from .run import Launch

# Attributes of a launch that belong to the running thread block. They change with the thread block.
OF_BLOCK = (
    "group", "mask", "_outer", "block", "block_number", "base", "starts", "seen", "_clocks",
    "_statics", "_dynamics", "_tiles", "_pool", "_groups", "_hub", "_ready", "_meetings",
    "_named_barriers", "_opened", "_opened_at", "_warps_active",
)  # fmt: skip


class Grid:
    """The thread blocks of a launch that synchronises its grid."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.hub = getcurrent()
        self.runs: dict[int, greenlet] = {}  # thread blocks that have not ended, by number
        # By number of a waiting thread block: its attributes OF_BLOCK, and its `blockIdx`.
        self.states: dict[int, tuple[dict[str, Any], tuple[int, int, int]]] = {}

    def run(self) -> None:
        """Run all thread blocks. Raise Deadlock if some end and others wait for the grid."""
        launch = self.launch
        numbers = list(range(1, prod(launch.grid) + 1))
        if launch._random is not None:
            launch._random.shuffle(numbers)
        self.runs = {n: greenlet(partial(self._block, n)) for n in numbers}
        ended: list[int] = []
        while self.runs:
            for n, run in list(self.runs.items()):
                self._enter(n)
                run.switch()
                if run.dead:
                    ended.append(n)
                    del self.runs[n]
                    launch.progress.done += 1
                else:
                    self._leave(n)
            if ended and self.runs:
                raise self._deserted(ended)
            self._open()

    def _block(self, number: int) -> None:
        """Run one thread block, in a greenlet of its own."""
        launch = self.launch
        launch._clocks = launch.new_clocks()
        launch._pool = {}
        launch._run_groups(number, 1)

    def wait(self) -> None:
        """Let the other thread blocks run until the barrier of the grid opens."""
        self.hub.switch()
        self.launch._open_barrier()

    def _open(self) -> None:
        """Open the barrier of the grid: forget which thread blocks accessed which elements.

        Accesses after the barrier cannot conflict with accesses before the barrier.
        """
        for array in self.launch.arrays:
            for owners in array.owners.blocks:
                owners[:] = 0

    def _leave(self, number: int) -> None:
        """Store the state of a thread block that waits, before another thread block runs."""
        launch, place = self.launch, self.launch._cuda.blockIdx
        state = {name: getattr(launch, name) for name in OF_BLOCK if hasattr(launch, name)}
        self.states[number] = state, (place.x, place.y, place.z)

    def _enter(self, number: int) -> None:
        """Restore the state of a thread block that has waited, before it runs again."""
        if number not in self.states:
            return
        launch, place = self.launch, self.launch._cuda.blockIdx
        state, (place.x, place.y, place.z) = self.states[number]
        for name, value in state.items():
            setattr(launch, name, value)
        launch._enter(launch.group)
        launch.mask, launch._outer = state["mask"], state["_outer"]

    def _deserted(self, ended: list[int]) -> Deadlock:
        """Return the error for thread blocks that wait although others have ended."""
        launch = self.launch
        self._enter(next(iter(self.runs)))
        text = (
            f"grid.sync() waits for all thread blocks, but block {launch.block_of(ended[0])} has "
            "ended without reaching it. Let every thread block call grid.sync() equally often"
        )
        site = launch.group.site
        error: Deadlock = launch.fault_at(Deadlock, text, int(launch.group.tids[0]), site)  # type: ignore[assignment]
        return error

    def end(self) -> None:
        """End the greenlets of the thread blocks that still wait after an error."""
        self.launch.end()
        for number, run in self.runs.items():
            if not run.dead:
                run.throw()  # before its groups, which return to this greenlet when they end
                self._enter(number)
                self.launch.end()
