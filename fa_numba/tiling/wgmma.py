"""How the warpgroups of a block share a tile on Hopper's tensor cores (``wgmma``): forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

from fa_numba.checks import one_of
from fa_numba.integers import ceil_div
from fa_numba.options import Features
from fa_numba.tiling.spec import Spec, check_shared, with_threads
from fa_numba.tiling.tiles import Tiles

GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of S that a warpgroup takes
PANEL = 64  # columns of 16-bit elements in 128 bytes
WORK_WORDS = 4  # of a work tile: its number, first row, head, and batch entry with the split
# By the number of consumers: registers of a thread that produces, and of one that consumes.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# By the number of consumers, where a producer also finds where sequences end.
_REGISTERS_WITH_ENDS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
# By the number of consumers, where a producer also looks up pages.
_REGISTERS_WITH_PAGES = {1: (56, 256), 2: (56, 224), 3: (32, 160)}
# The most that an instruction names.
_MOST_REGISTERS = 255
# Registers of a consumer beside its parts of S, P and O; and where blocks share a multiprocessor.
_OTHERS, _OTHERS_SHARED = 32, 20
# What a window takes more where they do, by what the assembler spills.
_WINDOW = 16
# Registers beside a product's sums that a thread must have at launch: with fewer the assembler
# refuses the kernel, whatever a consumer takes later.
_BESIDE_SUMS = 30
# Of one multiprocessor: registers, bytes of shared memory, and of these what any block takes more.
_POOL, _MEMORY, _RESERVED = 65536, 228 * 1024, 1024
MOST_BLOCKS = 3  # of one consumer each, side by side on a multiprocessor
# What FlashAttention-2's forward kernel can do without: turns of the consumer warpgroups, products
# on their way during a softmax, blocks that stay for several row tiles, a counter that hands these
# out, the next one's first product begun with the last of this, and taking the next one late.
WGMMA_MEASURES = dict.fromkeys(
    ("turns", "overlap", "persistent", "counter", "ahead", "late"), ("fa2",)
)
# Parts that the registers which three consumers have to spare are counted in, and how many it takes
# to begin the next row tile's first product ahead: as `spare_taken`, by what the assembler spills.
SPARE, _AHEAD = 4, 2


class Pipeline(NamedTuple):
    """Slots of tiles in shared memory that are filled and emptied in turn: the number of the first
    slot's barrier for full, and of that for empty; how many slots there are; and into how many
    parts, with barriers of their own, each is divided among warpgroups.
    """

    full: int
    empty: int
    slots: int
    groups: int = 1


# Of barriers initialised together: slots, and of each kind the first's number and its arrivals.
Arrivals: TypeAlias = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class ForwardPipelines(NamedTuple):
    """FA-2's forward kernel's: Q, K, V, Q's work tile, and one to say when to take the next."""

    q: Pipeline
    k: Pipeline
    v: Pipeline
    work: Pipeline
    late: Pipeline


def spare_taken(features: Features) -> int:
    """How many of the SPARE parts of three consumers' registers the options take."""
    ends = 2 if features.kv_lens or (features.splits and features.q_lens) else 0
    ends = 3 if features.packed else ends
    more = SPARE + 1 if features.alibi or features.page_size or features.dropout else 0
    return ends + more + (3 if features.window else 0)


@dataclass(frozen=True)
class WgmmaSpec(Spec):
    """A forward kernel on Hopper's tensor cores: a warpgroup that produces, and ``consumers`` that
    take 64 rows of S each, and all columns.

    Thread (ty, tx) of a consumer is place tx of 4 in row ty of 64 (intrinsics/warpgroup.py).
    ``stages`` is how many tiles of K and of V are in shared memory, ``q_stages`` of Q.
    ``ablated`` are those of WGMMA_MEASURES that are left out. ``blocks`` share a multiprocessor.
    """

    dtype: str = "float16"
    stages: int = 2
    q_stages: int = 2
    blocks: int = 1
    ablated: tuple[str, ...] = ()

    key_pieces = (1, 1)
    loading_threads = 1
    row_step = 8
    column_width = 2
    column_step = 8

    @property
    def takes_turns(self) -> bool:
        """Whether consumers begin their products one after the other."""
        return self.consumers > 1 and "turns" not in self.ablated

    @property
    def overlaps(self) -> bool:
        """Whether a consumer's products are on their way during its softmax."""
        return "overlap" not in self.ablated

    @property
    def persistent(self) -> bool:
        """Whether a block stays on its multiprocessor for several row tiles."""
        return "persistent" not in self.ablated

    @property
    def begins_next(self) -> bool:
        """Whether the first product of a block's next row tile is on its way with the last one of
        this: not with one slot of Q, where the next Q is not there yet, nor where options leave
        three consumers no registers for it.
        """
        crowded = self.consumers == 3 and spare_taken(self.features) + _AHEAD > SPARE
        return self.overlaps and self.q_stages > 1 and not crowded and "ahead" not in self.ablated

    @property
    def takes_late(self) -> bool:
        """Whether a block takes its next row tile late, not as soon as a slot of Q is empty."""
        return "late" not in self.ablated

    @property
    def counts_tiles(self) -> bool:
        """Whether a counter hands out row tiles; else a block's are a grid's length apart."""
        return "counter" not in self.ablated

    @property
    def by_group(self) -> bool:
        """Whether a K/V head is a query head // group; else their numbers are the same."""
        return self.grouped and self.tile_heads == 1

    @property
    def consumers(self) -> int:
        """Warpgroups that consume."""
        return self.Br // GROUP_ROWS

    @property
    def consumer_rows(self) -> int:
        """Rows of a tile from a consumer's first to the next one's first."""
        return GROUP_ROWS

    @property
    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    @property
    def registers_at_first(self) -> int:
        """Registers of each thread where blocks share a multiprocessor, before some give away."""
        return _POOL // (self.blocks * self.threads) // 8 * 8

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that produces, and of one that consumes."""
        if self.blocks > 1:
            few = REGISTERS[2][0]
            given = self.registers_at_first * self.threads - few * GROUP
            consuming = given // (GROUP * self.consumers) // 8 * 8
            return few, min(REGISTERS[2][1], consuming)
        ends = self.query_ends or self.key_ends
        if self.features.page_size:
            return _REGISTERS_WITH_PAGES[self.consumers]
        return (_REGISTERS_WITH_ENDS if ends else REGISTERS)[self.consumers]

    @property
    def loads_own_rows(self) -> bool:
        """Whether each consumer's rows of Q are loaded by a thread of its own."""
        return False

    @property
    def column_producers(self) -> int:
        """Threads that load K and V: one, or, of pages, which are many boxes, one each."""
        return 2 if self.features.page_size else 1

    @property
    def plane_panels(self) -> int:
        """Boxes of 64 columns that a row of one plane of Q or K has."""
        return ceil_div(self.head_dim, PANEL)

    @property
    def plane_panels_v(self) -> int:
        """Boxes of 64 columns that a row of one plane of V has."""
        return ceil_div(self.d_v, PANEL)

    @property
    def plane_columns(self) -> tuple[int, int]:
        """Columns of one plane of Q or K, and of V, in whole boxes."""
        return PANEL * self.plane_panels, PANEL * self.plane_panels_v

    @property
    def panels(self) -> int:
        """Boxes of 64 columns that a row of Q or K has, of all its planes."""
        return self.planes * self.plane_panels

    @property
    def panels_v(self) -> int:
        """Boxes of 64 columns that a row of V or O has, of all its planes."""
        return self.planes * self.plane_panels_v

    @property
    def tile_halves(self) -> tuple[int, int, int]:
        """16-bit elements of a slot of Q, which O leaves by way of too, of one of K, and of V."""
        of_q = max(self.panels, self.panels_v)
        return (
            of_q * PANEL * self.Br,
            self.panels * PANEL * self.Bc,
            self.panels_v * PANEL * self.Bc,
        )

    @property
    def tile_registers(self) -> tuple[int, int, int]:
        """Registers of a thread's parts of S, of O, and, in words of two 16 bits, of P."""
        return self.TM * self.TN, self.TM * self.DN * 4, self.p_registers

    @property
    def group_rows(self) -> int:
        """Rows of one head that a consumer takes."""
        return GROUP_ROWS // self.tile_heads

    @property
    def halves(self) -> int:
        """16-bit elements of all tiles."""
        rows, keys, values = self.tile_halves
        return self.q_stages * rows + self.stages * (keys + values)

    @property
    def tile_floats(self) -> int:
        """Elements of a slot of O in float32: FlashAttention-1 alone carries it."""
        return 0

    @property
    def first_barrier(self) -> int:
        """Where the barriers begin, in units of 8 bytes, behind the tiles."""
        return (self.halves // 2 + self.q_stages * self.tile_floats) // 2

    @property
    def barriers(self) -> int:
        return 1 + 3 * self.q_stages + 4 * self.stages

    @property
    def pipelines(self) -> ForwardPipelines:
        """Work tiles share their slots with Q."""
        q, kv, stages = self.q_stages, 1 + 3 * self.q_stages, self.stages
        return ForwardPipelines(
            Pipeline(1 + q, 1 + 2 * q, q),
            Pipeline(kv, kv + 2 * stages, stages),
            Pipeline(kv + stages, kv + 3 * stages, stages),
            Pipeline(1, 1 + 2 * q, q),
            Pipeline(0, 0, 1),
        )

    @property
    def arrivals(self) -> Arrivals:
        """A slot of Q is emptied by every consumer warpgroup, and by each thread that loads K or V,
        which reads the work tile; a slot of K or V by every consumer warp.
        """
        q, k, v, work, late = self.pipelines
        readers, warps = self.consumers + self.column_producers, 4 * self.consumers
        return (
            (1, ((late.full, 1),)),
            (q.slots, ((work.full, 1), (q.full, 1), (q.empty, readers))),
            (k.slots, ((k.full, 1), (v.full, 1), (k.empty, warps), (v.empty, warps))),
        )

    @property
    def first_index(self) -> int:
        """Where the words of work tiles begin, in units of 4 bytes, behind tiles and barriers."""
        return 2 * (self.first_barrier + self.barriers)

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.first_index + self.index_words)

    @property
    def index_words(self) -> int:
        """Words of work tiles, and behind them, with a block mask, one for each slot of K."""
        return WORK_WORDS * self.q_stages + (self.stages if self.slots_name_next else 0)

    @property
    def p_registers(self) -> int:
        """Words of a thread's part of P in 16 bits, of all planes."""
        return self.planes * self.TM * self.TN // 2

    @property
    def slots_name_next(self) -> bool:
        return self.features.sparse

    @property
    def accumulators(self) -> int:
        sums = min(self.planes, 2) * 4 * self.DN  # of O, and in planes of one tile's P V
        own = self.TM * (self.TN + sums) + self.p_registers
        return own + (self.bias_registers if self.reads_bias else 0)

    @property
    def fits_registers(self) -> bool:
        others = _OTHERS
        if self.blocks > 1:
            others = _OTHERS_SHARED + (_WINDOW if self.features.window else 0)
            sums = self.TM * max(self.TN, 4 * self.DN)  # of S or of O
            if sums + _BESIDE_SUMS > self.registers_at_first:
                return False
        return self.accumulators <= min(self.registers[1], _MOST_REGISTERS) - others

    @property
    def min_blocks(self) -> int:
        return self.blocks


_Specialised = TypeVar("_Specialised", bound=WgmmaSpec)


def within_registers(
    kind: type[_Specialised], tiles: Tiles, head_dim: int, **facts: object
) -> _Specialised:
    """The specialisation of a ``kind`` for ``tiles``, with the fields ``facts`` beside the sizes.

    Raises ValueError for other rows than 64, 128 or 192, columns that are no multiple of 16 up to
    256, another number of threads, and what does not fit registers.
    """
    allowed = [GROUP_ROWS * n for n in REGISTERS]
    if tiles.Br not in allowed or tiles.Bc % 16 or tiles.Bc > 256:
        raise ValueError(
            f"on unit 'wgmma', tiles.Br must be {one_of(allowed)}, and tiles.Bc a multiple of 16 "
            f"up to 256, got Br={tiles.Br}, Bc={tiles.Bc}"
        )
    spec = kind(head_dim, tiles.Br, tiles.Bc, 4, tiles.Br // 2, **facts)  # type: ignore[arg-type]
    with_threads([spec], tiles, " on unit 'wgmma'")
    if not spec.fits_registers:
        raise ValueError(
            "tiles must leave each thread enough registers for its parts of S, P and O, got "
            f"Br={tiles.Br}, Bc={tiles.Bc} at head_dim={head_dim} on unit 'wgmma'; choose smaller "
            "tiles"
        )
    return spec


def select_wgmma_spec(
    tiles: Tiles, head_dim: int, shared_limit: int, *, shares: bool = False, **facts: object
) -> WgmmaSpec:
    """The specialisation on Hopper's tensor cores for ``tiles``, with the fields ``facts`` beside
    the sizes; ``shared_limit`` in bytes a block. Two tiles of Q are in memory where they fit, more
    where there are more of K and V. With ``shares`` as many blocks of one consumer share a
    multiprocessor as fit.

    Raises ValueError as ``within_registers`` does, and for what does not fit memory.
    """
    slots = {"stages": tiles.stages, "q_stages": max(2, tiles.stages)}
    spec = within_registers(WgmmaSpec, tiles, head_dim, **slots, **facts)
    if shares and spec.consumers == 1:
        for blocks in range(MOST_BLOCKS, 1, -1):
            several = replace(spec, blocks=blocks)
            if several.fits_registers and blocks * (spec.shared_bytes + _RESERVED) <= _MEMORY:
                return several
    if spec.shared_bytes > shared_limit:
        spec = replace(spec, q_stages=1)
    check_shared(spec, shared_limit, f", stages={tiles.stages}")
    return spec
