"""Specs of FlashAttention-1's forward kernel on Hopper's tensor cores (``wgmma``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fa_numba.integers import ceil_div
from fa_numba.tiling.spec import check_shared
from fa_numba.tiling.tiles import Tiles
from fa_numba.tiling.wgmma import Arrivals, Pipeline, WgmmaSpec, within_registers

FLOAT_PANEL = 32  # columns of float32 in 128 bytes
# Number of consumers -> registers of a producer thread, and of a consumer thread.
REGISTERS = {1: (32, 240), 2: (40, 232), 3: (32, 160)}
# The same for two consumers with planes, or with more than _LARGE registers for S.
_LARGE, _REGISTERS_OF_LARGE = 96, (24, 240)
# Registers that a consumer thread needs in addition to: its parts of P and O; its part of S while
# it masks; its part of S while S becomes planes of P.
_OTHERS, _OTHERS_OF_S, _OTHERS_OF_PLANES = 32, 96, 144
# (slots of K and V, slots of Q and O): the first pair that fits in shared memory is taken.
_SLOTS = ((2, 2), (1, 2), (2, 1), (1, 1))


class Fa1Pipelines(NamedTuple):
    """The pipelines of FA-1's forward kernel.

    field     contents of a slot
    q         tile of Q
    k         tile of K
    v         tile of V
    o         tile of O in float32
    written   no data. A barrier of this pipeline says that a consumer has written its rows of O to
              global memory in a pass, so that the next pass may load them
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    o: Pipeline
    written: Pipeline


@dataclass(frozen=True)
class WgmmaFa1Spec(WgmmaSpec):
    """FlashAttention-1's forward kernel on Hopper's tensor cores.

    A thread block has one producer warpgroup, and ``consumers`` consumer warpgroups. Each consumer
    has 64 rows of each row tile, and barriers of its own for its rows of Q and O. ``stages`` is the
    number of slots for K, and also for V. ``q_stages`` is the number of slots for Q, and also for O
    in float32.
    """

    @property
    def registers(self) -> tuple[int, int]:
        """Numbers of registers of a producer thread and of a consumer thread.

        Producer threads release registers after the launch, and consumer threads take them. These
        are the numbers after this exchange. With two consumers, a consumer thread gets more
        registers if its part of S is large, or if the kernel works with planes
        (``_REGISTERS_OF_LARGE``).
        """
        large = self.TM * self.TN > _LARGE or self.planes > 1
        if self.consumers == 2 and large:
            return _REGISTERS_OF_LARGE
        return REGISTERS[self.consumers]

    @property
    def loads_own_rows(self) -> bool:
        return True

    @property
    def float_panels(self) -> int:
        """Number of boxes of 32 columns in a float32 row of O."""
        return ceil_div(self.columns, FLOAT_PANEL)

    @property
    def query_ends(self) -> bool:
        """Whether the kernel must not load rows beyond the end of a sequence.

        The value is True for packed sequences, where these rows belong to another sequence. In
        other calls these rows are padding, and loading them is harmless.
        """
        return self.features.packed

    @property
    def tile_floats(self) -> int:
        """Number of elements of a slot of O in float32.

        With planes it is 0, because O is loaded from global memory to registers.
        """
        return 0 if self.planes > 1 else self.float_panels * FLOAT_PANEL * self.Br

    @property
    def barriers(self) -> int:
        return self.pipelines.v.empty + self.stages

    @property
    def pipelines(self) -> Fa1Pipelines:  # type: ignore[override]
        """The pipelines of the kernel.

        In ``q``, ``o`` and ``written``, each consumer has barriers of its own.
        """
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
        """The barriers to initialise, and how many arrivals complete each barrier.

        barrier says that              arrivals that complete the barrier
        a slot is full                 1
        O is written (``written``)     1
        a slot of Q is empty           4: 1 of each warp of the consumer that owns the barrier
        a slot of O is empty           1 of the first thread of the consumer that owns the barrier
        a slot of K or V is empty      1 of each warp of all consumers
        """
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
        """Number of 32-bit words in shared memory for a block mask, or 0 without a block mask.

        Each consumer has one word for each slot of Q. The word says which row tile comes next.
        """
        return self.q_stages * self.consumers if self.slots_name_next else 0

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for S, or for P and O together, whichever is larger.

        S and O are never in registers at the same time: O is loaded to registers after P has been
        computed from S. With planes, the product P V of one tile takes registers too.
        """
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
    """Return the spec of FA-1's forward kernel on Hopper's tensor cores for ``tiles``.

    ``facts`` are the fields of the spec except the sizes. ``shared_limit`` is the shared memory of
    a thread block in bytes. The numbers of slots are the first pair in ``_SLOTS`` that fits in
    shared memory. Raise ValueError as ``within_registers`` does, and for tiles that do not fit in
    shared memory.
    """
    spec = within_registers(WgmmaFa1Spec, tiles, head_dim, **facts)
    for stages, q_stages in _SLOTS:
        spec = replace(spec, stages=stages, q_stages=q_stages)
        if spec.shared_bytes <= shared_limit:
            break
    check_shared(spec, shared_limit)
    return spec
