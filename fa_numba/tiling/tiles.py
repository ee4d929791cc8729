"""Tiles: the block sizes that a caller may choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

STAGES = (1, 2)


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a tiled algorithm, and how a thread block holds them.

    ``Br`` rows of Q and ``Bc`` rows of K and V make one tile of S. ``threads`` is the number of
    threads in a block; None takes the split with the fewest shared-memory reads. ``stages`` is how
    many tiles of K and of V are in shared memory; FlashAttention-2's forward kernel on tensor cores
    takes 2 too, and has then the next ones on their way all the time.

    Raises ValueError when Br is no multiple of 4, Bc no multiple of 8, either is not positive, or
    stages is not 1 or 2; TypeError for what is no int.
    """

    Br: int
    Bc: int
    threads: int | None = None
    stages: int = 1

    def __post_init__(self) -> None:
        for name, value, step in (("Br", self.Br, 4), ("Bc", self.Bc, 8)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"tiles: {name} must be an int, not {value!r}")
            if value < 1 or value % step:
                raise ValueError(
                    f"tiles: {name} must be a positive multiple of {step}, not {value}"
                )
        if self.threads is not None and (
            isinstance(self.threads, bool) or not isinstance(self.threads, int)
        ):
            raise TypeError(f"tiles: threads must be an int or None, not {self.threads!r}")
        if isinstance(self.stages, bool) or not isinstance(self.stages, int):
            raise TypeError(f"tiles: stages must be an int, not {self.stages!r}")
        if self.stages not in STAGES:
            raise ValueError(f"tiles: stages must be 1 or 2, not {self.stages}")

    def for_backward(self) -> Tiles:
        """These block sizes for the backward pass, whose kernels have no choice of stages."""
        return replace(self, stages=1)


def is_valid(tiles: Tiles, select: Callable[[Tiles], Any]) -> bool:
    """Whether ``select`` has a kernel specialisation for the tiles; without one it raises a
    ValueError.
    """
    try:
        select(tiles)
    except ValueError:
        return False
    return True
