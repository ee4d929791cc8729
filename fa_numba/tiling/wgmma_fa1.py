"""How the warpgroups of a block share a tile of FlashAttention-1's forward pass on Hopper's tensor
cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fa_numba.integers import ceil_div
from fa_numba.tiling.spec import check_shared
from fa_numba.tiling.tiles import Tiles
from fa_numba.tiling.wgmma import Arrivals, Pipeline, WgmmaSpec, within_registers

FLOAT_PANEL = 32  # columns of float32 in 128 bytes
# By the number of consumers: registers of a thread that produces, and of one that consumes.
REGISTERS = {1: (32, 240), 2: (40, 232), 3: (32, 160)}
# The same where two consumers have more than so many registers of S, or planes.
_LARGE, _REGISTERS_OF_LARGE = 96, (24, 240)
# Registers that a consumer needs beside its parts of P and O; beside its part of S, while it masks;
# and beside it where it becomes planes of P.
_OTHERS, _OTHERS_OF_S, _OTHERS_OF_PLANES = 32, 96, 144
# Slots of K and V, and of Q and O: the first pair that fits in shared memory is taken.
_SLOTS = ((2, 2), (1, 2), (2, 1), (1, 1))


class Fa1Pipelines(NamedTuple):
    """FA-1's forward kernel's: Q, K, V, O, and when a pass has written its rows of O."""

    q: Pipeline
    k: Pipeline
    v: Pipeline
    o: Pipeline
    written: Pipeline


@dataclass(frozen=True)
class WgmmaFa1Spec(WgmmaSpec):
    """FlashAttention-1's forward kernel on Hopper's tensor cores: a warpgroup that produces, and
    ``consumers`` that take 64 rows of each row tile.

    ``stages`` is how many tiles of K and of V are in shared memory, ``q_stages`` of Q, and of O in
    float32. Every consumer has barriers of its own for its rows of Q and O.
    """

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that produces, and of one that consumes."""
        large = self.TM * self.TN > _LARGE or self.planes > 1
        if self.consumers == 2 and large:
            return _REGISTERS_OF_LARGE
        return REGISTERS[self.consumers]

    @property
    def loads_own_rows(self) -> bool:
        return True

    @property
    def float_panels(self) -> int:
        """Boxes of 32 columns that a float32 row of O has."""
        return ceil_div(self.columns, FLOAT_PANEL)

    @property
    def query_ends(self) -> bool:
        """Packed alone: padding past a sequence's end does no harm, another one's rows would."""
        return self.features.packed

    @property
    def tile_floats(self) -> int:
        """Elements of a slot of O; none of planes, where O comes straight to registers."""
        return 0 if self.planes > 1 else self.float_panels * FLOAT_PANEL * self.Br

    @property
    def barriers(self) -> int:
        return self.pipelines.v.empty + self.stages

    @property
    def pipelines(self) -> Fa1Pipelines:  # type: ignore[override]
        """Each consumer has barriers of its own, for its rows of Q and O and its written pass."""
        stages, groups = self.stages, self.consumers
        rows = self.q_stages * groups
        kv = 4 * rows + groups
        return Fa1Pipelines(
            Pipeline(0, rows, self.q_stages, groups),
            Pipeline(kv, kv + 2 * stages, stages),
            Pipeline(kv + stages, kv + 3 * stages, stages),
            Pipeline(2 * rows, 3 * rows, self.q_stages, groups),
            Pipeline(4 * rows, 4 * rows, 1, groups),
        )

    @property
    def arrivals(self) -> Arrivals:
        """A consumer's warps empty its Q, its first thread its O; every warp K or V."""
        q, k, v, o, written = self.pipelines
        warps = 4 * self.consumers
        return (
            (q.slots * q.groups, ((q.full, 1), (q.empty, 4), (o.full, 1), (o.empty, 1))),
            (written.groups, ((written.full, 1),)),
            (k.slots, ((k.full, 1), (v.full, 1), (k.empty, warps), (v.empty, warps))),
        )

    @property
    def shared_bytes(self) -> int:
        return 8 * (self.first_barrier + self.barriers) + 4 * self.index_words

    @property
    def index_words(self) -> int:
        """Words of what comes after a row tile, one for each consumer's part of a slot of Q."""
        return self.q_stages * self.consumers if self.slots_name_next else 0

    @property
    def accumulators(self) -> int:
        """O comes to registers when S has left them for P; in planes one tile's P V does too."""
        sums = min(self.planes, 2) * 4 * self.DN
        return max(self.TM * self.TN, self.p_registers + self.TM * sums)

    @property
    def fits_registers(self) -> bool:
        many = self.registers[1]
        others = _OTHERS_OF_PLANES if self.planes > 1 else _OTHERS_OF_S
        return self.accumulators <= many - _OTHERS and self.TM * self.TN <= many - others


def select_wgmma_fa1_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, **facts: object
) -> WgmmaFa1Spec:
    """The specialisation of FlashAttention-1's forward kernel on Hopper's tensor cores for
    ``tiles``, with the fields ``facts`` beside the sizes; ``shared_limit`` in bytes a block.

    Raises ValueError as ``within_registers`` does, and for what does not fit shared memory.
    """
    spec = within_registers(WgmmaFa1Spec, tiles, head_dim, **facts)
    for stages, q_stages in _SLOTS:
        spec = replace(spec, stages=stages, q_stages=q_stages)
        if spec.shared_bytes <= shared_limit:
            break
    check_shared(spec, shared_limit)
    return spec
