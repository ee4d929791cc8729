"""How the warpgroups of a block share a tile in the backward pass on Hopper's tensor cores."""

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
KEY_TILE_WORDS = 9  # of a column tile that one thread finds for its block
# Registers of a consumer beside its parts of the tiles.
_OTHERS = 32


class BackwardPipelines(NamedTuple):
    """A backward kernel's: K and V; Q with L, and, in FA-2, D; dO; and, in FA-1, O; and D."""

    kv: Pipeline
    q: Pipeline
    do: Pipeline
    o: Pipeline
    d: Pipeline


class WidePipelines(NamedTuple):
    """The pipelines of the backward kernel beyond d = 128: K and V; Q with L and D; dO; and S."""

    kv: Pipeline
    q: Pipeline
    do: Pipeline
    s: Pipeline


class DqPipelines(NamedTuple):
    """The pipelines of the kernel that makes dQ alone: Q, dO, K and V."""

    q: Pipeline
    do: Pipeline
    k: Pipeline
    v: Pipeline


@dataclass(frozen=True)
class WgmmaBackwardSpec(GradientSpec):
    """A backward kernel on Hopper's tensor cores: a warpgroup that produces, and two that take 64
    columns of S each, and all rows. ``variant`` is the kernel's row of the table of variants.

    S and dP stand transposed in registers: a thread (ty, tx) of a consumer is place ty of 4 in
    column tx of the tile, and has of it all of that place's rows. dQ needs all columns: dST is in
    shared memory, and each consumer makes 64 x 64 elements of dQ.

    ``splits_group``: several blocks take query heads of one K/V head each, and leave parts of dK
    and dV; with ``splits_rows`` one head's rows each.
    ``chunk_tiles``, where it is not 0: so many column tiles of each head go before the next ones
    (parts/wgmma/key_tiles.py).
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
    # Whether the consumers share columns, and make dV and dK (``WgmmaWideBackwardSpec``).
    wide = False

    @property
    def reasons(self) -> dict[str, str]:
        return {"variant": str(self.variant)}

    @property
    def single_head(self) -> bool:
        """Whether a block takes rows of one query head, as the kernel knows."""
        return not self.grouped if self.algorithm == "fa1" else self.splits_rows

    @property
    def adds_fragments(self) -> bool:
        """Whether dQ is added to a sum in fragments."""
        return self.variant.dq is Dq.FRAGMENTS

    # Whether dS is made of P in 16 bits, which leaves the registers of P in float32 to others.
    rounds_before_ds = False
    # Whether dS goes to shared memory by tiles of 8 x 8 elements.
    stores_tiles = False

    @property
    def consumers(self) -> int:
        return self.variant.consumers

    @property
    def slots(self) -> int:
        """Row tiles of Q and dO in shared memory."""
        return self.variant.slots

    @property
    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that produces, and of one that consumes."""
        return self.variant.registers

    @property
    def panels(self) -> int:
        """Boxes of 64 columns that a row of Q has."""
        return ceil_div(self.head_dim, PANEL)

    @property
    def most_columns(self) -> int:
        """Columns of a row of Q or of V, the larger."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def most_panels(self) -> int:
        """Boxes of 64 columns that the longer row, of Q or of V, has."""
        return max(self.panels, self.of_values.panels)

    @property
    def TM(self) -> int:
        return self.Br // 4

    @property
    def element_steps(self) -> tuple[int, int]:
        return 1, self.TM

    @property
    def column_registers(self) -> int:
        """Registers of a thread's part of dK, and of dV."""
        return self.TN * 4 * self.DN

    @property
    def adds_whole_bias(self) -> bool:
        return self.features.bias

    @property
    def query_columns(self) -> int:
        """Columns of a consumer's 64 rows of dQ: half a panel if V leaves no more registers."""
        return PANEL // self.consumers if self.most_panels > self.panels == 1 else PANEL

    @property
    def query_registers(self) -> int:
        """Registers of a thread's part of dQ."""
        return self.query_columns * GROUP_ROWS // GROUP

    @property
    def query_floats(self) -> int:
        """Elements of a tile of dQ in shared memory, where FlashAttention-1's never is."""
        return 0 if self.algorithm == "fa1" else self.consumers * GROUP_ROWS * self.query_columns

    @property
    def p_registers(self) -> int:
        """Words of a thread's part of P, or dS, in 16 bits."""
        return self.TM * self.TN // 2

    @property
    def slopes_alone(self) -> bool:
        """Whether a function's slopes are made of scores that stay, and nothing beside."""
        return slopes_alone(self.features)

    @property
    def slopes_early(self) -> bool:
        """Whether ``slopes_alone`` are made with P, while dP is on its way."""
        return self.slopes_alone and self.rounds_early and not self.wide

    @property
    def rounds_early(self) -> bool:
        """Whether registers hold P in 16 bits beside P and dP: dV's product begins before dS."""
        features = self.features
        plain = self.algorithm == "fa2" and not features.softcap  # P waits for the cap's slope
        plain = plain and not features.bias and (self.slopes_alone or not features.scores_stay)
        ends = features.packed or (features.q_lens and (features.window or features.alibi))
        return plain and not ends and self.accumulators <= 216

    @property
    def tile_registers(self) -> tuple[int, int, int, int, int]:
        """Registers of a thread's S or dP; of P or dS, in words; of dQ, of dK and of dV."""
        columns = self.column_registers, self.of_values.column_registers
        return self.TM * self.TN, self.p_registers, self.query_registers, *columns

    @property
    def block_columns(self) -> int:
        """Columns of a block of a block mask: of the whole tile, also in one consumer's part."""
        return self.consumers * GROUP_ROWS

    @property
    def part(self) -> WgmmaBackwardSpec:
        """What one consumer has of a tile of S."""
        return replace(self, Bc=GROUP_ROWS)

    @property
    def bias_first(self) -> bool:
        """Whether the bias is added before dP's product begins, in registers that dP takes."""
        few = self.features.bias and not self.features.scores_stay
        return few and ADDED_BESIDE < self.most_columns <= PANEL

    reads_bias = False

    @property
    def reads_state(self) -> bool:
        return super().reads_state and self.algorithm == "fa1"

    @property
    def masked_part(self) -> WgmmaBackwardSpec:
        """The spec of ``scale_and_mask``: of S whose bias went first masks alone, since it is
        scaled; of scores that stay what is done first.
        """
        if self.features.scores_stay:
            return hidden_alone(self.part)
        if not self.bias_first:
            return self.part
        features = replace(self.features, bias=False)
        return replace(self.part, features=features, positive_scale=True)

    @property
    def transposed(self) -> WgmmaSpec:
        """For the forward pass's products Q KT and P V, to make ST = K QT, dPT = V dOT, dV = PT dO
        and dK = dST Q: rows are columns of S.
        """
        return self._transposed(WgmmaSpec)

    def _transposed(self, kind: type[WgmmaSpec]) -> WgmmaSpec:
        own = self.features  # PT is without what is dropped
        features = Features(dropout=own.dropout, precision=own.precision)
        sizes = (self.head_dim, self.Bc, self.Br, 4, self.Bc // 2)
        return kind(*sizes, features, dtype=self.dtype)

    @property
    def drawn_words(self) -> int:
        """Words with a bit for each element of a consumer thread's S: dropout keeps it."""
        return self.TM * self.TN // 32 if self.features.dropout else 0

    @property
    def tile_halves(self) -> tuple[int, int, int]:
        """16-bit elements of a tile of Q or dO, of K or V, and of dS."""
        columns = self.panels * PANEL
        return columns * self.Br, columns * self.Bc, self.Br * self.Bc

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in shared memory Q, dO and dS begin, in 16-bit elements, behind K and V; then dQ,
        and L and D, in floats; and the barriers, in units of 8 bytes.
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
        """Where O begins, as ``offsets``, behind dO."""
        return self.offsets[1] + self.slots * self.of_values.tile_halves[0]

    @property
    def pipelines(self) -> BackwardPipelines:
        """Row tiles share the barriers of an empty slot. FlashAttention-1's have O and D too, and
        their K and V are loaded again in every pass.
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
        """A slot of Q is full when its L is there too, its D, which two warps load, and what
        dropout drops, or, of FlashAttention-1, L, which one does, as two make D of dO and O. Every
        consumer warp empties one of Q, dO and O, every consumer that of K and V.
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
        return 1 + 3 * self.slots + (1 + 2 * self.slots if self.algorithm == "fa1" else 0)

    @property
    def key_tile_words(self) -> tuple[int, int]:
        """Behind the barriers, in words: where the column tile's begin, and how
        many there are: none where all of a batch has the arrays' lengths, and no rows are split.
        Of FlashAttention-1 two a slot for what a block mask says.
        """
        words = KEY_TILE_WORDS if self.features.lengths or self.splits_rows else 0
        if self.algorithm == "fa1":
            words = 2 * self.slots if self.features.sparse else 0
        return 2 * (self.offsets[-1] + self.barriers), words

    @property
    def fill_arrivals(self) -> int:
        """Arrivals that fill a slot of FlashAttention-2's Q: of who loads it, of two warps with L
        and D, and of a thread for each column of S, which draws.
        """
        return 1 + 2 * WARP + (self.Bc if self.features.dropout else 0)

    @property
    def drawing_threads(self) -> int:
        """Consumer threads with columns of their own, two each, of four a row."""
        return 2 * self.Bc

    @property
    def drawn_span(self) -> tuple[int, int]:
        """In words: where the bits of what dropout drops begin, and how many words there are."""
        return sum(self.key_tile_words), self.slots * self.drawing_threads * self.drawn_words

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self.drawn_span)

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dK and dV, of S and dP, and of P in 16 bits."""
        columns = self.column_registers + self.of_values.column_registers
        return columns + 2 * self.TM * self.TN + self.p_registers

    @property
    def fits_registers(self) -> bool:
        return self.accumulators <= self.registers[1] - _OTHERS


_Specialised = TypeVar("_Specialised", "WgmmaBackwardSpec", "WgmmaDqSpec")


def hidden_alone(spec: _Specialised) -> _Specialised:
    """``spec`` without what makes visible scores others than scale Q KT; rows beyond the matrix are
    hidden too, since a function may be no number there.
    """
    added = replace(spec.features, softcap=False, alibi=False, bias=False, q_lens=True)
    features = replace(added, score_mod=None, score_mod_grad=None)
    stays = spec.features.kept_scores_text
    return replace(spec, features=features, positive_scale=False, stays=stays)


@dataclass(frozen=True)
class WgmmaMasksBackwardSpec(WgmmaBackwardSpec):
    """A backward kernel without options, but for masks: each warp adds its own part of dQ."""

    rounds_early = True
    stores_tiles = True

    @property
    def rounds_before_ds(self) -> bool:  # type: ignore[override]
        """Beyond a head dimension of 64, dK and dV leave no registers for P in float32."""
        return self.panels > 1

    @property
    def ds_pipeline(self) -> Pipeline:
        """Full when each consumer warp has stored; stored to anew when both have read."""
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
    """A backward kernel beyond d = 128, where dK and dV of 64 columns fill the registers of a
    warpgroup each: both consumers take all 64 columns and all rows of a tile. One makes S, P and
    dV, the other dP, dS and dK, and S passes through shared memory.
    """

    wide = True
    rounds_early = True

    @property
    def transposed(self) -> WgmmaSpec:
        return self._transposed(_SharedRows)

    @property
    def column_halves(self) -> int:
        """16-bit elements of Kj, by way of which dV leaves, and of Vj, by way of which dK does."""
        return max(self.tile_halves[1], self.of_values.tile_halves[1])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in shared memory Q and dO begin, in 16-bit elements, behind K and V; then S, and L
        and D, in floats; and the barriers, in units of 8 bytes.
        """
        (rows, _, scores), out = self.tile_halves, self.of_values.tile_halves[0]
        at_q = 2 * self.column_halves
        at_s = (at_q + self.slots * (rows + out)) // 2
        at_l = at_s + self.slots * scores
        return at_q, at_q + self.slots * rows, at_s, at_l, (at_l + 2 * self.slots * self.Br) // 2

    @property
    def pipelines(self) -> WidePipelines:  # type: ignore[override]
        """A slot of S is empty when that of Q is."""
        kv, q, do, _, _ = super().pipelines
        return WidePipelines(kv, q, do, Pipeline(1 + 3 * self.slots, q.empty, self.slots))

    @property
    def arrivals(self) -> Arrivals:
        """A slot of S is full when each thread has stored its part."""
        kv, q, do, s = self.pipelines
        of_rows = ((q.full, self.fill_arrivals), (do.full, 1), (q.empty, 4 * self.consumers))
        return (self.slots, ((s.full, GROUP),)), (1, ((kv.full, 1),)), (self.slots, of_rows)

    @property
    def barriers(self) -> int:
        return 1 + 4 * self.slots

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dK or dV, of S and dP, and of dS in 16 bits."""
        columns = max(self.column_registers, self.of_values.column_registers)
        return columns + 2 * self.TM * self.TN + self.p_registers


@dataclass(frozen=True)
class WgmmaPlanesBackwardSpec(WgmmaBackwardSpec):
    """A backward kernel of float32 in two planes of 16 bits: up to d = 64, beyond which neither
    registers nor shared memory hold a tile's. A consumer makes dQ of its own 64 columns alone: dS
    passes through shared memory to nobody else, and has a power of two of its own.
    """

    query_floats = 0
    query_columns = PANEL
    adders = 2  # to dQ: each consumer adds its own columns

    @property
    def plane_panels(self) -> int:
        """Boxes of 64 columns that a row of one plane has."""
        return ceil_div(self.head_dim, PANEL)

    @property
    def plane_columns(self) -> tuple[int, int]:
        return PANEL * self.plane_panels, PANEL * self.of_values.plane_panels

    @property
    def panels(self) -> int:
        """Boxes of 64 columns that a row of all planes has."""
        return self.planes * self.plane_panels

    @property
    def largest_words(self) -> tuple[int, int]:
        """In words: where each consumer warp's largest |dS| lies, and how many there are."""
        return round_up(sum(self.drawn_span), 4), 4 * self.consumers

    @property
    def shared_bytes(self) -> int:
        return 4 * sum(self.largest_words)


@dataclass(frozen=True)
class WgmmaWidePlanesBackwardSpec(WgmmaPlanesBackwardSpec):
    """A backward kernel of planes beyond d = 64, where dK and dV of 64 columns with a tile's sums
    fill a warpgroup's registers each: both consumers take all 64 columns. One makes S, P and dV,
    the other dP, dS and dK, each a panel of dQ. P passes through shared memory, as dQ elsewhere.
    """

    query_floats = GROUP_ROWS * GROUP_ROWS
    adders = 1


class _SharedRows(WgmmaSpec):
    """``WgmmaSpec`` of two consumers that multiply the same rows."""

    consumer_rows = 0
    slots_name_next = False
    consumers = 2


# The layout of shared memory and barriers, by the name of the consumers in a variant's row.
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
    """Return the spec of the variant that a call takes, with its other fields ``facts``.

    ``tiles`` are the caller's, or None. ``shared_limit`` is in bytes per thread block. Raise
    ValueError for other tiles or another number of threads than the variant has, and for a spec
    that does not fit shared memory.
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
    del fields["adds_dq"]  # which the variant says
    kind = _SPECS[variant.consumer]
    spec = kind(Br=Br, Bc=Bc, tx_count=4, ty_count=GROUP_ROWS, **fields)
    check_shared(spec, shared_limit)
    return with_threads([spec], tiles, " in the backward pass on unit 'wgmma'")


@dataclass(frozen=True)
class WgmmaDqSpec(ValuesSpec, WgmmaSpec):
    """The kernel on Hopper's tensor cores that makes dQ alone, without atomic adds: Q outer, as
    the forward pass. A consumer takes 64 rows of Qi and dOi, and of S and dP all columns.
    """

    stays: Text | None = None

    slots_name_next = False

    @property
    def halves(self) -> int:
        """16-bit elements of Qi and dOi, and of the slots of K and V."""
        (rows, keys, _), (out, values, _) = self.tile_halves, self.of_values.tile_halves
        return rows + out + self.stages * (keys + values)

    @property
    def barriers(self) -> int:
        return 2 + 4 * self.stages

    @property
    def masked_part(self) -> WgmmaDqSpec:
        """What is done with S first, where it stays."""
        return hidden_alone(self) if self.features.scores_stay else self

    @property
    def pipelines(self) -> DqPipelines:  # type: ignore[override]
        """Q and dO are loaded once."""
        stages = self.stages
        k = Pipeline(2, 2 + 2 * stages, stages)
        v = Pipeline(2 + stages, 2 + 3 * stages, stages)
        return DqPipelines(Pipeline(0, 0, 1), Pipeline(1, 1, 1), k, v)

    @property
    def arrivals(self) -> Arrivals:
        """Every consumer warp empties a slot of K or V."""
        (q, do, k, v), warps = self.pipelines, 4 * self.consumers
        of_columns = ((k.full, 1), (v.full, 1), (k.empty, warps), (v.empty, warps))
        return (1, ((q.full, 1), (do.full, 1))), (k.slots, of_columns)

    @property
    def shared_bytes(self) -> int:
        return 2 * self.halves + 8 * self.barriers

    @property
    def accumulators(self) -> int:
        """Registers of one thread's parts of dQ, S and dP, and of dS in 16 bits."""
        return self.TM * (2 * self.TN + 4 * self.DN) + self.p_registers


def select_wgmma_dq_spec(head_dim: int, **facts: object) -> WgmmaDqSpec:
    """The specialisation of dQ's kernel with ``wgmma_dq_tiles``, and with ``facts``."""
    tiles = wgmma_dq_tiles(max(head_dim, facts.get("head_dim_v", 0)))  # type: ignore[call-overload]
    return within_registers(WgmmaDqSpec, tiles, head_dim, **facts)


def wgmma_dq_tiles(head_dim: int) -> Tiles:
    """Block sizes of dQ's kernel on Hopper's tensor cores: as many columns as registers hold
    beside dQ, or shared memory beside Q and dO.
    """
    columns = {1: 128, 2: 96, 3: 80, 4: 48}
    return Tiles(2 * GROUP_ROWS, columns[ceil_div(head_dim, PANEL)])
