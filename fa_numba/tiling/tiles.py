"""Tiles: the tile sizes, threads and stages that a caller may choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

MOST_STAGES = 4


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of an algorithm, with the threads and pipeline slots of a thread block.

    A tile of S has Br rows and Bc columns: Br rows of Q, and Bc rows of K and V. The allowed sizes
    depend on the unit, the head dimension and the device. If a call does not allow the sizes,
    ``fa_numba.plan`` and the call raise ValueError.

    Parameters
    ----------
    Br : int
        Rows of a row tile, a positive multiple of 4. Unit "mma" needs a multiple of 16. Unit
        "wgmma" needs 64, 128 or 192 rows in the forward pass.
    Bc : int
        Rows of K and V in a column tile, a positive multiple of 8. Units "mma" and "wgmma" need a
        multiple of 16, and "wgmma" at most 256.
    threads : int, optional
        Number of threads of a thread block. None takes the number with the fewest reads of shared
        memory. If the kernel does not allow a number, the message of the ValueError lists the
        allowed numbers.
    stages : int, default 1
        Number of pipeline slots: how many tiles of K, and of V, are in shared memory at a time.
        With more than 1, the next tiles are loaded during the products. Only the forward pass of
        "fa2" takes more than 1: up to 2 on unit "mma", up to 4 on unit "wgmma".

    Raises
    ------
    TypeError
        If a value is no int of Python or NumPy.
    ValueError
        If a value is out of range.

    See Also
    --------
    fa_numba.plan : Return the plan of a call, with its tiles and the reason for them.

    Examples
    --------
    >>> import fa_numba
    >>> fa_numba.Tiles(Br=64, Bc=32)
    Tiles(Br=64, Bc=32, threads=None, stages=1)
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
                wanted = "an integer or None" if may_be_none else "an integer"
                raise TypeError(f"tiles.{own.name} must be {wanted}, got {value!r}")
            object.__setattr__(self, own.name, int(value))
        for name, value, step in (("Br", self.Br, 4), ("Bc", self.Bc, 8)):
            if value < 1 or value % step:
                raise ValueError(f"tiles.{name} must be a positive multiple of {step}, got {value}")
        if not 1 <= self.stages <= MOST_STAGES:
            raise ValueError(f"tiles.stages must be from 1 to {MOST_STAGES}, got {self.stages}")

    def for_backward(self) -> Tiles:
        """Return these tile sizes with one pipeline slot, as a backward pass needs them.

        Returns
        -------
        Tiles
            The same Br, Bc and threads, with ``stages=1``.
        """
        return replace(self, stages=1)


def is_valid(tiles: Tiles, select: Callable[[Tiles], Any]) -> bool:
    """Return whether there is a kernel for the tiles, that is, whether ``select`` accepts them.

    ``select`` takes the tiles, and raises ValueError if there is no kernel.
    """
    try:
        select(tiles)
    except ValueError:
        return False
    return True
