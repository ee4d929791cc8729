"""The variants of the backward kernel on Hopper's tensor cores, one row of a table for each.

``FA2_VARIANTS`` and ``FA1_VARIANTS`` are the tables, one for each algorithm. The rows are tried in
their order, and ``variant_of`` returns the first row that fits a call. The spec of a kernel
contains its row (``WgmmaBackwardSpec.variant``). The row says which code the consumers of the
kernel run. ``plan.why`` prints the row.

A gain is a ratio of times that were measured on an H100 or H200. The files h100_trials.csv and
h200_trials.csv in tests/data have the times, under the name of the trial. "Compiled, not timed"
means that the assembler's log decided, which reports spilled registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from fa_numba.options import PLAIN, Features
from fa_numba.tiling.tiles import Tiles
from fa_numba.tiling.wgmma import PANEL

# The largest head dimension for which FA-2's backward kernel adds to dQ itself.
LARGEST_ATOMIC = 128
# The largest head dimension at which consumers have registers for ALiBi slopes or a bias, in
# addition to their parts of the tiles.
ADDED_BESIDE = 48


class BackwardCall(NamedTuple):
    """The facts of a call on which its variant depends.

    field          meaning
    head_dim       head dimension of Q and K
    head_dim_v     head dimension of V; 0 if it is equal to ``head_dim``
    features       options of the call
    algorithm      "fa1" or "fa2"
    grouped        whether a thread block has several query heads of a K/V head
    splits_group   whether several thread blocks share a column tile
    adds_dq        whether the kernel adds to dQ; otherwise a second kernel computes dQ
    """

    head_dim: int
    head_dim_v: int = 0
    features: Features = PLAIN
    algorithm: str = "fa2"
    grouped: bool = False
    splits_group: bool = False
    adds_dq: bool = True

    @property
    def largest_dim(self) -> int:
        """The larger head dimension, of Q and K or of V."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def planes(self) -> bool:
        """Whether the inputs are float32 arrays that are split into planes."""
        return self.features.planes > 1


class Dq(Enum):
    """Who adds the dQ of a row tile to the sum in global memory, and when."""

    COPIED = "in the same iteration, by the copy engine, one copy per warpgroup"
    FRAGMENTS = "in the same iteration, by the copy engine, in fragments, one copy per warp"
    PAIRS = "in the same iteration, by the consumer threads from registers, two elements at a time"
    CARRIED = "in the same iteration, by the consumer threads, which read and write dQ in each pass"
    APART = "by no thread of this kernel: a second kernel computes dQ, with Q outer"


class Work(Enum):
    """How the two consumer warpgroups share a tile of S."""

    COLUMNS = "64 columns each"
    PRODUCTS = "the same 64 columns: one computes S, P and dV, the other dP, dS and dK"


class Condition(NamedTuple):
    """A condition on the options of a call, which a row of the table of variants requires.

    field   meaning
    words   the condition in words, for ``plan.why``
    holds   function that takes a call and returns whether the condition holds
    """

    words: str
    holds: Callable[[BackwardCall], bool]


def slopes_alone(features: Features) -> bool:
    """Return whether a kernel keeps the scores only to compute slopes from them.

    A slope is the derivative of ``score_mod`` with respect to the score. Kept scores are in
    registers until the kernel computes dS (``Features.scores_stay``). The result is False if the
    kernel does not keep the scores, and with ALiBi, a bias, dropout or gradients of captured
    arrays.
    """
    f = features
    beside = f.dcaptured is not None or f.alibi or f.bias or f.dropout
    return f.scores_stay and not beside


def _masks_alone(call: BackwardCall) -> bool:
    """Return whether a call has no option except a causal mask and a block mask.

    The result is True if all of these conditions hold:

    - The call has no other option. The block mask may have a ``mask_mod``.
    - A thread block has the rows of one query head.
    - Each column tile has one thread block.
    - V has the head dimension of Q.

    There is one exception, in which a kernel would spill registers. The result is False if the head
    dimension is above 64, and the block mask has a ``mask_mod`` that may be called only with rows
    and columns of S (``Mod.inside``). An example is a ``mask_mod`` that reads an array at i or j.
    """
    f = call.features
    masks: dict[str, Any] = {"causal": f.causal, "sparse": f.sparse}
    mod = f.mask_mod
    if f.sparse and mod and (call.head_dim <= PANEL or not mod.inside):
        masks["mask_mod"] = mod
    one_head = not (call.grouped or call.head_dim_v or call.splits_group)
    return one_head and f == replace(PLAIN, **masks)


def _changes_kept_products(call: BackwardCall) -> bool:
    """Return whether a call needs a variant with more registers for its producer threads, because
    of a softcap or ALiBi slopes.

    The result is True if both conditions hold:

    - The call has a softcap, or it has ALiBi slopes and a head dimension above ADDED_BESIDE = 48.
    - The kernel does not keep the scores in registers until it computes dS
      (``Features.scores_stay`` is False).
    """
    slopes = call.features.alibi and call.largest_dim > ADDED_BESIDE
    return (call.features.softcap or slopes) and not call.features.scores_stay


def _masks_own_heads(call: BackwardCall) -> bool:
    """Return whether a call has a causal mask or a window, and one query head per K/V head."""
    return not call.grouped and (call.features.causal or call.features.window)


_ANY = Condition("any options", lambda call: True)
_MASKS_ALONE = Condition(
    "no option but causal and block_mask, one query head per K/V head, a column tile that is not "
    "split",
    _masks_alone,
)
_CAP = Condition(
    f"softcap, or alibi_slopes with a head_dim above {ADDED_BESIDE}, and no score_mod that keeps "
    "the scores for dS",
    _changes_kept_products,
)
_SLOPES = Condition(
    "a score_mod that keeps the scores for dS, without alibi_slopes, bias, dropout and gradients "
    "of captured arrays",
    lambda call: slopes_alone(call.features),
)
_MASKED_HEADS = Condition("causal or window, one query head per K/V head", _masks_own_heads)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Variant:
    """A row of the table: a backward kernel, the calls that it takes, and the reason for the row.

    field            meaning
    name             name of the row
    consumer         name of the consumers' code, and of the layout of shared memory
    largest_dim      largest head dimension of the calls
    takes            condition on the options of the calls
    planes           whether the inputs of the calls are float32 in planes
    tiles            rows and columns of a tile of S
    work             how the consumers share a tile of S
    consumers        number of consumer warpgroups
    registers        numbers of registers of a producer thread and of a consumer thread
    slots            number of row tiles of Q, and of dO, in shared memory
    from_registers   products whose first operand is in registers; all other operands are in
                     shared memory
    dq               who adds to dQ, and when (class ``Dq``)
    why              reason for the row, with the measured gain
    """

    name: str
    consumer: str
    largest_dim: int
    takes: Condition = _ANY
    planes: bool = False
    tiles: Tiles
    work: Work = Work.COLUMNS
    consumers: int = 2
    registers: tuple[int, int]
    slots: int = 2
    from_registers: tuple[str, ...] = ("dV = P^T dO (P)", "dK = dS^T Q (dS)")
    dq: Dq
    why: str

    @property
    def adds_dq(self) -> bool:
        """Whether the kernel adds to dQ. Otherwise a second kernel computes dQ."""
        return self.dq is not Dq.APART

    @property
    def copies_dq(self) -> bool:
        """Whether the copy engine (TMA) adds dQ in boxes that a tensor map describes."""
        return self.dq is Dq.COPIED

    def covers(self, largest_dim: int, planes: bool, adds_dq: bool) -> bool:
        """Return whether the kernel of the row fits three facts about a call.

        argument      fact
        largest_dim   the larger head dimension, of Q and K or of V
        planes        whether the inputs are float32 arrays that are split into planes
        adds_dq       True if the kernel must add to dQ; False if a second kernel computes dQ
        """
        alike = self.planes == planes and self.adds_dq == adds_dq
        return alike and largest_dim <= self.largest_dim

    def fits(self, call: BackwardCall) -> bool:
        """Return whether the kernel of the row can compute a call."""
        covers = self.covers(call.largest_dim, call.planes, call.adds_dq)
        return covers and self.takes.holds(call)

    def __repr__(self) -> str:
        return f"Variant({self.name!r})"

    def __str__(self) -> str:
        """Return the row in words, as ``plan.why`` prints it."""
        few, many = self.registers
        kind = "float32 in planes, " if self.planes else ""
        return (
            f"{self.name}: for {kind}head_dim <= {self.largest_dim}, {self.takes.words}; tiles of "
            f"{self.tiles.Br} x {self.tiles.Bc}; {self.consumers} consumer warpgroups "
            f"({self.work.value}); {few} registers per producer thread and {many} per consumer "
            f"thread; {self.slots} slots for row tiles; operands from registers: "
            f"{', '.join(self.from_registers)}; dQ is added {self.dq.value}. Reason: {self.why}"
        )


_WIDE_TILE, _LONG_TILE, _SMALL_TILE = Tiles(128, 128), Tiles(64, 128), Tiles(64, 64)

FA2_VARIANTS = (
    Variant(
        name="planes",
        consumer="planes",
        planes=True,
        largest_dim=64,
        tiles=_LONG_TILE,
        registers=(40, 232),
        dq=Dq.PAIRS,
        why="each consumer scales and multiplies its own dS, so that consumers rarely wait for "
        "each other; 1.51 times as fast as mma at d=64 (trial 'planes backward')",
    ),
    Variant(
        name="planes-by-product",
        consumer="planes by product",
        planes=True,
        largest_dim=128,
        tiles=_SMALL_TILE,
        work=Work.PRODUCTS,
        registers=(40, 232),
        dq=Dq.PAIRS,
        why="dK, dV and the sums of one tile do not fit the registers of one warpgroup; 1.70 times "
        "as fast as mma at d=128 (trial 'planes backward')",
    ),
    Variant(
        name="masks-64",
        consumer="masks",
        largest_dim=64,
        takes=_MASKS_ALONE,
        tiles=_WIDE_TILE,
        registers=(40, 232),
        dq=Dq.FRAGMENTS,
        why="dP is computed during the exponentials, and dQ is copied while dK is computed; "
        "1.05 times as fast as the kernel that it replaced, "
        "median over N=512 to 16k (trial 'dQ by contiguous copies')",
    ),
    Variant(
        name="columns-64-cap",
        consumer="columns",
        largest_dim=64,
        takes=_CAP,
        tiles=_WIDE_TILE,
        registers=(56, 224),
        dq=Dq.COPIED,
        why="producer threads with 40 registers would spill (compiled, not timed)",
    ),
    Variant(
        name="columns-64",
        consumer="columns",
        largest_dim=64,
        tiles=_WIDE_TILE,
        registers=(40, 232),
        dq=Dq.COPIED,
        why="it has all options; 1.29 times as fast as mma with dropout at d=64, N=4096 (trial "
        "'dropout 0.1')",
    ),
    Variant(
        name="masks-128",
        consumer="masks",
        largest_dim=128,
        takes=_MASKS_ALONE,
        tiles=_LONG_TILE,
        registers=(40, 232),
        dq=Dq.FRAGMENTS,
        why="as masks-64, with dS made of P in 16 bits; 1.08 times as fast as the kernel that it "
        "replaced, median over N=512 to 16k (trial 'dQ by contiguous copies')",
    ),
    Variant(
        name="columns-128-slopes",
        consumer="columns",
        largest_dim=128,
        takes=_SLOPES,
        tiles=_LONG_TILE,
        registers=(24, 240),
        dq=Dq.COPIED,
        why="the slopes of the function need more registers per consumer thread (compiled, not "
        "timed)",
    ),
    Variant(
        name="columns-128",
        consumer="columns",
        largest_dim=128,
        tiles=_LONG_TILE,
        registers=(40, 232),
        dq=Dq.COPIED,
        why="it has all options; tiles of 64 rows leave registers for dK and dV; 1.91 times as "
        "fast as mma with dropout at d=128, N=4096 (trial 'dropout 0.1')",
    ),
    Variant(
        name="dq-apart-64-cap",
        consumer="columns",
        largest_dim=64,
        takes=_CAP,
        tiles=_LONG_TILE,
        registers=(56, 224),
        dq=Dq.APART,
        why="as dq-apart-64; producer threads with 40 registers would spill (compiled, not timed)",
    ),
    Variant(
        name="dq-apart-64",
        consumer="columns",
        largest_dim=64,
        tiles=_LONG_TILE,
        registers=(40, 232),
        dq=Dq.APART,
        why="deterministic=True needs sums of dQ in one order; without dQ, tiles of 64 rows leave "
        "registers to round P early (compiled, not timed)",
    ),
    Variant(
        name="dq-apart-128-slopes",
        consumer="columns",
        largest_dim=128,
        takes=_SLOPES,
        tiles=_LONG_TILE,
        registers=(24, 240),
        dq=Dq.APART,
        why="as dq-apart-128; the slopes of the function need more registers per consumer thread "
        "(compiled, not timed)",
    ),
    Variant(
        name="dq-apart-128",
        consumer="columns",
        largest_dim=128,
        tiles=_LONG_TILE,
        registers=(40, 232),
        dq=Dq.APART,
        why="deterministic=True needs sums of dQ in one order; tiles of 64 rows leave registers "
        "for dK and dV (compiled, not timed)",
    ),
    Variant(
        name="by-product",
        consumer="products",
        largest_dim=256,
        tiles=_SMALL_TILE,
        work=Work.PRODUCTS,
        registers=(40, 232),
        dq=Dq.APART,
        why="dK and dV of 64 columns fill the registers of one warpgroup each, and leave none for "
        "dQ; 1.69 times as fast as mma at d=192, N=4096 with 128 columns of V (trial 'value "
        "dimension on Hopper's unit')",
    ),
)

FA1_VARIANTS = (
    Variant(
        name="fa1-64-masks",
        consumer="fa1",
        largest_dim=64,
        takes=_MASKED_HEADS,
        tiles=_WIDE_TILE,
        registers=(24, 240),
        dq=Dq.CARRIED,
        why="masks need more registers per consumer thread, and producer threads without groups of "
        "heads need fewer (compiled, not timed)",
    ),
    Variant(
        name="fa1-64",
        consumer="fa1",
        largest_dim=64,
        tiles=_WIDE_TILE,
        registers=(40, 232),
        dq=Dq.CARRIED,
        why="dQ of 128 rows has a part of 64 x 64 for each consumer",
    ),
    Variant(
        name="fa1-128-slopes",
        consumer="fa1",
        largest_dim=128,
        takes=_SLOPES,
        tiles=_LONG_TILE,
        registers=(24, 240),
        dq=Dq.CARRIED,
        why="the slopes of the function need more registers per consumer thread (compiled, not "
        "timed)",
    ),
    Variant(
        name="fa1-128",
        consumer="fa1",
        largest_dim=128,
        tiles=_LONG_TILE,
        registers=(40, 232),
        dq=Dq.CARRIED,
        why="dQ of 64 rows has a part of 64 x 64 for each consumer; tiles of 64 rows leave "
        "registers for dK and dV",
    ),
)


def variants_of(algorithm: str) -> tuple[Variant, ...]:
    """Return the table of an algorithm, "fa1" or "fa2"."""
    return FA1_VARIANTS if algorithm == "fa1" else FA2_VARIANTS


def variant_of(call: BackwardCall) -> Variant:
    """Return the first row of the algorithm's table that fits a call.

    Raise ValueError if no row fits. Callers check with ``Unit.lacks`` first that a row fits.
    """
    for variant in variants_of(call.algorithm):
        if variant.fits(call):
            return variant
    raise ValueError(
        f"head_dim must be at most {max(v.largest_dim for v in variants_of(call.algorithm))} in "
        f"the backward pass of {call.algorithm!r} on unit 'wgmma', got {call.largest_dim}"
    )


def default_wgmma_backward_tiles(
    largest_dim: int, adds_dq: bool = True, planes: int = 1, algorithm: str = "fa2"
) -> Tiles:
    """Return the tiles of the backward kernel on Hopper's tensor cores.

    The tiles are those of the first suitable variant in the table of the algorithm. Options of a
    call, such as dropout, can select another variant (``variant_of``), but never other tiles.

    argument      meaning
    largest_dim   the larger head dimension, of Q and K or of V
    adds_dq       True if the backward kernel adds to dQ; False if a second kernel computes dQ
    planes        number of 16-bit planes of the inputs; 1 for 16-bit inputs
    algorithm     "fa1" or "fa2"

    Raise ValueError if the table has no variant for these arguments.
    """
    for variant in variants_of(algorithm):
        if variant.covers(largest_dim, planes > 1, adds_dq):
            return variant.tiles
    alike = (v for v in variants_of(algorithm) if v.covers(0, planes > 1, adds_dq))
    most = max((v.largest_dim for v in alike), default=0)
    raise ValueError(
        f"head_dim must be at most {most} in the backward pass of {algorithm!r} on unit 'wgmma' "
        f"with adds_dq={adds_dq} and {planes} planes, got {largest_dim}"
    )
