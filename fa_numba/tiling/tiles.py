"""Tiles: the block sizes that a caller may choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

MOST_STAGES = 4


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a tiled algorithm, and how a thread block holds them.

    ``Br`` rows of Q and ``Bc`` rows of K and V make one tile of S. ``threads`` is the number of
    threads in a block; None takes the split with the fewest shared-memory reads. ``stages`` is how
    many tiles of K and of V are in shared memory; FlashAttention-2's forward kernel on tensor cores
    takes 2 too, and has then the next ones on their way all the time; on Hopper's up to 4, and has
    as many of Q.

    Raises ValueError when Br is no positive multiple of 4, Bc none of 8, or stages not 1 to 4;
    TypeError for what is no integer, of Python or NumPy. A call says which threads its kernels
    have.
    """

    Br: int
    Bc: int
    threads: int | None = None
    stages: int = 1

    def __post_init__(self) -> None:
        for own in fields(self):
            value, may_be_none = getattr(self, own.name), own.default is None
            if value is None and may_be_none:
                continue
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                allowed = "an int or None" if may_be_none else "an int"
                raise TypeError(f"tiles: {own.name} is {value!r}: allowed is {allowed}")
            object.__setattr__(self, own.name, int(value))
        for name, value, step in (("Br", self.Br, 4), ("Bc", self.Bc, 8)):
            if value < 1 or value % step:
                raise ValueError(
                    f"tiles: {name} is {value}: allowed is a positive multiple of {step}"
                )
        if not 1 <= self.stages <= MOST_STAGES:
            raise ValueError(f"tiles: stages is {self.stages}: allowed is 1 to {MOST_STAGES}")

    def for_backward(self) -> Tiles:
        """These block sizes for the backward pass, whose kernels have no choice of stages."""
        return replace(self, stages=1)


def is_valid(tiles: Tiles, select: Callable[[Tiles], Any]) -> bool:
    """Whether ``select`` has a kernel specialisation for the tiles."""
    try:
        select(tiles)
    except ValueError:
        return False
    return True
