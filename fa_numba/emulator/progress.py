"""How far a long launch is, on the terminal."""

from __future__ import annotations

import sys
import time

SECONDS_BEFORE = 5.0  # a launch that ends sooner says nothing
SECONDS_BETWEEN = 0.2


class Progress:
    """A line on stderr that says which of a launch's blocks runs, where somebody watches."""

    __slots__ = ("_kernel", "_blocks", "_done", "_started", "_next", "_shown")

    def __init__(self, kernel: str, blocks: int) -> None:
        self._kernel, self._blocks, self._done = kernel, blocks, 0
        self._started = time.monotonic()
        watched = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._next = self._started + SECONDS_BEFORE if watched else float("inf")
        self._shown = False

    def blocks_done(self, count: int) -> None:
        self._done += count
        self.step()

    def step(self) -> None:
        """Say it, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._shown = now + SECONDS_BETWEEN, True
        text = f"emulating {self._kernel}: {self._done} of {self._blocks} blocks done"
        print(f"\r{text}, {now - self._started:.0f} s", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the line back."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
