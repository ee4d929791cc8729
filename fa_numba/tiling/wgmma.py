"""How the warpgroups of a block share a tile on Hopper's tensor cores (``wgmma``), in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from fa_numba.integers import ceil_div, round_up
from fa_numba.tiling.spec import Spec

PANEL = 64  # columns of 16-bit elements in 128 bytes
GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of S that a warpgroup takes
REGISTERS = {2: (24, 240), 3: (32, 160)}


@dataclass(frozen=True)
class WgmmaSpec(Spec):
    """A forward kernel on Hopper's tensor cores: a producer warpgroup, and consumers that take 64
    rows of S each, and all columns.
    """

    dtype: str = "float16"
    positive_scale: bool = False
    stages: int = 2
    q_stages: int = 2
    takes_turns: bool = True
    overlaps: bool = True
    tests_factor: bool = False

    @property
    def consumers(self) -> int:
        return self.Br // GROUP_ROWS

    @property
    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    @property
    def panels(self) -> int:
        return ceil_div(self.head_dim, PANEL)

    @property
    def tile_halves(self) -> tuple[int, int]:
        return self.panels * PANEL * self.Br, self.panels * PANEL * self.Bc

    @property
    def row_step(self) -> int:
        return 8

    @property
    def column_width(self) -> int:
        return 2

    @property
    def column_step(self) -> int:
        return 8

    @property
    def folds_scale(self) -> bool:
        return self.positive_scale and not self.features.changes_scores

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]

    @property
    def accumulators(self) -> int:
        return self.TM * (self.TN + self.TN // 2 + 4 * self.DN)

    @property
    def fits_registers(self) -> bool:
        return True

    @property
    def shared_bytes(self) -> int:
        rows, columns = self.tile_halves
        return 2 * (self.q_stages * rows + 2 * self.stages * columns) + 8 * (2 * self.q_stages + 4 * self.stages) + 4 * self.q_stages

    @property
    def min_blocks(self) -> int:
        return 1
