"""Specs of the backward kernels on Hopper's tensor cores (``wgmma``).

A spec says how the warpgroups of a thread block share a tile, and where tiles and barriers are in
shared memory. The module ``wgmma_variants`` chooses tiles and registers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from fa_numba.integers import ceil_div, round_up
from fa_numba.mods import Text
from fa_numba.options import Features
from fa_numba.tiling.spec import GradientSpec, ValuesSpec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles
from fa_numba.tiling.wgmma import (
    GROUP,
    GROUP_ROWS,
    PANEL,
    Arrivals,
    Pipeline,
    WgmmaSpec,
    within_registers,
)
from fa_numba.tiling.wgmma_variants import (
    ADDED_BESIDE,
    BackwardCall,
    Dq,
    Variant,
    slopes_alone,
    variant_of,
)

WARP = 32
KEY_TILE_WORDS = 9  # words of a column tile that one thread finds for its block (`key_tiles`)
# Registers of a consumer thread in addition to its parts of the tiles.
_OTHERS = 32


class BackwardPipelines(NamedTuple):
    """The pipelines of a backward kernel.

    field   a slot in FA-2    a slot in FA-1
            contains          contains
    kv      K and V           K and V
    q       Q, L and D        Q and L
    do      dO                dO
    o       not used          O
    d       not used          D
    """

    kv: Pipeline
    q: Pipeline
    do: Pipeline
    o: Pipeline
    d: Pipeline


class WidePipelines(NamedTuple):
    """The pipelines of the backward kernel for head dimensions above 128.

    field   contents of a slot
    kv      K and V
    q       Q, L and D
    do      dO
    s       S
    """

    kv: Pipeline
    q: Pipeline
    do: Pipeline
    s: Pipeline


class DqPipelines(NamedTuple):
    """The pipelines of the kernel that computes dQ alone: for Q, dO, K and V."""

    q: Pipeline
    do: Pipeline
    k: Pipeline
    v: Pipeline


@dataclass(frozen=True)
class WgmmaBackwardSpec(GradientSpec):
    """A backward kernel on Hopper's tensor cores: a producer warpgroup, and two consumers.

    A consumer is a warpgroup that computes 64 columns of S, and all rows of the tile. Registers
    contain S and dP transposed. Four threads share two columns. Thread (ty, tx) of a consumer, with
    ty from 0 to 3, has elements of the consumer's columns tx and tx + 8: the rows 2 ty and 2 ty + 1
    of each 8 rows.

    dQ needs all columns of dS. Therefore dST is in shared memory, and each consumer computes 64
    rows and ``query_columns`` columns of dQ. If a second kernel computes dQ, this kernel computes
    only dK and dV. Subclasses say how other kernels differ.

    field          meaning
    dtype          dtype of the 16-bit matrices
    vector_adds    whether the GPU adds two neighbouring floats with one atomic add
    splits_group   whether several thread blocks share a column tile, and store parts of dK and dV
    splits_rows    whether each of these thread blocks has only a part of one query head's rows; if
                   not, each has all rows of one or several query heads
    chunk_tiles    number of column tiles of each head in a chunk, or 0 for no chunks. The grid
                   visits a chunk of all heads before the next chunk (parts/wgmma/key_tiles.py)
    stays          text of the function that is applied to the scores after masking, or None if no
                   function is applied after masking (``Spec.stays``)
    variant        the row of the table of variants (wgmma_variants.py)
    """

    dtype: str = "float16"
    vector_adds: bool = True
    splits_group: bool = False
    splits_rows: bool = False
    chunk_tiles: int = 0
    stays: Text | None = None
    variant: Variant = field(kw_only=True)

    TN = 2
    row_width = 2
    row_step = 8
    column_width = 1
    column_step = 8
    min_blocks = 1
    # Whether both consumers have the same columns: one computes dV, the other dK.
    wide = False

    @property
    def output(self) -> str:
        """The dtype of dQ, dK and dV."""
        return self.dtype

    @property
    def reasons(self) -> dict[str, str]:
        return {"variant": str(self.variant)}

    @property
    def single_head(self) -> bool:
        """Whether the kernel is compiled for thread blocks with rows of one query head only."""
        return not self.grouped if self.algorithm == "fa1" else self.splits_rows

    @property
    def adds_fragments(self) -> bool:
        """Whether the sum of dQ in global memory is in fragments (``kernels/mma/rows.py``)."""
        return self.variant.dq is Dq.FRAGMENTS

    # Whether dS is computed from P in 16 bits, which frees the registers of P in float32.
    rounds_before_ds = False
    # Whether dS is stored to shared memory by instructions that store tiles of 8 x 8 elements.
    stores_tiles = False

    @property
    def consumers(self) -> int:
        return self.variant.consumers

    @property
    def slots(self) -> int:
        """Number of row tiles of Q, and of dO, in shared memory."""
        return self.variant.slots

    @property
    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """Number of registers of a producer thread and of a consumer thread."""
        return self.variant.registers

    @property
    def panels(self) -> int:
        """Number of panels (64 columns) of a row of Q."""
        return ceil_div(self.head_dim, PANEL)

    @property
    def most_columns(self) -> int:
        """The larger head dimension: of Q and K, or of V."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def most_panels(self) -> int:
        """Number of panels (64 columns) of a row of Q or a row of V, whichever has more."""
        return max(self.panels, self.of_values.panels)

    @property
    def TM(self) -> int:
        return self.Br // 4

    @property
    def element_steps(self) -> tuple[int, int]:
        return 1, self.TM

    @property
    def column_registers(self) -> int:
        """Number of registers of a thread for its part of dK.

        The spec ``of_values``, which describes tiles of V and dV, has the number for dV.
        """
        return self.TN * 4 * self.DN

    @property
    def adds_whole_bias(self) -> bool:
        return self.features.bias

    @property
    def query_columns(self) -> int:
        """Number of columns of the part of dQ that a consumer computes. The part has 64 rows.

        Normally the number is 64. It is smaller if Q has at most 64 columns and V has more. dV then
        leaves few registers, and the consumers share the 64 columns of dQ. Two consumers have 32
        columns each.
        """
        return PANEL // self.consumers if self.most_panels > self.panels == 1 else PANEL

    @property
    def query_registers(self) -> int:
        """Number of registers of a thread for its part of dQ."""
        return self.query_columns * GROUP_ROWS // GROUP

    @property
    def query_floats(self) -> int:
        """Number of elements of the tile of dQ in shared memory; 0 for FA-1.

        In FA-1, dQ moves between registers and global memory directly.
        """
        return 0 if self.algorithm == "fa1" else self.consumers * GROUP_ROWS * self.query_columns

    @property
    def p_registers(self) -> int:
        """Number of registers of a thread for its part of P, or of dS, in 16 bits."""
        return self.TM * self.TN // 2

    @property
    def slopes_alone(self) -> bool:
        """Whether the kernel keeps the scores only to compute slopes from them.

        A slope is the derivative of ``score_mod`` with respect to the score. Kept scores are in
        registers until the kernel computes dS. The value is False if the kernel does not keep the
        scores, or if it needs them for another option, too.
        """
        return slopes_alone(self.features)

    @property
    def slopes_early(self) -> bool:
        """Whether the slopes of a ``score_mod`` are computed together with P.

        A slope is the derivative of ``score_mod`` with respect to the score. The tensor cores
        compute dP while the slopes are computed. The value can be True only if ``slopes_alone`` is
        True.
        """
        return self.slopes_alone and self.rounds_early and not self.wide

    @property
    def rounds_early(self) -> bool:
        """Whether P is rounded to 16 bits before dS is computed.

        The product PT dO for dV can then begin early. P in 16 bits takes registers in addition to P
        and dP in float32. The value is False for FA-1, and for options that need these registers.
        """
        features = self.features
        # With a softcap, P is computed late, together with the slope of the cap.
        plain = self.algorithm == "fa2" and not features.softcap
        plain = plain and not features.bias and (self.slopes_alone or not features.scores_stay)
        ends = features.packed or (features.q_lens and (features.window or features.alibi))
        return plain and not ends and self.accumulators <= 216

    @property
    def tile_registers(self) -> tuple[int, int, int, int, int]:
        """Numbers of registers of a thread for its parts of five tiles.

        The tiles are, in this order: S or dP, P or dS in 16 bits, dQ, dK, and dV.
        """
        columns = self.column_registers, self.of_values.column_registers
        return self.TM * self.TN, self.p_registers, self.query_registers, *columns

    @property
    def block_columns(self) -> int:
        """Number of columns of a block of a block mask: the columns of all consumers together.

        The spec of one consumer's part of a tile (``part``) has the same number.
        """
        return self.consumers * GROUP_ROWS

    @property
    def part(self) -> WgmmaBackwardSpec:
        """The spec of one consumer's part of a tile of S: 64 columns."""
        return replace(self, Bc=GROUP_ROWS)

    @property
    def bias_first(self) -> bool:
        """Whether the bias is added to the scores before the product dP = dO VT begins.

        dP takes registers that the addition of the bias needs. The value is True if these
        conditions hold:

        - The call has a bias.
        - The kernel does not keep the scores until it computes dS (``Features.scores_stay`` is
          False).
        - The larger head dimension, of Q or V, is from 49 to 64.
        """
        few = self.features.bias and not self.features.scores_stay
        return few and ADDED_BESIDE < self.most_columns <= PANEL

    reads_bias = False

    @property
    def reads_state(self) -> bool:
        return super().reads_state and self.algorithm == "fa1"

    @property
    def masked_part(self) -> WgmmaBackwardSpec:
        """The argument of the factory that makes this kernel's ``scale_and_mask``.

        The device function ``scale_and_mask`` changes the scores of one consumer's part of a tile.
        The value is a spec, and its options decide what the function does:

        kernel                                             what ``scale_and_mask`` does
        ``Features.scores_stay`` is true: the kernel       hides elements; the options that change
        keeps the scores until it computes dS              scores are applied later (`hidden_alone`)
        ``bias_first`` is true: the kernel adds the bias   hides elements; the scale and the bias
        to the scores early                                have been applied before
        all other kernels                                  scales the scores, applies the options
                                                           that change scores, and hides elements

        A hidden element of S takes no part in the softmax.
        """
        if self.features.scores_stay:
            return hidden_alone(self.part)
        if not self.bias_first:
            return self.part
        features = replace(self.features, bias=False)
        return replace(self.part, features=features, positive_scale=True)

    @property
    def transposed(self) -> WgmmaSpec:
        """Spec with which device functions of the forward pass compute products of the backward
        pass.

        forward product   backward products
        Q KT              ST = K QT, dPT = V dOT
        P V               dV = PT dO, dK = dST Q

        Rows of a tile in this spec are columns of S.
        """
        return self._transposed(WgmmaSpec)

    def _transposed(self, kind: type[WgmmaSpec]) -> WgmmaSpec:
        own = self.features  # dropout marks the elements of PT that are dropped
        features = Features(dropout=own.dropout, precision=own.precision)
        sizes = (self.head_dim, self.Bc, self.Br, 4, self.Bc // 2)
        return kind(*sizes, features, dtype=self.dtype)

    @property
    def drawn_words(self) -> int:
        """Number of 32-bit words with a bit for each element of a consumer thread's part of S.

        A bit is 1 if dropout keeps the element. The number is 0 without dropout.
        """
        return self.TM * self.TN // 32 if self.features.dropout else 0

    @property
    def tile_halves(self) -> tuple[int, int, int]:
        """Numbers of 16-bit elements of a tile of Q, a tile of K, and a tile of dS.

        The spec ``of_values`` has the numbers for dO and V.
        """
        columns = self.panels * PANEL
        return columns * self.Br, columns * self.Bc, self.Br * self.Bc

    @property
    def offsets(self) -> tuple[int, ...]:
        """Positions of arrays in shared memory, in the order of this table. K and V are before Q.

        array     unit of the position
        Q         16-bit elements
        dO        16-bit elements
        dS        16-bit elements
        dQ        floats
        L and D   floats
        barriers  words of 8 bytes
        """
        (rows, columns, scores), (out, values, _) = self.tile_halves, self.of_values.tile_halves
        at_q = columns + values
        at_do = at_q + self.slots * rows
        at_ds = at_do + (self.row_tiles - 1) * self.slots * out
        at_dq = (at_ds + 2 * scores) // 2
        at_l = at_dq + self.query_floats
        return at_q, at_do, at_ds, at_dq, at_l, (at_l + 2 * self.slots * self.Br) // 2

    @property
    def offset_of_o(self) -> int:
        """Position of O in shared memory, after dO, in 16-bit elements (FA-1 only)."""
        return self.offsets[1] + self.slots * self.of_values.tile_halves[0]

    @property
    def pipelines(self) -> BackwardPipelines:
        """The pipelines of the kernel.

        The slots of Q, dO, O and D with the same index share one barrier, which says that they are
        empty. Only FA-1 has pipelines for O and D. FA-1 also has a barrier which says that the slot
        of K and V is empty, because it loads K and V again in every pass.
        """
        empty, more = 1 + 2 * self.slots, 1 + 3 * self.slots
        return BackwardPipelines(
            Pipeline(0, more + 2 * self.slots, 1),
            Pipeline(1, empty, self.slots),
            Pipeline(1 + self.slots, empty, self.slots),
            Pipeline(more, empty, self.slots),
            Pipeline(more + self.slots, empty, self.slots),
        )

    @property
    def arrivals(self) -> Arrivals:
        """The barriers to initialise, and the numbers of arrivals that complete a barrier.

        barrier says that    arrivals in FA-2          arrivals in FA-1
        Q is full            ``fill_arrivals``         33: 1 for Q, and 32 of the warp that loads L
        dO is full           1                         1
        O is full            no such barrier           1
        D is full            no such barrier           64: two warps that compute D from dO and O
        row tile is empty    1 of each consumer warp   1 of each consumer warp
        K and V are full     1                         1
        K and V are empty    no such barrier           1 of each consumer warpgroup
        """
        kv, q, do, o, d = self.pipelines
        empty = (q.empty, 4 * self.consumers)
        if self.algorithm == "fa2":
            full = (q.full, self.fill_arrivals)
            of_rows: tuple[tuple[int, int], ...] = (full, (do.full, 1), empty)
            return (1, ((kv.full, 1),)), (self.slots, of_rows)
        of_rows = ((q.full, 1 + WARP), (do.full, 1), (o.full, 1), (d.full, 2 * WARP), empty)
        return (1, ((kv.full, 1), (kv.empty, self.consumers))), (self.slots, of_rows)

    @property
    def barriers(self) -> int:
        """Number of barriers."""
        return 1 + 3 * self.slots + (1 + 2 * self.slots if self.algorithm == "fa1" else 0)

    @property
    def key_tile_words(self) -> tuple[int, int]:
        """Return (position, count) of the 32-bit words in shared memory that describe tiles.

        The words follow the barriers. The position is the index of the first word from the start of
        shared memory. The count depends on the algorithm:

        - In FA-2, it is ``KEY_TILE_WORDS`` if batch entries can have different lengths, or with
          ``splits_rows``. Otherwise it is 0.
        - In FA-1, it is 2 for each slot of row tiles if there is a block mask. Otherwise it is 0.
        """
        words = KEY_TILE_WORDS if self.features.lengths or self.splits_rows else 0
        if self.algorithm == "fa1":
            words = 2 * self.slots if self.features.sparse else 0
        return 2 * (self.offsets[-1] + self.barriers), words

    @property
    def fill_arrivals(self) -> int:
        """Number of arrivals at the barrier of a slot of Q that make the slot full, in FA-2's
        kernel.

        The number is the sum of three numbers:

        - 1 for the thread that loads Q,
        - 64 for the two warps that load L and D,
        - with dropout, Bc for the threads that draw random numbers: one thread for each column of
          S.
        """
        return 1 + 2 * WARP + (self.Bc if self.features.dropout else 0)

    @property
    def drawing_threads(self) -> int:
        """Number of threads that together hold each element of a tile of S once.

        It is 2 Bc, because four threads hold two columns of the tile. Normally the threads are the
        threads of all consumers. In some kernels each consumer holds the complete tile. The threads
        are then the threads of one consumer.
        """
        return 2 * self.Bc

    @property
    def drawn_span(self) -> tuple[int, int]:
        """Return (position, count) of the 32-bit words in shared memory with the bits of dropout.

        The position is the index of the first word from the start of shared memory. Each bit says
        whether dropout keeps one element of S (``drawn_words``).
        """
        return sum(self.key_tile_words), self.slots * self.drawing_threads * self.drawn_words

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self.drawn_span)

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dK, dV, S, dP, and P in 16 bits."""
        columns = self.column_registers + self.of_values.column_registers
        return columns + 2 * self.TM * self.TN + self.p_registers

    @property
    def fits_registers(self) -> bool:
        return self.accumulators <= self.registers[1] - _OTHERS


_Specialised = TypeVar("_Specialised", "WgmmaBackwardSpec", "WgmmaDqSpec")


def hidden_alone(spec: _Specialised) -> _Specialised:
    """Return a copy of ``spec`` whose scores are only hidden by masks, and not changed otherwise.

    It is for kernels that keep the scores until they compute dS (``Features.scores_stay``). These
    kernels compute scores in two steps:

    1. ``scale_and_mask`` hides elements of S. It is made from the returned spec. It also hides rows
       beyond the end of Q, because the caller's ``score_mod`` may return NaN there.
    2. Later, together with dS, the kernel applies the softcap, ``score_mod``, ALiBi slopes and the
       bias.

    The returned spec therefore does not have the options of step 2. Its field ``stays`` contains
    the text of the function that step 2 applies to the scores (``Features.kept_scores_text``).
    """
    added = replace(spec.features, softcap=False, alibi=False, bias=False, q_lens=True)
    features = replace(added, score_mod=None, score_mod_grad=None)
    stays = spec.features.kept_scores_text
    return replace(spec, features=features, positive_scale=False, stays=stays)


@dataclass(frozen=True)
class WgmmaMasksBackwardSpec(WgmmaBackwardSpec):
    """A backward kernel for calls that have no options except masks.

    Each consumer warp adds its own part of dQ to global memory.
    """

    rounds_early = True
    stores_tiles = True

    @property
    def rounds_before_ds(self) -> bool:  # type: ignore[override]
        """Whether dS is computed from P in 16 bits instead of P in float32.

        This is the case for head dimensions above 64, because dK and dV then leave no registers for
        P in float32.
        """
        return self.panels > 1

    @property
    def ds_pipeline(self) -> Pipeline:
        """The pipeline of dS. A slot is full when each consumer warp has stored its part of dS.

        The pipeline has no barriers for empty slots. Consumers store to a slot of dS again only
        after both consumers have released the row tile of this slot.
        """
        return Pipeline(1 + 3 * self.slots, 0, self.slots)

    @property
    def arrivals(self) -> Arrivals:
        once, (slots, of_rows) = super().arrivals
        return once, (slots, (*of_rows, (self.ds_pipeline.full, 4 * self.consumers)))

    @property
    def barriers(self) -> int:
        return super().barriers + self.slots


@dataclass(frozen=True)
class WgmmaWideBackwardSpec(WgmmaBackwardSpec):
    """A backward kernel for head dimensions above 128.

    A tile has 64 columns. The sum dK for 64 columns fills the registers of one warpgroup, and the
    sum dV fills the registers of another warpgroup. Therefore the consumers do not divide the tile.
    The first consumer computes S, P and dV for the complete tile. The second consumer computes dP,
    dS and dK for the complete tile. Consumers exchange S through shared memory.
    """

    wide = True
    rounds_early = True

    @property
    def transposed(self) -> WgmmaSpec:
        return self._transposed(_SharedRows)

    @property
    def column_halves(self) -> int:
        """Number of 16-bit elements in shared memory for a tile of K, and also for a tile of V.

        At the end of the kernel, dV is stored in the space of K, and dK in the space of V, before
        they go to global memory. Therefore both spaces have the size of the larger tile.
        """
        return max(self.tile_halves[1], self.of_values.tile_halves[1])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Positions of arrays in shared memory, in the order of this table. K and V are before Q.

        array     unit of the position
        Q         16-bit elements
        dO        16-bit elements
        S         floats
        L and D   floats
        barriers  words of 8 bytes
        """
        (rows, _, scores), out = self.tile_halves, self.of_values.tile_halves[0]
        at_q = 2 * self.column_halves
        at_s = (at_q + self.slots * (rows + out)) // 2
        at_l = at_s + self.slots * scores
        return at_q, at_q + self.slots * rows, at_s, at_l, (at_l + 2 * self.slots * self.Br) // 2

    @property
    def pipelines(self) -> WidePipelines:  # type: ignore[override]
        """The pipelines of the kernel.

        The consumers release a slot of S and a slot of Q together, by one barrier.
        """
        kv, q, do, _, _ = super().pipelines
        return WidePipelines(kv, q, do, Pipeline(1 + 3 * self.slots, q.empty, self.slots))

    @property
    def arrivals(self) -> Arrivals:
        """The barriers to initialise, and the numbers of arrivals that complete a barrier.

        A slot of S is full when each of the 128 threads of one consumer has stored its part.
        """
        kv, q, do, s = self.pipelines
        of_rows = ((q.full, self.fill_arrivals), (do.full, 1), (q.empty, 4 * self.consumers))
        return (self.slots, ((s.full, GROUP),)), (1, ((kv.full, 1),)), (self.slots, of_rows)

    @property
    def barriers(self) -> int:
        return 1 + 4 * self.slots

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of four tiles.

        The tiles are dK or dV (the larger one), S, dP, and dS in 16 bits.
        """
        columns = max(self.column_registers, self.of_values.column_registers)
        return columns + 2 * self.TM * self.TN + self.p_registers


@dataclass(frozen=True)
class WgmmaPlanesBackwardSpec(WgmmaBackwardSpec):
    """A backward kernel for float32 inputs in two planes of 16 bits, for head dimensions up to 64.

    A consumer computes a part of dQ from its own 64 columns of dS, and both consumers add their
    parts to dQ. A consumer reads only its own dS in shared memory. Therefore each consumer scales
    its dS by a power of two of its own.
    """

    query_floats = 0
    query_columns = PANEL
    adders = 2  # both consumers add to each element of dQ, for their own columns of S

    @property
    def plane_panels(self) -> int:
        """Number of panels (64 columns) of one plane of a row of Q."""
        return ceil_div(self.head_dim, PANEL)

    @property
    def plane_columns(self) -> tuple[int, int]:
        return PANEL * self.plane_panels, PANEL * self.of_values.plane_panels

    @property
    def panels(self) -> int:
        """Number of panels (64 columns) of all planes of a row of Q."""
        return self.planes * self.plane_panels

    @property
    def largest_words(self) -> tuple[int, int]:
        """Return (position, count) of the 32-bit words for the largest |dS| of each consumer warp.

        The position is the index of the first word from the start of shared memory.
        """
        return round_up(sum(self.drawn_span), 4), 4 * self.consumers

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self.largest_words)


@dataclass(frozen=True)
class WgmmaWidePlanesBackwardSpec(WgmmaPlanesBackwardSpec):
    """A backward kernel for float32 inputs in planes, for head dimensions above 64.

    A tile has 64 columns. The registers of one warpgroup hold either dK or dV for 64 columns,
    together with the sum of one tile. Therefore the consumers do not divide the columns. The first
    consumer computes S, P and dV for all 64 columns. The second consumer computes dP, dS and dK for
    all 64 columns. Each consumer computes one panel (64 columns) of dQ. Consumers exchange P
    through the space in shared memory that other kernels use for dQ.
    """

    query_floats = GROUP_ROWS * GROUP_ROWS
    adders = 1


class _SharedRows(WgmmaSpec):
    """A ``WgmmaSpec`` for kernels in which two consumers compute with the same rows of a tile.

    In other kernels, each consumer computes with its own 64 rows.
    """

    consumer_rows = 0
    slots_name_next = False
    consumers = 2


# Name of the consumers in a variant's row -> the spec, which has the layout of shared memory.
_SPECS: dict[str, type[WgmmaBackwardSpec]] = {
    "columns": WgmmaBackwardSpec,
    "fa1": WgmmaBackwardSpec,
    "masks": WgmmaMasksBackwardSpec,
    "planes": WgmmaPlanesBackwardSpec,
    "planes by product": WgmmaWidePlanesBackwardSpec,
    "products": WgmmaWideBackwardSpec,
}


def select_wgmma_backward_spec(
    tiles: Tiles | None, call: BackwardCall, shared_limit: int, **facts: object
) -> WgmmaBackwardSpec:
    """Return the spec of the backward kernel for a call.

    The first variant that fits the call determines the kernel (``wgmma_variants.variant_of``).
    ``tiles`` are the tiles that the caller chose, or None. ``shared_limit`` is the shared memory of
    a thread block in bytes. ``facts`` are the fields of the spec that ``call`` does not contain.

    Raise ValueError if the variant has tiles or a number of threads other than ``tiles``, or if the
    spec does not fit in shared memory.
    """
    variant = variant_of(call)
    Br, Bc = variant.tiles.Br, variant.tiles.Bc
    tiles = tiles or variant.tiles
    if (tiles.Br, tiles.Bc) != (Br, Bc):
        raise ValueError(
            f"tiles must be Br={Br}, Bc={Bc} in the backward pass on unit 'wgmma' at "
            f"head_dim={call.head_dim}, got Br={tiles.Br}, Bc={tiles.Bc}"
        )
    fields: dict[str, Any] = {**call._asdict(), **facts, "variant": variant}
    del fields["adds_dq"]  # the variant contains this fact
    kind = _SPECS[variant.consumer]
    spec = kind(Br=Br, Bc=Bc, tx_count=4, ty_count=GROUP_ROWS, **fields)
    check_shared(spec, shared_limit)
    return with_threads([spec], tiles, " in the backward pass on unit 'wgmma'")


@dataclass(frozen=True)
class WgmmaDqSpec(ValuesSpec, WgmmaSpec):
    """The kernel on Hopper's tensor cores that computes dQ alone, without atomic adds.

    The loop order is Q outer, as in the forward pass. A consumer has 64 rows of Qi and dOi, and all
    columns of S and dP. ``stays`` is the text of the function that is applied to the scores after
    masking. It is None if no function is applied after masking (``Spec.stays``).
    """

    stays: Text | None = None

    slots_name_next = False

    @property
    def halves(self) -> int:
        """Number of 16-bit elements in shared memory: of Qi, dOi, and all slots of K and V."""
        (rows, keys, _), (out, values, _) = self.tile_halves, self.of_values.tile_halves
        return rows + out + self.stages * (keys + values)

    @property
    def barriers(self) -> int:
        return 2 + 4 * self.stages

    @property
    def masked_part(self) -> WgmmaDqSpec:
        """The spec from which the device function ``scale_and_mask`` is made.

        Normally it is this spec. If the kernel keeps the scores until it computes dS
        (``Features.scores_stay``), it is the spec that ``hidden_alone`` returns.
        """
        return hidden_alone(self) if self.features.scores_stay else self

    @property
    def pipelines(self) -> DqPipelines:  # type: ignore[override]
        """The pipelines of the kernel.

        Q and dO are loaded once. Their slots therefore need no barriers for empty slots.
        """
        stages = self.stages
        k = Pipeline(2, 2 + 2 * stages, stages)
        v = Pipeline(2 + stages, 2 + 3 * stages, stages)
        return DqPipelines(Pipeline(0, 0, 1), Pipeline(1, 1, 1), k, v)

    @property
    def arrivals(self) -> Arrivals:
        """The barriers to initialise, and the numbers of arrivals that complete a barrier.

        One arrival completes the barrier for a full slot. One arrival of each consumer warp
        completes the barrier for an empty slot of K or V.
        """
        (q, do, k, v), warps = self.pipelines, 4 * self.consumers
        of_columns = ((k.full, 1), (v.full, 1), (k.empty, warps), (v.empty, warps))
        return (1, ((q.full, 1), (do.full, 1))), (k.slots, of_columns)

    @property
    def shared_bytes(self) -> int:
        return 2 * self.halves + 8 * self.barriers

    @property
    def accumulators(self) -> int:
        """Number of registers of a thread for its parts of dQ, S, dP, and dS in 16 bits."""
        return self.TM * (2 * self.TN + 4 * self.DN) + self.p_registers


def select_wgmma_dq_spec(head_dim: int, **facts: object) -> WgmmaDqSpec:
    """Return the spec of the kernel that computes dQ alone, with the tiles of ``wgmma_dq_tiles``.

    ``facts`` are the fields of the spec except the sizes.
    """
    tiles = wgmma_dq_tiles(max(head_dim, facts.get("head_dim_v", 0)))  # type: ignore[call-overload]
    return within_registers(WgmmaDqSpec, tiles, head_dim, **facts)


def wgmma_dq_tiles(head_dim: int) -> Tiles:
    """Return the tiles of the kernel that computes dQ alone on Hopper's tensor cores.

    head_dim      Br    Bc
    1 to 64       128   128
    65 to 128     128    96
    129 to 192    128    80
    193 to 256    128    48

    Bc is limited by the registers that dQ leaves, or by the shared memory that Q and dO leave.
    """
    columns = {1: 128, 2: 96, 3: 80, 4: 48}
    return Tiles(2 * GROUP_ROWS, columns[ceil_div(head_dim, PANEL)])
