"""The time limit of a launch, and its progress bar."""

from __future__ import annotations

import sys
from time import monotonic

BAR_AFTER = 2.0  # seconds until the progress bar appears
BAR_EVERY = 0.2  # seconds between two drawings
WIDTH = 30  # characters of the bar


class Progress:
    """The number of thread blocks of a launch that have ended, and the time since the launch began.

    The launch calls `late` regularly. On a terminal, `late` also draws a progress bar when the
    launch has run for two seconds. `limit` is the time limit in seconds, or None.
    """

    __slots__ = ("kernel", "blocks", "limit", "begun", "done", "shown")

    def __init__(self, kernel: str, blocks: int, limit: float | None) -> None:
        self.kernel, self.blocks, self.limit = kernel, blocks, limit
        self.begun, self.done = monotonic(), 0
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.shown = 0.0 if terminal else float("inf")  # when the bar was drawn last

    def late(self) -> str:
        """Return the message of `TimeLimit` if the launch has exceeded its time limit, else "".

        Also draw the progress bar if it is time to draw it again.
        """
        now = monotonic()
        seconds = now - self.begun
        if seconds > BAR_AFTER and now - self.shown > BAR_EVERY:
            self.shown = now
            filled = WIDTH * self.done // self.blocks
            bar = "#" * filled + "." * (WIDTH - filled)
            text = f"{self.kernel} [{bar}] {self.done:,} of {self.blocks:,} thread blocks"
            print(f"\r{text}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        if self.limit is None or seconds <= self.limit:
            return ""
        left = "no thread block has ended" if not self.done else self._estimate(seconds)
        return (
            f"kernel {self.kernel} has run for {self.limit:g} s on the emulator, its time_limit: "
            f"{left}. Launch fewer thread blocks, check that every loop ends, or pass a larger "
            "time_limit (None for no limit)"
        )

    def _estimate(self, seconds: float) -> str:
        """Return a text: how many thread blocks have ended, and how long all will take.

        `seconds` is the time since the launch began.
        """
        whole = seconds * self.blocks / self.done
        return f"{self.done:,} of {self.blocks:,} thread blocks have ended, all need {whole:,.0f} s"

    def end(self) -> None:
        """Erase the progress bar."""
        if 0 < self.shown < float("inf"):
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
